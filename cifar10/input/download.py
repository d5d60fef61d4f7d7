"""Downloads, verifies and unpacks the official archives of CIFAR.

Incomplete files never have their final names. An archive is downloaded to a `.part`
file. The next attempt or run resumes an incomplete file with an HTTP Range request. A
complete file is renamed if its size and MD5 are right, or else removed. The archive is
unpacked into a hidden folder, which is then renamed. A lock file lets only one process
at a time prepare a folder; other processes wait and use the result.

`cifar.py` chooses the folder, and decides whether to download at all.
"""

import contextlib
import dataclasses
import functools
import hashlib
import http.client
import shutil
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from six.moves.urllib import error as url_error, request as url_request

from cifar10.errors import UnavailableError, UsageError, printable
from cifar10.input import records
from cifar10.input.progress import progress
from cifar10.process import files

SCHEMES = ("https", "http", "file")
# When to give up on a server.
TIMEOUT = 10.0  # Seconds to wait for a connection, or for the next bytes.
ATTEMPTS = 5  # Failures while less than a hundredth of the file arrives.
PAUSE = 1.0  # Seconds between two attempts.
_CHUNK_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Archive:
    """An archive of a data set, with what is needed to download and check it."""

    name: str
    folder: str  # The only folder in the archive.
    size: int  # In bytes.
    md5: str  # In hexadecimal digits.
    url: str


# URLs and MD5 checksums are from https://www.cs.toronto.edu/~kriz/cifar.html. Sizes are
# of the files with these checksums.
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


class SourceError(Exception):
    """The URL does not serve the file."""


class NoConnectionError(SourceError):
    """A connection failed; the URL may serve the file later."""


class UnreachableError(NoConnectionError):
    """No connection could be made."""


def check_url(url: str) -> None:
    """Refuses a `--data_url` of an unknown scheme."""
    if url.partition("://")[0].lower() not in SCHEMES:
        raise UsageError(
            f"--data_url {url} cannot be downloaded: a URL must begin with one "
            f"of {', '.join(SCHEMES)}, followed by '://'."
        )


def fetch(
    archive: Archive,
    directory: Path,
    url: str | None = None,
    packed: Path | None = None,
) -> Path:
    """Returns the unpacked folder of an archive, after downloading it if necessary.

    Args:
        archive: The archive to fetch. A file with any other content is refused.
        directory: The folder to unpack into, which is created if missing.
        url: URL of the archive, or of its folder if the URL ends in a slash. By default
            the official URL.
        packed: Path of the archive on disk. By default, the archive is in `directory`,
            and is downloaded if it is missing.

    Returns:
        The unpacked folder, `directory / archive.folder`.
    """
    folder, lock = directory / archive.folder, directory / f".{archive.name}.lock"
    waiting = f"Waiting for another process to prepare {directory} ..."
    with records.explained(directory), files.locked(lock, waiting):
        if folder.exists():
            return folder
        packed = packed or directory / archive.name
        if not packed.exists():
            part = packed.with_name(f"{archive.name}.part")
            _download(archive, part, url or archive.url)
            part.replace(packed)
        _unpack(archive, packed, folder)
        return folder


def _download(archive: Archive, part: Path, url: str) -> None:
    source = url + archive.name if url.endswith("/") else url
    try:
        receive(source, part, archive.size, archive.md5)
    except SourceError as error:
        is_away = isinstance(error, NoConnectionError)
        raise (UnavailableError if is_away else UsageError)(
            # The server chose some of the words.
            printable(f"{archive.name} could not be downloaded ({source}: {error}).")
        ) from error


def _unpack(archive: Archive, packed: Path, folder: Path) -> None:
    """Verifies an archive, and unpacks its folder completely or not at all."""
    size = packed.stat().st_size
    if size != archive.size or _md5_of(packed) != archive.md5:
        raise UsageError(
            f"{packed} ({size} bytes) is not the published {archive.name}, which has "
            f"{archive.size} bytes and the MD5 {archive.md5}.\nRemove this file to "
            "download the archive again, or replace it with the published one."
        )
    scratch = folder.with_name(f".{archive.folder}.unpacking")
    shutil.rmtree(scratch, ignore_errors=True)  # A killed process may have left it.
    try:
        with tarfile.open(packed, "r:gz") as tar:
            tar.extractall(scratch, filter="data")
        (scratch / archive.folder).rename(folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UsageError(f"{packed} cannot be unpacked: {error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def receive(url: str, part: Path, size: int, md5: str) -> None:
    """Downloads the rest of a `.part` file, and verifies the file's size and MD5.

    Raises:
        SourceError: The URL does not serve this file.
        OSError: The `.part` file cannot be written.
    """
    found = _length(part)
    failures, milestone, resumed = 0, found, found > 0
    while True:
        try:
            if _length(part) < size:
                _append(url, part, size)
        except NoConnectionError as error:
            # A host that never answered will hardly answer a second later. A host that
            # stopped answering may.
            if isinstance(error, UnreachableError) and _length(part) == found:
                raise
            if _length(part) >= milestone + size // 100:
                failures, milestone = 0, _length(part)
            failures += 1
            if failures >= ATTEMPTS:
                message = f"{error}, {failures} times in a row"
                raise NoConnectionError(message) from error
            time.sleep(PAUSE)
            continue
        if _length(part) == size and _md5_of(part) == md5:
            return
        part.unlink()
        # An earlier run or another server may have left wrong bytes: start again, once.
        if not resumed:
            raise SourceError(f"the file served does not have the MD5 {md5}")
        milestone, resumed = 0, False


def _length(path: Path) -> int:
    """Returns the number of bytes in a file, 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def _md5_of(path: Path) -> str:
    """Returns the MD5 of a file in hexadecimal digits."""
    # MD5 detects accidents, not attacks. FIPS systems refuse it without this flag.
    checksum = functools.partial(hashlib.md5, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, checksum).hexdigest()


def _append(url: str, part: Path, size: int) -> None:
    """Downloads the rest of a file over one connection, and appends it to `part`."""
    opened = _request(url, _length(part))
    with contextlib.closing(opened) as response:
        # A server that ignores the range sends the file from its beginning.
        partial = response.status == http.client.PARTIAL_CONTENT
        start = done = _length(part) if partial else 0
        announced = response.headers.get("Content-Length")
        if announced is not None and announced != str(size - start):
            raise SourceError(f"it sends {announced} bytes instead of {size - start}")
        with (
            files.opened(part, "ab") as file,
            progress(part.stem, "MB", size, start, unit_size=10**6) as report,
        ):
            file.truncate(start)
            for chunk in _chunks(response):
                file.write(chunk)
                done += len(chunk)
                if done > size:
                    part.unlink()
                    raise SourceError(f"it sends more than {size} bytes")
                report(done)
    if done < size:
        problem = f"the connection ended after {done} of {size} bytes"
        raise NoConnectionError(problem)


def _request(url: str, offset: int) -> Any:
    """Requests a file from byte `offset` on, and returns the response."""
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    try:
        # The URL is the user's; `check_url` has checked its scheme.
        asked = url_request.Request(url, headers=headers)  # noqa: S310
        return url_request.urlopen(asked, timeout=TIMEOUT)  # noqa: S310
    except url_error.HTTPError as error:
        error.close()
        problem = f"HTTP {error.code} {error.reason}"
        if error.code >= http.client.INTERNAL_SERVER_ERROR:
            raise NoConnectionError(problem) from error
        raise SourceError(problem) from error
    except url_error.URLError as error:
        raise UnreachableError(str(error.reason)) from error
    except OSError as error:
        raise NoConnectionError(str(error)) from error
    except (http.client.HTTPException, ValueError) as error:
        raise SourceError(f"{type(error).__name__}: {error}") from error


def _chunks(response: Any) -> Iterator[bytes]:
    """Yields the body of a response as it arrives."""
    try:
        # Not `read`, which would wait for a whole chunk, however slowly it arrives.
        while chunk := response.read1(_CHUNK_BYTES):
            yield chunk
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise NoConnectionError(str(error) or type(error).__name__) from error
