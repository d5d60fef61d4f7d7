"""Records while they are written: a folder that grows, and may stop at any moment.

A batch of records is appended to the files first, and then its line, with their
SHA-256, to the journal. After a kill, or after the power has failed, the lines that
agree with the records are believed, up to the first that does not.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cifar10.config import regular_files
from cifar10.input.pictures import shards
from cifar10.input.pictures.listing import Listing
from cifar10.input.records import Split

# What a kill may cost: the batches that are being decoded.
BATCH = 32
_BATCH_BYTES = 2**23

_LISTING = "listing.json"
_JOURNAL = "journal"


def batches(listing: Listing, record_bytes: int) -> list[range]:
    """Returns the places in the list that each line of the journal is about."""
    return listing.batches(max(1, min(BATCH, _BATCH_BYTES // record_bytes)))


def begin(folder: Path, listing: Listing) -> None:
    """Makes the folder for the records of a list, unless it is there."""
    folder.mkdir(exist_ok=True)
    if not (folder / _LISTING).exists():
        content = json.dumps(listing.columns()).encode()
        regular_files.write_atomically(folder / _LISTING, content)


def end(folder: Path) -> None:
    """Removes what a complete folder does not need."""
    for name in (_JOURNAL, _LISTING):
        (folder / name).unlink(missing_ok=True)


def listing_in(folder: Path) -> Listing | None:
    """Returns the list whose records a folder was to have; None if it is not known."""
    try:
        return Listing.from_columns(json.loads((folder / _LISTING).read_bytes()))
    except (OSError, ValueError):
        return None


@dataclasses.dataclass(frozen=True)
class Batch:
    """Decoded pictures that follow one another in the list."""

    split: Split
    records: bytes  # Those of the good ones.
    bad: dict[int, str]
    unreadable: list[int]

    def line(self) -> bytes:
        """Returns the line of the journal."""
        entry = {
            "bad": {str(place): why for place, why in self.bad.items()},
            "unreadable": self.unreadable,
            "sha256": hashlib.sha256(self.records).hexdigest(),
        }
        return (json.dumps(entry) + "\n").encode()


def believed(folder: Path, listing: Listing, record_bytes: int) -> Iterator[Batch]:
    """Yields the batches that a folder has, as far as their SHA-256 are right."""
    shard_bytes = shards.records_per_shard(record_bytes) * record_bytes
    begun: dict[Split, int] = {"train": 0, "test": 0}
    try:
        lines = (folder / _JOURNAL).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return
    for places, line in zip(batches(listing, record_bytes), lines, strict=False):
        try:
            entry = json.loads(line)
        except ValueError:  # It was being written.
            return
        bad = {int(place): why for place, why in entry["bad"].items()}
        split = listing.split(places.start)
        length = (len(places) - len(bad)) * record_bytes
        records = _read(folder, split, begun[split], length, shard_bytes)
        batch = Batch(split, records, bad, entry["unreadable"])
        if batch.line() != line:
            return
        begun[split] += length
        yield batch


def _read(folder: Path, split: Split, begin: int, length: int, shard: int) -> bytes:
    """Returns bytes of the records of a part, fewer if there are not so many."""
    content = b""
    while len(content) < length:
        number, place = divmod(begin + len(content), shard)
        try:
            with (folder / shards.shard_name(split, number)).open("rb") as file:
                file.seek(place)
                piece = file.read(min(length - len(content), shard - place))
        except FileNotFoundError:
            piece = b""
        if not piece:
            break
        content += piece
    return content


@contextlib.contextmanager
def continued(folder: Path, believed: int) -> Iterator[BinaryIO]:
    """Opens the journal after the lines that are believed."""
    path = folder / _JOURNAL
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    with path.open("ab") as file:
        file.truncate(sum(map(len, lines[:believed])))
        yield file


class Writer:
    """Appends records to the files of a folder, and knows their SHA-256."""

    def __init__(self, folder: Path, record_bytes: int) -> None:
        self.digests: dict[str, str] = {}
        self._folder = folder
        self._shard_bytes = shards.records_per_shard(record_bytes) * record_bytes
        self._written: dict[Split, int] = {"train": 0, "test": 0}
        self._sizes: dict[str, int] = {}
        self._name = ""
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def append(self, batch: Batch, *, is_there: bool = False) -> None:
        """Writes the records of a batch, unless they are there already."""
        content = memoryview(batch.records)
        while content:
            number, place = divmod(self._written[batch.split], self._shard_bytes)
            name = shards.shard_name(batch.split, number)
            if name != self._name:
                self.close()
                self._name, self._digest = name, hashlib.sha256()
            piece = content[: self._shard_bytes - place]
            if not is_there:
                file = self._open(name, place)
                file.write(piece)
                file.flush()  # The journal names what the system has been given.
            self._digest.update(piece)
            self._sizes[name] = place + len(piece)
            self._written[batch.split] += len(piece)
            content = content[len(piece) :]

    def _open(self, name: str, place: int) -> BinaryIO:
        if self._file is None:
            path = self._folder / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            self._file = os.fdopen(descriptor, "wb")
            self._file.seek(place)
        return self._file

    def close(self) -> None:
        """Closes the file that is being written."""
        if self._name:
            self.digests[self._name] = self._digest.hexdigest()
        if self._file is not None:
            self._file.close()
        self._file = None

    def finish(self) -> None:
        """Waits until everything is on the disk, and removes what else is there."""
        self.close()
        for name in self.digests:
            os.truncate(self._folder / name, self._sizes[name])
            regular_files.sync(self._folder / name)
        for path in self._folder.glob("*.bin"):
            if path.name not in self.digests:
                path.unlink()
