"""Helpers: the scripts in this process and in others, and what a run has written."""

import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import forked
from cifar10.config.config import Config
from cifar10.config.schema import EVENT
from cifar10.run_directory import logs
from cifar10.training import train as training

ROOT = Path(__file__).parents[2]
# The model of trainings whose subject is another.
SMALL = "small_model:two_layers"


def flags(**values):
    """Returns the words of a command line: `batch_size=8` becomes --batch_size 8."""
    pairs = (("--" + name, str(value)) for name, value in values.items())
    return [word for pair in pairs for word in pair]


def training_flags(train_dir, data_dir, **values):
    """Returns the flags of a short training on the stand-in."""
    values = {
        "batch_size": 8,
        "max_steps": 30,
        "checkpoint_steps": 10,
        "summary_steps": 10,
        "train_dir": train_dir,
        "data": "synthetic",
        "data_dir": data_dir,
        "model": SMALL,
        **values,
    }
    return flags(**values)


# Programs.


def call(script, *words):
    """Runs a script to its end in this process, where TensorFlow has started already.

    Returns:
        What `run` returns.
    """
    # As a process of its own numbers its layers; checkpoints hold their names.
    keras.backend.clear_session(free_memory=False)
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, *map(str, words)])
        patch.setattr(sys, "path", [str(ROOT), *sys.path])
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return subprocess.CompletedProcess(script, code, out.getvalue(), err.getvalue())


_OF_CHAIN = ("chain", "hours", "sha256", "time")
_HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def run(*words, **options):
    """Runs a Python program to its end in a process of its own.

    It is a copy of one that has imported TensorFlow; `run_anew` starts Python.
    """
    with started(*words, **options) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@contextlib.contextmanager
def started(*words, cwd=ROOT, env=None, **options):
    """Starts a Python program, which does not outlive the `with` block."""
    words = [str(word) for word in words]
    env = {**environment(), **(env or {})}
    if "TF_CONFIG" in env and sys.version_info >= (3, 13):
        # A copied process crashes there as Python ends, with two workers.
        with started_anew(*words, cwd=cwd, env=env, **options) as process:
            yield process
        return
    with forked.Process(words, cwd=cwd, env=env, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def run_anew(*words, cwd=ROOT, **options):
    """Runs a Python program to its end as a user does, from the start of Python."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
        **{"env": of_a_user(), **options},
    )


@contextlib.contextmanager
def started_anew(*words, **options):
    """Starts a Python program as a user does; it does not outlive the `with` block."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    options = {"text": True, "env": of_a_user(), **options}
    with subprocess.Popen([sys.executable, *map(str, words)], **options) as process:
        try:
            yield process
        finally:
            process.kill()


def environment():
    """Returns this environment, in which `SMALL` can be imported."""
    helpers = str(ROOT / "tests" / "helpers")
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([helpers, *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path}


def of_a_user():
    """Returns the same with oneDNN, which tests do without."""
    return {k: v for k, v in environment().items() if k != "TF_ENABLE_ONEDNN_OPTS"}


def read_until(stream, part):
    """Reads a process's stream up to a line; fails if the process ends before it."""
    lines = []
    for line in stream:
        lines.append(line)
        if part in line:
            return line
    return pytest.fail(f"it ended before it printed {part!r}:\n{''.join(lines)}")


def train(train_dir, data_dir, **options):
    """Trains on the stand-in to the last step; returns the last checkpoint's values."""
    config = Config(
        train_dir=str(train_dir),
        **{
            "data": "synthetic",
            "data_dir": str(data_dir),
            "model": SMALL,
            **options,
        },
    )
    assert training.train(config) == config.run.max_steps
    return variables(checkpoint(train_dir, config.run.max_steps))


# What a run has written.


def checkpoint(train_dir, step):
    return train_dir / "checkpoints" / f"step-{step:08d}"


def variables(folder):
    """Returns the values in a checkpoint by name, without those that Keras numbers."""
    reader = tf.train.load_checkpoint(str(folder / "state"))
    return {
        name: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if not name.startswith("_CHECKPOINTABLE")
    }


def assert_equal(values, expected):
    """Compares checkpoints' values bit for bit."""
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)


def largest_difference(values, expected):
    """Returns by how much checkpoints' values differ at most."""
    assert values.keys() == expected.keys()
    return max(
        np.abs(np.subtract(value, expected[name], dtype=np.float64)).max()
        for name, value in values.items()
    )


def files(folder):
    """Returns the bytes of a checkpoint's files by name.

    The chain in its manifest names the checkpoint before, which a run that was
    interrupted has elsewhere.
    """
    found = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    if "manifest.json" in found:
        manifest = json.loads(found["manifest.json"])
        kept = {name: of for name, of in manifest.items() if name not in _OF_CHAIN}
        found["manifest.json"] = json.dumps(kept).encode()
    return found


def logged(train_dir):
    """Returns the lines of metrics.jsonl, which have to be JSON without NaN.

    Those of events are left out.
    """

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = (train_dir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    return [line for line in found if "event" not in line]


def events(train_dir):
    """Returns the step and the name of each event in metrics.jsonl."""
    found = logs.intact(logs.read_lines(train_dir / "metrics.jsonl"), EVENT)
    return [(one["step"], one["event"]) for one in found]
