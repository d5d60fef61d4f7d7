"""The lock of a run's directory: one training at a time may write there."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from cifar10.config import layout
from cifar10.errors import UsageError, printable, reason
from cifar10.process import files

_LOCK = ".lock"


class RunLock:
    """Keeps other trainings out of a run directory, which is made if there is none.

    The lock is on a file in the directory, and so is the same for every path and user;
    it is not on the directory itself, which NFS locks on one machine only. The
    system releases it when the process ends, however it ends; a file that is left
    behind locks nothing.

    Entered as a context manager, it raises a `UsageError` if another training holds the
    lock, or if the directory cannot hold a run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._acquire()
        return self

    def __exit__(self, *unused: object) -> None:
        self.release()

    def release(self) -> None:
        """Lets other trainings in; removes the lock's file where no run has begun."""
        with contextlib.suppress(OSError):
            if not (self._path / layout.CONFIG).exists():
                (self._path / _LOCK).unlink()
                if self._is_new:
                    self._path.rmdir()
        self._held.close()

    def move_aside(self, target: Path) -> None:
        """Renames the directory, and locks a new one in its place."""
        self._path.rename(target)
        with self._held.pop_all():
            self._acquire()

    def _acquire(self) -> None:
        path = self._path
        with contextlib.ExitStack() as held, explaining_errors(path):
            holds_run(path)  # Nothing is written where another thing than a run is.
            self._is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            lock = files.opened(path / _LOCK, "a+b", buffering=0)
            _lock(held.enter_context(lock).fileno(), path)
            if os.fstat(lock.fileno()).st_nlink > 1:  # It is truncated below.
                raise OSError(errno.EMLINK, f"its {_LOCK} is a link")
            with contextlib.suppress(PermissionError):  # It is another user's.
                os.fchmod(lock.fileno(), 0o666)  # Who may write here may lock it.
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            self._held = held.pop_all()


def holds_run(path: Path) -> bool:
    """Returns whether a run is in a directory, which may be absent or empty.

    Refuses a path where a run cannot be: a file, or a directory with other files.
    """
    if not path.exists():
        return False
    if not path.is_dir():
        raise UsageError(f"--train_dir {path} is a file; it has to be a directory.")
    if (path / layout.CONFIG).exists():
        return True
    if any(not entry.name.startswith(".") for entry in path.iterdir()):
        raise UsageError(
            f"--train_dir {path} holds files but no run ({layout.CONFIG} is missing). "
            "Choose an empty or new directory."
        )
    return False


@contextlib.contextmanager
def explaining_errors(path: Path) -> Iterator[None]:
    """Reports a disk error as a `UsageError` that names the run's directory."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--train_dir {path} cannot be used: {reason(error)}. Choose a directory "
            "that you can write to and that has room."
        ) from error


def is_locked(path: Path) -> bool:
    """Returns whether a training holds the lock of a directory; True if unknown.

    This shares the lock for a moment, in which a training that begins is refused.
    """
    try:
        with files.opened(path / _LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # Such as a lock that this user may not read.
        return True
    return False


class DirectoryGuard:
    """Notices when the directory that a run writes to, or its lock, was replaced."""

    def __init__(self, path: Path) -> None:
        self._paths = (path, path / _LOCK)
        self._before = [*map(_identity, self._paths)]

    def problem(self) -> str:
        """Returns why the directory must no longer be written to; empty if it may.

        A directory that has vanished is noticed when it is written to.
        """
        (directory, lock), (now, lock_now) = self._before, map(_identity, self._paths)
        if directory and now and directory != now:
            return "the run's directory was moved, and another is in its place"
        if now and lock and lock != lock_now:
            return f"its {_LOCK}, which keeps other trainings out, was deleted"
        return ""


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        return path.stat().st_dev, path.stat().st_ino
    return None


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(file, 300, 0).decode(errors="replace")
        raise UsageError(
            f"--train_dir {path} is in use by another training: {printable(holder)}. "
            "Wait for its end, stop it, or choose another --train_dir."
        ) from error
