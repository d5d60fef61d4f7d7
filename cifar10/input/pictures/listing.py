"""The list of pictures that a data set is made of, and its division into parts.

A folder of pictures has one of two layouts: `CLASS/...`, or `train/CLASS/...` with
`test/CLASS/...`, whose `test` may be called `val` or `validation` too. Nothing is
opened here but folders.
"""

import contextlib
import dataclasses
import hashlib
import math
import operator
import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from cifar10.errors import UsageError, counted, first_few, printable, reason

# The ends of pictures' names; files with other names are left alone. Those of the
# second line are not read, but must not be lost in silence: they count as bad unless
# they hold a picture of another kind.
_ENDS = {
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"),
    *("jfif", "jpe", "heic", "heif", "avif", "jp2", "jxl"),
}

# ImageNet-21k, the largest labelled set in use, has 21,841. More folders than this are
# probably one for each picture, and the last layer would be larger than the network.
MAX_CLASSES = 25_000

TRAIN = "train"
# In order of preference, if there are several.
TESTS = ("test", "val", "validation")

_SHOWN = 5  # Names in a message.
_LAYOUTS = (
    "A folder of pictures has one subfolder for each class (cat/1.jpg, dog/2.jpg), or "
    "train/ and test/ that have them."
)

# How a run of an older version was divided: by one limit for all classes.
BY_FRACTION = ""

# Path within the folder, with /, which names the picture; bytes, -1 if it is no file;
# time of change in nanoseconds. Named tuples would take three times as long.
File: TypeAlias = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Listing:
    """Pictures, class by class or in the order of their source."""

    classes: list[str]
    files: list[File]
    labels: list[int]
    is_test: list[bool] | None  # None if there is no test part.
    notes: list[str] = dataclasses.field(default_factory=list)  # For the user.


def divided(
    paths: Sequence[str],
    labels: Sequence[int],
    classes: int,
    fraction: float,
    division: str | None,
) -> tuple[list[bool], str]:
    """Divides pictures that come without a test part.

    Each class is divided by itself: those of its pictures are tested on whose names
    have the lowest hashes, below a limit. So the division is the same on every machine,
    and pictures that are added move few others. A run keeps its limits in
    `config.json`, and by them no picture that it was trained on is ever scored,
    whatever was added since.

    Args:
        paths: The names of the pictures.
        labels: Their classes, from 0 on.
        classes: How many classes there are.
        fraction: The share to test on. A class of two or more pictures has at least
            one of them in either part.
        division: That of a run, or `BY_FRACTION`; None to divide anew, and so are
            other classes than those of the run.

    Returns:
        Whether each picture is to test on, and the division as a run keeps it: the
        limits of all classes, each 16 hexadecimal digits.
    """
    hashes = np.array([*map(_hash_of, paths)], np.uint64)
    classes_of = np.array(labels, np.int64)
    if division == BY_FRACTION:
        most = 2**64 - 1
        limits = np.full(classes, min(math.ceil(fraction * 2**64), most), np.uint64)
    elif division and len(division) == 16 * classes:
        limits = np.frombuffer(bytes.fromhex(division), ">u8").astype(np.uint64)
    else:
        ordered = hashes[np.lexsort((hashes, classes_of))]
        ends = np.cumsum(np.bincount(classes_of, minlength=classes))
        of_classes = np.split(ordered, ends[:-1])
        limits = np.array([_limit(some, fraction) for some in of_classes], np.uint64)
    is_test = hashes < limits[classes_of]
    return is_test.tolist(), limits.astype(">u8").tobytes().hex()


def _limit(hashes: np.ndarray, fraction: float) -> int:
    """Returns below which of its hashes, in order, a class is tested on."""
    count = min(max(1, int(fraction * len(hashes) + 0.5)), len(hashes) - 1)
    return int(hashes[count - 1]) + 1 if fraction and count > 0 else 0


def _hash_of(path: str) -> int:
    """Returns 64 bits that depend on a picture's name alone."""
    # File systems write accents in two ways.
    name = path if path.isascii() else unicodedata.normalize("NFC", path)
    content = name.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


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
    parts = [_by_folder(folders[part], part) for part in used] or [folders]
    in_no_class = sum(len(part.pop("", ())) for part in parts)
    left_out["in no class"] += in_no_class
    classes = [*parts[0]]
    _check_classes(classes, directory, in_no_class)
    if unknown := sorted({*parts[-1]} - {*classes}):
        raise UsageError(
            f"{where}: the test part has classes that {TRAIN}/ lacks: "
            f"{_some(unknown)}.\nNo model can learn them: move them away, or add "
            "training pictures of them."
        )
    files: list[File] = []
    labels: list[int] = []
    is_test: list[bool] = []
    for label, name in enumerate(classes):
        for number, part in enumerate(parts):
            of_class = part.get(name, [])
            files += of_class
            labels += [label] * len(of_class)
            is_test += [number == 1] * len(of_class)
    # Folders of classes, as the file system and the pictures have them.
    there = {name for name in visited if name.rpartition("/")[0] in ("", *used)} - {""}
    filled = {*folders}
    for top, part in zip(used, parts if used else (), strict=True):
        filled |= {f"{top}/{name}" for name in part}
    if empty := sorted(there - filled):
        lack = counted(len(empty), "folder has", "folders have")
        notes.append(f"{lack} no pictures: {_some(empty)}")
    if left_out := +left_out:
        kinds = ", ".join(f"{n:,} {end}" for end, n in left_out.most_common(4))
        total = counted(left_out.total(), "file is", "files are")
        notes.append(f"{total} left out ({kinds})")
    names, notes = [*map(printable, classes)], [*map(printable, notes)]
    return Listing(names, files, labels, is_test if len(parts) > 1 else None, notes)


def _walk(root: Path) -> tuple[list[File], dict[str, str], list[str], Counter[str]]:
    """Returns a folder's pictures, its folders, notes, and other files by their ends.

    The folders come with why they cannot be read, as a disk's `lost+found` beside the
    parts, or "" if they can. A folder is read once, whatever links lead to it.
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
        is_link = folder.is_symlink() and prefix  # The whole data set may be one.
        if number in seen or (is_link and _leads_back(folder, root)):
            notes.append(f"{prefix} is a link to pictures of this data set, not used")
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
                # A pipe, say, is reported when it is read.
                is_file = stat.S_ISREG(mode)
                pictures.append((name, size, time) if is_file else (name, -1, 0))
            elif entry.is_symlink() and not mode:
                dangling.append(name)
            else:
                left_out[end] += 1
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
    """Returns whether a link leads to where its pictures have another class.

    That is a folder within the data set, or one that the data set is in.
    """
    target, root = link.resolve(), root.resolve()
    return target.is_relative_to(root) or root.is_relative_to(target)


def _by_folder(files: Sequence[File], top: str = "") -> dict[str, list[File]]:
    """Groups pictures by the folders within `top`; those directly there are at ""."""
    start = len(f"{top}/") if top else 0
    found: dict[str, list[File]] = {}
    for file in files:
        folder, _, rest = file[0][start:].partition("/")
        found.setdefault(folder if rest else "", []).append(file)
    return found


def _parts(folders: Mapping[str, Sequence[File]], notes: list[str]) -> list[str]:
    """Returns the folders of the training and the test part, if there are any.

    A folder `train` is the training part if it has subfolders and no pictures of its
    own, and stands beside a test part or alone. Otherwise it is a class.
    """

    def named(part: str) -> list[str]:
        alike = [name for name in folders if name.casefold() == part]
        return [name for name in alike if "" not in _by_folder(folders[name], name)]

    train, tests = named(TRAIN), [name for part in TESTS for name in named(part)]
    others = [name for name in folders if name not in ("", *train, *tests)]
    if len(train) != 1 or (others and not tests):
        return []
    used = [*train, *tests[:1]]
    if unused := [*tests[1:], *others]:
        notes.append(f"{_some(unused)} beside {_some(used)} is not used")
    return used


def _check_classes(names: Sequence[str], folder: Path, in_no_class: int) -> None:
    """Refuses too few or too many classes, or classes whose names look the same.

    `in_no_class` pictures lie beside the folders of the classes.
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
        meant = f"If it is the folder of one class, give {parent}. "
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
    """Returns the form in which names that look the same, or nearly so, are equal."""
    return unicodedata.normalize("NFC", printable(name)).casefold()


def _some(names: Sequence[str]) -> str:
    return first_few([*map(printable, names)], _SHOWN)
