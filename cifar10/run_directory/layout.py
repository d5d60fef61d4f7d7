"""Names and places of what a run's directory holds."""

from pathlib import Path

from cifar10.config import paths
from cifar10.errors import UsageError, reason
from cifar10.process import regular_files

CONFIG = paths.CONFIG
CHECKPOINTS = paths.CHECKPOINTS
METRICS = "metrics.jsonl"
TRAIN_EVENTS = paths.TRAIN_EVENTS
EVALUATION_EVENTS = paths.EVALUATION_EVENTS
DEBUG_CHECKPOINTS = "debug"


def description(path: Path) -> bytes | None:
    """Returns the content of a run's `config.json`; None if it does not exist."""
    try:
        return regular_files.read(path / CONFIG)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UsageError(
            f"{path} is no directory of a run; it, or a part of its path, is a file."
        ) from error
    except OSError as error:
        raise UsageError(
            f"{path / CONFIG} cannot be read: {reason(error)}. Make it readable for "
            "this user, or name the directory of another run."
        ) from error


def check_folder(folder: Path) -> None:
    """Refuses to write to a folder of a run that is a link out of it."""
    if folder.is_symlink():
        raise UsageError(
            f"{folder} is a link, and nothing is written outside of a run's directory."
            "\nReplace it with the folder that it points to; the directory itself may "
            "be a link."
        )
