"""Decodes pictures once, with several threads, into shards of records.

A record holds the RGB pixels of one picture, row by row; a picture that cannot be
decoded has a black record. A shard holds the records of consecutive pictures in the
list, and is named by a hash of their paths, sizes and modification times. A shard is
written atomically, and then entered in the manifest. If the process is killed or the
list changes, the next process keeps the shards that the manifest lists. A lock lets one
process at a time prepare pictures; other processes wait and use the result.

Every start compares all shards with the manifest. Files that differ are ignored, and so
is a damaged manifest or one of another version. The pictures are then prepared again.
"""

import contextlib
import hashlib
import json
import math
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np

from cifar10 import files
from cifar10.errors import UsageError
from cifar10.input.pictures import cache, decoding
from cifar10.input.pictures.listing import File
from cifar10.input.records import SPLITS, Split
from cifar10.process import moving_line

# The version of the fingerprints, which are of the pixels themselves.
PIXELS = 2
# The version of the decoder, in the hashes that name shards. Raise it with any change
# of the decoded pixels, or of what can be decoded.
_DECODER = 4

# A kill loses the work on at most one shard. The 1,024 files that a process may open by
# default hold four million pictures.
SHARD_PICTURES = 4096
_SHARD_BYTES = 256_000_000
# The records of a split are hashed in blocks of this size. Fingerprints depend on it.
HASHED_BYTES = 256_000_000
# A split up to this size becomes an array in memory, like CIFAR. Any machine that
# trains has room for a training and a test split, and for copies in batches.
IN_MEMORY_BYTES = 2**30

# One thread per core, and a spare one while another waits for the disk. More threads
# only wait for Python's lock: four were a sixth slower (`dev/LOG.md`).
_THREADS = len(os.sched_getaffinity(0)) + 1

_MANIFEST = "manifest.json"
# By file name, the SHA-256 of each shard, and by path, why its pictures are left out.
_Manifest: TypeAlias = dict[str, tuple[str, dict[str, str]]]


class ImagesOnDisk:
    """The images of one split, in files that contain only pixels.

    Each batch reads only its own images. That takes a third of the time of mapping
    files into memory. Mapped pages are loaded one page fault at a time, and count as
    the process's memory until they are unmapped (`dev/LOG.md`).

    Index this object like a NumPy array of all images, by a slice or by an array.
    Several threads may read at once. The files must not change.

    Args:
        paths: The files, in order.
        image_shape: Height, width and channels of every image.
        per_file: Number of images in each file; the last file may have fewer.
        indices: int64 [count], the index of each image among all images in the files.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        paths: Sequence[Path],
        image_shape: tuple[int, int, int],
        per_file: int,
        indices: np.ndarray,
    ) -> None:
        self.shape = (len(indices), *image_shape)
        self._image_bytes = math.prod(image_shape)
        self.nbytes = len(indices) * self._image_bytes
        self._per_file, self._indices = per_file, indices
        opened = contextlib.ExitStack()
        weakref.finalize(self, opened.close)
        found = (files.opened(path, buffering=0) for path in paths)
        self._files = [*map(opened.enter_context, found)]
        for file in self._files:
            # Batches are random, so reading ahead would not help.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        """Reads the chosen images, uint8 [count, height, width, channels]."""
        numbers, indices = np.divmod(self._indices[chosen], self._per_file)
        size = self._image_bytes
        images = np.empty((len(numbers), *self.shape[1:]), np.uint8)
        holding = [self._files[number] for number in numbers]
        wanted = [*zip(holding, (indices * size).tolist(), strict=True)]
        # Request all images from the disk before waiting for the first.
        for file, start in wanted:
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
        for row, (file, start) in zip(images.reshape(-1, size), wanted, strict=True):
            if os.preadv(file.fileno(), [row.data], start) != size:
                where = f"{file.name} is damaged at byte {start:,}"
                raise UsageError(f"{where}. Repeat the command to recreate it.")
        return images


class Shards:
    """The pictures of a list, decoded into shards in a cache folder.

    Args:
        home: The cache folder, one for each source of pictures and each size.
        source: The folder of the pictures.
        listed: The pictures.
        given: str [count], the split of each picture.
        side: Height and width of the decoded pictures.
    """

    def __init__(
        self, home: Path, source: Path, listed: list[File], given: np.ndarray, side: int
    ) -> None:
        self._home, self._source = home, source
        self._shape = (side, side, 3)
        fitting = _SHARD_BYTES // math.prod(self._shape)
        self._per_shard = max(1, min(SHARD_PICTURES, fitting))
        # The pictures of each shard, by file name.
        self._listed: dict[str, list[File]] = {}
        for start in range(0, len(listed), self._per_shard):
            some = listed[start : start + self._per_shard]
            digest = hashlib.sha256(json.dumps([_DECODER, some]).encode())
            self._listed[f"{digest.hexdigest()}.bin"] = some
        splits = [split for split in SPLITS if split == "test" or split in given]
        with cache.opened(home):
            shards = self._intact_shards()
            if len(shards) < len(self._listed):
                waiting = "Waiting for another process to prepare the pictures ..."
                with files.locked(home / ".lock", waiting):
                    shards = self._prepare()
            bad = (shards[file][1] for file in self._listed)
            # The reason for leaving out each bad picture, by path.
            self.left_out = {path: why for some in bad for path, why in some.items()}
            is_good = np.array([path not in self.left_out for path, _, _ in listed])
            self.indices: dict[Split, np.ndarray] = {
                split: np.flatnonzero(is_good & (given == split)) for split in splits
            }
            # The SHA-256 of each block of the pixels.
            self.hashes = {split: _hashes_of(self._on_disk(split)) for split in splits}

    def read(self, split: Split) -> np.ndarray | ImagesOnDisk:
        """Returns the images of a split, in memory or on disk."""
        with cache.opened(self._home):
            on_disk = self._on_disk(split)
            return on_disk if on_disk.nbytes > IN_MEMORY_BYTES else on_disk[:]

    def _on_disk(self, split: Split) -> ImagesOnDisk:
        paths = [self._home / file for file in self._listed]
        return ImagesOnDisk(paths, self._shape, self._per_shard, self.indices[split])

    def _intact_shards(self) -> _Manifest:
        """Reads the manifest; drops shards that are missing or differ from it."""
        shards = cache.load(self._home / _MANIFEST, _Manifest) or {}
        intact = {}
        for file in self._listed:
            with contextlib.suppress(KeyError, OSError):
                if shards[file][0] == files.sha256(self._home / file):
                    intact[file] = shards[file]
        return intact

    def _prepare(self) -> _Manifest:
        """Decodes pictures without an intact shard; saves the manifest after each."""
        # Another process may have prepared pictures before this one got the lock.
        shards = self._intact_shards()
        cache.remove_others(self._home, shards)
        # Pillow warns of unusual metadata, but does not name the file.
        total = sum(map(len, self._listed.values()))
        done = sum(len(self._listed[file]) for file in shards)
        counting = moving_line.counting("Preparing pictures", total, done, first=5.0)
        with warnings.catch_warnings(action="ignore"), counting as advance:
            for file in [file for file in self._listed if file not in shards]:
                shards[file] = self._write_shard(file, done, advance)
                done += len(self._listed[file])
                cache.save(self._home / _MANIFEST, shards)
        return shards

    def _write_shard(
        self, file: str, done: int, advance: Callable[[int], None]
    ) -> tuple[str, dict[str, str]]:
        """Decodes a shard's pictures into its file; returns its manifest's entry."""
        listed = self._listed[file]
        images = np.zeros((len(listed), *self._shape), np.uint8)

        def decode(index: int) -> str | None:
            name, _, _ = listed[index]
            content = decoding.read(self._source / name)
            try:
                images[index] = decoding.decode(content, name, *self._shape[:2])
            except decoding.PictureError as error:
                return str(error)
            return None

        bad: dict[str, str] = {}
        with ThreadPoolExecutor(_THREADS) as pool:
            for index, why in enumerate(pool.map(decode, range(len(listed)))):
                if why:
                    bad[listed[index][0]] = why
                advance(done + index + 1)
        files.write_atomically(self._home / file, images.tobytes())
        return hashlib.sha256(images.data).hexdigest(), bad


def _hashes_of(images: ImagesOnDisk) -> list[str]:
    """Returns the SHA-256 of each block of images; reads one block at a time."""
    block = max(1, HASHED_BYTES // math.prod(images.shape[1:]))
    return [
        hashlib.sha256(images[first : first + block].data).hexdigest()
        for first in range(0, len(images), block)
    ]
