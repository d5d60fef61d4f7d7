"""Pictures that are prepared already, in the folder of an earlier list."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path

from cifar10.input.pictures import journal, shards
from cifar10.input.pictures.listing import Listing
from cifar10.input.pictures.shards import Prepared
from cifar10.input.records import SPLITS, Split

Key = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class Record:
    """Where a folder has the pixels of a picture."""

    path: Path
    place: int
    length: int

    def read(self) -> bytes:
        """Returns the pixels."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.place)
            return file.read(self.length)


def find(folders: Iterable[Path], record_bytes: int) -> dict[Key, Record | str]:
    """Returns the pictures in folders, complete or not, whose SHA-256 are right.

    They are known by path, size and time; a bad one has the reason why it is bad.
    """
    found: dict[Key, Record | str] = {}
    for folder in folders:
        if (complete := shards.load(folder)) is not None:
            listing, bad, unreadable = _in_complete(complete, found)
        elif (begun := journal.listing_in(folder)) is not None:
            listing, bad, unreadable = _in_begun(folder, begun, record_bytes, found)
        else:
            continue
        keys = listing.keys()
        unsettled = set(unreadable)
        found |= {keys[p]: why for p, why in bad.items() if p not in unsettled}
    return found


def _in_complete(
    prepared: Prepared, found: dict[Key, Record | str]
) -> tuple[Listing, dict[int, str], list[int]]:
    keys = prepared.listing.keys()
    length = prepared.record_bytes
    per_shard = shards.records_per_shard(length)
    for split in SPLITS:
        places = prepared.places(split)
        for number, path in enumerate(prepared.shards(split)):
            with contextlib.suppress(OSError), path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest == prepared.digests[path.name]:
                    for row, place in enumerate(
                        places[number * per_shard :][:per_shard]
                    ):
                        found[keys[place]] = Record(path, row * length, length)
    return prepared.listing, prepared.bad, prepared.unreadable


def _in_begun(
    folder: Path, listing: Listing, length: int, found: dict[Key, Record | str]
) -> tuple[Listing, dict[int, str], list[int]]:
    keys = listing.keys()
    per_shard = shards.records_per_shard(length)
    bad: dict[int, str] = {}
    unreadable: list[int] = []
    rows: dict[Split, int] = {"train": 0, "test": 0}
    batches = journal.batches(listing, length)
    believed = journal.believed(folder, listing, length)
    for places, batch in zip(batches, believed, strict=False):
        bad |= batch.bad
        unreadable += batch.unreadable
        for place in places:
            if place not in batch.bad:
                number, row = divmod(rows[batch.split], per_shard)
                path = folder / shards.shard_name(batch.split, number)
                found[keys[place]] = Record(path, row * length, length)
                rows[batch.split] += 1
    return listing, bad, unreadable
