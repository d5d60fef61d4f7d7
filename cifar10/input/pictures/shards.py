"""Prepared pictures: files of uint8 records, and the manifest that describes them.

A folder of them is written once, by `preparation.py`, and never changed: it is complete
if it has a manifest. A record is the pixels of a picture, row by row, red, green and
blue; a file holds those of one part of the data, train or test, in the list's order.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from cifar10.errors import UsageError, printable, reason
from cifar10.input.on_disk import ImagesOnDisk
from cifar10.input.pictures.listing import Listing
from cifar10.input.records import SPLITS, Split

# Raised with any change of what is written, the decoder's results included, so that
# pictures prepared by an older version are never taken for the same.
FORMAT = 2
MANIFEST = "manifest.json"

# Large enough that the number of files does not matter, small enough to copy.
SHARD_BYTES = 256_000_000
# A part of the data up to this size becomes an array in memory, like CIFAR: any
# machine that trains has room for both parts and for the batches' copies.
IN_MEMORY_BYTES = 2**30


def shard_name(split: Split, number: int) -> str:
    """Returns the name of a file of records."""
    return f"{split}-{number:05d}.bin"


def records_per_shard(record_bytes: int) -> int:
    """Returns how many records a file has, except the last one of its part."""
    return max(1, SHARD_BYTES // record_bytes)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A folder of prepared pictures, complete, and its manifest."""

    folder: Path
    image_size: int
    listing: Listing
    # Why pictures were left out, by their place in the list.
    bad: dict[int, str]
    # Those of them whose content could not be read, which may change.
    unreadable: list[int]
    digests: dict[str, str]  # SHA-256 of each file of records.

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of all that a training sees of the pictures."""
        digest = hashlib.sha256()
        seen = [FORMAT, self.listing.classes, self.image_shape, sorted(self.digests)]
        digest.update(json.dumps(seen).encode())
        for split in SPLITS:
            labels = self.labels(split).astype("<i4")
            digest.update(len(labels).to_bytes(8))
            digest.update(labels.tobytes())
        for name in sorted(self.digests):
            digest.update(bytes.fromhex(self.digests[name]))
        return digest.hexdigest()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return self.image_size, self.image_size, 3

    @property
    def record_bytes(self) -> int:
        """Bytes of one picture."""
        return self.image_size**2 * 3

    def places(self, split: Split) -> list[int]:
        """Returns the place in the list of each record of a part."""
        trains = len(self.listing) - self.listing.tests
        part = range(trains) if split == "train" else range(trains, len(self.listing))
        return [place for place in part if place not in self.bad]

    def labels(self, split: Split) -> np.ndarray:
        """Returns the labels of a part, int32 [count]."""
        label = self.listing.label
        return np.array([label[place] for place in self.places(split)], np.int32)

    def paths(self, split: Split) -> list[str]:
        """Returns the name of each record's picture."""
        return [self.listing.path[place] for place in self.places(split)]

    def shards(self, split: Split) -> list[Path]:
        """Returns the files of a part, in order."""
        per_shard = records_per_shard(self.record_bytes)
        number = -(-len(self.places(split)) // per_shard)
        return [self.folder / shard_name(split, n) for n in range(number)]

    def read(self, split: Split) -> tuple[np.ndarray | ImagesOnDisk, np.ndarray]:
        """Returns the images of a part, in memory or on disk, and its labels in memory.

        Images in memory are compared with the SHA-256 of their files.
        """
        labels = self.labels(split)
        shape = (len(labels), *self.image_shape)
        per_shard = records_per_shard(self.record_bytes)
        try:
            for number, path in enumerate(self.shards(split)):
                count = min(per_shard, len(labels) - number * per_shard)
                if path.stat().st_size != count * self.record_bytes:
                    raise self._damaged(path)
            if int(np.prod(shape, dtype=np.int64)) > IN_MEMORY_BYTES:
                return ImagesOnDisk(self.shards(split), shape, per_shard), labels
            images = np.empty(shape, np.uint8)
            for number, path in enumerate(self.shards(split)):
                part = images[number * per_shard :][:per_shard]
                with path.open("rb") as file:
                    file.readinto(part.reshape(-1).data)
                if hashlib.sha256(part.data).hexdigest() != self.digests[path.name]:
                    raise self._damaged(path)
        except OSError as error:
            raise UsageError(
                f"The prepared pictures in {printable(str(self.folder))} cannot be "
                f"read: {reason(error)}.\nStart again, and they are prepared again if "
                "the pictures have changed."
            ) from error
        return images, labels

    def _damaged(self, path: Path) -> UsageError:
        return UsageError(
            f"{printable(str(path))} is damaged: it is not what was prepared.\nRemove "
            f"the folder {printable(str(self.folder))}, and run again to prepare it "
            "again."
        )

    def manifest(self) -> bytes:
        """Returns the content of the manifest."""
        content = {
            "format": FORMAT,
            "image_size": self.image_size,
            "listing": self.listing.columns(),
            "bad": {str(place): why for place, why in sorted(self.bad.items())},
            "unreadable": sorted(self.unreadable),
            "shards": self.digests,
            "fingerprint": self.fingerprint,
        }
        return (json.dumps(content) + "\n").encode()


def load(folder: Path) -> Prepared | None:
    """Returns the prepared pictures in a folder; None if it is not complete."""
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return Prepared(
        folder=folder,
        image_size=content["image_size"],
        listing=Listing.from_columns(content["listing"]),
        bad={int(place): why for place, why in content["bad"].items()},
        unreadable=content["unreadable"],
        digests=content["shards"],
    )
