"""Helpers: the stand-in with few images, which are read and scored in no time."""

import contextlib
import dataclasses

import pytest

from cifar10.input import cifar, synthetic


@contextlib.contextmanager
def stand_in(directory):
    """Generates 400 images for training and 100 for tests; only this process can."""
    counts = {"train_records_per_file": 80, "test_records_per_file": 100}
    few = dataclasses.replace(synthetic.FORMAT, **counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "FORMAT", few)
        patch.setitem(cifar.FORMATS, few.name, few)
        # Where an edited run's data is, as its own place is not trusted.
        patch.setattr(cifar, "cache", lambda: directory)
        synthetic.generate(directory / synthetic.FOLDER)
        yield directory
