"""RandAugment: each operation is Pillow's, and each image has operations of its own."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps

from cifar10.input import rand_augment
from cifar10.input.rand_augment import OPERATIONS

MAGNITUDE = 13
PART = MAGNITUDE / 30


def photographs(channels=3, height=24, width=32):
    """Smooth images with a narrow range of values, one even, one of two values."""
    random = np.random.default_rng(0)
    coarse = random.integers(20, 200, (6, channels, 4, 4)).astype(np.uint8)
    planes = [
        [np.asarray(Image.fromarray(p).resize((width, height))) for p in image]
        for image in coarse
    ]
    large = np.moveaxis(np.array(planes), 1, -1).copy()
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


def check(name, images, *, negative):
    """Compares an operation with Pillow's."""
    operation = transformed(-1 if negative else 1)[name]
    squeezed = images[..., 0] if images.shape[-1] == 1 else images
    expected = np.stack([operation(Image.fromarray(image)) for image in squeezed])
    result = changed(images, name, negative=negative)
    # Pillow stretches by a factor that it has rounded, and rotates in 16 bits.
    off = np.abs(result - expected.reshape(images.shape))
    if name == "rotate":
        assert np.mean(off > 0) < 0.01
    else:
        assert off.max() <= (1 if name == "auto_contrast" else 0)
    if name != "identity":
        assert np.abs(result - images).max() > 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_pillows(name):
    for negative in (False, True):
        check(name, photographs(), negative=negative)
    if name != "color":  # Which changes no grey image.
        check(name, photographs(channels=1), negative=False)


def test_each_image_has_its_own_operation():
    """Also with others in the batch, and in a part of it."""
    images = np.repeat(photographs()[:1], 28, axis=0)
    chosen = np.arange(28) // 2
    negative = np.arange(28) % 2 == 1

    def apply(part):
        given = images[part].astype(np.float32), chosen[part], negative[part]
        return rand_augment.change(*map(tf.constant, given), MAGNITUDE).numpy()

    whole = apply(slice(None))
    for number in range(0, 28, 3):
        name, sign = OPERATIONS[chosen[number]], negative[number]
        alone = changed(images[:1], name, negative=bool(sign))[0]
        np.testing.assert_array_equal(whole[number], alone, err_msg=name)
    np.testing.assert_array_equal(apply(slice(9, 20)), whole[9:20])


def test_operations_follow_one_another_and_all_are_drawn():
    images = photographs()

    def applied(*numbers):
        drawn = [tf.fill([len(images)], np.float32(number)) for number in numbers]
        return rand_augment.apply(tf.constant(images), drawn, 2, MAGNITUDE)

    names = ["rotate", "solarize"]
    places = [(OPERATIONS.index(name) + 0.5) / len(OPERATIONS) for name in names]
    first = changed(images, names[0])
    expected = changed(first, names[1], negative=True)
    np.testing.assert_array_equal(applied(*places, 0.9, 0.1), expected)
    last = np.nextafter(np.float32(1), np.float32(0))
    expected = changed(changed(images, OPERATIONS[-1]), OPERATIONS[-1])
    np.testing.assert_array_equal(applied(*[last] * 4), expected)
