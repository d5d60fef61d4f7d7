"""Opens regular files and nothing else, replaces them whole, and locks them.

What somebody else has prepared may be a link, which may stand for any of the user's
files, or a pipe, whose opening may wait forever.
"""

import contextlib
import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from cifar10.errors import say

# More than any description, such as a `config.json` or a manifest, takes.
DESCRIPTION_BYTES = 1_000_000


def opened(
    path: Path,
    mode: str = "rb",
    *,
    buffering: int = -1,
    follow: bool = False,
    folder: int | None = None,
) -> io.BufferedRandom:
    """Opens a regular file, as `open` does; with `follow` it may be a link to one.

    The folders on its path may be links, unless the path is a name in an open `folder`.
    Anything else is an `OSError`.
    """
    further = os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)

    def opener(name: str, flags: int) -> int:
        try:
            return os.open(name, flags | further, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ELOOP or follow:
                raise
            said = "it is a link, which is not followed"
            raise OSError(errno.ELOOP, said, name) from error

    # `Path.open` takes no opener.
    file = open(path, mode, buffering, opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    return cast(io.BufferedRandom, file)


def read(path: Path, most: int = DESCRIPTION_BYTES, *, follow: bool = False) -> bytes:
    """Returns the content of a regular file; an `OSError` if it is more than `most`."""
    with opened(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def sync(path: Path) -> None:
    """Waits until a file or folder has reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file once its new content has reached the disk."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # Not through a link of this name.
            file.write(content)
        sync(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path, waiting: str, *, folder: int | None = None) -> Iterator[None]:
    """Keeps other processes out; says `waiting` if one of them has to end first.

    The file is created, and so is its folder unless `path` is a name in an open one.
    They stay: removing the file could let a third process lock a new one while the
    second still holds the old one.
    """
    if folder is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, "ab", folder=folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
