"""One file from one URL, however bad the connection.

The file grows in a part file, which a later attempt or run continues with an HTTP Range
request. It is complete when both its size and its MD5 are right; what turns out to be
something else is removed, so that nothing wrong is ever continued.

`download.py` says which file, from which URLs, and what becomes of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import http.client
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from six.moves.urllib import error as url_error, request as url_request

CHUNK_BYTES = 1 << 16
# Seconds between two reports: the line on a terminal is overwritten, a log grows.
TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Patience:
    """When to give a server up.

    Args:
        timeout: Seconds to wait for a connection, or for the next bytes.
        attempts: Attempts in a row that may fail without a hundredth of the file
            gained between them.
        pause: Seconds before an attempt is repeated.
    """

    timeout: float = 30.0
    attempts: int = 5
    pause: float = 1.0


class SourceError(Exception):
    """This URL does not give the file; another one may."""


class _UnreachableError(Exception):
    """No connection came about."""


class _CutError(Exception):
    """A connection failed on the way."""


def receive(url: str, part: Path, size: int, md5: str, patience: Patience) -> None:
    """Completes a part file from a URL and verifies it.

    Args:
        url: Where the file is; http, https or file.
        part: The part file, which need not exist.
        size: Bytes of the whole file.
        md5: MD5 of the whole file, in hexadecimal digits.
        patience: When to give up.

    Raises:
        SourceError: The URL does not give this file.
        OSError: The part file cannot be written.
    """
    progress = _Progress(part.stem, size)
    failures, milestone, restarted = 0, length(part), False
    while True:
        resumed = length(part) > 0
        try:
            if length(part) < size:
                _append(url, part, size, patience.timeout, progress)
            if length(part) == size and md5_of(part) == md5:
                return
            part.unlink()
            # The fault may lie in what another run or server left: once, start afresh.
            if restarted or not resumed:
                raise SourceError(f"what it serves does not have the MD5 {md5}")
            milestone, restarted = 0, True
        except (_CutError, _UnreachableError) as error:
            # A name or port that never answered will not do so in a second; one that
            # stops answering on the way may.
            if isinstance(error, _UnreachableError) and not progress.begun:
                raise SourceError(str(error)) from error
            if length(part) >= milestone + size // 100:
                failures, milestone = 0, length(part)
            failures += 1
            if failures >= patience.attempts:
                raise SourceError(f"{error}, {failures} times in a row") from error
            time.sleep(patience.pause)
        finally:
            progress.pause()


def length(path: Path) -> int:
    """Returns the bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def md5_of(path: Path) -> str:
    """Returns the MD5 of a file in hexadecimal digits."""
    # It is there to detect accidents; without this word FIPS systems refuse it.
    checksum = functools.partial(hashlib.md5, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, checksum).hexdigest()


def _append(
    url: str, part: Path, size: int, timeout: float, progress: _Progress
) -> None:
    """Adds to the part file what one connection brings."""
    asked = length(part)
    with contextlib.closing(_open(url, asked, timeout)) as response:
        done = _accepted_offset(response, asked, size)
        with part.open("ab") as file:
            # Servers that know no Range begin at the beginning, and so does the file.
            file.truncate(done)
            for chunk in _chunks(response):
                file.write(chunk)
                done += len(chunk)
                if done > size:
                    part.unlink()
                    raise SourceError(f"it serves more than {size} bytes")
                progress.update(done)
    if done < size:
        raise _CutError(f"the connection ended after {done} of {size} bytes")


def _open(url: str, offset: int, timeout: float) -> Any:
    """Asks for the file from a byte onwards and returns the response."""
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    try:
        # The URL is the user's; parse_urls() in download.py has looked at its scheme.
        request = url_request.Request(url, headers=headers)  # noqa: S310
        return url_request.urlopen(request, timeout=timeout)  # noqa: S310
    except url_error.HTTPError as error:
        error.close()
        if offset and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _open(url, 0, timeout)
        problem = f"HTTP {error.code} {error.reason}"
        if error.code >= http.client.INTERNAL_SERVER_ERROR:
            raise _CutError(problem) from error
        raise SourceError(problem) from error
    except url_error.URLError as error:
        raise _UnreachableError(str(error.reason)) from error
    except OSError as error:
        raise _CutError(str(error)) from error
    except (http.client.HTTPException, ValueError) as error:
        raise SourceError(f"{type(error).__name__}: {error}") from error


def _accepted_offset(response: Any, asked: int, size: int) -> int:
    """Returns the byte a response starts at, after checking the size it announces."""
    offset = 0
    if response.status == http.client.PARTIAL_CONTENT:
        offset = asked
        span = response.headers.get("Content-Range", "")
        # The whole size after the slash may be given as "*".
        if span.rpartition("/")[0] != f"bytes {asked}-{size - 1}":
            raise SourceError(f"it answers with '{span}', not the bytes from {asked}")
    announced = response.headers.get("Content-Length")
    if announced is not None and announced != str(size - offset):
        raise SourceError(f"it serves {announced} bytes instead of {size - offset}")
    return offset


def _chunks(response: Any) -> Iterator[bytes]:
    """Yields the body of a response as it comes."""
    try:
        while chunk := response.read(CHUNK_BYTES):
            yield chunk
    except (http.client.HTTPException, OSError) as error:
        raise _CutError(str(error) or type(error).__name__) from error


class _Progress:
    """Shows on stderr how far a transfer is, how fast, and for how long still.

    Args:
        name: What is transferred.
        size: Its bytes.
    """

    def __init__(self, name: str, size: int) -> None:
        self.begun = False
        self._name = name
        self._size = size
        self._terminal = sys.stderr.isatty()
        self._shown = time.monotonic()
        self._start: tuple[float, int] | None = None

    def update(self, done: int) -> None:
        """Notes that `done` bytes are here, and says so from time to time."""
        now = time.monotonic()
        self.begun = True
        if self._start is None:
            self._start = now, done
        if now - self._shown >= (TERMINAL_SECONDS if self._terminal else LOG_SECONDS):
            self._shown = now
            self._show(done, now - self._start[0], done - self._start[1])

    def pause(self) -> None:
        """Ends the line on a terminal; the next connection is timed anew."""
        if self._terminal and self._start is not None:
            print(file=sys.stderr)
        self._start = None

    def _show(self, done: int, seconds: float, received: int) -> None:
        """Writes one line, over the last one on a terminal."""
        rate = max(received, 1) / max(seconds, 1e-3)
        line = (
            f"{self._name}: {done / 1e6:.1f} of {self._size / 1e6:.1f} MB, "
            f"{rate / 1e6:.2f} MB/s, {(self._size - done) / rate:.0f} s left"
        )
        # The escape sequence clears what is left of a longer line.
        end = "\x1b[K\r" if self._terminal else "\n"
        print(line, end=end, file=sys.stderr, flush=True)
