"""The official archives: received from a URL, verified, unpacked.

Nothing incomplete ever has a final name. An archive grows in a `.part` file, which a
later attempt or run resumes with an HTTP Range request, however bad the connection. It
is complete, and renamed, when both its size and its MD5 are right; anything else is
removed, so that nothing wrong is ever resumed. It is unpacked into a hidden folder,
which is renamed once it is complete. A lock file lets one process at a time do this in
a folder; any other process waits and finds the work done.

`cifar.py` decides about the folder and whether to download at all.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from six.moves.urllib import error as url_error, request as url_request

from cifar10.errors import UnavailableError, UsageError, printable
from cifar10.input import records
from cifar10.input.progress import progress
from cifar10.process import files

SCHEMES = ("https", "http", "file")
_CHUNK_BYTES = 1 << 16


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


@dataclasses.dataclass(frozen=True)
class Patience:
    """When to give up on a server."""

    timeout: float = 30.0  # Seconds to wait for a connection, or for the next bytes.
    attempts: int = 5  # In a row, without a hundredth of the file gained in between.
    pause: float = 1.0  # Seconds between two attempts.
    least_rate: float = 1000.0  # Bytes a second; a connection that drips has failed.
    window: float = 60.0  # Seconds over which it holds.


class SourceError(Exception):
    """This URL does not give the file; another one may."""


class NoConnectionError(SourceError):
    """A connection failed: this URL may give the file later."""


class UnreachableError(NoConnectionError):
    """No connection was made."""


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
    packed: Path | None = None,
) -> Path:
    """Unpacks an archive in a folder once, after downloading it if it is not there.

    Args:
        archive: The archive. Another file, or a damaged one, is refused.
        directory: The folder, which is created if it does not exist.
        urls: Tried in order; by default the archive's own. One that ends in a slash is
            a folder that contains the archive.
        patience: When to give up on a server.
        packed: Where the archive is, and is not downloaded to; by default in the
            folder.

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
            _download(archive, part, urls or (archive.url,), patience or Patience())
            part.replace(packed)
        _unpack(archive, packed, folder)
        return folder


def _download(
    archive: Archive, part: Path, urls: Sequence[str], patience: Patience
) -> None:
    """Completes the part file from the first URL that gives the archive."""
    reasons, kind = [], UsageError
    for url in urls:
        source = url + archive.name if url.endswith("/") else url
        try:
            return receive(source, part, archive.size, archive.md5, patience)
        except SourceError as error:
            reasons.append(printable(f"{source}: {error}"))  # A server's words.
            if isinstance(error, NoConnectionError):
                kind = UnavailableError
    raise kind(f"{archive.name} could not be downloaded ({'; '.join(reasons)}).")


def _unpack(archive: Archive, packed: Path, folder: Path) -> None:
    """Verifies an archive and publishes its folder at once."""
    size = packed.stat().st_size
    if size != archive.size or _md5_of(packed) != archive.md5:
        raise UsageError(
            f"{packed} ({size} bytes) is not the published {archive.name}, which has "
            f"{archive.size} bytes and the MD5 {archive.md5}.\nRemove it to have it "
            "downloaded again, or put the right one there."
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


def receive(url: str, part: Path, size: int, md5: str, patience: Patience) -> None:
    """Completes a part file from a URL, and verifies its size and MD5.

    Raises:
        SourceError: The URL does not give this file.
        OSError: The part file cannot be written.
    """
    found = _length(part)
    failures, milestone, resumed = 0, found, found > 0
    while True:
        try:
            if _length(part) < size:
                _append(url, part, size, patience)
        except NoConnectionError as error:
            # A host that never answered will not do so in a second; one that stopped
            # answering may.
            if isinstance(error, UnreachableError) and _length(part) == found:
                raise
            if _length(part) >= milestone + size // 100:
                failures, milestone = 0, _length(part)
            failures += 1
            if failures >= patience.attempts:
                message = f"{error}, {failures} times in a row"
                raise NoConnectionError(message) from error
            time.sleep(patience.pause)
            continue
        if _length(part) == size and _md5_of(part) == md5:
            return
        part.unlink()
        # The fault may be in what an earlier run or server left: start again, once.
        if not resumed:
            raise SourceError(f"what it serves does not have the MD5 {md5}")
        milestone, resumed = 0, False


def _length(path: Path) -> int:
    """Returns the number of bytes in a file, 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def _md5_of(path: Path) -> str:
    """Returns the MD5 of a file in hexadecimal digits."""
    # It detects accidents, not attacks; FIPS systems refuse it without this flag.
    checksum = functools.partial(hashlib.md5, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, checksum).hexdigest()


def _append(url: str, part: Path, size: int, patience: Patience) -> None:
    """Downloads the rest of a file over one connection, and appends it to `part`."""
    opened = _request(url, _length(part), patience.timeout)
    with contextlib.closing(opened) as response:
        # A server that ignores the range sends the file from its beginning.
        partial = response.status == http.client.PARTIAL_CONTENT
        start = done = _length(part) if partial else 0
        announced = response.headers.get("Content-Length")
        if announced is not None and announced != str(size - start):
            raise SourceError(f"it serves {announced} bytes instead of {size - start}")
        with (
            files.opened(part, "ab") as file,
            progress(part.stem, "MB", size, start, unit_size=10**6) as report,
        ):
            file.truncate(start)
            for chunk in _chunks(response, patience):
                file.write(chunk)
                done += len(chunk)
                if done > size:
                    part.unlink()
                    raise SourceError(f"it serves more than {size} bytes")
                report(done)
    if done < size:
        problem = f"the connection ended after {done} of {size} bytes"
        raise NoConnectionError(problem)


def _request(url: str, offset: int, timeout: float) -> Any:
    """Requests a file from a byte onwards and returns the response."""
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    try:
        # The URL is the user's; `parse_urls` has checked its scheme.
        asked = url_request.Request(url, headers=headers)  # noqa: S310
        return url_request.urlopen(asked, timeout=timeout)  # noqa: S310
    except url_error.HTTPError as error:
        error.close()
        if offset and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _request(url, 0, timeout)
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


def _chunks(response: Any, patience: Patience) -> Iterator[bytes]:
    """Yields the body of a response as it arrives, unless it comes too slowly."""
    began, received = time.monotonic(), 0
    try:
        # Not `read`, which would wait for a whole chunk however slowly it comes.
        while chunk := response.read1(_CHUNK_BYTES):
            yield chunk
            received += len(chunk)
            seconds = time.monotonic() - began
            if seconds >= patience.window:
                if received < patience.least_rate * seconds:
                    problem = f"it sent {received} bytes of the file in {seconds:.0f} s"
                    raise NoConnectionError(problem)
                began, received = time.monotonic(), 0
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise NoConnectionError(str(error) or type(error).__name__) from error
