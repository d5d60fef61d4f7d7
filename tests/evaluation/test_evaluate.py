"""Evaluation: exact for every batch size."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import small_runs
from cifar10.errors import UsageError
from cifar10.evaluation import eval_command, scored_set
from cifar10.evaluation.metrics import Sums
from cifar10.evaluation.scored_set import Scorer, evaluation_batches
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES
from cifar10.trained_model import TrainedModel

COUNT, CLASSES = 37, 10
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (COUNT, 32, 32, 3), np.uint8)
LABELS = RANDOM.integers(0, CLASSES, COUNT).astype(np.int32)


def make_model():
    """A small model with dropout, and batch statistics unlike those of any batch."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((24, 24, 3)),
            keras.layers.Conv2D(4, 5, strides=4, activation="relu"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES, kernel_regularizer=keras.regularizers.L2(0.5)),
        ]
    )
    model.get_layer("norm").moving_mean.assign([0.5, -0.5, 1.0, 0.0])
    model.get_layer("norm").moving_variance.assign([2.0, 0.5, 1.0, 3.0])
    return model


def linear(classes=CLASSES, dtype="float32"):
    keras.utils.set_random_seed(2)
    layers = [
        keras.layers.Flatten(dtype=dtype),
        keras.layers.Dense(classes, dtype=dtype),
    ]
    return keras.Sequential([keras.Input((24, 24, 3), dtype=dtype), *layers])


def expected_scores(logits, labels):
    """Computes all sums with numpy from logits, [count, classes]."""
    classes = logits.shape[1]
    logits = logits.astype(np.float64)
    log_sums = np.log(np.sum(np.exp(logits), axis=1))
    confusion = np.zeros((classes, classes), int)
    ranks = np.zeros(classes, int)
    for row, label in zip(logits, labels, strict=True):
        confusion[label, np.argmax(row)] += 1
        ranks[np.argsort(row)[::-1].tolist().index(label)] += 1
    cross_entropy = np.sum(log_sums - logits[np.arange(len(labels)), labels])
    return cross_entropy, ranks, confusion


def assert_scored(sums, logits, labels, tolerance=1e-6):
    cross_entropy, ranks, confusion = expected_scores(logits, labels)
    assert sums.cross_entropy == pytest.approx(cross_entropy, rel=tolerance)
    np.testing.assert_array_equal(sums.confusion, confusion)
    np.testing.assert_array_equal(sums.ranks, ranks)


def logits_of(model, images):
    """Calls the model on all images at once, prepared one by one by tf.image."""
    crops = [tf.image.per_image_standardization(image[4:28, 4:28]) for image in images]
    return model(tf.stack(crops), training=False).numpy()


def own_values(model):
    return [variable.value for variable in model.trainable_variables]


@pytest.mark.parametrize("batch_size", [7, 64])
def test_every_image_counts_once(four_cpus, batch_size):
    model = make_model()
    score = Scorer(model).score
    for count in (COUNT, 20):  # Of a part of the set the first images.
        batches = evaluation_batches(IMAGES[:count], LABELS[:count], batch_size)
        outcomes, weight_decay = score(own_values(model), batches, four_cpus[1])
        sums = Sums.of(outcomes, CLASSES)
        assert sums.count == count
        assert_scored(sums, logits_of(model, IMAGES[:count]), LABELS[:count])
        kernel = model.layers[-1].kernel.numpy()
        assert weight_decay == pytest.approx(0.5 * np.sum(kernel**2), rel=1e-5)


def test_given_values_are_scored_and_each_image_is_reported_in_order(four_cpus):
    model, averaged = make_model(), make_model()
    own = [variable.numpy() for variable in model.variables]
    random = np.random.default_rng(4)
    for variable in averaged.trainable_variables:
        variable.assign(random.normal(size=variable.shape) * 0.3)
    batches = evaluation_batches(IMAGES, LABELS, 16)
    outcomes, weight_decay = Scorer(model).score(
        own_values(averaged), batches, four_cpus[0]
    )
    for variable, value in zip(model.variables, own, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    logits = logits_of(averaged, IMAGES).astype(np.float64)
    assert_scored(Sums.of(outcomes, CLASSES), logits, LABELS)
    kernel = averaged.layers[-1].kernel.numpy()
    assert weight_decay == pytest.approx(0.5 * np.sum(kernel**2), rel=1e-5)
    part = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = -np.log(part[np.arange(COUNT), LABELS])
    np.testing.assert_allclose(outcomes.cross_entropy, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(outcomes.predictions, logits.argmax(axis=1))
    np.testing.assert_allclose(outcomes.confidence, part.max(axis=1), rtol=1e-4)


def test_three_classes_without_penalties_are_scored_correctly(four_cpus):
    """With three classes every image is correct at five, and nothing decays."""
    model, labels = linear(3), LABELS % 3
    batches = evaluation_batches(IMAGES, labels, 16)
    outcomes, weight_decay = Scorer(model).score(
        own_values(model), batches, four_cpus[0]
    )
    sums = Sums.of(outcomes, 3)
    assert_scored(sums, logits_of(model, IMAGES), labels)
    assert (sums.ranks[:5].sum(), weight_decay) == (COUNT, 0.0)


def test_a_run_is_scored_on_the_chosen_device(tmp_path, four_cpus, monkeypatch):
    """Another logical one stands for a GPU."""
    monkeypatch.setitem(ARCHITECTURES, "small", Architecture(small_runs.small))
    small_runs.describe(run := tmp_path / "run")
    small_runs.save(run, 10)
    trained = TrainedModel(run, four_cpus[1])
    trained.restore()
    variables = *trained.trainable, *trained.non_trainable
    assert {one.device[-5:] for one in variables} == {"CPU:1"}
    found, traced = set(), scored_set.traced

    def noting(given):
        function = traced(given)

        def compute(*given):
            result = function(*given)
            found.update(one.device[-5:] for one in tf.nest.flatten(result))
            return result

        return compute

    monkeypatch.setattr(scored_set, "traced", noting)
    batches = evaluation_batches(IMAGES, LABELS, COUNT)
    Scorer(trained.model).score(trained.trainable, batches, four_cpus[1])
    assert found == {"CPU:1"}


def test_ranks_agree_with_in_top_k(four_cpus):
    """With ties at every limit, and logits that are not finite."""
    random = np.random.default_rng(3)
    logits = random.integers(0, 4, (200, 6)).astype(np.float32)
    logits[0, 2], logits[1, 5], logits[2] = np.nan, np.inf, -np.inf
    labels = random.integers(0, 6, 200).astype(np.int32)
    labels[:3] = 0  # Also the place of the largest, as NumPy sees it, of NaN.
    mask = random.random(200) < 0.8
    mask[:3] = True
    images = keras.Input((6,))
    model = keras.Model(images, keras.layers.Identity()(images))
    batches = tf.data.Dataset.from_tensors((logits, labels, mask))
    outcomes = Scorer(model).score([], batches, four_cpus[0])[0]
    assert (outcomes.predictions[:3] != 0).all()
    sums = Sums.of(outcomes, 6)
    for k in range(1, 7):
        among = tf.math.in_top_k(labels, logits, k).numpy()
        among[:3] = False  # It looks at some of the other logits only.
        assert sums.ranks[:k].sum() == np.count_nonzero(among & mask)


def test_float64_is_kept(four_cpus):
    model = linear(dtype="float64")
    batches = evaluation_batches(IMAGES, LABELS, 16)
    outcomes, _ = Scorer(model).score(own_values(model), batches, four_cpus[0])
    crops = np.concatenate([images[mask] for images, _, mask in batches])
    kernel, bias = own_values(model)
    logits = crops.reshape(COUNT, -1).astype(np.float64) @ kernel + bias
    sums = Sums.of(outcomes, CLASSES)
    assert_scored(sums, logits.numpy(), LABELS, tolerance=1e-12)


def test_the_six_views_are_weighted_as_in_airbench(four_cpus):
    model = linear()
    batches = evaluation_batches(IMAGES, LABELS, 16)
    images = np.concatenate([images[mask] for images, _, mask in batches])
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)], "reflect")

    def both(seen):
        return (model(seen).numpy() + model(seen[:, :, ::-1]).numpy()) / 2

    moved = (both(padded[:, 2:, 2:]) + both(padded[:, :-2, :-2])) / 2
    outcomes, _ = Scorer(model, test_time_augmentation=True).score(
        own_values(model), batches, four_cpus[0]
    )
    sums = Sums.of(outcomes, CLASSES)
    assert_scored(sums, (both(images) + moved) / 2, LABELS, tolerance=1e-5)


def test_meaningless_options_are_named():
    for field, value in (("num_examples", 0), ("step", "15.5")):
        with pytest.raises(UsageError, match=f"--{field} {value}"):
            eval_command.Options(**{field: value})
    eval_command.Options(batch_size=1, num_examples=1)
    for once in ({"run_once": True}, {"step": "5"}, {"calibrate": True}):
        with pytest.raises(UsageError, match="--eval_interval_secs 5 has no effect"):
            eval_command.Options(eval_interval_secs=5.0, **once)
    eval_command.Options(eval_interval_secs=5.0)
