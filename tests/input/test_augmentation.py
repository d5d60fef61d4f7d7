"""Random erasing, mixup and cutmix; and batches with them, however they are split."""

import collections
import functools
import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_summaries import read, tensors

import runs
from cifar10.config import flags
from cifar10.config.augmentation import MIXING
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import datasets, on_device, pipeline
from cifar10.input.augmentation import erasing, mixing
from cifar10.input.augmentation.batches import AugmentedBatches
from small_sets import OnDisk

RANDOM = np.random.default_rng(0)
COUNT = 50
IMAGES = RANDOM.integers(0, 256, (COUNT, 32, 32, 3), np.uint8)
LABELS = np.arange(COUNT, dtype=np.int32) % 10
EVERYTHING = {
    "rand_augment": {"operations": 1},
    "random_erasing": {"probability": 0.5},
    "cutout": {"side": 6},
    "mixup": {"probability": 0.5},
    "cutmix": {"probability": 0.4},
}


def drawn(count, batch, seed=0):
    values = np.random.default_rng(seed).random((count, batch), np.float32)
    return tf.unstack(tf.constant(values))


# ---- the table of a recipe


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ("[augmentation]\nblur = {}", "blur = {}: it has the tables rand_augment,"),
        ("[augmentation]\ncutout = {side = 32}", "it is a whole number from 1 to 31."),
        ("[augmentation]\nmixup = 0.2", "mixup = 0.2: it has the tables"),
        ("augmentation = 'mixup'", "is not of type Mapping"),
        (
            "[augmentation]\nmixup = {beta = 1}",
            "mixup.beta = 1: mixup has alpha and probability alone",
        ),
        ("[augmentation]\nmixup = {alpha = 0}", "mixup.alpha = 0: it is a number from"),
        ("[augmentation]\nmixup = {alpha = nan}", "mixup.alpha = nan: it is a number"),
        (
            "[augmentation]\nrandom_erasing = {probability = true}",
            "random_erasing.probability = True: it is a number from 0 to 1.",
        ),
        (
            "[augmentation]\nrand_augment = {operations = 2.5}",
            "rand_augment.operations = 2.5: it is a whole number from 1 to 14.",
        ),
        (
            "[augmentation]\nrand_augment = {magnitude = 31}",
            "rand_augment.magnitude = 31: it is a number from 0 to 30.",
        ),
        (
            "[augmentation]\nmixup = {}\ncutmix = {probability = 0.5}",
            "mixup and cutmix add up to 1.5, and an image is mixed in one way",
        ),
        (
            "batch_size = 33\n[augmentation]\nmixup = {}",
            "--batch_size 33: mixup and cutmix mix images in pairs",
        ),
    ],
)
def test_tables_that_are_no_augmentation_are_refused(tmp_path, declared, said):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(declared)
    with pytest.raises(UsageError) as caught:
        flags.with_recipe({"recipe": str(recipe)})
    assert said in str(caught.value)


def test_a_recipe_holds_the_augmentation_as_a_table(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[augmentation]\nmixup = {alpha = 1, probability = 0.5}\n")
    config = flags.with_recipe({"recipe": str(recipe)})
    assert config.augmentation == {"mixup": {"alpha": 1, "probability": 0.5}}
    odd = Config(batch_size=33, augmentation={"rand_augment": {}, "random_erasing": {}})
    assert odd.batch_size == 33, "only mixing needs pairs"


# ---- random erasing


def test_rectangles_of_the_papers_areas_and_shapes_become_noise():
    batch, height, width = 2000, 40, 32
    images = tf.fill([batch, height, width, 3], 7.0)
    noise = tf.constant(RANDOM.random((height, width, 3), np.float32))
    result = erasing.erase(images, drawn(erasing.NUMBERS, batch), noise, 0.6).numpy()
    erased = (result != 7.0).any(axis=-1)
    is_erased = erased.any(axis=(1, 2))
    assert np.mean(is_erased) == pytest.approx(0.6, abs=5 * math.sqrt(0.24 / batch))
    areas, ratios, firsts = [], [], []
    for mask in erased[is_erased]:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        assert mask[top:bottom, left:right].all()
        assert mask.sum() == (bottom - top) * (right - left)
        areas.append(mask.mean())
        ratios.append((right - left) / (bottom - top))
        firsts.append((top == 0, bottom == height, left == 0, right == width))
    assert 0.015 < min(areas) < 0.04 < 0.35 < max(areas) < 0.42
    assert 0.25 < min(ratios) < 0.4 < 2.5 < max(ratios) < 4.0
    assert np.mean(firsts, axis=0).min() > 0.01, "they reach every edge"
    values = result[result != 7.0]
    assert values.mean() == pytest.approx(0.0, abs=0.02)
    assert values.std() == pytest.approx(1.0, abs=0.02)
    assert np.abs(values).max() <= math.sqrt(3)


def test_each_image_has_noise_of_its_own():
    images = tf.zeros([40, 32, 32, 3])
    noise = tf.constant(RANDOM.random((32, 32, 3), np.float32))
    result = erasing.erase(images, drawn(erasing.NUMBERS, 40), noise, 1.0).numpy()
    assert len(set(np.unique(result).tolist())) > 0.9 * np.count_nonzero(result)


def test_nothing_is_erased_where_no_size_fits():
    """Ratios of 10 to 1 in images of 100 to 1."""
    images = tf.zeros([64, 100, 1, 3])
    numbers = [tf.zeros([64])] * 4 + [tf.ones([64]) * 0.99] * (erasing.NUMBERS - 4)
    result = erasing.erase(images, numbers, tf.zeros([100, 1, 3]), 1.0)
    np.testing.assert_array_equal(result, images)


def test_cutout_is_a_square_that_lies_anywhere_within_the_image():
    images = tf.ones([4000, 16, 32, 1])
    result = erasing.cut_out(images, *drawn(2, 4000), side=12).numpy()
    seen = collections.Counter()
    for image in result[..., 0]:
        rows, columns = (
            np.flatnonzero(1 - image.min(1)),
            np.flatnonzero(1 - image.min(0)),
        )
        top, left = rows[0], columns[0]
        expected = np.ones((16, 32))
        expected[top : top + 6, left : left + 12] = 0
        np.testing.assert_array_equal(image, expected)
        seen[top, left] += 1
    assert len(seen) == 11 * 21  # Every place occurs, of those with the whole of it.


# ---- mixing


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_weights_are_distributed_as_beta(alpha):
    values = mixing.quantiles_of_beta(alpha)
    sample = np.sort(np.random.default_rng(0).beta(alpha, alpha, 200_000))
    probabilities = (np.arange(len(values)) + 0.5) / len(values)
    expected = np.quantile(sample, probabilities)
    np.testing.assert_allclose(values, expected, atol=0.01)
    np.testing.assert_allclose(values, 1 - values[::-1], atol=1e-9)
    variance = 1 / (4 * (2 * alpha + 1))
    assert np.var(values) == pytest.approx(variance, rel=1e-3)


def mixed(batch, seed=0, **kinds):
    """Returns images, labels, and both mixed."""
    images = RANDOM.standard_normal((batch, 12, 16, 3)).astype(np.float32)
    labels = RANDOM.integers(0, 10, batch)
    mix = mixing.Mixing(10, **kinds)
    result = mix(
        tf.constant(images), tf.constant(labels), drawn(mix.NUMBERS, batch, seed)
    )
    return images, labels, *(tensor.numpy() for tensor in result)


def partners(values):
    return values.reshape(-1, 2, *values.shape[1:])[:, ::-1].reshape(values.shape)


def one_hot(labels):
    return np.eye(10, dtype=np.float32)[labels]


def test_mixup_is_that_of_keras_with_weights_of_its_own():
    kind = {"alpha": 1.0, "probability": 1.0}
    images, labels, result, soft = mixed(64, mixup=kind)
    differs = labels != partners(labels)
    of_own = np.take_along_axis(soft, labels[:, None], 1)[:, 0]
    transformation = {
        "mix_weight": np.where(differs, of_own, 0.5),
        "permutation_order": partners(np.arange(64)),
    }
    layer = keras.layers.MixUp()
    expected = layer.transform_images(images, transformation)
    np.testing.assert_allclose(result[differs], expected[differs], atol=1e-5)
    expected = layer.transform_labels(one_hot(labels), transformation)
    np.testing.assert_allclose(soft, expected, atol=1e-6)
    assert np.std(of_own[differs]) > 0.2, "each pair has weights of its own"
    first, second = of_own[0::2], of_own[1::2]
    assert np.abs(first - second)[differs[0::2]].max() > 0.3


def test_cutmix_pastes_a_box_whose_area_is_in_the_label():
    kind = {"alpha": 1.0, "probability": 1.0}
    images, labels, result, soft = mixed(200, cutmix=kind)
    is_own = (result == images).all(-1)
    is_partners = (result == partners(images)).all(-1)
    assert (is_own ^ is_partners).all()
    areas = is_partners.mean(axis=(1, 2))
    expected = (1 - areas)[:, None] * one_hot(labels)
    expected += areas[:, None] * partners(one_hot(labels))
    np.testing.assert_allclose(soft, expected, atol=1e-6)
    for mask in is_partners:
        rows, columns = mask.any(1), mask.any(0)
        np.testing.assert_array_equal(mask, rows[:, None] & columns)
        for inside in (rows, columns):
            assert np.count_nonzero(np.diff(inside)) <= 2, "one piece"
    # A third of an image by the paper's rule, less where sides are rounded down.
    assert 0.2 < areas.mean() < 0.35
    corners = is_partners[:, 0, 0], is_partners[:, -1, -1]
    assert min(np.mean(corner) for corner in corners) > 0.05


def test_an_image_is_mixed_in_one_way_or_none():
    mixup = {"alpha": 1.0, "probability": 0.3}
    cutmix = {"alpha": 1.0, "probability": 0.5}
    images, labels, result, soft = mixed(2000, mixup=mixup, cutmix=cutmix)
    np.testing.assert_allclose(soft.sum(axis=1), 1.0, atol=1e-6)
    assert soft.min() >= 0
    is_own = (result == images).all(-1)
    is_pasted = (result == partners(images)).all(-1)
    untouched = is_own.all((1, 2))
    by_box = (is_own | is_pasted).all((1, 2)) & ~untouched
    blended = ~untouched & ~by_box
    np.testing.assert_array_equal(soft[untouched], one_hot(labels)[untouched])
    # Some boxes are empty: those of sides below two pixels, or beyond an edge.
    assert np.mean(blended) == pytest.approx(0.3, abs=0.05)
    assert np.mean(by_box) == pytest.approx(0.5, abs=0.06)


# ---- batches


def batches(images=IMAGES, steps=3, **changes):
    """Returns global batches of all towers, in order: images and labels."""
    options = {
        "batch_size": 12,
        "towers": 1,
        "distortion": "flip_translate",
        "seed": 5,
        "start_step": 3,
        "make": AugmentedBatches(EVERYTHING, 10),
        **changes,
    }
    made = pipeline.training_batches(images, LABELS, **options).take(steps)
    return [
        [np.concatenate(part) for part in zip(*towers, strict=True)]
        for towers in made.as_numpy_iterator()
    ]


def assert_equal(made, expected):
    for (images, labels), (others, other_labels) in zip(made, expected, strict=True):
        np.testing.assert_array_equal(labels, other_labels)
        np.testing.assert_array_equal(images, others)


@functools.cache
def whole(distortion="flip_translate"):
    return batches(distortion=distortion)


@pytest.mark.parametrize("images", [IMAGES, OnDisk(IMAGES)], ids=["memory", "disk"])
def test_batches_do_not_depend_on_towers_workers_and_disks(images):
    parts = [
        batches(images, batch_size=2, towers=3, shard=(index, 2)) for index in range(2)
    ]
    joined = [
        [np.concatenate(part) for part in zip(*of_step, strict=True)]
        for of_step in zip(*parts, strict=True)
    ]
    assert_equal(joined, whole())


def test_a_run_that_goes_on_has_the_batches_of_one_that_has_not_stopped():
    assert_equal(batches(start_step=4, steps=2), whole()[1:])


def test_a_worker_with_mixing_reads_no_image_of_others():
    images = OnDisk(IMAGES)
    make = AugmentedBatches({"mixup": {}}, 10)
    batches(images, batch_size=2, towers=3, shard=(1, 2), steps=1, make=make)
    assert {len(chosen) for chosen in images.chosen} == {6}


@pytest.mark.slow
def test_batches_made_on_devices_are_those_of_the_queues(four_cpus):
    made = on_device.device_batches(
        IMAGES,
        LABELS,
        four_cpus[:3],
        batch_size=4,
        distortion="tutorial",
        seed=5,
        start_step=3,
        make=AugmentedBatches(EVERYTHING, 10),
    )
    for (images, labels), towers in zip(whole("tutorial"), made, strict=False):
        on_devices = [np.concatenate(part) for part in zip(*towers, strict=True)]
        np.testing.assert_array_equal(on_devices[1], labels)
        # Sums of other orders standardize four images and twelve.
        np.testing.assert_allclose(on_devices[0], images, atol=1e-5)


def test_what_does_nothing_leaves_every_bit():
    plain = batches(make=pipeline.make_batch)
    never = {"random_erasing": {"probability": 0}}
    assert_equal(batches(make=AugmentedBatches(never, 10)), plain)
    never = {"mixup": {"probability": 0}, "cutmix": {"probability": 0}}
    unmixed = [[images, one_hot(labels)] for images, labels in plain]
    assert_equal(batches(make=AugmentedBatches(never, 10)), unmixed)


@pytest.mark.parametrize("part", EVERYTHING)
def test_every_part_is_of_the_step_and_of_the_seed(part):
    make = AugmentedBatches({part: {}}, 10)

    def made(seed, step):
        numbers = tf.range(12, dtype=tf.int64)
        plan = pipeline.Plan(numbers, tf.constant([seed, step], tf.int64))
        of_all = pipeline.Part(0, 12, 12)
        return make(tf.constant(IMAGES[:12]), numbers % 10, plan, of_all, "none")

    images, labels = made(0, 0)
    assert images.shape == [12, 32, 32, 3]
    assert labels.shape == ([12, 10] if part in MIXING else [12])
    np.testing.assert_array_equal(images, made(0, 0)[0])
    for seed, step in ((0, 1), (1, 0), (2**31 - 1, 0)):
        assert np.abs(images - made(seed, step)[0]).max() > 0.1


# ---- whole runs


def train(train_dir, data_dir, **options):
    defaults = {
        "model": "small_runs:small",
        "num_gpus": 2,
        "batch_size": 8,
        "precision": "float32",
        "log_frequency": 4,
        "max_steps": 8,
        "augmentation": EVERYTHING,
    }
    return runs.train(train_dir, data_dir, **{**defaults, **options})


@pytest.fixture(scope="module")
def straight(tmp_path_factory, stand_in_dir):
    """A run of eight steps, whose summaries are of step 4 and 8; and its values."""
    train_dir = tmp_path_factory.mktemp("augmented") / "run"
    return train_dir, train(train_dir, stand_in_dir, summary_steps=4)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, stand_in_dir, straight):
    train(tmp_path / "run", stand_in_dir, max_steps=3)
    went_on = train(tmp_path / "run", stand_in_dir)
    runs.assert_equal(went_on, straight[1])


def test_a_run_does_not_go_on_with_another_augmentation(straight, stand_in_dir):
    train_dir, _ = straight
    recorded = json.loads((train_dir / "config.json").read_text())
    assert recorded["augmentation"] == EVERYTHING
    with pytest.raises(UsageError) as caught:
        train(train_dir, stand_in_dir, max_steps=12, augmentation={"mixup": {}})
    assert "augmentation: {'rand_augment': {'operations': 1}, " in str(caught.value)
    assert "there, {'mixup': {}} now" in str(caught.value)


def test_tensorboard_shows_the_images_after_it(straight, stand_in_dir):
    train_dir, _ = straight
    shown = dict(tensors(read(train_dir / "train"), "distorted_images"))
    pictures = [tf.io.decode_png(picture) for picture in shown[4][2:]]
    dataset = datasets.find("synthetic", str(stand_in_dir))
    images, labels = dataset.read("train")
    expected = pipeline.training_batches(
        images,
        labels,
        batch_size=8,
        towers=2,
        distortion="tutorial",
        seed=0,
        start_step=3,
        make=AugmentedBatches(EVERYTHING, 10),
    )
    ((first, _), _) = next(expected.as_numpy_iterator())
    low, high = (reduce(first, (1, 2, 3), keepdims=True) for reduce in (np.min, np.max))
    np.testing.assert_allclose(pictures, (first - low) / (high - low) * 255, atol=1)


@pytest.mark.slow
def test_the_loss_falls(tmp_path, stand_in_dir):
    train(tmp_path / "run", stand_in_dir, max_steps=160, batch_size=16)
    losses = [line["cross_entropy"] for line in runs.logged(tmp_path / "run")]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
