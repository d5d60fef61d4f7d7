"""The frameworks side by side: batches, processes in turns, flags."""

import importlib.util
import sys

import numpy as np
import pytest

import fake_package
import runs
from benchmarks.rosetta import __main__ as program, data
from benchmarks.rosetta.__main__ import FRAMEWORKS, make_row
from benchmarks.rosetta.task import TASKS, batches, in_parts
from cifar10.errors import UsageError


def test_batches_are_full_and_reshuffled_by_epoch_and_seed():
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
            return np.ones((len(inputs), 10)) + self.now["dense2/bias"][0]
"""
# Its loss is the number of its cores, if its environment is right.
TELLS = """
    import os
    from fakes_of_rosetta import cnn_tensorflow

    class Model(cnn_tensorflow.Model):
        def train(self, batches):
            loss = super().train(batches)
            expected = dict.fromkeys(("OMP_NUM_THREADS", "NPROC"), "1")
            expected |= {"OF_ITS_OWN": "yes", "CUDA_VISIBLE_DEVICES": "-1"}
            right = expected.items() <= os.environ.items()
            return loss if right and len(os.sched_getaffinity(0)) == 1 else 0.0
"""


def test_rows_take_turns_on_the_same_threads_and_incorrect_rows_are_not_timed(
    tmp_path, monkeypatch
):
    sources = {"cnn_tensorflow": GOOD, "cnn_tells": TELLS}
    package = fake_package.write(tmp_path / "fakes_of_rosetta", sources)
    monkeypatch.syspath_prepend(tmp_path)
    others = {
        "changed": ("tensorflow", "by hand", {"change": 0.01}, {}),
        "tells": ("tells", "by hand", {}, {"OF_ITS_OWN": "yes"}),
    }
    monkeypatch.setattr(program, "FRAMEWORKS", {**FRAMEWORKS, **others})
    prepared = data.noise(tmp_path, "cnn")
    names = "TensorFlow", "changed", "tells"
    given = {"package": package, "data": prepared, "threads": 1}
    rows = [make_row(name, "cnn", **given) for name in names]
    sound, changed, tells = program.compare(rows, rows[0], epochs=2, runs=1)
    for result in (sound, tells):
        assert [one["loss"] for one in result.rounds] == [0.5, 0.5], result.problem
        assert all(0 <= one["accuracy"] <= 1 for one in result.rounds)
    assert "network" in changed.problem


def test_unknown_frameworks_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rosetta", "--only", "caffe"])
    with pytest.raises(UsageError, match="caffe"):
        program.main()


@pytest.mark.parametrize(
    ("words", "count"),
    [
        # JAX is most likely absent, which a row has to say.
        pytest.param(
            ["--network", "cnn", "--only", "towers", "JAX"],
            sum("towers" in name or "JAX" in name for name in FRAMEWORKS),
            marks=pytest.mark.slow,
        ),
        pytest.param([], len(TASKS) * len(FRAMEWORKS), marks=pytest.mark.peers),
    ],
    ids=["some", "all"],
)
def test_quick_mode_checks_and_steps_the_installed_frameworks(words, count):
    done = runs.run("-m", "benchmarks.rosetta", "--quick", *words)
    assert done.returncode == 0, done.stderr
    assert "NOISE" in done.stdout
    cells = [line.split(" | ") for line in done.stdout.splitlines()]
    rows = [row for row in cells if len(row) > 1 and row[1] in FRAMEWORKS]
    assert len(rows) == count
    for rank, name, seconds, *_, how in rows:
        if missing := absent(name):
            assert missing in how
        else:
            assert rank != "| -", (name, how)
            assert seconds.endswith("(3)")


def absent(name):
    """Returns the package that a row lacks here, if any."""
    needed = {"JAX": "jax", "PyTorch": "torch"}
    for word, package in needed.items():
        if word in name and importlib.util.find_spec(package) is None:
            return package
    return None
