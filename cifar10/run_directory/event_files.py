"""Event files and logs on a disk that may fail."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from cifar10.errors import DiskError, reason

_GO_ON = (
    "Make room there or make it writable, then give the same command again, without "
    "--fresh."
)


@contextlib.contextmanager
def writing(directory: Path, fix: str = _GO_ON) -> Iterator[None]:
    """Raises a `DiskError` where event files or logs cannot be written."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise DiskError(
            f"The event files and logs in {directory} cannot be written: "
            f"{reason(error)}.",
            fix,
        ) from error
