"""Claims a directory for a run: locks it, then resumes, refuses or moves aside.

Nothing in it is deleted here. A run resumes if its configuration agrees in everything
that determines the result; otherwise the differences are shown, with the commands that
avoid them.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import config_file, flags
from cifar10.config.config import Config
from cifar10.errors import UsageError, reason
from cifar10.run_directory import files
from cifar10.run_directory.layout import CONFIG

_SCRIPTS = ("train.py", "train_multi_gpu.py")


@contextlib.contextmanager
def hold(path: Path) -> Iterator[Path]:
    """Keeps other trainings out of a run directory; yields the file that locks it.

    It lies beside the directory, so that it stays when the directory is moved aside.
    The system releases the lock when the process ends, however it ends; a file that is
    left behind locks nothing.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = os.access(path.parent, os.W_OK)
            lock = (path.parent if beside else path) / f".{path.name}.lock"
            while True:
                # Unbuffered, so that closing the file cannot fail on a full disk.
                file = stack.enter_context(lock.open("a+b", buffering=0))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(lock.stat(), os.fstat(file.fileno())):
                        break  # Else its holder has just deleted it.
            stack.callback(_delete, lock)  # While the file is locked.
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
        yield lock


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def check(
    path: Path,
    settings: Mapping[str, Any],
    determining: Sequence[str],
    *,
    fresh: bool,
) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory; None if there is none.

    To be resumed, it has to agree in the `determining` entries of `settings`; what an
    older run did not record had the default's value. Nothing is written.
    """
    try:
        earlier = _read_earlier(path)
        if path.is_dir() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unusable(path, error) from error
    if earlier is not None and not set(determining) & set(earlier):
        raise UsageError(
            f"{path / CONFIG} was not written by this package. Choose another "
            "--train_dir."
        )
    if earlier is not None and not fresh:
        defaults = dataclasses.asdict(Config())
        _compare(path, {**defaults, **earlier}, settings, determining)
    return earlier


def begin(
    path: Path,
    settings: Mapping[str, Any],
    earlier: Mapping[str, Any] | None,
    *,
    fresh: bool,
) -> str | None:
    """Makes a run directory or takes over the earlier run, and writes `config.json`.

    Returns what the user should know of the earlier run.
    """
    note = None
    try:
        if earlier is not None and fresh:
            note = f"The earlier run was moved to {path.rename(_unused(path))}."
        elif earlier is not None:
            note = _version_note(earlier, settings)
            settings = _with_history(settings, earlier)
        path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2) + "\n"
        files.write_atomically(path / CONFIG, text.encode())
    except OSError as error:
        raise _unusable(path, error) from error
    return note


def resuming_command(path: Path, settings: Mapping[str, Any]) -> str | None:
    """Returns how to continue the run in a directory, by the script that is running.

    None if the script is the user's, or if several machines have to do it.
    """
    script = Path(sys.argv[0])
    if script.name not in _SCRIPTS or settings.get("workers", 1) > 1:
        return None
    if settings.get("towers", 1) > 1:  # train.py has one.
        script = script.with_name("train_multi_gpu.py")
    return shlex.join(["python", str(script), "--resume", str(path)])


def starting_over() -> str | None:
    """Returns this command with --fresh; None if it has --resume, which contradicts."""
    if any(word.partition("=")[0] == "--resume" for word in sys.argv):
        return None
    return shlex.join(["python", *flags.without(sys.argv, "fresh"), "--fresh"])


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
    earlier = config_file.load(config)
    return earlier if isinstance(earlier, dict) else {}


def _compare(
    path: Path,
    earlier: Mapping[str, Any],
    settings: Mapping[str, Any],
    determining: Sequence[str],
) -> None:
    differing = [
        name
        for name in determining
        if name not in earlier or earlier[name] != settings[name]
    ]
    if not differing:
        return
    ways: dict[str, str | None] = {}
    if differing == ["batch_size"]:
        ways["Keep its batches, which batch norm and dropout see:"] = _same_batches(
            earlier["batch_size"], settings
        )
    with contextlib.suppress(UsageError):  # Of --resume, for another version's run.
        recorded = config_file.read(path / CONFIG)
        ways["Continue that run as it is:"] = resuming_command(path, recorded)
    if anew := starting_over():
        others = flags.without(sys.argv, "train_dir")
        elsewhere = ["python", *others, "--train_dir", str(_unused(path))]
        ways["Keep it, and train in another directory:"] = shlex.join(elsewhere)
        ways["Move it aside and start over:"] = anew
    raise UsageError(
        f"{path} holds a run with another configuration:\n"
        + "\n".join(
            f"    {name}: {earlier.get(name, 'not recorded')} there, "
            f"{settings[name]} now"
            for name in differing
        )
        + "".join(f"\n{what}\n    {how}" for what, how in ways.items() if how)
    )


def _same_batches(batch: int, settings: Mapping[str, Any]) -> str | None:
    """Returns this command with batches of that size; None if they do not add up."""
    images, towers = settings.get("global_batch_size", 0), settings.get("towers", 1)
    batches, rest = divmod(images, batch * towers)
    if rest or not batches:
        return None
    others = flags.without(sys.argv, "batch_size", "accumulate")
    given = f"--batch_size {batch} --accumulate {batches}"
    return shlex.join(["python", *others, *given.split()])


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
