"""From a folder of pictures to a list of files: their classes and parts of the data.

Two layouts are read: `CLASS/...`, and `train/CLASS/...` with `test/CLASS/...`, whose
`test` may be called `val` or `validation` too. Nothing is opened here but folders;
`listing.py` says what the list is.
"""

import contextlib
import itertools
import operator
import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError, counted, first_few, printable, reason
from cifar10.input.pictures import division as dividing
from cifar10.input.pictures.listing import Listing

# Pictures, by the ends of their names. Files with other names are left alone.
SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
# Also pictures, which must not be lost in silence: they are counted as bad unless
# they hold one of the above.
_OTHER_SUFFIXES = ("jfif", "jpe", "heic", "heif", "avif", "jp2", "jxl")
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


def scan(
    directory: Path, validation_fraction: float, division: str | None = None
) -> Listing:
    """Lists the pictures in a folder, in an order that depends on their names alone.

    Without a test part, `validation_fraction` of each class becomes one, or what the
    `division` of a run says, as in `division.py`.
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
    limits: list[int] = []
    if "test" not in parts:
        paths = [files["train"][name][0] for name in classes]
        limits = dividing.limits(paths, validation_fraction, division)
    for label, name in enumerate(classes):
        of_class = {part: files[part][name] for part in files if name in files[part]}
        if limits:
            of_class = _split(of_class["train"], limits[label])
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
        division=dividing.written(limits) if limits else None,
        notes=found.notes(),
    )


def _split(files: _Files, limit: int) -> dict[str, _Files]:
    """Returns the files to train on and those to test on."""
    is_test = [dividing.hash_of(path) < limit for path in files[0]]
    is_train = [not test for test in is_test]
    return {"train": _kept(files, is_train), "test": _kept(files, is_test)}


def _kept(files: _Files, which: list[bool]) -> _Files:
    paths, sizes, times = (list(itertools.compress(c, which)) for c in files)
    return paths, sizes, times


class _Scan:
    """Looks into the folders, and remembers what it leaves out."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._root = os.fspath(directory)
        self._real_root = os.path.realpath(directory)
        self._hidden = 0
        self._others: Counter[str] = Counter()  # By the ends of their names.
        # A folder may be looked into twice; each note is one.
        self._notes: dict[str, None] = {}
        # Which class of which part read a folder first, by its device and number there.
        self._read: dict[tuple[int, int], str] = {}

    def notes(self) -> list[str]:
        """Returns what was left out or is worth knowing."""
        notes = list(self._notes)
        if self._hidden:
            one, more = "hidden file or folder is", "hidden files or folders are"
            notes.append(f"{counted(self._hidden, one, more)} left out")
        if self._others:
            ends = ", ".join(f"{n:,} {end}" for end, n in self._others.most_common(4))
            one, more = "file that is no picture is", "files that are no pictures are"
            total = counted(self._others.total(), one, more)
            notes.append(f"{total} left out ({ends})")
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
                self._note(f"{_shown(train[0])}/ is taken for a class")
            return {"train": ""}
        if unused := [*tests[1:], *others]:
            used = _some([*train, *tests[:1]])
            self._note(f"{_some(unused)} beside {used} is not used")
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
            what = (
                f"picture directly in {where} has",
                f"pictures directly in {where} have",
            )
            self._note(f"{counted(loose, *what)} no class")
        return folders

    def with_pictures(self, part: str, files: Mapping[str, _Files]) -> list[str]:
        """Returns the folders of a part that hold pictures; at least two have to."""
        where = _shown(_joined(self._root, part))
        names = [name for name, of_class in files.items() if of_class[0]]
        if len(names) < 2 and part.casefold() not in TESTS:
            only = f"only in {_shown(names[0])}" if names else "in none"
            folders = f"{counted(len(files), 'folder')} and pictures {only}"
            raise UsageError(
                f"{where} has {folders if files else 'no folders'}, but at least two "
                f"classes are needed.\n{LAYOUTS}"
            )
        if empty := [name for name, of_class in files.items() if not of_class[0]]:
            self._note(f"no pictures in {_some(empty)} of {where}")
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
            self._note(f"no test pictures of {_some(lacking)}")

    def _is_new(self, place: str, folder: str, seen: set[tuple[int, int]]) -> bool:
        """Notes that a folder is read, unless it was `seen` in the same class."""
        with self._explained(place):
            about = Path(self._root, place).stat()
        number = about.st_dev, about.st_ino
        if number in seen:
            self._note(f"{_shown(place)} is a link to what is read already")
            return False
        seen.add(number)
        first = self._read.setdefault(number, folder)
        if first != folder:
            self._note(f"{_shown(place)} has the same pictures as {_shown(first)}")
        return True

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
            if not self._is_new(place, folder, seen):
                continue
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
                        if not self._leads_back(entry):
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
            if entry.name.startswith("."):
                continue
            if not _is_folder(entry):
                files.append(entry.name)
            elif not self._leads_back(entry):
                folders.append(entry.name)
        return sorted(folders), files

    def _leads_back(self, entry: os.DirEntry[str]) -> bool:
        """Returns whether a folder is a link to where its pictures have another class.

        That is a folder within the data set, or one that the data set is in.
        """
        if not entry.is_symlink():
            return False
        target, root = os.path.realpath(entry.path), self._real_root
        if os.path.commonpath((target, root)) not in (target, root):
            return False
        shown = _shown(os.path.relpath(entry.path, self._root))
        self._note(f"{shown} is a link back into the data set, and not followed")
        return True

    def _note(self, text: str) -> None:
        self._notes[text] = None

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
