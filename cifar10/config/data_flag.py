"""`--data`: the name of a data set, or the path of the user's own pictures.

`config.json` records a path as a kind of data and a location: `--data photos` becomes
`data = "folder"` and `data_dir = "/.../photos"`.
"""

import os
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.errors import UsageError
from cifar10.models.registry import PYTHON

NAMES = ("auto", "cifar10", "cifar100", "synthetic")
FOLDER = "folder"
# Maps a suffix, which names the kind, to the function in `input/` that reads the file.
FILES = {".npz": "pictures.arrays:find_npz"}
KINDS = (FOLDER, *(suffix[1:] for suffix in FILES))
PATH = f"a folder with a folder per class, or a file that ends in {' or '.join(FILES)}"
OF_FOLDERS = ("image_size", "max_bad_images", "validation_fraction")  # Settings.
OF_DIVISION = ("image_size", "validation_fraction", "val_fraction")  # Decide splits.
FINDABLE = (*NAMES, *KINDS)  # Other names stand for the data of a Python program.


def name_of(data: Any) -> str:
    """Returns `data` if it is a name or path, else a name for Python objects."""
    if isinstance(data, str | Path):
        return os.fspath(data)
    return PYTHON + ("arrays" if isinstance(data, tuple) else "dataset")


def located(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings; puts any path into `data_dir`, and its kind into `data`."""
    data = given.get("data")
    is_located = data in KINDS and "data_dir" in given  # As in `config.json`.
    if data in (None, *NAMES) or is_located or data.startswith(PYTHON):
        if (data or "").startswith(PYTHON) and given.get("data_dir"):
            raise UsageError("data_dir has no effect with data in memory. Omit it.")
        return given
    path = layout.absolute_path(data)
    if not os.path.exists(path):  # noqa: PTH110 - `Path.exists` raises errors.
        fix = f"Give {', '.join(NAMES)}, or the path of a folder or file of pictures"
        raise UsageError(f"--data {data}: there is no such data set or path. {fix}.")
    if "data_dir" in given:
        why = f"--data_dir {given['data_dir']}: --data {data} names a path"
        raise UsageError(f"{why}. Omit one.")
    if not path.is_dir() and path.suffix not in FILES:
        raise UsageError(f"--data {data}: give {PATH}.")
    kind = FOLDER if path.is_dir() else path.suffix[1:]
    return {**given, "data": kind, "data_dir": str(path)}
