"""Files that commands write where the user says, and may overwrite."""

from pathlib import Path

from cifar10.errors import UsageError, reason
from cifar10.process import files

# A file's mark is within so many bytes of its beginning.
_FIRST_BYTES = 256


def check_replaceable(path: Path, flag: str, kind: str, mark: str) -> None:
    """Refuses to overwrite anything but a file of this kind, before any work is done.

    Its `mark` distinguishes it from other files.
    """
    try:
        path.parent.stat()
        if not path.exists():
            return
        with files.opened(path) as file:
            is_ours = mark.encode() in file.read(_FIRST_BYTES)
    except OSError as error:
        raise _unwritable(path, flag, error) from error
    if not is_ours:
        raise UsageError(
            f"{flag} {path} exists already and is not a {kind}.\nName another place, "
            "or move it away."
        )


def write_output(path: Path, flag: str, content: bytes) -> None:
    """Writes the file; an earlier one is replaced once the new one is complete."""
    try:
        files.write_atomically(path, content)
    except OSError as error:
        raise _unwritable(path, flag, error) from error


def _unwritable(path: Path, flag: str, error: OSError) -> UsageError:
    return UsageError(
        f"{flag} {path} cannot be written: {reason(error)}.\nFree space there and make "
        "it writable, or name another place."
    )
