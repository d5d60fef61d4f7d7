"""Prepares a data set, looks at all of it, and says what was found."""

import dataclasses
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cifar10.config import paths
from cifar10.config.config import Config
from cifar10.config.data_flag import FOLDER, KINDS, TFDS
from cifar10.errors import counted, printable
from cifar10.input import datasets
from cifar10.input.datasets import Dataset
from cifar10.input.pictures import cache, preparation
from cifar10.input.pictures.dataset import PreparedDataset
from cifar10.input.records import SPLITS, Split
from cifar10.process import invocation
from cifar10.run_directory import files
from cifar10.tools.data import contact_sheet, findings, sizes
from cifar10.tools.data.options import Options

# Of more classes, those with the most and the fewest pictures are printed.
_CLASSES = 30
_EXTREMES = 10
# The smaller of two classes is a fifth then: where Google's guide begins to speak of
# imbalance that matters (developers.google.com/machine-learning/crash-course).
_UNEVEN = 4
_SHOWN = 5  # Of pictures and groups of pictures.
_SHEET = "contact_sheet.png"
_MARGIN = 10  # Of the lines, where their titles stand.


def run(config: Config, options: Options, given: Mapping[str, Any]) -> None:
    """Shows a data set; `given` are the flags with which a training finds it."""
    place = paths.locate(options.contact_sheet) if options.contact_sheet else None
    if place:
        contact_sheet.check_output(place)
    # However many are bad: what is shown here says which to repair.
    dataset = datasets.find_for({**vars(config), "max_bad_images": 1.0})
    if not options.json:
        print(f"{'Data:':{_MARGIN}}{dataset.description}", flush=True)
    parts = findings.parts(dataset)
    train, title = parts["train"], dataset.description
    names = dataset.class_names
    sheet = contact_sheet.packed(title, train.images, train.labels, names)
    if place:
        contact_sheet.write(place, sheet)
    else:
        place = _keep(sheet, dataset)
    if (share := _share_of_bad(dataset)) > config.max_bad_images:
        given = {**given, "max_bad_images": share}
    found = _look(dataset, parts, place, _next(given, dataset))
    print(json.dumps(found) if options.json else "\n".join(_lines(found)))


def _look(
    dataset: Dataset, parts: dict[Split, findings.Part], sheet: Path, command: str
) -> dict[str, Any]:
    """Returns all that there is to say, as JSON values."""
    counts = [
        np.bincount(part.labels, minlength=dataset.classes).tolist()
        for part in parts.values()
    ]
    left_out: dict[str, str] = {}
    notes: Sequence[str] = ()
    measured = None
    if isinstance(dataset, PreparedDataset):
        prepared, notes = dataset.prepared, dataset.notes
        left_out = {prepared.listing.path[n]: why for n, why in prepared.bad.items()}
        if dataset.name == FOLDER:
            measured = dataclasses.asdict(sizes.of(dataset))
    return {
        "data": dataset.name,
        "data_dir": str(dataset.directory),
        "image_shape": list(dataset.image_shape),
        "fingerprint": dataset.fingerprint,
        "classes": [
            {"name": name, "train": trained, "test": tested}
            for name, trained, tested in zip(dataset.class_names, *counts, strict=True)
        ],
        "sizes": measured,
        "left_out": left_out,
        "notes": [*notes, *_on_balance(counts[0])],
        "duplicates": dataclasses.asdict(findings.duplicates(parts)),
        "contact_sheet": str(sheet),
        "next": command,
    }


def _share_of_bad(dataset: Dataset) -> float:
    """Returns which part of the pictures is left out, rounded up to a hundredth."""
    if not isinstance(dataset, PreparedDataset):
        return 0.0
    prepared = dataset.prepared
    return math.ceil(100 * len(prepared.bad) / len(prepared.listing)) / 100


def _keep(sheet: bytes, dataset: Dataset) -> Path:
    """Writes the sheet where it is by default, beside what is prepared."""
    if isinstance(dataset, PreparedDataset):
        home = dataset.prepared.folder
    else:
        directory = dataset.directory or Path()  # What was found here has one.
        pictures = datasets.cache_of_pictures()
        home = preparation.folder_for(pictures, directory.name, str(directory))
    with preparation.explained(home), cache.opened(home) as folder, folder.locked():
        folder.write(_SHEET, sheet)
    return home / _SHEET


def _next(given: Mapping[str, Any], dataset: Dataset) -> str:
    """Returns the command that trains on the data set, in a directory of its own."""
    name = dataset.name.removeprefix(TFDS)
    if dataset.name in KINDS and dataset.directory:
        name = dataset.directory.stem or name
    run = Path("runs", name.replace("/", "-").replace(":", "-"))
    if run.exists():
        run = files.unused(run.with_name(f"{run.name}."))
    words = [f"--{name}={value}" for name, value in given.items() if name != "data"]
    words = ["--data", given["data"], *words, f"--train_dir={run}"]
    count = len(dataset.read("train")[1])
    if count < Config().batch_size:  # A step shows no image twice.
        words.append(f"--batch_size={1 << (count.bit_length() - 1)}")
    words += ["--max_steps=300", "--eval_steps=100"]
    return f"{invocation.of('train')} {shlex.join(words)}"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    sections = {
        "Classes": _on_classes(found["classes"]),
        "Sizes": _on_sizes(found["sizes"], found["image_shape"]),
        "Left out": _on_what_is_left_out(found["left_out"]),
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
    def row(train: int, test: int, name: str) -> str:
        return f"{train:>9,} {test:>9,}  {name}"

    yield f"{'train':>9} {'test':>9}"
    by_count = sorted(classes, key=lambda one: -one["train"])
    shown, rest = classes, 0
    if len(classes) > _CLASSES:
        rest = len(classes) - 2 * _EXTREMES
        shown = by_count[:_EXTREMES] + by_count[-_EXTREMES:]
    for number, one in enumerate(shown):
        if rest and number == _EXTREMES:
            yield f"... {rest:,} classes with as many or fewer, and then the fewest:"
        yield row(one["train"], one["test"], one["name"])
    train, test = (sum(one[part] for one in classes) for part in SPLITS)
    yield row(train, test, f"in all, of {len(classes):,} classes")


def _on_balance(trained: Sequence[int]) -> Iterator[str]:
    most, fewest = max(trained), min(trained)
    if fewest and most >= _UNEVEN * fewest:
        yield f"the largest class has {most / fewest:.1f} times as many as the smallest"
        yield 'class_weights = "balanced" in a recipe makes the classes count the same'


def _on_sizes(
    measured: Mapping[str, Any] | None, image_shape: Sequence[int]
) -> Iterator[str]:
    height, width, _ = image_shape
    if measured is None:
        yield f"all are {width} x {height} when they are trained on"
        return
    small, median, large = (
        "{:,} x {:,}".format(*measured[name])
        for name in ("smallest", "median", "largest")
    )
    yield f"{small} the smallest, {median} the median, {large} the largest"
    if enlarged := measured["enlarged"]:
        yield f"{enlarged:,} have a side below {height} and are enlarged"


def _on_what_is_left_out(left_out: Mapping[str, str]) -> Iterator[str]:
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
