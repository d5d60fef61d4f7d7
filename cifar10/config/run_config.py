"""The `config.json` of a run: reads it, judges how far to trust it, resumes from it.

For each `config.json` that a training writes, it leaves a note in the user's own state
directory: an empty file named by the SHA-256 of the content. Without a note, a
`config.json` is a stranger's or was edited, and is mere data: it names no code to run,
no folder to use, no address to fetch, and no sequence that controls a terminal.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import fields, layout
from cifar10.config.options import is_a, options
from cifar10.errors import UsageError, printable, reason
from cifar10.models.registry import (
    ARCHITECTURES,
    IN_PYTHON,
    PYTHON,
    is_code,
    take_for,
)
from cifar10.process import files

IS_OWN = "is_own"  # Added to the entries of a `config.json`.
_ALWAYS = ("model",)  # Recorded by every version.
# Without these entries a run cannot be evaluated.
_NEEDED = (
    *("data", "data_dir", "data_url", "distortions", "global_batch_size", "max_steps"),
    *(*_ALWAYS, "parameters", "precision", "simulated"),
)
# What a training adds to its configuration in `config.json`.
_FACTS = {
    "class_names": list[str],
    "classes": int,
    "data_division": str | None,
    "data_fingerprint": str | None,
    "data_parts": list[str],
    "earlier_sessions": list[dict],
    "image_shape": list[int],
    "global_batch_size": int,
    "initial_weights_sha256": str | None,
    "parameters": int,
    "simulated": bool,
    "versions": dict,
}
_PLACES = ("data_dir", "data_url", "corrections")  # A stranger's run decides neither.


def read_run_config(directory: Path, *, complete: bool = True) -> dict[str, Any]:
    """Returns the `config.json` of a run, as far as its origin allows using it.

    Args:
        directory: Directory of the run.
        complete: Whether to refuse a run without the entries that an evaluation needs:
            of an older version, or of another program.

    Raises:
        UsageError: There is no run, or something else is in place of its `config.json`.
    """
    path = directory / layout.CONFIG
    try:
        content = files.read(path)
        values = _judged(content, json.loads(content.decode()))
    except FileNotFoundError as error:
        raise UsageError(
            f"{why_no_run(directory)} Name the directory of a run that has begun."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read ({reason(error)}). It describes the run in its "
            "directory; restore it, or start over with another --train_dir."
        ) from error
    # Other entries may be there: facts for the reader, and flags of earlier versions.
    types = {name: one.type for name, one in options(fields.RECORDED).items()} | _FACTS
    known = [name for name in types if name in values]
    wrong = [name for name in known if not is_a(values[name], types[name])]
    needed = _NEEDED if complete else _ALWAYS
    wrong += [name for name in needed if name not in values]
    if not re.fullmatch("[0-9a-f]*", str(values.get("data_division") or "")):
        wrong.append("data_division")
    if wrong:
        raise UsageError(
            f"{path} was not written by this package: {wrong[0]} is missing or of "
            "another type. Restore it, or name the directory of another run."
        )
    if "data_division" not in values:
        # An older version, which divided pictures by `validation_fraction` alone.
        if values.get("distortions") == "none":
            raise UsageError(
                f"{path}: this run was trained by an older version. That version "
                "cropped images to 3/4 of\neach side with --distortions none; this one "
                "does not. Use the older version, or train\nagain in another "
                "--train_dir."
            )
        values["data_division"] = ""
    return values


def why_no_run(directory: Path) -> str:
    """Returns why a directory without a `config.json` holds no run."""
    runs = sorted(path.parent.name for path in directory.parent.glob("*/config.json"))
    beside = f" Beside it are runs: {', '.join(runs[:5])}." if runs else ""
    if not directory.is_dir():
        return f"{directory} does not exist; no training has begun there.{beside}"
    return (
        f"{directory} holds no run: there is no {layout.CONFIG} of a training in it."
        f"{beside}"
    )


def config_to_resume(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the run in a directory, by field, for `--resume`.

    Refuses `given` flags that name another run; the training compares the others with
    the run's, as it does without `--resume`.
    """
    for flag in ("train_dir", "recipe", "fresh"):
        if flag in given:
            raise UsageError(
                f"--{flag} and --resume do not go together: --resume {name} names the "
                "run, and continues\nit as its config.json says. Leave one out."
            )
    directory = layout.locate_run(name)
    run = read_run_config(directory)
    if check_model(run, given.get("model"), "--model"):
        del given["model"]  # It is the run's, whose name stays.
    values = {field: run[field] for field in options(fields.ALL) if field in run}
    return {**values, "train_dir": str(directory), "fresh": False}


def mark_as_own(content: bytes) -> str:
    """Notes that a training writes this `config.json`.

    Returns a message for the user if that is impossible, else nothing.
    """
    try:
        note = _note(content)
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.touch()
    except (OSError, RuntimeError) as error:
        return (
            "The run could not be recorded as yours in ~/.local/state: "
            f"{reason(error)}.\nGive other commands --data_dir, and for your own model "
            "--trust_model."
        )
    return ""


def check_model(
    settings: Mapping[str, Any], trusted: str | None, flag: str = "--trust_model"
) -> bool:
    """Refuses a model that is code unless the user trained it or names it here.

    Returns whether `trusted`, of a module, is to build a program's function.
    """
    name = settings["model"]
    function = name.removeprefix(PYTHON)
    if trusted and trusted != name and trusted.endswith(f":{function}"):
        take_for(name, trusted)
        return True
    if name != function and name not in ARCHITECTURES:
        raise UsageError(
            f"The run's model is {name}, a function of a Python program.\n{IN_PYTHON}\n"
            "Commands that find its data or need none build the model with "
            f"{flag} MODULE:{function}\nif MODULE.py has that function."
        )
    if is_code(name) and not settings.get(IS_OWN) and name != trusted:
        raise UsageError(
            f"The run's model is {name}, which is Python code, and its config.json "
            "was not\nwritten by you on this machine, or was edited. If you trust this "
            f"code, as it is in\n{Path.cwd()} or installed, add:\n    {flag} {name}"
        )
    return False


def _judged(content: bytes, values: Any) -> dict[str, Any]:
    """Returns the values of a `config.json` as far as its origin allows using them."""
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - of the content.
    try:
        is_own = _note(content).is_file()
    except (OSError, RuntimeError):  # The home is missing, or may not be looked into.
        is_own = False
    if not is_own:
        values = {**_inert(values), **dict.fromkeys(_PLACES)}
    return {**values, IS_OWN: is_own}


def _note(content: bytes) -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path.home() / ".local" / "state"
    return state / "cifar10" / "runs" / hashlib.sha256(content).hexdigest()


def _inert(value: Any) -> Any:
    """Returns a JSON value whose strings cannot control a terminal."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_inert(item) for item in value]
    if isinstance(value, dict):
        return {printable(name): _inert(item) for name, item in value.items()}
    return value
