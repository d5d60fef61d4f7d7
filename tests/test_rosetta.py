"""The frameworks side by side: the same network, and a check that notices if not."""

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

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import flags as shared
from benchmarks.rosetta import (
    __main__ as program,
    data,
    parity,
    plots,
    results,
    turns,
    weights,
)
from benchmarks.rosetta.rows import ROWS, Epoch, Result, Row, ranked
from benchmarks.rosetta.task import TASKS, batches, in_parts, initial_values
from cifar10 import model as models
from cifar10.errors import UsageError

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks" / "rosetta"
FRAMEWORKS = ("towers", "tensorflow", "keras", "pytorch", "jax")

# The same network.


@pytest.fixture(scope="module")
def given():
    """Initial values and batches of the convolutional network."""
    values = initial_values("cnn")
    return values, data.noise_batches("cnn")[0], data.untied_batches(values)


# Half of the check is about dropout; without any it is done sooner.
STILL = dataclasses.replace(TASKS["cnn"], dropout=(0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def reference(given):
    """What the reference shows, by task."""
    module = importlib.import_module("benchmarks.rosetta.cnn_numpy")
    tasks = (TASKS["cnn"], STILL)
    return {task: parity.collect(module.Model, task, *given) for task in tasks}


def fault(reference, given, framework, task=TASKS["cnn"]):
    """Returns what the check has to say of a framework's model."""
    needed = {"pytorch": "torch", "jax": "flax"}
    pytest.importorskip(needed.get(framework, "keras"))
    keras.utils.set_random_seed(0)
    module = importlib.import_module(f"benchmarks.rosetta.cnn_{framework}")
    found = parity.collect(module.Model, task, *given)
    return parity.complaint(parity.compare(reference[task], found, task))


@pytest.fixture(scope="module")
def gru_reference():
    """Values and batches of the recurrent network, and what the reference shows."""
    noise = data.noise_batches("gru")
    given = initial_values("gru"), noise[0], noise
    module = importlib.import_module("benchmarks.rosetta.gru_numpy")
    return given, parity.collect(module.Model, TASKS["gru"], *given)


def gru_fault(given, reference, framework):
    module = importlib.import_module(f"benchmarks.rosetta.gru_{framework}")
    found = parity.collect(module.Model, TASKS["gru"], *given)
    return parity.complaint(parity.compare(reference, found, TASKS["gru"]))


@pytest.mark.parametrize("task", [TASKS["cnn"], STILL], ids=["dropout", "still"])
def test_a_sound_framework_has_no_fault(reference, given, task):
    assert fault(reference, given, "tensorflow", task) == ""


EACH = pytest.mark.parametrize(
    "framework",
    [
        "towers",
        "tensorflow",
        pytest.param("keras", marks=pytest.mark.peers),
        pytest.param("pytorch", marks=pytest.mark.peers),
        pytest.param("jax", marks=pytest.mark.peers),
    ],
)
OF_THE_PEERS = pytest.mark.parametrize("framework", ["pytorch", "jax"])


@EACH
def test_one_changed_initial_value_is_noticed(reference, given, framework):
    values, *others = given
    changed = {**values, "conv2/bias": values["conv2/bias"].copy()}
    changed["conv2/bias"][7] += 0.01
    assert "differ" in fault(reference, (changed, *others), framework, STILL)


def nesterov(function):
    """Returns what makes an optimizer with Nesterov's momentum, if it has any."""

    def changed(*arguments, **others):  # The last one is the momentum.
        return function(*arguments, nesterov=arguments[-1] > 0, **others)

    return changed


@pytest.mark.parametrize(
    "framework", ["towers", pytest.param("keras", marks=pytest.mark.peers)]
)
def test_another_form_of_momentum_is_noticed(reference, given, framework, monkeypatch):
    right = keras.optimizers.SGD
    monkeypatch.setattr(keras.optimizers, "SGD", nesterov(right))
    assert "two steps change" in fault(reference, given, framework, STILL)


@pytest.mark.peers
@OF_THE_PEERS
def test_another_form_of_a_peers_momentum_is_noticed(
    reference, given, framework, monkeypatch
):
    of_each = {"pytorch": ("torch.optim", "SGD"), "jax": ("optax", "sgd")}
    module, name = of_each[framework]
    pytest.importorskip(module)
    monkeypatch.setattr(
        f"{module}.{name}",
        nesterov(getattr(importlib.import_module(module), name)),
    )
    assert "two steps change" in fault(reference, given, framework, STILL)


@pytest.mark.peers
@OF_THE_PEERS
@pytest.mark.parametrize(
    ("changed", "shown"),
    [("eval", "is dropout on?"), ("train", "dropout adds")],
)
def test_a_peers_wrong_dropout_flag_is_noticed(
    reference, given, framework, changed, shown, monkeypatch
):
    pytest.importorskip({"pytorch": "torch", "jax": "flax"}[framework])
    network = importlib.import_module(f"benchmarks.rosetta.cnn_{framework}").Network
    base = network.__mro__[1]

    def still(self, *mode):  # PyTorch's own `eval` comes through here as well.
        del mode
        base.train(self, False) if framework == "pytorch" else base.eval(self)

    other = {"eval": base.train, "train": still}[changed]
    monkeypatch.setattr(network, changed, other)
    assert shown in fault(reference, given, framework)


def without(network, number):
    """Returns a network's class with one of its dropout layers forgotten."""
    right = network.__init__

    def forgetful(self, dropout):
        right(self, tuple(0 if n == number else r for n, r in enumerate(dropout)))

    return forgetful


@pytest.mark.parametrize("number", [0, 1, 2])
def test_one_forgotten_dropout_layer_is_noticed(reference, given, number, monkeypatch):
    network = importlib.import_module("benchmarks.rosetta.cnn_tensorflow").Network
    monkeypatch.setattr(network, "__init__", without(network, number))
    said = fault(reference, given, "tensorflow")
    assert f"dropout layer {number + 1} alone" in said or "dropout adds" in said


@pytest.mark.parametrize("place", [0, -1])
def test_a_word_that_is_in_no_batch_counts_too(gru_reference, place, monkeypatch):
    module = importlib.import_module("benchmarks.rosetta.gru_tensorflow")
    right = module.Model.load

    def load(self, values):
        name = "embedding/embedding"
        changed = {**values, name: values[name].copy()}
        changed[name][place, 0] += 0.01
        right(self, changed)

    monkeypatch.setattr(module.Model, "load", load)
    assert "given values" in gru_fault(*gru_reference, "tensorflow")


def moved(optimizer, gradient):
    """Returns what one update makes of zeros."""
    variable = keras.Variable(np.zeros((4, 2), np.float32))
    optimizer.build([variable])
    optimizer.apply([gradient], [variable])
    return variable.numpy()


def test_a_word_that_occurs_twice_moves_as_by_its_whole_gradient():
    module = importlib.import_module("benchmarks.rosetta.gru_keras")
    slices = tf.IndexedSlices(
        tf.constant([[1.0, 2.0], [3.0, -1.0], [2.0, 2.0]]), [1, 3, 1], [4, 2]
    )
    whole = moved(module.Adam(0.1), tf.convert_to_tensor(slices))
    np.testing.assert_allclose(moved(module.Adam(0.1), slices), whole, rtol=1e-6)
    # Keras's own would not need ours otherwise.
    assert np.abs(moved(keras.optimizers.Adam(0.1), slices) - whole).max() > 0.01


@pytest.mark.slow
def test_an_adam_that_squares_slices_is_noticed(gru_reference, monkeypatch):
    module = importlib.import_module("benchmarks.rosetta.gru_keras")
    monkeypatch.setattr(module, "Adam", keras.optimizers.Adam)
    assert "two steps change embedding" in gru_fault(*gru_reference, "keras")


def test_averaged_gradients_are_another_momentum(reference, given, monkeypatch):
    right = tf.raw_ops.ResourceApplyMomentum

    def dampened(*, grad, momentum, **others):
        right(grad=grad * (1 - momentum), momentum=momentum, **others)

    monkeypatch.setattr(tf.raw_ops, "ResourceApplyMomentum", dampened)
    assert "two steps change" in fault(reference, given, "tensorflow", STILL)


def test_training_without_dropout_is_noticed(reference, given, monkeypatch):
    def without(*arguments, training):
        del training
        return right(*arguments, training=False)

    right = models.inference
    monkeypatch.setattr(models, "inference", without)
    assert "dropout adds" in fault(reference, given, "towers")


def test_dropout_in_testing_is_noticed(reference, given, monkeypatch):
    module = importlib.import_module("benchmarks.rosetta.cnn_tensorflow")
    right = module.Network.__call__

    def always(self, values, images, *, training):
        del training
        return right(self, values, images, training=True)

    monkeypatch.setattr(module.Network, "__call__", always)
    assert "is dropout on?" in fault(reference, given, "tensorflow")


def test_a_second_softmax_is_noticed(reference, given, monkeypatch):
    module = importlib.import_module("benchmarks.rosetta.cnn_tensorflow")
    right = module.Network.__call__

    def with_softmax(*arguments, training):
        return tf.nn.softmax(right(*arguments, training=training))

    monkeypatch.setattr(module.Network, "__call__", with_softmax)
    assert "its logits differ" in fault(reference, given, "tensorflow", STILL)


@pytest.mark.peers
def test_pytorch_keeps_channels_last_in_memory(given):
    torch = pytest.importorskip("torch")
    values, (images, _), _ = given
    model = importlib.import_module("benchmarks.rosetta.cnn_pytorch").Model(
        TASKS["cnn"]
    )
    model.load(values)
    for tensor in (model.network.conv2.weight, model.load_inputs(images)):
        assert tensor.is_contiguous(memory_format=torch.channels_last)


def test_values_in_pytorchs_layout_and_back_are_the_same():
    for network in TASKS:
        values = initial_values(network)
        for name in values:
            if name.endswith("bias"):
                values[name] = np.arange(values[name].size, dtype=np.float32)
                values[name] = values[name].reshape(initial_values(network)[name].shape)
        back = weights.from_pytorch(weights.to_pytorch(values))
        assert back.keys() == values.keys()
        for name, value in values.items():
            np.testing.assert_array_equal(back[name], value)


def test_a_value_that_is_not_a_number_is_complained_of():
    sound = {"a": np.ones(2)}
    broken = {"a": np.array([1.0, np.nan])}
    task = TASKS["cnn"]
    one = parity.Evidence(1.0, np.ones(2), sound, sound, True, [0.2], [0.1], True)
    for change in (
        {"loss": np.nan},
        {"logits": np.full(2, np.nan)},
        {"gradients": broken},
        {"updates": broken},
        {"rises": [np.nan]},
        {"spreads": [np.nan]},
        {"begins": False},
        {"gradients": {"a": np.ones(3)}},
    ):
        other = dataclasses.replace(one, **change)
        assert parity.complaint(parity.compare(one, other, task)), change
    assert parity.complaint(parity.compare(one, one, task)) == ""


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


# The report.

ABOUT = {
    "date": "2026-11-21T12:00:00+00:00",
    "commit": "abc1234",
    "processor": "A processor",
    "cores": 2,
    "accelerators": [],
    "bfloat16": [],
    "versions": {"tensorflow": "2.21.0", "jax": "not installed"},
    "threads": 2,
    "data": {"cnn": "CIFAR-10 in /data"},
    "examples": {"cnn": 640},
    "epochs": {"cnn": 3},
}


def a_result(row, seconds, **others):
    update = (1e-3, "a")
    agreement = parity.Agreement(
        1e-7, 1e-7, (2e-6, "a"), update, True, 1.1, [1.0], True
    )
    epochs = [
        Epoch(0, one, 1.0, 0.7 + 0.01 * one, one == seconds[-1]) for one in seconds
    ]
    return Result(row, "cnn", "", agreement, 4.0, epochs, **others)


def cells(text, name):
    [line] = [line for line in text.splitlines() if f"| {name} | " in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table_ranks_those_that_are_the_same_network():
    slow, fast = a_result(ROWS[0], [4.0, 5.0, 6.0]), a_result(ROWS[2], [2.0, 2.0, 2.5])
    other = Result(ROWS[4], "cnn", "not the same network: its loss differs by 0.1")
    text = results.markdown([other, slow, fast], ABOUT)
    names = [row.name for row in (ROWS[2], ROWS[0], ROWS[4])]
    places = [text.index(f"| {name} |") for name in names]
    assert places == sorted(places)
    assert cells(text, ROWS[2].name)[:3] == ["1", "TensorFlow", "2.17 ± 0.29 (3)"]
    expected = ["2", ROWS[0].name, "5.00 ± 1.00 (3)", "128", "2.31", "4.0"]
    assert cells(text, ROWS[0].name)[:6] == expected
    assert cells(text, ROWS[0].name)[6:8] == ["76.0 % (1)", "2e-06"]
    assert cells(text, ROWS[4].name)[0] == "-"
    assert cells(text, ROWS[4].name)[-1] == other.problem


def test_two_epochs_have_no_standard_deviation():
    text = results.markdown([a_result(ROWS[0], [4.0, 5.0])], ABOUT)
    assert cells(text, ROWS[0].name)[2] == "4.50 (2)"


def test_json_holds_every_epoch_and_every_problem():
    broken = Result(ROWS[4], "cnn", "not installed")
    wrong = a_result(ROWS[2], [np.nan])
    text = results.as_json([a_result(ROWS[0], [4.0]), broken, wrong], ABOUT)
    assert "NaN" not in text
    one, other, _ = json.loads(text)["rows"]
    assert one["epochs"][0]["seconds"] == 4.0
    assert one["agreement"]["gradient"] == [2e-6, "a"]
    assert other["problem"] == "not installed"
    assert json.loads(text)["commit"] == "abc1234"


def test_plots_are_two_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    paths = tmp_path / "time.png", tmp_path / "accuracy.png"
    plots.draw([a_result(ROWS[0], [1.0, 3.0]), Result(ROWS[4], "cnn", "no")], *paths)
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


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


def test_quick_checks_and_steps_all_that_is_installed(tmp_path):
    command = [sys.executable, "-m", "benchmarks.rosetta", "--quick"]
    text = subprocess.run(
        [*command, "--output_dir", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    assert "NOISE" in text
    assert text == (tmp_path / "results.md").read_text()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == len(TASKS) * len(ROWS)
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
