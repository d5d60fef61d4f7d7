"""Downloads, verifies and unpacks the published archives of CIFAR.

Received bytes are kept in a hidden file, so neither a lost connection nor a killed
process loses them. The next try resumes there, from any source, since an archive is
used only if it has the published size and SHA-256. It is unpacked in a hidden folder,
which is then renamed, so the data set is complete or absent. A lock file lets only one
process at a time prepare a data set; other processes wait and use the result.
"""

import contextlib
import functools
import http.client
import io
import math
import os
import shutil
import ssl
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from six.moves.urllib import error as url_error, request as url_request

from cifar10 import errors, files
from cifar10.errors import UnavailableError, UsageError, format_duration, printable, say
from cifar10.input.records import Archive, Format, explained
from cifar10.process import invocation, moving_line

TIMEOUT = 10.0  # Seconds to wait for a connection, or for the next bytes.
FIRST_LINE = 5.0  # Seconds until the progress is told.
# A source below so many bytes per second, in its first seconds, competes with others.
FAST, TRIAL = 1e6, 3.0
# A source below so many bytes per second, over so many seconds, has stalled.
LEAST, STALLED = 1e3, 60.0
LONG = 60.0  # Seconds left that are worth a hint.
OVERLAP = 65_536  # Kept bytes to compare with those of the source that goes on.
_CHUNK = 65_536
_GZIP = b"\x1f\x8b"
_MOST_WORDS = 200  # Characters of a server's message.
_PAUSE, _LITTLE = 1.0, 1e5  # Seconds before going on after fewer bytes than that.
_AWAY = (408, 425, http.client.TOO_MANY_REQUESTS, *range(500, 600))
# `OSError`s that are faults of the URL, so a later try would not help.
_OF_URL = (FileNotFoundError, IsADirectoryError, ssl.SSLCertVerificationError)

_Source = tuple[Format, str]  # A version of the data set, and its archive's URL.


class NothingReceivedError(UsageError):
    """No source sends any data; the exit code tells whether to try again later."""


class _SourceError(Exception):
    """A source does not send the archive.

    With `is_away`, the fault may pass. With `is_stale`, the kept bytes may be wrong.
    """

    def __init__(self, text: str, *, is_away: bool = False, is_stale: bool = False):
        super().__init__(text)
        self.is_away, self.is_stale = is_away, is_stale


class _StalledError(_SourceError):
    """A source sends next to nothing, and would do so again."""


def fetch(
    formats: Sequence[Format], directory: Path, url: str | None = None
) -> tuple[Format, Path]:
    """Returns the unpacked folder of a data set, after downloading it if necessary.

    Args:
        formats: The versions of the data set, of which any will do.
        directory: The folder to unpack into, which is created if missing.
        url: URL of an archive, or of the first one's folder if the URL ends in a slash.
            By default, the archives' own URLs are tried.

    Returns:
        The version, and its folder in `directory`.

    Raises:
        UnavailableError: All sources have failed. The bytes received so far are kept.
        NothingReceivedError: No source can be reached, or none has the archive.
        UsageError: The disk is full, or the folder cannot be written.
    """
    with _prepared(formats[0], directory):
        for file_format in formats:
            if (directory / file_format.folder).exists():
                return file_format, directory / file_format.folder
        with moving_line.progress(FIRST_LINE) as tick:
            download = _Download(formats, directory, tick)
            file_format = download.receive(_sources(formats, url))
        part = _part(directory, file_format.archive)
        folder = _unpack(file_format, directory, part)
        part.unlink()
        return file_format, folder


def unpack(file_format: Format, directory: Path, packed: Path) -> Path:
    """Unpacks the archive `packed` in `directory`, unless another process has done so.

    Returns the folder. A file with any other content is refused.
    """
    with _prepared(file_format, directory):
        if not (folder := directory / file_format.folder).exists():
            if problem := _differs(packed, file_format.archive):
                raise UsageError(f"{packed} {problem}.\nReplace it.")
            _unpack(file_format, directory, packed)
        return folder


@contextlib.contextmanager
def _prepared(file_format: Format, directory: Path) -> Iterator[None]:
    """Lets one process at a time prepare a data set."""
    waiting = f"Waiting for another process to prepare {directory} ..."
    lock = files.locked(directory / f".{file_format.name}.lock", waiting)
    with explained(directory), lock:
        yield


def _unpack(file_format: Format, directory: Path, packed: Path) -> Path:
    folder = directory / file_format.folder
    scratch = directory / f".{folder.name}.unpacking"
    if scratch.is_dir():  # A killed process has left it.
        shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(0o700)  # Fails if a link or a pipe has this name.
    try:
        with tarfile.open(packed, "r:gz") as tar:
            tar.extractall(scratch, filter="data")
        return (scratch / folder.name).rename(folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise UsageError(f"{packed} cannot be unpacked: {error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _part(directory: Path, archive: Archive) -> Path:
    """Returns the path of the bytes that have arrived so far."""
    return directory / f".{archive.name}.part"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _differs(path: Path, archive: Archive) -> str:
    """Says how a file differs from the published archive; empty if it does not."""
    name, actual, published = "size", str(path.stat().st_size), str(archive.size)
    if actual == published:
        name, published = "sha256", archive.sha256
        actual = files.sha256(path, follow=True)
    differs = f"{archive.name}: its {name} is {actual}, not {published}"
    return "" if actual == published else f"is not the published {differs}"


def _sources(formats: Sequence[Format], url: str | None) -> list[_Source]:
    if url is None:
        return [(each, known) for each in formats for known in each.archive.urls]
    if url.endswith("/"):
        return [(formats[0], url + formats[0].archive.name)]
    named = (each for each in formats if each.archive.name in url)
    return [(next(named, formats[0]), url)]


class _Download:
    """Receives an archive in a folder; calls `tick` to show the progress."""

    def __init__(
        self, formats: Sequence[Format], directory: Path, tick: moving_line.Tick
    ) -> None:
        self._parts = [_part(directory, each.archive) for each in formats]
        self._has_received = any(map(_size, self._parts))  # Now, or earlier.
        self._directory, self._tick = directory, tick
        self._announced: set[str] = set()
        self._has_hinted = False

    def receive(self, sources: Sequence[_Source]) -> Format:
        """Receives the archive of one of the sources, and returns its format.

        If none has it, and one sends other bytes than were kept, begins anew once.
        """
        found = self._try(sources)
        if isinstance(found, dict):
            failures = found.values()
            is_stale = any(each.is_stale for each in failures)
            if is_stale and not any(each.is_away for each in failures):
                for part in self._parts:
                    part.unlink(missing_ok=True)
                found = self._try(sources)
        if isinstance(found, dict):
            raise self._explained(found)
        return found

    def _try(self, sources: Sequence[_Source]) -> Format | dict[_Source, _SourceError]:
        """Returns the format that was received, or else why each source failed.

        Tries the sources in order; if one is slow, tries others and keeps the fastest.
        """
        rates = dict.fromkeys(sources, math.inf)  # Infinite until measured.
        failures: dict[_Source, _SourceError] = {}
        while rates:
            source = max(rates, key=lambda each: rates[each])  # On a tie, the first.
            others = max((rates[each] for each in rates if each != source), default=0.0)
            enough = min(FAST, others) if rates[source] == math.inf else 0.0
            part = _part(self._directory, source[0].archive)
            before = _size(part)
            try:
                if (slow := self._go_on(part, source, enough)) is None:
                    return source[0]
                rates[source] = slow
            except _SourceError as error:
                more = _size(part) - before
                if more > 0 and error.is_away and not isinstance(error, _StalledError):
                    time.sleep(_PAUSE if more < _LITTLE else 0.0)
                    continue
                failures[source] = error
                del rates[source]
        return failures

    def _explained(self, failures: dict[_Source, _SourceError]) -> UsageError:
        """Returns the error to raise after all sources have failed."""
        # The servers chose some of the words.
        problems = (f"{url} {error}." for (_, url), error in failures.items())
        told = "\n".join(map(printable, problems))
        for part in self._parts:
            if size := _size(part):
                kept = f"{_megabytes(size)} MB have arrived and are kept in {part}"
                return UnavailableError(f"{told}\n{kept}. The next try resumes there.")
        failure = (UsageError if self._has_received else NothingReceivedError)(told)
        if any(error.is_away for error in failures.values()):
            failure.exit_code = errors.EXIT_TRY_AGAIN
        return failure

    def _go_on(self, part: Path, source: _Source, enough: float) -> float | None:
        """Adds a source's bytes to the file `part` until it is the archive.

        Stops if the rate is below `enough` bytes per second, and returns it. Raises a
        `_SourceError` if the source is away, or does not have the archive.
        """
        archive, url = source[0].archive, source[1]
        files.opened(part, "ab").close()  # Creates it.
        with files.opened(part, "r+b") as file:
            if (kept := file.seek(0, os.SEEK_END)) < archive.size:
                moving_line.LINE.show(f"Connecting to {url} ...")
                with _answering():
                    response, start = _ask(url, max(0, kept - OVERLAP), archive)
                with response:
                    if url not in self._announced:
                        say(f"Downloading {printable(url)} ...")
                    self._announced.add(url)
                    slow = self._copy(file, response, start, archive, enough)
                if slow is not None:
                    return slow
        if problem := _differs(part, archive):
            part.unlink()
            raise _SourceError(problem, is_stale=kept > 0)
        return None

    def _copy(
        self,
        file: io.BufferedRandom,
        response: Any,
        start: int,
        archive: Archive,
        enough: float,
    ) -> float | None:
        """Writes a response's bytes to the file from `start` on; see `_go_on`."""
        position = checked_position = start
        began = checked = time.monotonic()
        while position < archive.size:
            with _answering():
                chunk = response.read1(_CHUNK)
            if not chunk:
                size = f"{_megabytes(position)} of {_megabytes(archive.size)} MB"
                raise _SourceError(f"has ended after {size}", is_away=True)
            _write(file, position, chunk, archive)
            self._has_received = True
            position += len(chunk)
            now = time.monotonic()
            rate = (position - start) / max(now - began, 1e-9)
            left = (archive.size - position) / rate
            if now - began >= TRIAL:
                if rate < enough and left > TRIAL:
                    return rate
                self._hint(left)
            if now - checked >= STALLED:
                if position - checked_position < LEAST * STALLED:
                    raise _StalledError("has stalled", is_away=True)
                checked, checked_position = now, position
            self._tick(functools.partial(_progress, position, archive.size, rate))
        return None

    def _hint(self, left: float) -> None:
        """Says what to do if, at the first call, many seconds are left."""
        if left > LONG and not self._has_hinted:
            flags = invocation.as_flags(data="synthetic", train_dir="runs/stand_in")
            say(
                f"About {format_duration(left)} left; Ctrl-C keeps the part received.\n"
                "If you already have the data set, name its folder with --data_dir.\n"
                f"Meanwhile, the same command trains on a stand-in with\n    {flags}"
            )
        self._has_hinted = True


def _write(file: io.BufferedRandom, start: int, chunk: bytes, archive: Archive) -> None:
    """Writes a chunk, unless it cannot be the archive's or differs from kept bytes."""
    if start == 0 and not _GZIP.startswith(chunk[: len(_GZIP)]):
        raise _SourceError(f"sends something other than {archive.name}")
    if start + len(chunk) > archive.size:
        raise _SourceError(f"sends more than {archive.name}'s {archive.size:,} bytes")
    file.seek(start)
    kept = file.read(len(chunk))
    if kept != chunk[: len(kept)]:  # One of both is wrong; the digests will tell.
        raise _SourceError("sends bytes that differ from the kept ones", is_stale=True)
    file.seek(start)
    file.write(chunk)
    file.flush()  # A kill loses nothing.


def _progress(position: int, size: int, rate: float) -> str:
    unit, factor = ("MB", 1e-6) if rate >= FAST else ("kB", 1e-3)
    speed = f"{errors.format_number(rate * factor, 2)} {unit}/s"
    left = format_duration((size - position) / rate)
    return f"{_megabytes(position)} of {_megabytes(size)} MB at {speed}, {left} left"


def _megabytes(count: int) -> str:
    return errors.format_number(count / 1e6, 3 if count >= 100e6 else 2)


def _ask(url: str, start: int, archive: Archive) -> tuple[Any, int]:
    """Asks for the bytes of an archive from `start` on.

    Returns the response and its first byte's position: 0 if it is the whole archive.
    """
    headers = {"User-Agent": invocation.DISTRIBUTION}
    headers |= {"Range": f"bytes={start}-"} if start else {}
    # The URL is the user's or of this package, and the file's digests are compared.
    # Redirections lead to servers only, not to files.
    request = url_request.Request(url, headers=headers)  # noqa: S310
    response = url_request.urlopen(request, timeout=TIMEOUT)  # noqa: S310
    is_part = response.getcode() == http.client.PARTIAL_CONTENT
    start, asked = (start if is_part else 0), f"bytes {start}-"
    is_page = response.headers.get_content_type() == "text/html"
    size = start + int(response.headers["Content-Length"] or archive.size - start)
    if response.url.startswith("ftp:"):
        problem = "is not on a web server"
    elif is_part and not response.headers.get("Content-Range", "").startswith(asked):
        problem = "sends a part other than the requested one"
    elif is_page or size != archive.size:
        what = "a page (text/html)" if is_page else f"a file of {size:,} bytes"
        problem = f"sends {what}, not {archive.name} of {archive.size:,} bytes"
    else:
        return response, start
    response.close()
    raise _SourceError(problem)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Turns the errors of a connection into a `_SourceError`."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:
        # The reason of a wrong URL is a string.
        cause = getattr(error, "reason", error)
        is_away = isinstance(cause, OSError | http.client.IncompleteRead)
        is_away = is_away and not isinstance(cause, _OF_URL)
        if isinstance(error, url_error.HTTPError):
            error.close()
            cause, is_away = error, error.code in _AWAY
        problem = f"could not be downloaded: {cause}"
        raise _SourceError(problem[:_MOST_WORDS], is_away=is_away) from error
