"""The lock of a run's directory, which only one training run may hold."""

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

from cifar10 import files
from cifar10.config import layout
from cifar10.errors import UsageError, reason

_LOCK = ".lock"


class RunLock:
    """Locks a run directory against other training runs, and creates it if absent.

    The lock is on the file `.lock`, not on the directory, which NFS would lock on one
    machine only. Every path to the directory leads to the same lock. The system
    releases the lock whenever the process ends; a leftover file locks nothing.

    Entering this context manager raises a `UsageError` if another training run holds
    the lock, or if the directory cannot hold a run.
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
        """Releases the lock. If no run began, deletes what `_acquire` made."""
        path = self._path / _LOCK
        with contextlib.suppress(OSError, ValueError):  # It is released, or gone.
            # Another run has made its own if somebody has deleted this one.
            is_own = os.path.samestat(os.fstat(self._lock.fileno()), path.lstat())
            if is_own and not (self._path / layout.CONFIG).exists():
                path.unlink()
                if self._is_new:
                    self._path.rmdir()
        self._held.close()

    def move_aside(self, target: Path) -> None:
        """Renames the directory, then creates and locks a new one at the old path."""
        self._path.rename(target)
        with self._held.pop_all():
            self._acquire()

    def _acquire(self) -> None:
        path = self._path
        with contextlib.ExitStack() as held, explaining_errors(path):
            holds_run(path)  # Refuses other content before writing anything.
            self._is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            lock = files.opened(path / _LOCK, "a+b", buffering=0)
            held.enter_context(lock)
            try:
                _take(lock)
            except BlockingIOError as error:
                holder = os.pread(lock.fileno(), 300, 0).decode(errors="replace")
                raise UsageError(
                    f"--train_dir {path} is in use by another training run: {holder}. "
                    "Wait until that run ends, or choose another --train_dir."
                ) from error
            links = os.fstat(lock.fileno()).st_nlink
            if links > 1:  # Must not be truncated below.
                raise OSError(errno.EMLINK, f"its {_LOCK} is a hard link")
            if not links:  # Who held it has deleted it meanwhile.
                self._acquire()
                return
            with contextlib.suppress(PermissionError):  # Another user owns it.
                os.fchmod(lock.fileno(), 0o666)  # Who may write here may lock it.
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            self._lock, self._held = lock, held.pop_all()


def _take(lock: BinaryIO) -> None:
    """Locks a file; tries for a second, since `is_locked` locks it for a moment."""
    end = time.monotonic() + 1.0
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def holds_run(path: Path) -> bool:
    """Returns whether a directory holds a run; refuses files and other content."""
    if not path.exists():
        if path.is_symlink():
            why = f"is a link to {os.path.realpath(path)}, which is missing"
            raise UsageError(f"--train_dir {path} {why}. Mount or create that.")
        return False
    if not path.is_dir():
        raise UsageError(f"--train_dir {path} is a file; it has to be a directory.")
    if (path / layout.CONFIG).exists():
        return True
    if any(not entry.name.startswith(".") for entry in path.iterdir()):
        why = f"holds files, but no run with a {layout.CONFIG}"
        raise UsageError(f"--train_dir {path} {why}. Choose a new or empty directory.")
    return False


@contextlib.contextmanager
def explaining_errors(path: Path) -> Iterator[None]:
    """Turns an `OSError` into a `UsageError` that names the run's directory."""
    try:
        yield
    except OSError as error:
        why = f"The run directory {path} cannot be used: {reason(error)}"
        raise UsageError(f"{why}. Fix this, or name another directory.") from error


def is_locked(path: Path) -> bool:
    """Returns whether a training run holds a directory's lock; True if unknown.

    Refuses what is not a file: no training run of this package has made it.
    The check itself locks the file for a moment, for which a training run waits.
    """
    try:
        with files.opened(path / _LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR):
            why = f"{path / _LOCK} locks nothing: {reason(error)}"
            raise UsageError(f"{why}. Delete it.") from error
        return True  # For example, this user may not read the file.
    return False
