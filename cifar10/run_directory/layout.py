"""Names and places of what a run's directory holds."""

from pathlib import Path

from cifar10.config import config_file, paths
from cifar10.errors import UsageError, reason
from cifar10.models import names

CONFIG = paths.CONFIG
CHECKPOINTS = paths.CHECKPOINTS
METRICS = "metrics.jsonl"
TRAIN_EVENTS = paths.TRAIN_EVENTS
EVALUATION_EVENTS = paths.EVALUATION_EVENTS


def description(path: Path) -> bytes | None:
    """Returns the content of a run's `config.json`; None if it does not exist."""
    try:
        return (path / CONFIG).read_bytes()
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


def check_run(name: str) -> None:
    """Refuses a directory without a run, or one whose model cannot be found."""
    settings = config_file.read(paths.locate_run(name) / CONFIG)
    names.check(settings["model"])
