"""Corrected labels: training pictures that are left out or moved to another class.

A CSV file names them, as `python -m cifar10 data --train_dir` writes it: in the column
`picture` a training picture, in the column `class` the class to move it to, or nothing
to leave it out. If there is a column `label`, it is compared with the picture's label.
"""

import csv
import hashlib
import io
from collections.abc import Sequence

import numpy as np

from cifar10.config import layout
from cifar10.errors import UsageError, did_you_mean, reason
from cifar10.input.dataset_base import Dataset, Images, selected
from cifar10.input.pictures.dataset import PictureDataset
from cifar10.input.records import Split
from cifar10.process import files


def names_of(dataset: Dataset, split: Split, count: int) -> Sequence[str]:
    """Returns the names of the `count` pictures of a part."""
    paths = getattr(dataset, "paths", None)
    return paths[split] if paths else [f"{split} picture {n}" for n in range(count)]


def corrected(dataset: Dataset, name: str) -> Dataset:
    """Returns a data set with its training part corrected as a file says.

    The division into parts and the test part stay; the fingerprint changes.

    Raises:
        UsageError: A picture or class is unknown, or a class would have no pictures.
    """
    parts = getattr(dataset, "labels", None)
    parts = parts or {split: dataset.read(split)[1] for split in dataset.parts}
    paths = {split: names_of(dataset, split, len(parts[split])) for split in parts}
    places = {path: place for place, path in enumerate(paths["train"])}
    classes = {name: label for label, name in enumerate(dataset.class_names)}
    labels = parts["train"].copy()
    for path, to, label in read(name):
        if path not in places:
            why = "is no training picture. Remove its line."
        elif label and classes.get(label) != parts["train"][places[path]]:
            why = f"is not of {label}. The file is of other data, or other fractions."
        elif to and to not in classes:
            why = f"goes to an unknown class, {to}.{did_you_mean(to, classes)}"
        else:
            labels[places[path]] = classes[to] if to else -1
            continue
        raise UsageError(f"--corrections {name}: {path} {why}")
    if emptied := {*parts["train"].tolist()} - {*labels.tolist()}:
        last = dataset.class_names[min(emptied)]
        raise UsageError(f"--corrections {name} leaves no picture of {last}; keep one.")
    moved = np.count_nonzero((labels != parts["train"]) & (labels >= 0))
    kept = np.flatnonzero(labels >= 0)
    counts = f"leaves out {len(labels) - len(kept):,} and moves {moved:,}"

    def images(split: Split) -> Images:
        found = dataset.read(split)[0]
        return selected(found, kept) if split == "train" else found

    digest = hashlib.sha256(f"{dataset.fingerprint}".encode() + labels.tobytes())
    values = {
        **vars(dataset),
        "images": images,
        "labels": {**parts, "train": labels[kept]},
        "paths": {**paths, "train": [paths["train"][n] for n in kept.tolist()]},
        "fingerprint": digest.hexdigest(),
        "description": f"{dataset.description}; --corrections {name} {counts}",
    }
    fields = PictureDataset.__dataclass_fields__.keys() & values.keys()
    return PictureDataset(**{field: values[field] for field in fields})


def read(name: str) -> list[tuple[str, str, str]]:
    """Returns picture, class and label in each line of a file.

    Raises:
        UsageError: It cannot be read, or lacks a column.
    """
    try:
        content = files.read(layout.absolute_path(name), 2**30, follow=True)
        # Paths need not be UTF-8. Spreadsheets add a mark, and separate by semicolons
        # where the comma is decimal.
        text = content.decode("utf-8-sig", "surrogateescape")
        separator = ";" if ";" in text.partition("\n")[0] else ","
        lines = io.StringIO(text, newline="")
        rows = csv.DictReader(lines, delimiter=separator, restval="", strict=True)
        return [(row["picture"], row["class"], row.get("label", "")) for row in rows]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UsageError(
            f"--corrections {name} cannot be read: {reason(error)}.\nIt is a CSV file "
            "with the columns picture and class."
        ) from error
