"""Which images a run reads, and where they are.

The only module that knows the formats, the download and the stand-in together. Two
rules hold throughout. A copy that is there but damaged is an error, never a reason to
take something else. And the stand-in says what it is wherever it is named.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError
from cifar10.input import download, records, synthetic

CHOICES = ("auto", "cifar10", "cifar100", "synthetic")
DIRECTORY_VARIABLE = "CIFAR10_DATA_DIR"

SYNTHETIC = records.Format(
    name="synthetic",
    title="the synthetic stand-in",
    folder=synthetic.FOLDER,
    label_bytes=1,
    classes=len(synthetic.CLASS_NAMES),
    train_files=synthetic.TRAIN_FILES,
    test_files=synthetic.TEST_FILES,
    train_records_per_file=synthetic.RECORDS_PER_FILE,
    test_records_per_file=synthetic.RECORDS_PER_FILE,
    names_file=synthetic.NAMES_FILE,
    default_names=synthetic.CLASS_NAMES,
)
FORMATS = {
    file_format.name: file_format
    for file_format in (records.CIFAR10, records.CIFAR100, SYNTHETIC)
}
ARCHIVES = {"cifar10": download.CIFAR10, "cifar100": download.CIFAR100}

# Under --data auto a machine without a network should start soon, with the stand-in.
HASTE = download.Patience(timeout=5.0, attempts=3)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set that is on this machine.

    Args:
        name: "cifar10", "cifar100" or "synthetic".
        directory: The folder with its files.
        classes: Labels are 0 to `classes - 1`.
        class_names: Their names.
        description: One line for the user: what it is and where.
    """

    name: str
    directory: Path
    classes: int
    class_names: tuple[str, ...]
    description: str

    @property
    def is_real(self) -> bool:
        """Whether these are photographs, not the generated stand-in."""
        return self.name != SYNTHETIC.name

    def read(self, split: records.Split) -> tuple[np.ndarray, np.ndarray]:
        """Reads all images of one split.

        Args:
            split: "train" or "test".

        Returns:
            Images, uint8 [count, 32, 32, 3], and labels, int32 [count].

        Raises:
            UsageError: A file is damaged.
        """
        return records.read_split(self.directory, FORMATS[self.name], split)


def find(
    data: str,
    data_dir: str | None = None,
    data_url: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Dataset:
    """Finds a data set on this machine, or downloads or generates it.

    Args:
        data: "cifar10" or "cifar100", a copy on this machine or else a download;
            "synthetic", the generated stand-in; "auto", CIFAR-10 if it can be had and
            the stand-in otherwise.
        data_dir: Folder with the files, their folder or the archive, and where they
            are put. Without it the environment variable CIFAR10_DATA_DIR, and without
            that ~/.cache/cifar10.
        data_url: Where to download the archive from, URLs separated by commas.
        environ: Environment variables.

    Returns:
        The data set, its files present and of the right size.

    Raises:
        UsageError: It cannot be had, or a copy is damaged, or an argument is wrong.
    """
    if data not in CHOICES:
        raise UsageError(f"--data {data} is none of {', '.join(CHOICES)}.")
    urls = download.parse_urls(data_url)
    cache = _cache(environ)
    try:
        chosen = _chosen_directory(data_dir, environ, cache)
        # The stand-in keeps out of a folder of real data that only a variable names.
        stand_in_home = chosen if data_dir else cache
        if data == "synthetic":
            return _stand_in("as --data synthetic asks", stand_in_home, cache)
        name = "cifar10" if data == "auto" else data
        directory = _local_copy(name, chosen, cache)
        if directory is None and data == "auto":
            return _cifar10_or_stand_in(chosen, urls, stand_in_home, cache)
        if directory is None:
            directory = _insist(name, chosen, urls, named=bool(data_dir))
        return _real(name, directory)
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be looked into: {error.strerror}. Mend its "
            "permissions or name another folder with --data_dir."
        ) from error


def find_again(
    data: str, recorded: str, data_url: str | None, data_dir: str | None = None
) -> Dataset:
    """Finds the data set of a run, where it was or where the user says.

    Args:
        data: The data set's name.
        recorded: The folder that the run had it in.
        data_url: Where the run would have downloaded it from.
        data_dir: Folder to take instead.

    Returns:
        The data set, as `find` returns it.

    Raises:
        UsageError: It cannot be had, or a copy is damaged.
    """
    # Not `Path.is_dir`: it fails where this user may not look.
    if data_dir is None and os.path.isdir(recorded):  # noqa: PTH112
        data_dir = recorded
    elif data_dir is None:
        moved = f"The run's data is no longer in {recorded}; looking elsewhere."
        print(moved, file=sys.stderr, flush=True)
    return find(data, data_dir, data_url)


def _cache(environ: Mapping[str, str]) -> Path:
    """Returns the folder for data sets where the user names none."""
    try:
        home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    except RuntimeError as error:
        problem = "This user has no home folder to keep data in; name one with "
        raise UsageError(f"{problem}--data_dir.") from error
    return home / ".cache" / "cifar10"


def _chosen_directory(
    data_dir: str | None, environ: Mapping[str, str], cache: Path
) -> Path:
    """Returns the folder to look in first and to download to."""
    if data_dir:
        source, name = "--data_dir", data_dir
    elif environ.get(DIRECTORY_VARIABLE):
        source, name = DIRECTORY_VARIABLE, environ[DIRECTORY_VARIABLE]
    else:
        return cache
    try:
        directory = Path(name).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{source} {name}: there is no such user.") from error
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{source} {name} is a file; name the folder it is in.")
    return directory


def _local_copy(name: str, chosen: Path, cache: Path) -> Path | None:
    """Returns the folder of a copy on this machine, None if there is none.

    An archive found in the folder is unpacked beside itself, or in the cache where the
    folder is read-only.
    """
    file_format, archive = FORMATS[name], ARCHIVES[name]
    if records.missing_files(chosen, file_format) != file_format.all_files:
        return chosen
    folder = chosen / file_format.folder
    if folder.exists():
        return folder
    packed = chosen / archive.name
    if packed.exists():
        home = chosen if os.access(chosen, os.W_OK) else cache
        return download.unpack(archive, packed, home)
    return None


def _insist(name: str, chosen: Path, urls: Sequence[str], *, named: bool) -> Path:
    """Downloads a data set that the user asked for by name."""
    file_format, archive = FORMATS[name], ARCHIVES[name]
    looked_for = (
        f"{file_format.title} was asked for, but neither {file_format.train_files[0]} "
        f"nor {file_format.folder} nor {archive.name} is in {chosen}"
    )
    if named and not chosen.exists():
        raise UsageError(
            f"{looked_for}, which does not exist. Mend --data_dir, or make that folder "
            "to have the data downloaded there."
        )
    try:
        return download.fetch(archive, chosen, urls)
    except UsageError as error:
        raise UsageError(
            f"{looked_for}. {error} Other ways on: another folder with --data_dir, or "
            "the generated stand-in with --data synthetic."
        ) from error


def _cifar10_or_stand_in(
    chosen: Path, urls: Sequence[str], stand_in_home: Path, cache: Path
) -> Dataset:
    """Downloads CIFAR-10, and says why and takes the stand-in where that fails."""
    try:
        directory = download.fetch(ARCHIVES["cifar10"], chosen, urls, HASTE)
    except UsageError as error:
        consequence = "Going on with the SYNTHETIC stand-in."
        print(f"No CIFAR-10 in {chosen}: {error} {consequence}", file=sys.stderr)
        reason = f"none in {chosen} and no download"
        return _stand_in(reason, stand_in_home, cache)
    return _real(records.CIFAR10.name, directory)


def _stand_in(reason: str, home: Path, cache: Path) -> Dataset:
    """Returns the stand-in, from the cache where `home` is read-only."""
    # The folder itself may be named, as a run's `config.json` does.
    directory = home if home.name == SYNTHETIC.folder else home / SYNTHETIC.folder
    if not directory.exists() and not _writable(home):
        directory = cache / SYNTHETIC.folder
    if not directory.exists():
        synthetic.generate(directory)
    description = f"SYNTHETIC stand-in, NOT CIFAR-10 ({reason}), in {directory}"
    return _verified(SYNTHETIC, directory, description)


def _writable(directory: Path) -> bool:
    """Tells whether a folder can be written to, or made."""
    while not directory.exists():
        directory = directory.parent
    return os.access(directory, os.W_OK)


def _real(name: str, directory: Path) -> Dataset:
    """Returns a data set of photographs."""
    return _verified(FORMATS[name], directory, f"{FORMATS[name].title} in {directory}")


def _verified(
    file_format: records.Format, directory: Path, description: str
) -> Dataset:
    """Returns a data set whose files are all there and of the right size."""
    records.check_files(directory, file_format)
    return Dataset(
        name=file_format.name,
        directory=directory,
        classes=file_format.classes,
        class_names=records.class_names(directory, file_format),
        description=description,
    )
