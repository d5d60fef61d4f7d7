"""What is being read is not deleted: locks that end with the process that holds them.

A reader shares a lock on a checkpoint's manifest; the training deletes a checkpoint
only while it has that lock alone. It is on a file and not on the folder, because NFS
gives a lock of one's own only on what is open for writing. Where a file system has no
locks, both go on without: then a reader may find that its checkpoint has vanished.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """Keeps others from deleting what `file` stands for, as far as there are locks."""
    with contextlib.ExitStack() as stack:
        # Whether it is there and readable is for the reader to find out. It does not
        # wait, either: a lock is refused only for a file that is being deleted.
        with contextlib.suppress(OSError):
            opened = stack.enter_context(file.open("rb"))
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


@contextlib.contextmanager
def keeping_out(file: Path) -> Iterator[bool]:
    """Keeps readers out while something is deleted.

    Yields:
        Whether it may be deleted: nobody is reading, as far as there are locks.
    """
    with contextlib.ExitStack() as stack:
        free = True
        try:
            opened = stack.enter_context(file.open("r+b"))
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # There is no such file, or the file system has no locks.
            pass
        yield free
