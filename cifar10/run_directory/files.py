"""Files and folders on a disk that may fail."""

import hashlib
import os
from pathlib import Path

from cifar10.errors import DiskError, reason
from cifar10.process import regular_files


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal."""
    with regular_files.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rename(path: Path, target: Path) -> Path:
    """Renames a file or folder; raises a `DiskError` if that fails."""
    try:
        return path.rename(target)
    except OSError as error:
        raise DiskError(
            f"{path} cannot be renamed to {target.name}: {reason(error)}.",
            f"Make {path.parent} writable for this user and try again.",
        ) from error


def unused(path: Path) -> Path:
    """Returns the path with the first number appended at which nothing exists."""
    numbers = (path.with_name(f"{path.name}{number}") for number in range(1, 10_000))
    # Not `Path.exists`, for which a link that leads nowhere is nothing.
    return next(name for name in numbers if not os.path.lexists(name))


def unreadable(path: Path, error: OSError) -> DiskError:
    """Returns the error to raise for a file that exists and cannot be read."""
    return DiskError(
        f"{path} cannot be read: {reason(error)}.",
        "Make it readable for this user and try again.",
    )
