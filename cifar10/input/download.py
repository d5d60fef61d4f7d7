"""The official archives: fetched, verified, unpacked.

Nothing incomplete ever has a final name. An archive grows in a `.part` file, which is
renamed once it is verified. It is unpacked into a hidden folder, which is renamed once
it is complete. A lock file lets one process at a time do this in a folder; any other
process waits and finds the work done.

`transfer.py` receives the bytes from a URL; `datasets.py` decides about the folder and
whether to download at all.
"""

import contextlib
import dataclasses
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from cifar10.errors import UnavailableError, UsageError, printable
from cifar10.input import records, transfer
from cifar10.input.transfer import Patience
from cifar10.process import files

SCHEMES = ("https", "http", "file")


@dataclasses.dataclass(frozen=True)
class Archive:
    """A published archive."""

    name: str
    folder: str  # The one folder in it.
    size: int  # In bytes.
    md5: str  # In hexadecimal digits.
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
    """Splits the value of `--data_url` at its commas, and checks the parts' schemes."""
    urls = tuple(url.strip() for url in (flag or "").split(",") if url.strip())
    for url in urls:
        if url.partition("://")[0].lower() not in SCHEMES:
            raise UsageError(
                f"--data_url {url} cannot be downloaded from; it must begin with one "
                f"of {', '.join(SCHEMES)} and '://'."
            )
    return urls


def fetch(
    archive: Archive,
    directory: Path,
    urls: Sequence[str] = (),
    patience: Patience | None = None,
) -> Path:
    """Unpacks an archive in a folder, after downloading it if the folder lacks it.

    The folder is created if it does not exist. The URLs are tried in order; without any
    the archive's own is used. A URL that ends in a slash is a folder that contains the
    archive. An archive that is another file, or damaged, is refused. The unpacked
    folder, `directory / archive.folder`, is returned.
    """
    packed = directory / archive.name
    with _locked(archive, directory):
        if not packed.exists() and not (directory / archive.folder).exists():
            part = packed.with_name(f"{archive.name}.part")
            _download(archive, part, urls or (archive.url,), patience or Patience())
            part.replace(packed)
        return _unpack(archive, packed, directory)


def unpack(archive: Archive, packed: Path, directory: Path) -> Path:
    """Returns the folder of an archive's files in a directory, unpacked there once."""
    with _locked(archive, directory):
        return _unpack(archive, packed, directory)


@contextlib.contextmanager
def _locked(archive: Archive, directory: Path) -> Iterator[None]:
    """Creates the folder and keeps other processes out of it."""
    with records.explained(directory):
        lock = directory / f".{archive.name}.lock"
        waiting = f"Waiting for another process to prepare {directory} ..."
        with files.locked(lock, waiting):
            yield


def _download(
    archive: Archive, part: Path, urls: Sequence[str], patience: Patience
) -> None:
    """Completes the part file from the first URL that gives the archive."""
    reasons, kind = [], UsageError
    for url in urls:
        source = url + archive.name if url.endswith("/") else url
        try:
            transfer.receive(source, part, archive.size, archive.md5, patience)
        except transfer.SourceError as error:
            reasons.append(printable(f"{source}: {error}"))  # A server's words.
            if isinstance(error, transfer.NoConnectionError):
                kind = UnavailableError
        else:
            return
    raise kind(f"{archive.name} could not be downloaded ({'; '.join(reasons)}).")


def _unpack(archive: Archive, packed: Path, directory: Path) -> Path:
    """Verifies an archive and publishes its folder at once, unless it is there."""
    folder = directory / archive.folder
    if folder.exists():
        return folder
    size = packed.stat().st_size
    if size != archive.size or transfer.md5_of(packed) != archive.md5:
        raise UsageError(
            f"{packed} ({size} bytes) is not the published {archive.name}, which has "
            f"{archive.size} bytes and the MD5 {archive.md5}.\nRemove it to have it "
            "downloaded again, or put the right one there."
        )
    scratch = directory / f".{archive.folder}.unpacking"
    shutil.rmtree(scratch, ignore_errors=True)  # A killed process may have left it.
    try:
        with tarfile.open(packed, "r:gz") as tar:
            tar.extractall(scratch, filter="data")
        (scratch / archive.folder).rename(folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UsageError(f"{packed} cannot be unpacked: {error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
