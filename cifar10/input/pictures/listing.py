"""Lists the pictures in a folder, with their classes and splits.

A folder of pictures has one of two layouts: `CLASS/...`, or `train/CLASS/...` with
`test/CLASS/...` and optionally `val/CLASS/...`. Parts may have other usual names, such
as `Training` or `valid`. Without a folder `test`, `val` is the test split. A folder
that has only these two can be scored. Only folders are opened, not pictures. A folder
that may mean two things is refused.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from cifar10 import errors
from cifar10.errors import UsageError, counted, first_few, has_controls, nfc, reason
from cifar10.input.pictures import decoding
from cifar10.input.records import Split

# The suffixes of pictures; files with other suffixes are left out. The kinds in the
# other lines cannot be decoded. They are listed so that their files count as bad
# pictures, which the user notices.
_ENDS = {
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "jfif", "jpe"),
    *("tif", "tiff", "heic", "heif", "avif", "jp2", "jxl", "ppm", "pgm", "pbm", "pnm"),
    *("tga", "dcm", "dng", "cr2", "cr3", "nef", "arw", "psd", "exr", "ico", "svg"),
}

# ImageNet-21k, the largest labelled set in use, has 21,841 classes. More folders than
# this limit probably hold one picture each, and would need a very large last layer.
MAX_CLASSES = 25_000

# What systems and network storages add to folders, in lower case: thumbnails, waste
# baskets, archives' shadows. Like hidden files, they are ignored.
_OF_SYSTEMS = {
    *("@eadir", "#recycle", "@recycle", "#snapshot", "@tmp", "$recycle.bin"),
    *("recycler", "system volume information", "lost+found", "lost.dir", "__macosx"),
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "picasa.ini", "__pycache__"),
}

# The name of a part's folder, without what is no letter: one of these words, alone or
# with words that say no more, as in `Training_Set`, `valid-images` and `02 test`.
_NO_MORE = "(?:data|sets?|images?|imgs?|pictures?|pics?|photos?|splits?|parts?|final)*"
_PART = re.compile(
    rf"{_NO_MORE}(?:(?P<train>train(?:ing)?(?:val)?)|(?P<val>val(?:id(?:ate|ation)?)?"
    rf"|dev(?:elopment)?)|(?P<test>test(?:ing)?|eval(?:uation)?|holdout)){_NO_MORE}"
)

# Folders of all pictures, and of what describes them, which may be pictures itself.
_ALL = {"image", "images", "img", "imgs", "jpegimages", "photos", "pictures"}
_ABOUT = {"annotations", "labels", "masks", "segmentations", "trimaps"}

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
    tops = _folders_of_splits(directory, folders)
    left_out = [] if "" in tops.values() else sorted({*folders} - {*tops.values()})
    parts = {split: _by_class(directory, top, left_out) for split, top in tops.items()}
    _check_classes(directory, tops, parts, left_out)
    first, *_ = parts.values()  # Of the training split, if there is one.
    files: list[File] = []
    labels: list[int] = []
    parts_of: list[str] = []
    for label, name in enumerate(first):
        for split, part in parts.items():
            of_class = part.get(name, [])
            files += of_class
            labels += [label] * len(of_class)
            parts_of += [split] * len(of_class)
    notes = []
    if any(top not in ("", f"{split}/") for split, top in tops.items()):
        read = (f"{top} as {split}" for split, top in tops.items())
        notes.append(f"the folders of the parts are {', '.join(read)}")
    if left_out:
        notes.append(f"left out: {_kinds(left_out)}: {first_few(left_out, _SHOWN)}")
    return Listing([*first], files, labels, parts_of, notes)


def list_pictures(path: Path) -> list[Path]:
    """Returns the pictures in a folder and its subfolders; a file as it is."""
    if not path.is_dir():
        return [path]
    others: list[str] = []
    found, kinds = _pictures(path, "", others), _kinds(others)
    if not found:
        raise UsageError(f"{path} holds {kinds or 'nothing'}, but no pictures.")
    if others:
        errors.say(f"Note: left out in {path}: {kinds}: {first_few(others, _SHOWN)}.")
    return [path / name for name, _, _ in found]


def part_of(name: str) -> Split | None:
    """Returns the split that a folder's name means; None for any other name."""
    found = _PART.fullmatch(_letters(name))
    return cast(Split, found.lastgroup) if found else None


def _letters(name: str) -> str:
    return re.sub(r"[\W\d_]+", "", nfc(name).casefold())


def _folders_of_splits(directory: Path, folders: Sequence[str]) -> dict[Split, str]:
    """Maps each split to its folder, with a slash at the end, or training to "".

    A class may be called `train` if its pictures are directly in its folder.
    """
    named = {folder: part for folder in folders if (part := part_of(folder))}
    found, listed = {part: name for name, part in named.items()}, ", ".join(named)
    are_several = len(found) > 1
    entries = (_entries(directory, folder) for folder in named)
    if not any(inner and (are_several or not direct) for direct, _, inner in entries):
        if not are_several:
            return {"train": ""}
        raise UsageError(
            f"{directory}: {listed} hold no folders of classes. Sort their pictures "
            "into such folders, or rename those that are classes."
        )
    if len(found) < len(named):
        raise UsageError(
            f"{directory}: of {listed}, two mean the same part. Move one away, or put "
            "its pictures into the other."
        )
    others = [folder for folder in folders if folder not in named]
    if not are_several and any(_pictures(directory, one, []) for one in others):
        raise UsageError(
            f"{directory}: {listed} looks like a part, as it holds folders, but beside "
            f"it is {first_few(others, _SHOWN)}. Move that away; if {listed} is a "
            "class, put its pictures directly into it."
        )
    if "test" not in found and "val" in found:
        found["test"] = found.pop("val")
    order: tuple[Split, ...] = ("train", "test", "val")
    return {split: found[split] for split in order if split in found}


def _check_classes(
    directory: Path,
    tops: Mapping[Split, str],
    parts: Mapping[Split, Mapping[str, list[File]]],
    left_out: Sequence[str],
) -> None:
    """Refuses too few or too many classes, and folders that are no classes."""
    (top, *_), (first, *_) = tops.values(), parts.values()
    depth = top.count("/") + 1
    # The subfolders of classes that have no pictures outside of them, which come first.
    inner = {
        name: {path.split("/")[depth] for path, _, _ in pictures}
        for name, pictures in first.items()
        if pictures[0][0].count("/") > depth
    }
    counts = collections.Counter(name for names in inner.values() for name in names)
    shared = first_few(sorted(counts), 2)
    if not 2 <= len(first) <= MAX_CLASSES:
        fix = f"\nLeft out: {_kinds(left_out)}." if left_out else ""
        if len(first) == 1 and len(counts) > 1:
            (name,) = first
            fix = f"\nIf {shared} are classes or parts, give {directory}/{top}{name}."
        raise UsageError(
            f"{directory}/{top} has pictures in "
            f"{counted(len(first), 'class', 'classes')}. Two to {MAX_CLASSES:,} "
            f"classes are needed.{fix}\n{_LAYOUTS}"
        )
    letters = {*map(_letters, first)}
    meant = {part_of(word) for name in inner for word in re.split(r"[\W\d_]+", name)}
    are_shared = all(2 * count > len(first) for count in counts.values())
    # As in trainA, trainB, testA and testB.
    halves = {part_of(name[:-1]) for name in first if part_of(name) is None} or {None}
    if (
        (letters & _ALL and letters & _ABOUT)
        or (len(counts) > 1 and are_shared)
        or len(meant - {None}) > 1
        or (None not in halves and len(halves) > 1)
        or any(names and names <= {*first} - {name} for name, names in inner.items())
    ):
        inside = f", but hold {shared}" if counts else ""
        raise UsageError(
            f"{directory}/{top}: {first_few([*first], 2)} do not look like classes"
            f"{inside}. Give each class one folder, in a folder without others or in "
            "folders named train, val and test."
        )
    for split, part in parts.items():
        if unknown := sorted({*part} - {*first}):
            raise UsageError(
                f"{directory}: {top} lacks classes of {tops[split]}: "
                f"{first_few(unknown, _SHOWN)}. No model can learn these classes. Move "
                "their folders away, or add training pictures."
            )
        if not part:
            raise UsageError(
                f"{directory}: {tops[split]} holds no folders of classes with "
                f"pictures. Sort its files into {tops[split]}CLASS/, or move it away."
            )


def _kinds(names: Sequence[str]) -> str:
    """Counts files by their endings, and folders."""
    ends = ("folder" if name[-1] == "/" else Path(name).suffix for name in names)
    counts = collections.Counter(ends).most_common(_SHOWN)
    return ", ".join(f"{count:,} {end or 'without an ending'}" for end, count in counts)


def _by_class(directory: Path, top: str, left_out: list[str]) -> dict[str, list[File]]:
    """Lists the pictures of each class in `top`; adds everything else to `left_out`.

    Folders whose names differ in the Unicode form of an accent alone are one class.
    """
    pictures, others, folders = _entries(directory, top)
    left_out += [name for name, _, _ in pictures] + others
    found: dict[str, list[File]] = {}
    for folder in folders:
        before = len(left_out)
        if of_class := _pictures(directory, folder, left_out):
            name = nfc(folder.removeprefix(top).removesuffix("/"))
            found.setdefault(name, []).extend(of_class)
            continue
        file = directory / "".join(left_out[before : before + 1])
        if file.is_file() and decoding.is_picture(decoding.read(file)):
            raise UsageError(
                f"{directory}: {left_out[before]} is a picture, but its name does not "
                f"end as a picture's. Rename the files in {folder}, as to 1.jpg."
            )
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
    slash. Hidden files and folders, and those of systems, are left out. Links to
    folders are not followed, and count as other files: through one, a picture could
    also get another class.
    """
    pictures, others, folders = [], [], []
    try:
        with os.scandir(directory / folder) as found:
            entries = sorted(found, key=lambda entry: (nfc(entry.name), entry.name))
        for entry in entries:
            name = folder + entry.name
            if entry.name.startswith(".") or entry.name.lower() in _OF_SYSTEMS:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            if not is_folder and entry.name.rpartition(".")[2].lower() not in _ENDS:
                others.append(name)
                continue
            if has_controls(entry.name):
                raise UsageError(
                    f"{directory}: {name!a} has control characters or bytes that are "
                    "not UTF-8. Rename it (convmv renames whole folders)."
                )
            if is_folder:
                folders.append(f"{name}/")
            else:
                about = entry.stat()
                pictures.append((name, about.st_size, about.st_mtime_ns))
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be read: {reason(error)}.\n"
            f"Make it readable for this user, or remove it. {_LAYOUTS}"
        ) from error
    return pictures, others, folders
