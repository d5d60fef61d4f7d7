"""Lists the pictures in a folder, with their classes and splits.

A folder of pictures has one of two layouts: `CLASS/...`, or `train/CLASS/...` with
`test/CLASS/...` and optionally `val/CLASS/...`. The folder `val` may also be called
`validation`. Without a folder `test`, `val` is the test split. Only folders are opened,
not pictures.
"""

import contextlib
import dataclasses
import operator
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from cifar10.errors import UsageError, counted, first_few, printable, reason
from cifar10.input.records import WITHOUT_VAL, Split

# The suffixes of pictures; files with other suffixes are left out. Most kinds in the
# second line cannot be decoded. They are listed so that their files count as bad
# pictures, which the user notices.
_ENDS = {
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    *("jfif", "jpe", "heic", "heif", "avif", "jp2", "jxl"),
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

# A picture's path within the folder, with /; its size in bytes, or -1 if it is no file;
# its modification time in nanoseconds. Named tuples would take three times as long.
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
    """Lists the pictures in a folder, in an order that depends on their names alone."""
    where = printable(str(directory))
    found, visited, notes, left_out = _walk(directory)
    folders = _by_folder(found)
    used = _parts(folders, notes)
    for folder, why in visited.items():
        top = folder.partition("/")[0].casefold()
        if why and (len(used) < 2 or top in (TRAIN, *TESTS)):
            raise UsageError(
                f"The folder {printable(str(directory / folder))} cannot be read: "
                f"{why}.\nCorrect its name, or make it readable for this user. "
                f"{_LAYOUTS}"
            )
    parts = {split: _by_folder(folders[part], part) for split, part in used.items()}
    parts = parts or {"train": folders}
    in_no_class = sum(len(part.pop("", ())) for part in parts.values())
    left_out["in no class"] += in_no_class
    classes = [*parts["train"]]
    _check_classes(classes, directory, in_no_class)
    for split, part in parts.items():
        if unknown := sorted({*part} - {*classes}):
            raise UsageError(
                f"{where}: the {split} split has classes that {TRAIN}/ lacks: "
                f"{_some(unknown)}.\nNo model can learn these classes. Move their "
                "folders away, or add training pictures."
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
    # The class folders that exist, and the class folders that contain pictures.
    there = {
        name for name in visited if name.rpartition("/")[0] in ("", *used.values())
    } - {""}
    filled = {*folders}
    for split, top in used.items():
        filled |= {f"{top}/{name}" for name in parts[split]}
    if empty := sorted(there - filled):
        lack = counted(len(empty), "folder has", "folders have")
        notes.append(f"{lack} no pictures: {_some(empty)}")
    if left_out := +left_out:
        shown = dict(left_out.most_common(4))
        shown["more"] = left_out.total() - sum(shown.values())
        kinds = ", ".join(f"{n:,} {end}" for end, n in shown.items() if n)
        total = counted(left_out.total(), "file is", "files are")
        notes.append(f"{total} left out ({kinds})")
    names, notes = [*map(printable, classes)], [*map(printable, notes)]
    return Listing(names, files, labels, parts_of, notes)


def _walk(root: Path) -> tuple[list[File], dict[str, str], list[str], Counter[str]]:
    """Finds the pictures in a folder and its subfolders.

    Returns the pictures; a mapping of each folder to why it cannot be read, "" if it
    can; notes on unused links; and the number of other files by suffix. A folder is
    read once, even if several links lead to it.
    """
    pictures: list[File] = []
    visited: dict[str, str] = {}
    notes: list[str] = []
    dangling: list[str] = []
    left_out: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        folder = root / prefix
        try:
            about = folder.stat()
            with os.scandir(folder) as found:
                entries = sorted(found, key=operator.attrgetter("name"))
        except OSError as error:
            visited[prefix.removesuffix("/")] = reason(error)
            continue
        number = (about.st_dev, about.st_ino)
        is_link = folder.is_symlink() and prefix  # `root` itself may be a link.
        if number in seen or (is_link and _leads_back(folder, root)):
            notes.append(f"{prefix} is not used: a link to pictures of this data set")
            continue
        seen.add(number)
        visited[prefix.removesuffix("/")] = ""
        folders = []
        for entry in entries:
            name, end = prefix + entry.name, entry.name.rpartition(".")[2].lower()
            mode, size, time = _mode_size_and_time(entry)
            if entry.name.startswith("."):
                left_out["hidden"] += 1
            elif stat.S_ISDIR(mode):
                folders.append(f"{name}/")
            elif end in _ENDS:
                # Anything else, such as a pipe, is reported when it is read.
                is_file = stat.S_ISREG(mode)
                pictures.append((name, size, time) if is_file else (name, -1, 0))
            elif entry.is_symlink() and not mode:
                dangling.append(name)
            else:
                left_out[Path(name).suffix[1:].lower() or "without an ending"] += 1
        waiting += reversed(folders)
    if dangling:
        lead = counted(len(dangling), "link leads", "links lead")
        notes.append(f"{lead} to nothing: {_some(dangling)}")
    return pictures, visited, notes, left_out


def _mode_size_and_time(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    with contextlib.suppress(OSError):  # A link to nothing, or to itself.
        about = entry.stat()
        return about.st_mode, about.st_size, about.st_mtime_ns
    return 0, -1, 0


def _leads_back(link: Path, root: Path) -> bool:
    """Returns whether a link leads to a folder within or above the data set.

    Through such a link, a picture could be listed again under another class.
    """
    target, root = link.resolve(), root.resolve()
    return target.is_relative_to(root) or root.is_relative_to(target)


def _by_folder(files: Sequence[File], top: str = "") -> dict[str, list[File]]:
    """Groups pictures by the subfolder of `top`; the key "" stands for `top` itself."""
    start = len(f"{top}/") if top else 0
    found: dict[str, list[File]] = {}
    for file in files:
        folder, _, rest = file[0][start:].partition("/")
        found.setdefault(folder if rest else "", []).append(file)
    return found


def _parts(folders: Mapping[str, Sequence[File]], notes: list[str]) -> dict[Split, str]:
    """Maps each split to its folder; returns an empty dict if the folders are classes.

    A folder `train` is the training split if all its pictures are in subfolders, and if
    there is also a test folder or no other folder. Otherwise `train` is a class.
    """

    def named(part: str) -> list[str]:
        alike = [name for name in folders if name.casefold() == part]
        return [name for name in alike if "" not in _by_folder(folders[name], name)]

    train, tests = named(TRAIN), [name for part in TESTS for name in named(part)]
    others = [name for name in folders if name not in ("", *train, *tests)]
    if len(train) != 1 or (others and not tests):
        return {}
    used = dict(zip(WITHOUT_VAL, [*train, *tests], strict=False))
    if len(named(TESTS[0])) == 1 and tests[1:]:
        used["val"] = tests[1]
    if unused := [name for name in (*tests, *others) if name not in used.values()]:
        notes.append(f"only {_some([*used.values()])} are used, not {_some(unused)}")
    return used


def _check_classes(names: Sequence[str], folder: Path, in_no_class: int) -> None:
    """Refuses too few or too many classes, or classes whose names look the same.

    `in_no_class` is the number of pictures outside the folders of classes.
    """
    where = printable(str(folder))
    if not 2 <= len(names) <= MAX_CLASSES:
        found = []
        if names:
            classes = counted(len(names), "class", "classes")
            found.append(f"pictures in {classes}: {_some(names)}")
        if in_no_class:
            found.append(f"{counted(in_no_class, 'picture')} in no class")
        parent = printable(str(folder.parent))
        meant = f"If this is the folder of one class, give {parent}. "
        raise UsageError(
            f"{where} has {', and '.join(found) or 'no pictures'}. Two to "
            f"{MAX_CLASSES:,} classes are needed.\n"
            f"{meant if in_no_class else ''}{_LAYOUTS}"
        )
    times = Counter(map(_spelling, names))
    if same := [name for name in names if times[_spelling(name)] > 1]:
        raise UsageError(
            f"{where} has folders whose names differ only in case or Unicode form: "
            f"{_some(same)}. They would become separate classes. Merge or rename them."
        )


def _spelling(name: str) -> str:
    """Normalizes a name, so that names that look nearly the same become equal."""
    return unicodedata.normalize("NFC", printable(name)).casefold()


def _some(names: Sequence[str]) -> str:
    return first_few([*map(printable, names)], _SHOWN)
