"""The directory of one run: whose it is, and whether a run may go on in it.

Nothing in it is ever deleted here. A run resumes where its configuration agrees in all
that determines the result; otherwise the difference is shown, with the ways on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import command_line
from cifar10.errors import UsageError, reason

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
TRAIN_EVENTS = "train"
EVALUATION_EVENTS = "eval"


def locate(name: str) -> Path:
    """Returns a directory by the name that a flag gives it, without touching it."""
    try:
        # A link stays one: it is the link that is moved aside.
        return Path(os.path.abspath(os.path.expanduser(name)))  # noqa: PTH100, PTH111
    except OSError as error:
        raise UsageError(f"{name}: the current directory is gone.") from error


def description(path: Path) -> bytes | None:
    """Returns the content of a run's `config.json`; None while there is none.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        return (path / CONFIG).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(
            f"{path / CONFIG} cannot be read: {reason(error)}. Make it readable for "
            "this user, or name the directory of another run."
        ) from error


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keeps other trainings out of a run directory.

    The lock is a file beside the directory, so that it stays when the directory is
    moved aside. The system releases it when the process ends, however it ends.

    Raises:
        UsageError: Another process holds it, or there can be no lock.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = os.access(path.parent, os.W_OK)
        lock = (path.parent if beside else path) / f".{path.name}.lock"
        # Unbuffered: a full disk is noticed here and not once more when it is closed.
        file = lock.open("a+b", buffering=0)
    except OSError as error:
        raise _unusable(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace")
            raise UsageError(
                f"--train_dir {path} is in use by another training: {holder}. "
                "Wait for its end, stop it, or choose another --train_dir."
            ) from error
        except OSError as error:
            raise _unusable(path, error) from error
        yield


def prepare(
    path: Path,
    settings: Mapping[str, Any],
    determining: Sequence[str],
    *,
    unrecorded: Mapping[str, Any],
    fresh: bool,
    command: Sequence[str],
) -> str | None:
    """Makes or takes over a run directory and writes its `config.json`.

    Args:
        path: The directory.
        settings: The content of `config.json`.
        determining: The entries in which a resumed run has to agree.
        unrecorded: What a run had that does not say, since it is older than the entry.
        fresh: Whether to move an earlier run aside.
        command: The command line, for the commands that a refusal suggests.

    Returns:
        What was done with an earlier run, as a sentence, or None.

    Raises:
        UsageError: The directory cannot be used, or holds a run of another
            configuration.
    """
    path = path.absolute()
    done = None
    try:
        earlier = _read_earlier(path)
        if earlier is not None and not set(determining) & set(earlier):
            raise UsageError(
                f"{path / CONFIG} was not written by this package. Choose another "
                "--train_dir."
            )
        if earlier is not None and fresh:
            aside = _move_aside(path)
            done = f"The earlier run was moved to {aside}."
        elif earlier is not None:
            _compare(path, earlier, settings, determining, unrecorded, command)
            done = _version_note(earlier, settings)
            settings = _with_history(settings, earlier)
        path.mkdir(parents=True, exist_ok=True)
        _write_atomically(path / CONFIG, json.dumps(settings, indent=2) + "\n")
    except OSError as error:
        raise _unusable(path, error) from error
    return done


def _read_earlier(path: Path) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory; None where there is none."""
    if not path.exists():
        return None
    if not path.is_dir():
        raise UsageError(f"--train_dir {path} is a file; it has to be a directory.")
    config = path / CONFIG
    if not config.exists():
        if any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise UsageError(
                f"--train_dir {path} holds files but no run ({CONFIG} is missing). "
                "Choose an empty or new directory."
            )
        return None
    try:
        earlier = json.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{config} is damaged ({error}), so the run cannot be compared with this "
            "one. Restore it, or choose another --train_dir."
        ) from error
    return earlier if isinstance(earlier, dict) else {}


def _compare(
    path: Path,
    earlier: Mapping[str, Any],
    settings: Mapping[str, Any],
    determining: Sequence[str],
    unrecorded: Mapping[str, Any],
    command: Sequence[str],
) -> None:
    there = {**unrecorded, **earlier}
    differences = [
        f"    {name}: {there.get(name, 'not recorded')} there, {settings[name]} now"
        for name in determining
        if name not in there or there[name] != settings[name]
    ]
    if not differences:
        return
    elsewhere = _unused(path)
    raise UsageError(
        f"{path} holds a run with another configuration:\n"
        + "\n".join(differences)
        + "\nKeep it, and train in another directory:\n    "
        + command_line.to_paste(command, "train_dir", str(elsewhere))
        + "\nor move it aside and begin anew:\n    "
        + command_line.to_paste(command, "fresh")
    )


def _with_history(
    settings: Mapping[str, Any], earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Adds what earlier sessions of the run were; once simulated, always said."""
    what = ("devices", "versions")
    before = {name: earlier.get(name) for name in what}
    sessions = list(earlier.get("earlier_sessions", []))
    if before != {name: settings.get(name) for name in what}:
        sessions.append(before)
    merged = {**settings, "earlier_sessions": sessions} if sessions else dict(settings)
    if earlier.get("simulated"):
        merged["simulated"] = True
    return merged


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--train_dir {path} cannot be used: {reason(error)}. Choose a directory that "
        "you can write to and that has room."
    )


def _version_note(
    earlier: Mapping[str, Any], settings: Mapping[str, Any]
) -> str | None:
    before, now = earlier.get("versions", {}), settings.get("versions", {})
    changed = [
        f"{name} {before[name]}, now {now[name]}"
        for name in now
        if name in before and before[name] != now[name]
    ]
    return f"The run began with {'; '.join(changed)}." if changed else None


def _move_aside(path: Path) -> Path:
    aside = _unused(path)
    path.rename(aside)
    return aside


def _unused(path: Path) -> Path:
    numbers = (path.with_name(f"{path.name}.{number}") for number in range(1, 10_000))
    return next(candidate for candidate in numbers if not candidate.exists())


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
