"""Opens, replaces and renames files in folders that other users may write to.

Another user could put a link to one of this user's files there, or a pipe that blocks.
So only regular files are opened, and files are replaced atomically. Errors name a fix.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from cifar10.errors import DiskError, UsageError, reason, say

# More bytes than a `config.json` or a manifest ever has.
DESCRIPTION_BYTES = 1_000_000


def opened(
    path: Path, mode: str = "rb", *, buffering: int = -1, follow: bool = False
) -> io.BufferedRandom:
    """Opens a regular file as `open` does, but follows a link to it only if `follow`.

    Raises an `OSError` for pipes and devices. Folders in `path` may always be links.
    """
    if path.is_symlink() and not follow:
        said = "it is a link, and links are not followed"
        raise OSError(errno.ELOOP, said, str(path))

    def opener(name: str, flags: int) -> int:  # A link may have come since then.
        further = os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        return os.open(name, flags | further, 0o666)

    # `Path.open` takes no opener.
    file = open(path, mode, buffering, opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    return cast(io.BufferedRandom, file)


def note_path(kind: str, content: bytes) -> Path:
    """Returns the path of a file whose existence marks content as this user's."""
    if not (state := Path(os.environ.get("XDG_STATE_HOME", ""))).is_absolute():
        state = Path.home() / ".local" / "state"
    return state / "cifar10" / kind / hashlib.sha256(content).hexdigest()


def read(path: Path, most: int = DESCRIPTION_BYTES, *, follow: bool = False) -> bytes:
    """Returns a regular file's content; raises an `OSError` above `most` bytes."""
    with opened(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def read_end(path: Path, most: int) -> bytes:
    """Returns the whole lines among the last `most` bytes of a regular file."""
    with opened(path) as file:
        begin = max(0, file.seek(0, os.SEEK_END) - most)
        file.seek(begin)
        content = file.read(most)
    return content.partition(b"\n")[2] if begin else content


def sha256(path: Path, *, follow: bool = False) -> str:
    """Returns the SHA-256 of a regular file's content, in hexadecimal."""
    with opened(path, follow=follow) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Waits until the content of a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # A pipe would block.
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replaces a file atomically, once the new content is on the disk."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # Follows no link.
            file.writelines([content] if isinstance(content, bytes) else content)
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_new(path: Path, flag: str) -> None:
    """Refuses an output path that exists already or that cannot be created."""
    if os.path.lexists(path):
        raise UsageError(f"{flag} {path} already exists. Name another path.")
    check_writable(path, flag)


def check_writable(path: Path, flag: str) -> None:
    """Refuses an output folder that cannot be created or written to."""
    above = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        why = f"{flag} {path} cannot be created in {above}"
        raise UsageError(f"{why}. Name another path.")


def write_output(path: Path, flag: str, content: bytes) -> None:
    """Writes an output file atomically, and its folder; errors name the `flag`."""
    with writing(path, flag):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


@contextlib.contextmanager
def writing(path: Path, flag: str) -> Iterator[None]:
    """Turns an `OSError` into a `UsageError` that names an output path's `flag`."""
    try:
        yield
    except OSError as error:
        why = f"{flag} {path} cannot be written: {reason(error)}"
        raise UsageError(f"{why}. Name another path.") from error


def rename(path: Path, target: Path) -> Path:
    """Renames a file or folder; raises a `DiskError` on failure."""
    try:
        return path.rename(target)
    except OSError as error:
        why = f"{path} cannot be renamed to {target.name}: {reason(error)}."
        fix = f"Make {path.parent} writable for this user and try again."
        raise DiskError(why, fix) from error


def unused(path: Path) -> Path:
    """Returns an unused path: `path` with the lowest possible number appended."""
    numbers = (path.with_name(f"{path.name}{number}") for number in range(1, 10_000))
    # `Path.exists` would overlook a broken link.
    return next(name for name in numbers if not os.path.lexists(name))


def unreadable(path: Path, error: OSError) -> DiskError:
    """Returns the error to raise for a file that exists and cannot be read."""
    is_no_file = error.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR)
    fix = "Put a file in its place" if is_no_file else "Make it readable for this user"
    fix = "Move it away" if error.errno == errno.EFBIG else fix
    return DiskError(f"{path} cannot be read: {reason(error)}.", f"{fix}, then retry.")


@contextlib.contextmanager
def locked(path: Path, waiting: str) -> Iterator[None]:
    """Holds an exclusive lock on a file; prints `waiting` if it first has to wait.

    Creates the file and its folder, and never deletes them. If the file were deleted,
    another process could lock a new file while this process still locks the old file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(waiting)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
