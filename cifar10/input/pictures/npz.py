"""An .npz file as a data set, with the arrays that Keras's own data sets have.

`x_train` and `x_test` are uint8 [count, height, width, 3], or grey without the last
axis or with 1 there; `y_train` and `y_test` are whole numbers [count] or [count, 1].
"""

import dataclasses
import hashlib
import json
import zipfile
import zlib
from pathlib import Path

import numpy as np

from cifar10.config import regular_files
from cifar10.errors import UsageError, printable, reason
from cifar10.input.pictures.scanning import MAX_CLASSES
from cifar10.input.records import Split

_SPLITS: tuple[Split, Split] = ("train", "test")
_ARRAYS = tuple(f"{kind}_{split}" for split in _SPLITS for kind in "xy")
_LAYOUT = f"An .npz file of pictures has {', '.join(_ARRAYS)}, as np.savez writes them."


@dataclasses.dataclass(frozen=True)
class NpzDataset:
    """The pictures of an .npz file, in memory."""

    directory: Path  # The file: what finds it again.
    image_shape: tuple[int, int, int]
    classes: int  # Labels are 0 to `classes - 1`.
    class_names: tuple[str, ...]
    description: str  # One line for the user.
    fingerprint: str  # SHA-256 of what a training sees of them.
    arrays: dict[Split, tuple[np.ndarray, np.ndarray]] = dataclasses.field(repr=False)
    name: str = "npz"
    is_real: bool = True

    def read(self, split: Split) -> tuple[np.ndarray, np.ndarray]:
        """Returns the images of one split, and their labels, int32 [count]."""
        return self.arrays[split]


def find(path: Path) -> NpzDataset:
    """Reads and checks the pictures of an .npz file."""
    path = path.expanduser().absolute()
    where = printable(str(path))
    found = _load(path, where)
    arrays: dict[Split, tuple[np.ndarray, np.ndarray]] = {}
    for split in _SPLITS:
        images = _images(found[f"x_{split}"], f"x_{split} in {where}")
        labels = _labels(found[f"y_{split}"], f"y_{split} in {where}")
        if len(images) != len(labels) or not len(images):
            raise UsageError(
                f"{where} has {len(images):,} images in x_{split} and {len(labels):,} "
                f"labels in y_{split}; each image needs one, and there has to be one."
            )
        arrays[split] = images, labels
    shapes = {split: arrays[split][0].shape[1:] for split in _SPLITS}
    if shapes["train"] != shapes["test"]:
        raise UsageError(
            f"The images in {where} are {shapes['train']} to train on and "
            f"{shapes['test']} to test on (height, width, channels); they have to be "
            "of one shape."
        )
    classes = 1 + int(max(labels.max() for _, labels in arrays.values()))
    unknown = np.setdiff1d(arrays["test"][1], arrays["train"][1])
    if unknown.size:
        raise UsageError(
            f"y_test in {where} has labels that y_train lacks, such as {unknown[0]}; "
            "no model can learn them."
        )
    if classes < 2:
        raise UsageError(f"All labels in {where} are 0; two classes are needed.")
    height, width, channels = shapes["train"]
    count = sum(len(labels) for _, labels in arrays.values())
    return NpzDataset(
        directory=path,
        image_shape=(height, width, channels),
        classes=classes,
        class_names=tuple(f"class {label}" for label in range(classes)),
        description=(
            f"{count:,} pictures of {classes:,} classes at {width} x {height} in "
            f"{where}"
        ),
        fingerprint=_fingerprint(arrays),
        arrays=arrays,
    )


def _load(path: Path, where: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a file, none of which may be a pickle."""
    try:
        with regular_files.opened(path, follow=True) as file:
            arrays = np.load(file, allow_pickle=False)
            if isinstance(arrays, np.ndarray):
                raise UsageError(f"{where} is a single array (.npy).\n{_LAYOUT}")
            if missing := [name for name in _ARRAYS if name not in arrays]:
                names = printable(", ".join(arrays) or "nothing")
                raise UsageError(
                    f"{where} lacks {', '.join(missing)}; it has {names}.\n{_LAYOUT}"
                )
            return {name: arrays[name] for name in _ARRAYS}
    except MemoryError as error:
        raise UsageError(
            f"{where} does not fit in memory. Write its pictures to a folder with a "
            "subfolder for each class, which need not."
        ) from error
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {reason(error)}.") from error
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{where} is damaged or no .npz file of plain arrays: {reason(error)}.\n"
            f"{_LAYOUT}"
        ) from error


def _images(array: np.ndarray, what: str) -> np.ndarray:
    """Returns images as uint8 [count, height, width, 3]."""
    if array.dtype != np.uint8:
        span = ""
        if array.size and array.dtype.kind in "fiu":
            span = f" from {array.min():g} to {array.max():g}"
        raise UsageError(
            f"{what} is {array.dtype}{span}, but pixels have to be uint8, 0 to 255. "
            "Convert it where you know its scale: np.rint(x * 255).astype(np.uint8) if "
            "it is 0 to 1, np.rint(x).astype(np.uint8) if it is 0 to 255."
        )
    if array.ndim == 3:
        array = array[..., np.newaxis]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape[1:]:
        raise UsageError(
            f"{what} has the shape {list(array.shape)}, but images are [count, height, "
            "width, 3], or grey without the 3 or with 1 instead."
        )
    if array.shape[3] == 1:
        return np.repeat(array, 3, axis=3)
    return np.ascontiguousarray(array)


def _labels(array: np.ndarray, what: str) -> np.ndarray:
    """Returns labels as int32 [count]."""
    if array.dtype.kind not in "iu" or array.shape not in [
        (array.size,),
        (array.size, 1),
    ]:
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


def _fingerprint(arrays: dict[Split, tuple[np.ndarray, np.ndarray]]) -> str:
    digest = hashlib.sha256()
    for split in _SPLITS:
        images, labels = arrays[split]
        digest.update(json.dumps(images.shape).encode())
        digest.update(labels.astype("<i4").tobytes())
        digest.update(images.data)
    return digest.hexdigest()
