"""Reads the `config.json` of a run."""

import json
import re
from pathlib import Path
from typing import Any, get_type_hints

from cifar10.config import origin
from cifar10.config.config import ResolvedConfig
from cifar10.config.options import is_a, names
from cifar10.errors import UsageError, reason
from cifar10.process import regular_files

# What a training adds to its configuration in `config.json`, if anything reads it.
_ADDED = {"parameters": int, "simulated": bool}
# Facts that an older run lacks.
_FACTS = {
    "class_names": list[str],
    "classes": int,
    "data_division": str | None,
    "data_fingerprint": str | None,
    "earlier_sessions": list[dict],
    "image_shape": list[int],
    "initial_weights_sha256": str | None,
    "versions": dict,
}


def load(path: Path) -> Any:
    """Returns the content of a `config.json`, as far as its origin allows using it."""
    try:
        content = regular_files.read(path)
        values = origin.judged(content, json.loads(content.decode()))
    except FileNotFoundError as error:
        raise UsageError(
            f"{missing(path)} Name the directory of a run that has begun."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read ({reason(error)}). It describes the run in its "
            "directory; restore it, or start over with another --train_dir."
        ) from error
    known = _FACTS.keys() & values if isinstance(values, dict) else ()
    for name in known:
        if not is_a(values[name], _FACTS[name]):
            raise UsageError(f"{path}: {name} is of another type. Restore it.")
    if isinstance(values, dict):
        if not re.fullmatch("[0-9a-f]*", values.get("data_division") or ""):
            raise UsageError(f"{path}: data_division is no number. Restore it.")
        if "data_division" not in values:
            return _of_an_older_version(path, values)
    return values


def _of_an_older_version(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of a `config.json` that lacks `data_division`.

    Its pictures were divided by `validation_fraction` alone, for which "" stands.
    """
    if values.get("distortions") == "none":
        raise UsageError(
            f"{path}: an older version has trained this run. With --distortions none "
            "it cropped images\nto 3/4 of each side, which this version does not. "
            "Use the version that wrote it, or train\nagain, in another --train_dir."
        )
    return {**values, "data_division": ""}


def read(path: Path) -> dict[str, Any]:
    """Reads a `config.json`, and refuses one that this package did not write."""
    values = load(path)
    # Other entries may be there: facts for the reader, and flags of earlier versions.
    types = get_type_hints(ResolvedConfig) | _ADDED
    needed = names(ResolvedConfig, for_evaluation=True) | set(_ADDED)
    if (
        not isinstance(values, dict)
        or not set(values) >= needed
        or not all(is_a(values[name], types[name]) for name in types if name in values)
    ):
        raise UsageError(
            f"{path} is not a configuration that this package wrote. Restore it, or "
            "name the directory of another run."
        )
    return values


def missing(path: Path) -> str:
    """Returns what is wrong with a directory without this `config.json`."""
    if not path.parent.is_dir():
        return f"{path.parent} does not exist; no training has begun there."
    return f"{path.parent} holds no run: there is no {path.name} of a training in it."
