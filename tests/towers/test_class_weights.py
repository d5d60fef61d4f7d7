"""Weights of classes: their values, refusals, and that splits do not matter."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.model import loss
from cifar10.towers.class_weights import resolve_class_weights
from cifar10.training import assembly
from small_towers import make_towers, resolved, split

NAMES = ("cat", "dog", "frog")
LABELS = np.repeat(np.arange(3, dtype=np.int32), [6, 3, 1])


def of_training_set(requested, names=NAMES):
    return resolve_class_weights(requested, LABELS, names)


@pytest.mark.parametrize(
    ("requested", "ratios"),
    [
        ("balanced", [1 / 6, 1 / 3, 1]),
        ({"dog": 4, "frog": 0.5}, [1, 4, 0.5]),
        ([0, 1.5, 3], [0, 1, 2]),
    ],
)
def test_weights_keep_their_ratios_and_have_a_mean_of_1(requested, ratios):
    weights = of_training_set(requested)
    np.testing.assert_allclose(weights / weights[2], np.divide(ratios, ratios[2]))
    assert weights[LABELS].mean() == pytest.approx(1.0)


def test_names_are_the_same_in_both_forms_of_an_accent():
    names = ("cat", "caf\xe9", "frog")
    for written in ("caf\xe9", "cafe\u0301"):
        weights = of_training_set({written: 4.0}, names)
        np.testing.assert_allclose(weights / weights[0], [1, 4, 1])


@pytest.mark.parametrize(
    ("requested", "named"),
    [({"frgo": 2.0}, "frog"), ([1.0, 2.0], "3 classes"), ([0, 0, 0], "images")],
)
def test_weights_for_other_classes_are_refused(requested, named):
    with pytest.raises(UsageError, match=named):
        of_training_set(requested)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[class_weights]\ncat = -1", "cat = -1"),
        (f"class_weights = [1{'0' * 400}]", "number"),
        ("class_weights = [1e-320, 1e-320]", "from 1e-12"),
    ],
)
def test_invalid_weights_are_refused_before_tensorflow_starts(tmp_path, line, named):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(line)
    with pytest.raises(UsageError, match=named):
        Config(recipe=str(recipe))


def test_weights_keyed_by_class_numbers_are_refused():
    with pytest.raises(UsageError, match="list"):
        Config(class_weights={0: 1.0, 1: 2.0})


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_equals_kerass_with_sample_weights(label_smoothing):
    random = np.random.default_rng(0)
    logits = tf.constant(random.normal(size=(10, 3)), tf.float32)
    weights = of_training_set("balanced")
    of_keras = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=label_smoothing
    )
    expected = of_keras(tf.one_hot(LABELS, 3), logits, sample_weight=weights[LABELS])
    tower = assembly.build_tower(
        resolved(label_smoothing=label_smoothing).loss, class_weights=weights
    )
    found = tower.loss(logits, tf.constant(LABELS), [])
    assert float(found["total_loss"]) == pytest.approx(float(expected), rel=1e-6)
    plain = loss(logits, tf.constant(LABELS), [])
    assert float(found["precision @ 1"]) == float(plain["precision @ 1"])


def test_two_towers_equal_one_despite_an_uneven_split_of_classes(four_cpus):
    """One tower sees the common class alone, the other one the rare ones too."""
    weighed = functools.partial(loss, class_weights=of_training_set("balanced"))
    images = np.random.default_rng(0).normal(size=(10, 4))
    found = []
    for count in (1, 2):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4,)), keras.layers.Dense(3, dtype="float64")]
        builder = make_towers(keras.Sequential(layers), four_cpus[:count], loss=weighed)
        result = builder.step(split(tf.constant(images), tf.constant(LABELS), count))
        values = [one.numpy() for one in builder.state.model.trainable_variables]
        found.append([float(result.metrics["cross_entropy"]), *values])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
