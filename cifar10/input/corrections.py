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
from cifar10.errors import UsageError, did_you_mean, printable, reason
from cifar10.input.dataset_base import Dataset, Images
from cifar10.input.pictures.dataset import PictureDataset
from cifar10.input.records import Split
from cifar10.process import files


def names_of(dataset: Dataset, split: Split, count: int) -> Sequence[str]:
    """Returns the names of the `count` pictures of a part."""
    paths = getattr(dataset, "paths", None)
    return paths[split] if paths else [f"{split} picture {n}" for n in range(count)]


def corrected(dataset: Dataset, name: str) -> Dataset:
    """Returns a data set with its training part corrected as a file says.

    The division into parts and the test part stay. The fingerprint is another one if
    any label is.

    Raises:
        UsageError: A picture or class is unknown, or a class would have no pictures.
    """
    file = f"--corrections {name}"
    parts = getattr(dataset, "labels", None)
    parts = parts or {split: dataset.read(split)[1] for split in dataset.parts}
    paths = {split: names_of(dataset, split, len(parts[split])) for split in parts}
    places = {path: place for place, path in enumerate(paths["train"])}
    classes = {name: label for label, name in enumerate(dataset.class_names)}
    labels = parts["train"].copy()
    for path, to, label in _read(name):
        if path not in places:
            raise UsageError(f"{file}: {path} is no training picture. Remove its line.")
        was = dataset.class_names[parts["train"][places[path]]]
        if label and label != was:
            made = "The file is of other data, or of other fractions of it."
            raise UsageError(f"{file}: {path} is of {was}, not {label}. {made}")
        if to and to not in classes:
            meant = f"{did_you_mean(to, classes)} Correct it, or leave it empty."
            raise UsageError(f"{file}: there is no class {to}, of {path}.{meant}")
        labels[places[path]] = classes[to] if to else -1
    if emptied := {*parts["train"].tolist()} - {*labels.tolist()}:
        last = dataset.class_names[min(emptied)]
        raise UsageError(f"{file}: it leaves no picture of {last}. Keep some.")
    changed, kept = labels != parts["train"], np.flatnonzero(labels >= 0)
    if not changed.any():
        return dataset
    left_out = len(labels) - len(kept)
    counts = f"leaves out {left_out:,} and moves {changed.sum() - left_out:,}"
    digest = hashlib.sha256(f"{dataset.fingerprint}".encode() + labels.tobytes())

    def images(split: Split) -> Images:
        found = dataset.read(split)[0]
        if split != "train":
            return found
        return found[kept] if isinstance(found, np.ndarray) else _Some(found, kept)

    values = {
        **vars(dataset),
        "images": images,
        "labels": {**parts, "train": labels[kept]},
        "paths": {**paths, "train": [paths["train"][n] for n in kept.tolist()]},
        "fingerprint": digest.hexdigest(),
        "description": f"{dataset.description}; {printable(file)} {counts}",
    }
    fields = PictureDataset.__dataclass_fields__.keys() & values.keys()
    return PictureDataset(**{field: values[field] for field in fields})


def _read(name: str) -> list[tuple[str, str, str]]:
    """Returns picture, class and label in each line of a file."""
    try:
        content = files.read(layout.absolute_path(name), 2**30, follow=True)
        # Paths need not be UTF-8. Spreadsheets add a mark, and separate by semicolons
        # where the comma is decimal.
        text = content.decode("utf-8-sig", "surrogateescape")
        separator = ";" if ";" in text.partition("\n")[0] else ","
        rows = csv.DictReader(io.StringIO(text, ""), delimiter=separator, strict=True)
        if not {"picture", "class"} <= {*(rows.fieldnames or ())}:
            raise ValueError("its first line has other names")  # noqa: TRY301
        return [
            (row["picture"], row["class"] or "", row.get("label") or "") for row in rows
        ]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"--corrections {name} cannot be read: {reason(error)}.\nIt is a CSV file "
            "with the columns picture and class."
        ) from error


class _Some:
    """Some of the images of a part that stays on the disk."""

    def __init__(self, images: Images, places: np.ndarray) -> None:
        self._images, self._places, self.dtype = images, places, images.dtype
        self.shape = (len(places), *images.shape[1:])
        self.nbytes = images.nbytes // len(images) * len(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        return self._images[self._places[chosen]]
