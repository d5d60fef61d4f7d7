"""The list of pictures that a data set is made of: their files, classes and parts.

A folder of pictures has one of two layouts: `CLASS/...`, or `train/CLASS/...` with
`test/CLASS/...`, whose `test` may be called `val` or `validation` too. Nothing is
opened here but folders.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import operator
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from cifar10.errors import UsageError, counted, first_few, printable, reason
from cifar10.input.records import Split

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
    notes = _Notes(directory)
    parts = _parts(_Folder("", notes))
    found = {part: _classes(folder) for part, folder in parts.items()}
    classes = [name for name, files in found["train"].items() if files]
    if "test" in parts:
        _compare(
            classes, [name for name, files in found["test"].items() if files], notes
        )
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
        division = None
    else:
        paths = [path for path, _, _ in files]
        is_test, division = divided(
            paths, labels, len(classes), validation_fraction, division
        )
    names = [*map(printable, classes)]
    return Listing(names, files, labels, is_test, division, notes.texts())


class _Notes:
    """What is left out of a data set, or worth knowing."""

    def __init__(self, directory: Path) -> None:
        self.root = os.fspath(directory)
        self.hidden = 0
        self.others: Counter[str] = Counter()  # By the ends of their names.
        # Which class of which part read a folder first, by its device and number there.
        self.first_class: dict[tuple[int, int], str] = {}
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Adds a note, whose names cannot control a terminal."""
        self._texts.append(printable(text))

    def texts(self) -> list[str]:
        """Returns all notes."""
        texts = [*self._texts]
        if self.hidden:
            one, more = "hidden file or folder is", "hidden files or folders are"
            texts.append(f"{counted(self.hidden, one, more)} left out")
        if self.others:
            ends = ", ".join(f"{n:,} {end}" for end, n in self.others.most_common(4))
            one, more = "file that is no picture is", "files that are no pictures are"
            total = counted(self.others.total(), one, more)
            texts.append(f"{total} left out ({ends})")
        return texts


class _Folder:
    """A folder of the data set, which is looked into once.

    Attributes:
        path: Within the data set, whose own path is empty.
        notes: Those of the data set.
    """

    def __init__(self, path: str, notes: _Notes) -> None:
        self.path = path
        self.name = path.rpartition("/")[2]
        self.notes = notes

    @property
    def where(self) -> str:
        """The whole path, for messages."""
        return printable(str(Path(self.notes.root, self.path)))

    @property
    def number(self) -> tuple[int, int]:
        """The same for a folder and for all links to it."""
        with self._explained():
            about = Path(self.notes.root, self.path).stat()
        return about.st_dev, about.st_ino

    @property
    def folders(self) -> list["_Folder"]:
        """The folders in it, in the order of their names."""
        return self._content[0]

    @property
    def files(self) -> list[File]:
        """The pictures in it, in the order of their names."""
        return self._content[1]

    @property
    def has_classes(self) -> bool:
        """Whether it has folders, and no pictures beside them."""
        return bool(self.folders) and not self.files

    def all_files(self) -> list[File]:
        """Returns the pictures in and below a class's folder.

        A folder that links lead to again is read once.
        """
        found: list[File] = []
        seen: set[tuple[int, int]] = set()
        waiting = [self]
        while waiting:
            folder = waiting.pop()
            if (number := folder.number) in seen:
                self.notes.add(f"{folder.path} is a link to what is read already")
                continue
            seen.add(number)
            first = self.notes.first_class.setdefault(number, self.path)
            if first != self.path:
                self.notes.add(f"{folder.path} has the same pictures as {first}")
            found += folder.files
            waiting += reversed(folder.folders)
        return found

    @functools.cached_property
    def _content(self) -> tuple[list["_Folder"], list[File]]:
        folders: list[_Folder] = []
        files: list[File] = []
        with self._explained(), os.scandir(Path(self.notes.root, self.path)) as found:
            entries = sorted(found, key=operator.attrgetter("name"))
        for entry in entries:
            path = f"{self.path}/{entry.name}" if self.path else entry.name
            end = entry.name[entry.name.rfind(".") + 1 :].lower()
            size, time = -1, 0
            if entry.name.startswith("."):
                self.notes.hidden += 1
                continue
            try:
                if entry.is_dir():
                    if not self._leads_back(entry, path):
                        folders.append(_Folder(path, self.notes))
                    continue
                if end in _ENDS and entry.is_file():  # No pipe, no device.
                    about = entry.stat()
                    size, time = about.st_size, about.st_mtime_ns
            except OSError:  # A link to itself, which is reported when it is read.
                pass
            if end in _ENDS:
                files.append((path, size, time))
            else:
                self.notes.others[printable(end)] += 1
        return folders, files

    def _leads_back(self, entry: os.DirEntry[str], path: str) -> bool:
        """Returns whether a folder is a link to where its pictures have another class.

        That is a folder within the data set, or one that the data set is in.
        """
        if not entry.is_symlink():
            return False
        target, root = os.path.realpath(entry.path), os.path.realpath(self.notes.root)
        if os.path.commonpath((target, root)) not in (target, root):
            return False
        self.notes.add(f"{path} is a link back into the data set, and not followed")
        return True

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns an error of the operating system into a `UsageError`."""
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"The folder {self.where} cannot be read: {reason(error)}.\nCorrect "
                f"its name, or make it readable for this user. {_LAYOUTS}"
            ) from error


def _parts(data_set: _Folder) -> dict[str, _Folder]:
    """Returns the folders of the training part, and of the test part if any.

    A folder `train` is the training part if it has subfolders and no pictures of its
    own, and stands beside a test part or alone. Otherwise it is a class.
    """
    folders, notes = data_set.folders, data_set.notes
    train = [folder for folder in folders if folder.name.casefold() == TRAIN]
    tests = [
        folder
        for part in TESTS
        for folder in folders
        if folder.name.casefold() == part and folder.has_classes
    ]
    others = [folder for folder in folders if folder not in (*train, *tests)]
    if len(train) != 1:
        return {"train": data_set}
    if not train[0].has_classes or (others and not tests):
        if others or tests:
            notes.add(f"{train[0].name}/ is taken for a class")
        return {"train": data_set}
    if unused := [folder.name for folder in (*tests[1:], *others)]:
        used = _some([folder.name for folder in (*train, *tests[:1])])
        notes.add(f"{_some(unused)} beside {used} is not used")
    return dict(zip(("train", "test"), (*train, *tests[:1]), strict=False))


def _classes(part: _Folder) -> dict[str, list[File]]:
    """Returns the pictures of each class of a part, or refuses its folders."""
    if len(part.folders) > MAX_CLASSES:
        raise UsageError(
            f"{part.where} has {len(part.folders):,} folders; at most {MAX_CLASSES:,} "
            "are taken for classes, as more are rather one for each picture.\n"
            f"{_LAYOUTS}"
        )
    names = [folder.name for folder in part.folders]
    same: dict[str, str] = {}
    for name in map(printable, names):
        key = unicodedata.normalize("NFC", name).casefold()
        if key in same:
            raise UsageError(
                f"{part.where} has the folders {same[key]} and {name}, which differ "
                "only in case or in how they are written; they would be two classes. "
                "Merge or rename them."
            )
        same[key] = name
    if part.files:
        one, more = (f"picture{s} directly in {part.where}" for s in ("", "s"))
        part.notes.add(f"without a class: {counted(len(part.files), one, more)}")
    found = {folder.name: folder.all_files() for folder in part.folders}
    empty = [name for name in names if not found[name]]
    full = [name for name in names if found[name]]
    if len(full) < 2 and part.name.casefold() not in TESTS:
        has = f"{counted(len(names), 'folder')} and pictures only in {_some(full)}"
        raise UsageError(
            f"{part.where} has {has if full else 'no folders with pictures'}, but at "
            f"least two classes are needed.\n{_LAYOUTS}"
        )
    if empty:
        part.notes.add(f"no pictures in {_some(empty)} of {part.where}")
    return found


def _compare(trained: list[str], tested: list[str], notes: _Notes) -> None:
    """Compares the classes of the training part with those of the test part."""
    if unknown := sorted({*tested} - {*trained}):
        raise UsageError(
            f"{printable(notes.root)}: the test part has classes that {TRAIN}/ lacks: "
            f"{_some(unknown)}.\nNo model can learn them: move them away, or add "
            "training pictures of them."
        )
    if lacking := sorted({*trained} - {*tested}):
        notes.add(f"no test pictures of {_some(lacking)}")


def _some(names: Sequence[str]) -> str:
    return first_few([*map(printable, names)], _SHOWN)
