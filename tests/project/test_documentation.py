"""The documents: their length, their links, the files and flags that they name."""

import argparse
import functools
import re
import shlex
import tomllib

import runs
from cifar10.config import flags
from runs import ROOT

READING_LIST_LINES = 1400


README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs/architecture.md"
# Notes and decisions describe the state of their day.
HISTORY = {ROOT / "dev/LOG.md"}
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/tutorials").glob("*.md")),
]
README_WORDS = 1100


def links(path):
    """Returns where a document's links and pictures lead, outside code."""
    return [target for target, _ in links_with_anchors(path)]


def links_with_anchors(path):
    """Returns the same, each with the heading that it names, if it names one."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    split = [each.partition("#") for each in targets if not re.match(r"[a-z]+:", each)]
    return [
        ((path.parent / file).resolve() if file else path, anchor)
        for file, _, anchor in split
    ]


def anchors(path):
    """Returns the anchors that GitHub and the site give to a document's headings."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def test_readme_is_one_page_and_links_every_document():
    assert len(README.read_text().split()) <= README_WORDS
    assert {*links(README)} >= {ROOT / "docs/decisions", *(ROOT / "docs").glob("*.md")}


def test_links_lead_to_files_and_headings():
    decisions = (ROOT / "docs/decisions").glob("*.md")
    others = (ROOT / name for name in ("CHANGELOG.md", "SECURITY.md"))
    for path in (
        *DOCUMENTS,
        *HISTORY,
        *decisions,
        *others,
        ROOT / "examples/README.md",
        *ROOT.glob("cifar10/*/README.md"),
    ):
        for target, anchor in links_with_anchors(path):
            assert target.exists(), (path.name, target)
            assert not anchor or anchor in anchors(target), (path.name, anchor)


@functools.cache
def flags_of(program):
    """Returns the flags that a program's help lists."""
    script, *words = program
    if script == "-m":
        module, *words = words
        path = ROOT / module.replace(".", "/")
        script = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    done = runs.call(script, *words, "--help")
    assert done.returncode == 0, program
    text = done.stdout
    if "--help_all" in text:
        text += runs.call(script, *words, "--help_all").stdout
    return set(re.findall(r"--[a-z][\w-]*", text))


def commands(path):
    """Returns (program, flags) for each command of ours in a document's code blocks."""
    blocks = re.findall(r"```\w*\n(.*?)```", path.read_text(), re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        ours = line.startswith(("python ", "cifar10 "))
        words = shlex.split(line, comments=True) if ours else []
        if words[:1] == ["cifar10"]:
            words = ["python", "-m", *words]
        if words[1:3] == ["-m", "cifar10"]:
            program = tuple(words[1:4])
        elif words[1:2] == ["-m"]:
            program = tuple(words[1:3])
        else:
            program = tuple(words[1:2])
        if program and program[0] != "-c":
            yield program, [word for word in words if word.startswith("--")]


def test_documented_flags_exist():
    known = {"--help_all"} | flags_of(("train.py",)) | flags_of(("train_multi_gpu.py",))
    for path in DOCUMENTS:
        for program, given in commands(path):
            known |= flags_of(program)
            assert {*given} <= flags_of(program), (path.name, program)
    for path in DOCUMENTS:  # In prose it may be of any program.
        for code in re.findall(r"`(--[^`\n]+)`", path.read_text()):
            assert {*re.findall(r"--[a-z][\w-]*", code)} <= known, (path.name, code)


def calls(config):
    """Returns how many steps each call of a run has."""
    step, counts = 0, []
    while step < config.run.max_steps:
        counts.append(config.steps_of_call(step, config.speed.steps_per_call))
        step += counts[-1]
    return counts


def test_documented_steps_per_call_take_effect():
    """But for a tenth of the steps, which summaries may take."""
    documented = []
    for path in [*DOCUMENTS, *ROOT.glob("*/README.md"), *ROOT.glob("deploy/*")]:
        text = path.read_text().replace("\\\n", " ")
        # What follows the name of a program, and flags alone in prose.
        found = re.findall(r"^python .*?(?= --)(.*)|`(--[^`\n]+)`", text, re.MULTILINE)
        documented += [words for words in map("".join, found) if "_per_call " in words]
    assert documented
    for words in documented:
        arguments = shlex.split(words, comments=True)
        config = flags.from_flags(argparse.ArgumentParser(), arguments)
        alone = calls(config).count(1)
        assert alone <= config.run.max_steps / 10, f"{words}: {alone} steps run alone"


def test_documents_show_the_layers_and_folders_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert "\n".join(["```text", *layers, "```"]) in ARCHITECTURE.read_text()
    _, _, after = README.read_text().partition("\ncifar10/\n")
    tree = after.partition("\nbench")[0]
    shown = re.findall(r"^  (\w+(?:/|\.py)) ", tree, re.MULTILINE)
    there = {
        path.name + "/" * path.is_dir()
        for path in (ROOT / "cifar10").iterdir()
        if not path.name.startswith("__") and path.name != "py.typed"
    }
    assert sorted(shown) == sorted(there)


def test_reading_list_is_short():
    _, _, after = ARCHITECTURE.read_text().partition("<!-- reading list -->")
    listed, end, _ = after.partition("<!-- end of reading list -->")
    assert end
    names = re.findall(r"^\d+\. `([^`]+)`", listed, re.MULTILINE)
    assert 4 <= len(names) <= 6
    lines = [len((ROOT / name).read_text().splitlines()) for name in names]
    assert sum(lines) <= READING_LIST_LINES
