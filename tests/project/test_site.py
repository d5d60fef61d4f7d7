"""The documentation site: it builds, its links lead somewhere, its code runs."""

import html.parser
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib

import numpy as np
import pytest
from PIL import Image

import cifar10
import runs
from cifar10 import Config
from cifar10.config import fields
from cifar10.config.augmentation import PARTS
from cifar10.config.options import options
from runs import ROOT

DOCS = ROOT / "docs"
# The log is no part of the site.
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *(ROOT / "SECURITY.md", ROOT / "examples/README.md"),
    *sorted(DOCS.rglob("*.md")),
]
# `sh` is what a reader pastes, `text` what a program prints; Sphinx reads what is in
# braces.
LANGUAGES = {"sh", "text", "python", "toml", "nginx"}
# Programs of others, which only clusters and containers have, or which need a network.
FOREIGN = {
    *("curl", "docker", "export", "kill", "kubectl", "sbatch", "source", "sudo"),
    *("ssh-keygen", "tensorboard", "unshare", "uv"),
}


def blocks(path, *languages):
    """Returns the code blocks of a page that are marked as one of these languages."""
    fences = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    found = fences.findall(path.read_text())
    return [textwrap.dedent(code) for _, name, code in found if name in languages]


def commands(path):
    """Returns the words of each command in a page's `sh` blocks."""
    found = []
    for code in blocks(path, "sh"):
        pending = ""
        for line in code.replace("\\\n", " ").splitlines(keepends=True):
            pending += line
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # A quotation goes on in the next line.
                continue
            found += [words] if words else []
            pending = ""
        assert not pending, pending
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_are_marked(path):
    """As something that is checked, or as output."""
    marks = re.findall(r"^ *```+([^\n`]*)$", path.read_text(), re.MULTILINE)[::2]
    unknown = {mark for mark in marks if mark not in LANGUAGES and mark[:1] != "{"}
    assert not unknown


def test_pasted_programs_and_targets_exist():
    """test_documentation.py checks the flags of ours."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    for path in PAGES:
        for first, *words in commands(path):
            if first == "make":
                assert {word for word in words if "=" not in word} <= {*targets}
            elif first == "pip":
                named = re.findall(r"\[([\w,-]+)\]", " ".join(words))
                assert {*",".join(named).split(",")} <= {*extras}, path
            elif first == "python" and words[0] != "-m":
                assert (ROOT / words[0]).is_file(), path
            else:
                assert first in {"python", "cifar10", *FOREIGN}, (path, first)


def test_recipes_on_the_site_are_valid(tmp_path):
    recipe = tmp_path / "recipe.toml"
    tables = [code for path in PAGES for code in blocks(path, "toml")]
    assert len(tables) > 4
    for table in tables:
        is_staged = "[[stages]]" in table
        # A line before the first table.
        recipe.write_text('schedule = "linear"\n' * is_staged + table)
        assert Config(recipe=str(recipe))


@pytest.mark.slow
def test_python_on_the_site_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class MyHook:
        def on_step(self, step):
            pass

    x = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), np.uint8)
    y = np.arange(64) % 10
    known = {"x": x, "y": y, "x_test": x, "y_test": y, "images": x, "MyHook": MyHook}
    names = [f"{of}/seed-{n}" for of in ("plain", "smooth") for n in range(5)]
    rows = [f"{name},0.{70 + n}" for n, name in enumerate(names)]
    (tmp_path / "runs.csv").write_text("\n".join(["name,precision @ 1", *rows]))
    listed = [{"name": "one", "state": "training", "changed": 1e9, "event": None}]
    stopped = {"step": 5, "time": 1e9, "event": "stop", "what": "a loss is nan"}
    listed.append({**listed[0], "name": 'a "b"', "event": stopped})
    (tmp_path / "runs.json").write_text(json.dumps(listed))
    for path in PAGES:  # The README's model is that of the others.
        for code in blocks(path, "python"):
            if "model.onnx" in code:  # tests/deploy/test_onnx_server.py runs it.
                continue
            short = re.sub(r"max_steps=\d+", "max_steps=2, batch_size=8", code)
            exec(compile(short, str(path), "exec"), known)  # noqa: S102
    assert known["record"].step == 2
    assert known["logits"].shape == (64, 10)


@pytest.mark.slow
def test_the_profiling_hook_marks_each_step(tmp_path, stand_in_dir):
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (code,) = blocks(DOCS / "speed.md", "python")
    known = {}
    exec(code, known)  # noqa: S102
    options = {"data": "synthetic", "data_dir": str(stand_in_dir), "model": runs.SMALL}
    options |= {"train_dir": str(tmp_path / "run"), "max_steps": 8}
    hook = known["Profile"](str(tmp_path / "profile"), first=3)
    cifar10.train(Config(batch_size=8, **options), hooks=[hook])
    (path,) = (tmp_path / "profile").rglob("*.xplane.pb")
    planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    marked = []
    for plane in planes:
        names = {key: one.name for key, one in plane.stat_metadata.items()}
        for event in (event for line in plane.lines for event in line.events):
            if plane.event_metadata[event.metadata_id].name == "train":
                found = {names[stat.metadata_id]: stat for stat in event.stats}
                assert found["_r"].int64_value == 1
                marked.append(found["step_num"].int64_value)
    assert marked == [3, 4, 5, 6, 7]


# Appended to a pasted command, so that it takes seconds.
SHORT = {
    "train.py": "--max_steps 12 --eval_steps 6 --batch_size 8 --image_size 32",
    "train_multi_gpu.py": "--max_steps 4 --batch_size 8 --data synthetic",
    "examples/one_page.py": "--max_steps 2",
    "eval.py": "--num_examples 4",
}


@pytest.mark.slow
def test_tutorials_work_as_pasted(tmp_path, stand_in_dir):
    """Each command after the other, in one folder, as a reader does."""
    data = {"CIFAR10_DATA_DIR": str(stand_in_dir)}
    for name in ("train.py", "train_multi_gpu.py", "eval.py", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"photos/{label}/{number}.png")
    (model,) = blocks(ROOT / "README.md", "python")
    (tmp_path / "my_models.py").write_text(model)
    ran = []
    for page in ("README.md", "docs/own-pictures.md", "docs/tutorials/one-page.md"):
        for first, *words in commands(ROOT / page):
            program = words[0] if first == "python" else ""
            endless = "serve" in words or words == ["eval.py"] or len(words) < 2
            without_place = program.startswith("train") and "--train_dir" not in words
            if not program or endless or without_place:
                continue
            short = "" if "--eval" in words else SHORT.get(program, "")
            done = runs.run(*words, *short.split(), cwd=tmp_path, env=data)
            assert done.returncode == 0, (words, done.stdout + done.stderr)
            ran.append(program)
    assert {*ran} == {"-m", *SHORT}


class Page(html.parser.HTMLParser):
    """The ids, links and code blocks of a built page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.languages = set(), [], set()
        self.feed(path.read_text())

    def handle_starttag(self, _, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id"))
        self.links += [values[name] for name in ("href", "src") if values.get(name)]
        self.languages |= {
            *re.findall(r"highlight-(\S+) notranslate", values.get("class") or "")
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", folder],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_links_on_the_site_lead_to_files_and_anchors(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert len(pages) > 30
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (path.parent / target.partition("?")[0]).resolve()
            there = there if target else path
            assert there.is_file(), (path, link)
            if anchor and there in pages:
                assert anchor in pages[there].ids, (path, link)
        assert page.languages <= LANGUAGES | {"default"}, path


@pytest.mark.slow
def test_site_names_every_flag_augmentation_and_public_name(site):
    flags = (site / "reference/flags.html").read_text()
    assert all(f">{name}<" in flags for name in PARTS)
    for name in options(fields.ALL):
        assert f'"cmdoption-{name}"' in flags or f'"cmdoption-arg-{name}"' in flags
    python = Page(site / "reference/python.html")
    assert {f"cifar10.{name}" for name in cifar10.__all__} <= python.ids
    assert "max_steps" in (site / "searchindex.js").read_text()
