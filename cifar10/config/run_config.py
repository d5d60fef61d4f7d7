"""Reads the `config.json` of a run, and decides how far to trust it.

When a training run writes a `config.json`, it also creates a note in the user's state
directory: an empty file named by the SHA-256 checksum of the `config.json`. Without a
note, a `config.json` comes from somebody else or was edited. Then its model is not run
as code, its folders and URLs are not used, and its control characters are escaped.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import fields, layout, schema
from cifar10.config.options import options
from cifar10.errors import UsageError, has_controls, printable, reason
from cifar10.models.registry import ARCHITECTURES, IN_PYTHON, PYTHON, is_code, take_for
from cifar10.process import files

IS_OWN = "is_own"  # Added to the entries of a `config.json` when it is read.
# Without these entries a run cannot be resumed or evaluated.
_NEEDED = (
    *("data", "data_dir", "data_url", "distortions", "global_batch_size", "max_steps"),
    *("model", "parameters", "precision", "simulated"),
)
_PLACES = ("data_dir", "data_url", "corrections")  # Ignored in another user's run.


def read_run_config(directory: Path) -> dict[str, Any]:
    """Reads a run's `config.json`, if it is valid; makes an untrusted one harmless."""
    path = directory / layout.CONFIG
    try:
        content = files.read(path)
        values = json.loads(content.decode())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY004, TRY301
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{directory} holds no run: it has no {layout.CONFIG}. Give a run's folder."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read: {reason(error)}. Restore it, or start a new run."
        ) from error
    try:
        is_own = files.note("runs", content).is_file()
    except (OSError, RuntimeError):  # The home folder is missing or not readable.
        is_own = False
    if not is_own:
        values = {**inert(values), **dict.fromkeys(_PLACES)}
    # Other entries are allowed, such as facts for readers and flags of older versions.
    types = {name: (one.type,) for name, one in options(fields.RECORDED).items()}
    wrong = [name for name in [schema.wrong(values, types | schema.SETTINGS)] if name]
    wrong += [name for name in _NEEDED if name not in values]
    if not re.fullmatch("[0-9a-f]*", str(values.get("data_division") or "")):
        wrong.append("data_division")
    if wrong:
        raise UsageError(
            f"{path}: {wrong[0]} is missing or has the wrong type. Restore the file."
        )
    return {**values, IS_OWN: is_own}


def run_of_weights(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the run that gives a new run its initial weights.

    A run that began with these weights already counts instead, so that the same command
    resumes it without its source. Returns {} if no run gives weights.
    """
    name = given.get("initial_weights")
    source = layout.absolute_path(name or "")
    if source.parent.name == layout.CHECKPOINTS:
        source = source.parent.parent
    own = layout.absolute_path(given.get("train_dir", fields.TRAIN_DIR))
    for run in [own, source][bool(given.get("fresh")) :] if name else ():
        with contextlib.suppress(UsageError):  # There is no run, or it is damaged.
            settings = read_run_config(run)
            if run == source or settings.get("initial_weights") == name:
                return settings
    return {}


def config_to_resume(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the run that `--resume` names.

    Refuses flags in `given` that exclude `--resume`. The other flags are compared with
    `config.json` when training begins, as for every run.
    """
    for flag in ("train_dir", "recipe", "fresh"):
        if flag in given:
            raise UsageError(
                f"--{flag} and --resume exclude each other: --resume {name} continues "
                "that run with the settings in its config.json. Leave out one."
            )
    directory = layout.absolute_path(name)
    run = read_run_config(directory)
    if check_model(run, given.get("model"), "--model"):
        del given["model"]  # The run keeps its name for the model.
    values = {field: run[field] for field in options(fields.ALL) if field in run}
    return {**values, "train_dir": str(directory), "fresh": False}


def mark_as_own(content: bytes) -> str:
    """Marks a `config.json` as the user's own; returns a message if that failed."""
    try:
        note = files.note("runs", content)
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.touch()
    except (OSError, RuntimeError) as error:
        return (
            f"The run could not be recorded as yours: {reason(error)}. For this run, "
            "give other commands --data_dir, and --trust_model for your own model."
        )
    return ""


def check_model(
    settings: Mapping[str, Any], trusted: str | None, flag: str = "--trust_model"
) -> bool:
    """Refuses a model that is Python code, unless the user trained or trusts it.

    Returns True if the run records a function but no module, and `trusted` names both.
    """
    name = settings["model"]
    function = name.removeprefix(PYTHON)
    if trusted and trusted != name == PYTHON + trusted.partition(":")[2]:
        take_for(name, trusted)
        return True
    if name != function and name not in ARCHITECTURES:
        raise UsageError(
            f"The run's model is {name}, a function of a Python program.\n{IN_PYTHON}\n"
            "Or, if the function is in MODULE.py, a command can build the model with\n"
            f"{flag} MODULE:{function}. The command must also find any data it needs."
        )
    if is_code(name) and not settings.get(IS_OWN) and name != trusted:
        raise UsageError(
            f"The run's model is {name}, Python code, but its config.json was not "
            "written by you on this machine, or was edited. If you trust this code in "
            f"{Path.cwd()} or an installed package, add:\n    {flag} {name}"
        )
    return False


def inert(value: Any) -> Any:
    """Escapes strings in a JSON value that have control characters."""
    if isinstance(value, str):
        return printable(value) if has_controls(value) else value
    if isinstance(value, list):
        return [inert(item) for item in value]
    if isinstance(value, dict):
        return {inert(name): inert(item) for name, item in value.items()}
    return value
