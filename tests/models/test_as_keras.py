"""A model of any kind trains as Keras's own `fit` trains it, or is refused."""

import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from cifar10 import Config, evaluate, train
from cifar10.errors import UsageError
from cifar10.model import loss
from cifar10.models import custom
from cifar10.models.registry import build_model
from small_towers import make_towers, split

SHAPE, CLASSES = (4, 4, 3), 3
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(8, *SHAPE)).astype("float32")
LABELS = np.arange(8) % CLASSES
STEPS = 3


def sequential(image_shape, classes, *inner, **options):
    flat = [keras.Input(image_shape), layers.Flatten(), *inner]
    return keras.Sequential([*flat, layers.Dense(classes, **options)])


class Assigning(layers.Layer):
    """Writes its trainable scale before it is read, and a value derived from it."""

    def build(self, _):
        self.scale = self.add_weight(initializer="ones")
        self.count = self.add_weight(initializer="zeros", trainable=False)

    def call(self, inputs):
        self.count.assign_add(1.0)
        before = self.scale * 1.0
        self.scale.assign(0.5 * self.scale + 0.1 * self.count)
        return inputs * self.scale * before


class Unseeded(layers.Layer):
    def call(self, inputs, training=False):
        return keras.random.dropout(inputs, 0.5) if training else inputs


@functools.cache
def generator():
    return keras.random.SeedGenerator(3)


class Outside(layers.Layer):
    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=generator())


class PerImage(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(inputs), axis=1))
        return inputs


class SumOfLoss(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(inputs)))
        return inputs


class Compiled(layers.Layer):
    """Compiles its own call, which TensorFlow traces once for all towers."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), initializer="ones")

    @tf.function
    def call(self, inputs):
        return tf.matmul(inputs, self.kernel)


class CompiledModel(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.flat, self.dense = layers.Flatten(), layers.Dense(classes)

    @tf.function
    def call(self, images):
        return self.dense(self.flat(images))


class Recomputed(layers.Layer):
    def build(self, shape):
        self.dense = layers.Dense(5)
        self.dense.build(shape)

    def call(self, inputs):
        return keras.remat(self.dense)(inputs)


class OfTensorFlow(layers.Layer):
    """Draws from a state of TensorFlow's, or counts in a variable of its own."""

    def __init__(self, *, counts):
        super().__init__()
        self.count = tf.Variable(0.0, trainable=False) if counts else None

    def call(self, inputs):
        if self.count is None:
            return inputs + tf.random.uniform(tf.shape(inputs), dtype=inputs.dtype)
        self.count.assign_add(1.0)
        return inputs


class OwnStep(keras.Model):
    def compute_loss(self, *args, **kwargs):
        return 0.1 * super().compute_loss(*args, **kwargs)


def two_softmaxes(image_shape, classes):
    image = keras.Input(image_shape)
    parts = [layers.Dense(classes, activation="softmax") for _ in range(2)]
    flat = layers.Flatten()(image)
    return keras.Model(image, layers.Average()([part(flat) for part in parts]))


def own_step(image_shape, classes):
    image = keras.Input(image_shape)
    return OwnStep(image, layers.Dense(classes)(layers.Flatten()(image)))


class InLists(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.flat = layers.Flatten()
        self.blocks = {"a": [layers.Dense(5)], "b": (layers.BatchNormalization(),)}
        self.head = layers.Dense(classes)

    def call(self, images, training=False):
        hidden = self.blocks["a"][0](self.flat(images))
        return self.head(self.blocks["b"][0](hidden, training=training))


MODELS = {
    "assigned-kernel": lambda shape, classes: sequential(
        shape, classes, layers.SpectralNormalization(layers.Dense(5))
    ),
    "assigned-scale": lambda shape, classes: sequential(
        shape, classes, Assigning(), kernel_regularizer="l2"
    ),
    "regularized-where-it-is-assigned": lambda shape, classes: sequential(
        shape,
        classes,
        layers.SpectralNormalization(layers.Dense(5, kernel_regularizer="l2")),
    ),
    "unseeded": lambda shape, classes: sequential(shape, classes, Unseeded()),
    "seeded-elsewhere": lambda shape, classes: sequential(shape, classes, Outside()),
    "a-loss-for-each-image": lambda shape, classes: sequential(
        shape, classes, layers.Dense(5), PerImage()
    ),
    "layers-in-lists": lambda _, classes: InLists(classes),
    "several-dtypes": lambda shape, classes: sequential(
        shape, classes, layers.Dense(5, dtype="float64"), layers.Dense(5)
    ),
    "activity": lambda shape, classes: sequential(
        shape, classes, layers.Dense(5, activity_regularizer="l1")
    ),
}


@pytest.fixture(autouse=True)
def module_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def built(monkeypatch, function, **options):
    """Builds a model of the user's own, as a run does."""
    monkeypatch.setattr(sys.modules[__name__], "own", function, raising=False)
    return build_model(f"{__name__}:own", SHAPE, CLASSES, **options)


def trained_by_keras(model):
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), cross_entropy, jit_compile=False)
    for _ in range(STEPS):
        model.train_on_batch(IMAGES, LABELS)
    return [variable.numpy() for variable in model.weights]


@pytest.mark.parametrize("kind", MODELS)
def test_a_tower_trains_a_model_as_keras_does(monkeypatch, kind):
    generator().state.assign([3, 0])
    model = built(monkeypatch, MODELS[kind])
    builder = make_towers(model, ["/cpu:0"], clip_norm=1e9)
    for _ in range(STEPS):
        builder.step([(tf.constant(IMAGES), tf.constant(LABELS))])
    found = [variable.numpy() for variable in model.weights]
    keras.utils.set_random_seed(0)
    generator().state.assign([3, 0])
    expected = trained_by_keras(MODELS[kind](SHAPE, CLASSES))
    for value, of_keras in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, of_keras, rtol=1e-5, atol=1e-6)


def test_towers_agree_on_the_assignments_of_a_layer(monkeypatch, four_cpus):
    ends = []
    for count in (1, 2, 4):
        model = built(monkeypatch, MODELS["assigned-kernel"])
        builder = make_towers(model, four_cpus[:count], average_decay=None)
        for _ in range(STEPS):
            builder.step(split(tf.constant(IMAGES), tf.constant(LABELS), count))
        ends.append([variable.numpy() for variable in model.variables])
    for end in ends[1:]:
        for value, expected in zip(end, ends[0], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_a_check_does_not_change_the_state_of_a_model(monkeypatch):
    for kind in ("assigned-scale", "layers-in-lists", "unseeded"):
        model = built(monkeypatch, MODELS[kind])
        before = [variable.numpy() for variable in model.variables]
        custom.check_training(kind, model, SHAPE, CLASSES)
        custom.check(kind, model, SHAPE, CLASSES, is_code=True)
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(variable, value, variable.path)
    counter = built(monkeypatch, MODELS["assigned-scale"]).layers[1].count
    assert float(counter) == 0.0


REFUSED = {
    "remat": (lambda *of: sequential(*of, Recomputed()), "custom gradient"),
    "compiled": (lambda *of: sequential(*of, Compiled()), "tf.function"),
    "compiled as a whole": (lambda _, classes: CompiledModel(classes), "tf.function"),
    "tf.Variable": (lambda *of: sequential(*of, OfTensorFlow(counts=True)), "tf.Var"),
    "method of fit": (own_step, "compute_loss"),
    "probabilities": (two_softmaxes, "softmax"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_computed_differently_by_towers_are_refused(monkeypatch, kind):
    function, why = REFUSED[kind]
    model = built(monkeypatch, function)  # An evaluation takes it.
    with pytest.raises(UsageError, match=why):
        custom.check_training("own", model, SHAPE, CLASSES)


def test_unsaved_random_states_are_refused_in_deterministic_runs(monkeypatch):
    kind = lambda *of: sequential(*of, OfTensorFlow(counts=False))  # noqa: E731
    model = built(monkeypatch, kind)
    custom.check_training("own", model, SHAPE, CLASSES)
    with pytest.raises(UsageError, match="RandomUniform"):
        custom.check_training("own", model, SHAPE, CLASSES, deterministic=True)


def test_a_failure_in_bfloat16_suggests_float32(monkeypatch):
    class Constant(layers.Layer):
        def call(self, inputs):
            return inputs * tf.constant(2.0)

    kind = lambda *of: sequential(*of, Constant())  # noqa: E731
    with pytest.raises(UsageError, match="--precision float32"):
        built(monkeypatch, kind, precision="bfloat16")
    built(monkeypatch, kind)


def test_a_state_outside_all_layers_is_refused(monkeypatch):
    outside = keras.Variable(0.0, name="outside", trainable=False)

    class Counting(layers.Layer):
        def call(self, inputs):
            generator_of_nobody = [outside]
            generator_of_nobody[0].assign_add(1.0)
            return inputs

    with pytest.raises(UsageError, match="outside"):
        built(monkeypatch, lambda *of: sequential(*of, Counting()))


PICTURES = RANDOM.integers(0, 256, (16, *SHAPE), np.uint8)
OF_PICTURES = np.arange(16) % CLASSES


class Kept:
    """Notes what the model of a run begins with."""

    def on_start(self, run):
        self.model = run.state.model
        self.first = [variable.numpy() for variable in self.model.weights]

    def moved(self):
        pairs = zip(self.model.weights, self.first, strict=True)
        return [bool(np.any(variable.numpy() != first)) for variable, first in pairs]


def run(train_dir, model, *hooks, **changes):
    data = ((PICTURES, OF_PICTURES), (PICTURES, OF_PICTURES))
    given = {"model": model, "data": data, "train_dir": train_dir}
    given |= {"recipe": "tutorial", "distortions": "none", "precision": "float32"}
    given |= {"num_gpus": 1, "global_batch_size": 16, "max_steps": 3}
    return train(Config(**{**given, **changes}), hooks=hooks)


def test_random_numbers_without_a_generator_continue_after_a_resume(tmp_path):
    ends = []
    for stops in ([4], [2, 4]):
        for stop in stops:
            kept = Kept()
            path = tmp_path / f"{len(stops)}"
            run(path, MODELS["unseeded"], kept, max_steps=stop, deterministic=True)
        ends.append([variable.numpy() for variable in kept.model.variables])
    for one, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, other)


def test_replicas_draw_as_towers_do(tmp_path):
    """Keras makes a generator for each thread, and each replica has a thread."""
    ends = []
    for kind in ("towers", "mirrored"):
        kept = Kept()
        given = {"num_gpus": 2, "variable_update": kind}
        run(tmp_path / kind, MODELS["unseeded"], kept, **given)
        ends.append([variable.numpy() for variable in kept.model.variables])
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_replicas_that_would_share_a_layer_are_refused(tmp_path):
    shared = layers.Dense(5)

    def model(*of):
        return sequential(*of, shared)

    with pytest.raises(UsageError, match="share layers"):
        run(tmp_path / "mirrored", model, num_gpus=2, variable_update="mirrored")
    run(tmp_path / "towers", model, num_gpus=2)


def test_a_loss_depending_on_the_batch_size_is_refused_on_two_towers(tmp_path):
    def model(*of):
        return sequential(*of, SumOfLoss())

    run(tmp_path / "one", model)
    with pytest.raises(UsageError, match="add_loss"):
        run(tmp_path / "two", model, num_gpus=2)
    run(tmp_path / "mean", MODELS["activity"], num_gpus=2)


def test_synchronized_statistics_cover_the_global_batch_or_are_refused(tmp_path):
    def model(*of):
        return sequential(*of, layers.BatchNormalization(synchronized=True))

    def end(name, **changes):
        kept = Kept()
        run(tmp_path / name, model, kept, **changes)
        return kept.model.weights

    with pytest.raises(UsageError, match="mirrored"):
        end("two", num_gpus=2)
    mirrored = end("mirrored", num_gpus=2, variable_update="mirrored")
    for one, other in zip(end("one"), mirrored, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    with pytest.raises(UsageError, match="towers"):
        run(tmp_path / "mirrored", model, accumulate=2, max_steps=4)


class HeadFirst(keras.Model):
    def __init__(self, classes):
        super().__init__()
        self.last = layers.Dense(classes)  # Made first, called last.
        self.features = layers.Dense(5)
        self.flat = layers.Flatten()

    def call(self, images):
        return self.last(self.features(self.flat(images)))


def test_the_head_is_the_layer_called_last(tmp_path):
    kept = Kept()
    run(
        tmp_path / "run",
        lambda _, classes: HeadFirst(classes),
        kept,
        freeze="all-but-head",
    )
    assert kept.moved() == [True, True, False, False]


def test_freeze_takes_the_names_of_the_model(tmp_path):
    """Keras numbers layers throughout a process, and a notebook trains many models."""

    def model(image_shape, classes):
        base = sequential(image_shape, 5, layers.Dense(4), layers.Dense(4))
        return keras.Sequential([keras.Input(image_shape), base, layers.Dense(classes)])

    for number in range(2):
        kept = Kept()
        freeze = "sequential/dense_1, dense/bias"
        run(tmp_path / f"{number}", model, kept, freeze=freeze)
        frozen = [False, False, True, True, False, False, False, True]
        assert kept.moved() == [not one for one in frozen]
    mirrored = {"num_gpus": 2, "variable_update": "mirrored"}
    run(tmp_path / "mirrored", model, freeze="sequential/*", **mirrored)
    with pytest.raises(UsageError, match="sequential/dense_2, dense"):
        run(tmp_path / "none", model, freeze="dense_7")


def test_a_metric_other_than_a_scalar_is_named(monkeypatch):
    def noted(outputs, labels, penalties):
        found = loss(outputs, labels, penalties)
        return {**found, "by class": tf.reduce_mean(outputs, axis=0)}

    builder = make_towers(built(monkeypatch, sequential), ["/cpu:0"], loss=noted)
    with pytest.raises(UsageError, match="by class"):
        builder.step([(tf.constant(IMAGES), tf.constant(LABELS))])


def scored(record, **options):
    found = evaluate(record, **options)
    return found["cross_entropy"], found["precision @ 1"]


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_last_values_of_layers_in_lists_are_restored(tmp_path, precision):
    """A checkpoint's `model` lacks the layers that are in a list or a dict."""
    options = {"precision": precision, "max_steps": 5}
    # Averages of such a decay are the last values.
    record = run(
        tmp_path / "run",
        MODELS["layers-in-lists"],
        moving_average_decay=0.0,
        **options,
    )
    assert scored(record, use_averages=False) == pytest.approx(scored(record))
