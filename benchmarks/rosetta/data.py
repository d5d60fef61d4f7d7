"""The data of a comparison, written once into files that all rows read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.rosetta import imdb
from benchmarks.rosetta.participant import Data
from benchmarks.rosetta.task import BATCH_SIZE, CLASSES, Batch
from cifar10.input import datasets

# Smaller steps of noise for --quick: it looks whether everything runs and agrees.
_QUICK_BATCH = 16
_QUICK_STEPS = 2


def cifar(folder: Path, data_dir: str | None, steps: int) -> Data:
    """Writes the real CIFAR-10, scaled to 0 to 1.

    Args:
        folder: Where to.
        data_dir: As `--data_dir` of the trainings.
        steps: Steps in an epoch at most; 0 for all.
    """
    found = datasets.find("cifar10", data_dir)
    arrays = []
    for split in ("train", "test"):
        images, labels = found.read(split)
        arrays += [images.astype(np.float32) / np.float32(255), labels]
    return _write(folder, arrays, BATCH_SIZE, steps, found.description)


def reviews(folder: Path, imdb_dir: str | None, steps: int) -> Data:
    """Writes the IMDB reviews as numbers of words; the arguments are as of `cifar`."""
    found = imdb.read(imdb.find(imdb_dir))
    return _write(folder, found[:4], BATCH_SIZE, steps, found.description)


def noise(folder: Path, network: str) -> Data:
    """Writes a little noise of the same form, for a quick look.

    Args:
        folder: Where to.
        network: "cnn" or "gru".
    """
    inputs, labels = map(np.concatenate, zip(*noise_batches(network), strict=True))
    arrays = [inputs, labels, inputs, labels]
    described = f"NOISE, {len(labels)} examples: neither times nor accuracies to quote"
    return _write(folder, arrays, _QUICK_BATCH, _QUICK_STEPS, described)


def noise_batches(network: str, batch_size: int = _QUICK_BATCH) -> list[Batch]:
    """Makes two batches of noise, the same in every process."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(_QUICK_STEPS):
        if network == "cnn":
            inputs = random.random((batch_size, 32, 32, 3), np.float32)
        else:
            # Some words come often, as in a language: an embedding's rule of update
            # shows only in those.
            often = random.random((batch_size, imdb.LENGTH)) ** 8
            inputs = (imdb.WORDS * often).astype(np.int32)
        labels = random.integers(CLASSES[network], size=batch_size, dtype=np.int32)
        made.append((inputs, labels))
    return made


def _write(
    folder: Path,
    arrays: list[np.ndarray] | tuple[np.ndarray, ...],
    batch_size: int,
    steps: int,
    description: str,
) -> Data:
    names = ("inputs", "labels", "test_inputs", "test_labels")
    for name, array in zip(names, arrays, strict=True):
        np.save(folder / f"{name}.npy", array)
    whole = len(arrays[0]) // batch_size
    steps = min(steps, whole) if steps else whole
    return Data(folder, batch_size, steps, description)
