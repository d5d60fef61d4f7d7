"""A folder of the cache, which holds prepared pictures.

Somebody else may have put links, pipes or other files there. So the folder is used only
if it and its parent are this user's alone, and not links. Nothing is ever written into
an existing file, and only files with names of this package are removed.
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

from cifar10.config.options import is_a
from cifar10.errors import UsageError, printable, reason
from cifar10.process import files

# A shard; files of older versions; and a new file, which a kill may leave.
_OURS = re.compile(
    r"[0-9a-f]{64}\.[a-z]+|"
    r"\.(new|(contact_sheet|labels|manifest|[0-9a-f]{64})\.[a-z]+)-[0-9a-f]+"
)
_WAITING = "Waiting for another process to prepare the pictures ..."
# Descriptions of a hundred million pictures are larger, and would need another format.
_DESCRIPTION_BYTES = 2**30


def folder_for(cache: Path, name: str, *identity: object) -> Path:
    """Returns the folder of the cache for one source of pictures."""
    content = json.dumps(identity).encode()
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40]
    return cache / "pictures" / f"{plain}-{hashlib.sha256(content).hexdigest()[:16]}"


@contextlib.contextmanager
def opened(home: Path) -> Iterator[None]:
    """Checks a folder of the cache, creates it if there is none, and explains errors.

    The folder and its parent have to be folders of this user; the folders above may
    be links, as a home or a scratch disk often is.

    Raises:
        UsageError: The folder cannot be used, or an `OSError` was raised within.
    """
    try:
        home.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (home.parent, home):
            _make_own(folder)
        yield
    except OSError as error:
        name = Path(str(error.filename or home)).name
        raise UsageError(
            f"The prepared pictures in {printable(str(home))} cannot be read or "
            f"written: {printable(name)}: {reason(error)}.\nFix that and start again "
            "to continue with them, or set XDG_CACHE_HOME to another folder of yours."
        ) from error


def _make_own(path: Path) -> None:
    """Makes a folder that is this user's alone; refuses anything else there."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        said = "it is a link or a file where a folder is needed"
        raise NotADirectoryError(errno.ENOTDIR, said, str(path))
    if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        said = "it belongs to another user, or others may write to it"
        raise PermissionError(errno.EPERM, said, str(path))


def locked(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keeps other processes from preparing pictures in a folder."""
    return files.locked(folder / ".lock", _WAITING)


def remove_others(folder: Path, kept: Collection[str]) -> None:
    """Removes files with names of this package from a folder, except those kept."""
    for path in folder.iterdir():
        is_ours = _OURS.fullmatch(path.name) and path.name not in kept
        if is_ours and path.is_file() and not path.is_symlink():
            path.unlink()


def save(path: Path, values: Any) -> None:
    """Writes a description: the SHA-256 of its JSON, and the JSON."""
    content = json.dumps(values, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    files.write_atomically(path, digest.encode() + b"\n" + content)


def load(path: Path, schema: Any) -> Any:
    """Returns the values of a description; None unless it is whole and fits a schema.

    The schema is a type that `is_a` checks.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        digest, _, content = files.read(path, _DESCRIPTION_BYTES).partition(b"\n")
        if digest == hashlib.sha256(content).hexdigest().encode():
            values = json.loads(content)
            return values if is_a(values, schema) else None
    return None
