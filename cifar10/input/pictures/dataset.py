"""Turns a folder of pictures into a data set."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cifar10.config.data_flag import FOLDER
from cifar10.errors import UsageError, counted, first_few, printable
from cifar10.input.dataset_base import Dataset
from cifar10.input.division import divided
from cifar10.input.pictures import cache
from cifar10.input.pictures.listing import list_folder
from cifar10.input.pictures.shards import PIXELS, Shards
from cifar10.input.records import Split

# With fewer test pictures, the score of a class depends mostly on chance.
_ENOUGH = 5
_SHOWN = 5  # Classes or pictures in a message.


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Settings for turning a folder of pictures into a data set."""

    cache_home: Path  # The folder for the prepared pictures of all data sets.
    # Height and width of the images. The shorter side of a picture is resized to this
    # size, then the centre is cropped.
    image_size: int
    validation_fraction: float  # The fraction for a test split that has no folder.
    max_bad_images: float  # The fraction of pictures that may be bad and left out.
    division: str | None = None  # The division of a run, as `divided` returned it.
    val_fraction: float = 0.0  # The fraction for a `val` split that has no folder.


def find_folder(directory: Path, how: Preparation) -> Dataset:
    """Returns the data set in a folder, and first decodes pictures not yet cached.

    `listing.py` describes the layout of the folder.

    Raises:
        UsageError: Too many pictures are bad, or a split has no pictures.
    """
    directory = directory.expanduser().absolute()
    listing = list_folder(directory)
    place = os.path.realpath(directory)
    home = cache.folder_for(how.cache_home, directory.name, place, how.image_size)
    files, classes, side = listing.files, listing.classes, how.image_size
    names = [path for path, _, _ in files]
    labels_of = np.array(listing.labels, np.int32)
    parts, division = np.array(listing.parts), None
    shares: dict[Split, float] = {}
    if "test" not in listing.parts:
        shares["test"] = how.validation_fraction
    if how.val_fraction and "val" not in parts:
        shares["val"] = how.val_fraction
    if shares:
        free = np.flatnonzero(parts == "train")
        some, some_labels = [names[n] for n in free], labels_of[free]
        parts[free], division = divided(
            some, some_labels, len(classes), shares, how.division
        )
    shards = Shards(home, directory, files, parts, side)
    left_out = shards.left_out
    where = printable(str(directory))
    _check_left_out(left_out, len(files), how.max_bad_images, where)
    labels = {split: labels_of[places] for split, places in shards.places.items()}
    for split in {**labels, **shares}:
        if not len(labels.get(split, ())):
            fraction = "val_fraction" if split == "val" else "validation_fraction"
            raise UsageError(
                f"None of the {len(files):,} pictures in {where} is left for the "
                f"{split} split. Add pictures, or change --{fraction}."
            )
    counts = np.bincount(labels["test"], minlength=len(classes)).tolist()
    if few := [name for name, n in zip(classes, counts, strict=True) if n < _ENOUGH]:
        have = "has" if len(few) == 1 else "have"
        listing.notes.append(
            f"{len(few):,} of {len(classes):,} classes {have} fewer than {_ENOUGH} "
            f"test pictures, too few for a reliable score: {first_few(few, _SHOWN)}"
        )
    bad = f" ({counted(len(left_out), 'bad one')} left out)" if left_out else ""
    return Dataset(
        name=FOLDER,
        directory=directory,
        image_shape=(side, side, 3),
        class_names=tuple(classes),
        description=(
            f"{len(files) - len(left_out):,} pictures of {len(classes):,} "
            f"classes at {side} x {side} in {where}{bad}"
        ),
        fingerprint=_fingerprint(classes, side, labels, shards),
        read=lambda split: (shards.read(split), labels[split]),
        parts=tuple(labels),
        paths={split: [names[n] for n in of] for split, of in shards.places.items()},
        left_out=left_out,
        notes=listing.notes,
        division=division,
    )


def _fingerprint(
    classes: list[str], side: int, labels: Mapping[Split, np.ndarray], shards: Shards
) -> str:
    """Returns the SHA-256 of the pixels, labels and classes of a data set."""
    blocks = {
        f"{split}-{number:05d}.bin": sha256
        for split, of_part in shards.hashes.items()
        for number, sha256 in enumerate(of_part)
    }
    seen = [PIXELS, classes, (side, side, 3), sorted(blocks)]
    digest = hashlib.sha256(json.dumps(seen).encode())
    for split in labels:
        digest.update(len(labels[split]).to_bytes(8))
        digest.update(labels[split].astype("<i4").tobytes())
    for name in sorted(blocks):
        digest.update(bytes.fromhex(blocks[name]))
    return digest.hexdigest()


def _check_left_out(
    left_out: Mapping[str, str], total: int, most: float, where: str
) -> None:
    """Refuses a data set with too many bad pictures."""
    if len(left_out) > most * total:
        share = math.ceil(100 * len(left_out) / total) / 100
        lines = [*map(printable, left_out.values())][:_SHOWN]
        if more := len(left_out) - len(lines):
            lines.append(f"and {more:,} more.")
        listed = "\n    ".join(lines)
        raise UsageError(
            f"{len(left_out):,} of {total:,} pictures in {where} cannot be used, which "
            f"is more than --max_bad_images {most:g} allows:\n    {listed}\nRepair or "
            f"remove them, or allow them with --max_bad_images {share:g}."
        )
