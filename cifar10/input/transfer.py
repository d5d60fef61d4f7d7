"""One file from one URL, however bad the connection.

The file grows in a part file, which a later attempt or run resumes with an HTTP Range
request. It is complete when both its size and its MD5 are right; anything else is
removed, so that nothing wrong is ever resumed.
"""

import contextlib
import dataclasses
import functools
import hashlib
import http.client
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from six.moves.urllib import error as url_error, request as url_request

from cifar10.process.files import opened

CHUNK_BYTES = 1 << 16
# Seconds between two reports: the line on a terminal is overwritten, a log grows.
TERMINAL_SECONDS = 0.2
LOG_SECONDS = 10.0


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
    """This URL may give the file later: no connection, or too many that broke."""


class _ConnectionFailedError(Exception):
    """A connection failed; another attempt may succeed."""


class _UnreachableError(_ConnectionFailedError):
    """No connection was made."""


def receive(url: str, part: Path, size: int, md5: str, patience: Patience) -> None:
    """Completes a part file from a URL, and verifies its size and MD5.

    Raises:
        SourceError: The URL does not give this file.
        OSError: The part file cannot be written.
    """
    found = length(part)
    failures, milestone, resumed = 0, found, found > 0
    while True:
        try:
            if length(part) < size:
                _append(url, part, size, patience)
        except _ConnectionFailedError as error:
            # A host that never answered will not do so in a second; one that stopped
            # answering may.
            if isinstance(error, _UnreachableError) and length(part) == found:
                raise NoConnectionError(str(error)) from error
            if length(part) >= milestone + size // 100:
                failures, milestone = 0, length(part)
            failures += 1
            if failures >= patience.attempts:
                message = f"{error}, {failures} times in a row"
                raise NoConnectionError(message) from error
            time.sleep(patience.pause)
            continue
        if length(part) == size and md5_of(part) == md5:
            return
        part.unlink()
        # The fault may be in what an earlier run or server left: start again, once.
        if not resumed:
            raise SourceError(f"what it serves does not have the MD5 {md5}")
        milestone, resumed = 0, False


def length(path: Path) -> int:
    """Returns the number of bytes in a file, 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def md5_of(path: Path) -> str:
    """Returns the MD5 of a file in hexadecimal digits."""
    # It detects accidents, not attacks; FIPS systems refuse it without this flag.
    checksum = functools.partial(hashlib.md5, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, checksum).hexdigest()


def _append(url: str, part: Path, size: int, patience: Patience) -> None:
    """Appends what one connection sends to the part file."""
    pace = _Pace(patience)
    with contextlib.closing(_open(url, length(part), pace)) as response:
        # A server that ignores the range sends the file from its beginning.
        partial = response.status == http.client.PARTIAL_CONTENT
        start = done = length(part) if partial else 0
        announced = response.headers.get("Content-Length")
        if announced is not None and announced != str(size - start):
            raise SourceError(f"it serves {announced} bytes instead of {size - start}")
        with opened(part, "ab") as file, _progress(part.stem, size, start) as report:
            file.truncate(start)
            for chunk in _chunks(response):
                file.write(chunk)
                done += len(chunk)
                pace.received += len(chunk)
                if done > size:
                    part.unlink()
                    raise SourceError(f"it serves more than {size} bytes")
                report(done)
    if done < size:
        problem = f"the connection ended after {done} of {size} bytes"
        raise _ConnectionFailedError(problem)


class _Pace:
    """Fails where a server sends fewer bytes of the file than it has to."""

    def __init__(self, patience: Patience) -> None:
        self.received = 0
        self.patience = patience
        self._window: tuple[float, int] | None = None  # When, and at how many bytes.

    def check(self) -> None:
        """Looks at the clock, as before anything is read from a server."""
        now = time.monotonic()
        began, before = self._window = self._window or (now, self.received)
        seconds, received = now - began, self.received - before
        if seconds >= self.patience.window:
            self._window = None
            if received < self.patience.least_rate * seconds:
                problem = f"it sent {received} bytes of the file in {seconds:.0f} s"
                raise TimeoutError(problem)


def _opener(pace: _Pace) -> Any:
    """Returns what opens URLs, and checks the pace whenever it reads.

    The timeout of a socket starts again with each byte, and so does not bound a status,
    header or chunk size that drips.
    """

    class Response(http.client.HTTPResponse):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            raw: Any = self.fp.raw
            read = raw.readinto

            def readinto(buffer: Any) -> int | None:
                pace.check()
                return read(buffer)

            raw.readinto = readinto

    class Handler(url_request.HTTPHandler, url_request.HTTPSHandler):
        def do_open(self, http_class: Any, req: Any, **http_conn_args: Any) -> Any:
            paced: Any = type("Paced", (http_class,), {"response_class": Response})
            return super().do_open(paced, req, **http_conn_args)

    return url_request.build_opener(Handler())


def _open(url: str, offset: int, pace: _Pace) -> Any:
    """Requests the file from a byte onwards and returns the response."""
    headers = {"Range": f"bytes={offset}-"} if offset else {}
    try:
        # The URL is the user's; `download.parse_urls` has checked its scheme.
        request = url_request.Request(url, headers=headers)  # noqa: S310
        return _opener(pace).open(request, timeout=pace.patience.timeout)
    except url_error.HTTPError as error:
        error.close()
        if offset and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _open(url, 0, pace)
        problem = f"HTTP {error.code} {error.reason}"
        if error.code >= http.client.INTERNAL_SERVER_ERROR:
            raise _ConnectionFailedError(problem) from error
        raise SourceError(problem) from error
    except url_error.URLError as error:
        raise _UnreachableError(str(error.reason)) from error
    except OSError as error:
        raise _ConnectionFailedError(str(error)) from error
    except (http.client.HTTPException, ValueError) as error:
        raise SourceError(f"{type(error).__name__}: {error}") from error


def _chunks(response: Any) -> Iterator[bytes]:
    """Yields the body of a response as it arrives."""
    try:
        # Not `read`, which would wait for a whole chunk however slowly it comes.
        while chunk := response.read1(CHUNK_BYTES):
            left = getattr(response, "chunk_left", None)
            if isinstance(left, int) and left < 0:
                raise _ConnectionFailedError("it announces a chunk of negative size")
            yield chunk
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise _ConnectionFailedError(str(error) or type(error).__name__) from error


@contextlib.contextmanager
def _progress(name: str, size: int, start: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that prints, now and then, how many bytes have arrived."""
    terminal = sys.stderr.isatty()
    pause = TERMINAL_SECONDS if terminal else LOG_SECONDS
    began = printed = time.monotonic()

    def report(done: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed < pause:
            return
        printed = now
        rate = max(done - start, 1) / max(now - began, 1e-3)
        line = (
            f"{name}: {done / 1e6:.1f} of {size / 1e6:.1f} MB, "
            f"{rate / 1e6:.2f} MB/s, {(size - done) / rate:.0f} s left"
        )
        # The escape sequence clears what is left of a longer line.
        print(line, end="\x1b[K\r" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if terminal:
            print(file=sys.stderr)
