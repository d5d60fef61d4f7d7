"""Finds the files to predict, and decodes them as training does."""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError
from cifar10.input.pictures import decoding
from cifar10.input.pictures.decoding import MAX_PIXELS, PictureError, read

__all__ = ["MAX_PIXELS", "OWN", "STRANGERS", "PictureError", "decode", "find", "read"]

# All kinds that a training reads.
OWN = decoding.KINDS
# Strangers send files to a server: it has no more decoders than it needs.
STRANGERS = ("PNG", "JPEG")


def find(names: Sequence[str], lines: Iterable[str]) -> list[Path]:
    """Returns the files that the names on a command line stand for.

    Args:
        names: Files; folders, which stand for all files in and below them except hidden
            ones and pipes or devices; and `-`, which stands for `lines`.
        lines: Names of files, one per line.
    """
    found: list[Path] = []
    for name in names:
        if name == "-":
            found += [Path(line) for line in map(str.strip, lines) if line]
        elif os.path.isdir(name):  # noqa: PTH112 - `Path.is_dir` raises.
            found += _in_folder(Path(name))
        else:
            found.append(Path(name))
    if not found:
        places = ", ".join("standard input" if name == "-" else name for name in names)
        raise UsageError(f"There are no files in {places}; name an image.")
    return found


def _in_folder(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("*"))
    return [
        path
        for path in paths
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        # What does not exist, such as a broken link, is reported when it is read. The
        # methods of `Path` raise if this user may not look.
        and (os.path.isfile(path) or not os.path.exists(path))  # noqa: PTH110, PTH113
    ]


def decode(
    content: bytes,
    name: str,
    height: int,
    width: int,
    max_pixels: int = MAX_PIXELS,
    kinds: Collection[str] = STRANGERS,
) -> np.ndarray:
    """Decodes a file of some kinds and resizes its image, as `decoding.decode` does.

    Returns:
        uint8 [height, width, 3].
    """
    return decoding.decode(
        content, name, height, width, max_pixels=max_pixels, kinds=kinds
    )
