"""RandAugment: each operation is Pillow's, and each image has operations of its own."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps

from cifar10.input.augmentation import rand_augment
from cifar10.input.augmentation.rand_augment import OPERATIONS

MAGNITUDE = 13
PART = MAGNITUDE / 30


def photographs(channels=3, height=24, width=32):
    """Smooth images with a narrow range of values, one even, one of two values."""
    random = np.random.default_rng(0)
    coarse = random.integers(20, 200, (6, 4, 4, channels))
    large = np.stack(
        [
            np.stack(
                [
                    Image.fromarray(plane.astype(np.uint8)).resize((width, height))
                    for plane in np.moveaxis(image, -1, 0)
                ],
                axis=-1,
            )
            for image in coarse
        ]
    )
    large[1] = large[1] // 5 + 90
    large[2] = 77
    large[3] = 255 * (large[3] > 100)
    return large


def changed(images, name, *, negative=False, magnitude=MAGNITUDE):
    chosen = tf.fill([len(images)], tf.constant(OPERATIONS.index(name), tf.int64))
    result = rand_augment.change(
        tf.constant(images, tf.float32),
        chosen,
        tf.fill([len(images)], negative),
        magnitude,
    )
    return result.numpy()


def transformed(sign):
    """What Pillow does for each operation, as torchvision calls it."""
    factor = 1 + sign * 0.9 * PART

    def affine(matrix):
        return lambda image: image.transform(
            image.size,
            Image.Transform.AFFINE,
            matrix,
            Image.Resampling.NEAREST,
            fillcolor=(128,) * len(image.getbands()),
        )

    shear = sign * 0.3 * PART

    def translated(side):
        return sign * int(150 / 331 * side * PART)

    return {
        "identity": lambda image: image,
        "shear_x": affine((1, shear, 0, 0, 1, 0)),
        "shear_y": affine((1, 0, 0, shear, 1, 0)),
        "translate_x": affine((1, 0, translated(32), 0, 1, 0)),
        "translate_y": affine((1, 0, 0, 0, 1, translated(24))),
        "rotate": lambda image: image.rotate(
            sign * 30 * PART, fillcolor=(128,) * len(image.getbands())
        ),
        "brightness": lambda image: ImageEnhance.Brightness(image).enhance(factor),
        "color": lambda image: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda image: ImageEnhance.Contrast(image).enhance(factor),
        "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(factor),
        "posterize": lambda image: ImageOps.posterize(image, 8 - round(PART * 4)),
        "solarize": lambda image: ImageOps.solarize(image, 255 * (1 - PART)),
        "auto_contrast": ImageOps.autocontrast,
        "equalize": ImageOps.equalize,
    }


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_pillows(name, negative):
    images = photographs()
    expected = np.stack(
        [
            np.asarray(transformed(-1 if negative else 1)[name](Image.fromarray(image)))
            for image in images
        ]
    )
    result = changed(images, name, negative=negative)
    # Pillow stretches by a factor that it has rounded, and rotates in 16 bits.
    off = np.abs(result - expected)
    if name == "rotate":
        assert np.mean(off > 0) < 0.01
    else:
        assert off.max() <= (1 if name == "auto_contrast" else 0)
    if name != "identity":
        assert np.abs(result - images).max() > 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_images_of_one_channel_go_through_every_operation(name):
    images = photographs(channels=1)
    expected = [transformed(1)[name](Image.fromarray(i[..., 0])) for i in images]
    off = np.abs(changed(images, name)[..., 0] - np.stack(expected))
    assert np.mean(off > 1) < 0.01


@pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if name not in ("auto_contrast", "equalize")]
)
def test_without_magnitude_an_image_stays_as_it_is(name):
    images = np.minimum(photographs(), 254)  # White is solarized even then.
    np.testing.assert_array_equal(changed(images, name, magnitude=0), images)


def test_each_image_has_its_own_operation():
    """Also with others in the batch, and in a part of it."""
    images = np.repeat(photographs()[:1], 28, axis=0)
    chosen = np.arange(28) // 2
    negative = np.arange(28) % 2 == 1

    def apply(part):
        return rand_augment.change(
            tf.constant(images[part], tf.float32),
            tf.constant(chosen[part]),
            tf.constant(negative[part]),
            MAGNITUDE,
        ).numpy()

    whole = apply(slice(None))
    for number in range(28):
        name, sign = OPERATIONS[chosen[number]], negative[number]
        alone = changed(images[:1], name, negative=bool(sign))[0]
        np.testing.assert_array_equal(whole[number], alone, err_msg=name)
    np.testing.assert_array_equal(apply(slice(9, 20)), whole[9:20])


def test_operations_follow_one_another_and_all_are_drawn():
    images = photographs()
    shape = [rand_augment.numbers(2), len(images)]
    names = ["rotate", "solarize"]
    places = [(OPERATIONS.index(name) + 0.5) / len(OPERATIONS) for name in names]
    drawn = tf.unstack(tf.constant([[p] * shape[1] for p in [*places, 0.9, 0.1]]))
    result = rand_augment.apply(tf.constant(images), drawn, 2, MAGNITUDE)
    first = changed(images, names[0])
    expected = changed(first, names[1], negative=True)
    np.testing.assert_array_equal(result, expected)
    for place in (0.0, np.nextafter(np.float32(1), np.float32(0))):
        drawn = [tf.fill([len(images)], tf.constant(place, tf.float32))] * shape[0]
        name = OPERATIONS[0 if place == 0 else -1]
        result = rand_augment.apply(tf.constant(images), drawn, 2, MAGNITUDE)
        expected = changed(changed(images, name), name)
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("magnitude", [pytest.param(9, marks=pytest.mark.slow), 20])
def test_xla_changes_images_alike(magnitude):
    """Although it rounds once where a product is added."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (14 * 18, 24, 24, 3))
    chosen = tf.constant(np.arange(len(images)) % 14)
    arguments = tf.constant(images, tf.float32), chosen, chosen % 3 == 0
    compiled = tf.function(
        lambda *given: rand_augment.change(*given, magnitude), jit_compile=True
    )
    np.testing.assert_array_equal(
        compiled(*arguments), rand_augment.change(*arguments, magnitude)
    )
