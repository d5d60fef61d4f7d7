"""What is refused before TensorFlow starts, and what is known of a finished run."""

import pytest
import tensorflow as tf

import runs
import small_runs
from cifar10.process import entry_point
from cifar10.run_directory import checkpoints


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch):
    """Fails a test whose program would import TensorFlow."""

    def fail(**_):
        raise AssertionError("TensorFlow would be imported")

    monkeypatch.setattr(entry_point, "import_tensorflow", fail)


@pytest.fixture
def run(tmp_path):
    """The directory of a run of train.py that has finished at step 20."""
    run = tmp_path / "run"
    known = {"model": "tutorial", "data": "cifar10", "data_dir": str(tmp_path)}
    known |= {"towers": 1, "workers": 1, "parameters": 1}
    small_runs.describe(run, max_steps=20, train_dir=str(run), **known)
    facts = {"seed": 0, "global_batch_size": 128}
    values = {"value": tf.Variable(1.0)}
    checkpoints.save(run / "checkpoints", values, step=20, facts=facts)
    return run


def refused(*words):
    done = runs.call(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


def test_a_model_that_does_not_exist(tmp_path, monkeypatch):
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


def test_another_configuration_as_far_as_the_flags_say_it(run):
    for flag, value, differs in (
        ("--batch_size", "64", "global_batch_size"),
        ("--recipe", "fast", "optimizer"),
    ):
        said = refused("train.py", "--train_dir", run, flag, value)
        assert f"{differs}: " in said
        assert f"--resume {run} " in said
    with pytest.raises(AssertionError, match="TensorFlow"):
        # How many GPUs there are decides on the global batch.
        runs.call("train_multi_gpu.py", "--train_dir", run, "--batch_size", 64)


def test_a_finished_run_leads_on_unless_its_last_checkpoint_is_damaged(run):
    words = ("train.py", "--train_dir", f"{run}/", "--max_steps", 20)
    done = runs.call(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--resume {run} --max_steps 40\n" in done.stdout
    for file in (run / "checkpoints" / "step-00000020").glob("state*"):
        file.write_bytes(b"")
    with pytest.raises(AssertionError, match="TensorFlow"):
        runs.call(*words)


def test_commands_that_read_a_run_want_one(tmp_path):
    for words in (
        ("eval.py", "--run_once"),
        ("cifar10/__main__.py", "export", "--output", "out"),
    ):
        missing = tmp_path / "missing"
        assert str(missing) in refused(*words, "--train_dir", missing)
        assert str(tmp_path) in refused(*words, "--checkpoint_dir", tmp_path)
