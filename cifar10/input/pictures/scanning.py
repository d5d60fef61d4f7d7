"""From a folder of pictures to a list of files: their classes and parts of the data.

Two layouts are read: `CLASS/...`, and `train/CLASS/...` with `test/CLASS/...`, whose
`test` may be called `val` or `validation` too. Nothing is opened here but folders;
`listing.py` says what the list is.
"""

import contextlib
import hashlib
import itertools
import operator
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError, first_few, printable, reason
from cifar10.input.pictures.listing import Listing

# Pictures, by the ends of their names. Files with other names are left alone.
SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif")
# Also pictures, which must not be lost in silence: they are counted as bad unless
# they hold one of the above.
_OTHER_SUFFIXES = ("jfif", "jpe", "tif", "tiff", "heic", "heif", "avif", "jp2", "jxl")
_ENDS = frozenset((*SUFFIXES, *_OTHER_SUFFIXES))

# ImageNet-21k, the largest labelled set in use, has 21,841. More folders than this are
# probably one for each picture, and the last layer would be larger than the network.
MAX_CLASSES = 25_000

TRAIN = "train"
# In order of preference, if there are several.
TESTS = ("test", "val", "validation")

_NAME = operator.attrgetter("name")
_SHOWN = 5  # Names in a message.

LAYOUTS = (
    "A folder of pictures has one subfolder for each class (cat/1.jpg, dog/2.jpg), or "
    "train/ and test/ that have them."
)


# Paths, sizes and times of change: columns, as in `Listing`, which take half the time
# that an object for each file takes.
_Files = tuple[list[Any], list[Any], list[Any]]


def scan(directory: Path, validation_fraction: float) -> Listing:
    """Lists the pictures in a folder, in an order that depends on their names alone.

    Without a test part, each picture belongs to it with the probability
    `validation_fraction`, as a hash of its path within the folder decides: the same on
    every machine, and whatever files are added.
    """
    found = _Scan(directory)
    parts = found.parts()
    folders = {part: found.classes(folder) for part, folder in parts.items()}
    files = {
        part: {name: found.files(_joined(parts[part], name)) for name in names}
        for part, names in folders.items()
    }
    classes = found.with_pictures(parts["train"], files["train"])
    if "test" in parts:
        found.compare(classes, found.with_pictures(parts["test"], files["test"]))
    chosen: dict[str, _Files] = {"train": ([], [], []), "test": ([], [], [])}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for label, name in enumerate(classes):
        of_class = {part: files[part][name] for part in files if name in files[part]}
        if "test" not in parts:
            of_class = _split(of_class["train"], validation_fraction)
        for part, columns in of_class.items():
            for whole, column in zip(chosen[part], columns, strict=True):
                whole.extend(column)
            labels[part] += [label] * len(columns[0])
    paths, sizes, times = map(operator.add, chosen["train"], chosen["test"])
    return Listing(
        classes=[_shown(name) for name in classes],
        path=paths,
        size=sizes,
        mtime_ns=times,
        label=labels["train"] + labels["test"],
        tests=len(labels["test"]),
        notes=found.notes(),
    )


def _split(files: _Files, fraction: float) -> dict[str, _Files]:
    """Returns the files to train on and those to test on."""
    limit = fraction * 2**64
    is_test = [_hash(path) < limit for path in files[0]]
    is_train = [not test for test in is_test]
    return {"train": _kept(files, is_train), "test": _kept(files, is_test)}


def _kept(files: _Files, which: list[bool]) -> _Files:
    paths, sizes, times = (list(itertools.compress(c, which)) for c in files)
    return paths, sizes, times


def falls_in_test(path: str, fraction: float) -> bool:
    """Returns whether a file belongs to the test part of a folder that has none."""
    return _hash(path) < fraction * 2**64


def _hash(path: str) -> int:
    """Returns 64 bits that depend on a path alone."""
    if path.isascii():
        content = path.encode()
    else:  # File systems write accents in two ways.
        path = unicodedata.normalize("NFC", path)
        content = path.encode(errors="surrogateescape")
    return int.from_bytes(hashlib.sha256(content).digest()[:8])


class _Scan:
    """Looks into the folders, and remembers what it leaves out."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._root = os.fspath(directory)
        self._hidden = 0
        self._others: Counter[str] = Counter()  # By the ends of their names.
        self._notes: list[str] = []

    def notes(self) -> list[str]:
        """Returns what was left out or is worth knowing."""
        notes = list(self._notes)
        if self._hidden:
            notes.append(f"{self._hidden:,} hidden files or folders are left out")
        if self._others:
            ends = ", ".join(f"{n:,} {end}" for end, n in self._others.most_common(4))
            total = self._others.total()
            notes.append(f"{total:,} files that are no pictures are left out ({ends})")
        return notes

    def parts(self) -> dict[str, str]:
        """Returns the folders of the training part, and of the test part if any.

        A folder `train` is the training part if it has subfolders and no pictures of
        its own, and stands beside a test part or alone. Otherwise it is a class.
        """
        folders, _ = self._split("")
        train = [folder for folder in folders if folder.casefold() == TRAIN]
        tests = [
            folder
            for part in TESTS
            for folder in folders
            if folder.casefold() == part and self._has_classes(folder)
        ]
        others = [name for name in folders if name not in (*train, *tests)]
        if len(train) != 1:
            return {"train": ""}
        if not self._has_classes(train[0]) or (others and not tests):
            if others or tests:
                self._notes.append(f"{_shown(train[0])}/ is taken for a class")
            return {"train": ""}
        if unused := [*tests[1:], *others]:
            used = _some([*train, *tests[:1]])
            self._notes.append(f"{_some(unused)} beside {used} is not used")
        return dict(zip(("train", "test"), (*train, *tests[:1]), strict=False))

    def classes(self, part: str) -> list[str]:
        """Returns the folders of a part that may be classes, or refuses them."""
        folders, files = self._split(part)
        self._hidden += sum(e.name.startswith(".") for e in self._entries(part))
        where = _shown(_joined(self._root, part))
        if len(folders) > MAX_CLASSES:
            raise UsageError(
                f"{where} has {len(folders):,} folders; at most {MAX_CLASSES:,} are "
                "taken for classes, as more are rather one for each picture.\n"
                f"{LAYOUTS}"
            )
        same: dict[str, str] = {}
        for name in folders:
            key = unicodedata.normalize("NFC", _shown(name)).casefold()
            if key in same:
                raise UsageError(
                    f"{where} has the folders {_shown(same[key])} and {_shown(name)}, "
                    "which differ only in case or in how they are written; they would "
                    "be two classes. Merge or rename them."
                )
            same[key] = name
        if loose := sum(map(_is_picture, files)):
            self._notes.append(f"{loose:,} pictures directly in {where} have no class")
        return folders

    def with_pictures(self, part: str, files: Mapping[str, _Files]) -> list[str]:
        """Returns the folders of a part that hold pictures; at least two have to."""
        where = _shown(_joined(self._root, part))
        names = [name for name, of_class in files.items() if of_class[0]]
        if len(names) < 2 and part.casefold() not in TESTS:
            only = f"only in {_shown(names[0])}" if names else "in none"
            folders = f"{len(files):,} folders and pictures {only}"
            raise UsageError(
                f"{where} has {folders if files else 'no folders'}, but at least two "
                f"classes are needed.\n{LAYOUTS}"
            )
        if empty := [name for name, of_class in files.items() if not of_class[0]]:
            self._notes.append(f"no pictures in {_some(empty)} of {where}")
        return names

    def compare(self, trained: list[str], tested: list[str]) -> None:
        """Compares the classes of the training part with those of the test part."""
        if unknown := sorted({*tested} - {*trained}):
            raise UsageError(
                f"{_shown(self._root)}: the test part has classes that {TRAIN}/ lacks: "
                f"{_some(unknown)}.\nNo model can learn them: move them away, or add "
                "training pictures of them."
            )
        if lacking := sorted({*trained} - {*tested}):
            self._notes.append(f"no test pictures of {_some(lacking)}")

    def files(self, folder: str) -> _Files:
        """Returns the pictures in and below a folder, in the order of their names.

        A folder that links lead to again is read once.
        """
        paths: list[str] = []
        sizes: list[int] = []
        times: list[int] = []
        seen: set[tuple[int, int]] = set()
        waiting = [folder]
        while waiting:
            place = waiting.pop()
            with self._explained(place):
                about = Path(self._root, place).stat()
            if (about.st_dev, about.st_ino) in seen:
                self._notes.append(f"{_shown(place)} is a link to what is read already")
                continue
            seen.add((about.st_dev, about.st_ino))
            below = []
            for entry in sorted(self._entries(place), key=_NAME):
                name = entry.name
                end = name[name.rfind(".") + 1 :].lower()
                size, time = -1, 0
                try:
                    if name[0] == ".":
                        self._hidden += 1
                        continue
                    if entry.is_dir():
                        below.append(f"{place}/{name}")
                        continue
                    if end in _ENDS and entry.is_file():  # No pipe, no device.
                        about = entry.stat()
                        size, time = about.st_size, about.st_mtime_ns
                except OSError:  # A link to itself, which is reported when it is read.
                    pass
                if end in _ENDS:
                    paths.append(f"{place}/{name}")
                    sizes.append(size)
                    times.append(time)
                else:
                    self._others[printable(end)] += 1
            waiting += reversed(below)
        return paths, sizes, times

    def _split(self, within: str) -> tuple[list[str], list[str]]:
        """Returns the subfolders and the files in a folder, without hidden ones."""
        folders: list[str] = []
        files: list[str] = []
        for entry in self._entries(within):
            if not entry.name.startswith("."):
                (folders if _is_folder(entry) else files).append(entry.name)
        return sorted(folders), files

    def _has_classes(self, folder: str) -> bool:
        folders, files = self._split(folder)
        return bool(folders) and not any(map(_is_picture, files))

    def _entries(self, within: str) -> list[os.DirEntry[str]]:
        with self._explained(within), os.scandir(_joined(self._root, within)) as found:
            return list(found)

    @contextlib.contextmanager
    def _explained(self, within: str) -> Iterator[None]:
        path = _shown(_joined(self._root, within))
        try:
            yield
        except NotADirectoryError as error:
            raise UsageError(
                f"{path} is a file where a folder is needed.\n{LAYOUTS}"
            ) from error
        except OSError as error:
            raise UsageError(
                f"The folder {path} cannot be read: {reason(error)}.\nCorrect its "
                "name, or make it readable for this user."
            ) from error


def _is_picture(name: str) -> bool:
    return name[name.rfind(".") + 1 :].lower() in _ENDS


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # A link to itself.
        return False


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder and name else folder or name


def _shown(name: str | os.PathLike[str]) -> str:
    return printable(os.fspath(name))


def _some(names: list[str]) -> str:
    return first_few([*map(_shown, names)], _SHOWN)
