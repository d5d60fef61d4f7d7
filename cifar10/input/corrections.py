"""Corrects the training split: leaves pictures out or moves them to other classes.

The corrections are in a CSV file, which `python -m cifar10 data --train_dir` writes.
The column `picture` names a training picture. The column `class` names its new class,
or is empty to leave the picture out. An optional column `label` must equal the present
class of the picture.
"""

import csv
import dataclasses
import hashlib
import io
from collections.abc import Sequence

import numpy as np

from cifar10.config import layout
from cifar10.errors import UsageError, reason
from cifar10.input.dataset_base import Dataset, Images, selected
from cifar10.input.records import Split
from cifar10.process import files


def names_of(dataset: Dataset, split: Split, count: int) -> Sequence[str]:
    """Returns the pictures' paths; without paths, names such as `train picture 0`."""
    numbered = [f"{split} picture {n}" for n in range(count)]
    return dataset.paths.get(split, numbered)


def corrected(dataset: Dataset, name: str) -> Dataset:
    """Returns a data set whose training split is corrected by the CSV file `name`.

    The other splits stay as they are. The fingerprint and the description change too.

    Raises:
        UsageError: A picture or class is unknown, or a class would have no pictures.
    """
    _, before = dataset.read("train")
    paths = names_of(dataset, "train", len(before))
    places = {path: place for place, path in enumerate(paths)}
    classes = {name: label for label, name in enumerate(dataset.class_names)}
    labels = before.copy()
    for path, to, label in read(name):
        if path not in places:
            why = "is not in the training split. Remove its line."
        elif label and classes.get(label) != before[places[path]]:
            why = f"is not of class {label}. The file is for other data or splits."
        elif to and to not in classes:
            why = f"is moved to an unknown class, {to}. Correct its line."
        else:
            labels[places[path]] = classes[to] if to else -1
            continue
        raise UsageError(f"--corrections {name}: {path} {why}")
    if emptied := {*before.tolist()} - {*labels.tolist()}:
        last = dataset.class_names[min(emptied)]
        raise UsageError(f"--corrections {name} leaves no picture of {last}. Keep one.")
    moved = np.count_nonzero((labels != before) & (labels >= 0))
    kept = np.flatnonzero(labels >= 0)
    counts = f"leaves out {len(labels) - len(kept):,} and moves {moved:,}"

    def read_part(split: Split) -> tuple[Images, np.ndarray]:
        images, found = dataset.read(split)
        if split == "train":
            return selected(images, kept), labels[kept]
        return images, found

    digest = hashlib.sha256(f"{dataset.fingerprint}".encode() + labels.tobytes())
    return dataclasses.replace(
        dataset,
        read=read_part,
        paths={**dataset.paths, "train": [paths[n] for n in kept.tolist()]},
        fingerprint=digest.hexdigest(),
        description=f"{dataset.description}; --corrections {name} {counts}",
    )


def read(name: str) -> list[tuple[str, str, str]]:
    """Reads a CSV file's corrections: (picture, new class, class before correction).

    Raises:
        UsageError: The file cannot be read, or lacks a column.
    """
    try:
        content = files.read(layout.absolute_path(name), 2**30, follow=True)
        # Paths need not be UTF-8. Spreadsheets add a byte order mark.
        text = content.decode("utf-8-sig", "surrogateescape")
        table = io.StringIO(text, newline="")
        rows = csv.DictReader(table, restval="", strict=True)
        # With the header as a row, so that a file without pictures needs its columns.
        lines = [dict.fromkeys(rows.fieldnames or (), ""), *rows]
        found = [(row["picture"], row["class"], row.get("label", "")) for row in lines]
        return found[1:]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        why = f"no column {error}" if isinstance(error, KeyError) else reason(error)
        raise UsageError(
            f"--corrections {name} cannot be read: {why}.\nThe file must be CSV, with "
            "the first line picture,class or picture,class,label."
        ) from error
