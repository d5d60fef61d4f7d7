"""A folder in the cache, in which prepared pictures are kept.

Somebody else may be able to write to a folder above it, or to have put links, pipes or
other files there. So the folder is opened once, through no link, and its files are
opened within it. A file is written under a new name and renamed when it is complete;
nothing is ever written into an existing file, and only names of ours are removed.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from cifar10.process import files

# A file named by the SHA-256 of its content, or a new one, which a kill may leave.
_OURS = re.compile(r"[0-9a-f]{64}\.[a-z]+|\.new-[0-9a-f]{16}")
_LOCK = Path(".lock")
_WAITING = "Waiting for another process to prepare the pictures ..."


@contextlib.contextmanager
def opened(path: Path) -> Iterator["Folder"]:
    """Opens a folder of the cache, which is made if there is none.

    It and the one that it is in have to be folders of this user; the ones above may be
    links, as a home or a scratch disk often is.
    """
    *above, _, _ = path.parts
    Path(*above).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder, flags = Path(*above), os.O_RDONLY | os.O_DIRECTORY
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
        yield Folder(path, descriptor)


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

    def open(self, name: str, *, buffering: int = -1) -> io.BufferedRandom:
        """Opens a regular file; anything else is an `OSError`."""
        folder = self.descriptor
        return files.opened(Path(name), buffering=buffering, folder=folder)

    def read(self, name: str, most: int) -> bytes | None:
        """Returns the content of a file; None if it cannot be read or is larger."""
        with contextlib.suppress(OSError), self.open(name) as file:
            content = file.read(most + 1)
            return content if len(content) <= most else None
        return None

    def remove(self, name: str) -> None:
        """Removes a file, unless something else than a file has the name."""
        if self.size(name) is not None:
            os.unlink(name, dir_fd=self.descriptor)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, or replaces one whole; the folder has to be locked."""
        with NewFile(self) as file:
            file.write(content)
            file.keep(name)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from writing to the folder."""
        with files.locked(_LOCK, _WAITING, folder=self.descriptor):
            yield


class NewFile:
    """A file without a name, which vanishes unless it is given one."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder.descriptor
        self._temporary = f".new-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        opened = os.open(self._temporary, flags, 0o600, dir_fd=self._folder)
        self._file = os.fdopen(opened, "wb")
        self._digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        """Appends to the file."""
        self._digest.update(content)
        self._file.write(content)

    @property
    def sha256(self) -> str:
        """Of what was written."""
        return self._digest.hexdigest()

    def keep(self, name: str, *, durable: bool = True) -> None:
        """Gives the complete file its name; if `durable`, once it is on the disk."""
        with self._file:
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())
        within = {"src_dir_fd": self._folder, "dst_dir_fd": self._folder}
        os.replace(self._temporary, name, **within)  # noqa: PTH105
        self._temporary = ""

    def discard(self) -> None:
        """Removes the file unless it has a name."""
        if self._temporary:
            with contextlib.suppress(OSError):  # A full disk, or gone already.
                self._file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.discard()
