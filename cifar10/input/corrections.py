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
from collections.abc import Mapping, Sequence

import numpy as np

from cifar10.config import layout
from cifar10.errors import UsageError, reason
from cifar10.input.dataset_base import Dataset, Images, selected
from cifar10.input.records import Split
from cifar10.process import files


def names_of(dataset: Dataset, split: Split, count: int) -> Sequence[str]:
    """Returns the images' names; without names, numbers such as `train picture 0`."""
    return dataset.paths.get(split, [f"{split} picture {n}" for n in range(count)])


def regrouped(
    dataset: Dataset, places: Mapping[Split, np.ndarray], labels: np.ndarray
) -> Dataset:
    """Makes the splits in `places` of training images; the other splits stay.

    `places` holds the indices of each split's images; `labels` are those of all images.
    """
    names = names_of(dataset, "train", len(labels))
    paths = {part: [names[n] for n in of.tolist()] for part, of in places.items()}

    def read(split: Split) -> tuple[Images, np.ndarray]:
        if split not in places:
            return dataset.read(split)
        images, _ = dataset.read("train")
        return selected(images, places[split]), labels[places[split]]

    return dataclasses.replace(dataset, read=read, paths={**dataset.paths, **paths})


def corrected(dataset: Dataset, name: str) -> Dataset:
    """Returns a data set whose training split is corrected by the CSV file `name`.

    The fingerprint and the description change too. Refuses an unknown picture or class,
    and corrections that leave no picture of a class.
    """
    _, before = dataset.read("train")
    names = names_of(dataset, "train", len(before))
    places = {path: place for place, path in enumerate(names)}
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
    kept = np.flatnonzero(labels >= 0)
    moved = np.count_nonzero(labels[kept] != before[kept])
    counts = f"leaves out {len(labels) - len(kept):,} and moves {moved:,}"
    digest = hashlib.sha256(f"{dataset.fingerprint}".encode() + labels.tobytes())
    return dataclasses.replace(
        regrouped(dataset, {"train": kept}, labels),
        fingerprint=digest.hexdigest(),
        description=f"{dataset.description}; --corrections {name} {counts}",
    )


def read(name: str) -> list[tuple[str, str, str]]:
    """Reads a CSV file's corrections: (picture, new class, class before correction)."""
    try:
        content = files.read(layout.absolute_path(name), 2**30, follow=True)
        # Paths need not be UTF-8. Spreadsheets add a byte order mark.
        text = content.decode("utf-8-sig", "surrogateescape")
        rows = csv.DictReader(io.StringIO(text, newline=""), restval="", strict=True)
        if not {"picture", "class"} <= {*(rows.fieldnames or ())}:
            raise ValueError("it lacks a column picture or class")  # noqa: TRY301
        return [(row["picture"], row["class"], row.get("label", "")) for row in rows]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"--corrections {name} cannot be read: {reason(error)}.\nThe file must be "
            "CSV, with the first line picture,class or picture,class,label."
        ) from error
