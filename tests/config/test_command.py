"""The command `cifar10`, which is `python -m cifar10`: trainings and scores by it."""

import re
import tomllib
from importlib import metadata

import pytest

import runs
from cifar10 import __main__ as command

PROGRAM = "cifar10/__main__.py"


def test_pip_makes_the_command_of_what_python_runs():
    project = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]
    (scripts,) = project["scripts"].items()
    assert scripts == ("cifar10", "cifar10.__main__:run")
    assert callable(command.run)


def test_help_names_every_command_as_the_program_was_started(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/venv/bin/cifar10", "--help"])
    with pytest.raises(SystemExit) as ended:
        command.run()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown.startswith("usage: cifar10 [-h] [--version] COMMAND")
    assert "python -m" not in shown
    examples = set(re.findall(r"^    cifar10 ([\w-]+)", shown, re.MULTILINE))
    listed = set(re.findall(r"^    ([\w-]+)(?:  |$)", shown, re.MULTILINE))
    folders = (runs.ROOT / "cifar10" / "tools").glob("*/command.py")
    names = {path.parent.name.replace("_", "-") for path in folders}
    assert examples == listed == names


@pytest.mark.parametrize("name", ["train", "eval", "serve"])
def test_help_of_a_command_names_the_program(monkeypatch, capsys, name):
    monkeypatch.setattr("sys.argv", ["/venv/bin/cifar10", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        command.run()
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"\n    cifar10 {name} " in shown
    assert "python" not in shown
    if name == "train":
        assert shown.endswith(" more flags, by subject: cifar10 train --help_all\n")


def test_version_is_that_of_the_installed_package(monkeypatch):
    installed = metadata.version("cifar10-multi-gpu")
    done = runs.call(PROGRAM, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"cifar10-multi-gpu {installed} (sources ")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    done = runs.call(PROGRAM, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith("cifar10-multi-gpu not installed (sources ")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "usage: "),
        (
            ["tarin"],
            "tarin: there is no such command. Did you mean train? It is one of",
        ),
        (["zzz"], "zzz: there is no such command. It is one of train, eval, "),
        (["--versoin"], "--versoin: there is no such flag. Did you mean --version?"),
        (["train", "--learning_rat", "1"], "Did you mean --learning_rate?"),
        (["train", "--num_gpus", "0"], "--num_gpus 0"),
        (
            ["eval", "--run_onec"],
            "--run_onec: there is no such flag. Did you mean --run",
        ),
        (
            ["plan", "--modle=resnet", "3"],
            "cifar10 plan: error: --modle=resnet 3: ther",
        ),
        (
            ["plan", "--modle=resnet", "3"],
            "Did you mean --model? python -m cifar10 pla",
        ),
        (
            ["plan", "--model", "resent"],
            "such model. Did you mean resnet? Known models",
        ),
        (
            ["plan", "--recipe", "tutorail"],
            "such file. Did you mean tutorial? Known ar",
        ),
        (
            ["plan", "--optimizer", "adan"],
            "such optimizer. Did you mean adam? It is on",
        ),
        (["plan", "--data", "cifar01"], "file or folder. Did you mean cifar10? It is "),
    ],
)
def test_what_there_is_not_is_refused(words, part):
    done = runs.call(PROGRAM, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_it_trains_as_the_script_and_scores_the_same(tmp_path, stand_in_dir):
    ends, scores = [], []
    for name, train, score in (
        ("script", ["train_multi_gpu.py"], ["eval.py"]),
        ("command", [PROGRAM, "train"], [PROGRAM, "eval"]),
    ):
        train_dir = tmp_path / name
        flags = runs.training_flags(train_dir, stand_in_dir, max_steps=4, num_gpus=2)
        done = runs.call(*train, "--deterministic", *flags)
        assert done.returncode == 0, done.stderr
        folder = train_dir / "checkpoints" / "step-00000004"
        ends.append([path.read_bytes() for path in sorted(folder.glob("state*"))])
        words = ["--run_once", "--num_examples", 100, "--train_dir", train_dir]
        done = runs.call(*score, *words)
        assert done.returncode == 0, done.stderr
        scores.append(re.search(r"precision @ 1 = \S+", done.stdout)[0])
    assert ends[0] == ends[1]
    assert scores[0] == scores[1]
