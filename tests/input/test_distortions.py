"""Distortions of a whole batch, against tf.image on one image at a time."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.fields import DISTORTIONS
from cifar10.input import distortions

SIDE, CROP = 32, 24


def random_images(count, side=SIDE):
    random = np.random.default_rng(count)
    return random.integers(0, 256, (count, side, side, 3), np.uint8)


def coded_images(count):
    """Returns images whose pixels are their row, column and the image's number."""
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    images[..., 0] = np.arange(SIDE)[:, None]
    images[..., 1] = np.arange(SIDE)
    images[..., 2] = np.arange(count)[:, None, None] % 256
    return images


def seed(number):
    """Returns the seed of a step of the default run."""
    return tf.constant([0, number], tf.int64)


@pytest.fixture
def unscaled(monkeypatch):
    """Leaves out the last step, which would hide pixel values and brightness."""
    monkeypatch.setattr(tf.image, "per_image_standardization", lambda images: images)
    monkeypatch.setattr(distortions, "normalize", lambda images: images)


def distort(images, kind, number=0, **options):
    whole = distortions.BatchSlice(0, len(images), len(images))
    options = {"batch_slice": whole, **options}
    images = tf.constant(images)
    return distortions.distort(images, kind, seed(number), **options).numpy()


# ---- all kinds


@pytest.mark.parametrize("kind", DISTORTIONS)
def test_images_of_any_shape_are_distorted_and_prepared(kind):
    for shape in [(40, 28, 3), (28, 28, 1), (1, 1, 3), (2, 7, 4)]:
        images = np.random.default_rng(1).integers(0, 256, (6, *shape), np.uint8)
        distorted = distort(images, kind, flip=tf.range(6) % 2 == 0)
        prepared = distortions.prepare(tf.constant(images), kind)
        expected = distortions.image_shape(kind, shape)
        assert distorted.shape == prepared.shape == (6, *expected)
        assert distorted.dtype == prepared.dtype == tf.float32
        assert np.isfinite(distorted).all()
        parts = [max(1, side * 3 // 4) for side in shape[:2]]
        is_whole = kind in distortions.WHOLE
        assert expected == (shape if is_whole else (*parts, shape[2]))
        if not is_whole:
            np.testing.assert_allclose(distorted.mean((1, 2, 3)), 0.0, atol=1e-4)


@pytest.mark.parametrize("kind", DISTORTIONS)
def test_a_part_of_a_batch_is_distorted_as_in_the_whole(kind):
    """By the seed, and each image apart from the others."""
    images = random_images(12)
    images[3] = images[4]
    mirrored = tf.range(12) % 3 == 0
    whole = distort(images, kind, 3, flip=mirrored)
    images[:4] = 255 - images[:4]
    place = {"batch_slice": distortions.BatchSlice(4, 4, 12), "flip": mirrored[4:8]}
    part = distort(images[4:8], kind, 3, **place)
    np.testing.assert_array_equal(whole[4:8], part)
    if kind != "none":
        assert not np.array_equal(whole[3], whole[4])
        other = distort(images[4:8], kind, 4, **place)
        assert not np.array_equal(other, part)


# ---- crop and flip


def offsets_and_flips(distorted):
    """Reads (top, left, flipped) off distorted coded images, checking every pixel."""
    found = []
    for number, crop in enumerate(distorted):
        flipped = bool(crop[0, 0, 1] > crop[0, -1, 1])
        upright = crop[:, ::-1] if flipped else crop
        top, left = int(upright[0, 0, 0]), int(upright[0, 0, 1])
        window = coded_images(1)[0, top : top + CROP, left : left + CROP, :2]
        np.testing.assert_array_equal(upright[..., :2], window)
        assert np.unique(crop[..., 2]).tolist() == [number % 256]
        found.append((top, left, flipped))
    return found


@pytest.mark.parametrize("seed", [(0, 0), (-1, 5), (2**62, -(2**40))])
def test_random_numbers_are_those_of_the_public_function(seed):
    """So another TensorFlow draws the same, and runs resume with it."""
    found = distortions.uniform([3, 17], tf.constant(seed, tf.int64))
    expected = tf.random.stateless_uniform([3, 17], seed, alg="philox")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("unscaled")
def test_every_crop_is_a_window_and_all_are_about_equally_frequent():
    crops = offsets_and_flips(distort(coded_images(4000), "crop_flip"))
    counts = collections.Counter(crops)
    every = {(t, c, f) for t in range(9) for c in range(9) for f in (False, True)}
    assert set(counts) == every
    # 4000 draws: 444 of each offset and 2000 flips are expected; five deviations.
    for axis in (0, 1):
        offsets = np.bincount([crop[axis] for crop in crops])
        np.testing.assert_allclose(offsets, 444, atol=100)
    assert sum(crop[2] for crop in crops) == pytest.approx(2000, abs=160)


# ---- brightness and contrast


def chequered(count):
    """Returns images of which every crop has the mean 100 and the range 0 to 200."""
    squares = np.indices((SIDE, SIDE)).sum(axis=0) % 2 * 200
    image = np.repeat(squares[..., None], 3, axis=2).astype(np.uint8)
    return np.repeat(image[None], count, axis=0)


def shifts_and_factors(count):
    """Returns the changes of brightness and contrast of a batch's images."""
    distorted = distort(chequered(count), "tutorial")
    shifts = distorted.mean(axis=(1, 2, 3)) - 100.0
    return shifts, np.ptp(distorted, axis=(1, 2, 3)) / 200.0


@pytest.mark.usefixtures("unscaled")
def test_brightness_and_contrast_cover_the_tutorials_ranges():
    ranges = ((-63.0, 63.0), (0.2, 1.8))
    changes = shifts_and_factors(3000)
    assert abs(np.corrcoef(changes)[0, 1]) < 0.1, "they are drawn apart"
    for values, (low, high) in zip(changes, ranges, strict=True):
        margin = 0.005 * (high - low)
        assert low - 1e-3 <= values.min() < low + margin
        assert high - margin < values.max() <= high + 1e-3
        assert values.mean() == pytest.approx((low + high) / 2, abs=10 * margin)


@pytest.mark.usefixtures("unscaled")
def test_tutorial_adjusts_brightness_and_contrast_as_tensorflow_does():
    """Brightness and then contrast, one image at a time."""
    images = random_images(12)
    crops, results = distort(images, "crop_flip"), distort(images, "tutorial")
    for crop, result, shift, factor in zip(
        crops, results, *shifts_and_factors(12), strict=True
    ):
        brighter = tf.image.adjust_brightness(tf.constant(crop), shift)
        expected = tf.image.adjust_contrast(brighter, factor)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=0.05)
    assert results.min() < 0.0  # Nothing is clipped,
    assert results.max() > 255.0  # at neither end.


# ---- flip_translate


@pytest.mark.usefixtures("unscaled")
@pytest.mark.parametrize(("kind", "most"), distortions.TRANSLATIONS.items())
def test_translation_fills_edges_by_reflection_and_mirrors_chosen_images(kind, most):
    count = 10 * (2 * most + 1) ** 2
    images = coded_images(count)
    moved = distort(images, kind, flip=tf.range(count) % 2 == 0)
    seen = set()
    for number, (image, result) in enumerate(zip(images, moved, strict=True)):
        source = image[:, ::-1] if number % 2 == 0 else image
        padded = np.pad(source, [(most, most), (most, most), (0, 0)], "reflect")
        places = [
            (down, right)
            for down in range(2 * most + 1)
            for right in range(2 * most + 1)
            if np.array_equal(result, padded[down : down + SIDE, right : right + SIDE])
        ]
        assert len(places) == 1, number
        seen.update(places)
    assert len(seen) == (2 * most + 1) ** 2  # Every translation occurs.


# ---- random_resized_crop


def crops_and_flips(shape, count):
    """Reads (top, left, height, width, flipped) off random resized crops.

    Pixels say where they are; the ends of the first row and column tell the crop, as
    those of the result lie half a pixel of it within.
    """
    images = np.empty((count, *shape, 2), np.float32)
    images[..., 0] = np.arange(shape[0])[:, None]
    images[..., 1] = np.arange(shape[1])
    found = []
    for crop in distort(images, "random_resized_crop"):
        flipped = bool(crop[0, 0, 1] > crop[0, -1, 1])
        upright = crop[:, ::-1] if flipped else crop
        (top, left), (bottom, right) = upright[0, 0], upright[-1, -1]
        box = top, left, bottom - top + 1, right - left + 1
        assert all(part == int(part) for part in box), box
        found.append((*map(int, box), flipped))
    return np.array(found)


def torchvisions_sizes(height, width, random):
    """Draws height and width as torchvision's `RandomResizedCrop.get_params` does."""
    low, high = np.log([3 / 4, 4 / 3])
    for _ in range(10):
        area = height * width * random.uniform(0.08, 1.0)
        ratio = np.exp(random.uniform(low, high))
        tall, wide = round(np.sqrt(area / ratio)), round(np.sqrt(area * ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return tall, wide
    if width / height < 3 / 4:
        return round(width / (3 / 4)), width
    if width / height > 4 / 3:
        return height, round(height * (4 / 3))
    return height, width


@pytest.mark.usefixtures("unscaled")
@pytest.mark.parametrize("shape", [(32, 32), (48, 10)], ids=str)
def test_sizes_of_crops_are_distributed_as_torchvisions(shape):
    """Quantiles agree to what 3,000 draws of each leave open."""
    found = crops_and_flips(shape, 3000)
    flipped = found[:, 4]
    random = np.random.default_rng(0)
    theirs = np.array([torchvisions_sizes(*shape, random) for _ in range(3000)])
    parts, draws = np.linspace(0.05, 0.95, 19), [flipped]
    for axis, side in enumerate(shape):
        place, taken = found[:, axis], found[:, 2 + axis]
        difference = np.quantile(taken, parts) - np.quantile(theirs[:, axis], parts)
        assert np.abs(difference).max() <= 1.0
        free = side - taken
        assert (place >= 0).all()
        assert (place <= free).all()
        draws.append(place / (free + 1))
    assert flipped.mean() == pytest.approx(0.5, abs=0.04)
    assert np.max(np.abs(np.corrcoef(draws) - np.eye(3))) < 0.08


@pytest.mark.parametrize(
    ("first", "ratio", "expected"),
    [
        ((0.0, 1.0), 1.0, (5, 5)),
        ((1.0, 0.0), 1.0, (10, 10)),  # As large as the image.
        ((0.0, 1.0), 4.0, (2, 10)),  # As wide.
        ((0.0, 1.0), 0.25, (10, 2)),  # As tall.
        ((1.0, 0.0), 4.0, (2, 10)),  # Only the second fits.
        ((1.0, 1.0), 4.0, (3, 7)),  # None does.
    ],
)
def test_a_crop_takes_the_first_fitting_size(first, ratio, expected):
    """Of a quarter of the image, or all of it."""
    later = [first[1]] * (distortions.CROP_ATTEMPTS - 1)
    parts = [first[0], *later, *[0.5] * distortions.CROP_ATTEMPTS]
    attempts = [tf.fill([1], part) for part in parts]
    ranges = (0.25, 1.0), (ratio, ratio)
    found = distortions.random_sizes((10, 10), attempts, *ranges, (3, 7))
    assert [float(side[0]) for side in found] == [*expected]


@pytest.mark.usefixtures("unscaled")
def test_crops_are_enlarged_as_tensorflow_enlarges_them():
    count, shape = 24, (40, 56)
    boxes = crops_and_flips(shape, count)
    images = np.random.default_rng(2).integers(0, 256, (count, *shape, 3), np.uint8)
    results = distort(images, "random_resized_crop")
    for image, result, (top, left, height, width, flipped) in zip(
        images, results, boxes, strict=True
    ):
        crop = image[top : top + height, left : left + width]
        expected = tf.image.resize(crop, shape, antialias=True).numpy()
        expected = expected[:, ::-1] if flipped else expected
        np.testing.assert_allclose(result, expected, atol=0.01)


@pytest.mark.parametrize(
    ("means", "deviations"),
    [
        ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ((0.47337,), (0.25070,)),  # Without colour, their averages.
    ],
)
def test_whole_images_are_scaled_by_the_statistics_of_each_channel(means, deviations):
    values = np.array([0, 128, 255], np.uint8)
    images = np.broadcast_to(values[:, None, None, None], (3, 4, 4, len(means)))
    found = distortions.prepare(tf.constant(images), "none")
    expected = (images / 255 - np.array(means)) / np.array(deviations)
    np.testing.assert_allclose(found, expected, atol=1e-3)
