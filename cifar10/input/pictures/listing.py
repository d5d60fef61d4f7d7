"""Lists the pictures in a folder, with their classes and splits.

A folder of pictures has one of two layouts: `CLASS/...`, or `train/CLASS/...` with
`test/CLASS/...` and optionally `val/CLASS/...`. The folder `val` may also be called
`validation`. Without a folder `test`, `val` is the test split. Only folders are opened,
not pictures.
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
    "train/ and test/ with such subfolders."
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
    notes: list[str] = dataclasses.field(default_factory=list)  # For the user.


def list_folder(directory: Path) -> Listing:
    """Lists the pictures in a folder, in an order that depends on their names alone.

    Raises:
        UsageError: Something cannot be read or is a link to a folder, or there are too
            few or too many classes.
    """
    try:
        return _list(directory)
    except OSError as error:
        raise UsageError(
            f"{printable(str(error.filename))} cannot be read: {reason(error)}.\n"
            f"Correct its name, or make it readable for this user. {_LAYOUTS}"
        ) from error


def _list(directory: Path) -> Listing:
    where = printable(str(directory))
    _, folders = _entries(directory)
    tops = _folders_of_splits(folders)
    left_out: list[str] = []
    parts = {split: _by_class(directory, top, left_out) for split, top in tops.items()}
    classes = [name for name, files in parts["train"].items() if files]
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise UsageError(
            f"{where} has pictures in {counted(len(classes), 'class', 'classes')}. Two "
            f"to {MAX_CLASSES:,} classes are needed.\n{_LAYOUTS}"
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
    empty: list[str] = []
    for split, part in parts.items():
        empty += [tops[split] + name for name, some in part.items() if not some]
        unknown = {name for name, some in part.items() if some} - {*classes}
        if unknown:
            raise UsageError(
                f"{where}: the {split} split has classes that {TRAIN}/ lacks: "
                f"{_some(sorted(unknown))}.\nNo model can learn these classes. Move "
                "their folders away, or add training pictures."
            )
    notes = []
    unused = {f"{name}/" for name in folders} - {*tops.values()}
    if len(tops) > 1 and unused:
        used = _some([*tops.values()])
        notes.append(f"only {used} are used, not {_some(sorted(unused))}")
    if empty:
        lack = counted(len(empty), "folder has", "folders have")
        notes.append(f"{lack} no pictures: {_some(empty)}")
    if left_out:
        total = counted(len(left_out), "file is", "files are")
        notes.append(f"{total} left out: {_some(left_out)}")
    return Listing([*map(printable, classes)], files, labels, parts_of, notes)


def _folders_of_splits(folders: Sequence[str]) -> dict[Split, str]:
    """Maps each split to its folder, with a slash at the end.

    Without folders for splits, all classes are training classes, in the folder "".
    """
    named = {name.casefold(): f"{name}/" for name in folders}
    tests = [named[part] for part in TESTS if part in named]
    if TRAIN not in named or not tests:
        return {"train": ""}
    used: dict[Split, str] = {"train": named[TRAIN], "test": tests[0]}
    if TESTS[0] in named and tests[1:]:
        used["val"] = tests[1]
    return used


def _by_class(
    directory: Path, prefix: str, left_out: list[str]
) -> dict[str, list[File]]:
    """Lists the pictures of each class, a subfolder of the folder `prefix`.

    Adds the names of all other files to `left_out`.
    """
    files, folders = _entries(directory / prefix)
    left_out += [prefix + entry.name for entry in files]
    return {
        name: _pictures(directory, f"{prefix}{name}/", left_out) for name in folders
    }


def _pictures(directory: Path, prefix: str, left_out: list[str]) -> list[File]:
    """Lists the pictures in the folder `prefix`, and then those in its subfolders."""
    files, folders = _entries(directory / prefix)
    found: list[File] = []
    for entry in files:
        name = prefix + entry.name
        if entry.name.rpartition(".")[2].lower() in _ENDS:
            about = entry.stat()
            found.append((name, about.st_size, about.st_mtime_ns))
        else:
            left_out.append(name)
    for folder in folders:
        found += _pictures(directory, f"{prefix}{folder}/", left_out)
    return found


def _entries(folder: Path) -> tuple[list[os.DirEntry[str]], list[str]]:
    """Returns the files in a folder and the names of its subfolders, without hidden.

    Refuses links to folders: through one, a picture could also get another class.
    """
    files, folders = [], []
    with os.scandir(folder) as found:
        for entry in sorted(found, key=operator.attrgetter("name")):
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                files.append(entry)
            elif not entry.is_symlink():
                folders.append(entry.name)
            else:
                raise UsageError(
                    f"{printable(entry.path)} is a link to a folder, and such links "
                    "are not followed.\nReplace the link with a folder, which may "
                    "contain links to pictures, or remove it."
                )
    return files, folders


def _some(names: Sequence[str]) -> str:
    return first_few([*map(printable, names)], _SHOWN)
