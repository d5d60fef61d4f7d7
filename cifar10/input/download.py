"""Downloads, verifies and unpacks the official archives of CIFAR.

An archive is downloaded into a hidden folder, verified by its MD5, and unpacked there.
Its folder is then renamed, so it is complete or absent. A lock file lets only one
process at a time prepare a folder; other processes wait and use the result.

`cifar.py` chooses the folder, and decides whether to download at all.
"""

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
TIMEOUT = 10.0  # Seconds to wait for a connection, or for the next bytes.


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
        if scratch.is_dir():  # A killed process has left it.
            shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(0o700)  # Fails if a link or a pipe has this name.
        try:
            source = str(packed or url or URL)
            if packed is None:
                source += name if source.endswith("/") else ""
                packed = scratch / name
                _download(source, packed)
            # MD5 detects accidents, not attacks. FIPS systems refuse it without a flag.
            found = hashlib.md5(packed.read_bytes(), usedforsecurity=False)
            if (md5 := found.hexdigest()) != file_format.md5:
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
        # The URL is the user's, and the file's MD5 is compared.
        response = url_request.urlopen(url, timeout=TIMEOUT)  # noqa: S310
        with response, path.open("xb") as file:
            shutil.copyfileobj(response, file)
    except (
        *(url_error.URLError, ConnectionError, TimeoutError),
        *(http.client.HTTPException, ValueError),
    ) as error:
        # The reason of a wrong URL is a string.
        is_away = isinstance(getattr(error, "reason", error), OSError)
        if isinstance(error, url_error.HTTPError):
            error.close()
            is_away = error.code >= http.client.INTERNAL_SERVER_ERROR
        # The server chose some of the words.
        problem = printable(f"{url} could not be downloaded: {error}.")
        raise (UnavailableError if is_away else UsageError)(problem) from error
