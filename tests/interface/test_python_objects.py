"""A program's own loss, metrics, optimizer, schedule and `tf.data`."""

import json
import re
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import event_readers
import runs
from cifar10 import Config, evaluate, train
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.input import distortions
from cifar10.interface.data import as_dataset
from cifar10.models.registry import build_model
from cifar10.training import assembly

RANDOM = np.random.default_rng(0)
X = RANDOM.integers(0, 256, (40, 8, 8, 3), np.uint8)
Y = np.arange(40) % 4


def linear(image_shape, classes):
    decays = {"kernel_regularizer": keras.regularizers.L2(0.01)}
    layers = [keras.layers.Flatten(), keras.layers.Dense(classes, **decays)]
    return keras.Sequential([keras.Input(image_shape), *layers])


def focal(labels, logits):
    """The cross entropy of each image, less where it is low."""
    entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return entropies * tf.square(1.0 - tf.exp(-entropies))


def margin(labels, logits):
    own = tf.gather(logits, labels, batch_dims=1)
    return own - tf.reduce_mean(logits, axis=1)


def top_two(labels, logits):
    return keras.metrics.sparse_top_k_categorical_accuracy(labels, logits, k=2)


class HalfSign(keras.optimizers.Optimizer):
    """An optimizer that Keras does not have."""

    def __init__(self, learning_rate=0.1, scale=0.5, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.scale = scale

    def update_step(self, gradient, variable, learning_rate):
        step = keras.ops.cast(learning_rate, variable.dtype) * self.scale
        self.assign_sub(variable, step * keras.ops.sign(gradient))

    def get_config(self):
        return {**super().get_config(), "scale": self.scale}


class Still(keras.optimizers.SGD):
    """An optimizer that changes gradients where Keras's `fit` hands them over."""

    def apply_gradients(self, grads_and_vars, **options):
        pairs = [(0.0 * gradient, variable) for gradient, variable in grads_and_vars]
        return super().apply_gradients(pairs, **options)


class RateLast(keras.optimizers.SGD):
    def __init__(self, momentum=0.9, learning_rate=0.01, **options):
        super().__init__(learning_rate, momentum, **options)


class Undescribed(keras.optimizers.SGD):
    def __init__(self, learning_rate=0.01, scale=1.0, verbose=False, **options):
        super().__init__(learning_rate, **options)
        self.scale, self.verbose = scale, verbose


class TwoRates(HalfSign):
    def __init__(self, learning_rate, other):
        super().__init__(learning_rate)
        self.other = other


def stream():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def config(train_dir, **changes):
    rate = {} if hasattr(changes.get("optimizer"), "get_config") else 0.01
    return Config(
        **{
            "model": linear,
            "data": ((X, Y), (X[:12], Y[:12])),
            "train_dir": train_dir,
            "num_gpus": 1,
            "global_batch_size": len(X),
            "max_steps": 3,
            "log_frequency": 1,
            "precision": "float64",
            "distortions": "none",
            **({"learning_rate": rate} if rate else {}),
            **changes,
        }
    )


def trained(train_dir, **given):
    record = train(config(train_dir, **given))
    return record, runs.variables(runs.checkpoint(train_dir, 3))


class Subclass(keras.Model):
    """A model without a graph of layers."""

    def __init__(self, classes):
        super().__init__()
        self.flat, self.dense = keras.layers.Flatten(), keras.layers.Dense(classes)

    def call(self, images):
        return self.dense(self.flat(images))


CASES = {
    "subclass": lambda: {
        "loss": focal,
        "metrics": {"margin": margin},
        "model": lambda _, classes: Subclass(classes),
    },
    "function": lambda: {"loss": focal},
    "mean": lambda: {
        "loss": lambda labels, logits: tf.reduce_mean(focal(labels, logits))
    },
    "sparse": lambda: {
        "loss": keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, dtype="float64"
        )
    },
    "one-hot": lambda: {
        "loss": keras.losses.CategoricalFocalCrossentropy(
            from_logits=True, dtype="float64"
        )
    },
    "metrics": lambda: {"metrics": {"margin": margin}, "eval_steps": 3},
    "adamw": lambda: {
        "optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5)
    },
    "own": lambda: {"optimizer": HalfSign(0.02, scale=0.25)},
    "schedule": lambda: {
        "learning_rate": keras.optimizers.schedules.CosineDecay(0.1, 4)
    },
    "both": lambda: {
        "optimizer": keras.optimizers.SGD(
            keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.01]),
            momentum=0.9,
        )
    },
    "stream": lambda: {"data": stream()},
}


@pytest.mark.parametrize("case", CASES)
def test_two_towers_compute_the_same_as_one_tower(tmp_path, case):
    given = CASES[case]()
    one, of_one = trained(tmp_path / "1", **given)
    two, of_two = trained(tmp_path / "2", num_gpus=2, **given)
    assert runs.largest_difference(of_one, of_two) < 1e-12
    for step, metrics in one.history.items():
        for name in metrics.keys() - {"examples_per_sec"}:
            assert metrics[name] == pytest.approx(two.history[step][name], rel=1e-12)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A run with an object of every kind, and how it was made."""
    rates = keras.optimizers.schedules.PolynomialDecay(0.1, 5, 0.01)
    given = {
        "loss": focal,
        "metrics": {"margin": margin},
        "optimizer": keras.optimizers.AdamW(rates, weight_decay=0.1),
        "eval_steps": 3,
        "moving_average_decay": 0.0,
    }
    train_dir = tmp_path_factory.mktemp("objects") / "run"
    return train(config(train_dir, **given)), given


def test_a_step_equals_a_step_of_a_loop_in_keras(everything):
    record, given = everything
    with_rate = given["optimizer"]
    optimizer = type(with_rate).from_config(with_rate.get_config())
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    images = distortions.prepare(tf.constant(X), "none")
    model = build_model(record.config.network.model, (8, 8, 3), 4, precision="float64")
    for step in (1, 2, 3):
        with tf.GradientTape() as tape:
            logits = model(images)
            loss = tf.reduce_mean(focal(Y, logits)) + tf.add_n(model.losses)
        found = record.history[step]
        assert found["total_loss"] == pytest.approx(float(loss), rel=1e-9)
        entropy = keras.losses.sparse_categorical_crossentropy(Y, logits, True)
        assert found["cross_entropy"] == pytest.approx(np.mean(entropy), rel=1e-9)
        assert found["metrics/margin"] == pytest.approx(
            np.mean(margin(Y, logits)), rel=1e-9
        )
        assert found["learning_rate"] == pytest.approx(0.1 - 0.09 * (step - 1) / 5)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    logits = model(images[:12])
    expected = float(np.mean(margin(Y[:12], logits)))
    scored = evaluate(record)
    assert scored["metrics/margin"] == pytest.approx(expected, rel=1e-6)
    (line,) = runs.logged(record.train_dir / "eval")
    assert line["metrics/margin"] == pytest.approx(scored["metrics/margin"])
    # Nobody but the program could compute its loss, so no evaluation does.
    assert not {"total_loss"} & {*line, *scored}
    by_directory = evaluate(record.train_dir, data=(X[:12], Y[:12]), model=linear)
    assert scored.keys() - by_directory.keys() == {"metrics/margin"}


def test_a_function_gets_labels_of_one_type(tmp_path):
    seen = []

    def noted(labels, logits):
        seen.append(labels.dtype)
        return margin(labels, logits)

    given = {"metrics": {"noted": noted}, "eval_steps": 1, "max_steps": 1}
    train(config(tmp_path / "plain", **given, loss=lambda *pair: -noted(*pair)))
    soft = keras.losses.CategoricalCrossentropy(from_logits=True)
    mixed = {"augmentation": {"mixup": {}}, "loss": soft}
    train(config(tmp_path / "mixed", **given, **mixed))
    assert {*seen} == {tf.int64}


def test_custom_metrics_are_shown(tmp_path, capsys):
    given = {"metrics": {"top 2": top_two}, "data": (X, Y), "max_steps": 1}
    given["precision"] = "float32"
    record = train(config(tmp_path / "run", **given))
    printed = capsys.readouterr().out
    shown = re.search(r"^step 1, .*metrics/top 2 ([\d.]+)", printed, re.MULTILINE)
    assert float(shown[1]) == pytest.approx(record.metrics["metrics/top 2"], abs=0.01)
    assert (
        runs.logged(record.train_dir)[0]["metrics/top 2"]
        == record.metrics["metrics/top 2"]
    )
    assert (
        "metrics/top 2"
        in event_readers.read(record.train_dir / "train").Tags()["tensors"]
    )


def test_a_custom_metric_decides_the_best_checkpoint(tmp_path):
    """Commands have no functions, but the scores that the training has written."""
    run, data = tmp_path / "run", tmp_path / "set.npz"
    np.savez(data, x_train=X, y_train=Y, x_test=X[:12], y_test=Y[:12])
    own = {"metrics": {"least": lambda *one: -margin(*one)}, "best_by": "metrics/least"}
    given = {"data": data, "precision": "float32", "eval_steps": 1, "keep_best": 1}
    record = train(config(run, **own, **given, keep_checkpoints=1))
    found = {line["step"]: line["metrics/least"] for line in runs.logged(run / "eval")}
    best = max(found, key=found.get)
    assert record.best == (best, found[best])
    assert best == 1, "it falls, so that the newest and the best differ"
    model = f"--trust_model={__name__}:linear"
    for step in (1, 3):
        done = runs.call("eval.py", "--step", step, "--train_dir", run, model)
        assert done.returncode == 0, done.stderr
    done = runs.call("cifar10/__main__.py", "runs", tmp_path)
    assert f"best metrics/least = {found[1]:.3f} on test at step 1" in done.stdout
    done = runs.call("eval.py", "--step", "best", "--train_dir", run, "--json", model)
    assert json.loads(done.stdout)["step"] == 1, done.stderr
    done = runs.call("train.py", "--resume", run, "--max_steps", 5)
    assert "--best_by metrics/least" in done.stderr


def test_a_run_resumes_only_with_the_same_objects(everything):
    record, given = everything
    path = record.train_dir
    settings = RecordedRun.read(path).entries
    assert settings["optimizer"] == "python:AdamW"
    assert settings["optimizer_arguments"] == {"weight_decay": 0.1}
    assert settings["keras_schedule"].startswith("PolynomialDecay")
    for name, other in (
        ("loss", margin),
        ("loss", None),
        ("optimizer", keras.optimizers.AdamW(0.1, weight_decay=0.1)),
        (
            "optimizer",
            keras.optimizers.AdamW(
                keras.optimizers.schedules.PolynomialDecay(0.1, 6, 0.01),
                weight_decay=0.1,
            ),
        ),
    ):
        with pytest.raises(UsageError, match=f"{name}|keras_schedule"):
            train(config(path, **{**given, name: other}, max_steps=4))
    given = {**given, "data": record.config.data_objects}
    for name, missing in (("loss", "--optimizer"), ("optimizer", "loss")):
        without = {key: value for key, value in given.items() if key in (name, "data")}
        with pytest.raises(UsageError, match=f"^{missing} .* Python object"):
            train(Config(resume=path, model=linear, **without))
    done = runs.call("train.py", "--resume", path, "--max_steps", 5)
    assert done.returncode == 2, "a command has no objects"
    assert train(config(path, **given, max_steps=4)).step == 4


class Sum(keras.losses.Loss):
    def call(self, labels, logits):
        return -tf.reduce_sum(labels * logits, axis=-1)


class Centre(keras.losses.Loss):
    """A loss that would have to be trained."""

    def __init__(self, *, trainable=True):
        super().__init__()
        self.centre = tf.Variable(1.0, trainable=trainable)

    def call(self, labels, logits):
        return tf.reduce_sum(labels * logits, axis=-1) * self.centre


class Gathering(keras.losses.Loss):
    """Takes whole numbers, as a function would, where it gets one-hot labels."""

    def call(self, labels, logits):
        indices = tf.cast(labels, tf.int32)
        return -tf.gather(tf.nn.log_softmax(logits), indices, batch_dims=1)


class SparseGathering(Gathering):
    """Gets whole numbers, by its name."""


class Certain(keras.losses.Loss):
    """The entropy of what is predicted, whatever the labels."""

    def call(self, labels, logits):  # noqa: ARG002
        return tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(logits), logits)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that would begin anew with every start of a run."""

    def __init__(self):
        super().__init__()
        self.rate = tf.Variable(0.1)

    def __call__(self, step):  # noqa: ARG002
        return self.rate.assign(self.rate * 0.5)

    def get_config(self):
        return {}


class Within(Halving):
    """The same in a function of its own, in which a graph shows no writing."""

    @tf.function
    def __call__(self, step):
        return super().__call__(step)


class Random(Halving):
    def __call__(self, step):  # noqa: ARG002
        return tf.random.uniform([])


class Rising(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def __call__(self, step):
        return self.step * (tf.cast(step, tf.float32) + 1.0)


class DescribedRising(Rising):
    def get_config(self):
        return {"step": self.step}


def excluding(**what):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**what)
    return optimizer


sparse = keras.losses.SparseCategoricalCrossentropy
schedules = keras.optimizers.schedules
BAD = {
    "from_logits": lambda: {"loss": sparse()},
    "loss gets logits": lambda: {"loss": keras.losses.sparse_categorical_crossentropy},
    "metric m gets logits": lambda: {
        "metrics": {"m": keras.losses.sparse_categorical_crossentropy}
    },
    "label_smoothing has no effect": lambda: {
        "loss": sparse(from_logits=True),
        "label_smoothing": 0.1,
    },
    "schedule has no effect": lambda: {
        "learning_rate": DescribedRising(0.1),
        "schedule": "cosine",
    },
    "Rising: .* get_config": lambda: {"learning_rate": Rising(0.1)},
    "Adam: .* get_config": lambda: {"optimizer": keras.optimizers.Adam(Rising(0.1))},
    "LossScaleOptimizer wraps": lambda: {
        "optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))
    },
    "MultiOptimizer wraps": lambda: {
        "optimizer": keras.optimizers.MultiOptimizer(
            [(keras.optimizers.SGD(0.1), lambda _: True)]
        )
    },
    "ScheduleFreeAdamW wraps": lambda: {
        "optimizer": keras.optimizers.ScheduleFreeAdamW(0.1)
    },
    "of Undescribed lacks": lambda: {"optimizer": Undescribed(0.1, scale=np.ones(2))},
    "Undescribed lacks scale": lambda: {"optimizer": Undescribed(0.1, scale=0.0)},
    "no checkpoint holds a schedule's state": lambda: {"learning_rate": Halving()},
    "holds a schedule's state": lambda: {"learning_rate": Within()},
    "a schedule's state. Use the step": lambda: {"learning_rate": Random()},
    "it is -0.375 at step 2": lambda: {
        "learning_rate": keras.optimizers.schedules.PolynomialDecay(
            0.5, 2, end_learning_rate=-0.375
        )
    },
    "the schedule failed": lambda: {"learning_rate": DescribedRising([0.1, 0.2])},
    "attribute.'numpy'": lambda: {"metrics": {"m": lambda _, z: z.numpy().mean(1)}},
    r"m: it failed on labels \(64,\)": lambda: {
        "metrics": {"m": lambda _, logits: np.argmax(logits, 1)}
    },
    "Python `bool` is not allowed": lambda: {
        "loss": lambda labels, logits: (
            focal(labels, logits) * (2.0 if logits[0, 0] > 100.0 else 1.0)
        )
    },
    "TwoRates cannot be created": lambda: {"optimizer": TwoRates(0.1, 0.2)},
    "Give var_names": lambda: {"optimizer": excluding(var_list=[keras.Variable(1.0)])},
    "total_loss": lambda: {"loss": Sum(reduction="sum")},
    "random numbers or variables": lambda: {"loss": Centre()},
    "numbers or variables": lambda: {"loss": Centre(trainable=False)},
    "no gradient for logits below 0": lambda: {
        "loss": lambda *pair: 2.0 * keras.losses.sparse_categorical_crossentropy(*pair)
    },
    "loss reads labels as whole numbers": lambda: {"loss": Gathering()},
    r"It gets labels \(64, 4\) and logits \(64, 4\)": lambda: {
        "loss": Sum(reduction="sum")
    },
    r"It gets labels \(64,\) and logits \(64, 4\)": lambda: {
        "metrics": {"m": lambda _, logits: tf.reduce_max(logits)}
    },
    "initial_learning_rate, here 0.001, is its highest": lambda: {
        "optimizer": "muon",
        "learning_rate": schedules.CosineDecay(
            0.001, 4, warmup_target=0.1, warmup_steps=2
        ),
    },
    "it is 0.2 at step 0, but muon needs": lambda: {
        "optimizer": "muon",
        "learning_rate": schedules.PiecewiseConstantDecay([1], [0.2, 0.1]),
    },
    "the mean of such": lambda: {"loss": lambda _, logits: tf.reduce_max(logits)},
    "metrics/m": lambda: {
        "metrics": {"m": lambda labels, _: tf.random.uniform([len(labels)])}
    },
    # A function that does not say what it takes.
    "it failed on labels": lambda: {"loss": max},
    "loss focal": lambda: {"loss": "focal"},
    "dict": lambda: {"metrics": [margin]},
    "metrics={": lambda: {"metrics": margin},
    "a dict of functions": lambda: {"metrics": {"margin": 3}},
    "optimizer=Adam": lambda: {"optimizer": keras.optimizers.Adam},
    "best_by='cross_entropy'": lambda: {"loss": focal, "best_by": "total_loss"},
    "precision @ 1, .* metrics/m": lambda: {
        "metrics": {"m": margin},
        "best_by": "metrics/margin",
    },
    "that keep no state": lambda: {
        "metrics": {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
    },
    "moving_average_decay": lambda: {"optimizer": keras.optimizers.Adam(use_ema=True)},
    "no known size": lambda: {"data": stream().repeat()},
    "assert_cardinality": lambda: {"data": stream().filter(lambda image, label: True)},
    "has batches": lambda: {"data": stream().batch(8, drop_remainder=True)},
    r"\.unbatch\(\)\.apply": lambda: {"data": stream().batch(7)},
    "float32": lambda: {"data": stream().map(lambda x, y: (tf.cast(x, "float32"), y))},
    r"optimizer_arguments \[1\]": lambda: {
        "optimizer": keras.optimizers.Adam(0.1),
        "optimizer_arguments": [1],
    },
    "no pairs": lambda: {"data": stream().map(lambda x, y: {"x": x, "y": y})},
    "yields no pairs": lambda: {"data": stream().map(lambda x, y: (x, y, 1.0))},
    "x_train": lambda: {"data": stream().map(lambda x, y: ((x, x), y))},
    "1 is not a name": lambda: {"metrics": {"1": margin, 1: margin}},
    "'' is not a name": lambda: {"metrics": {"": margin}},
}


@pytest.mark.parametrize("why", BAD)
def test_objects_unsuitable_for_towers_are_refused(tmp_path, why):
    with pytest.raises(UsageError, match=why):
        train(config(tmp_path / "run", **BAD[why]()))
    assert not (tmp_path / "run").exists()


def of_own_probabilities(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, tf.nn.softmax(logits))


def bounded(labels, logits):
    """A loss without a gradient for images that are wrong, whose labels may be."""
    entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.minimum(entropies, 2.0)


def hinge(labels, logits):
    """A loss without a gradient for images that are right."""
    return tf.nn.relu(1.0 - margin(labels, logits))


def nothing(_, logits):
    return 0.0 * tf.reduce_sum(logits, axis=1)


UNUSUAL = {
    "of-own-probabilities": lambda: of_own_probabilities,
    "bounded": lambda: bounded,
    "hinge": lambda: hinge,
    "nothing": lambda: nothing,
    "whatever-the-labels": lambda: Certain(dtype="float64"),
    "of-whole-numbers": lambda: SparseGathering(dtype="float64"),
    "of-a-subclass": lambda: type("Own", (sparse,), {})(
        from_logits=True, dtype="float64"
    ),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_unusual_loss_is_taken(tmp_path, kind):
    given = {"loss": UNUSUAL[kind](), "max_steps": 1}
    metrics = train(config(tmp_path / "run", **given)).metrics
    if kind in ("of-whole-numbers", "of-a-subclass"):
        cross_entropy = metrics["total_loss"] - metrics["penalties"]
        assert cross_entropy == pytest.approx(metrics["cross_entropy"])


def test_a_loss_may_look_values_up(tmp_path):
    """A table has no values that a training could change."""
    keys, factors = tf.range(4, dtype=tf.int64), tf.constant([1.0, 2.0, 3.0, 4.0])
    given = tf.lookup.KeyValueTensorInitializer(keys, factors)
    table = tf.lookup.StaticHashTable(given, 0.0)

    def weighted(labels, logits):
        return focal(labels, logits) * tf.cast(table.lookup(labels), logits.dtype)

    assert train(config(tmp_path / "run", loss=weighted)).step == 3


def test_layers_that_were_trained_begin_no_run_but_resume_theirs(tmp_path):
    base = keras.layers.Dense(4)

    def around(image_shape, classes):
        images = keras.Input(image_shape)
        inner = base(keras.layers.Flatten()(images))
        return keras.Model(images, keras.layers.Dense(classes)(inner))

    train(config(tmp_path / "first", model=around))
    with pytest.raises(UsageError, match="was trained since"):
        train(config(tmp_path / "second", model=around))
    assert not (tmp_path / "second" / "config.json").exists()
    assert train(config(tmp_path / "first", model=around, max_steps=5)).step == 5


def test_muon_takes_a_schedule_that_begins_with_its_highest_rate(tmp_path):
    given = {"optimizer": "muon", "learning_rate": schedules.CosineDecay(0.1, 4)}
    rates = train(config(tmp_path / "run", **given)).history
    assert rates[1]["learning_rate"] == pytest.approx(0.1)


def test_a_schedule_is_tried_as_far_as_the_run_goes(tmp_path):
    """By hours, no step is known; and a variable that is only read is no state."""
    falling = keras.optimizers.schedules.PolynomialDecay(0.1, 1000, -0.5)
    record = train(config(tmp_path / "steps", learning_rate=falling))
    assert record.step == 3
    given = {"model": linear, "data": (X, Y), "global_batch_size": len(X)}
    given |= {"train_dir": tmp_path / "hours", "max_hours": 1e-6}
    assert train(Config(**given, learning_rate=falling)).ended == "max_hours"
    rate = tf.Variable(0.25)
    record = train(config(tmp_path / "read", learning_rate=DescribedRising(rate)))
    assert record.history[1]["learning_rate"] == 0.25


def test_an_optimizers_own_methods_and_arguments_are_kept(tmp_path):
    record = train(config(tmp_path / "still", optimizer=Still(0.1), eval_steps=3))
    losses = {line["cross_entropy"] for line in record.history.values()}
    assert len(losses) == 1, "nothing was to move"
    train(config(tmp_path / "usual", optimizer=Undescribed(0.1)))
    given = {"optimizer": RateLast(momentum=0.0, learning_rate=0.1)}
    _, ours = trained(tmp_path / "own", **given)
    _, plain = trained(tmp_path / "plain", optimizer=keras.optimizers.SGD(0.1))
    for name, value in plain.items():
        np.testing.assert_array_equal(ours[name], value, name)


def test_arguments_of_an_optimizer_add_to_those_of_the_object(tmp_path):
    given = {"optimizer_arguments": {"beta_2": 0.9}}
    both = config(tmp_path, optimizer=keras.optimizers.Adam(0.1, beta_1=0.5), **given)
    assert both.update.optimizer_arguments == {"beta_1": 0.5, "beta_2": 0.9}
    assert both.update.learning_rate == pytest.approx(0.1)


def test_mixed_images_reach_the_loss_as_parts_of_classes(tmp_path):
    mixed = {"augmentation": {"mixup": {}}, "max_steps": 1}
    soft = keras.losses.CategoricalCrossentropy(from_logits=True)
    record = train(config(tmp_path / "run", loss=soft, **mixed))
    assert record.metrics["total_loss"] == pytest.approx(
        record.metrics["cross_entropy"] + record.metrics["penalties"]
    )


def test_two_streams_become_training_and_test_splits(tmp_path):
    one = train(config(tmp_path / "1", max_steps=1))
    sized = tf.data.experimental.assert_cardinality(len(X))
    streams = stream().batch(7).unbatch().apply(sized), stream().take(12)
    two = train(config(tmp_path / "2", max_steps=1, data=streams))
    assert evaluate(one) == evaluate(two) == evaluate(two, data=stream().take(12))
    named = stream().take(12).map(Pair)
    assert evaluate(two, data=named) == evaluate(one)


class Pair(NamedTuple):
    image: tf.Tensor
    label: tf.Tensor


class Position(keras.layers.Layer):
    def build(self, shape):
        given = {"shape": (1, *shape[1:]), "initializer": "ones"}
        self.pos_embed = self.add_weight(name="pos_embed", **given)

    def call(self, inputs):
        return inputs + self.pos_embed


def attentive(image_shape, classes):
    image, layers = keras.Input(image_shape), keras.layers
    net = Position(name="pos")(layers.Reshape((64, 3))(image))
    net = layers.LayerNormalization(axis=[1, 2], name="norm")(net)
    net = layers.MultiHeadAttention(2, 4, bias_initializer="ones", name="mha")(net, net)
    return keras.Model(image, layers.Dense(classes, name="head")(layers.Flatten()(net)))


def decaying():
    """An optimizer by which nothing moves but by decay."""
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5, epsilon=1e9)
    optimizer.exclude_from_weight_decay(var_names=["pos_embed", "value"])
    return optimizer


def kernels_that_fit_decays():
    """Keras 3.15 looks for the names in paths, 3.16 in a variable's own name."""
    model = attentive((8, 8, 3), 10)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(decaying(), crossentropy)
    first = {one.path: one.numpy() for one in model.trainable_variables}
    model.fit(X[:8].astype("float32"), np.zeros(8), verbose=0)
    return {
        one.path
        for one in model.trainable_variables
        if one.name == "kernel"
        and np.median(one.numpy() / first[one.path]) == pytest.approx(0.95)
    }


def test_only_kernels_decay_unless_excluded(tmp_path):
    seen = {}

    class Kept:
        def on_start(self, run):
            self.model = run.state.model
            self.first = [one.numpy() for one in self.model.trainable_variables]

        def on_end(self, *_):
            pairs = zip(self.model.trainable_variables, self.first, strict=True)
            for variable, first in pairs:
                if first.any():
                    factors = variable.numpy()[first != 0] / first[first != 0]
                    seen[variable.path] = float(np.median(factors))

    given = {"model": attentive, "optimizer": decaying(), "max_steps": 1}
    train(config(tmp_path / "run", **given), hooks=[Kept()])
    decayed = kernels_that_fit_decays()
    assert len(decayed) in (4, 5)
    for path, factor in seen.items():
        assert factor == pytest.approx(0.95 if path in decayed else 1.0), path
    assert len(seen) == 11
    settings = RecordedRun.read(tmp_path / "run").entries
    assert settings["optimizer_arguments"]["exclude_from_weight_decay"] == (
        "pos_embed|value"
    )


def test_a_programs_own_schedule_sets_the_rate(tmp_path):
    for number, given in enumerate(
        (
            {"learning_rate": DescribedRising(0.25)},
            {"optimizer": keras.optimizers.Adam(DescribedRising(0.25))},
        )
    ):
        record = train(config(tmp_path / f"{number}", **given))
        rates = [line["learning_rate"] for line in record.history.values()]
        assert rates == [0.25, 0.5, 0.75]


def failing():
    def images():
        yield X[0], 0
        raise KeyError("of the generator")

    kinds = (tf.TensorSpec((8, 8, 3), tf.uint8), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(images, output_signature=kinds)


def ragged():
    images = ((X[at, : at + 1], 0) for at in range(8))
    kinds = (tf.TensorSpec((None, 8, 3), tf.uint8), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(lambda: images, output_signature=kinds)


def of(count):
    return tf.data.experimental.assert_cardinality(count)


UNREADABLE = {
    "cannot be read: .*contained only": lambda: (
        stream().filter(lambda x, y: y > 0).apply(of(40))
    ),
    "cannot be read: .*of the generator": lambda: failing().apply(of(40)),
    "cannot be read: .*different shapes": lambda: ragged().apply(of(8)),
    "is an iterator": lambda: iter(stream()),
    "more than this machine": lambda: stream().take(40).repeat(10**13),
}


@pytest.mark.parametrize("why", UNREADABLE)
def test_a_failing_stream_is_refused_with_its_error(tmp_path, why):
    with pytest.raises(UsageError, match=why):
        train(config(tmp_path / "run", data=UNREADABLE[why]()))
    assert not (tmp_path / "run").exists()


NONSENSE = {
    "returned None": lambda labels, logits: None,
    "returned 'x'": lambda labels, logits: "x",
    r"returned \{\}": lambda labels, logits: {},
    "takes 1 positional argument but 2 were given": lambda logits: logits,
    "is nan for random logits": lambda labels, logits: tf.constant(np.nan),
}


@pytest.mark.parametrize("why", NONSENSE)
@pytest.mark.parametrize("kind", ["loss", "metrics"])
def test_a_wrong_result_of_a_custom_function_is_refused(tmp_path, why, kind):
    function = NONSENSE[why]
    given = {"m": function} if kind == "metrics" else function
    name = "metrics/m" if kind == "metrics" else "total_loss"
    with pytest.raises(UsageError, match=f"(?s)^{name}.*{why}"):
        train(config(tmp_path / "run", **{kind: given}))


def test_an_exception_of_a_custom_function_is_shown_with_its_lines(tmp_path):
    def loss(*_):
        raise KeyError("mine")

    with pytest.raises(UsageError, match="KeyError: 'mine'") as caught:
        train(config(tmp_path / "run", loss=loss))
    assert 'raise KeyError("mine")' in str(caught.value)


# What code may change while its names stay.
CODE = {
    "activation": "relu",
    "layer": "hidden",
    "slots": 1,
    "loss": 1.0,
    "metric": 1.0,
}


def coded(image_shape, classes):
    hidden = keras.layers.Dense(5, CODE["activation"], name=CODE["layer"])
    layers = [keras.layers.Flatten(), hidden, keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


class Coded(keras.optimizers.SGD):
    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.slots = self.add_variable([CODE["slots"]], name="slots")


def test_workers_compare_what_their_code_makes_and_computes(tmp_path, monkeypatch):
    given = config(
        tmp_path,
        model=coded,
        loss=lambda labels, logits: CODE["loss"] * focal(labels, logits),
        metrics={
            "m": lambda labels, logits: CODE["metric"] * margin(labels, logits),
            "right": lambda y, z: tf.cast(tf.argmax(z, 1) == y, tf.float32),
        },
        optimizer=Coded(0.01),
    )
    data = as_dataset(given.data_objects)

    def in_common(**changes):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setitem(CODE, name, value)
            return assembly.assemble(given, data).in_common

    before = in_common()
    assert before["metrics"] == ["metrics/m", "metrics/right"]
    assert in_common() == before, "although Keras numbers the layers anew"
    variables = "variables made by the code of --model or --optimizer"
    for change, named in (
        ({"activation": "tanh"}, "computed by the code of --model"),
        ({"layer": "other"}, variables),
        ({"slots": 2}, variables),
        ({"loss": 2.0}, "computed by the code of total_loss"),
        ({"metric": 2.0}, "computed by the code of metrics/m"),
    ):
        now = in_common(**change)
        assert now.keys() == before.keys()
        assert [name for name in now if now[name] != before[name]] == [named]
