"""Saves, verifies, restores and deletes the checkpoints of a run.

A checkpoint is a folder such as `step-00001000`. It holds the variables, written by
`tf.train.Checkpoint`, and a `manifest.json` with the step, the time, the position in
the input and the SHA-256 of every file. `save` writes a folder under a temporary name,
syncs it to disk and renames it, so a crash leaves no incomplete checkpoint. The
checksums reveal later disk damage. Only `save` and `restore` import TensorFlow.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cifar10 import files
from cifar10.config import fields, layout, schema
from cifar10.errors import DiskError, UsageError, reason
from cifar10.run_directory import logs, scores

MANIFEST = "manifest.json"
LINK = "chain"  # The key of a link in a manifest.
AVERAGES = "loss_averages"  # The key of the metrics' moving averages.
KEEP = "keep"  # An empty file that the user or a rollback creates in a checkpoint.
_STATE = "state"
# Only the names that `folder` returns, so that each step has a single name.
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
# Names of files that TensorFlow writes. Without a slash, none leaves the folder.
_FILE_NAME = re.compile(rf"{_STATE}\.[\w-]+", re.ASCII)
# Prefix of folders that are half-written or half-deleted, and never read.
INCOMPLETE = ".incomplete-"

_NOT_A_MANIFEST = (ValueError, KeyError, TypeError, AttributeError, RecursionError)

# Errors that do not mean damage: missing permissions and exhausted resources.
_NO_DAMAGE = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DamagedError(UsageError):
    """A file of a checkpoint is missing or differs from what was written."""


class Checkpoint(NamedTuple):
    """A checkpoint whose files match its manifest."""

    path: Path
    step: int
    manifest: dict[str, Any]


def save(
    directory: Path, trackables: Mapping[str, Any], *, step: int, facts: dict[str, Any]
) -> Path:
    """Writes a checkpoint into the run's folder of checkpoints; returns its path.

    `trackables` maps names to variables, lists of variables, Keras models or
    optimizers. `facts` holds more entries for the manifest. A failure raises a
    `DiskError` and leaves earlier checkpoints intact.
    """
    import tensorflow as tf

    published = folder(directory, step)
    incomplete = directory / f"{INCOMPLETE}{published.name}-{os.getpid()}"
    try:
        # Without parents, so that a vanished run directory is not recreated.
        directory.mkdir(exist_ok=True)
        # Frees the space of a checkpoint that a disk failure left half-written.
        delete_incomplete(directory)
        incomplete.mkdir()
        tf.train.Checkpoint(**trackables).write(str(incomplete / _STATE))
        sums = {path.name: _sums(path) for path in sorted(incomplete.iterdir())}
        manifest = {"step": step, **facts, "time": time.time(), "files": sums}
        manifest["sha256"] = digest_of(manifest)
        text = json.dumps(manifest, indent=2) + "\n"
        (incomplete / MANIFEST).write_text(text, encoding="utf-8")
        for path in (*incomplete.iterdir(), incomplete):
            files.sync(path)
        incomplete.rename(published)
        files.sync(directory)
    except (OSError, tf.errors.OpError) as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        raise DiskError(
            f"The checkpoint of step {step} could not be written to {directory}: "
            f"{reason(error)}. Earlier checkpoints are intact.",
            "Free space or make the folder writable, then repeat the command without "
            "--fresh. Leave room for one more checkpoint than --keep_checkpoints.",
        ) from error
    return published


def _sums(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": files.sha256(path)}


def make_link(directory: Path, step: int, settings: Mapping[str, Any]) -> dict:
    """Returns a checkpoint's link for its manifest, which reveals later changes.

    It holds `settings`, and the SHA-256 of the log up to `step`, of the manifest
    before, and of the run's configuration and starts.
    """
    before = max((at for at in steps(directory) if at < step), default=None)
    link: dict[str, Any] = {"settings": {**settings}, "step": before}
    run = directory.parent
    with contextlib.suppress(OSError, UsageError):  # Saving must not fail.
        # Without events, which may still come once this checkpoint is written.
        log = logs.lines_up_to(run / layout.METRICS, step, events=False)
        link["log"] = hashlib.sha256(log).hexdigest()
        if before is not None:
            link["manifest"] = digest_of(read_manifest(directory, before))
        link["config"] = files.sha256(run / layout.CONFIG)
        if starts := logs.lines_up_to(run / layout.STARTS, sys.maxsize):
            link["starts"] = hashlib.sha256(starts).hexdigest()  # Without a torn line.
    return link


def link_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest's link; {} if an earlier version wrote it, or none."""
    link = manifest.get(LINK)
    is_ours = isinstance(link, dict) and isinstance(link.get("settings"), dict)
    return link if link and is_ours else {}


def folder(directory: Path, step: int) -> Path:
    """Returns the path of a step's checkpoint, whether or not it exists."""
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

    Raises:
        DamagedError: A file is missing or differs.
        FileNotFoundError: The checkpoint does not exist, or was deleted meanwhile.
        UsageError: The files cannot be read, for example without permission.
    """
    path = folder(directory, step)
    manifest = read_manifest(directory, step)
    file = path / MANIFEST
    try:
        # TensorFlow would also read additional files with such names.
        found = {state.name for state in path.glob(f"{_STATE}*")}
        if not found <= manifest["files"].keys():
            raise DamagedError(f"{file} does not list all files of the checkpoint")
        for name, expected in manifest["files"].items():
            file = path / name
            if _sums(file) != expected:
                raise DamagedError(f"{file} differs from its SHA-256 in the manifest")
    except (OSError, *_NOT_A_MANIFEST) as error:
        raise _trouble(file, error) from error
    return Checkpoint(path, step, manifest)


def read_manifest(directory: Path, step: int) -> dict[str, Any]:
    """Returns a manifest without verifying other files; raises errors like `verify`."""
    file = folder(directory, step) / MANIFEST
    try:
        manifest = json.loads(files.read(file).decode())
        is_intact = manifest.pop("sha256") == digest_of(manifest)
        are_ours = all(map(_FILE_NAME.fullmatch, manifest["files"]))
        are_ours &= not schema.wrong(manifest, schema.MANIFEST)
        if record := manifest.get("validation"):
            is_old = "best_by" not in record
            rules = schema.VALIDATION_OF_1_0 if is_old else schema.VALIDATION
            are_ours &= not schema.wrong(record, rules, needs_all=True)
        if not (is_intact and are_ours and manifest["step"] == step):
            raise DamagedError(f"{file} was edited, damaged or moved here")
    except (OSError, *_NOT_A_MANIFEST) as error:
        raise _trouble(file, error) from error
    return manifest


def delete(directory: Path, step: int) -> None:
    """Deletes the checkpoint of a step. Concurrent readers notice that it is gone."""
    path = folder(directory, step)
    doomed = path.with_name(f"{INCOMPLETE}{path.name}-old")
    if path.exists():  # The user may have deleted it.
        files.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def delete_old(
    directory: Path, keep: fields.Checkpoints, step: int, more: Mapping[int, float] = {}
) -> None:
    """Deletes old checkpoints of a run, except the best and those with a file `keep`.

    Checkpoints after `step`, the newest step of this run, belong to another run; they
    are neither deleted nor counted. A `DiskError` leaves those to keep intact.
    `more` maps steps to scores that the log may lack.
    """
    run = directory.parent
    saved = [one for one in steps(directory) if one <= step]
    kept = scores.best(run, saved, keep.keep_best, more) if keep.keep_best else []
    for old in saved[: -keep.keep_checkpoints]:
        if old not in kept and not (folder(directory, old) / KEEP).exists():
            delete(directory, old)


def delete_all_but_best(run: Path, state: str = "finished") -> bool:
    """Deletes a finished run's checkpoints but the best and those with a file `keep`.

    Returns whether any was deleted. Writes the run's `state`, which may be `diverged`,
    to the file `pruned`. The caller holds the run's lock; a checkpoint has a score.
    """
    layout.refuse_link(directory := run / layout.CHECKPOINTS)
    (best,) = scores.best(run, saved := steps(directory))
    verify(directory, best)
    files.write_atomically(run / layout.PRUNED, state.encode())
    delete_incomplete(directory)
    for step in saved:
        if step != best and not (folder(directory, step) / KEEP).exists():
            delete(directory, step)
    return steps(directory) != saved


def was_diverged(run: Path) -> bool:
    """Returns whether a run had diverged when only its best checkpoint was left."""
    with contextlib.suppress(OSError):
        return files.read(run / layout.PRUNED) == b"diverged"
    return False


def set_aside(directory: Path, step: int, why: str = "damaged") -> Path:
    """Prefixes a checkpoint's name with `why`, so that it is kept but never read."""
    path = folder(directory, step)
    return files.rename(path, files.unused(directory / f"{why}-{path.name}-"))


def restore(
    checkpoint: Checkpoint, trackables: Mapping[str, Any], *, partly: bool = False
) -> None:
    """Restores all `trackables` from a verified checkpoint, or raises an error.

    If `partly`, `trackables` may omit entries of the checkpoint, but only whole ones.
    A checkpoint from another model raises a `UsageError`, one that was changed after
    verification the errors of `verify`.
    """
    import tensorflow as tf

    reader = tf.train.Checkpoint()
    try:
        # First, or TensorFlow logs each value not restored, even after an error.
        status = reader.read(str(checkpoint.path / _STATE)).expect_partial()
        for name, value in trackables.items():
            setattr(reader, name, value)  # Assignment restores the values.
        if partly:
            status.assert_existing_objects_matched()
        else:
            status.assert_consumed()
    except OSError as error:
        raise files.unreadable(checkpoint.path, error) from error
    except Exception as error:
        verify(checkpoint.path.parent, checkpoint.step)  # The files may have changed.
        of_others = AssertionError, ValueError, tf.errors.OpError
        if isinstance(error, LookupError) or not isinstance(error, of_others):
            what = f"{checkpoint.path}: its data or its object graph is damaged"
            raise DamagedError(f"{what} ({reason(error)})") from error
        what = f"{checkpoint.path} is a checkpoint from another model"
        raise UsageError(f"{what} ({reason(error)})") from error


def delete_incomplete(directory: Path) -> None:
    """Deletes half-written folders of killed processes."""
    for path in directory.glob(f"{INCOMPLETE}*"):
        shutil.rmtree(path, ignore_errors=True)


def _trouble(file: Path, error: Exception) -> Exception:
    """Returns the error to raise for a damaged, unreadable or deleted file."""
    if isinstance(error, OSError) and error.errno in _NO_DAMAGE:
        return files.unreadable(file, error)
    if not file.parent.is_dir():
        return FileNotFoundError(file.parent)
    return DamagedError(f"{file} is missing or unreadable")


def digest_of(value: Any) -> str:
    """Returns the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
