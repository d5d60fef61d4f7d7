"""Decodes the pictures of a list once, by several threads, into shards of records.

A record is the pixels of a picture, row by row, red, green and blue; the record of a
picture that is left out is black. A shard has the records of pictures that follow one
another in the list, and its file is named by their paths, sizes and times of change. It
is written whole or not at all, and then entered in the manifest: a process that was
killed, or whose list has changed, goes on with the shards that are entered. A lock lets
one process at a time prepare; any other waits and finds the work done.

A file that is not as the manifest says is ignored, and so is a damaged manifest or that
of another version: the pictures are prepared again.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import numpy as np

from cifar10.config.options import is_a
from cifar10.errors import say
from cifar10.input.on_disk import ImagesOnDisk
from cifar10.input.pictures import cache, decoding
from cifar10.input.pictures.decoding import PictureError, UnreadableError
from cifar10.input.pictures.listing import Listing
from cifar10.input.progress import progress
from cifar10.input.records import SPLITS
from cifar10.process import files

# Raised with any change of what is written, so that older files are not mistaken for
# it; changed pixels change every fingerprint too.
_FORMAT = 5
_MANIFEST = "manifest.json"

# A kill costs what was decoded of one shard. The 1,024 files that a process may have
# open by default hold four million pictures.
SHARD_PICTURES = 4096
_SHARD_BYTES = 256_000_000
# A part's records are hashed in blocks of this size, on which its fingerprint depends.
HASHED_BYTES = 256_000_000
_READ_TOGETHER = 1024  # Records in memory at a time meanwhile.

_BATCH = 32  # Pictures that a thread decodes at a time.
# One for each core, and one for when another waits for the disk. More only wait for
# Python's lock: four were a sixth slower (`docs/lab-notes.md`).
_THREADS = len(os.sched_getaffinity(0)) + 1
# So that no thread waits until a batch of large pictures before its own is written.
_BATCHES_PER_THREAD = 2

# The path of a picture, and a function that reads its file.
_Picture: TypeAlias = tuple[str, Callable[[], bytes]]
# The SHA-256 of each block of a part's records, part by part as in `SPLITS`.
Hashes: TypeAlias = list[list[str]]


class _Bad(NamedTuple):
    """A picture that is left out."""

    place: int  # In the shard.
    why: str
    may_change: bool  # The file could not be read, and perhaps can be later.


class _Shard(NamedTuple):
    """A complete shard."""

    sha256: str  # Of its records.
    bad: list[_Bad]


class _Manifest(NamedTuple):
    """The complete shards, and the hashes of the parts of the data set."""

    shards: dict[str, _Shard]  # By their files.
    hashes: dict[str, Hashes]  # By the division of the list into parts.

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the manifest; it is empty unless this version has written all of it."""
        values = cache.load(folder / _MANIFEST)
        if (
            isinstance(values, dict)
            and values.get("format") == _FORMAT
            and is_a(values.get("shards"), _SHARDS)
            and is_a(values.get("hashes"), _HASHES)
        ):
            shards = {
                file: _Shard(sha256, [_Bad(*one) for one in bad])
                for file, (sha256, bad) in values["shards"].items()
            }
            return cls(shards, values["hashes"])
        return cls({}, {})

    def write(self, folder: Path) -> None:
        """Replaces the manifest once this one is on the disk."""
        cache.save(folder / _MANIFEST, {"format": _FORMAT, **self._asdict()})


# Their types in JSON, in which a list stands for a tuple.
_SHARDS = dict[str, tuple[str, list[tuple[int, str, bool]]]]
_HASHES = dict[str, tuple[list[str], list[str]]]


class Prepared(NamedTuple):
    """All pictures of a list, prepared."""

    image_size: int
    files: list[str]  # Names of the shards' files, in the list's order.
    left_out: dict[int, str]  # Why pictures are left out, by their places in the list.
    hashes: Hashes

    def images(self, folder: Path, places: np.ndarray) -> ImagesOnDisk:
        """Returns the images of the pictures at some places in the list."""
        return ImagesOnDisk(
            [folder / file for file in self.files],
            (self.image_size, self.image_size, 3),
            _pictures_per_shard(self.image_size),
            places,
        )


def prepare(
    home: Path,
    listing: Listing,
    contents: Iterable[Callable[[], bytes]],
    image_size: int,
    is_readable: Callable[[int], bool] = lambda _: False,
) -> Prepared:
    """Returns the pictures of a list, prepared in a folder of the cache.

    Args:
        home: The folder: another one for each source of pictures and each size.
        listing: The pictures.
        contents: Functions that read each picture's file. It is iterated over only if
            something has to be decoded.
        image_size: Height and width of the results.
        is_readable: Says whether a picture that could not be read can be read now, by
            its place in the list.
    """
    with cache.opened(home) as folder:
        work = _Preparation(folder, listing, contents, image_size, is_readable)
        found = work.find()
        if found is None:
            with cache.locked(folder):
                found = work.find() or work.prepare()
        return found


def hashes_of(images: np.ndarray | ImagesOnDisk) -> list[str]:
    """Returns the SHA-256 of each block of images, which are read a few at a time."""
    block = max(1, HASHED_BYTES // int(np.prod(images.shape[1:])))
    digests = []
    for first in range(0, len(images), block):
        digest, end = hashlib.sha256(), min(first + block, len(images))
        for start in range(first, end, _READ_TOGETHER):
            digest.update(images[start : min(start + _READ_TOGETHER, end)].data)
        digests.append(digest.hexdigest())
    return digests


def forget(folder: Path) -> None:
    """Has all pictures prepared again."""
    with cache.locked(folder):
        (folder / _MANIFEST).unlink(missing_ok=True)


def _pictures_per_shard(image_size: int) -> int:
    return max(1, min(SHARD_PICTURES, _SHARD_BYTES // (image_size**2 * 3)))


@dataclasses.dataclass
class _Preparation:
    """The preparation of one list of pictures in one folder; see `prepare`."""

    folder: Path
    listing: Listing
    contents: Iterable[Callable[[], bytes]]
    size: int
    is_readable: Callable[[int], bool]

    def __post_init__(self) -> None:
        every, length = range(len(self.listing)), _pictures_per_shard(self.size)
        shards = [every[first : first + length] for first in every[::length]]
        # The pictures of each shard, by its file.
        self.places = {f"{self.listing.key(places)}.bin": places for places in shards}
        seen = [[*self.places], np.packbits(self.listing.is_test).tobytes().hex()]
        self.division = hashlib.sha256(json.dumps(seen).encode()).hexdigest()

    def find(self) -> Prepared | None:
        """Returns the pictures; None unless all of them are prepared."""
        manifest = _Manifest.read(self.folder)
        hashes = manifest.hashes.get(self.division)
        if hashes is None or len(self._complete(manifest)) < len(self.places):
            return None
        return self._prepared(manifest, hashes)

    def prepare(self) -> Prepared:
        """Prepares the missing shards, and removes those of other pictures."""
        folder, manifest = self.folder, _Manifest.read(self.folder)
        complete = {
            file: shard
            for file, shard in self._complete(manifest).items()
            if files.sha256(folder / file) == shard.sha256
        }
        cache.remove_others(folder, complete)
        if len(complete) < len(self.places):
            manifest = _Manifest(complete, {})
            for note in self.listing.notes:
                say(f"Note: {note}.")
            self._decode_shards(manifest)
        prepared = self._prepared(manifest, [])
        for split in SPLITS:
            places = self.listing.places(split, prepared.left_out)
            prepared.hashes.append(hashes_of(prepared.images(folder, places)))
        manifest.hashes[self.division] = prepared.hashes
        manifest.write(folder)
        return prepared

    def _complete(self, manifest: _Manifest) -> dict[str, _Shard]:
        """Returns the shards with a file, and without a picture to read again."""
        return {
            file: manifest.shards[file]
            for file, places in self.places.items()
            if file in manifest.shards
            and (path := self.folder / file).is_file()
            # Of the file itself, not of what a link leads to.
            and path.lstat().st_size == len(places) * self.size**2 * 3
            and not any(
                bad.place not in range(len(places))
                or (bad.may_change and self.is_readable(places[bad.place]))
                for bad in manifest.shards[file].bad
            )
        }

    def _prepared(self, manifest: _Manifest, hashes: Hashes) -> Prepared:
        left_out = {
            places[bad.place]: bad.why
            for file, places in self.places.items()
            for bad in manifest.shards[file].bad
        }
        return Prepared(self.size, [*self.places], left_out, hashes)

    def _decode_shards(self, manifest: _Manifest) -> None:
        """Decodes the shards that the manifest lacks, and enters each when complete."""
        complete = sum(len(self.places[file]) for file in manifest.shards)
        pool = ThreadPoolExecutor(_THREADS)
        with contextlib.ExitStack() as stack:
            # After a full disk or Ctrl-C, nothing more is begun.
            stack.callback(pool.shutdown, cancel_futures=True)
            # Pillow warns of odd data beside the pixels without saying in which file.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            report = stack.enter_context(
                progress("Preparing", "pictures", len(self.listing), complete)
            )
            pictures = self._reported(report)
            for file, places in self.places.items():
                of_shard = itertools.islice(pictures, len(places))
                if file in manifest.shards:
                    deque(of_shard, maxlen=0)  # Some sources are read in order alone.
                else:
                    results = self._decoded(pool, of_shard)
                    manifest.shards[file] = self._write_shard(file, results)
                    manifest.write(self.folder)

    def _reported(self, report: Callable[[int], None]) -> Iterator[_Picture]:
        """Yields the pictures, and reports how many have been taken."""
        pictures = zip(self.listing.files, self.contents, strict=True)
        for done, ((path, _, _), read) in enumerate(pictures):
            report(done)
            yield path, read

    def _write_shard(
        self, file: str, results: Iterable[bytes | PictureError]
    ) -> _Shard:
        bad: list[_Bad] = []
        digest = hashlib.sha256()

        def records() -> Iterator[bytes]:
            for place, result in enumerate(results):
                if isinstance(result, bytes):
                    record = result
                else:
                    record = bytes(self.size**2 * 3)
                    may_change = isinstance(result, UnreadableError)
                    bad.append(_Bad(place, str(result), may_change))
                digest.update(record)
                yield record

        files.write_atomically(self.folder / file, records())
        return _Shard(digest.hexdigest(), bad)

    def _decoded(
        self, pool: ThreadPoolExecutor, pictures: Iterator[_Picture]
    ) -> Iterator[bytes | PictureError]:
        """Yields the records of pictures, or why they are left out, in order."""
        running: deque[Future[list[bytes | PictureError]]] = deque()
        while batch := list(itertools.islice(pictures, _BATCH)):
            running.append(pool.submit(self._decode, batch))
            if len(running) >= _THREADS * _BATCHES_PER_THREAD:
                yield from running.popleft().result()
        while running:
            yield from running.popleft().result()

    def _decode(self, batch: list[_Picture]) -> list[bytes | PictureError]:
        results: list[bytes | PictureError] = []
        for path, read in batch:
            try:
                image = decoding.decode(read(), path, self.size, self.size)
                results.append(image.tobytes())
            except PictureError as error:
                results.append(error)
        return results
