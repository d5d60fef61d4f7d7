"""Prepared pictures as a data set, wherever they come from."""

import dataclasses
from pathlib import Path
from typing import Self

import numpy as np

from cifar10.errors import printable
from cifar10.input.on_disk import ImagesOnDisk
from cifar10.input.pictures import preparation
from cifar10.input.pictures.shards import Prepared
from cifar10.input.records import Split


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
