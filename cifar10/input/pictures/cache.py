"""A folder of the cache, which holds prepared pictures.

Somebody else may be able to write to a folder above it, or may have put links, pipes or
other files there. So the folder is opened once, through no link, and is reached by its
descriptor from then on. Nothing is ever written into an existing file, and only files
with names of ours are removed.
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
def opened(path: Path) -> Iterator[Path]:
    """Opens a folder of the cache, and creates it if there is none.

    The folder and its parent have to be folders of this user; the folders above may
    be links, as a home or a scratch disk often is. Yields a path that leads to the
    folder wherever it is moved.

    Raises:
        UsageError: The folder cannot be used, or an `OSError` was raised within.
    """
    try:
        with _opened_without_links(path) as folder:
            yield folder
    except OSError as error:
        name = Path(str(error.filename or path)).name
        folders = [place for place in (path, path.parent) if place.name == name]
        place = printable(str([*folders, path / name][0]))
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UsageError(
                f"The disk of {place} is full.\nWhat is prepared is kept: free some "
                "space and start again to continue, or have it prepared elsewhere: set "
                "XDG_CACHE_HOME to a folder with room."
            ) from error
        raise UsageError(
            f"The prepared pictures in {place} cannot be read or written: "
            f"{reason(error)}.\nMend that, or set XDG_CACHE_HOME to another folder "
            "of yours."
        ) from error


@contextlib.contextmanager
def _opened_without_links(path: Path) -> Iterator[Path]:
    """Opens a folder that, like its parent, is this user's alone."""
    folder = path.parent.parent
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for name in path.parts[-2:]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            with contextlib.suppress(FileExistsError):
                (folder / name).mkdir(0o700)
            try:
                descriptor = os.open(folder / name, flags)
            except NotADirectoryError as error:
                said = "it is a link or a file where a folder is needed"
                raise NotADirectoryError(errno.ENOTDIR, said, name) from error
            stack.callback(os.close, descriptor)
            about = os.fstat(descriptor)
            if about.st_uid != os.geteuid():
                said = "it belongs to another user"
                raise PermissionError(errno.EPERM, said, name)
            if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                said = "other users may write to it"
                raise PermissionError(errno.EPERM, said, name)
            # Systems without /proc use the path, which only this user can change.
            opened = Path(f"/proc/self/fd/{descriptor}")
            folder = opened if opened.exists() else folder / name
        yield folder


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from preparing pictures in an open folder."""
    with files.locked(folder / ".lock", _WAITING):
        yield


def remove_others(folder: Path, kept: Collection[str]) -> None:
    """Removes the files that this package names from a folder, except some."""
    for path in folder.iterdir():
        is_ours = _OURS.fullmatch(path.name) and path.name not in kept
        if is_ours and path.is_file() and not path.is_symlink():
            path.unlink()


def save(path: Path, values: Any) -> None:
    """Writes a description: the SHA-256 of its JSON, and the JSON."""
    content = json.dumps(values, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    files.write_atomically(path, digest.encode() + b"\n" + content)


def load(path: Path) -> Any:
    """Returns the values of a description; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        digest, _, content = files.read(path, _DESCRIPTION_BYTES).partition(b"\n")
        if digest == hashlib.sha256(content).hexdigest().encode():
            return json.loads(content)
    return None
