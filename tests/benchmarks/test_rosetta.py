"""The frameworks side by side: files, batches, processes in turns, flags."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from benchmarks import flags as shared
from benchmarks.rosetta import __main__ as program, data, turns
from benchmarks.rosetta.rows import ROWS, Row, ranked
from benchmarks.rosetta.task import TASKS, batches, in_parts
from cifar10.errors import UsageError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "rosetta"
FRAMEWORKS = ("towers", "tensorflow", "keras", "pytorch", "jax")

# Batches.


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


def test_parts_hold_every_input_once():
    parts = in_parts(np.arange(1000))
    assert len(parts) == 4
    assert np.concatenate(parts).tolist() == list(range(1000))
    assert len(in_parts(np.arange(3))) == 1


# The files.


@pytest.mark.parametrize(
    "path", sorted(FOLDER.glob("[cg]*_*.py")), ids=lambda p: p.stem
)
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) < 120


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("network", TASKS)
def test_files_say_the_same_in_the_same_order(network, framework):
    tree = ast.parse((FOLDER / f"{network}_{framework}.py").read_text())
    [model] = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Model"
    ]
    methods = [node.name for node in model.body if isinstance(node, ast.FunctionDef)]
    structure = ["build", "make_optimizer", "load", "values", "train", "predict"]
    expected = [*structure, "accuracy"] if network == "cnn" else structure[:2]
    named = [name.replace("apply", "make_optimizer") for name in methods]
    assert [name for name in named if name in expected] == expected


# Processes and turns.

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
FAKES = {
    "cnn_good": GOOD,
    "cnn_missing": "import no_such_package",
    "cnn_tells": """
        import os
        from fakes_of_rosetta import cnn_good

        class Model(cnn_good.Model):
            def accuracy(self, inputs, labels):
                return dict(os.environ), len(os.sched_getaffinity(0))
    """,
    "cnn_dies": """
        import os, sys
        from fakes_of_rosetta import cnn_good

        class Model(cnn_good.Model):
            trained = 0

            def accuracy(self, inputs, labels):
                self.trained += 1
                if self.trained == 2:
                    print("out of luck", file=sys.stderr, flush=True)
                    os._exit(3)
                return 0.5
    """,
}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    root = tmp_path_factory.mktemp("frameworks")
    (root / "fakes_of_rosetta").mkdir()
    (root / "fakes_of_rosetta" / "__init__.py").touch()
    for name, source in FAKES.items():
        path = root / "fakes_of_rosetta" / f"{name}.py"
        path.write_text(textwrap.dedent(source))
    sys.path.insert(0, str(root))
    yield "fakes_of_rosetta"
    sys.path.remove(str(root))


@pytest.fixture(scope="module")
def measured(fakes, tmp_path_factory):
    """What becomes of sound, wrong, absent and breaking rows in one comparison."""
    rows = [
        Row("sound", "good", "by hand"),
        Row("changed", "good", "by hand", options={"change": 0.01}),
        Row("absent", "missing", "not at all"),
        Row("breaking", "dies", "badly"),
        Row("last", "good", "by hand"),
    ]
    made = data.noise(tmp_path_factory.mktemp("noise"), "cnn")
    values = {"a/kernel": np.ones(3, np.float32), "a/bias": np.ones(1, np.float32)}
    saved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "initial_values", lambda *unused: values)
        noise = data.noise_batches("cnn")
        patch.setattr(turns, "untied_batches", lambda *unused: noise)
        good = importlib.import_module(f"{fakes}.cnn_good")
        patch.setitem(sys.modules, "benchmarks.rosetta.cnn_numpy", good)
        found = turns.compare(
            rows,
            "cnn",
            dataclasses.replace(made, counts=True),
            epochs=3,
            runs=1,
            threads=1,
            save=lambda so_far: saved.append([len(one.epochs) for one in so_far]),
            package=fakes,
        )
    return {one.row.name: one for one in found}, saved


def test_sound_rows_are_measured_whatever_befalls_the_others(measured):
    found, _ = measured
    for name in ("sound", "last"):
        assert len(found[name].epochs) == 3, found[name].problem
        assert found[name].accuracies == [0.75]
        assert found[name].deviation is not None


def test_another_network_is_not_timed(measured):
    changed = measured[0]["changed"]
    assert changed.problem.startswith("not the same network")
    assert changed.epochs == []


def test_absent_frameworks_are_named_with_the_way_to_get_them(measured):
    problem = measured[0]["absent"].problem
    assert problem == "not installed (no_such_package): pip install -e .[rosetta]"


def test_a_crash_keeps_what_was_measured_before_it(measured):
    breaking = measured[0]["breaking"]
    assert breaking.problem == "its process ended with exit code 3 out of luck"
    assert len(breaking.epochs) == 1
    assert breaking.accuracies == []  # Its run did not come to its end.
    assert ranked(list(measured[0].values()))[-1].problem


def test_rows_take_turns_and_results_are_saved_after_each_epoch(measured):
    assert measured[1][:3] == [[1, 0, 0, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]
    assert measured[1][-1] == [3, 0, 0, 1, 3]


def test_all_get_the_same_threads_and_no_gpu(fakes, tmp_path):
    row = Row("tells", "tells", "by hand", environment={"OF_ITS_OWN": "yes"})
    made = data.noise(tmp_path, "cnn")
    with turns._start(row, "cnn", made, 1, fakes) as child:
        child.ask("warm_up", {"a/kernel": np.ones(3), "a/bias": np.ones(1)})
        environment, cores = child.ask("accuracy")
    assert cores == 1
    for name in ("OMP_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS"):
        assert environment[name] == "1"
    assert environment["OF_ITS_OWN"] == "yes"
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"


# Flags.


def test_only_takes_any_part_of_a_name():
    select = functools.partial(shared.select, ROWS, name_of=lambda row: row.name)
    assert {row.framework for row in select(["keras"])} == {"keras"}
    assert select([]) == list(ROWS)
    with pytest.raises(UsageError, match="Keras on JAX"):
        select(["caffe"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "0"], "--epochs 0: it is at least 1"),
        (["--steps", "-1"], "--steps -1: it is 0"),
        (["--threads", "10000"], "there are"),
        (["--only", "caffe"], "no row is called so"),
        (["--quick", "--epochs", "3"], "--quick and --epochs: leave one"),
        (["--output_dir", __file__], "cannot be written: .*--output_dir"),
        (["--output_dir", "/proc/none"], "/proc/none cannot be written"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(flags, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rosetta", *flags])
    with pytest.raises(UsageError, match=message):
        program.main()


# The whole.


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
def test_quick_checks_and_steps_what_is_installed(tmp_path, words, count):
    command = [sys.executable, "-m", "benchmarks.rosetta", "--quick"]
    text = subprocess.run(
        [*command, *words, "--output_dir", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=900,
    ).stdout
    assert "NOISE" in text
    assert text == (tmp_path / "results.md").read_text()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == count
    for row in rows:
        missing = absent(row["name"])
        if missing:
            expected = f"not installed ({missing}): pip install -e .[rosetta]"
            assert row["problem"] == expected
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
