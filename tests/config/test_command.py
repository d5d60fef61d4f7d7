"""The command `cifar10`, which is `python -m cifar10`: its help and its version."""

import re
from importlib import metadata

import pytest

import runs
from cifar10 import __main__ as command

PROGRAM = "cifar10/__main__.py"


@pytest.fixture
def help_of(monkeypatch, capsys):
    """Returns what the installed command prints when it is asked for help."""

    def help_of(*words):
        monkeypatch.setattr("sys.argv", ["/venv/bin/cifar10", *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            command.run()
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "python" not in shown, "it was started as cifar10"
        return shown

    return help_of


def test_help_names_every_command(help_of):
    listed = re.findall(r"^    ([\w-]+)(?:  |$)", help_of(), re.MULTILINE)
    assert listed == [*command._COMMANDS]
    for name in ("train", "eval"):
        assert f"\n    cifar10 {name} " in help_of(name)


def test_the_program_lists_all_commands_if_none_is_given():
    done = runs.call(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert all(f"\n    {name} " in done.stdout for name in command._COMMANDS)


def test_the_version_flag_shows_the_installed_version():
    installed = metadata.version("cifar10-multi-gpu")
    done = runs.call(PROGRAM, "--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"cifar10-multi-gpu {installed} (sources ")


def test_an_unknown_command_is_refused():
    done = runs.call(PROGRAM, "tarin")
    assert done.returncode == 2
    assert "'tarin'" in done.stderr


def test_programs_start_without_docstrings():
    done = runs.run_anew("-OO", "train.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "step at which the training run ends" in " ".join(done.stdout.split())
