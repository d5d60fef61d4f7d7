"""Prepared pictures: files of uint8 records, and a description of each.

A record is the pixels of a picture, row by row, red, green and blue. A shard holds the
records of pictures that follow one another in a list. A piece, which is the same but
smaller, holds those of a shard that is not complete. The files are named by the SHA-256
of their content, and the description is written last: a shard is complete or absent.

`described` is the one place where a description is believed. Anything else that lies in
the folder counts for nothing, and the pictures are prepared again.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cifar10.config.options import is_a
from cifar10.errors import UsageError, printable, reason
from cifar10.input.on_disk import ImagesOnDisk
from cifar10.input.pictures import cache
from cifar10.input.pictures.cache import Folder, NewFile
from cifar10.input.pictures.decoding import PictureError, UnreadableError
from cifar10.input.pictures.listing import Key, Listing
from cifar10.input.records import SPLITS, Split

# Raised with any change of what is written, so that older files are not mistaken for
# it; and if the decoder makes other pixels, which is part of every fingerprint.
FORMAT = 3
_PIXELS = 2

# Large enough that the number of files does not matter, small enough to copy.
SHARD_BYTES = 256_000_000
# A part of the data up to this size becomes an array in memory, like CIFAR: any
# machine that trains has room for both parts and for the batches' copies.
IN_MEMORY_BYTES = 2**30

_DESCRIPTION = ".json"
_DESCRIPTION_BYTES = 2**30  # More than a million pictures with long names take.


def records_per_shard(record_bytes: int) -> int:
    """Returns how many records a shard has, except the last one of its part."""
    return max(1, SHARD_BYTES // record_bytes)


@dataclasses.dataclass(frozen=True)
class Shard:
    """The description of a shard or of a piece."""

    of: str  # The name of the set of pictures that it was prepared for.
    is_piece: bool
    keys: list[Key]
    # Why pictures were left out, by their place among the keys.
    bad: dict[int, str]
    # Those of them whose content could not be read, which may change.
    unreadable: list[int]
    sha256: str  # Of the records.

    @property
    def file(self) -> str:
        """The name of the file of records."""
        return f"{self.sha256}.{'piece' if self.is_piece else 'bin'}"

    def __len__(self) -> int:
        """Returns how many records there are."""
        return len(self.keys) - len(self.bad)

    def content(self) -> bytes:
        """Returns the content of the description."""
        names = ("of", "is_piece", "bad", "unreadable", "sha256")
        values = {"format": FORMAT, **{name: getattr(self, name) for name in names}}
        return json.dumps(
            {**values, "keys": list(zip(*self.keys, strict=True))}
        ).encode()


def described(name: str, content: bytes) -> Shard | None:
    """Returns what a file describes; None unless this version has written it so."""
    if name != hashlib.sha256(content).hexdigest() + _DESCRIPTION:
        return None
    try:
        values = json.loads(content)
        columns = values["keys"]
        shard = Shard(
            values["of"],
            values["is_piece"],
            list(zip(*columns, strict=True)),
            {int(place): why for place, why in values["bad"].items()},
            values["unreadable"],
            values["sha256"],
        )
        types = (list[str], list[int], list[int])
        is_right = (
            values["format"] == FORMAT
            and all(map(is_a, columns, types))
            and shard.keys
            and is_a(shard.of, str)
            and is_a(shard.is_piece, bool)
            and is_a([*shard.bad.values()], list[str])
            and is_a(shard.unreadable, list[int])
            and {*shard.unreadable} <= {*shard.bad} <= {*range(len(shard.keys))}
            and re.fullmatch("[0-9a-f]{64}", shard.sha256)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return shard if is_right and len(columns) == len(types) else None


def found(folder: Folder, record_bytes: int) -> Iterator[tuple[str, Shard]]:
    """Yields the shards whose records are there, with the names of descriptions."""
    for name in sorted(folder.names()):
        if name.endswith(_DESCRIPTION):
            content = folder.read(name, _DESCRIPTION_BYTES)
            shard = described(name, content) if content else None
            if (
                shard is not None
                and folder.size(shard.file) == len(shard) * record_bytes
            ):
                yield name, shard


class NewShard:
    """A shard or piece that is being written; nothing stays of it unless it is kept."""

    def __init__(self, folder: Folder, of: str, *, is_piece: bool) -> None:
        self._folder = folder
        self._file = NewFile(folder)
        self._shard = Shard(of, is_piece, [], {}, [], "")

    def __len__(self) -> int:
        """Returns how many records there are."""
        return len(self._shard)

    @property
    def keys(self) -> list[Key]:
        """The pictures so far."""
        return self._shard.keys

    def add(self, key: Key, record: bytes | PictureError) -> None:
        """Adds a picture, or the reason why it is left out."""
        if isinstance(record, PictureError):
            place = len(self._shard.keys)
            self._shard.bad[place] = str(record)
            if isinstance(record, UnreadableError):
                self._shard.unreadable.append(place)
        else:
            self._file.write(record)
        self._shard.keys.append(key)

    def keep(self) -> tuple[str, Shard]:
        """Completes it; returns the name of its description, and what that says."""
        shard = dataclasses.replace(self._shard, sha256=self._file.sha256)
        durable = not shard.is_piece  # Whose SHA-256 is compared before it is used.
        self._file.keep(shard.file, durable=durable)
        with NewFile(self._folder) as file:
            file.write(shard.content())
            name = file.sha256 + _DESCRIPTION
            file.keep(name, durable=durable)
        return name, shard

    def discard(self) -> None:
        """Removes what was written."""
        self._file.discard()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The pictures of a list, all of them prepared."""

    folder: Path
    image_size: int
    listing: Listing
    shards: dict[Split, list[Shard]]  # Of each part, in the list's order.

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of all that a training sees of the pictures."""
        files = {
            f"{split}-{number:05d}.bin": shard.sha256
            for split in SPLITS
            for number, shard in enumerate(self._with_records(split))
        }
        seen = [_PIXELS, self.listing.classes, self.image_shape, sorted(files)]
        digest = hashlib.sha256(json.dumps(seen).encode())
        for split in SPLITS:
            labels = self.labels(split).astype("<i4")
            digest.update(len(labels).to_bytes(8))
            digest.update(labels.tobytes())
        for name in sorted(files):
            digest.update(bytes.fromhex(files[name]))
        return digest.hexdigest()

    @functools.cached_property
    def bad(self) -> dict[int, str]:
        """Why pictures were left out, by their place in the list."""
        every = [shard for split in SPLITS for shard in self.shards[split]]
        starts = np.cumsum([0, *(len(shard.keys) for shard in every)]).tolist()
        return {
            start + place: why
            for start, shard in zip(starts, every, strict=False)
            for place, why in sorted(shard.bad.items())
        }

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
        return [n for n in self.listing.places(split) if n not in self.bad]

    def labels(self, split: Split) -> np.ndarray:
        """Returns the labels of a part, int32 [count]."""
        label = self.listing.label
        return np.array([label[place] for place in self.places(split)], np.int32)

    def paths(self, split: Split) -> list[str]:
        """Returns the name of each record's picture."""
        return [self.listing.path[place] for place in self.places(split)]

    def read(self, split: Split) -> tuple[np.ndarray | ImagesOnDisk, np.ndarray]:
        """Returns the images of a part, in memory or on disk, and its labels in memory.

        Images in memory are compared with the SHA-256 of their files.
        """
        labels = self.labels(split)
        shape = (len(labels), *self.image_shape)
        is_large = int(np.prod(shape, dtype=np.int64)) > IN_MEMORY_BYTES
        try:
            with cache.opened(self.folder) as folder:
                if is_large:
                    return self._on_disk(folder, split, shape), labels
                return self._in_memory(folder, split, shape), labels
        except OSError as error:
            raise UsageError(
                f"The prepared pictures in {printable(str(self.folder))} cannot be "
                f"read: {reason(error)}.\nStart again to have those prepared again "
                "that are missing."
            ) from error

    def _with_records(self, split: Split) -> list[Shard]:
        return [shard for shard in self.shards[split] if len(shard)]

    def _on_disk(
        self, folder: Folder, split: Split, shape: tuple[int, int, int, int]
    ) -> ImagesOnDisk:
        files = [self.folder / shard.file for shard in self._with_records(split)]
        per_shard = records_per_shard(self.record_bytes)
        return ImagesOnDisk(files, shape, per_shard, folder=folder.descriptor)

    def _in_memory(
        self, folder: Folder, split: Split, shape: tuple[int, int, int, int]
    ) -> np.ndarray:
        images = np.empty(shape, np.uint8)
        start = 0
        for shard in self._with_records(split):
            part = images[start : start + len(shard)]
            start += len(shard)
            with folder.open(shard.file) as file:
                file.readinto(part.reshape(-1).data)
            if hashlib.sha256(part.data).hexdigest() != shard.sha256:
                folder.remove(shard.file)
                raise UsageError(
                    f"{printable(str(self.folder / shard.file))} was damaged: it was "
                    "not what had been prepared.\nIt is removed: start again to have "
                    "its pictures prepared again."
                )
        return images
