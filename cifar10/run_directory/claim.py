"""Claims a directory for a run: locks it, then resumes, refuses or moves aside.

Nothing in it is deleted here. A run resumes if its configuration agrees in everything
that determines the result; otherwise the differences are shown, with the commands that
avoid them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import flags
from cifar10.errors import UsageError, reason
from cifar10.run_directory import files
from cifar10.run_directory.layout import CONFIG


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Keeps other trainings out of a run directory.

    The lock is a file beside the directory, so that it stays when the directory is
    moved aside. The system releases it when the process ends, however it ends.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = os.access(path.parent, os.W_OK)
            lock = (path.parent if beside else path) / f".{path.name}.lock"
            # Unbuffered, so that closing the file cannot fail on a full disk.
            file = stack.enter_context(lock.open("a+b", buffering=0))
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
    """Makes a run directory or resumes the run in it, and writes its `config.json`.

    A resumed run has to agree in the `determining` entries of its settings; older runs
    did not record those in `unrecorded`, but had these values. A refusal suggests
    changes to `command`. What the user should know of an earlier run is returned.
    """
    path = path.absolute()
    note = None
    try:
        earlier = _read_earlier(path)
        if earlier is not None and not set(determining) & set(earlier):
            raise UsageError(
                f"{path / CONFIG} was not written by this package. Choose another "
                "--train_dir."
            )
        if earlier is not None and fresh:
            note = f"The earlier run was moved to {path.rename(_unused(path))}."
        elif earlier is not None:
            _compare(path, {**unrecorded, **earlier}, settings, determining, command)
            note = _version_note(earlier, settings)
            settings = _with_history(settings, earlier)
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2) + "\n"
        files.write_atomically(path / CONFIG, text.encode())
    except OSError as error:
        raise _unusable(path, error) from error
    return note


def _read_earlier(path: Path) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory; None if there is no run."""
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
    command: Sequence[str],
) -> None:
    differences = [
        f"    {name}: {earlier.get(name, 'not recorded')} there, {settings[name]} now"
        for name in determining
        if name not in earlier or earlier[name] != settings[name]
    ]
    if differences:
        again = shlex.join(["python", *flags.without(command, "fresh")])
        other = ["python", *flags.without(command, "train_dir"), "--train_dir"]
        elsewhere = shlex.join([*other, str(_unused(path))])
        raise UsageError(
            f"{path} holds a run with another configuration:\n"
            + "\n".join(differences)
            + "\nKeep it, and train in another directory:\n    "
            + elsewhere
            + f"\nor move it aside and start over:\n    {again} --fresh"
        )


def _with_history(
    settings: Mapping[str, Any], earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Adds the devices and versions of earlier sessions; once simulated, always so."""
    recorded = ("devices", "versions")
    before = {name: earlier.get(name) for name in recorded}
    sessions = list(earlier.get("earlier_sessions", []))
    if before != {name: settings.get(name) for name in recorded}:
        sessions.append(before)
    merged = {**settings, "earlier_sessions": sessions} if sessions else dict(settings)
    if earlier.get("simulated"):
        merged["simulated"] = True
    return merged


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


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--train_dir {path} cannot be used: {reason(error)}. Choose a directory that "
        "you can write to and that has room."
    )


def _unused(path: Path) -> Path:
    return files.unused(path.with_name(f"{path.name}."))
