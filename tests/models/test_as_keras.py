"""A model of any kind trains as Keras's own `fit` trains it, or is refused."""

import functools
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from cifar10 import Config, evaluate, train
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
    "assigned kernel": lambda shape, classes: sequential(
        shape, classes, layers.SpectralNormalization(layers.Dense(5))
    ),
    "assigned scale": lambda shape, classes: sequential(
        shape, classes, Assigning(), kernel_regularizer="l2"
    ),
    "regularized where it is assigned": lambda shape, classes: sequential(
        shape,
        classes,
        layers.SpectralNormalization(layers.Dense(5, kernel_regularizer="l2")),
    ),
    "unseeded": lambda shape, classes: sequential(shape, classes, Unseeded()),
    "seeded elsewhere": lambda shape, classes: sequential(shape, classes, Outside()),
    "a loss for each image": lambda shape, classes: sequential(
        shape, classes, PerImage()
    ),
    "layers in lists": lambda _, classes: InLists(classes),
    "several dtypes": lambda shape, classes: sequential(
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
    """Builds a model of the user's own, as a training does."""
    monkeypatch.setattr(sys.modules[__name__], "own", function, raising=False)
    return build_model(f"{__name__}:own", SHAPE, CLASSES, **options)


def trained_by_keras(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    for _ in range(STEPS):
        model.train_on_batch(IMAGES, LABELS)
    return [variable.numpy() for variable in model.weights]


@pytest.mark.parametrize("kind", MODELS)
def test_a_tower_trains_it_as_keras_does(monkeypatch, kind):
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


def test_towers_agree_on_what_a_layer_assigns(monkeypatch, four_cpus):
    """Each computes the same from the same values; images do not matter here."""
    ends = []
    for count in (1, 2, 4):
        model = built(monkeypatch, MODELS["assigned kernel"])
        builder = make_towers(model, four_cpus[:count], average_decay=None)
        for _ in range(STEPS):
            builder.step(split(tf.constant(IMAGES), tf.constant(LABELS), count))
        ends.append([variable.numpy() for variable in model.variables])
    for end in ends[1:]:
        for value, expected in zip(end, ends[0], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_a_check_leaves_the_state_of_a_model_alone(monkeypatch):
    for kind in ("assigned scale", "layers in lists", "unseeded"):
        model = built(monkeypatch, MODELS[kind])
        before = [variable.numpy() for variable in model.variables]
        custom.check_training(kind, model, SHAPE, CLASSES)
        custom.check(kind, model, SHAPE, CLASSES, is_code=True)
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(variable, value, variable.path)
    counter = built(monkeypatch, MODELS["assigned scale"]).layers[1].count
    assert float(counter) == 0.0


def scored(record, **options):
    found = evaluate(record, **options)
    return found["cross_entropy"], found["precision @ 1"]


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_last_values_are_restored_whatever_holds_them(tmp_path, precision):
    """A checkpoint's `model` lacks the layers that are in a list or a dict."""
    pictures = RANDOM.integers(0, 256, (16, *SHAPE), np.uint8)
    labels = np.arange(16) % CLASSES

    record = train(
        Config(
            model=MODELS["layers in lists"],
            data=((pictures, labels), (pictures, labels)),
            train_dir=tmp_path / "run",
            recipe="tutorial",
            distortions="none",
            precision=precision,
            batch_size=16,
            max_steps=5,
            moving_average_decay=0.0,  # The averages are the last values.
        ),
    )
    assert scored(record, use_averages=False) == pytest.approx(scored(record))
