"""What is refused before TensorFlow starts, and what is known of a finished run."""

import json

import pytest
import tensorflow as tf

import runs
from cifar10.config import cli
from cifar10.config.config import Config
from cifar10.run_directory import checkpoints, claim


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch):
    """Fails a test whose program would import TensorFlow."""

    def fail(**_):
        raise AssertionError("TensorFlow would be imported")

    monkeypatch.setattr(cli, "import_tensorflow", fail)


@pytest.fixture
def run(tmp_path):
    """The directory of a run of train.py that has finished at step 20."""
    run = tmp_path / "run"
    run.mkdir()
    settings = {
        **vars(Config(max_steps=20, train_dir=str(run))),
        "global_batch_size": 128,
        "precision": "float32",
        "data": "cifar10",
        "data_dir": str(tmp_path),
        "towers": 1,
        "workers": 1,
        "parameters": 1,
        "simulated": False,
    }
    (run / "config.json").write_text(json.dumps(settings))
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
        said = refused(script, *where, "--model", "resent")
        assert (
            "--model resent: there is no such model. Did you mean resnet? Known" in said
        )
    said = refused("train.py", *where, "--model", "mien:small")
    assert f"there is no module mien in {tmp_path} or installed" in said
    with pytest.raises(AssertionError, match="TensorFlow would be imported"):
        runs.call("train.py", *where, "--model", "mine:small")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_a_directory_that_is_in_use_or_cannot_be_one(tmp_path):
    with claim.hold(tmp_path / "run"):
        said = refused("train.py", "--train_dir", tmp_path / "run")
    assert "is in use by another training: process " in said
    (tmp_path / "file").touch()
    assert "is a file" in refused("train.py", "--train_dir", tmp_path / "file")
    assert "holds files but no run" in refused("train.py", "--train_dir", tmp_path)


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        (("--learning_rate", "0.5"), "learning_rate: 0.1 there, 0.5 now"),
        (("--batch_size", "64"), "global_batch_size: 128 there, 64 now"),
        (("--precision", "bfloat16"), "precision: float32 there, bfloat16 now"),
        (("--recipe", "fast"), "optimizer: sgd there, muon now"),
    ],
)
def test_another_configuration_as_far_as_the_flags_say_it(run, words, difference):
    said = refused("train.py", "--train_dir", run, *words)
    assert difference in said
    assert f"/train.py --resume {run}\n" in said


def test_what_depends_on_the_machine_is_compared_later(run):
    with pytest.raises(AssertionError, match="TensorFlow would be imported"):
        # How many GPUs there are decides on the global batch.
        runs.call("train_multi_gpu.py", "--train_dir", run, "--batch_size", 64)


def test_a_finished_run_is_said_to_be_one_with_ways_on(run):
    done = runs.call("train.py", "--train_dir", f"{run}/", "--max_steps", 20)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first, longer, anew, score = done.stdout.splitlines()
    assert first == "Nothing to do: the run is at step 20, and --max_steps is 20."
    assert longer.endswith(f"/train.py --resume {run} --max_steps 40")
    assert anew.endswith(f"train.py --train_dir {run}/ --max_steps 20 --fresh")
    assert score.endswith(f"python eval.py --run_once --train_dir {run}")


def test_a_finished_run_whose_last_checkpoint_is_damaged_is_not_finished(run):
    for file in (run / "checkpoints" / "step-00000020").glob("state*"):
        file.write_bytes(b"")
    with pytest.raises(AssertionError, match="TensorFlow would be imported"):
        runs.call("train.py", "--train_dir", run, "--max_steps", 20)


@pytest.mark.parametrize(
    "words",
    [
        ("eval.py", "--run_once"),
        ("cifar10/__main__.py", "export", "--output", "out"),
        ("cifar10/__main__.py", "predict", "cat.png"),
    ],
    ids=lambda words: words[1],
)
def test_commands_that_read_a_run_want_one(tmp_path, run, words):
    said = refused(*words, "--train_dir", tmp_path / "none")
    assert f"{tmp_path}/none does not exist; no training has begun there." in said
    assert f"{tmp_path} holds no run" in refused(*words, "--checkpoint_dir", tmp_path)
    text = (
        (run / "config.json")
        .read_text()
        .replace('"model": "tutorial"', '"model": "no:m"')
    )
    (run / "config.json").write_text(text)
    words = *words, "--train_dir", run / "checkpoints" / "step-00000020"
    assert "--trust_model no:m" in refused(*words)
    said = refused(*words, "--trust_model", "no:m")
    assert "--model no:m: there is no module no in" in said


def test_plan_knows_the_names_of_models():
    assert "no such model" in refused(
        "cifar10/__main__.py", "plan", "--model", "resent"
    )
