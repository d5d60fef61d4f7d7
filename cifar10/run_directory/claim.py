"""Claims a directory for a run: locks it, then resumes, refuses or moves aside.

Nothing in the directory is deleted here. A run resumes if its configuration agrees in
everything that determines the result; otherwise the differences are shown, with the
commands that avoid them.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import config_file, flags, origin
from cifar10.config.config import Config
from cifar10.config.options import is_a
from cifar10.errors import UsageError, printable, reason
from cifar10.process import invocation, regular_files
from cifar10.run_directory import files, layout
from cifar10.run_directory.layout import CONFIG

_LOCK = ".lock"
# What a training writes to in its directory.
_FOLDERS = (layout.CHECKPOINTS, layout.TRAIN_EVENTS, layout.DEBUG_CHECKPOINTS)


@contextlib.contextmanager
def hold(path: Path) -> Iterator[contextlib.ExitStack]:
    """Keeps other trainings out of a run directory, which is made if there is none.

    The lock is on a file in the directory, and so is the same for every path and user;
    it is not on the directory itself, since NFS locks that on one machine only. The
    system releases it when the process ends, however it ends; a file that is left
    behind locks nothing.

    Yields what releases the lock, for `begin`.
    """
    with contextlib.ExitStack() as held:
        try:
            _read_earlier(path)  # Nothing is written where another thing than a run is.
            with contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                held.callback(_delete, os.rmdir, path)  # If nothing is in it.
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, directory)
            while True:
                how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                file = os.open(_LOCK, how, 0o666, dir_fd=directory)
                held.callback(os.close, file)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_lock(file, directory):
                    break  # Else its holder has just deleted it.
            if os.fstat(file).st_nlink > 1:  # It is truncated below.
                raise OSError(errno.EMLINK, f"its {_LOCK} is a link")  # noqa: TRY301
            # While the file is locked, and wherever the directory has been moved.
            held.callback(_delete, _delete_lock, file, directory)
            with contextlib.suppress(PermissionError):  # It is another user's.
                os.fchmod(file, 0o666)  # Who may write to the directory may lock it.
            os.ftruncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BlockingIOError as error:
            holder = os.pread(file, 300, 0).decode(errors="replace")
            raise UsageError(
                f"--train_dir {path} is in use by another training: "
                f"{printable(holder)}. "
                "Wait for its end, stop it, or choose another --train_dir."
            ) from error
        except OSError as error:
            raise _unusable(path, error) from error
        yield held


def _delete(how: Callable[..., None], *what: object) -> None:
    with contextlib.suppress(OSError):
        how(*what)


def _delete_lock(file: int, directory: int) -> None:
    if _is_lock(file, directory):
        os.unlink(_LOCK, dir_fd=directory)


def _is_lock(file: int, directory: int) -> bool:
    """Returns whether an open file is the one that has the lock's name."""
    with contextlib.suppress(FileNotFoundError):
        there = os.stat(_LOCK, dir_fd=directory, follow_symlinks=False)
        return os.path.samestat(there, os.fstat(file))
    return False


class Place:
    """The directory that a run writes to, and its lock."""

    def __init__(self, path: Path) -> None:
        self._paths = (path, path / _LOCK)
        self._before = [*map(_identity, self._paths)]

    def problem(self) -> str:
        """Returns why nothing may be written there any more; empty if it may.

        A directory that has vanished is noticed when it is written to.
        """
        (directory, lock), (now, lock_now) = self._before, map(_identity, self._paths)
        if directory and now and directory != now:
            return "it is another directory by now, and the run's was moved"
        if now and lock and lock != lock_now:
            return f"its {_LOCK}, which keeps other trainings out, was deleted"
        return ""


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        return path.stat().st_dev, path.stat().st_ino
    return None


def check(
    path: Path,
    settings: Mapping[str, Any],
    determining: Sequence[str],
    *,
    fresh: bool,
) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory; None if there is none.

    To be resumed, it has to agree in the `determining` entries of `settings`; an entry
    that an older run did not record counts as the default. Nothing is written.
    """
    try:
        earlier = _read_earlier(path)
    except OSError as error:
        raise _unusable(path, error) from error
    if earlier is not None and not set(determining) & set(earlier):
        raise UsageError(
            f"{path / CONFIG} was not written by this package. Choose another "
            "--train_dir."
        )
    if earlier is not None and not fresh:
        for name in _FOLDERS:
            layout.check_folder(path / name)
        defaults = dataclasses.asdict(Config())
        _compare(path, {**defaults, **earlier}, settings, determining)
    return earlier


def division(path: Path, *, fresh: bool) -> str | None:
    """Returns how the pictures of the run in a directory were divided, if one is there.

    It is that of `Dataset.division`, and any worker may ask for it.
    """
    config = path / CONFIG
    # `Path.exists` raises where this user may not look.
    if fresh or not os.path.exists(config):  # noqa: PTH110
        return None
    earlier = config_file.load(config)
    return earlier.get("data_division") if isinstance(earlier, dict) else None


def begin(
    path: Path,
    settings: Mapping[str, Any],
    earlier: Mapping[str, Any] | None,
    held: contextlib.ExitStack,
    *,
    fresh: bool,
) -> str | None:
    """Begins a run or takes over the earlier one, and writes `config.json`.

    If the earlier one is moved aside, `held` keeps others out of the new directory.
    Returns what the user should know.
    """
    note = ""
    try:
        if earlier is not None and fresh:
            note = f"The earlier run was moved to {path.rename(_unused(path))}."
            with held.pop_all():
                held.enter_context(hold(path))
        elif earlier is not None:
            note = _version_note(earlier, settings)
            settings = _with_history(settings, earlier)
        content = (json.dumps(settings, indent=2) + "\n").encode()
        # The note comes first: whatever follows the run reads the file at once.
        unnoted = origin.remember(content)
        regular_files.write_atomically(path / CONFIG, content)
    except OSError as error:
        raise _unusable(path, error) from error
    return "\n".join(filter(None, (note, unnoted))) or None


def resuming_command(
    path: Path, settings: Mapping[str, Any], **changes: int
) -> str | None:
    """Returns how to continue a run with some changes, in the running program.

    None if several machines have to do it, or if the same call of a user's program
    does.
    """
    if settings.get("workers", 1) > 1:
        return None
    script = Path(sys.argv[0])
    if not invocation.takes_flags():
        arguments = ", ".join(f"{name}={value}" for name, value in changes.items())
        return f"cifar10.Config(..., {arguments})" if arguments else None
    if invocation.is_the_package():
        words = [str(script), "train"]
    else:
        if settings.get("towers", 1) > 1:  # train.py has one.
            script = script.with_name("train_multi_gpu.py")
        words = [str(script)]
    given = [word for name in changes for word in (f"--{name}", str(changes[name]))]
    return invocation.to_paste([*words, "--resume", str(path), *given])


def starting_over() -> str | None:
    """Returns this command with --fresh; None if it has --resume, which contradicts."""
    if not invocation.takes_flags():
        return "cifar10.Config(..., fresh=True)"
    if any(word.partition("=")[0] == "--resume" for word in sys.argv):
        return None
    return invocation.to_paste([*flags.without(sys.argv, "fresh"), "--fresh"])


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
    # An entry that an earlier version did not have was not in use.
    differing = [n for n in determining if earlier.get(n) != settings[n]]
    if not differing:
        return
    ways: dict[str, str | None] = {}
    if differing == ["batch_size"]:
        ways["Keep its batches, which batch norm and dropout see:"] = _same_batches(
            earlier["batch_size"], settings
        )
    changed_data = "data_fingerprint" in differing
    # --resume refuses another version's run.
    with contextlib.suppress(UsageError):
        recorded = config_file.read(path / CONFIG)
        if not changed_data:
            ways["Continue that run as it is:"] = (
                resuming_command(path, recorded)
                if invocation.takes_flags()
                else f"cifar10.Config(resume={str(path)!r}, model=..., data=...)"
            )
    if anew := starting_over():
        place = str(_unused(path))
        others = flags.without(sys.argv, "train_dir")
        elsewhere = invocation.to_paste([*others, "--train_dir", place])
        if not invocation.takes_flags():
            elsewhere = f"cifar10.Config(..., train_dir={place!r})"
        ways["Keep it, and train in another directory:"] = elsewhere
        ways["Move it aside and start over:"] = anew
    raise UsageError(
        f"{path} holds a run with another configuration:\n"
        + "\n".join(
            f"    {name}: {earlier.get(name, 'not recorded')} there, "
            f"{settings[name]} now"
            for name in differing
            if name != "data_fingerprint"
        )
        + ("    data: the pictures have changed since it began" if changed_data else "")
        + "".join(f"\n{what}\n    {how}" for what, how in ways.items() if how)
    )


def _same_batches(batch: Any, settings: Mapping[str, Any]) -> str | None:
    """Returns this command with batches of that size; None if they do not add up."""
    if not is_a(batch, int) or batch < 1:  # It may be of another kind in a file.
        return None
    images, towers = settings.get("global_batch_size", 0), settings.get("towers", 1)
    batches, rest = divmod(images, batch * towers)
    if rest or not batches:
        return None
    others = flags.without(sys.argv, "batch_size", "accumulate")
    given = f"--batch_size {batch} --accumulate {batches}"
    return invocation.to_paste([*others, *given.split()])


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


def _version_note(earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Returns what wrote a run and what continues it, where they differ.

    A run that does not record which code wrote it does so from now on.
    """
    now = settings.get("versions", {})
    before = {"cifar10": "of unknown version", **earlier.get("versions", {})}
    changed = [
        f"{name} {before[name]}, now {now[name]}"
        for name in now
        if before.get(name, now[name]) != now[name]
    ]
    return f"Code:   was {'; '.join(changed)}" if changed else ""


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"--train_dir {path} cannot be used: {reason(error)}. Choose a directory that "
        "you can write to and that has room."
    )


def _unused(path: Path) -> Path:
    return files.unused(path.with_name(f"{path.name}."))
