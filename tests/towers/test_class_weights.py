"""Weights of classes: what they are, what is refused, and that splits do not matter."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_assembly import resolved
from test_towers import make_towers, split

from cifar10 import model as models
from cifar10.config import flags, options
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.training import assembly, class_weights, settings, train as training
from small_folders import numbered, write

NAMES = ("cat", "dog", "frog")
LABELS = np.repeat(np.arange(3, dtype=np.int32), [6, 3, 1])


def of_training_set(requested):
    return class_weights.of_training_set(requested, LABELS, NAMES)


@pytest.mark.parametrize(
    ("requested", "ratios"),
    [
        ("balanced", [1 / 6, 1 / 3, 1]),
        ({"dog": 4, "frog": 0.5}, [1, 4, 0.5]),
        ([0, 1.5, 3], [0, 1, 2]),
    ],
)
def test_weights_have_their_ratios_and_the_mean_1(requested, ratios):
    weights = of_training_set(requested)
    np.testing.assert_allclose(weights / weights[2], np.divide(ratios, ratios[2]))
    assert weights[LABELS].mean() == pytest.approx(1.0)


def test_balanced_classes_have_the_same_sum():
    """As scikit-learn's: images / (classes x images of the class)."""
    weights = of_training_set("balanced")
    np.testing.assert_allclose(weights, 10 / (3 * np.array([6, 3, 1])))


def test_a_class_without_training_images_changes_no_other():
    found = class_weights.of_training_set("balanced", LABELS, [*NAMES, "newt"])
    np.testing.assert_allclose(found, [*of_training_set("balanced"), 0.0])


def test_without_weights_there_are_none():
    assert of_training_set(Config().class_weights) is None


@pytest.mark.parametrize(
    ("requested", "said"),
    [
        ({"frgo": 2.0}, "there is no class 'frgo'. Did you mean frog? There are cat, "),
        ([1.0, 2.0], "it has 2 numbers, and the data set 3 classes"),
        ([0, 0, 0], "they are 0 for all training images"),
    ],
)
def test_weights_of_other_classes_are_refused(requested, said):
    with pytest.raises(UsageError) as caught:
        of_training_set(requested)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("class_weights = 'even'", "'even': it is 'balanced', a table"),
        ("[class_weights]\ncat = -1", "cat = -1: it has to be a number, 0 or"),
        ("[class_weights]\ncat = 'much'", "cat = 'much': it has to be"),
        ("class_weights = [1, nan]", "1 = nan: it has to be"),
        ("class_weights = [1, true]", "1 = True: it has to be"),
        ("class_weights = 3", "class_weights = 3 is not of type"),
        (f"class_weights = [1{'0' * 400}]", "it has to be a number, 0 or from"),
        ("class_weights = [1e-320, 1e-320]", "0 = 1e-320: it has to be"),
        ("class_weights = [1e308, 1e308]", "0 = 1e+308: it has to be"),
    ],
)
def test_what_is_no_weight_is_refused_before_tensorflow_starts(tmp_path, line, said):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(line)
    with pytest.raises(UsageError) as caught:
        flags.with_recipe({"recipe": str(recipe)})
    assert said in str(caught.value)


def test_another_weight_is_another_result():
    names = options.result_determining(Config, dataclasses.asdict(Config()))
    assert "class_weights" in names
    facts = {"devices": "one", "data_description": "images", "parameters": 3}
    facts |= {"on_gpus": False}
    for weights, is_said in (("balanced", True), (None, False)):
        config = resolved(class_weights=weights)
        said = settings.first_lines({**vars(config), **facts}, 50_000)
        assert ("weighted by class" in said) == is_said


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_loss_is_kerass_with_weights_of_the_images(label_smoothing):
    random = np.random.default_rng(0)
    logits = tf.constant(random.normal(size=(10, 3)), tf.float32)
    weights = of_training_set("balanced")
    of_keras = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=label_smoothing
    )
    expected = of_keras(tf.one_hot(LABELS, 3), logits, sample_weight=weights[LABELS])
    tower = assembly.build_tower(resolved(label_smoothing=label_smoothing), weights)
    found = tower.loss(logits, tf.constant(LABELS), [])
    assert float(found["total_loss"]) == pytest.approx(float(expected), rel=1e-6)
    plain = models.loss(logits, tf.constant(LABELS), [])
    assert float(found["precision @ 1"]) == float(plain["precision @ 1"])


def test_two_towers_equal_one_however_the_classes_are_split(four_cpus):
    """One tower sees the common class alone, the other one the rare ones too."""
    loss = functools.partial(models.loss, class_weights=of_training_set("balanced"))
    images = np.random.default_rng(0).normal(size=(10, 4))
    found = []
    for count in (1, 2):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((4,)), keras.layers.Dense(3, dtype="float64")]
        builder = make_towers(keras.Sequential(layers), four_cpus[:count], loss=loss)
        result = builder.step(split(tf.constant(images), tf.constant(LABELS), count))
        values = [one.numpy() for one in builder.state.model.trainable_variables]
        found.append([float(result.metrics["cross_entropy"]), *values])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_the_training_takes_them_from_its_labels(tmp_path, monkeypatch):
    photos = write(tmp_path / "photos", *numbered(9, "cat"), *numbered(3, "dog"))
    monkeypatch.setenv("CIFAR10_DATA_DIR", str(tmp_path))
    taken = []

    def build_towers(*_, class_weights):
        taken.append(class_weights)
        raise UsageError("that is enough")

    monkeypatch.setattr(assembly, "build_towers", build_towers)
    of_photos = {"data": "folder", "data_dir": str(photos), "image_size": 8}
    config = Config(
        **of_photos, class_weights="balanced", model="resnet", num_gpus=1, batch_size=2
    )
    with pytest.raises(UsageError, match="that is enough"):
        training.train(config)
    (weights,) = taken
    assert weights[1] > weights[0] > 0
