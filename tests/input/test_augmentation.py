"""Each augmentation, and batches with all of them, however they are split."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config.augmentation import MIXING, PARTS
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import augmentation, distortions, pipeline
from cifar10.input.augmentation import Augmentation
from small_sets import OnDisk, assert_equal, joined

RANDOM = np.random.default_rng(0)
COUNT = 50
IMAGES = RANDOM.integers(0, 256, (COUNT, 32, 32, 3), np.uint8)
LABELS = np.arange(COUNT, dtype=np.int32) % 10
EVERYTHING = {name: {} for name in PARTS} | {
    "mixup": {"probability": 0.5},
    "cutmix": {"probability": 0.4},
}


def drawn(count, batch, seed=0):
    values = np.random.default_rng(seed).random((count, batch), np.float32)
    return tf.unstack(tf.constant(values))


# ---- the table of a recipe


def configured(tmp_path, declared):
    """Returns the configuration of a recipe with an augmentation."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f"[augmentation]\n{declared}")
    return Config(recipe=str(recipe))


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ("blur = {}", "blur.*Possible entries are"),
        ("cutout = {side = 32}", "31"),
        ("mixup = {alpha = nan}", "mixup.alpha"),
        ("random_erasing = {probability = true}", "random_erasing.probability"),
        ("mixup = {}\ncutmix = {probability = 0.5}", "1.5"),
    ],
)
def test_unknown_augmentations_and_values_are_refused(tmp_path, declared, named):
    with pytest.raises(UsageError, match=named):
        configured(tmp_path, declared)


def test_a_recipe_holds_the_augmentation_as_a_table(tmp_path):
    config = configured(tmp_path, "mixup = {alpha = 1, probability = 0.5}")
    assert config.images.augmentation == {"mixup": {"alpha": 1, "probability": 0.5}}
    Config(batch_size=33, augmentation={"cutout": {}, "random_erasing": {}})
    with pytest.raises(UsageError, match="pairs"):  # Only mixing needs them.
        Config(batch_size=33, augmentation={"mixup": {}})


# ---- random erasing


def test_rectangles_of_the_papers_areas_and_shapes_become_noise():
    batch, height, width = 2000, 40, 32
    images = tf.fill([batch, height, width, 3], 7.0)
    noise = tf.constant(RANDOM.random((height, width, 3), np.float32))
    result = augmentation.erase(
        images, drawn(augmentation.ERASING_NUMBERS, batch), noise, 0.6
    ).numpy()
    erased = (result != 7.0).any(axis=-1)
    is_erased = erased.any(axis=(1, 2))
    assert np.mean(is_erased) == pytest.approx(0.6, abs=5 * math.sqrt(0.24 / batch))
    areas, ratios = [], []
    for mask in erased[is_erased]:
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
        assert mask[top:bottom, left:right].all()
        assert mask.sum() == (bottom - top) * (right - left)
        areas.append(mask.mean())
        ratios.append((right - left) / (bottom - top))
    assert 0.015 < min(areas) < 0.04 < 0.35 < max(areas) < 0.42
    assert 0.25 < min(ratios) < 0.4 < 2.5 < max(ratios) < 4.0
    values = result[result != 7.0]
    assert values.mean() == pytest.approx(0.0, abs=0.02)
    assert values.std() == pytest.approx(1.0, abs=0.02)
    some = result[:40][result[:40] != 7.0]
    assert len(np.unique(some)) > 0.9 * len(some), "each image has noise of its own"


def test_cutout_blanks_a_rectangle_anywhere_within_the_image():
    images = tf.ones([4000, 16, 32, 1])
    result = augmentation.cut_out(images, *drawn(2, 4000), side=20).numpy()
    seen = set()
    for image in result[..., 0]:
        top, left = np.argwhere(image == 0)[0]
        expected = np.ones((16, 32))
        expected[top : top + 10, left : left + 20] = 0
        np.testing.assert_array_equal(image, expected)
        seen.add((top, left))
    assert len(seen) == 7 * 13  # Every place occurs, of those with the whole of it.


def test_cutout_has_sharp_edges_in_images_of_a_smaller_stage():
    cutout = Augmentation({"cutout": {"side": 12}}, 10)
    maker = pipeline.BatchMaker("none", 0, image_size=16, augmentation=cutout)
    plan = pipeline.Plan(tf.range(12, dtype=tf.int64), tf.constant([0, 0], tf.int64))
    of_all = distortions.BatchSlice(0, 12, 12)
    images = tf.constant(RANDOM.integers(1, 256, (12, 32, 32, 3), np.uint8))
    made, _ = maker.make(images, plan.chosen, plan, of_all)
    for image in made.numpy():
        rows, columns = np.where((image == 0).all(axis=-1))
        assert len(rows) == 6 * 6
        assert np.ptp(rows) == np.ptp(columns) == 5


# ---- mixing


def mixed(batch, **kinds):
    """Returns images, labels, and both mixed."""
    images = RANDOM.standard_normal((batch, 12, 16, 3)).astype(np.float32)
    labels = RANDOM.integers(0, 10, batch)
    given = tf.constant(images), tf.constant(labels)
    numbers = drawn(augmentation.MIXING_NUMBERS, batch)
    result = augmentation.mix(*given, numbers, classes=10, **kinds)
    return images, labels, *(tensor.numpy() for tensor in result)


def partners(values):
    return values.reshape(-1, 2, *values.shape[1:])[:, ::-1].reshape(values.shape)


def one_hot(labels):
    return np.eye(10, dtype=np.float32)[labels]


def test_mixup_equals_kerass_with_its_own_weights():
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


def test_cutmix_labels_follow_the_area_of_the_pasted_box():
    kind = {"alpha": 1.0, "probability": 1.0}
    images, labels, result, soft = mixed(200, cutmix=kind)
    is_own = (result == images).all(-1)
    is_partners = (result == partners(images)).all(-1)
    assert (is_own ^ is_partners).all()
    areas = is_partners.mean(axis=(1, 2))
    expected = (1 - areas)[:, None] * one_hot(labels)
    expected += areas[:, None] * partners(one_hot(labels))
    np.testing.assert_allclose(soft, expected, atol=1e-6)
    for mask in filter(np.any, is_partners):
        (top, left), (bottom, right) = np.argwhere(mask)[[0, -1]]
        assert mask[top : bottom + 1, left : right + 1].all()
        assert mask.sum() == (bottom + 1 - top) * (right + 1 - left)
    centres = [np.argwhere(mask).mean(axis=0) for mask in is_partners if mask.any()]
    assert abs(np.corrcoef(centres, rowvar=False)[0, 1]) < 0.4, "places are drawn apart"


def test_both_probabilities_decide_the_share_of_mixed_images():
    cases = (((0.5, 0.5), 0.9, 1.0), ((0.3, 0.2), 0.4, 0.6), ((0.0, 0.4), 0.3, 0.5))
    for (of_mixup, of_cutmix), least, most in cases:
        images, _, result, _ = mixed(
            500,
            mixup={"alpha": 1.0, "probability": of_mixup},
            cutmix={"alpha": 1.0, "probability": of_cutmix},
        )
        part = (result != images).any(axis=(1, 2, 3)).mean()
        assert least <= part <= most


# ---- batches


def batches(images=IMAGES, steps=2, parts=EVERYTHING, **changes):
    """Returns global batches of all towers, in order: images and labels."""
    maker = pipeline.BatchMaker("tutorial", 5, augmentation=Augmentation(parts, 10))
    options = {"towers": 1, "start_step": 4, **changes}
    made = pipeline.training_batches(images, LABELS, maker, **options).take(steps)
    return [joined(towers) for towers in made.as_numpy_iterator()]


@pytest.fixture(scope="module")
def whole():
    """Batches of one tower; the first step that is compared is the second."""
    return batches(batch_size=12, start_step=3, steps=3)[1:]


def test_batches_do_not_depend_on_towers_workers_disks_or_the_first_step(whole):
    images = OnDisk(IMAGES)
    second = batches(images, batch_size=3, towers=2, worker=(1, 2))
    assert_equal(second, [(images[6:], labels[6:]) for images, labels in whole])
    assert {len(chosen) for chosen in images.chosen} == {6}, "those of others too"


def made_by(augmentation, seed=0, step=0, distortion="none"):
    """Returns a batch without a pipeline."""
    numbers = tf.range(12, dtype=tf.int64)
    plan = pipeline.Plan(numbers, tf.constant([seed, step], tf.int64))
    of_all = distortions.BatchSlice(0, 12, 12)
    maker = pipeline.BatchMaker(distortion, seed, augmentation=augmentation)
    return maker.make(tf.constant(IMAGES[:12]), numbers % 10, plan, of_all)


@pytest.mark.parametrize("part", EVERYTHING)
def test_every_part_depends_on_the_step_and_the_seed(part):
    # Often enough that some of the images change, and others of another step.
    chance = PARTS[part].get("probability")
    often = {"probability": 0.5} if chance and chance.default < 1.0 else {}
    make = Augmentation({part: often}, 10)
    images, labels = made_by(make)
    assert images.shape == [12, 32, 32, 3]
    assert labels.shape == ([12, 10] if part in MIXING else [12])
    np.testing.assert_array_equal(images, made_by(make)[0])
    for seed, step in ((0, 1), (1, 0), (2**31 - 1, 0)):
        assert np.abs(images - made_by(make, seed, step)[0]).max() > 0.1


def test_every_part_draws_from_its_own_stream(monkeypatch):
    """The distortions from theirs, which is the same without an augmentation."""
    uniform, seeds = distortions.uniform, []

    def noting(shape, seed):
        seeds.append(tuple(seed.numpy()))
        return uniform(shape, seed)

    monkeypatch.setattr(distortions, "uniform", noting)
    monkeypatch.setattr(augmentation, "uniform", noting)
    made_by(Augmentation(EVERYTHING, 10), 5, 3, "tutorial")
    assert len(seeds) == len({*seeds}) == len(augmentation.STREAMS)
    assert (5, 3) in seeds


def test_later_versions_reproduce_the_recorded_images():
    """A run that is resumed after an upgrade sees what it would have seen."""
    parts = {"random_erasing": {"probability": 0.5}, "cutout": {"side": 6}}
    parts |= {"mixup": {"probability": 0.5}, "cutmix": {"probability": 0.4}}
    ((images, labels),) = batches(batch_size=12, steps=1, parts=parts)
    shares = np.random.default_rng(0).normal(size=images.shape[1:])
    found = np.sum(images * shares, axis=(1, 2, 3))[:6]
    expected = [17.84, -11.97, -18.85, -13.98, 4.33, -5.89]
    np.testing.assert_allclose(found, expected, atol=0.05)
    assert labels[:6].argmax(axis=1).tolist() == [4, 3, 8, 7, 3, 0]
    parts = [1.0, 0.5868, 0.9615, 0.75, 0.9952, 0.7517]
    np.testing.assert_allclose(labels[:6].max(axis=1), parts, atol=1e-3)


# ---- whole runs


@pytest.mark.slow
def test_a_stopped_run_continues_bit_for_bit_and_only_with_its_augmentation(
    tmp_path, stand_in_dir
):
    def train(name, steps, **changes):
        parts = {"random_erasing": {}, "mixup": {"probability": 0.5}}
        options = {"batch_size": 4, "augmentation": parts, **changes}
        return runs.train(tmp_path / name, stand_in_dir, max_steps=steps, **options)

    expected = train("straight", 4)
    train("stopped", 2)
    with pytest.raises(UsageError, match="augmentation"):
        train("stopped", 4, augmentation={"mixup": {}})
    runs.assert_equal(train("stopped", 4), expected)
    recorded = json.loads((tmp_path / "stopped/config.json").read_text())
    assert recorded["augmentation"].keys() == {"random_erasing", "mixup"}
