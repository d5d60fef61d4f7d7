"""Finds CIFAR-10, CIFAR-100 or the synthetic stand-in; downloads or generates them.

A damaged copy is an error, and no other data set is used instead. No message gives the
name CIFAR-10 to the stand-in.
"""

import functools
import os
from pathlib import Path

from cifar10.errors import UsageError, say
from cifar10.input import download, records, synthetic
from cifar10.input.dataset_base import Dataset

DIRECTORY_VARIABLE = "CIFAR10_DATA_DIR"

SYNTHETIC = synthetic.FORMAT
FORMATS = {
    file_format.name: file_format
    for file_format in (records.CIFAR10, records.CIFAR100, SYNTHETIC)
}
ARCHIVES = {"cifar10": download.CIFAR10, "cifar100": download.CIFAR100}


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
    if data_url:
        download.check_url(data_url)
    home = cache()
    directory = _named_folder(data_dir) or home
    with records.explained(directory):
        if data == "synthetic":
            place = directory if data_dir else home
            reason = "as --data synthetic requests"
            return _stand_in(reason, place, named=bool(data_dir))
        name = "cifar10" if data == "auto" else data
        title, archive = FORMATS[name].title, ARCHIVES[name]
        is_ours = not data_dir and os.access(directory, os.W_OK)
        folder = _local_copy(name, directory, directory if is_ours else home)
        if folder is None and data_dir:
            raise _nothing_in(data_dir, directory, name)
        if folder is None:
            try:
                folder = download.fetch(archive, directory, data_url)
            except UsageError as error:
                problem = f"No {title} in {directory}: {error}"
                if data == "auto":
                    say(f"{problem}\nUsing the SYNTHETIC stand-in.")
                    reason = f"none in {directory} and no download"
                    return _stand_in(reason, home)
                raise type(error)(
                    f"{problem}\nPut {archive.name} or its folder {archive.folder} "
                    "there, or name another folder with --data_dir. To train, you can "
                    "also name a mirror with --data_url, or give --data synthetic."
                ) from error
        return _checked(name, folder, f"{title} in {folder}")


def cache() -> Path:
    """Returns ~/.cache/cifar10, the default folder for all data of the package."""
    return _without_tilde("~/.cache/cifar10")


def _named_folder(data_dir: str | None) -> Path | None:
    """Returns the folder that `data_dir` or else CIFAR10_DATA_DIR names, if any."""
    source, name = "--data_dir", data_dir
    if not data_dir:
        source, name = DIRECTORY_VARIABLE, os.environ.get(DIRECTORY_VARIABLE)
    if not name:
        return None
    directory = _without_tilde(name)
    with records.explained(directory):
        if directory.is_file():
            problem = f"{source} {name} is a file. Give the folder of the file."
            raise UsageError(problem)
    return directory


def _without_tilde(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"There is no home folder: {error}\nSet HOME, or name the folder of the "
            "data with --data_dir, without ~."
        ) from error


def _local_copy(name: str, directory: Path, home: Path) -> Path | None:
    """Returns the folder of a local copy of a data set; None if there is no copy.

    An archive in `directory` is unpacked to `home`.
    """
    file_format, archive = FORMATS[name], ARCHIVES[name]
    files = file_format.train_files + file_format.test_files
    if any((directory / file).exists() for file in files):
        return directory
    folder = directory / file_format.folder
    if folder.exists():
        return folder
    packed = directory / archive.name
    if packed.exists():
        return download.fetch(archive, home, packed=packed)
    return None


def _stand_in(reason: str, home: Path, *, named: bool = False) -> Dataset:
    """Returns the synthetic data in `home`; generates missing data unless `named`."""
    # A user, or a run's `config.json`, may name the stand-in's own folder.
    directory = home if home.name == SYNTHETIC.folder else home / SYNTHETIC.folder
    if not directory.exists():
        if named:
            raise UsageError(
                f"--data_dir {home} holds no {SYNTHETIC.folder}.\nCorrect --data_dir, "
                "or omit it to generate synthetic data in ~/.cache/cifar10."
            )
        synthetic.generate(directory)
    description = f"SYNTHETIC stand-in, NOT CIFAR-10 ({reason}), in {directory}"
    return _checked(SYNTHETIC.name, directory, description)


def _nothing_in(data_dir: str, directory: Path, name: str) -> UsageError:
    """Returns the error to raise for a --data_dir without the data set."""
    file_format, archive = FORMATS[name], ARCHIVES[name]
    lacks = (
        f"holds no {file_format.title}: neither {file_format.train_files[0]} nor "
        f"{archive.folder} nor {archive.name}"
        if directory.exists()
        else "does not exist"
    )
    return UsageError(
        f"--data_dir {data_dir} {lacks}.\nCorrect --data_dir, or omit it to "
        f"download {file_format.title}."
    )


def _checked(name: str, directory: Path, description: str) -> Dataset:
    """Checks the files of a data set, and returns the data set."""
    records.check_files(directory, FORMATS[name])
    return Dataset(
        name=name,
        directory=directory,
        image_shape=records.IMAGE_SHAPE,
        class_names=FORMATS[name].class_names,
        description=description,
        read=functools.partial(records.read_split, directory, FORMATS[name]),
        is_real=name != SYNTHETIC.name,
    )
