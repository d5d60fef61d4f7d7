"""Prepared pictures as a data set, wherever they come from."""

import dataclasses
from pathlib import Path
from typing import Self

import numpy as np

from cifar10.errors import first_few, printable, say
from cifar10.input.on_disk import ImagesOnDisk
from cifar10.input.pictures import preparation
from cifar10.input.pictures.shards import Prepared
from cifar10.input.records import Split

# Of a class with fewer test pictures, the score is chance.
_ENOUGH = 5
_SHOWN = 5  # Classes in a message.


@dataclasses.dataclass(frozen=True)
class PreparedDataset:
    """Pictures of one size, on this machine."""

    name: str  # As in `--data`: "folder", or "tfds:" and a name.
    directory: Path  # What they were prepared from.
    prepared: Prepared
    description: str  # One line for the user.
    fingerprint: str  # SHA-256 of what a training sees of them.
    bad: str  # Says which pictures were left out; empty if none was.
    notes: tuple[str, ...]  # What else is worth knowing about the folder.
    is_real: bool = True

    @classmethod
    def of(
        cls,
        name: str,
        directory: Path,
        prepared: Prepared,
        notes: list[str],
        max_bad_images: float,
    ) -> Self:
        """Returns the data set, or refuses one with too many bad pictures."""
        where = printable(str(directory if name == "folder" else name))
        bad = preparation.check(prepared, max_bad_images, where)
        count = len(prepared.listing) - len(prepared.bad)
        side = prepared.image_size
        left_out = f" ({len(prepared.bad):,} bad ones left out)" if bad else ""
        if few := _on_few(prepared):
            say(few)
        return cls(
            name=name,
            directory=directory,
            prepared=prepared,
            description=(
                f"{count:,} pictures of {len(prepared.listing.classes):,} classes at "
                f"{side} x {side} in {where}{left_out}"
            ),
            fingerprint=prepared.fingerprint,
            bad=bad,
            notes=tuple(notes),
        )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        return self.prepared.image_shape

    @property
    def division(self) -> str | None:
        """How the pictures were divided; None if there was a test part."""
        return self.prepared.listing.division

    @property
    def classes(self) -> int:
        """Labels are 0 to `classes - 1`."""
        return len(self.prepared.listing.classes)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The name of each class."""
        return tuple(self.prepared.listing.classes)

    def read(self, split: Split) -> tuple[np.ndarray | ImagesOnDisk, np.ndarray]:
        """Reads the images of one split, and their labels, int32 [count]."""
        return self.prepared.read(split)


def _on_few(prepared: Prepared) -> str:
    """Returns a warning of classes with few test pictures, empty if there are none."""
    names = prepared.listing.classes
    counts = np.bincount(prepared.labels("test"), minlength=len(names)).tolist()
    few = [
        f"{name} ({n:,})" for name, n in zip(names, counts, strict=True) if n < _ENOUGH
    ]
    if not few:
        return ""
    fix = "Add some to the test part."
    if prepared.listing.division is not None:
        fix = "Add pictures, or raise --validation_fraction."
    return (
        f"WARNING: {len(few):,} of {len(names):,} classes have fewer than {_ENOUGH} "
        f"test pictures, too few to score them by: {first_few(few, _SHOWN)}.\n{fix}"
    )
