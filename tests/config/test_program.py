"""The commands that messages suggest work where the program was started."""

import builtins
import sys
from pathlib import Path

import pytest

from cifar10.config import program
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.run_directory import claim
from cifar10.run_directory.gains import Gains
from cifar10.tools import packages
from cifar10.training import early, settings
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


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Takes the scripts away from beside the package."""
    monkeypatch.setattr(program, "_CHECKOUT", tmp_path / "site-packages")


@pytest.mark.parametrize(
    ("first", "name"),
    [
        ("sub/train.py", "train.py"),
        (MODULE, "python -m cifar10"),
        (COMMAND, "cifar10"),
        ("cifar10", "cifar10"),
        ("-c", "-c"),
        ("", ""),
    ],
)
def test_name_of_the_program(started, first, name):
    started(first, "train")
    assert program.name() == name


@pytest.mark.parametrize(
    ("first", "pasted", "spawned"),
    [
        (
            "my scripts/train.py",
            "python 'my scripts/train.py'",
            ["my scripts/train.py"],
        ),
        (MODULE, "python -m cifar10", ["-m", "cifar10"]),
        (COMMAND, "cifar10", [COMMAND]),
    ],
)
def test_the_same_program_once_more(first, pasted, spawned):
    words = [first, "train", "--data", "a b"]
    assert program.to_paste(words) == f"{pasted} train --data 'a b'"
    again = [sys.executable, *spawned, "train", "--data", "a b"]
    assert program.to_spawn(words) == again


@pytest.mark.parametrize("first", [ROOT / "train.py", MODULE, "mine.py", "", "-c"])
def test_in_a_checkout_its_scripts_are_named(started, first):
    started(first, cwd=ROOT)
    assert program.of("eval") == "python eval.py"
    assert program.of("train") == "python train.py"
    assert program.of("doctor") == "python -m cifar10 doctor"
    assert program.to_install("serve").endswith(" -e '.[serve]'")


def test_elsewhere_a_script_names_those_beside_it(started):
    started(ROOT / "train.py")
    assert program.of("eval") == f"python {ROOT}/eval.py"


@pytest.mark.parametrize("first", [MODULE, "mine.py", "", "-c"])
def test_elsewhere_a_module_or_a_program_of_the_users_names_the_module(started, first):
    started(first)
    assert program.of("eval") == "python -m cifar10 eval"


def test_the_command_names_itself_even_in_a_checkout(started):
    started(COMMAND, "data", "photos", cwd=ROOT)
    assert program.of("train") == "cifar10 train"
    assert program.of("doctor") == "cifar10 doctor"


@pytest.mark.parametrize(
    ("config", "score"),
    [
        (Config(train_dir="a", max_steps=20), "cifar10.evaluate('{run}')"),
        (
            Config(
                train_dir="a", max_steps=20, model="python:net", data="python:arrays"
            ),
            "cifar10.evaluate('{run}', model=..., data=...)",
        ),
    ],
)
def test_a_users_program_is_told_what_works_in_python(started, config, score):
    started("mine.py")
    first, longer, anew, last = early.nothing_to_do(config, 20, Gains()).splitlines()
    assert first == "Nothing to do: the run is at step 20, and max_steps is 20."
    assert longer.endswith(" cifar10.Config(..., max_steps=40)")
    assert anew.endswith(" cifar10.Config(..., fresh=True)")
    assert last.endswith(" " + score.format(run=Path.cwd() / "a"))
    done = settings.last_lines(Path.cwd() / "a", config.model, config.data)
    assert "  score it:  " + score.format(run="a") in done
    assert done.endswith("  watch it:  tensorboard --logdir a")


def test_what_a_notebook_is_told_can_be_pasted_into_a_cell(started, monkeypatch):
    started("/venv/lib/site-packages/ipykernel_launcher.py", "-f", "x.json")
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    done = settings.last_lines(Path.cwd() / "a", "tutorial", "auto")
    assert done.endswith("%load_ext tensorboard\n             %tensorboard --logdir a")
    assert program.of("doctor") == "!python -m cifar10 doctor"
    assert program.to_install("serve").startswith("%pip install ")


@pytest.mark.usefixtures("installed")
def test_scripts_of_somebody_else_are_not_named(started, tmp_path):
    for name in ("train.py", "eval.py", "pyproject.toml"):
        (tmp_path / name).touch()
    started("train.py")
    assert program.of("eval") == "python -m cifar10 eval"
    assert program.to_install("serve") == "pip install 'cifar10-multi-gpu[serve]'"
    with pytest.raises(UsageError, match=r"with pip install 'cifar10-multi-gpu\[x\]'"):
        packages.require("x", "no_such_package")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("first", "start"), [(COMMAND, "cifar10"), (MODULE, "python -m cifar10")]
)
def test_a_training_of_an_installed_package_says_what_works(started, first, start):
    started(first, "train", "--train_dir", "a", "--fresh")
    done = settings.last_lines(Path.cwd() / "a", "tutorial", "auto")
    assert f"  score it:  {start} eval --run_once --train_dir a\n" in done
    config = Config(train_dir="a", max_steps=20)
    _, longer, anew, score = early.nothing_to_do(config, 20, Gains()).splitlines()
    run = Path.cwd() / "a"
    assert longer.endswith(f" {start} train --resume {run} --max_steps 40")
    assert anew.endswith(f" {start} train --train_dir a --fresh")
    assert score.endswith(f" {start} eval --run_once --train_dir {run}")
    assert claim.resuming_command(run, {"towers": 4}) == f"{start} train --resume {run}"
    assert claim.resuming_command(run, {"towers": 4, "workers": 2}) is None
