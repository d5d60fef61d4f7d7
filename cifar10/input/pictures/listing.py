"""The list of pictures that a data set is made of: their files, classes and parts.

A folder of pictures has one of two layouts: `CLASS/...`, or `train/CLASS/...` with
`test/CLASS/...`, whose `test` may be called `val` or `validation` too. Nothing is
opened here but folders.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import operator
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from cifar10.errors import UsageError, counted, first_few, printable, reason
from cifar10.input.records import SPLITS, Split

# Pictures, by the ends of their names. Files with other names are left alone.
_READ = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
# Also pictures, which must not be lost in silence: they are counted as bad unless
# they hold one of the above.
_NOT_READ = ("jfif", "jpe", "heic", "heif", "avif", "jp2", "jxl")
_ENDS = frozenset((*_READ, *_NOT_READ))

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
_DIGITS = 16  # Of a limit, in hexadecimal.


# Path within the folder, with /, which names the picture; bytes, -1 where there is no
# file; time of change in nanoseconds. Named tuples would take three times as long.
File: TypeAlias = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Listing:
    """Pictures, class by class."""

    classes: list[str]
    files: list[File]
    labels: list[int]
    is_test: list[bool]
    # How they were divided, if no test part was there; see `divided`.
    division: str | None = None
    # What was left out or is worth knowing; no part of what the data set is.
    notes: list[str] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.files)

    def key(self, places: range) -> str:
        """Returns a hash that shows whether pictures are those decoded earlier."""
        seen = json.dumps(self.files[places.start : places.stop])
        return hashlib.sha256(seen.encode()).hexdigest()

    def places(self, split: Split, left_out: Collection[int]) -> np.ndarray:
        """Returns where the pictures of a part are that are not left out, in order."""
        is_chosen = np.array(self.is_test, bool) == (split == "test")
        is_chosen[[*left_out]] = False
        return np.flatnonzero(is_chosen)


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
        Whether each picture is to test on, and the division as a run keeps it.
    """
    hashes = [*map(_hash_of, paths)]
    if division == BY_FRACTION:
        limits = [math.ceil(fraction * 2**64)] * classes
    elif division and len(division) == _DIGITS * classes:
        limits = [int(limit, 16) for limit in re.findall("." * _DIGITS, division)]
    else:
        of_class: list[list[int]] = [[] for _ in range(classes)]
        for number, one in zip(labels, hashes, strict=True):
            of_class[number].append(one)
        limits = [_limit(sorted(some), fraction) for some in of_class]
    is_test = [one < limits[n] for one, n in zip(hashes, labels, strict=True)]
    most = 16**_DIGITS - 1
    return is_test, "".join(f"{min(limit, most):0{_DIGITS}x}" for limit in limits)


def _limit(hashes: Sequence[int], fraction: float) -> int:
    """Returns below which hash the pictures of a class are tested on."""
    count = min(max(1, int(fraction * len(hashes) + 0.5)), len(hashes) - 1)
    return hashes[count - 1] + 1 if fraction and count > 0 else 0


def _hash_of(path: str) -> int:
    """Returns 64 bits that depend on a picture's name alone."""
    if path.isascii():
        content = path.encode()
    else:  # File systems write accents in two ways.
        path = unicodedata.normalize("NFC", path)
        content = path.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


def list_folder(
    directory: Path, validation_fraction: float, division: str | None = None
) -> Listing:
    """Lists the pictures in a folder, in an order that depends on their names alone.

    Without a test part, `validation_fraction` of each class becomes one, or what the
    `division` of a run says.
    """
    data_set = _Folders(directory)
    parts = data_set.parts()
    found = {part: data_set.classes(path) for part, path in parts.items()}
    classes = [*found["train"]]
    files: list[File] = []
    labels: list[int] = []
    is_test: list[bool] = []
    for label, name in enumerate(classes):
        for part in parts:
            of_class = found[part].get(name, [])
            files += of_class
            labels += [label] * len(of_class)
            is_test += [part == "test"] * len(of_class)
    if "test" in parts:
        data_set.compare(classes, [*found["test"]])
        division = None
    else:
        paths = [path for path, _, _ in files]
        is_test, division = divided(
            paths, labels, len(classes), validation_fraction, division
        )
    names, notes = [*map(printable, classes)], [*map(printable, data_set.notes)]
    if left_out := data_set.left_out:
        kinds = ", ".join(f"{n:,} {end}" for end, n in left_out.most_common(4))
        one, more = "file that is no picture is", "files that are no pictures are"
        total = counted(left_out.total(), one, more)
        notes.append(f"{total} left out ({printable(kinds)})")
    return Listing(names, files, labels, is_test, division, notes)


class _Folder(NamedTuple):
    """What is in a folder, in the order of the names."""

    number: tuple[int, int]  # The same for a folder and for all links to it.
    folders: list[str]
    pictures: list[File]


class _Folders:
    """The folders of a data set, which are read once.

    Their paths are those within the data set, whose own path is empty.
    """

    def __init__(self, root: Path) -> None:
        self.notes: list[str] = []  # For the user.
        # Files that are no pictures, by the ends of their names.
        self.left_out: Counter[str] = Counter()
        self._root = root
        self._read: dict[str, _Folder] = {}
        # Which class of which part read a folder first, by its number.
        self._first_class: dict[tuple[int, int], str] = {}

    def parts(self) -> dict[Split, str]:
        """Returns the folders of the training part, and of the test part if any.

        A folder `train` is the training part if it has subfolders and no pictures of
        its own, and stands beside a test part or alone. Otherwise it is a class.
        """

        def has_classes(path: str) -> bool:
            folder = self._folder(path)
            return bool(folder.folders) and not folder.pictures

        def named(part: str) -> list[str]:
            return [path for path in folders if path.casefold() == part]

        folders = self._folder("").folders
        train = named(TRAIN)
        tests = [path for part in TESTS for path in named(part) if has_classes(path)]
        others = [path for path in folders if path not in (*train, *tests)]
        if len(train) != 1:
            return {"train": ""}
        if not has_classes(train[0]) or (others and not tests):
            if others or tests:
                self.notes.append(f"{train[0]}/ is taken for a class")
            return {"train": ""}
        used = [*train, *tests[:1]]
        if unused := [*tests[1:], *others]:
            self.notes.append(f"{_some(unused)} beside {_some(used)} is not used")
        return dict(zip(SPLITS, used, strict=False))

    def classes(self, part: str) -> dict[str, list[File]]:
        """Returns the pictures of each class of a part that has any."""
        where, folder = self._where(part), self._folder(part)
        if len(folder.folders) > MAX_CLASSES:
            raise UsageError(
                f"{where} has {len(folder.folders):,} folders; at most {MAX_CLASSES:,} "
                "are taken for classes, as more are rather one for each picture.\n"
                f"{_LAYOUTS}"
            )
        paths = {path.rpartition("/")[2]: path for path in folder.folders}
        same: dict[str, str] = {}
        for name in map(printable, paths):
            key = unicodedata.normalize("NFC", name).casefold()
            if key in same:
                raise UsageError(
                    f"{where} has the folders {same[key]} and {name}, which differ "
                    "only in case or in how they are written; they would be two "
                    "classes. Merge or rename them."
                )
            same[key] = name
        if folder.pictures:
            one, more = (f"picture{s} directly in {where}" for s in ("", "s"))
            number = counted(len(folder.pictures), one, more)
            self.notes.append(f"without a class: {number}")
        found = {name: self._pictures(path) for name, path in paths.items()}
        full = {name: pictures for name, pictures in found.items() if pictures}
        if len(full) < 2 and part.casefold() not in TESTS:
            has = f"{counted(len(paths), 'folder')} and pictures only in {_some(full)}"
            raise UsageError(
                f"{where} has {has if full else 'no folders with pictures'}, but at "
                f"least two classes are needed.\n{_LAYOUTS}"
            )
        if empty := [name for name in found if name not in full]:
            self.notes.append(f"no pictures in {_some(empty)} of {where}")
        return full

    def compare(self, trained: list[str], tested: list[str]) -> None:
        """Compares the classes of the training part with those of the test part."""
        if unknown := sorted({*tested} - {*trained}):
            raise UsageError(
                f"{self._where('')}: the test part has classes that {TRAIN}/ lacks: "
                f"{_some(unknown)}.\nNo model can learn them: move them away, or add "
                "training pictures of them."
            )
        if lacking := sorted({*trained} - {*tested}):
            self.notes.append(f"no test pictures of {_some(lacking)}")

    def _pictures(self, top: str) -> list[File]:
        """Returns the pictures in and below a class's folder.

        A folder that links lead to again is read once.
        """
        found: list[File] = []
        seen: set[tuple[int, int]] = set()
        waiting = [top]
        while waiting:
            path = waiting.pop()
            folder = self._folder(path)
            if folder.number in seen:
                self.notes.append(f"{path} is a link to what is read already")
                continue
            seen.add(folder.number)
            first = self._first_class.setdefault(folder.number, top)
            if first != top:
                self.notes.append(f"{path} has the same pictures as {first}")
            found += folder.pictures
            waiting += reversed(folder.folders)
        return found

    def _folder(self, path: str) -> _Folder:
        if path not in self._read:
            try:
                about = (self._root / path).stat()
                with os.scandir(self._root / path) as found:
                    entries = sorted(found, key=operator.attrgetter("name"))
            except OSError as error:
                raise UsageError(
                    f"The folder {self._where(path)} cannot be read: {reason(error)}.\n"
                    "Correct its name, or make it readable for this user. "
                    f"{_LAYOUTS}"
                ) from error
            folder = _Folder((about.st_dev, about.st_ino), [], [])
            prefix = f"{path}/" if path else ""
            for entry in entries:
                self._add(entry, prefix + entry.name, folder)
            self._read[path] = folder
        return self._read[path]

    def _add(self, entry: os.DirEntry[str], path: str, folder: _Folder) -> None:
        """Adds a folder or a picture to the folder that it is in."""
        end = entry.name.rpartition(".")[2].lower()
        # A link may lead to itself, for which `entry.is_dir` fails.
        is_folder = entry.is_dir(follow_symlinks=False)
        is_linked = entry.is_symlink() and os.path.isdir(entry)  # noqa: PTH112
        if entry.name.startswith("."):
            self.left_out["hidden"] += 1
        elif is_linked and self._leads_back(entry):
            self.notes.append(f"{path} is a link back into the data set, not followed")
        elif is_folder or is_linked:
            folder.folders.append(path)
        elif end in _ENDS:
            size, time = -1, 0  # Of a pipe, say, which is reported when it is read.
            with contextlib.suppress(OSError):  # A link to itself.
                if entry.is_file():
                    about = entry.stat()
                    size, time = about.st_size, about.st_mtime_ns
            folder.pictures.append((path, size, time))
        else:
            self.left_out[end] += 1

    def _leads_back(self, link: os.DirEntry[str]) -> bool:
        """Returns whether a link leads to where its pictures have another class.

        That is a folder within the data set, or one that the data set is in.
        """
        target, root = os.path.realpath(link), os.path.realpath(self._root)
        return os.path.commonpath((target, root)) in (target, root)

    def _where(self, path: str) -> str:
        """Returns the whole path of a folder, for messages."""
        return printable(str(self._root / path))


def _some(names: Collection[str]) -> str:
    return first_few([*map(printable, names)], _SHOWN)
