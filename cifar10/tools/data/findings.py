"""Looks at all of a data set, and prints what was found."""

import hashlib
import json
import math
import os
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cifar10.config import layout
from cifar10.config.config import Config
from cifar10.config.data_flag import FOLDER, KINDS, TFDS
from cifar10.errors import counted, printable
from cifar10.input import datasets
from cifar10.input.datasets import Dataset, Images
from cifar10.input.pictures import cache, decoding, preparation
from cifar10.input.pictures.dataset import PreparedDataset
from cifar10.input.records import SPLITS, Split
from cifar10.process import files, invocation
from cifar10.tools import outputs
from cifar10.tools.data import contact_sheet

_SHEET = "contact_sheet.png"
_READ_BYTES = 2**26  # Of images at a time, as not all of them need fit in memory.
_DIGEST = np.dtype("S16")

# The smaller of two classes is a fifth then: where Google's guide begins to speak of
# imbalance that matters (developers.google.com/machine-learning/crash-course).
_UNEVEN = 4
# Of more classes, those with the most and the fewest pictures are printed.
_CLASSES = 30
_EXTREMES = 10
_SHOWN = 5  # Of pictures and groups of pictures.
_MARGIN = 10  # Of the lines, where their titles stand.

Parts = Mapping[Split, tuple[Images, np.ndarray]]  # Images and labels of each part.


def show(
    config: Config, given: Mapping[str, Any], sheet: str | None, *, as_json: bool
) -> None:
    """Prepares a data set, draws a contact sheet of it, and prints what was found.

    Args:
        config: How a training would prepare it.
        given: The flags with which that training finds it.
        sheet: Where to write the contact sheet; None for the cache.
        as_json: Whether to print everything as JSON, in place of lines to read.
    """
    place = layout.absolute_path(sheet) if sheet else None
    if place:
        outputs.check(place, "--contact_sheet", "contact sheet", contact_sheet.MARK)
    # However many are bad: what is shown here says which to repair.
    dataset = datasets.find_for({**vars(config), "max_bad_images": 1.0})
    if not as_json:
        print(f"{'Data:':{_MARGIN}}{dataset.description}", flush=True)
    parts = {split: dataset.read(split) for split in SPLITS}
    drawn = contact_sheet.draw_sheet(
        dataset.description, *parts["train"], dataset.class_names
    )
    if place:
        outputs.write(place, "--contact_sheet", drawn)
    else:
        place = _keep_in_cache(drawn, dataset)
    counts = [
        np.bincount(labels, minlength=dataset.classes).tolist()
        for _, labels in parts.values()
    ]
    found: dict[str, Any] = {
        "data": dataset.name,
        "data_dir": str(dataset.directory),
        "image_shape": list(dataset.image_shape),
        "fingerprint": dataset.fingerprint,
        "classes": [
            {"name": name, "train": trained, "test": tested}
            for name, trained, tested in zip(dataset.class_names, *counts, strict=True)
        ],
        "sizes": None,
        "left_out": {},
        "notes": [*_on_balance(counts[0])],
        "duplicates": find_duplicates(parts, _names(dataset, parts)),
        "contact_sheet": str(place),
    }
    if isinstance(dataset, PreparedDataset):
        prepared = dataset.prepared
        bad = {prepared.listing.path[n]: why for n, why in prepared.bad.items()}
        share = math.ceil(100 * len(bad) / len(prepared.listing)) / 100
        if share > config.max_bad_images:
            given = {**given, "max_bad_images": share}
        found |= {"left_out": bad, "notes": [*dataset.notes, *found["notes"]]}
        if dataset.name == FOLDER:
            found["sizes"] = _sizes(dataset)
    found["next"] = _training(given, dataset, len(parts["train"][1]))
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))


def _keep_in_cache(sheet: bytes, dataset: Dataset) -> Path:
    """Writes the sheet beside what is prepared, and returns its place."""
    if isinstance(dataset, PreparedDataset):
        home = dataset.prepared.folder
    else:
        directory = dataset.directory or Path()  # What was found here has one.
        pictures = datasets.cache_of_pictures()
        home = preparation.folder_for(pictures, directory.name, str(directory))
    with preparation.explained(home), cache.opened(home) as folder, folder.locked():
        folder.write(_SHEET, sheet)
    return home / _SHEET


def _names(dataset: Dataset, parts: Parts) -> list[str]:
    """Returns the name of each picture, part after part."""
    if isinstance(dataset, PreparedDataset):
        return [path for split in parts for path in dataset.prepared.paths(split)]
    return [
        f"{split} picture {number}"
        for split, (_, labels) in parts.items()
        for number in range(len(labels))
    ]


def find_duplicates(parts: Parts, names: Sequence[str]) -> dict[str, Any]:
    """Finds the pictures that are the same to the last pixel, once they are prepared.

    They are compared by a hash of 128 bits.

    Args:
        parts: The training part, and then the test part.
        names: The name of each picture, in this order.

    Returns:
        `groups`, the names of those that are the same; how many are `repeated`, which
        are those beyond the first of each group; how many test pictures are
        `in_both_parts`; how many groups are `in_several_classes`.
    """
    labels = np.concatenate([labels for _, labels in parts.values()])
    trained = len(parts["train"][1])
    digests = np.concatenate([_digests(images) for images, _ in parts.values()])
    _, content, times = np.unique(digests, return_inverse=True, return_counts=True)
    by_content = defaultdict(list)
    for place in np.flatnonzero(times[content] > 1).tolist():
        by_content[content[place]].append(place)
    groups = [*by_content.values()]
    return {
        "groups": [[names[place] for place in group] for group in groups],
        "repeated": sum(len(group) - 1 for group in groups),
        "in_both_parts": sum(
            place >= trained
            for group in groups
            if group[0] < trained
            for place in group
        ),
        "in_several_classes": sum(
            len(np.unique(labels[group])) > 1 for group in groups
        ),
    }


def _digests(images: Images) -> np.ndarray:
    """Returns a hash of each image, bytes [count]."""
    step = max(1, _READ_BYTES * len(images) // max(1, images.nbytes))
    digests = bytearray()
    for start in range(0, len(images), step):
        for image in np.ascontiguousarray(images[start : start + step]):
            digests += hashlib.blake2b(image, digest_size=_DIGEST.itemsize).digest()
    return np.frombuffer(bytes(digests), _DIGEST)


def _sizes(dataset: PreparedDataset) -> dict[str, Any]:
    """Reads width and height of each picture from the first bytes of its file."""

    def read(path: str) -> tuple[int, int]:
        return decoding.size(dataset.directory / path, path)

    names = [path for split in SPLITS for path in dataset.prepared.paths(split)]
    # More threads than processors: a disk of a network answers late.
    with ThreadPoolExecutor(4 * len(os.sched_getaffinity(0))) as pool:
        found = sorted(pool.map(read, names), key=lambda size: (min(size), max(size)))
    side = dataset.prepared.image_size
    return {
        "smallest": found[0],
        "median": found[len(found) // 2],
        "largest": found[-1],
        "enlarged": sum(min(size) < side for size in found),
    }


def _training(given: Mapping[str, Any], dataset: Dataset, count: int) -> str:
    """Returns the command that trains on the data set, in a directory of its own.

    `count` is the number of images in the training part.
    """
    name = dataset.name.removeprefix(TFDS)
    if dataset.name in KINDS and dataset.directory:
        name = dataset.directory.stem or name
    run = Path("runs", name.replace("/", "-").replace(":", "-"))
    if run.exists():
        run = files.unused(run.with_name(f"{run.name}."))
    words = [f"--{name}={value}" for name, value in given.items() if name != "data"]
    words = ["--data", given["data"], *words, f"--train_dir={run}"]
    if count < Config().batch_size:  # A step shows no image twice.
        words.append(f"--batch_size={1 << (count.bit_length() - 1)}")
    words += ["--max_steps=300", "--eval_steps=100"]
    return f"{invocation.command('train')} {shlex.join(words)}"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    sections = {
        "Classes": _on_classes(found["classes"]),
        "Sizes": _on_sizes(found["sizes"], found["image_shape"]),
        "Left out": _on_left_out(found["left_out"]),
        "Notes": found["notes"],
        "The same": _on_duplicates(**found["duplicates"]),
        "Sheet": [found["contact_sheet"]],
        "Next": [found["next"]],
    }
    for title, lines in sections.items():
        for number, line in enumerate(lines):
            margin = "" if number else f"{title}:"
            yield f"{margin:{_MARGIN}}{printable(line)}"


def _on_classes(classes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"{'train':>9} {'test':>9}"
    shown, rest = classes, 0
    if len(classes) > _CLASSES:
        by_count = sorted(classes, key=lambda one: -one["train"])
        shown = by_count[:_EXTREMES] + by_count[-_EXTREMES:]
        rest = len(classes) - len(shown)
    for number, one in enumerate(shown):
        if rest and number == _EXTREMES:
            yield f"... {rest:,} classes with as many or fewer, and then the fewest:"
        yield f"{one['train']:>9,} {one['test']:>9,}  {one['name']}"
    train, test = (sum(one[split] for one in classes) for split in SPLITS)
    yield f"{train:>9,} {test:>9,}  in all, of {len(classes):,} classes"


def _on_balance(trained: Sequence[int]) -> Iterator[str]:
    most, fewest = max(trained), min(trained)
    if fewest and most >= _UNEVEN * fewest:
        yield f"the largest class has {most / fewest:.1f} times as many as the smallest"
        yield 'class_weights = "balanced" in a recipe makes the classes count the same'


def _on_sizes(
    sizes: Mapping[str, Any] | None, image_shape: Sequence[int]
) -> Iterator[str]:
    height, width, _ = image_shape
    if sizes is None:
        yield f"all are {width} x {height} when they are trained on"
        return
    small, median, large = (
        "{:,} x {:,}".format(*sizes[name]) for name in ("smallest", "median", "largest")
    )
    yield f"{small} the smallest, {median} the median, {large} the largest"
    if enlarged := sizes["enlarged"]:
        yield f"{enlarged:,} have a side below {height} and are enlarged"


def _on_left_out(left_out: Mapping[str, str]) -> Iterator[str]:
    yield counted(len(left_out), "picture") if left_out else "no picture"
    yield from list(left_out.values())[:_SHOWN]
    if len(left_out) > _SHOWN:
        yield f"and {len(left_out) - _SHOWN:,} more"


def _on_duplicates(
    groups: Sequence[Sequence[str]],
    repeated: int,
    in_both_parts: int,
    in_several_classes: int,
) -> Iterator[str]:
    if not groups:
        yield "no two pictures"
        return
    repeating = counted(repeated, "picture repeats", "pictures repeat")
    yield f"{repeating} another one, pixel for pixel as prepared"
    if in_both_parts:
        tested = counted(in_both_parts, "test picture is", "test pictures are")
        yield f"{tested} trained on too: scores are too good"
    if in_several_classes:
        several = counted(in_several_classes, "is", "are")
        yield f"{several} in several classes: nothing can learn them"
    for group in groups[:_SHOWN]:
        more = f" and {len(group) - _SHOWN:,} more" if group[_SHOWN:] else ""
        yield " = ".join(group[:_SHOWN]) + more
    if groups[_SHOWN:]:
        yield f"and {len(groups) - _SHOWN:,} more"
