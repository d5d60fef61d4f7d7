"""The commands that messages suggest work where the program was started."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cifar10.errors import UsageError
from cifar10.process import invocation
from runs import ROOT, call

MODULE = "/venv/lib/site-packages/cifar10/__main__.py"
COMMAND = "/venv/bin/cifar10"


@pytest.fixture
def started(monkeypatch):
    """Pretends that the program was started as `words`."""

    def start(*words):
        monkeypatch.setattr(sys, "argv", list(map(str, words)))

    return start


@pytest.mark.parametrize(
    ("first", "name", "resumed", "spawned"),
    [
        ("my scripts/train.py", "train.py", "python 'my scripts/train.py'", None),
        (MODULE, "python -m cifar10", "python -m cifar10 train", ["-m", "cifar10"]),
        (COMMAND, "cifar10", "cifar10 train", None),
    ],
)
def test_a_program_can_be_started_again(started, first, name, resumed, spawned):
    words = [first, "train", "--data", "a b"]
    started(*words)
    assert invocation.program_name() == name
    again = [sys.executable, *(spawned or [first]), "train", "--data", "a b"]
    assert invocation.to_spawn(words) == again
    resume = invocation.to_train(1, resume="my runs", max_steps=9)
    assert resume == f"{resumed} --resume 'my runs' --max_steps 9"


def test_a_run_on_several_machines_or_of_a_program_has_no_command(started):
    started(ROOT / "train.py")
    assert invocation.to_train(2, resume="run") is None
    started("ipykernel_launcher.py")
    assert invocation.to_train(1, resume="run") is None


def test_commands_score_the_newest_checkpoint(started):
    started("mine.py")
    score = invocation.to_score("my runs", "tutorial", "cifar10")
    assert score == "python -m cifar10 eval --run_once --train_dir 'my runs'"
    # No command has this function.
    score = invocation.to_score("run", "python:small", "cifar10")
    assert score == "cifar10.evaluate('run', model=...)"


def test_commands_name_the_installed_program_or_the_module(started):
    for first in (MODULE, "train.py", "mine.py", ""):
        started(first)
        assert invocation.command("eval") == "python -m cifar10 eval"
    started(COMMAND, "data", "photos")
    assert invocation.command("train") == "cifar10 train"


def test_a_package_that_is_not_installed_still_has_a_version(monkeypatch):
    monkeypatch.setattr(invocation, "DISTRIBUTION", "no-such-distribution")
    installed, digest = "not installed", r"\(sources [0-9a-f]{8}\)"
    assert re.fullmatch(f"{installed} {digest}", invocation.package_version())


def test_a_missing_module_is_named_with_its_place(started, tmp_path, monkeypatch):
    """A script's own folder is not where the next command looks."""
    started(ROOT / "train.py")
    monkeypatch.setattr(invocation.metadata, "distributions", lambda **_: iter(()))
    monkeypatch.chdir(ROOT)
    assert invocation.command("eval") == "python -m cifar10 eval"
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        ["/bin/bash", "-c", f"{invocation.command('doctor')} --help"],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    assert b"finds out" in done.stdout.lower()


def test_missing_packages_are_named_with_their_extra():
    with pytest.raises(UsageError, match="no_such_package") as refused:
        invocation.require_packages("serve", "sys", "no_such_package")
    assert "pip install 'cifar10-multi-gpu[serve]'" in str(refused.value)
    assert "sys" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("report", "report"),
        ("data photos --train_dir run", "report"),
        ("serve", "serve"),
    ],
)
def test_a_command_without_its_packages_names_their_extra(words, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    done = call("cifar10/__main__.py", *words.split())
    assert (done.returncode, f"cifar10-multi-gpu[{extra}]" in done.stderr) == (2, True)
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = content["project"]["optional-dependencies"][extra]
    has = {re.match(r"[\w-]+", line)[0] for line in lines}
    (missing,) = re.findall(r"needs (.*), which", done.stderr)
    assert {*missing.split(" and ")} <= has
