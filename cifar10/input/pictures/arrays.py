"""Makes a data set from arrays in memory: those of a program or of an .npz file.

The arrays are named as in Keras: x_train, y_train, x_test, y_test; x_val and y_val are
optional. Images are uint8 [count, height, width, 3] or, if grey, [count, height, width]
or [count, height, width, 1]. Labels are whole numbers, [count] or [count, 1].
"""

import dataclasses
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cifar10 import files
from cifar10.errors import UsageError, first_few, reason
from cifar10.input.dataset_base import Dataset, numbered_class_names
from cifar10.input.pictures.listing import MAX_CLASSES, split_of
from cifar10.input.records import SPLITS, WITHOUT_VAL, Split

# Unpacked arrays may have this many bytes, or a hundred times the file's size if more:
# real pictures are compressed less. Grey pictures later take three times as much.
_MOST_BYTES, _LARGEST_RATIO = 250 * 10**6, 100
# The largest pixel in scikit-learn's digits. On the scale of 0 to 255 it looks black.
_DARK = 16
_NUMBERED = "np.searchsorted(np.unique(y_train), y)"  # Labels without gaps.
_ARRAYS = tuple(f"{kind}_{split}" for split in WITHOUT_VAL for kind in "xy")


def find_npz(path: Path) -> Dataset:
    """Reads a data set from an .npz file, and checks its arrays."""
    path = path.expanduser().absolute()
    try:
        with files.opened(path, follow=True) as file:
            found, others = _unpacked(file)
    except Exception as error:  # NumPy raises anything for a damaged file.
        raise UsageError(
            f"{path} cannot be used: {reason(error)}. An .npz file of pictures holds "
            f"arrays named {', '.join(_ARRAYS)}, as np.savez writes them, and "
            "must fit in memory. A folder of pictures may be larger than memory."
        ) from error
    dataset = array_dataset(found, str(path), "npz", path)
    unused = f"{path} has arrays of other names, which are not used: "
    notes = [unused + first_few(others, 5)] if others else []
    return dataclasses.replace(dataset, notes=[*dataset.notes, *notes])


def _unpacked(file: BinaryIO) -> tuple[dict[str, np.ndarray], list[str]]:
    """Reads an .npz file's arrays, and others' names; refuses pickles and zip bombs."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > max(_MOST_BYTES, _LARGEST_RATIO * size):
            raise ValueError(f"its {size:,} bytes would unpack to {unpacked:,} bytes")
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        splits = [split for split in SPLITS if f"x_{split}" in names]
        for name in names:
            split = split_of(name[2:]) if re.fullmatch("[xy]_[A-Za-z]+", name) else None
            if split and not {name} <= {f"x_{split}", f"y_{split}"} <= {*names}:
                raise ValueError(f"{name} is in no pair x_{split}, y_{split}")
        if "test" not in splits:
            raise ValueError(f"x_test is not among its arrays, {', '.join(names)}")
        found = {}
        # Not `np.load`, which returns the bytes of an entry that is not an array.
        for name in (f"{kind}_{split}" for split in splits for kind in "xy"):
            with archive.open(f"{name}.npy") as stream:
                found[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return found, [name for name in names if name not in found]


def array_dataset(
    found: Mapping[str, np.ndarray], where: str, name: str, directory: Path | None
) -> Dataset:
    """Checks arrays of images and labels, and makes a data set of them.

    The arrays are `x_train`, `y_train` and so on. `where` names their source in
    messages. `directory` is the .npz file, or None for a program's arrays.
    """
    images: dict[Split, np.ndarray] = {}
    labels: dict[Split, np.ndarray] = {}
    hashes: dict[Split, np.ndarray] = {}  # One for each image.
    digest = hashlib.sha256()
    for split in (one for one in SPLITS if f"x_{one}" in found):
        images[split] = _images(found[f"x_{split}"], f"x_{split} in {where}")
        what = f"y_{split} in {where}"
        labels[split] = checked_labels(found[f"y_{split}"], len(images[split]), what)
        digest.update(json.dumps(images[split].shape).encode())
        digest.update(labels[split].astype("<i4").tobytes())
        hashes[split] = np.empty(len(images[split]), np.int64)
        for index, image in enumerate(images[split]):
            digest.update(content := image.tobytes())
            # Images of one colour, such as black ones, may be equal by chance.
            is_plain = content == content[:3] * (len(content) // 3)
            hashes[split][index] = hash((split, content) if is_plain else content)
    shapes = {array.shape[1:] for array in images.values()}
    if len(shapes) > 1:
        different = ", ".join(map(str, shapes))
        raise UsageError(f"Give all images in {where} one shape, not {different}.")
    for split, some in labels.items():
        unknown = np.setdiff1d(some, labels.get("train", some))
        if unknown.size:
            why = f"y_{split} in {where} has a label that y_train lacks: {unknown[0]}"
            raise UsageError(f"{why}. Leave its images out, or add some to x_train.")
    classes = 1 + int(max(some.max() for some in labels.values()))
    notes = _check_used(labels["train"], classes, where) if "train" in labels else []
    notes += _shared(hashes, where)
    most = {f"x_{split}": int(array.max()) for split, array in images.items()}
    if dark := {name: high for name, high in most.items() if 0 < high <= _DARK}:
        why = f"pixels of {', '.join(dark)} in {where} are at most {max(dark.values())}"
        notes.append(f"{why} of 255, almost black. Unless this is intended, scale them")
    height, width, channels = shapes.pop()
    count = f"{sum(map(len, labels.values())):,} pictures of {classes:,} classes"
    description = f"{count} at {width} x {height} in {where}"

    def read(split: Split) -> tuple[np.ndarray, np.ndarray]:
        if split not in images:
            why = f"{description}: there are no {split} images"
            way = "data=((x_train, y_train), (x_test, y_test))"
            raise UsageError(f"{why}. Add some, for example with {way}.")
        return images[split], labels[split]

    return Dataset(
        name=name,
        directory=directory,
        image_shape=(height, width, channels),
        class_names=numbered_class_names(classes),
        description=description,
        read=read,
        splits=tuple(images),
        fingerprint=digest.hexdigest(),
        notes=notes,
    )


def _check_used(labels: np.ndarray, classes: int, where: str) -> list[str]:
    """Refuses training labels that are all the same; returns a note on unused ones."""
    used = np.unique(labels)
    if len(used) < 2:
        why = f"All labels in {where} are {used[0]}"
        raise UsageError(f"{why}. Give at least two classes.")
    unused = [*map(str, np.setdiff1d(np.arange(classes), used))]
    few = first_few(unused, 5)
    why = f"no image of y_train in {where} has the label {few}, of {classes:,} classes"
    fix = f"number the labels y of all splits from 0 without gaps, with {_NUMBERED}"
    return [f"{why}. Unless this is intended, {fix}"] if unused else []


def _shared(hashes: Mapping[Split, np.ndarray], where: str) -> Iterator[str]:
    """Yields notes on splits of which more than 1 % are training images, too."""
    first, *others = hashes
    for split in others if first == "train" else ():
        own = hashes[split]
        found = np.count_nonzero(np.isin(own, hashes["train"]))
        if 100 * found > len(own):
            yield (
                f"x_{split} in {where} shares {found:,} of {len(own):,} images with "
                "x_train, so scores are optimistic. A tf.data.Dataset that take and "
                "skip divide needs shuffle(..., reshuffle_each_iteration=False)"
            )


def _images(array: np.ndarray, what: str) -> np.ndarray:
    """Checks an array of images, and returns uint8 [count, height, width, 3]."""
    if array.ndim == 3:
        array = array[..., np.newaxis]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or not array.size:
        why = f"{what} has the shape {list(array.shape)}"
        forms = "[count, height, width, 3], or [count, height, width] for grey images"
        raise UsageError(f"{why}. Give at least one image: {forms}.")
    check_pixels(array.dtype, what)
    if array.shape[3] == 1:
        return np.repeat(array, 3, axis=3)
    return np.ascontiguousarray(array)


def check_pixels(dtype: np.dtype, what: str) -> None:
    """Refuses pixels of any type other than uint8."""
    if dtype != np.uint8:
        raise UsageError(
            f"{what} is {dtype}, not uint8. Scale to 0 to 255: x * 255 (if 0 to 1), "
            "(x + 1) * 127.5 (if -1 to 1) or x / 257 (if 0 to 65535); then use "
            "np.rint(x).astype(np.uint8)."
        )


def checked_labels(
    array: np.ndarray, count: int, what: str, classes: int = MAX_CLASSES
) -> np.ndarray:
    """Checks the labels of `count` images, and returns int32 [count]."""
    if array.dtype.kind not in "iu" or array.shape not in [(count,), (count, 1)]:
        way = "y.argmax(1) of one-hot labels"
        if array.size <= count:  # The same numbers for all splits.
            way = _NUMBERED
        if array.dtype.kind == "f" and np.isnan(array).any():
            way += ", without the images whose label is NaN"
        how = f", such as {way}" if array.shape[:1] == (count,) else ""
        is_table = array.ndim == 2 and array.dtype.kind in "biuf"
        filled = np.count_nonzero(array, 1) if is_table else 0
        if how and array.size > count and not np.all(filled == 1):
            how = "; images with several labels, or none, cannot be trained on"
        fix = f"Give a whole number for each of {count:,} images{how}"
        raise UsageError(f"{what} is {array.dtype} {list(array.shape)}. {fix}.")
    if not 0 <= int(array.min()) <= int(array.max()) < classes:
        why = f"{what} has labels from {array.min()} to {array.max()}"
        rule = f"0 to the number of classes - 1, and at most {classes - 1:,}"
        raise UsageError(f"{why}. Labels must be {rule}.")
    return array.reshape(-1).astype(np.int32)
