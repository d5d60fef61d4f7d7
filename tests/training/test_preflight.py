"""What is refused before TensorFlow starts."""

import subprocess
import sys

import pytest

import runs
import small_runs
from cifar10.process import entry_point


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch):
    """Fails a test whose program would import TensorFlow."""

    def fail(**_):
        raise AssertionError("TensorFlow would be imported")

    monkeypatch.setattr(entry_point, "import_tensorflow", fail)


def refused(*words):
    done = runs.call(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


def test_a_missing_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise AssertionError('it is not imported')")
    where = ("--train_dir", tmp_path / "run")
    for script in ("train.py", "train_multi_gpu.py"):
        assert "resnet" in refused(script, *where, "--model", "resent")
    assert "mien" in refused("train.py", *where, "--model", "mien:small")
    with pytest.raises(AssertionError, match="TensorFlow"):
        runs.call("train.py", *where, "--model", "mine:small")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert "resnet" in refused("cifar10/__main__.py", "plan", "--model", "resent")


def test_imagenet_weights_are_checked_before_tensorflow(tmp_path):
    """TensorFlow takes the settings of `--deterministic` only as it is imported."""
    program = """
import sys
from cifar10.config.config import Config
from cifar10.process.signals import StopSignals
from cifar10.training import preflight
names = {"model": "applications:MobileNetV2", "initial_weights": "imagenet"}
config = Config(**names, distortions="flip_translate", train_dir=sys.argv[1])
with preflight.locked_run(config, StopSignals()):
    sys.exit("tensorflow" in sys.modules)
"""
    words = [sys.executable, "-c", program, tmp_path / "run"]
    assert subprocess.run(words, cwd=runs.ROOT, check=False).returncode == 0


def commands_on(run):
    """Command lines that read a run, which none of them waits for."""
    where = ("--train_dir", run)
    program = "cifar10/__main__.py"
    return {
        "eval": ("eval.py", "--run_once", *where),
        "export": (program, "export", "--output", "out", *where),
        "predict": (program, "predict", "0.png", *where),
        "replay": (program, "replay", run, "--steps", "1:2"),
        "report": (program, "report", run),
    }


def test_commands_on_a_run_require_a_run(tmp_path):
    for run in (tmp_path / "missing", tmp_path):
        for words in commands_on(run).values():
            assert f"{run} holds no run" in refused(*words)


def test_commands_on_a_run_require_its_model(tmp_path):
    small_runs.describe(run := tmp_path / "run", model="mine:small", parameters=1)
    commands = commands_on(run)
    del commands["report"]  # It says what the run has logged.
    serve = ("cifar10/__main__.py", "serve", "--train_dir", run)
    for words in (*commands.values(), serve):
        assert "--trust_model mine:small" in refused(*words)
        assert "no module mine" in refused(*words, "--trust_model", "mine:small")


def test_commands_on_a_checkpoint_require_a_checkpoint(tmp_path):
    small_runs.describe(run := tmp_path / "run", model="tutorial", parameters=1)
    commands = commands_on(run)
    for words in (commands[name] for name in ("eval", "export", "predict")):
        assert "There is no checkpoint" in refused(*words)
        (folder := run / "checkpoints/step-00000010").mkdir(parents=True)
        assert "--step 9: " in refused(*words, "--step", 9)
        assert "a kept step: 10" in refused(*words, "--step", 9)
        assert "--step best: " in refused(*words, "--step", "best")
        with pytest.raises(AssertionError, match="TensorFlow"):
            runs.call(*words)
        folder.rmdir()


def test_commands_following_a_run_wait_for_it(tmp_path):
    program, where = "cifar10/__main__.py", ("--train_dir", tmp_path)
    for words in (
        ("eval.py",),
        (program, "predict", "0.png", "--follow"),
        (program, "serve"),
    ):
        with pytest.raises(AssertionError, match="TensorFlow"):
            runs.call(*words, *where)
