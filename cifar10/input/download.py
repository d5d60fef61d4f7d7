"""Downloads, verifies and unpacks the official archives of CIFAR.

An archive is downloaded into a hidden folder, verified by its MD5, and unpacked there.
Its folder is then renamed, so it is complete or absent. A lock file lets only one
process at a time prepare a folder; other processes wait and use the result.

`cifar.py` chooses the folder, and decides whether to download at all.
"""

import functools
import hashlib
import http.client
import shutil
import tarfile
import zlib
from pathlib import Path

from six.moves.urllib import error as url_error, request as url_request

from cifar10.errors import UnavailableError, UsageError, printable, say
from cifar10.input.records import Format, explained
from cifar10.process import files

URL = "https://www.cs.toronto.edu/~kriz/"  # Of the folder of the official archives.
SCHEMES = ("https", "http", "file")
TIMEOUT = 10.0  # Seconds to wait for a connection, or for the next bytes.


def check_url(url: str) -> None:
    """Refuses a `--data_url` of an unknown scheme."""
    if url.partition("://")[0].lower() not in SCHEMES:
        raise UsageError(
            f"--data_url {url} cannot be downloaded: a URL must begin with one "
            f"of {', '.join(SCHEMES)}, followed by '://'."
        )


def fetch(
    file_format: Format,
    directory: Path,
    url: str | None = None,
    packed: Path | None = None,
) -> Path:
    """Returns the unpacked folder of an archive, after downloading it if necessary.

    Args:
        file_format: Names the archive. A file with any other content is refused.
        directory: The folder to unpack into, which is created if missing.
        url: URL of the archive, or of its folder if the URL ends in a slash. By default
            the official URL.
        packed: Path of the archive on disk; by default, the archive is downloaded.

    Returns:
        The unpacked folder, `directory / file_format.folder`.
    """
    name, folder = file_format.archive, directory / file_format.folder
    scratch = directory / f".{folder.name}.unpacking"
    waiting = f"Waiting for another process to prepare {directory} ..."
    lock = files.locked(directory / f".{name}.lock", waiting)
    with explained(directory), lock:
        if folder.exists():
            return folder
        shutil.rmtree(scratch, ignore_errors=True)  # A killed process may have left it.
        scratch.mkdir(0o700)  # Fails if a link has this name.
        try:
            source = str(packed or url or URL)
            if packed is None:
                source += name if source.endswith("/") else ""
                packed = scratch / name
                _download(source, packed)
            if (md5 := _md5_of(packed)) != file_format.md5:
                raise UsageError(
                    f"{source} is not the published {name}: its MD5 is {md5}, not "
                    f"{file_format.md5}.\nReplace it, or name another --data_url."
                )
            with tarfile.open(packed, "r:gz") as tar:
                tar.extractall(scratch, filter="data")
            (scratch / folder.name).rename(folder)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise UsageError(f"{source} cannot be unpacked: {error}.") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return folder


def _download(url: str, path: Path) -> None:
    """Downloads a file.

    Raises:
        UnavailableError: The server cannot be reached, or has a fault of its own.
        UsageError: The URL cannot be downloaded.
    """
    say(f"Downloading {printable(url)} ...")
    try:
        # The URL is the user's; `check_url` has checked its scheme.
        response = url_request.urlopen(url, timeout=TIMEOUT)  # noqa: S310
        with response, path.open("xb") as file:
            shutil.copyfileobj(response, file)
    except url_error.HTTPError as error:
        error.close()
        is_away = error.code >= http.client.INTERNAL_SERVER_ERROR
        kind = UnavailableError if is_away else UsageError
        raise kind(_failure(url, error)) from error
    except (url_error.URLError, ConnectionError, TimeoutError) as error:
        raise UnavailableError(_failure(url, error)) from error
    except (http.client.HTTPException, ValueError) as error:
        raise UsageError(_failure(url, error)) from error


def _failure(url: str, error: Exception) -> str:
    # The server chose some of the words.
    return printable(f"{url} could not be downloaded: {error}.")


def _md5_of(path: Path) -> str:
    """Returns the MD5 of a file in hexadecimal digits."""
    # MD5 detects accidents, not attacks. FIPS systems refuse it without this flag.
    checksum = functools.partial(hashlib.md5, usedforsecurity=False)
    with path.open("rb") as file:
        return hashlib.file_digest(file, checksum).hexdigest()
