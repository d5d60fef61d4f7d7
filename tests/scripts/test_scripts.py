"""The three scripts as a user runs them: what they say, write and end with."""

import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import keras
import numpy as np
import pytest

import cifar10
import runs
from cifar10.input import synthetic

COMMAND = "cifar10/__main__.py"
STARTING = "Starting TensorFlow ...\n"


def refused(done, *parts):
    """Asserts one clear complaint: exit code 2, on stderr, without a traceback."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert str(part) in done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory, stand_in_dir):
    """The directory of a finished run of two towers."""
    train_dir = tmp_path_factory.mktemp("finished") / "run"
    flags = runs.training_flags(train_dir, stand_in_dir, num_gpus=2)
    done = runs.call("train_multi_gpu.py", *flags)
    assert done.returncode == 0, done.stderr
    return train_dir


# What a user sees.


@pytest.mark.slow
def test_training_and_evaluation_print_no_noise_of_libraries(tmp_path, stand_in_dir):
    """From the start of Python and with oneDNN, as a user runs them."""
    train_dir = tmp_path / "run"
    flags = runs.training_flags(train_dir, stand_in_dir, num_gpus=2)
    done = runs.run_anew("train_multi_gpu.py", *flags)
    assert (done.returncode, done.stderr) == (0, STARTING)
    for part in ("SIMULATED", "NOT CIFAR-10", "16 globally", "\nstep 30, "):
        assert part in done.stdout
    (words,) = re.findall(r" python (-m cifar10 eval .*)", done.stdout)
    done = runs.run_anew(*words.split())
    assert (done.returncode, done.stderr) == (0, STARTING)
    for part in ("precision @ 1 = 0.", "NOT CIFAR-10", *synthetic.CLASS_NAMES):
        assert part in done.stdout


def test_every_way_to_train_ends_with_the_same_values(tmp_path, stand_in_dir):
    """A script, the command and the function: one implementation."""
    options = {"max_steps": 3, "precision": "float32"}
    ways = {
        "script": ["train.py"],
        "command": [COMMAND, "train", "--num_gpus", 1],
    }
    for name, words in ways.items():
        flags = runs.training_flags(tmp_path / name, stand_in_dir, **options)
        done = runs.call(*words, "--deterministic", *flags)
        assert done.returncode == 0, done.stderr
    keras.backend.clear_session(free_memory=False)
    shared = {"batch_size": 8, "checkpoint_steps": 10, "summary_steps": 10}
    shared |= {"data": "synthetic", "data_dir": str(stand_in_dir), "model": runs.SMALL}
    python = tmp_path / "python"
    record = cifar10.train(
        cifar10.Config(
            train_dir=python, deterministic=True, num_gpus=1, **shared, **options
        )
    )
    assert record.step == 3
    expected = runs.variables(runs.checkpoint(python, 3))
    for name in ways:
        found = runs.variables(runs.checkpoint(tmp_path / name, 3))
        runs.assert_equal(found, expected)
    settings = [
        json.loads((folder / "config.json").read_text()) | {"train_dir": None}
        for folder in (tmp_path / "command", python)
    ]
    assert settings[0] == settings[1]


def test_help_is_shown_without_tensorflow():
    code = (
        "import sys, runpy; sys.argv = ['train_multi_gpu.py', '--help']\n"
        "try: runpy.run_path('train_multi_gpu.py', run_name='__main__')\n"
        "except SystemExit: print({'tensorflow', 'keras', 'numpy'} & {*sys.modules})"
    )
    done = runs.run_anew("-c", code)
    assert "--num_gpus" in done.stdout
    assert done.stdout.endswith("set()\n")


def test_python_runs_the_package_without_a_warning():
    words = ["-W", "error::RuntimeWarning", "-m", "cifar10", "doctor", "--help"]
    done = runs.run_anew(*words)
    assert (done.returncode, done.stderr) == (0, "")


def test_signal_while_tensorflow_is_imported_is_acknowledged(tmp_path):
    """The first line is there by then, though TensorFlow's own are hidden."""
    (tmp_path / "tensorflow.py").write_text(
        "import sys, time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{runs.ROOT}"}
    words = [runs.ROOT / "train.py", "--train_dir", tmp_path / "run"]
    with runs.started_anew(*words, env=environment) as process:
        assert process.stderr.readline() == STARTING
        runs.read_until(process.stdout, "importing")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert said.startswith("train.py: SIGINT: ")
    assert not (tmp_path / "run").exists()


# Evaluation.


def evaluation(train_dir, *words):
    """Returns what eval.py finds of a run."""
    done = runs.call(
        "eval.py", "--run_once", "--json", "--train_dir", train_dir, *words
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_eval_counts_every_image_once_and_needs_only_the_directory(
    finished, stand_in_dir
):
    train_dir = finished
    found = evaluation(train_dir)
    assert (found["step"], found["num_examples"]) == (30, 2000)
    assert found["precision @ 1"] == found["correct"] / 2000
    assert found["data_is_real"] is False
    assert np.sum(found["confusion"]) == 2000
    folder = stand_in_dir / synthetic.FOLDER / synthetic.FOLDER
    assert not folder.exists(), "the stand-in was made once more"
    assert evaluation(train_dir, "--batch_size", 77)["confusion"] == found["confusion"]


@pytest.mark.slow
def test_eval_follows_a_run_to_its_end(tmp_path, stand_in_dir):
    train_dir = tmp_path / "run"
    words = ["--json", "--device", "cpu", "--num_examples", 500]
    words += ["--train_dir", train_dir, "--eval_interval_secs", 0.2]
    with runs.started(runs.ROOT / "eval.py", *words) as follower:
        runs.read_until(follower.stderr, str(train_dir))
        flags = runs.training_flags(train_dir, stand_in_dir, keep_checkpoints=1)
        trained = runs.call("train.py", *flags)
        assert trained.returncode == 0, trained.stderr
        output, said = follower.communicate()
    assert follower.returncode == 0, said
    scored = [json.loads(line)["step"] for line in output.splitlines()]
    assert scored == sorted(set(scored)), "a step was scored twice"
    assert scored[-1] == 30


# Bad input.


@pytest.mark.slow
def test_full_disk_keeps_the_last_checkpoint_with_stdout_closed(tmp_path, stand_in_dir):
    train_dir = tmp_path / "run"
    options = {"precision": "float32", "summary_steps": 1000}
    flags = runs.training_flags(train_dir, stand_in_dir, **options)
    assert runs.call("train.py", *flags, "--max_steps", 10).returncode == 0
    sizes = [path.stat().st_size for path in runs.checkpoint(train_dir, 10).iterdir()]

    def confine():
        os.close(1)
        # Room for configuration and logs, but not for the variables.
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) - 1,) * 2)

    flags += ["--max_steps", "20"]
    done = runs.run_anew("train.py", *flags, preexec_fn=confine)
    refused(done, "step 20 could not be written", "intact")
    left = [path.name for path in (train_dir / "checkpoints").iterdir()]
    assert left == ["step-00000010"]
    done = runs.call("train.py", *flags)
    assert done.returncode == 0
    assert "from step 10" in done.stdout


def test_damaged_checkpoints_are_refused_and_kept(tmp_path, finished):
    train_dir = shutil.copytree(finished, tmp_path / "run")
    for data in (train_dir / "checkpoints").glob("*/state.data*"):
        data.write_bytes(data.read_bytes()[:-1])
    for words in (
        ["train_multi_gpu.py", "--max_steps", 40, "--resume", train_dir],
        ["eval.py", "--run_once", "--train_dir", train_dir],
    ):
        refused(runs.call(*words), "step-00000030", "SHA-256")
    assert len(list((train_dir / "checkpoints").glob("step-*"))) == 3


def test_a_nonfinite_loss_stops_the_run(tmp_path, stand_in_dir):
    train_dir = tmp_path / "run"
    values = {"learning_rate": 1e30, "checkpoint_steps": 1, "num_gpus": 2}
    flags = runs.training_flags(train_dir, stand_in_dir, **values)
    refused(runs.call("train_multi_gpu.py", *flags), "step 2", "--learning_rate")
    left = [path.name for path in (train_dir / "checkpoints").iterdir()]
    assert left == ["step-00000001"]


@pytest.mark.slow
def test_another_configuration_is_refused_with_three_working_commands(
    tmp_path, finished
):
    """Each of them works as it is printed."""
    train_dir = shutil.copytree(finished, tmp_path / "run")
    settings = json.loads((train_dir / "config.json").read_text())
    data_dir = Path(settings["data_dir"]).parent
    flags = runs.training_flags(train_dir, data_dir)
    content = sorted({*train_dir.rglob("*")} - {train_dir / ".lock"})
    before = {path: path.stat().st_mtime_ns for path in content}
    done = runs.call("train.py", *flags)
    refused(done, "global_batch_size")
    assert {path: path.stat().st_mtime_ns for path in content} == before, (
        "a refused command changed the run"
    )
    offered = re.search(
        r"Give only (.*) to resume .*\nGive (.*) to move .*\nGive (.*), or another",
        done.stderr,
    )
    alone, afresh, elsewhere = (way.split(" ", 1) for way in offered.groups())
    assert alone == ["--resume", str(train_dir)]
    for words in (alone, [*flags, *elsewhere], [*flags, *afresh]):
        pasted = runs.call("train.py", *words)
        assert pasted.returncode == 0, pasted.stderr
    assert (tmp_path / "run.1" / "checkpoints").is_dir()
