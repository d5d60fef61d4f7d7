"""Pictures in memory as a data set: from a program, or from an .npz file.

The arrays are those of Keras's own data sets: x_train, y_train, x_test and y_test.
Images are uint8 [count, height, width, 3], or grey without the last axis or with 1
there; labels are whole numbers [count] or [count, 1].
"""

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cifar10.config.data_flag import NPZ
from cifar10.errors import UsageError, printable, reason
from cifar10.input.dataset_base import Dataset
from cifar10.input.pictures.listing import MAX_CLASSES
from cifar10.input.records import SPLITS, Split
from cifar10.process import files

# The arrays of a file may take as much as that whatever the file's size, and a hundred
# times its size if that is more: real pictures become smaller by less. Grey ones then
# take three times as much.
_MOST_BYTES, _LARGEST_RATIO = 250 * 10**6, 100
_ARRAYS = tuple(f"{kind}_{split}" for split in SPLITS for kind in "xy")


@dataclasses.dataclass(frozen=True)
class ArrayDataset(Dataset):
    """Pictures in memory."""

    arrays: dict[Split, tuple[np.ndarray, np.ndarray]] = dataclasses.field(
        repr=False, kw_only=True
    )

    def read(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images of one split, and their labels, int32 [count]."""
        if split not in self.arrays:
            raise UsageError(
                f"{self.description}: it has no images to {split} on. Add them, as "
                "in data=((x_train, y_train), (x_test, y_test))."
            )
        return self.arrays[split]


def find_npz(path: Path) -> ArrayDataset:
    """Reads and checks the pictures of an .npz file."""
    path = path.expanduser().absolute()
    where = printable(str(path))
    try:
        with files.opened(path, follow=True) as file:
            found = _unpacked(file)
    except Exception as error:  # NumPy raises anything for a damaged file.
        why = "memory is too small" if isinstance(error, MemoryError) else reason(error)
        raise UsageError(
            f"{where} cannot be read, or is damaged: {why}.\nAn .npz file of pictures "
            f"has {', '.join(_ARRAYS)}, plain arrays as np.savez writes them, and they "
            "fit in memory. Pictures in folders, one for each class, need not fit."
        ) from error
    return array_dataset(found, where, NPZ, path)


def array_dataset(
    found: Mapping[str, np.ndarray], where: str, name: str, directory: Path | None
) -> ArrayDataset:
    """Checks pictures, and makes a data set of them.

    Args:
        found: `x_train` and `y_train`, `x_test` and `y_test`, or both.
        where: Where they are, for messages.
        name: As in `config.json`.
        directory: What finds them again; None if nothing does.
    """
    arrays: dict[Split, tuple[np.ndarray, np.ndarray]] = {}
    digest = hashlib.sha256()
    for split in SPLITS:
        if f"x_{split}" not in found:
            continue
        images = _images(found[f"x_{split}"], f"x_{split} in {where}")
        labels = _labels(found[f"y_{split}"], f"y_{split} in {where}")
        if len(images) != len(labels):
            raise UsageError(
                f"{where} has {len(images):,} images in x_{split} and {len(labels):,} "
                f"labels in y_{split}; each image needs one."
            )
        arrays[split] = images, labels
        digest.update(json.dumps(images.shape).encode())
        digest.update(labels.astype("<i4").tobytes())
        digest.update(images.data)
    if len(arrays) == len(SPLITS):
        _check_test(arrays, where)
    classes = 1 + int(max(labels.max() for _, labels in arrays.values()))
    if classes < 2 and "train" in arrays:
        raise UsageError(f"All labels in {where} are 0; two classes are needed.")
    height, width, channels = next(iter(arrays.values()))[0].shape[1:]
    count = sum(len(labels) for _, labels in arrays.values())
    return ArrayDataset(
        name=name,
        directory=directory,
        image_shape=(height, width, channels),
        class_names=tuple(f"class {label}" for label in range(classes)),
        description=(
            f"{count:,} pictures of {classes:,} classes at {width} x {height} in "
            f"{where}"
        ),
        fingerprint=digest.hexdigest(),
        arrays=arrays,
    )


def _unpacked(file: BinaryIO) -> dict[str, np.ndarray]:
    """Returns the arrays in a file: no pickles, and not far larger than the file."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.getinfo(f"{name}.npy") for name in _ARRAYS}
        usual = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
        if not usual.issuperset(entry.compress_type for entry in entries.values()):
            raise ValueError("it is compressed in an unusual way")
        unpacked = sum(entry.file_size for entry in entries.values())
        if unpacked > max(_MOST_BYTES, _LARGEST_RATIO * size):
            raise ValueError(f"its {size:,} bytes would be {unpacked:,} unpacked")
        found = {}
        for name, entry in entries.items():
            with archive.open(entry) as stream:
                found[name] = np.lib.format.read_array(stream, allow_pickle=False)
        return found


def _images(array: np.ndarray, what: str) -> np.ndarray:
    """Returns images as uint8 [count, height, width, 3]."""
    if not array.size:
        raise UsageError(f"{what} is empty: give at least one image.")
    if array.dtype != np.uint8:
        raise UsageError(
            f"{what} is {array.dtype}, but pixels have to be uint8, 0 to 255. Convert "
            "it where you know its scale: np.rint(x * 255).astype(np.uint8) if it is 0 "
            "to 1, np.rint(x).astype(np.uint8) if it is 0 to 255."
        )
    if array.ndim == 3:
        array = array[..., np.newaxis]
    if array.ndim != 4 or array.shape[3] not in (1, 3):
        raise UsageError(
            f"{what} has the shape {list(array.shape)}, but images are [count, height, "
            "width, 3], or grey without the 3 or with 1 instead."
        )
    if array.shape[3] == 1:
        return np.repeat(array, 3, axis=3)
    return np.ascontiguousarray(array)


def _labels(array: np.ndarray, what: str) -> np.ndarray:
    """Returns labels as int32 [count]."""
    shapes = [(array.size,), (array.size, 1)]
    if array.dtype.kind not in "iu" or array.shape not in shapes:
        raise UsageError(
            f"{what} is {array.dtype} {list(array.shape)}, but labels are whole "
            "numbers [count] or [count, 1]."
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < MAX_CLASSES:
        raise UsageError(
            f"{what} has labels from {array.min()} to {array.max()}; they have to be 0 "
            f"to the number of classes - 1, at most {MAX_CLASSES - 1:,}."
        )
    return array.reshape(-1).astype(np.int32)


def _check_test(
    arrays: Mapping[Split, tuple[np.ndarray, np.ndarray]], where: str
) -> None:
    """Refuses test pictures with a shape or labels that the training pictures lack."""
    trained, tested = (arrays[split][0].shape[1:] for split in SPLITS)
    if trained != tested:
        raise UsageError(
            f"The images in {where} are {trained} to train on and {tested} to test on "
            "(height, width, channels); they have to be of one shape."
        )
    unknown = np.setdiff1d(arrays["test"][1], arrays["train"][1])
    if unknown.size:
        raise UsageError(
            f"y_test in {where} has labels that y_train lacks, such as {unknown[0]}; "
            "no model can learn them."
        )
