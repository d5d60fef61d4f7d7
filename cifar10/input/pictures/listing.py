"""Lists the pictures in a folder, with their classes and splits.

A folder of pictures has one of two layouts: `CLASS/...`, or `train/CLASS/...` with
`test/CLASS/...` and optionally `val/CLASS/...`. Splits may have other usual names, such
as `Training` or `valid`. Without a folder `test`, `val` is the test split. A folder
without `train` can only be scored. An ambiguous folder is refused. No file is opened,
except one in a class folder without pictures, to say whether it is a misnamed picture.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from cifar10 import errors
from cifar10.errors import UsageError, counted, first_few, has_controls, nfc, reason
from cifar10.input.pictures import decoding
from cifar10.input.records import Split

# The suffixes of pictures; files with others are left out. Kinds below the first line
# cannot be decoded, but count as bad pictures, which the user notices.
_ENDS = {
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "jfif", "jpe"),
    *("tif", "tiff", "heic", "heif", "avif", "jp2", "jxl", "ppm", "pgm", "pbm", "pnm"),
    *("tga", "dcm", "dng", "cr2", "cr3", "nef", "arw", "psd", "exr", "ico", "svg"),
}

# ImageNet-21k, the largest labelled set in use, has 21,841 classes. More folders than
# this limit probably hold one picture each, and would need a very large last layer.
MAX_CLASSES = 25_000

# Names, in lower case, that systems and network storage add to folders: thumbnails,
# recycle bins, archive metadata. Like hidden files, they are ignored.
_OF_SYSTEMS = {
    *("@eadir", "#recycle", "@recycle", "#snapshot", "@tmp", "$recycle.bin"),
    *("recycler", "system volume information", "lost+found", "lost.dir", "__macosx"),
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "picasa.ini", "__pycache__"),
}

# The letters of a split folder's name: one of these words, alone or with words that add
# nothing, as in `Training_Set`, `valid-images` and `02 test`.
_NO_MORE = "(?:data|sets?|images?|imgs?|pictures?|pics?|photos?|splits?|parts?|final)*"
_PART = re.compile(
    rf"{_NO_MORE}(?:(?P<train>train(?:ing)?(?:val)?)|(?P<val>val(?:id(?:ate|ation)?)?"
    rf"|dev(?:elopment)?)|(?P<test>test(?:ing)?|eval(?:uation)?|holdout)){_NO_MORE}"
)

# Names of portions, without their numbers, and of copies.
_PORTION = re.compile(
    "(fold(er)?|part|batch|split|chunk|shard|(sub|data)?set|data|patient|image)(e?s)?"
)
_COPY = re.compile(
    r"(copy of|kopie von|copie de|copia d[ei]) .+|.+ ?\([0-9]{1,2}\)"
    "|.+[ _-](copy|kopi[ea]|copi[ea]|副本|コピー|복사본|backup|bak)[ 0-9()]*",
    re.IGNORECASE,
)

# Names of folders of all pictures, and of annotations, which may be pictures, too.
_ALL = re.compile("(jpeg)?(image|img|photo|picture)s?")
_ABOUT = "(annotation|label|mask|segmentation|trimap|ground ?truth)s?"
_ABOUT_FOLDER = re.compile(f"(?P<of>.*?){_ABOUT}(class|object|instance)?")
# The part that an annotation's file name adds to the name of its picture.
_OF_ABOUT = re.compile(
    f"(?i)(?<=/)({_ABOUT}|gt|seg)[-_ ./]|[-_ .]({_ABOUT}|gt|seg)([-_ ]?[0-9]+)?$"
)
# Separators of words, and invisible characters.
_BLANK, _UNSEEN = re.compile(r"(?<=\w)[\s_-]+(?=\w)"), "[\u200b-\u200f\u2060\ufeff]"

_SHOWN = 5  # Names in a message.
_RENAME = " (rename any that are classes)"
_LINK = " (link)"  # Added to the name of a link to a folder.

# A picture's path within the folder, with /; its size in bytes; its modification time
# in nanoseconds. Named tuples would take three times as long.
File: TypeAlias = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Listing:
    """The pictures in a folder, class by class."""

    classes: list[str]
    files: list[File]
    labels: list[int]
    splits: list[str]
    notes: list[str]  # For the user.


def list_folder(
    directory: Path, known: Collection[str] = (), *, whole: bool = False
) -> Listing:
    """Lists the pictures in a folder, in an order that depends on their names alone.

    Folders of `known` names are classes. With `whole`, all pictures are in `test`.
    """
    pictures, others, folders = _entries(directory, "", of_splits=True)
    tops, left_out = _folders_of_splits(directory, folders, known), []
    if "" not in tops.values():
        left_out = sorted({*folders} - {*tops.values()}) + others
        left_out += [name for name, _, _ in pictures]
    splits: dict[Split, dict[str, list[File]]] = collections.defaultdict(dict)
    for split, top in tops.items():
        _add_classes(directory, top, splits["test" if whole else split], left_out)
    top, first = next(iter(tops.values())), next(iter(splits.values()))  # To train on.
    inner = {name: _inner(some, top.count("/") + 1) for name, some in first.items()}
    _check_classes(directory, tops, splits, left_out, inner, known)
    files: list[File] = []
    labels: list[int] = []
    splits_of: list[str] = []
    for label, name in enumerate(first):
        for split, by_class in splits.items():
            of_class = by_class.get(name, [])
            files += of_class
            labels += [label] * len(of_class)
            splits_of += [split] * len(of_class)
    notes = []
    if any(top not in ("", f"{split}/") for split, top in tops.items()):
        read = (f"{top} as {split}" for split, top in tops.items())
        notes.append(f"folders used as splits: {', '.join(read)}")
    if left_out:
        notes.append(f"left out: {_few(left_out)}")
    notes += _on_names([*first], known)
    groups = min(map(sorted, inner.values()), key=len)
    if [*splits] == ["train"] and len(groups) > 1:  # It will be divided.
        notes.append(
            f"pictures of one folder within a class, such as {groups[0]}, end up in "
            "several splits. If they show the same patient or object, scores are too "
            "good: sort whole folders into train/ and test/"
        )
    return Listing([*first], files, labels, splits_of, notes)


def list_pictures(path: Path) -> list[Path]:
    """Returns the pictures in a folder and its subfolders; a file as it is."""
    if not os.path.isdir(path):  # noqa: PTH112 - `Path.is_dir` raises some errors.
        return [path]
    others: list[str] = []
    found, few = _pictures(path, "", others), _few(others)
    if not found:
        raise UsageError(f"{path} holds no pictures{few and ', but '}{few}.")
    if others:
        errors.say(f"Note: left out in {path}: {few}.")
    return [path / name for name, _, _ in found]


def split_of(name: str) -> Split | None:
    """Returns the split that a folder name stands for, or None."""
    found = _PART.fullmatch(_letters(name))
    return cast(Split, found.lastgroup) if found else None


def _letters(name: str) -> str:
    return re.sub(r"[\W\d_]+", "", nfc(name).casefold())


def _folded(name: str) -> str:
    """Returns a name without what looks the same: case, blanks, - and _."""
    return _BLANK.sub(" ", re.sub(_UNSEEN, "", name).strip()).casefold()


def _on_names(classes: list[str], known: Collection[str]) -> Iterator[str]:
    """Yields notes on the names of classes."""
    alike = collections.defaultdict(list)
    for name in classes:
        alike[_folded(name)].append(repr(name))
    if same := [name for names in alike.values() if len(names) > 1 for name in names]:
        few = first_few(same, _SHOWN)
        yield f"classes that differ in case, blanks, - or _ alone: {few}"
    few = first_few(classes, 3)
    are_numbers = not known and all(map(str.isdecimal, classes))
    if are_numbers and classes != sorted(classes, key=int):
        order = f"classes are numbered in the order of their names as text: {few}"
        yield f"{order}. For that of numbers, rename them alike, such as 01, 02, 10"


def _folders_of_splits(
    directory: Path, folders: Sequence[str], known: Collection[str]
) -> dict[Split, str]:
    """Maps each split to its folder, with a slash at the end, or training to "".

    A class may be called `train`, or by a `known` name, if pictures are directly in it.
    """
    named = {folder: split for folder in folders if (split := split_of(folder))}
    found, listed = {split: name for name, split in named.items()}, ", ".join(named)
    are_several = len(named) > 1
    entries = [_entries(directory, folder) for folder in named]
    if not any(inner and (are_several or not direct) for direct, _, inner in entries):
        if not are_several:
            holds_pictures = any(direct for direct, _, _ in entries)
            is_class = "train" in found or listed[:-1] in known
            # Of two folders it is a class, as `valid` beside `invalid`.
            if holds_pictures and len(folders) > 2 and not is_class:
                raise UsageError(
                    f"{directory}: {listed} is named like a split, but holds no class "
                    "folders. Move it away, rename it if it is a class, or sort it "
                    "into class folders, and put those beside it into train/."
                )
            return {"train": ""}
        raise UsageError(
            f"{directory}: {listed} hold no class folders. Sort their pictures into "
            "class folders, or rename any that are classes themselves."
        )
    places = {os.path.realpath(directory / folder) for folder in named}
    if len(found) < len(named) or len(places) < len(named):
        why = f"two of {listed} mean the same split. Merge them, or move one away"
        raise UsageError(f"{directory}: {why}.")
    others = [folder for folder in folders if folder not in named]
    if not are_several and any(_pictures(directory, one, []) for one in others):
        lacking = "test" if "train" in found else "train"
        way = "rename it to" if len(others) == 1 else "put those into"
        raise UsageError(
            f"{directory}: {listed} looks like a split, as it holds folders, but has "
            f"{first_few(others, _SHOWN)} beside it. Move that away, or {way} "
            f"{lacking}/; if {listed} is a class, put its pictures directly into it."
        )
    if "test" not in found and "val" in found:
        found["test"] = found.pop("val")
    order: tuple[Split, ...] = ("train", "test", "val")
    return {split: found[split] for split in order if split in found}


def _inner(pictures: Sequence[File], depth: int) -> set[str]:
    """Returns the folders within a class that divide most of its pictures.

    A folder that holds one folder alone divides nothing. `depth` is that of the class.
    """
    counts = collections.Counter(path.rpartition("/")[0] for path, _, _ in pictures)
    of_folder = {tuple(path.split("/")[depth:]): n for path, n in counts.items()}
    above = {(), *(path[:at] for path in of_folder for at in range(len(path)))}
    last = [path for path in of_folder if path not in above]
    if 2 * sum(of_folder[path] for path in last) <= len(pictures):
        return set()
    levels = [{*names} for names in zip(*last, strict=False)]
    return next((names for names in levels if len(names) > 1), levels[-1])


def _doubt(inner: Mapping[str, set[str]]) -> tuple[str, Collection[str]]:
    """Returns what folders look like instead of classes, and which of them do.

    `inner` maps each folder to its folders. Returns none if all look like classes.
    """
    counts = collections.Counter(name for names in inner.values() for name in names)
    shared = sum(count for count in counts.values() if count > 1)
    if len(counts) > 1 and 2 * shared > counts.total():  # Domains, cameras, patients.
        return f"hold {first_few(sorted(counts), 2)}", inner
    for name, folders in inner.items():  # A copy of the classes beside it.
        if 2 * sum(one in inner and one != name for one in folders) > len(folders):
            return f"hold {first_few(sorted(folders), 2)}", [name]
    copies = [*filter(_COPY.fullmatch, inner)]
    if 0 < len(copies) < len(inner):
        return f"are named like copies{_RENAME}", copies
    letters, meant = {*map(_letters, inner)}, set()
    for name in inner:  # The splits in names, with the other words.
        words = [*filter(None, re.split(r"[\W\d_]+|(?<=[a-z])(?=[A-Z])", name))]
        others = tuple(_letters(word) for word in words if not split_of(word))
        meant |= {(split_of(word), others) for word in words if split_of(word)}
    last = words[-1].casefold() if words else ""  # As in all names, if of a portion.
    are_portions = len(letters) == 1 and (
        _PORTION.fullmatch(min(letters)) or last in ("part", "fold", "batch", "shard")
    )
    are_mixed = len({others for _, others in meant}) < len(meant)
    about = [*filter(None, map(_ABOUT_FOLDER.fullmatch, letters))]
    described = [found["of"] for found in about if found["of"] in letters]
    masks = [found[0] for found in about if not found["of"]]
    images = [*filter(_ALL.fullmatch, letters)]
    are_all = len(images) + len(masks) == len(letters)
    are_many = all(any(one.endswith("s") for one in names) for names in (images, masks))
    if (images and masks and (are_all or are_many)) or len(described) > 1:
        return f"are named like pictures and their masks{_RENAME}", inner
    return f"are named like splits{_RENAME}", inner if are_portions or are_mixed else ()


def _check_classes(
    directory: Path,
    tops: Mapping[Split, str],
    splits: Mapping[Split, Mapping[str, list[File]]],
    left_out: Sequence[str],
    inner: Mapping[str, set[str]],
    known: Collection[str],
) -> None:
    """Refuses too few or too many classes, and folders that are not classes.

    One class is enough to score the folder with a run whose classes are `known`.
    """
    (top, *_), (first, *_) = tops.values(), splits.values()
    are_known = {*first} <= {*map(nfc, known)}
    to_score = known and "train" not in splits
    fewest = 1 if to_score and (are_known or not any(inner.values())) else 2
    if not fewest <= len(first) <= MAX_CLASSES:
        fix = f"\nLeft out: {_few(left_out)}." if left_out else ""
        for name, folders in inner.items():
            if len(first) == 1 < len(folders):
                few = first_few(sorted(folders), 2)
                fix = f"\nIf {few} are classes or splits, give {directory}/{top}{name}."
        if first and are_known:
            fix += " To score it with a run of that class, add --eval_data all to eval."
        found = counted(len(first), "class", "classes")
        raise UsageError(
            f"{directory}/{top} has pictures in {found}. Two to {MAX_CLASSES:,} "
            f"classes are needed.{fix}\nA folder of pictures has a subfolder for each "
            "class (cat/1.jpg, dog/2.jpg), or train/ and test/ with such subfolders. "
            "Links to other folders are not followed."
        )
    why, doubtful = _doubt(inner)
    if doubtful and not are_known:
        raise UsageError(
            f"{directory}/{top}: folders do not look like classes, but {why}: "
            f"{first_few([*doubtful], 2)}. Give each class one folder, in a folder "
            "with no other folders, or in folders named train, val and test."
        )
    for split, of_class in splits.items():
        if unknown := sorted({*of_class} - {*first}):
            fix = "No model can learn them: move them away, or add training pictures"
            folded = {*map(_folded, unknown)}
            if same := [repr(name) for name in first if _folded(name) in folded]:
                few = first_few(same, _SHOWN)
                fix = f"Only case, blanks, - or _ differ from {few}: rename one"
            why = f"{top} lacks classes of {tops[split]}: {first_few(unknown, _SHOWN)}"
            raise UsageError(f"{directory}: {why}. {fix}.")
        if not of_class:
            why = f"{tops[split]} holds no class folders with pictures"
            fix = f"Sort its files into {tops[split]}CLASS/, or move it away"
            raise UsageError(f"{directory}: {why}. {fix}.")


def _few(names: Sequence[str]) -> str:
    """Counts files by their extensions, folders and links, and names the first."""
    kinds = {"": "without an extension", "/": "folder", _LINK: "link to a folder"}
    marks = (next(filter(name.endswith, ("/", _LINK)), None) for name in names)
    ends = (m or Path(n).suffix for m, n in zip(marks, names, strict=True))
    counts = collections.Counter(ends).most_common(_SHOWN)
    said = ", ".join(f"{count:,} {kinds.get(end, end)}" for end, count in counts)
    return said and f"{said}: {first_few(names, _SHOWN)}"


def _add_classes(
    directory: Path, top: str, found: dict[str, list[File]], left_out: list[str]
) -> None:
    """Adds the pictures of each class in `top` to `found`, the rest to `left_out`.

    Folders whose names differ in the Unicode form of an accent alone are one class.
    """
    pictures, others, folders = _entries(directory, top)
    left_out += [name for name, _, _ in pictures] + others
    for folder in folders:
        before = len(left_out)
        if of_class := _without_masks(_pictures(directory, folder, left_out), left_out):
            name = nfc(folder.removeprefix(top).removesuffix("/"))
            found.setdefault(name, []).extend(of_class)
            continue
        file = directory / "".join(left_out[before : before + 1])
        if file.is_file() and decoding.is_picture(decoding.read(file)):
            why = f"{left_out[before]} is a picture, but has no picture's extension"
            fix = f"Rename the files in {folder}, for example to 1.jpg"
            raise UsageError(f"{directory}: {why}. {fix}.")
        left_out.append(folder)


def _without_masks(pictures: list[File], left_out: list[str]) -> list[File]:
    """Leaves out pictures that describe another one, such as `1_mask.png`."""
    stems = {name.rpartition(".")[0] for name, _, _ in pictures}
    about = {s for s in stems if (name := _OF_ABOUT.sub("", s)) != s and name in stems}
    left_out += [one[0] for one in pictures if one[0].rpartition(".")[0] in about]
    return [one for one in pictures if one[0].rpartition(".")[0] not in about]


def _pictures(directory: Path, folder: str, left_out: list[str]) -> list[File]:
    """Lists the pictures in a folder, and then those in its subfolders."""
    found, folders = [], [folder]
    while folders:  # Not recursive, as folders may be nested deeper than calls.
        pictures, others, inner = _entries(directory, folders.pop())
        found += pictures
        left_out += others
        folders += reversed(inner)
    return found


def _entries(
    directory: Path, folder: str, *, of_splits: bool = False
) -> tuple[list[File], list[str], list[str]]:
    """Returns the pictures, the other files and the subfolders of a folder.

    All are paths within `directory`, ordered by name; folders end in a slash. Hidden
    and system files and folders are left out. Links to folders, which could give a
    picture two classes, count as other files, except those of splits if `of_splits`.
    """
    pictures, others, folders = [], [], []
    try:
        with os.scandir(directory / folder) as found:
            entries = sorted(found, key=lambda entry: (nfc(entry.name), entry.name))
        for entry in entries:
            name = folder + entry.name
            if entry.name.startswith(".") or entry.name.lower() in _OF_SYSTEMS:
                continue
            is_split = of_splits and entry.is_symlink() and split_of(entry.name)
            is_folder = entry.is_dir(follow_symlinks=bool(is_split))
            if is_split and not is_folder:
                why = f"{name} is a link, but not to a folder"
                raise UsageError(f"{directory}: {why}. Restore the folder it names.")
            if not is_folder and entry.name.rpartition(".")[2].lower() not in _ENDS:
                # Not `entry.is_dir`, which raises an error for a link to itself.
                is_link = entry.is_symlink() and os.path.isdir(entry.path)  # noqa: PTH112
                others.append(name + _LINK * is_link)
                continue
            if has_controls(entry.name):
                why = f"{name!a} has control characters or bytes that are not UTF-8"
                fix = "Rename it (convmv renames whole folders)"
                raise UsageError(f"{directory}: {why}. {fix}.")
            if is_folder:
                folders.append(f"{name}/")
            else:
                about = entry.stat()
                pictures.append((name, about.st_size, about.st_mtime_ns))
    except OSError as error:
        why = f"{error.filename} cannot be read: {reason(error)}"
        is_file = isinstance(error, NotADirectoryError)
        fix = "Give a folder of pictures" if is_file else "Make it readable, or move it"
        raise UsageError(f"{why}. {fix}.") from error
    return pictures, others, folders
