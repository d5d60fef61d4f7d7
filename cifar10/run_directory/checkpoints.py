"""Checkpoints that are complete or absent.

A checkpoint is a folder `step-00001000` with the variables, as `tf.train.Checkpoint`
writes them, and a `manifest.json` with the step, the position in the input and the
SHA-256 of every file. It is written under another name, synced to disk and published by
renaming; so a folder of this name is complete, whenever the process or machine died.
The sums reveal what a disk does to it later. Listing and comparing need no TensorFlow,
which is imported where variables are read or written.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar10.errors import DiskError, UsageError, reason
from cifar10.process import files

MANIFEST = "manifest.json"
_STATE = "state"
# As `folder` writes it: two names of one step would hide one of its checkpoints.
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
# Names of files that TensorFlow writes; none leads out of the checkpoint's folder.
_FILE_NAME = re.compile(rf"{_STATE}\.[\w-]+", re.ASCII)
_LARGEST_COUNT = 10**12  # Of batches, steps, images or evaluations.
# Begins the names of folders that are half-written or half-deleted; nothing reads them.
INCOMPLETE = ".incomplete-"

# Raised when a manifest has other content.
_NOT_A_MANIFEST = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

# Errors that tell nothing about the file's content: permissions, resources that this
# process has used up, a server that forgot the file.
_NO_DAMAGE = (
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
)


class DamagedError(Exception):
    """A checkpoint differs from what was written; the message says how."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files have been compared with its manifest."""

    path: Path
    step: int
    manifest: dict[str, Any]


def save(
    directory: Path,
    trackables: Mapping[str, Any],
    *,
    step: int,
    facts: Mapping[str, Any],
) -> Path:
    """Writes and publishes one checkpoint in the folder of all checkpoints of the run.

    `trackables` are variables, lists of variables, Keras models and optimizers by name;
    `facts` are further entries of the manifest. If it cannot be written (`DiskError`),
    earlier checkpoints are untouched.
    """
    import tensorflow as tf

    published = folder(directory, step)
    incomplete = directory / f"{INCOMPLETE}{published.name}-{os.getpid()}"
    try:
        # Without parents: a run directory that has vanished is not made again.
        directory.mkdir(exist_ok=True)
        # A disk that failed may hold a half-written one, whose room is needed now.
        delete_incomplete(directory)
        incomplete.mkdir()
        tf.train.Checkpoint(**trackables).write(str(incomplete / _STATE))
        _write_manifest(incomplete, {"step": step, **facts})
        for path in (*incomplete.iterdir(), incomplete):
            files.sync(path)
        incomplete.rename(published)
        files.sync(directory)
    except (OSError, tf.errors.OpError) as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        raise _not_saved(directory, step, error) from error
    return published


def _write_manifest(incomplete: Path, facts: Mapping[str, Any]) -> None:
    sums = {path.name: _sums(path) for path in sorted(incomplete.iterdir())}
    manifest = {**facts, "files": sums}
    manifest["sha256"] = digest_of(manifest)
    text = json.dumps(manifest, indent=2) + "\n"
    (incomplete / MANIFEST).write_text(text, encoding="utf-8")


def _sums(path: Path) -> dict[str, Any]:
    """Returns what a manifest records of a file."""
    return {"bytes": path.stat().st_size, "sha256": files.sha256(path)}


def _not_saved(directory: Path, step: int, error: Exception) -> DiskError:
    """Returns the error for a checkpoint that could not be written."""
    what = f"The checkpoint of step {step} could not be written"
    if not directory.parent.exists():
        return DiskError(
            f"{what}: {directory.parent} is gone, with what was saved there.",
            "If it was moved, give its new place as --resume; if its disk is gone, "
            "mount it, then give the same command again.",
        )
    earlier = [other for other in steps(directory) if other != step]
    kept = (
        f"That of step {earlier[-1]} is kept" if earlier else "There is no earlier one"
    )
    return DiskError(
        f"{what} to {directory}: {reason(error)}. {kept}.",
        "Make room there or make it writable, then give the same command again, "
        "without --fresh. Old ones are deleted once the new one is complete: there "
        "must be room for one more than --keep_checkpoints.",
    )


def folder(directory: Path, step: int) -> Path:
    """Returns where the checkpoint of a step is, or would be."""
    return directory / f"step-{step:08d}"


def steps(directory: Path) -> list[int]:
    """Returns the steps of all published checkpoints, ascending."""
    try:
        paths = [path for path in directory.iterdir() if not path.is_symlink()]
        names = [path.name for path in paths if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise files.unreadable(directory, error) from error
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def verify(directory: Path, step: int) -> Checkpoint:
    """Compares the files of one checkpoint with its manifest.

    It may be deleted meanwhile, unless the caller is `reading` it.

    Raises:
        DamagedError: The files differ.
        FileNotFoundError: There is no such checkpoint (any more).
        UsageError: This user may not read the files.
    """
    path = folder(directory, step)
    manifest = read_manifest(directory, step)
    file = path / MANIFEST
    try:
        # TensorFlow reads whatever has such a name.
        found = {state.name for state in path.glob(f"{_STATE}*")}
        if not found <= manifest["files"].keys():
            raise DamagedError(f"{file} is not the one that was written here")
        for name, expected in manifest["files"].items():
            file = path / name
            if _sums(file) != expected:
                raise DamagedError(f"{file} differs from its SHA-256 in the manifest")
    except (OSError, *_NOT_A_MANIFEST) as error:
        raise _trouble(file, error) from error
    return Checkpoint(path, step, manifest)


def read_manifest(directory: Path, step: int) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, whose files may differ from it.

    Raises the same errors as `verify`.
    """
    file = folder(directory, step) / MANIFEST
    try:
        manifest = json.loads(files.read(file).decode())
        is_ours = manifest.pop("sha256") == digest_of(manifest)
        if not (is_ours and manifest["step"] == step and is_plausible(manifest)):
            raise DamagedError(f"{file} is not the one that was written here")
    except (OSError, *_NOT_A_MANIFEST) as error:
        raise _trouble(file, error) from error
    return manifest


@contextlib.contextmanager
def reading(directory: Path, step: int) -> Iterator[None]:
    """Keeps the checkpoint of a step from being deleted while it is read.

    A reader shares a lock on the manifest; `delete` wants that lock alone. It is on a
    file, not the folder, because NFS grants an exclusive lock only on what is open for
    writing. A lock ends with its process. On a file system without locks, a reader may
    find that its checkpoint has vanished.
    """
    with contextlib.ExitStack() as stack:
        # A missing file is the reader's concern. A lock is refused only for a file that
        # is being deleted, so waiting would be of no use.
        with contextlib.suppress(OSError):
            manifest = files.opened(folder(directory, step) / MANIFEST)
            fcntl.flock(stack.enter_context(manifest), fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def delete(directory: Path, step: int) -> None:
    """Deletes the checkpoint of a step as a whole, unless it is being read."""
    path = folder(directory, step)
    doomed = path.with_name(f"{INCOMPLETE}{path.name}-old")
    with contextlib.ExitStack() as stack:
        try:
            manifest = stack.enter_context(files.opened(path / MANIFEST, "r+b"))
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:  # There is no such file, or the file system has no locks.
            pass
        if path.exists():  # The user may delete some, too.
            files.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def set_aside(directory: Path, step: int, why: str = "damaged") -> Path:
    """Prefixes a checkpoint's name with `why`: it is kept, but never read again."""
    path = folder(directory, step)
    return files.rename(path, files.unused(directory / f"{why}-{path.name}-"))


def restore(
    checkpoint: Checkpoint, trackables: Mapping[str, Any], *, partly: bool = False
) -> None:
    """Reads an intact checkpoint's values into variables, all of them or an error.

    With `partly` a checkpoint may hold further entries, but lists must be as long.

    Raises:
        UsageError: The checkpoint belongs to another model or step, or cannot be read.
        DamagedError: It was changed meanwhile.
        FileNotFoundError: It was deleted meanwhile.
    """
    import tensorflow as tf

    reader = tf.train.Checkpoint()
    try:
        # Called before anything is read, or else TensorFlow lists the values that were
        # not restored, even after an error.
        status = reader.read(str(checkpoint.path / _STATE)).expect_partial()
        for name, value in trackables.items():
            setattr(reader, name, value)  # This restores it.
        if partly:
            status.assert_existing_objects_matched()
            _check_lengths(checkpoint, trackables)
        else:
            status.assert_consumed()
    except OSError as error:
        raise files.unreadable(checkpoint.path, error) from error
    except (AssertionError, ValueError, LookupError, tf.errors.OpError) as error:
        verify(checkpoint.path.parent, checkpoint.step)  # It may have changed since.
        if isinstance(error, LookupError):  # The data is shorter than the index says.
            raise DamagedError(f"{checkpoint.path}: {reason(error)}") from error
        raise UsageError(
            f"{checkpoint.path} is a checkpoint of another model ({reason(error)})"
        ) from error
    step = int(trackables.get("global_step", checkpoint.step))
    if step != checkpoint.step:
        raise UsageError(
            f"{checkpoint.path} holds global_step {step}, not {checkpoint.step} as its "
            "name says. Move it away."
        )


def _check_lengths(checkpoint: Checkpoint, trackables: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose model has the same layers and more."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(checkpoint.path / _STATE))
    keys = reader.get_variable_to_shape_map()
    for name, value in trackables.items():
        if isinstance(value, list):
            saved = {key.split("/")[1] for key in keys if key.startswith(f"{name}/")}
            if len(saved) != len(value):
                raise ValueError(
                    f"{name}: {len(saved)} variables there, {len(value)} in the model"
                )


def delete_incomplete(directory: Path) -> list[str]:
    """Deletes what killed processes left half-written; returns the folders' names."""
    left = sorted(directory.glob(f"{INCOMPLETE}*"))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left if not path.exists()]


def _trouble(file: Path, error: Exception) -> Exception:
    """Returns the error for a file that is damaged, unreadable for now, or deleted."""
    if isinstance(error, OSError) and error.errno in _NO_DAMAGE:
        return files.unreadable(file, error)
    if not file.parent.is_dir():
        return FileNotFoundError(file.parent)
    return DamagedError(f"{file} is missing or unreadable")


def is_plausible(manifest: Mapping[str, Any]) -> bool:
    """Returns whether a manifest's entries are of the types that `save` takes."""
    try:
        averages = manifest.get("loss_averages", {})
        counts = [manifest.get(name, 0) for name in ("left_out", "skipped_steps")]
        best = manifest.get("validation", {})
        counts += [best.get(name, 0) for name in ("images", "step", "without_gain")]
        floats = [best.get("score", 0.0), *averages.values()]
        return (
            all(map(_FILE_NAME.fullmatch, manifest["files"]))
            and all(type(one) is int and 0 <= one < _LARGEST_COUNT for one in counts)
            and all(isinstance(one, float) for one in floats)
        )
    except _NOT_A_MANIFEST:
        return False


def digest_of(value: Any) -> str:
    """Returns the SHA-256 of a value of JSON."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
