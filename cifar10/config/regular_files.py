"""Opens files that somebody else may have prepared: no links, no pipes, no devices.

A link may stand for any of the user's files; opening a pipe may wait forever.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import cast

# More than any description, such as a `config.json` or a manifest, takes.
DESCRIPTION_BYTES = 1_000_000


def opened(
    path: Path, mode: str = "rb", *, buffering: int = -1, follow: bool = False
) -> io.BufferedRandom:
    """Opens a regular file, as `open` does; with `follow` it may be a link to one.

    The folders on its path may be links. Anything else is an `OSError`.
    """
    further = os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    if not follow and path.is_symlink():  # To say so; the flag alone would be enough.
        raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path))

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | further, 0o666)

    # `Path.open` takes no opener.
    file = open(path, mode, buffering, opener=opener)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device", str(path))
    return cast(io.BufferedRandom, file)


def read(path: Path, most: int = DESCRIPTION_BYTES, *, follow: bool = False) -> bytes:
    """Returns the content of a regular file; an `OSError` if it is more than `most`."""
    with opened(path, follow=follow) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content
