"""`--data`: the name of a data set, or the path of the user's own pictures.

A path becomes the kind of data and its place, which is all that `config.json` and the
other commands know: `--data photos` is `data = "folder"` in `data_dir = "/.../photos"`.
"""

import os
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.errors import UsageError, did_you_mean
from cifar10.models.registry import PYTHON

NAMES = ("auto", "cifar10", "cifar100", "synthetic")
FOLDER, NPZ = KINDS = ("folder", "npz")
FINDABLE = (*NAMES, *KINDS)  # Any other data only a Python program gives.


def name_of(data: Any) -> str:
    """Returns `data` if it is a name, or else the name for a program's data."""
    if isinstance(data, str | Path):
        return os.fspath(data)
    kind = "arrays" if isinstance(data, tuple) else "dataset"
    return PYTHON + kind


def located(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the given flags, with a path as `data` replaced by kind and place."""
    data = given.get("data")
    if data is None or data in NAMES or data.startswith(PYTHON):
        return given
    if data in KINDS and "data_dir" in given:  # As `config.json` says it.
        return given
    path = layout.absolute_path(data)
    if not _exists(path):
        raise UsageError(
            f"--data {data}: there is no such data set, file or folder."
            f"{did_you_mean(data, NAMES)} Give {', '.join(NAMES)}, or the "
            "path of a folder of pictures or of an .npz file."
        )
    if "data_dir" in given:
        raise UsageError(
            f"--data {data} and --data_dir {given['data_dir']} both name a place. "
            "Leave --data_dir out."
        )
    kind = FOLDER if path.is_dir() else NPZ
    if kind == NPZ and path.suffix != ".npz":
        raise UsageError(
            f"--data {data} is a file, but not an .npz file. Give the folder that "
            "has a folder of pictures for each class."
        )
    return {**given, "data": kind, "data_dir": str(path)}


def check(data: str, image_size: int | None) -> None:
    """Refuses `config.dataset.data` if unknown, or if it takes no `image_size`."""
    if data not in FINDABLE and not data.startswith(PYTHON):
        raise UsageError(
            f"--data {data}: it is one of {', '.join(NAMES)}, or a path. Continue a "
            "run on other data with the version that wrote it."
        )
    if image_size and data != FOLDER:
        raise UsageError(
            f"--image_size {image_size}: the images of --data {data} have one size "
            "already. Leave it out, or give --data the path of your pictures."
        )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise UsageError(f"--data {path} cannot be read: {error.strerror}.") from error
