"""A folder of pictures as a data set."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from cifar10.errors import say
from cifar10.input.pictures import decoding, preparation, scanning
from cifar10.input.pictures.dataset import PreparedDataset


def find(
    directory: Path,
    *,
    image_size: int,
    validation_fraction: float,
    max_bad_images: float,
    cache: Path,
    division: str | None = None,
) -> PreparedDataset:
    """Finds the pictures in a folder, and prepares those that are not prepared yet.

    Args:
        directory: The folder. `scanning.py` says how it has to be laid out.
        image_size: Height and width of the images: the shorter side of a picture is
            resized to it, and the centre cut out.
        validation_fraction: The share of the test part of a folder that has none.
        max_bad_images: The share of pictures that may be bad and left out.
        cache: The folder for what is prepared, of all data sets.
        division: How a run's pictures were divided, as in `division.py`.
    """
    directory = directory.expanduser().absolute()
    listing = scanning.scan(directory, validation_fraction, division)

    def read(place: int) -> bytes:
        path = listing.path[place]
        return decoding.read(directory / path, path)

    def contents(first: int) -> Iterator[Callable[[], bytes]]:
        return (functools.partial(read, n) for n in range(first, len(listing)))

    def is_readable(place: int) -> bool:
        return os.access(directory / listing.path[place], os.R_OK)

    home = preparation.folder_for(
        cache, directory.name, os.path.realpath(directory), image_size
    )
    is_new = False

    def announce() -> None:
        nonlocal is_new
        is_new = True
        for note in listing.notes:
            say(f"Note: {note}.")

    prepared = preparation.prepare(
        home,
        listing,
        contents,
        image_size=image_size,
        is_readable=is_readable,
        announce=announce,
    )
    dataset = PreparedDataset.of(
        "folder", directory, prepared, listing.notes, max_bad_images
    )
    if is_new and dataset.bad:
        say(dataset.bad)
    return dataset
