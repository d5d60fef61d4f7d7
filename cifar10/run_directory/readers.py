"""Locks that keep a checkpoint from being deleted while it is read.

A reader shares a lock on a checkpoint's manifest; the training deletes a checkpoint
only while it holds that lock alone. The lock is on a file, not the folder, because NFS
grants an exclusive lock only on what is open for writing. A lock ends with its process.
On a file system without locks, a reader may find that its checkpoint has vanished.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from cifar10.process import regular_files


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Keeps the checkpoint of a manifest from being deleted, if there are locks."""
    with contextlib.ExitStack() as stack:
        # A missing file is the reader's concern. A lock is refused only for a file that
        # is being deleted, so waiting would be of no use.
        with contextlib.suppress(OSError):
            opened = stack.enter_context(regular_files.opened(file))
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def keeping_out(file: Path) -> Iterator[bool]:
    """Keeps readers out, and yields whether deleting is safe: no reader is known."""
    with contextlib.ExitStack() as stack:
        free = True
        try:
            opened = stack.enter_context(regular_files.opened(file, "r+b"))
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # There is no such file, or the file system has no locks.
            pass
        yield free
