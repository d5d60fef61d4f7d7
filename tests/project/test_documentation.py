"""The documents: their length, their links, the files and flags that they name."""

import argparse
import functools
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cifar10.config import flags

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs/architecture.md"
# Notes and decisions describe the state of their day.
HISTORY = {ROOT / "docs/lab-notes.md"}
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    *sorted(set((ROOT / "docs").glob("*.md")) - HISTORY),
]
README_WORDS = 1100
READING_LIST_LINES = 1550


def links(path):
    """Returns the targets of a document's links and pictures, code left out."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def relative(targets):
    return [
        target.partition("#")[0]
        for target in targets
        if not re.match(r"[a-z]+:|#", target)
    ]


def reading_list():
    """Returns the files of architecture.md's reading list, in its order."""
    _, _, after = ARCHITECTURE.read_text().partition("<!-- reading list -->")
    listed, end, _ = after.partition("<!-- end of reading list -->")
    assert end
    return [
        ROOT / name for name in re.findall(r"^\d+\. `([^`]+)`", listed, re.MULTILINE)
    ]


def test_readme_is_one_page():
    assert len(README.read_text().split()) <= README_WORDS


@pytest.mark.parametrize("path", [*DOCUMENTS, *HISTORY], ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path):
    missing = [
        target
        for target in relative(links(path))
        if not (path.parent / target).exists()
    ]
    assert not missing


def test_readme_links_every_document():
    linked = {(ROOT / target).resolve() for target in relative(links(README))}
    assert linked >= {ROOT / "docs/decisions", *(ROOT / "docs").glob("*.md")}


def test_picture_of_towers_is_what_its_script_draws(tmp_path):
    script, drawn = tmp_path / "draw_towers.py", tmp_path / "towers.svg"
    script.write_bytes((ROOT / "docs/images/draw_towers.py").read_bytes())
    subprocess.run([sys.executable, script], check=True, capture_output=True)
    assert drawn.read_bytes() == (ROOT / "docs/images/towers.svg").read_bytes()


def test_reading_list_is_short():
    files = reading_list()
    assert 4 <= len(files) <= 6
    assert sum(len(file.read_text().splitlines()) for file in files) <= (
        READING_LIST_LINES
    )


def test_documents_show_the_layers_and_folders_that_there_are():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert "\n".join(["```", *layers, "```"]) in ARCHITECTURE.read_text()
    _, _, after = README.read_text().partition("\ncifar10/\n")
    shown = re.findall(
        r"^  (\w+(?:/|\.py)) ", after.partition("\nbench")[0], re.MULTILINE
    )
    there = {
        path.name + "/" * path.is_dir()
        for path in (ROOT / "cifar10").iterdir()
        if not path.name.startswith("__") and path.name != "py.typed"
    }
    assert sorted(shown) == sorted(there)


@functools.cache
def flags_of(program):
    """Returns the flags that a program's help lists."""

    def ask(flag):
        return subprocess.run(
            [sys.executable, *program, flag],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    text = ask("--help")
    if "--help_all" in text:
        text += ask("--help_all")
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_have_the_flags_that_documents_show(path):
    unknown = [
        (program, flag)
        for program, flags in commands(path)
        for flag in flags
        if flag not in flags_of(program)
    ]
    assert not unknown


def calls(config):
    """Returns how many steps each call of a training has."""
    step, counts = 0, []
    while step < config.max_steps:
        counts.append(config.steps_of_call(step))
        step += counts[-1]
    return counts


def test_documented_calls_of_several_steps_are_taken():
    """But for a tenth of the steps, which summaries may take."""
    documented = []
    for path in [*DOCUMENTS, *ROOT.glob("*/README.md"), *ROOT.glob("deploy/*")]:
        text = path.read_text().replace("\\\n", " ")
        # What follows the name of a program, and flags alone in prose.
        found = re.findall(r"^python .*?(?= --)(.*)|`(--[^`\n]+)`", text, re.MULTILINE)
        documented += [words for words in map("".join, found) if "_per_call " in words]
    assert len(documented) >= 4
    for words in documented:
        arguments = shlex.split(words, comments=True)
        config = flags.from_flags(argparse.ArgumentParser(), arguments)
        alone = calls(config).count(1)
        assert alone <= config.max_steps / 10, f"{words}: {alone} steps run alone"


def test_flags_in_prose_exist():
    programs = {("train_multi_gpu.py",), ("train.py",)} | {
        program for path in DOCUMENTS for program, _ in commands(path)
    }
    known = {"--help_all"}.union(*map(flags_of, programs))
    unknown = {
        (path.name, flag)
        for path in DOCUMENTS
        for code in re.findall(r"`(--[^`\n]+)`", path.read_text())
        for flag in re.findall(r"--[a-z][\w-]*", code)
        if flag not in known
    }
    assert not unknown
