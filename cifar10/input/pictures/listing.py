"""Lists the pictures in a folder, with their classes and splits.

A folder of pictures has one of two layouts: `CLASS/...`, or `train/CLASS/...` with
`test/CLASS/...` and optionally `val/CLASS/...`. The folder `val` may also be called
`validation`. Without a folder `test`, `val` is the test split. A folder that has only
such folders, and no `train`, can be scored. Only folders are opened, not pictures.
"""

import dataclasses
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from cifar10.errors import UsageError, counted, first_few, printable, reason
from cifar10.input.records import Split

# The suffixes of pictures; files with other suffixes are left out. The kinds in the
# second line cannot be decoded. They are listed so that their files count as bad
# pictures, which the user notices.
_ENDS = {
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "jfif", "jpe"),
    *("tif", "tiff", "heic", "heif", "avif", "jp2", "jxl"),
}

# ImageNet-21k, the largest labelled set in use, has 21,841 classes. More folders than
# this limit probably hold one picture each, and would need a very large last layer.
MAX_CLASSES = 25_000

TRAIN = "train"
# The folders of the test split, in order of preference.
TESTS = ("test", "val", "validation")

_SHOWN = 5  # Names in a message.
_LAYOUTS = (
    "A folder of pictures has one subfolder for each class (cat/1.jpg, dog/2.jpg), or "
    "train/ and test/ with such subfolders. Links to folders are not followed."
)

# A picture's path within the folder, with /; its size in bytes; its modification time
# in nanoseconds. Named tuples would take three times as long.
File: TypeAlias = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Listing:
    """The pictures in a folder, class by class."""

    classes: list[str]
    files: list[File]
    labels: list[int]
    parts: list[str]
    notes: list[str]  # For the user.


def list_folder(directory: Path) -> Listing:
    """Lists the pictures in a folder, in an order that depends on their names alone."""
    *_, folders = _entries(directory, "")
    tops = _folders_of_splits(folders)
    left_out = sorted({*folders} - {*tops.values()}) if len(tops) > 1 else []
    parts = {split: _by_class(directory, top, left_out) for split, top in tops.items()}
    classes = [*next(iter(parts.values()))]  # Of the training split, if there is one.
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise UsageError(
            f"{directory} has pictures in {counted(len(classes), 'class', 'classes')}. "
            f"Two to {MAX_CLASSES:,} classes are needed.\n{_LAYOUTS}"
        )
    for split, part in parts.items():
        if unknown := sorted({*part} - {*classes}):
            raise UsageError(
                f"{directory}: {next(iter(tops))}/ lacks classes of {split}: "
                f"{first_few(unknown, _SHOWN)}. No model can learn these classes. Move "
                "their folders away, or add training pictures."
            )
    files: list[File] = []
    labels: list[int] = []
    parts_of: list[str] = []
    for label, name in enumerate(classes):
        for split, part in parts.items():
            of_class = part.get(name, [])
            files += of_class
            labels += [label] * len(of_class)
            parts_of += [split] * len(of_class)
    notes = []
    if left_out:
        total = counted(len(left_out), "file or folder is", "files or folders are")
        notes.append(f"{total} left out: {first_few(left_out, _SHOWN)}")
    return Listing([*map(printable, classes)], files, labels, parts_of, notes)


def list_pictures(path: Path) -> list[Path]:
    """Returns the pictures in a folder and its subfolders; [path] if there are none."""
    found = _pictures(path, "", []) if path.is_dir() else []
    return [path / name for name, _, _ in found] or [path]


def _folders_of_splits(folders: Sequence[str]) -> dict[Split, str]:
    """Maps each split to its folder, with a slash at the end, or training to ""."""
    named = {name.removesuffix("/").casefold(): name for name in folders}
    tests = [named[part] for part in TESTS if part in named]
    if not tests or (TRAIN not in named and len(tests) < len(folders)):
        return {"train": ""}
    used: dict[Split, str] = {"train": named[TRAIN]} if TRAIN in named else {}
    used["test"] = tests[0]
    if TESTS[0] in named and tests[1:]:
        used["val"] = tests[1]
    return used


def _by_class(directory: Path, top: str, left_out: list[str]) -> dict[str, list[File]]:
    """Lists the pictures of each class in `top`; adds everything else to `left_out`."""
    pictures, others, folders = _entries(directory, top)
    left_out += [name for name, _, _ in pictures] + others
    found: dict[str, list[File]] = {}
    for folder in folders:
        if of_class := _pictures(directory, folder, left_out):
            found[folder.removeprefix(top).removesuffix("/")] = of_class
        else:
            left_out.append(folder)
    return found


def _pictures(directory: Path, folder: str, left_out: list[str]) -> list[File]:
    """Lists the pictures in a folder, and then those in its subfolders."""
    found, folders = [], [folder]
    while folders:  # Not recursive, as folders may be nested deeper than calls.
        pictures, others, inner = _entries(directory, folders.pop())
        found += pictures
        left_out += others
        folders += reversed(inner)
    return found


def _entries(directory: Path, folder: str) -> tuple[list[File], list[str], list[str]]:
    """Returns the pictures, the other files and the subfolders of a folder.

    All are paths within `directory`, in the order of their names; folders end in a
    slash. Hidden files and folders are left out. Links to folders are not followed, and
    count as other files: through one, a picture could also get another class.
    """
    pictures, others, folders = [], [], []
    try:
        with os.scandir(directory / folder) as found:
            entries = sorted(found, key=operator.attrgetter("name"))
        for entry in entries:
            name = folder + entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{name}/")
            elif entry.name.rpartition(".")[2].lower() in _ENDS:
                about = entry.stat()
                pictures.append((name, about.st_size, about.st_mtime_ns))
            else:
                others.append(name)
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be read: {reason(error)}.\n"
            f"Make it readable for this user, or remove it. {_LAYOUTS}"
        ) from error
    return pictures, others, folders
