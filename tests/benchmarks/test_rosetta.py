"""The frameworks side by side: batches, processes in turns, flags."""

import dataclasses
import importlib
import importlib.util
import json
import sys

import numpy as np
import pytest

import fake_package
import runs
from benchmarks.rosetta import __main__ as program, data, turns
from benchmarks.rosetta.rows import ROWS, Row
from benchmarks.rosetta.task import TASKS, batches, in_parts
from cifar10.errors import UsageError


def test_everyone_gets_the_same_whole_batches_in_an_order_of_each_epoch():
    inputs, labels = np.arange(23), np.arange(23)

    def order(**others):
        made = batches(inputs, labels, batch_size=5, **others)
        return [chosen.tolist() for chosen, _ in made]

    first = order(epoch=0)
    assert [len(batch) for batch in first] == [5] * 4
    assert len({example for batch in first for example in batch}) == 20
    assert order(epoch=0) == first
    assert order(epoch=1) != first != order(epoch=0, seed=1)
    assert order(epoch=0, steps=2) == first[:2]
    assert np.concatenate(in_parts(np.arange(1000))).tolist() == list(range(1000))


GOOD = """
    import numpy as np

    class Model:
        def __init__(self, task, change=0.0):
            self.task, self.change = task, change

        def load(self, values):
            self.now = {name: value + self.change for name, value in values.items()}

        def values(self):
            return dict(self.now)

        def train(self, batches):
            for inputs, labels in batches:
                for name in self.now:
                    self.now[name] = self.now[name] - self.task.learning_rate
            return 0.5 + self.change

        def predict(self, inputs):
            return np.zeros((len(inputs), 10)) + self.now["a/kernel"][0]

        def accuracy(self, inputs, labels):
            return 0.75
"""
# Its accuracy is the number of its cores, if its environment is right.
TELLS = """
    import os
    from fakes_of_rosetta import cnn_good

    class Model(cnn_good.Model):
        def accuracy(self, inputs, labels):
            expected = dict.fromkeys(("OMP_NUM_THREADS", "NPROC"), "1")
            expected |= {"OF_ITS_OWN": "yes", "CUDA_VISIBLE_DEVICES": "-1"}
            right = expected.items() <= os.environ.items()
            return len(os.sched_getaffinity(0)) if right else 0
"""


def test_rows_take_turns_on_the_same_threads_and_wrong_ones_are_not_timed(
    tmp_path, monkeypatch
):
    sources = {"cnn_good": GOOD, "cnn_tells": TELLS}
    package = fake_package.write(tmp_path / "fakes_of_rosetta", sources)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [
        Row("sound", "good", "by hand"),
        Row("changed", "good", "by hand", options={"change": 0.01}),
        Row("last", "tells", "by hand", environment={"OF_ITS_OWN": "yes"}),
    ]
    values = {"a/kernel": np.ones(3, np.float32), "a/bias": np.ones(1, np.float32)}
    noise = data.noise_batches("cnn")
    monkeypatch.setattr(turns, "initial_values", lambda *unused: values)
    monkeypatch.setattr(turns, "untied_batches", lambda *unused: noise)
    good = importlib.import_module("fakes_of_rosetta.cnn_good")
    monkeypatch.setitem(sys.modules, "benchmarks.rosetta.cnn_numpy", good)
    sound, changed, last = turns.compare(
        rows,
        "cnn",
        dataclasses.replace(data.noise(tmp_path, "cnn"), counts=True),
        epochs=2,
        runs=1,
        threads=1,
        save=lambda so_far: None,
        package=package,
    )
    for result, accuracy in ((sound, 0.75), (last, 1)):
        assert len(result.epochs) == 2, result.problem
        assert result.accuracies == [accuracy]
    assert "network" in changed.problem


def test_frameworks_that_do_not_exist_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rosetta", "--only", "caffe"])
    with pytest.raises(UsageError, match="caffe"):
        program.main()


@pytest.mark.parametrize(
    ("words", "count"),
    [
        # JAX is most likely absent, which a row has to say.
        pytest.param(
            ["--network", "cnn", "--only", "towers", "JAX"],
            sum("towers" in row.name or "JAX" in row.name for row in ROWS),
            marks=pytest.mark.slow,
        ),
        pytest.param([], len(TASKS) * len(ROWS), marks=pytest.mark.peers),
    ],
    ids=["some", "all"],
)
def test_quick_checks_and_steps_the_installed_frameworks(tmp_path, words, count):
    command = ["-m", "benchmarks.rosetta", "--quick", "--output_dir", tmp_path]
    done = runs.run(*command, *words)
    assert done.returncode == 0, done.stderr
    assert "NOISE" in done.stdout
    assert done.stdout == (tmp_path / "results.md").read_text()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == count
    for row in rows:
        if missing := absent(row["name"]):
            assert missing in row["problem"]
        else:
            assert row["problem"] is None, row["name"]
            assert len(row["epochs"]) == 3


def absent(name):
    """Returns the package that a row lacks here, if any."""
    needed = {"JAX": "jax", "PyTorch": "torch"}
    for word, package in needed.items():
        if word in name and importlib.util.find_spec(package) is None:
            return package
    return None
