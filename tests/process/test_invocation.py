"""The commands that messages suggest work where the program was started."""

import re
import sys

import pytest

from cifar10.errors import UsageError
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


def test_a_program_has_arguments_and_a_script_has_flags(started):
    started("ipykernel_launcher.py")
    assert invocation.option_name("max_steps") == "max_steps"
    started(ROOT / "train.py")
    assert invocation.option_name("max_steps") == "--max_steps"


def test_a_run_is_scored_by_a_call_where_only_a_program_has_its_model(started):
    started("mine.py")
    score = invocation.to_score("my runs", "resnet", "cifar10")
    assert score == "python -m cifar10 eval --run_once --train_dir 'my runs'"
    score = invocation.to_score("my runs", "python:mine", "cifar10", 10)
    assert score == "cifar10.evaluate('my runs', step=10, model=...)"


def test_scripts_are_named_beside_them(started):
    started(MODULE, cwd=ROOT)
    assert invocation.command("eval") == "python -m cifar10 eval"
    for first in ("train.py", "mine.py", ""):
        started(first, cwd=ROOT)
        assert invocation.command("eval") == "python eval.py"
        assert invocation.command("doctor") == "python -m cifar10 doctor"
        with pytest.raises(UsageError, match=re.escape("-e '.[serve]'")):
            invocation.require_packages("serve", "no_such_package")
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
    install = re.escape("pip install 'cifar10-multi-gpu[serve]'")
    with pytest.raises(UsageError, match=install):
        invocation.require_packages("serve", "no_such_package")
