"""Finds CIFAR-10, CIFAR-100 or the synthetic stand-in; downloads or generates them.

A damaged copy is an error, and no other data set is used instead. No message gives the
name CIFAR-10 to the stand-in.
"""

import functools
import os
from pathlib import Path

from cifar10.config import layout
from cifar10.errors import UsageError, say
from cifar10.input import download, records, synthetic
from cifar10.input.dataset_base import Dataset

FORMATS = {
    file_format.name: file_format
    for file_format in (records.CIFAR10, records.CIFAR100, synthetic.FORMAT)
}


def find(data: str, data_dir: str | None, data_url: str | None) -> Dataset:
    """Finds a data set, and downloads or generates a missing one.

    Args:
        data: "cifar10" or "cifar100" for a local copy or else a download; "synthetic"
            for the generated stand-in; "auto" for CIFAR-10 if available, else the
            stand-in.
        data_dir: Folder that holds the data files, the unpacked archive or the archive.
            Nothing is written to it. If `data_dir` is None, the folder that the
            environment variable CIFAR10_DATA_DIR names, or else ~/.cache/cifar10, is
            searched, and a missing data set is downloaded to it.
        data_url: URL of the archive, or of its folder with a slash at the end.
    """
    named = data_dir or os.environ.get("CIFAR10_DATA_DIR")
    directory = layout.absolute_path(named) if named else cache()
    with records.explained(directory):
        if data == "synthetic":
            home = directory if data_dir else None
            return _stand_in("--data synthetic", home)
        name = "cifar10" if data == "auto" else data
        file_format = FORMATS[name]
        files = file_format.train_files + file_format.test_files
        if any((directory / file).exists() for file in files):
            return _checked(name, directory)
        if (directory / file_format.folder).exists():
            return _checked(name, directory / file_format.folder)
        packed = directory / file_format.archive
        if packed.exists():
            home = cache() if data_dir else directory
            return _checked(name, download.fetch(file_format, home, packed=packed))
        if data_dir:
            raise UsageError(
                f"--data_dir {data_dir} holds no {file_format.title}: neither "
                f"{files[0]} nor {file_format.folder} nor {file_format.archive}.\n"
                f"Correct --data_dir, or omit it to download {file_format.title}."
            )
        try:
            folder = download.fetch(file_format, directory, data_url)
        except UsageError as error:
            wanted = f"{packed.name} or its folder {file_format.folder}"
            problem = (
                f"No {file_format.title} in {directory}: {error}\nPut {wanted} there"
            )
            if data == "auto":
                say(f"{problem}, or give --data_dir.\nUsing the SYNTHETIC stand-in.")
                return _stand_in(f"none in {directory} and no download")
            raise type(error)(
                f"{problem}, or give --data_dir, --data_url or --data synthetic."
            ) from error
        return _checked(name, folder)


def cache() -> Path:
    """Returns ~/.cache/cifar10, the default folder for all data of the package."""
    return layout.absolute_path("~/.cache/cifar10")


def _stand_in(reason: str, home: Path | None = None) -> Dataset:
    """Returns the synthetic data in `home`, or by default in the cache.

    Generates missing data, but only in the cache.
    """
    place = home or cache()
    # A user, or a run's `config.json`, may name the stand-in's own folder.
    directory = place if place.name == synthetic.FOLDER else place / synthetic.FOLDER
    if not directory.exists():
        if home:
            raise UsageError(
                f"--data_dir {home} holds no {synthetic.FOLDER}.\nCorrect --data_dir, "
                "or omit it to generate synthetic data in ~/.cache/cifar10."
            )
        synthetic.generate(directory)
    description = f"SYNTHETIC stand-in, NOT CIFAR-10 ({reason}), in {directory}"
    return _checked("synthetic", directory, description)


def _checked(name: str, directory: Path, description: str = "") -> Dataset:
    """Checks the files of a data set, and returns the data set."""
    file_format = FORMATS[name]
    records.check_files(directory, file_format)
    return Dataset(
        name=name,
        directory=directory,
        image_shape=records.IMAGE_SHAPE,
        class_names=file_format.class_names,
        description=description or f"{file_format.title} in {directory}",
        read=functools.partial(records.read_split, directory, file_format),
        is_real=name != "synthetic",
    )
