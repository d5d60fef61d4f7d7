"""A folder in the cache, in which prepared pictures are kept.

Somebody else may be able to write to a folder above it, or may have put links, pipes or
other files there. So the folder is opened once, through no link, and its files are
opened within it. A file is written under a new name and renamed once it is complete;
nothing is ever written into an existing file, and only names of ours are removed.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError, printable, reason
from cifar10.process import files

# A shard, named by the SHA-256 of its content; what older versions wrote; and a new
# file, which a kill may leave.
_OURS = re.compile(r"[0-9a-f]{64}\.[a-z]+|\.new-[0-9a-f]{16}")
_LOCK = Path(".lock")
_WAITING = "Waiting for another process to prepare the pictures ..."
# Descriptions of a hundred million pictures are larger, and would need another format.
_DESCRIPTION_BYTES = 2**30


def folder_for(cache: Path, name: str, *identity: object) -> Path:
    """Returns the folder in the cache for all that is prepared from one source."""
    content = json.dumps(identity).encode()
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:40]
    return cache / "pictures" / f"{plain}-{hashlib.sha256(content).hexdigest()[:16]}"


class Folder:
    """An open folder of the cache.

    Attributes:
        path: Where it is.
        descriptor: Stands for it, wherever it is moved.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def names(self) -> list[str]:
        """Returns the names of the files that this package gives names to."""
        names = os.listdir(self.descriptor)  # noqa: PTH208 - by its descriptor.
        return [name for name in names if _OURS.fullmatch(name)]

    def size(self, name: str) -> int | None:
        """Returns the bytes of a regular file; None if there is no such file."""
        try:
            about = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError:
            return None
        return about.st_size if stat.S_ISREG(about.st_mode) else None

    def open(self, name: str) -> io.BufferedRandom:
        """Opens a regular file; anything else is an `OSError`."""
        return files.opened(Path(name), folder=self.descriptor)

    def sha256(self, name: str) -> str | None:
        """Returns the SHA-256 of a file; None if it cannot be read."""
        with contextlib.suppress(OSError), self.open(name) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return None

    def remove(self, name: str) -> None:
        """Removes a file, unless something else than a file has the name."""
        if self.size(name) is not None:
            os.unlink(name, dir_fd=self.descriptor)

    def write(self, chunks: Iterable[bytes], name: str | None = None) -> str:
        """Writes a file, complete and on the disk or not at all.

        Without a name, it is named by its content, `SHA256.bin`. The folder has to be
        locked. Returns the SHA-256 of the content.
        """
        within = self.descriptor
        new, digest = f".new-{secrets.token_hex(8)}", hashlib.sha256()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            with os.fdopen(os.open(new, flags, 0o600, dir_fd=within), "wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            name = name or f"{digest.hexdigest()}.bin"
            os.replace(new, name, src_dir_fd=within, dst_dir_fd=within)
            os.fsync(within)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=within)
            raise
        return digest.hexdigest()

    def save(self, name: str, values: Any) -> None:
        """Writes a description: the SHA-256 of its JSON, and the JSON."""
        content = json.dumps(values).encode()
        digest = hashlib.sha256(content).hexdigest().encode()
        self.write([digest, b"\n", content], name)

    def load(self, name: str) -> Any:
        """Returns the values of a description; None if there is no undamaged one."""
        with contextlib.suppress(OSError), self.open(name) as file:
            content = file.read(_DESCRIPTION_BYTES)
            digest, _, content = content.partition(b"\n")
            if digest == hashlib.sha256(content).hexdigest().encode():
                with contextlib.suppress(ValueError, RecursionError):
                    return json.loads(content)
        return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from writing to the folder."""
        with files.locked(_LOCK, _WAITING, folder=self.descriptor):
            yield


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Folder]:
    """Opens a folder of the cache, and creates it if there is none.

    The folder and its parent have to be folders of this user; those above may be
    links, as a home or a scratch disk often is.

    Raises:
        UsageError: The folder cannot be used, or an `OSError` was raised within.
    """
    try:
        with _opened_without_links(path) as descriptor:
            yield Folder(path, descriptor)
    except OSError as error:
        place = printable(str(path / str(error.filename or "")))
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
def _opened_without_links(path: Path) -> Iterator[int]:
    """Gives the descriptor of a folder that, like its parent, is this user's alone."""
    folder, flags = path.parent.parent, os.O_RDONLY | os.O_DIRECTORY
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        descriptor = os.open(folder, flags)
        stack.callback(os.close, descriptor)
        for name in path.parts[-2:]:
            folder /= name
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=descriptor)
            try:
                descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=descriptor)
            except NotADirectoryError as error:
                said = "it is a link or a file where a folder is needed"
                raise NotADirectoryError(errno.ENOTDIR, said, str(folder)) from error
            stack.callback(os.close, descriptor)
            about = os.fstat(descriptor)
            if about.st_uid != os.geteuid():
                said = "it belongs to another user"
                raise PermissionError(errno.EPERM, said, str(folder))
            if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                said = "other users may write to it"
                raise PermissionError(errno.EPERM, said, str(folder))
        yield descriptor
