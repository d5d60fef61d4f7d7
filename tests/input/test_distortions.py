"""Distortions of a whole batch, against tf.image on one image at a time."""

import collections
import hashlib

import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.config import DISTORTIONS
from cifar10.input import distortions, pipeline

SIDE, CROP = 32, 24


def random_images(count, side=SIDE):
    random = np.random.default_rng(count)
    return random.integers(0, 256, (count, side, side, 3), np.uint8)


def coded_images(count):
    """Images whose pixels say where they are: (row, column, number of the image)."""
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    images[..., 0] = np.arange(SIDE)[:, None]
    images[..., 1] = np.arange(SIDE)
    images[..., 2] = np.arange(count)[:, None, None] % 256
    return images


def seed(number):
    """The seed of a step of the default run."""
    return tf.constant([0, number], tf.int64)


@pytest.fixture
def unstandardized(monkeypatch):
    """Leaves out the last step, which would hide pixel values and brightness."""
    monkeypatch.setattr(tf.image, "per_image_standardization", lambda images: images)


def distort(images, kind, number=0):
    return distortions.distort(tf.constant(images), kind, seed(number)).numpy()


# ---- prepare


@pytest.mark.parametrize("value", [0, 1, 128, 255])
def test_a_uniform_image_becomes_zeros(value):
    images = np.full((2, SIDE, SIDE, 3), value, np.uint8)
    images[1] = random_images(1)[0]
    uniform, other = distortions.prepare(tf.constant(images), "tutorial").numpy()
    np.testing.assert_allclose(uniform, 0.0, atol=1e-3)
    assert np.std(other) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("side", "first", "crop"),
    [(32, 4, 24), (24, 3, 18), (33, 4, 24), (28, 3, 21), (64, 8, 48), (1, 0, 1)],
)
def test_centre_crop_is_the_middle(side, first, crop):
    images = random_images(4, side)
    middle = images[:, first : first + crop, first : first + crop]
    actual = distortions.prepare(tf.constant(images), "tutorial")
    assert (actual.shape, actual.dtype) == ((4, crop, crop, 3), tf.float32)
    for image, result in zip(middle, actual, strict=True):
        expected = tf.image.per_image_standardization(image)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_none_is_the_whole_image_whatever_the_seed():
    """A digit of 28 x 28 is neither cropped nor mirrored, and scored as trained."""
    images = random_images(3, 28)
    whole = distortions.prepare(images, "none")
    assert whole.shape == (3, *distortions.image_shape("none", (28, 28, 3)))
    means, deviations = whole.numpy().mean((0, 1, 2)), whole.numpy().std((0, 1, 2))
    scaled = (images - images.mean((0, 1, 2))) / images.std((0, 1, 2))
    np.testing.assert_allclose((whole - means) / deviations, scaled, atol=1e-4)
    for number in range(3):
        np.testing.assert_array_equal(distort(images, "none", number), whole)


# ---- crop and flip


def offsets_and_flips(distorted):
    """Reads (top, left, flipped) off distorted coded images, checking every pixel."""
    found = []
    for number, crop in enumerate(distorted):
        flipped = bool(crop[0, 0, 1] > crop[0, -1, 1])
        upright = crop[:, ::-1] if flipped else crop
        top, left = int(upright[0, 0, 0]), int(upright[0, 0, 1])
        window = coded_images(1)[0, top : top + CROP, left : left + CROP, :2]
        assert window.shape == (CROP, CROP, 2)
        np.testing.assert_array_equal(upright[..., :2], window)
        assert np.unique(crop[..., 2]).tolist() == [number % 256]
        found.append((top, left, flipped))
    return found


@pytest.mark.usefixtures("unstandardized")
def test_every_crop_is_a_window_and_all_are_about_equally_frequent():
    images = coded_images(1000)
    counts = collections.Counter(
        case
        for number in range(4)
        for case in offsets_and_flips(distort(images, "crop_flip", number))
    )
    every = {(t, c, f) for t in range(9) for c in range(9) for f in (False, True)}
    assert set(counts) == every
    # 4000 draws: 444 of each offset and 2000 flips are expected; five deviations.
    for axis in (0, 1):
        for offset in range(9):
            frequency = sum(n for case, n in counts.items() if case[axis] == offset)
            assert frequency == pytest.approx(444, abs=100)
    flips = sum(n for case, n in counts.items() if case[2])
    assert flips == pytest.approx(2000, abs=160)


# ---- every shape of images

SHAPES = [(32, 32, 3), (40, 28, 3), (28, 28, 1), (9, 64, 4), (1, 1, 3), (2, 7, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", DISTORTIONS)
def test_images_of_any_shape_are_distorted_and_prepared(kind, shape):
    images = np.random.default_rng(1).integers(0, 256, (6, *shape), np.uint8)
    flip = tf.range(6) % 2 == 0
    distorted = distortions.distort(tf.constant(images), kind, seed(0), flip=flip)
    prepared = distortions.prepare(tf.constant(images), kind)
    expected = distortions.image_shape(kind, shape)
    assert distorted.shape == prepared.shape == (6, *expected)
    assert distorted.dtype == prepared.dtype == tf.float32
    assert np.isfinite(distorted).all()
    whole = kind in distortions.WHOLE
    parts = [max(1, side * 3 // 4) for side in shape[:2]]
    assert expected == (shape if whole else (*parts, shape[2]))


@pytest.mark.usefixtures("unstandardized")
def test_crops_of_images_that_are_not_square_come_from_everywhere():
    """Of 8 x 16 pixels, 6 x 12."""
    image = np.arange(128, dtype=np.uint8).reshape(1, 8, 16, 1)
    crops = distort(np.repeat(image, 2000, axis=0), "crop_flip")[..., 0]
    assert crops.shape == (2000, 6, 12)
    corners = {(int(c[0].min()) // 16, int(c[0].min()) % 16) for c in crops}
    assert corners == {(top, left) for top in range(3) for left in range(5)}
    rows = {tuple(np.diff(crop[0])) for crop in crops}
    assert rows == {(1.0,) * 11, (-1.0,) * 11}  # As it is, and mirrored.


@pytest.mark.parametrize(
    ("side", "most"), [(7, 0), (8, 1), (28, 2), (32, 2), (64, 4), (224, 14)]
)
def test_translations_are_in_proportion(monkeypatch, side, most):
    monkeypatch.setattr(distortions, "normalize", lambda images: images)
    images = np.zeros((600, 3 * side, side, 1), np.uint8)
    images[:, :, side // 2] = 255  # A line, which is seen once wherever it goes.
    moved = translate(images, tf.zeros(600, tf.bool))[:, 0, :, 0]
    places = np.argmax(moved, axis=1) - side // 2
    assert (places.min(), places.max()) == (-most, most)


def test_images_that_are_not_in_colour_are_scaled_by_the_mean_of_the_channels():
    grey = random_images(4)[..., :1]
    actual = distortions.prepare(tf.constant(grey), "flip_translate").numpy()
    mean = (0.4914 + 0.4822 + 0.4465) / 3
    deviation = (0.2470 + 0.2435 + 0.2616) / 3
    np.testing.assert_allclose(actual, (grey / 255 - mean) / deviation, atol=1e-5)
    actual = distortions.prepare(tf.constant(grey), "tutorial").numpy()
    expected = tf.image.per_image_standardization(grey[0, 4:28, 4:28])
    np.testing.assert_allclose(actual[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["crop_flip", "tutorial"])
def test_random_kinds_are_standardized(kind):
    distorted = distort(random_images(8), kind)
    assert (distorted.shape, distorted.dtype) == ((8, CROP, CROP, 3), np.float32)
    np.testing.assert_allclose(distorted.mean(axis=(1, 2, 3)), 0.0, atol=1e-4)
    np.testing.assert_allclose(distorted.std(axis=(1, 2, 3)), 1.0, rtol=1e-3)


# ---- seeds


@pytest.mark.parametrize("kind", ["crop_flip", "tutorial", "random_resized_crop"])
def test_the_seed_determines_the_distortions(kind):
    images = random_images(16)
    first = distort(images, kind, number=3)
    np.testing.assert_array_equal(distort(images, kind, number=3), first)
    assert not np.array_equal(distort(images, kind, number=4), first)
    other_run = distortions.distort(images, kind, tf.constant([8, 3], tf.int64))
    assert not np.array_equal(other_run, first)


@pytest.mark.parametrize("kind", ["crop_flip", "tutorial", "random_resized_crop"])
def test_distortions_do_not_depend_on_the_other_images(kind):
    images = random_images(16)
    changed = images.copy()
    changed[::2] = 255 - changed[::2][..., ::-1]
    first, second = distort(images, kind), distort(changed, kind)
    np.testing.assert_array_equal(first[1::2], second[1::2])
    for mine, theirs in zip(first[::2], second[::2], strict=True):
        assert not np.array_equal(mine, theirs)


def test_equal_images_are_distorted_each_in_its_own_way():
    images = np.repeat(random_images(1), 16, axis=0)
    distorted = distort(images, "tutorial")
    assert len({image.tobytes() for image in distorted}) == 16


@pytest.mark.parametrize(
    "kind", ["crop_flip", "tutorial", "random_resized_crop", "none"]
)
def test_a_traced_function_distorts_alike(kind):
    images = tf.constant(random_images(8))
    traced = tf.function(lambda seed: distortions.distort(images, kind, seed))
    for number in range(2):
        np.testing.assert_allclose(
            traced(seed(number)), distort(images, kind, number), rtol=1e-4, atol=1e-4
        )


# ---- brightness and contrast


def adjusted(image, shift, factor):
    """TensorFlow's brightness and then contrast, of one float image."""
    brighter = tf.image.adjust_brightness(tf.constant(image), shift)
    return tf.image.adjust_contrast(brighter, factor).numpy()


def test_brightness_and_contrast_are_tensorflows():
    images = random_images(6, side=CROP).astype(np.float32)
    uniform = np.array([0.0, 0.25, 0.5, 0.75, 0.9, 1.0], np.float32)
    shifts = [-63.0, -31.5, 0.0, 31.5, 50.4, 63.0]
    factors = [1.8, 1.64, 1.4, 1.0, 0.6, 0.2]  # Of the same values in reverse.
    actual = distortions._change_brightness_and_contrast(
        tf.constant(images), tf.constant(uniform), tf.constant(uniform[::-1].copy())
    ).numpy()
    for image, result, shift, factor in zip(
        images, actual, shifts, factors, strict=True
    ):
        np.testing.assert_allclose(
            result, adjusted(image, shift, factor), rtol=1e-4, atol=1e-3
        )
    assert actual.min() < 0.0  # Nothing is clipped,
    assert actual.max() > 255.0  # at neither end.


def chequered(count):
    """Images of which every crop has the mean 100 and the range 0 to 200."""
    squares = np.indices((SIDE, SIDE)).sum(axis=0) % 2 * 200
    image = np.repeat(squares[..., None], 3, axis=2).astype(np.uint8)
    return np.repeat(image[None], count, axis=0)


@pytest.mark.usefixtures("unstandardized")
def test_brightness_and_contrast_cover_the_tutorials_ranges():
    distorted = distort(chequered(3000), "tutorial")
    shifts = distorted.mean(axis=(1, 2, 3)) - 100.0
    factors = np.ptp(distorted, axis=(1, 2, 3)) / 200.0
    for values, low, high in ((shifts, -63.0, 63.0), (factors, 0.2, 1.8)):
        margin = 0.005 * (high - low)
        assert low - 1e-3 <= values.min() < low + margin
        assert high - margin < values.max() <= high + 1e-3
        assert values.mean() == pytest.approx((low + high) / 2, abs=10 * margin)
    assert abs(np.corrcoef(shifts, factors)[0, 1]) < 0.1


@pytest.mark.usefixtures("unstandardized")
def test_tutorial_changes_the_crops_of_crop_flip():
    """Crop, flip, brightness and contrast together are tf.image's, image by image."""
    images = random_images(12)
    shifts_and_factors = [
        (image.mean() - 100.0, np.ptp(image) / 200.0)
        for image in distort(chequered(12), "tutorial")
    ]
    crops = distort(images, "crop_flip")
    results = distort(images, "tutorial")
    for crop, result, (shift, factor) in zip(
        crops, results, shifts_and_factors, strict=True
    ):
        np.testing.assert_allclose(
            result, adjusted(crop, shift, factor), rtol=1e-3, atol=0.05
        )


@pytest.mark.usefixtures("unstandardized")
def test_position_flip_brightness_and_contrast_are_drawn_apart():
    count = 3000
    crops = offsets_and_flips(distort(coded_images(count), "crop_flip"))
    distorted = distort(chequered(count), "tutorial")
    draws = np.column_stack(
        [crops, distorted.mean(axis=(1, 2, 3)), np.ptp(distorted, axis=(1, 2, 3))]
    )
    correlations = np.corrcoef(draws, rowvar=False) - np.eye(5)
    assert np.max(np.abs(correlations)) < 0.1


# ---- flip_translate


def translate(images, mirrored, number=0, kind="flip_translate"):
    return distortions.distort(
        tf.constant(images), kind, seed(number), flip=mirrored
    ).numpy()


@pytest.mark.parametrize(("kind", "most"), distortions.TRANSLATIONS.items())
def test_translation_fills_with_the_reflection_and_mirrors_whom_it_should(
    monkeypatch, kind, most
):
    monkeypatch.setattr(distortions, "normalize", lambda images: images)
    count = 10 * (2 * most + 1) ** 2
    images = coded_images(count)
    mirrored = tf.range(count) % 2 == 0
    moved = translate(images, mirrored, kind=kind)
    seen = collections.Counter()
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
        seen[places[0]] += 1
    assert len(seen) == (2 * most + 1) ** 2  # Every translation occurs.


def test_flip_translate_normalizes_by_channel():
    images = random_images(4)
    same = distortions.prepare(tf.constant(images), "flip_translate").numpy()
    mean = np.array([0.4914, 0.4822, 0.4465])
    deviation = np.array([0.2470, 0.2435, 0.2616])
    np.testing.assert_allclose(same, (images / 255 - mean) / deviation, atol=1e-5)


@pytest.mark.parametrize("kind", DISTORTIONS)
def test_a_part_of_a_batch_is_distorted_as_in_the_whole(kind):
    images = tf.constant(random_images(12))
    mirrored = tf.range(12) % 3 == 0
    whole = distortions.distort(images, kind, seed(3), flip=mirrored)
    part = distortions.distort(
        images[4:8], kind, seed(3), flip=mirrored[4:8], first=4, global_batch_size=12
    )
    np.testing.assert_array_equal(whole[4:8], part)


def test_image_shapes():
    original = (32, 32, 3)
    assert distortions.image_shape("flip_translate", original) == original
    assert distortions.image_shape("random_resized_crop", original) == original
    assert distortions.image_shape("tutorial", original) == (24, 24, 3)
    assert distortions.image_shape("none", (64, 128, 1)) == (64, 128, 1)
    assert distortions.image_shape("crop_flip", (224, 224, 3)) == (168, 168, 3)


# ---- random_resized_crop


def crops_and_flips(monkeypatch, shape, count):
    """Reads (top, left, height, width, flipped) off random resized crops.

    Pixels say where they are; the ends of the first row and column tell the crop, as
    those of the result lie half a pixel of it within.
    """
    monkeypatch.setattr(distortions, "normalize", lambda images: images)
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


@pytest.mark.parametrize("shape", [(32, 32), (24, 48), (48, 10)], ids=str)
def test_sizes_of_crops_are_distributed_as_torchvisions(monkeypatch, shape):
    """Quantiles agree to what 4,000 draws of each leave open."""
    found = crops_and_flips(monkeypatch, shape, 4000)
    random = np.random.default_rng(0)
    theirs = np.array([torchvisions_sizes(*shape, random) for _ in range(4000)])
    parts = np.linspace(0.05, 0.95, 19)
    for axis, side in enumerate(shape):
        ours = found[:, 2 + axis]
        assert ours.max() <= side
        difference = np.quantile(ours, parts) - np.quantile(theirs[:, axis], parts)
        assert np.abs(difference).max() <= 1.0
    products = found[:, 2] * found[:, 3], theirs[:, 0] * theirs[:, 1]
    assert np.mean(products[0]) == pytest.approx(np.mean(products[1]), rel=0.03)


def test_crops_lie_anywhere_and_half_of_them_are_mirrored(monkeypatch):
    top, left, height, width, flipped = crops_and_flips(monkeypatch, (32, 32), 4000).T
    assert (top >= 0).all()
    assert (left >= 0).all()
    for place, taken in ((top, height), (left, width)):
        free = 32 - taken
        assert (place <= free).all()
        part = place[free > 9] / free[free > 9]
        assert (part.min(), part.max()) == (0.0, 1.0)
        assert part.mean() == pytest.approx(0.5, abs=0.03)
    assert flipped.mean() == pytest.approx(0.5, abs=0.04)
    draws = np.column_stack([top / (33 - height), left / (33 - width), flipped])
    correlations = np.corrcoef(draws, rowvar=False) - np.eye(3)
    assert np.max(np.abs(correlations)) < 0.08


def test_crops_are_enlarged_as_tensorflow_enlarges_them(monkeypatch):
    count, shape = 24, (40, 56)
    boxes = crops_and_flips(monkeypatch, shape, count)
    images = np.random.default_rng(2).integers(0, 256, (count, *shape, 3), np.uint8)
    results = distort(images, "random_resized_crop")
    for image, result, (top, left, height, width, flipped) in zip(
        images, results, boxes, strict=True
    ):
        crop = image[top : top + height, left : left + width]
        expected = tf.image.resize(crop, shape, antialias=True).numpy()
        expected = expected[:, ::-1] if flipped else expected
        np.testing.assert_allclose(result, expected, atol=0.01)


# ---- 32 x 32 as ever

# SHA-256 of the images of six batches and their numbers. They are not standardized,
# which would round them, so every machine has the same.
OF_CROPS = "8845c1e6f9100397789dd324d2218bfc84405b99cba880226dd0359c251c8b1e"
OF_WHOLE = "3eef998ad4304170d28d1358435ce09793a0e68bce74a30ddcc7f7072be5822e"


@pytest.mark.usefixtures("unstandardized")
@pytest.mark.parametrize(
    ("kind", "digest"), [("crop_flip", OF_CROPS), ("flip_translate", OF_WHOLE)]
)
def test_images_of_32_x_32_are_distorted_as_ever(monkeypatch, kind, digest):
    monkeypatch.setattr(distortions, "normalize", lambda images: images)
    images = coded_images(103)
    batches = pipeline.training_batches(
        images,
        np.arange(103, dtype=np.int32),
        batch_size=24,
        towers=1,
        distortion=kind,
        seed=5,
        start_step=2,
    )
    found = hashlib.sha256()
    for ((seen, numbers),) in batches.take(6):
        found.update(tf.cast(seen, tf.uint8).numpy().tobytes())
        found.update(tf.cast(numbers, tf.uint8).numpy().tobytes())
    assert found.hexdigest() == digest
