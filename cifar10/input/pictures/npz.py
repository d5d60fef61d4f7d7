"""An .npz file as a data set, with the same arrays as Keras's own data sets.

They are x_train, y_train, x_test and y_test, as `arrays.py` takes them.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from cifar10.config import regular_files
from cifar10.config.data_flag import NPZ
from cifar10.errors import UsageError, printable, reason
from cifar10.input.pictures import arrays
from cifar10.input.records import SPLITS

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
        with regular_files.opened(path, follow=True) as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise UsageError(f"{where} is a single array (.npy).\n{_LAYOUT}")
            if missing := [name for name in _ARRAYS if name not in found]:
                names = printable(", ".join(found) or "nothing")
                raise UsageError(
                    f"{where} lacks {', '.join(missing)}; it has {names}.\n{_LAYOUT}"
                )
            return {name: found[name] for name in _ARRAYS}
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
