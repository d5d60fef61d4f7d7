"""The commands that messages suggest work where the program was started."""

import builtins
import sys

import pytest

from cifar10.process import invocation
from runs import ROOT

MODULE = "/venv/lib/site-packages/cifar10/__main__.py"
COMMAND = "/venv/bin/cifar10"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Pretends that the program was started as `words`, in an empty folder or `cwd`."""

    def start(*words, cwd=tmp_path):
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        monkeypatch.chdir(cwd)

    return start


@pytest.mark.parametrize(
    ("first", "name", "pasted", "spawned"),
    [
        ("my scripts/train.py", "train.py", "python 'my scripts/train.py'", None),
        (MODULE, "python -m cifar10", "python -m cifar10", ["-m", "cifar10"]),
        (COMMAND, "cifar10", "cifar10", None),
    ],
)
def test_program_can_be_started_once_more(started, first, name, pasted, spawned):
    words = [first, "train", "--data", "a b"]
    started(*words)
    assert invocation.program_name() == name
    assert invocation.to_paste(words) == f"{pasted} train --data 'a b'"
    again = [sys.executable, *(spawned or [first]), "train", "--data", "a b"]
    assert invocation.to_spawn(words) == again


def test_a_notebook_is_given_lines_to_paste_into_a_cell(started, monkeypatch):
    started("ipykernel_launcher.py")
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    assert invocation.command("doctor") == "!python -m cifar10 doctor"
    assert invocation.to_install("serve").startswith("%pip install ")
    watch = invocation.to_watch("my runs").splitlines()
    assert watch == ["%load_ext tensorboard", "%tensorboard --logdir 'my runs'"]
    assert invocation.option_name("max_steps") == "max_steps"
    started(ROOT / "train.py")
    assert invocation.option_name("max_steps") == "--max_steps"


def test_scripts_are_named_in_a_checkout_and_beside_them(started):
    for first in (ROOT / "train.py", MODULE, "mine.py", ""):
        started(first, cwd=ROOT)
        assert invocation.command("eval") == "python eval.py"
        assert invocation.command("doctor") == "python -m cifar10 doctor"
        assert invocation.to_install("serve").endswith(" -e '.[serve]'")
    started(ROOT / "train.py")
    assert invocation.command("eval") == f"python {ROOT}/eval.py"
    started(COMMAND, "data", "photos", cwd=ROOT)
    assert invocation.command("train") == "cifar10 train"


def test_scripts_of_somebody_else_are_not_named(started, tmp_path):
    for name in ("train.py", "eval.py", "pyproject.toml"):
        (tmp_path / name).touch()
    for first in ("train.py", "mine.py", MODULE, ""):
        started(first)
        assert invocation.command("eval") == "python -m cifar10 eval"
    assert invocation.to_install("serve") == "pip install 'cifar10-multi-gpu[serve]'"
