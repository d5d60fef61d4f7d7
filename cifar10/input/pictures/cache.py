"""Manages a cache folder of prepared pictures.

Another user may have put links, pipes or files there. So a cache folder is used only if
both the folder and its parent belong to this user, are not links, and are not writable
by others. Existing files are never changed; only files with this package's names go.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from cifar10 import files
from cifar10.config.options import is_a
from cifar10.errors import UsageError, reason

# The names of shards, and of new files that a kill left behind.
_OURS = re.compile(r"[0-9a-f]{64}\.bin|\.([0-9a-f]{64}\.bin|manifest\.json)-[0-9]+")
# The largest manifest to read. A hundred million pictures would need another format.
_DESCRIPTION_BYTES = 2**30


def folder_for(cache: Path, name: str, *identity: object) -> Path:
    """Returns the cache folder that is named by `name` and a hash of `identity`."""
    content = json.dumps(identity).encode()
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40]
    return cache / "pictures" / f"{plain}-{hashlib.sha256(content).hexdigest()[:16]}"


@contextlib.contextmanager
def opened(home: Path) -> Iterator[None]:
    """Checks a cache folder, or creates it, and then runs the `with` block.

    The folder and its parent must be this user's own, and not links. Folders above them
    may be links, as scratch disks are. The block's `OSError`s become `UsageError`s.
    """
    try:
        home.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (home.parent, home):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
            about = folder.lstat()
            is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid()
            if not is_own or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                said = "it is a link or a file, or others own it or may write to it"
                raise PermissionError(errno.EPERM, said, str(folder))
        yield
    except OSError as error:
        raise UsageError(
            f"The prepared pictures cannot be used: {error.filename or home}: "
            f"{reason(error)}. Fix this, or set XDG_CACHE_HOME to another folder."
        ) from error


def remove_others(folder: Path, kept: Collection[str]) -> None:
    """Removes this package's cache files from a folder, except those in `kept`."""
    for path in folder.iterdir():
        is_ours = _OURS.fullmatch(path.name) and path.name not in kept
        if is_ours and path.is_file() and not path.is_symlink():
            path.unlink()


def save(path: Path, values: Any) -> None:
    """Writes values as JSON, after a line with the SHA-256 checksum of the JSON."""
    content = json.dumps(values, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    files.write_atomically(path, digest.encode() + b"\n" + content)


def load(path: Path, schema: Any) -> Any:
    """Returns what `save` wrote; None if missing, damaged or not of type `schema`."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        digest, _, content = files.read(path, _DESCRIPTION_BYTES).partition(b"\n")
        if digest == hashlib.sha256(content).hexdigest().encode():
            values = json.loads(content)
            return values if is_a(values, schema) else None
    return None
