"""Decodes the pictures of a list once, by several threads, into shards of records.

A record is the pixels of a picture, row by row, red, green and blue; that of a picture
that is left out is black. A shard has the records of pictures that follow one another
in the list, and its file is named by their SHA-256. It is written whole or not at all,
and then entered in the manifest: a process that was killed, or whose list has changed,
goes on with the shards that are entered. Once all are, shards of other pictures are
removed. A lock lets one process at a time prepare; any other waits and finds the work
done.

Whatever in the folder is not as the manifest says counts for nothing, and neither does
a manifest that this version has not written: the pictures are prepared again.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np

from cifar10.config.options import is_a
from cifar10.errors import say
from cifar10.input.on_disk import ImagesOnDisk
from cifar10.input.pictures import cache, decoding
from cifar10.input.pictures.cache import Folder
from cifar10.input.pictures.decoding import PictureError, UnreadableError
from cifar10.input.pictures.listing import Listing
from cifar10.input.progress import progress
from cifar10.input.records import SPLITS

# Raised with any change of what is written, so that older files are not mistaken for
# it; changed pixels change every fingerprint too.
_FORMAT = 4
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

# The path of a picture, and what reads its file.
_Picture: TypeAlias = tuple[str, Callable[[], bytes]]
# By the number of a part, as in `SPLITS`: the SHA-256 of each block of its records.
Hashes: TypeAlias = list[list[str]]


@dataclasses.dataclass(frozen=True)
class Shard:
    """What the manifest says of a shard."""

    key: str  # SHA-256 of its pictures' paths, sizes and times of change.
    sha256: str  # Of its records.
    bad: dict[int, str]  # Why pictures are left out, by their place in the shard.
    unreadable: list[int]  # Those whose content could not be read, which may change.

    @classmethod
    def of(cls, key: Any, sha256: Any, bad: Any, unreadable: Any) -> Self:
        """Checks the values of a manifest; any exception means that they are wrong."""
        shard = cls(key, sha256, {int(at): why for at, why in bad.items()}, unreadable)
        if (
            is_a([key, sha256, *bad.values()], list[str])
            and is_a(unreadable, list[int])
            and re.fullmatch("[0-9a-f]{64}", sha256)
            and {*unreadable} <= {*shard.bad} <= {*range(SHARD_PICTURES)}
        ):
            return shard
        raise ValueError("these are not the values of a shard")

    @property
    def file(self) -> str:
        """The name of the file of records."""
        return f"{self.sha256}.bin"


@dataclasses.dataclass(frozen=True)
class _Manifest:
    """The shards that are complete, and the hashes of what was made of them."""

    shards: dict[str, Shard]  # By their keys.
    hashes: dict[str, Hashes]  # By what they are of, as in `_Preparation`.

    @classmethod
    def read(cls, folder: Folder) -> Self:
        """Reads the manifest; it is empty unless this version has written all of it."""
        values = folder.load(_MANIFEST)
        with contextlib.suppress(TypeError, ValueError, LookupError, AttributeError):
            shards = [Shard.of(*one) for one in values["shards"]]
            hashes = values["hashes"]
            is_right = all(
                is_a(of_one, list[list[str]]) and len(of_one) == len(SPLITS)
                for of_one in hashes.values()
            )
            if is_right and values["format"] == _FORMAT:
                return cls({shard.key: shard for shard in shards}, hashes)
        return cls({}, {})

    def write(self, folder: Folder) -> None:
        """Replaces the manifest once this one is on the disk."""
        shards = [[*vars(shard).values()] for shard in self.shards.values()]
        values = {"format": _FORMAT, "shards": shards, "hashes": self.hashes}
        folder.save(_MANIFEST, values)


class Prepared(NamedTuple):
    """All pictures of a list, prepared."""

    image_size: int
    shards: list[Shard]  # In the list's order.
    hashes: Hashes

    def images(self, folder: Folder, places: np.ndarray) -> ImagesOnDisk:
        """Returns the images of the pictures at some places in the list."""
        return ImagesOnDisk(
            [folder.path / shard.file for shard in self.shards],
            (len(places), self.image_size, self.image_size, 3),
            _pictures_per_shard(self.image_size),
            chosen=places,
            folder=folder.descriptor,
        )

    def left_out(self) -> dict[int, str]:
        """Returns why pictures are left out, by their places in the list."""
        length = _pictures_per_shard(self.image_size)
        return {
            number * length + place: why
            for number, shard in enumerate(self.shards)
            for place, why in sorted(shard.bad.items())
        }


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
        is_readable: Whether a picture that was not readable earlier, by its place in
            the list, is now.
    """
    with cache.opened(home) as folder:
        work = _Preparation(folder, listing, contents, image_size, is_readable)
        found = work.found()
        if found is None:
            with folder.locked():
                found = work.found() or work.prepare()
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


def forget(folder: Folder) -> None:
    """Has all pictures prepared again."""
    with folder.locked():
        folder.remove(_MANIFEST)


def _pictures_per_shard(image_size: int) -> int:
    return max(1, min(SHARD_PICTURES, _SHARD_BYTES // (image_size**2 * 3)))


class _Preparation:
    """One list's way from files to shards."""

    def __init__(
        self,
        folder: Folder,
        listing: Listing,
        contents: Iterable[Callable[[], bytes]],
        image_size: int,
        is_readable: Callable[[int], bool],
    ) -> None:
        self._folder = folder
        self._listing = listing
        self._contents = contents
        self._size = image_size
        self._is_readable = is_readable
        length = _pictures_per_shard(image_size)
        every = range(len(listing))
        self._places = [every[first : first + length] for first in every[::length]]
        self._keys = [listing.key(places) for places in self._places]

    def found(self) -> Prepared | None:
        """Returns the pictures if all of them are prepared."""
        manifest = _Manifest.read(self._folder)
        shards = [
            shard
            for key, places in zip(self._keys, self._places, strict=True)
            if (shard := manifest.shards.get(key)) and self._is_there(shard, places)
        ]
        hashes = manifest.hashes.get(self._used(shards))
        if hashes is None or len(shards) < len(self._keys):
            return None
        return Prepared(self._size, shards, hashes)

    def prepare(self) -> Prepared:
        """Prepares what is left, and removes what belongs to other pictures."""
        folder, before = self._folder, _Manifest.read(self._folder)
        complete = {
            key: shard
            for key, places in zip(self._keys, self._places, strict=True)
            if (shard := before.shards.get(key))
            and self._is_there(shard, places)
            and folder.sha256(shard.file) == shard.sha256
        }
        now = _Manifest(complete, before.hashes)
        for name in folder.names():
            if name.startswith("."):  # Of a process that was killed.
                folder.remove(name)
        if len(complete) < len(self._keys):
            now = _Manifest(complete, {})
            for note in self._listing.notes:
                say(f"Note: {note}.")
            self._decode_shards(now)
        shards = [now.shards[key] for key in self._keys]
        prepared = Prepared(self._size, shards, [])
        left_out = prepared.left_out()
        for split in SPLITS:
            places = self._listing.places(split, left_out)
            prepared.hashes.append(hashes_of(prepared.images(folder, places)))
        now.hashes[self._used(shards)] = prepared.hashes
        now.write(folder)
        kept = {shard.file for shard in shards}
        for name in folder.names():
            if name not in kept:
                folder.remove(name)
        return prepared

    def _is_there(self, shard: Shard, places: range) -> bool:
        """Returns whether a shard has its file, and no picture to read once more."""
        return (
            self._folder.size(shard.file) == len(places) * self._size**2 * 3
            and max(shard.bad, default=0) < len(places)
            and not any(self._is_readable(places[place]) for place in shard.unreadable)
        )

    def _used(self, shards: list[Shard]) -> str:
        """Returns a name of shards and of how their pictures are divided."""
        seen = [(shard.sha256, sorted(shard.bad)) for shard in shards]
        division = np.packbits(self._listing.is_test).tobytes().hex()
        return hashlib.sha256(json.dumps([seen, division]).encode()).hexdigest()

    def _decode_shards(self, manifest: _Manifest) -> None:
        """Decodes the shards that the manifest lacks, and enters each when complete."""
        complete = sum(
            len(places)
            for key, places in zip(self._keys, self._places, strict=True)
            if key in manifest.shards
        )
        pool = ThreadPoolExecutor(_THREADS)
        with contextlib.ExitStack() as stack:
            # After a full disk or Ctrl-C, nothing more is begun.
            stack.callback(pool.shutdown, cancel_futures=True)
            # Pillow warns of odd data beside the pixels without saying in which file.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            report = stack.enter_context(
                progress("Preparing", "pictures", len(self._listing), complete)
            )
            pictures = self._reported(report)
            for key, places in zip(self._keys, self._places, strict=True):
                of_shard = itertools.islice(pictures, len(places))
                if key in manifest.shards:
                    deque(of_shard, maxlen=0)  # Some sources are read in order alone.
                else:
                    results = self._decoded(pool, of_shard)
                    manifest.shards[key] = self._written(key, results)
                    manifest.write(self._folder)

    def _reported(self, report: Callable[[int], None]) -> Iterator[_Picture]:
        """Yields the path of each picture and what reads it."""
        pictures = zip(self._listing.files, self._contents, strict=True)
        for done, ((path, _, _), read) in enumerate(pictures):
            report(done)
            yield path, read

    def _written(self, key: str, results: Iterable[bytes | PictureError]) -> Shard:
        """Writes a shard."""
        bad: dict[int, str] = {}
        unreadable: list[int] = []

        def records() -> Iterator[bytes]:
            for place, result in enumerate(results):
                if isinstance(result, bytes):
                    yield result
                    continue
                bad[place] = str(result)
                if isinstance(result, UnreadableError):
                    unreadable.append(place)
                yield bytes(self._size**2 * 3)

        return Shard(key, self._folder.write(records()), bad, unreadable)

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
                image = decoding.decode(read(), path, self._size, self._size)
                results.append(image.tobytes())
            except PictureError as error:
                results.append(error)
        return results
