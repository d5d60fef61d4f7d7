"""The official archives: fetched, verified, unpacked.

Nothing half-made is ever left under a final name. An archive grows in a `.part` file
and gets its own name once it is verified. It is unpacked into a hidden folder, which
is renamed when it is complete. A lock file lets one process at a time do this in a
folder; the others wait and find the work done.

How bytes come from a URL is in `transfer.py`; which folder, and whether to download at
all, in `datasets.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from cifar10.errors import UsageError
from cifar10.input import transfer
from cifar10.input.transfer import Patience

SCHEMES = ("https", "http", "file")
PATIENCE = Patience()


@dataclasses.dataclass(frozen=True)
class Archive:
    """A published archive.

    Args:
        name: File name.
        folder: The one folder in it.
        size: Length in bytes.
        md5: MD5 of the file, in hexadecimal digits.
        url: Where it is published.
    """

    name: str
    folder: str
    size: int
    md5: str
    url: str


# URLs and MD5 sums are those of https://www.cs.toronto.edu/~kriz/cifar.html, sizes
# those of the files with these sums.
CIFAR10 = Archive(
    name="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
    size=170_052_171,
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)
CIFAR100 = Archive(
    name="cifar-100-binary.tar.gz",
    folder="cifar-100-binary",
    size=168_513_733,
    md5="03b5dce01913d631647c71ecec9e9cb8",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)


def parse_urls(flag: str | None) -> tuple[str, ...]:
    """Splits the value of `--data_url` at its commas.

    Raises:
        UsageError: A part of it is not a URL that can be downloaded from.
    """
    urls = tuple(url.strip() for url in (flag or "").split(",") if url.strip())
    for url in urls:
        if url.partition("://")[0].lower() not in SCHEMES:
            rule = f"it should begin with one of {', '.join(SCHEMES)} and '://'"
            raise UsageError(f"--data_url {url} cannot be downloaded from; {rule}.")
    return urls


def fetch(
    archive: Archive,
    directory: Path,
    urls: Sequence[str] = (),
    patience: Patience = PATIENCE,
) -> Path:
    """Downloads an archive into a folder and unpacks it there.

    Args:
        archive: What to download.
        directory: Where to; made if it does not exist.
        urls: Where from, tried in order; empty for where it is published. One that ends
            in a slash is a folder that holds the archive.
        patience: When to give a URL up.

    Returns:
        The unpacked folder, `directory / archive.folder`.

    Raises:
        UsageError: No URL gave the archive, or the folder could not be written.
    """
    packed = directory / archive.name
    with _exclusive(archive, directory):
        if not (directory / archive.folder).exists():
            if not packed.exists():
                _download(archive, directory, urls or (archive.url,), patience)
            _unpack(archive, packed, directory)
    return directory / archive.folder


def unpack(archive: Archive, packed: Path, directory: Path) -> Path:
    """Verifies and unpacks an archive that is already on this machine.

    Args:
        archive: What it should be.
        packed: The archive file; it is left as it is.
        directory: Where to unpack it; made if it does not exist.

    Returns:
        The unpacked folder, `directory / archive.folder`.

    Raises:
        UsageError: It is another file, or damaged, or cannot be unpacked there.
    """
    with _exclusive(archive, directory):
        if not (directory / archive.folder).exists():
            _unpack(archive, packed, directory)
    return directory / archive.folder


@contextlib.contextmanager
def _exclusive(archive: Archive, directory: Path) -> Iterator[None]:
    """Makes the folder, keeps other processes out of it and explains file errors."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # The lock file stays: removing it could let a third process lock a new one
        # while the second still holds the old one.
        with (directory / f".{archive.name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting = f"Waiting for another process to prepare {directory} ..."
                print(waiting, file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be written or read: "
            f"{error.strerror or error}. Free some space or mend the permissions, or "
            "name another folder with --data_dir."
        ) from error


def _download(
    archive: Archive, directory: Path, urls: Sequence[str], patience: Patience
) -> None:
    """Puts the verified archive into a folder, from the first URL that gives it."""
    part = directory / f"{archive.name}.part"
    reasons = []
    for url in urls:
        source = url + archive.name if url.endswith("/") else url
        try:
            transfer.receive(source, part, archive.size, archive.md5, patience)
        except transfer.SourceError as error:
            reasons.append(f"{source}: {error}")
        else:
            part.replace(directory / archive.name)
            return
    raise UsageError(
        f"{archive.name} could not be downloaded ({'; '.join(reasons)}). Put the "
        f"archive or its folder {archive.folder} into {directory}, or name a mirror "
        "with --data_url."
    )


def _unpack(archive: Archive, packed: Path, directory: Path) -> None:
    """Verifies an archive and publishes its folder at once."""
    size = packed.stat().st_size
    if size != archive.size or transfer.md5_of(packed) != archive.md5:
        raise UsageError(
            f"{packed} ({size} bytes) is not the published {archive.name}, which has "
            f"{archive.size} bytes and the MD5 {archive.md5}. Remove it to have it "
            "downloaded again, or put the right one there."
        )
    scratch = directory / f".{archive.folder}.unpacking"
    shutil.rmtree(scratch, ignore_errors=True)  # A killed process may have left it.
    try:
        with tarfile.open(packed, "r:gz") as tar:
            tar.extractall(scratch, filter="data")
        (scratch / archive.folder).rename(directory / archive.folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UsageError(f"{packed} cannot be unpacked: {error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
