"""An .npz file as a data set, with the same arrays as Keras's own data sets.

They are x_train, y_train, x_test and y_test, as `arrays.py` takes them.
"""

import os
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cifar10.config.data_flag import NPZ
from cifar10.errors import UsageError, printable, reason
from cifar10.input.pictures import arrays
from cifar10.input.records import SPLITS
from cifar10.process import files

# As much as that whatever the file's size, and a hundred times its size if that is
# more: real pictures become smaller by less. Grey ones then take three times as much.
_MOST_BYTES, _LARGEST_RATIO = 250 * 10**6, 100
_ARRAYS = tuple(f"{kind}_{split}" for split in SPLITS for kind in "xy")
_LAYOUT = f"An .npz file of pictures has {', '.join(_ARRAYS)}, as np.savez writes them."


def find(path: Path) -> arrays.ArrayDataset:
    """Reads and checks the pictures of an .npz file."""
    path = path.expanduser().absolute()
    where = printable(str(path))
    return arrays.dataset(_load(path, where), where, NPZ, path)


def _load(path: Path, where: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a file, none of which may be a pickle."""
    try:
        with files.opened(path, follow=True) as file:
            return _arrays(file, where)
    except UsageError:
        raise
    except MemoryError as error:
        raise UsageError(
            f"{where} does not fit in memory. Write its pictures to a folder with a "
            "subfolder for each class, which need not."
        ) from error
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {reason(error)}.") from error
    except Exception as error:  # NumPy raises anything for a damaged file.
        raise UsageError(
            f"{where} is damaged or no .npz file of plain arrays: {reason(error)}.\n"
            f"{_LAYOUT}"
        ) from error


def _arrays(file: BinaryIO, where: str) -> dict[str, np.ndarray]:
    """Returns the arrays in a file, if they are not far larger than the file."""
    size, magic = os.fstat(file.fileno()).st_size, np.lib.format.MAGIC_PREFIX
    if file.read(len(magic)) == magic:
        raise UsageError(f"{where} is a single array (.npy).\n{_LAYOUT}")
    with zipfile.ZipFile(file) as archive:
        entries = {one.filename.removesuffix(".npy"): one for one in archive.infolist()}
        if missing := [name for name in _ARRAYS if name not in entries]:
            names = printable(", ".join(entries) or "nothing")
            raise UsageError(
                f"{where} lacks {', '.join(missing)}; it has {names}.\n{_LAYOUT}"
            )
        entries = {name: entries[name] for name in _ARRAYS}
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
