"""Whether a `config.json` is this user's, or may have been written by anyone.

A training leaves a note of what it writes in the user's own state directory: an empty
file whose name is the SHA-256 of the `config.json`. Without a note, because it is a
stranger's or was edited, a `config.json` is mere data: nothing in it names code to run,
a folder to use, an address to fetch, or a sequence that controls a terminal.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError, printable, reason
from cifar10.models import names

IS_OWN = "is_own"  # Added to what is read of a `config.json`.
_PLACES = ("data_dir", "data_url")  # A stranger's decides neither.


def remember(content: bytes) -> str:
    """Notes that a training writes this; returns a message if that is impossible."""
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


def judged(content: bytes, values: Any) -> Any:
    """Returns the content of a `config.json`, as far as its origin allows using it."""
    if not isinstance(values, dict):
        return values
    try:
        is_own = _note(content).is_file()
    except (OSError, RuntimeError):  # The home is missing, or may not be looked into.
        is_own = False
    if not is_own:
        values = {**_inert(values), **dict.fromkeys(_PLACES)}
    return {**values, IS_OWN: is_own}


def check_model(
    settings: Mapping[str, Any], trusted: str | None, flag: str = "--trust_model"
) -> None:
    """Refuses a model that is code unless the user trained it or names it here."""
    name = settings["model"]
    if names.is_code(name) and not settings.get(IS_OWN) and name != trusted:
        raise UsageError(
            f"The run's model is {name}, which is Python code, and its config.json "
            "was not\nwritten by you on this machine, or was edited. If you trust this "
            f"code, as it is in\n{Path.cwd()} or installed, add:\n    {flag} {name}"
        )


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
