"""Samples: a few images tell whether others are a run's training images."""

import numpy as np

from cifar10.input.samples import found_among, sampled

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (3000, 4, 4, 3), np.uint8)


def test_a_sample_is_found_wherever_its_images_lie():
    sample = sampled(IMAGES)
    assert 60 < len(sample) <= 64
    assert found_among(RANDOM.permutation(IMAGES), sample, None) == {*sample}
    assert not found_among(255 - IMAGES, sample, None)
    some = np.concatenate([255 - IMAGES, IMAGES[:1500]])
    assert 0 < len(found_among(some, sample, None)) < len(sample)


def test_few_images_are_all_in_the_sample():
    assert len(sampled(IMAGES[:5])) == 5
    assert len(sampled(IMAGES[[0] * 9])) == 1


def test_images_of_one_colour_are_not_sampled():
    """Blank pages of other data are no training images."""
    images = IMAGES.copy()
    images[::2] = 255
    sample = sampled(images)
    assert 0 < len(sample) < 60
    assert not found_among(images[::2], sample, None)
    assert sampled(images[::2]) == []


def test_only_the_first_images_are_searched():
    sample = sampled(IMAGES[2500:])
    for most, count in ((2500, 0), (2501, 1), (None, len(sample)), (9000, len(sample))):
        assert len(found_among(IMAGES, sample, most)) == count
