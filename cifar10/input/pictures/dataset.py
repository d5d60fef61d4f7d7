"""Data sets of prepared pictures, and how a folder becomes such a data set."""

import dataclasses
import functools
import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError, first_few, printable, say
from cifar10.input.dataset_base import Dataset
from cifar10.input.on_disk import ImagesOnDisk
from cifar10.input.pictures import cache, decoding, listing as lists, preparation
from cifar10.input.pictures.listing import Listing
from cifar10.input.pictures.preparation import Prepared
from cifar10.input.records import SPLITS, Split

FOLDER = "folder"

# Part of every fingerprint; raised if the decoder makes other pixels.
_PIXELS = 2
# A part of the data up to this size becomes an array in memory, like CIFAR: any
# machine that trains has room for both parts and for the batches' copies.
IN_MEMORY_BYTES = 2**30
# The score of a class with fewer test pictures is chance.
_ENOUGH = 5
_SHOWN = 5  # Classes or pictures in a message.


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureDataset(Dataset):
    """Pictures of one size, on this machine."""

    directory: Path  # The source of the pictures.
    home: Path  # The folder of the cache that holds them.
    listing: Listing
    prepared: Prepared
    division: str | None  # Into parts; None if there was a test part.
    left_out: dict[str, str]  # Why pictures are left out, by their paths.

    def paths(self, split: Split) -> list[str]:
        """Returns the name of each image's picture."""
        return [self.listing.files[place][0] for place in self._places(split)]

    def labels(self, split: Split) -> np.ndarray:
        """Returns the labels of a part, int32 [count]."""
        return np.array(self.listing.labels, np.int32)[self._places(split)]

    def read(self, split: Split) -> tuple[np.ndarray | ImagesOnDisk, np.ndarray]:
        """Returns the images of a part, in memory or on disk, and its labels in memory.

        Images in memory are compared with their hashes.
        """
        with cache.opened(self.home) as folder:
            images = self.prepared.images(folder, self._places(split))
            if images.nbytes > IN_MEMORY_BYTES:
                return images, self.labels(split)
            in_memory = images[:]
            hashes = self.prepared.hashes[SPLITS.index(split)]
            if preparation.hashes_of(in_memory) != hashes:
                preparation.forget(folder)
                raise UsageError(
                    f"The prepared pictures in {printable(str(self.home))} were "
                    "damaged: they are not what had been prepared.\nStart again to "
                    "have them prepared again."
                )
        return in_memory, self.labels(split)

    def _places(self, split: Split) -> np.ndarray:
        return self.listing.places(split, self.prepared.left_out)


def find_folder(
    directory: Path,
    *,
    image_size: int,
    validation_fraction: float,
    max_bad_images: float,
    cache_home: Path,
    division: str | None = None,
) -> PictureDataset:
    """Finds the pictures in a folder, and prepares the new ones.

    Args:
        directory: The folder. `listing.py` says how it has to be laid out.
        image_size: Height and width of the images: the shorter side of a picture is
            resized to it, and the centre cut out.
        validation_fraction: The share of the test part of a folder that has none.
        max_bad_images: The share of pictures that may be bad and left out.
        cache_home: The folder for the prepared pictures of all data sets.
        division: How a run's pictures were divided, as `listing.divided` returns it.
    """
    directory = directory.expanduser().absolute()
    listing = lists.list_folder(directory, validation_fraction, division)

    contents = (
        functools.partial(decoding.read, directory / path, path)
        for path, _, _ in listing.files
    )

    def is_readable(place: int) -> bool:
        return os.access(directory / listing.files[place][0], os.R_OK)

    place = os.path.realpath(directory)
    home = cache.folder_for(cache_home, directory.name, place, image_size)
    prepared = preparation.prepare(home, listing, contents, image_size, is_readable)
    return picture_dataset(FOLDER, directory, home, listing, prepared, max_bad_images)


def picture_dataset(
    name: str,
    directory: Path,
    home: Path,
    listing: Listing,
    prepared: Prepared,
    max_bad_images: float,
) -> PictureDataset:
    """Returns prepared pictures as a data set, or refuses them.

    Raises:
        UsageError: More than `max_bad_images` of all are left out, or a part has none.
    """
    where = printable(str(directory if name == FOLDER else name))
    bad, side = len(prepared.left_out), prepared.image_size
    left_out = f" ({bad:,} bad ones left out)" if bad else ""
    dataset = PictureDataset(
        name=name,
        directory=directory,
        home=home,
        listing=listing,
        prepared=prepared,
        image_shape=(side, side, 3),
        class_names=tuple(listing.classes),
        division=listing.division,
        left_out={listing.files[n][0]: why for n, why in prepared.left_out.items()},
        description=(
            f"{len(listing) - bad:,} pictures of {len(listing.classes):,} classes at "
            f"{side} x {side} in {where}{left_out}"
        ),
    )
    _check(dataset, max_bad_images, where)
    _warn_of_few(dataset)
    return dataclasses.replace(dataset, fingerprint=_fingerprint(dataset))


def _fingerprint(dataset: PictureDataset) -> str:
    """Returns the SHA-256 of the pixels, labels and classes that a training sees."""
    hashes = {
        f"{split}-{number:05d}.bin": sha256
        for split, of_part in zip(SPLITS, dataset.prepared.hashes, strict=True)
        for number, sha256 in enumerate(of_part)
    }
    seen = [_PIXELS, dataset.class_names, dataset.image_shape, sorted(hashes)]
    digest = hashlib.sha256(json.dumps(seen).encode())
    for split in SPLITS:
        labels = dataset.labels(split).astype("<i4")
        digest.update(len(labels).to_bytes(8))
        digest.update(labels.tobytes())
    for name in sorted(hashes):
        digest.update(bytes.fromhex(hashes[name]))
    return digest.hexdigest()


def _check(dataset: PictureDataset, max_bad_images: float, where: str) -> None:
    """Refuses a data set with too many bad pictures, or with a part without any."""
    total, bad = len(dataset.listing), [*dataset.left_out.values()]
    if len(bad) > max_bad_images * total:
        shown = [*map(printable, bad[:_SHOWN])]
        if len(bad) > len(shown):
            shown.append(f"and {len(bad) - len(shown):,} more.")
        names = "".join(f"\n    {line}" for line in shown)
        raise UsageError(
            f"{len(bad):,} of {total:,} pictures in {where} cannot be used, which is "
            f"more than --max_bad_images {max_bad_images:g} allows:{names}\nRepair or "
            "remove them, or allow them with --max_bad_images "
            f"{math.ceil(100 * len(bad) / total) / 100:g}."
        )
    for split, fix in zip(SPLITS, ("lower", "raise"), strict=True):
        if not dataset.paths(split):
            raise UsageError(
                f"None of the {total:,} pictures in {where} is left for the {split} "
                f"part. Add pictures, or {fix} --validation_fraction."
            )


def _warn_of_few(dataset: PictureDataset) -> None:
    """Warns of classes with too few test pictures to score them by."""
    counts = np.bincount(dataset.labels("test"), minlength=dataset.classes).tolist()
    few = [
        f"{name} ({count:,})"
        for name, count in zip(dataset.class_names, counts, strict=True)
        if count < _ENOUGH
    ]
    if few:
        fix = "Add some to the test part."
        if dataset.division is not None:
            fix = "Add pictures, or raise --validation_fraction."
        say(
            f"WARNING: {len(few):,} of {dataset.classes:,} classes have fewer than "
            f"{_ENOUGH} test pictures, too few to score them by: "
            f"{first_few(few, _SHOWN)}.\n{fix}"
        )
