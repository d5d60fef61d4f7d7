"""Event files and logs: errors of the disk, and steps that a run takes back."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf
from tensorboard.compat.proto import event_pb2

from cifar10.errors import DiskError, reason
from cifar10.process import files
from cifar10.run_directory import scores

_PREFIX = "events.out.tfevents."  # TensorFlow's; the second follows.
_GO_ON = (
    "Make room there or make it writable, then give the same command again, without "
    "--fresh."
)


@contextlib.contextmanager
def writing(directory: Path, fix: str = _GO_ON) -> Iterator[None]:
    """Raises a `DiskError` where event files or logs cannot be written."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise DiskError(
            f"The event files and logs in {directory} cannot be written: "
            f"{reason(error)}.",
            fix,
        ) from error


def forget_later(events: Path, log: Path, step: int) -> None:
    """Drops what event files and a log, if there are any, record beyond a step.

    A run that resumes from this step, or is rolled back to it, repeats what came later.
    """
    if events.exists():
        _mark_resume(events, step)
    _drop_later_lines(log, step)


def wait_for_later_second(events: Path) -> None:
    """Waits until no event file was begun in the current second."""
    while any(events.glob(f"{_PREFIX}{int(time.time()):010d}.*")):
        time.sleep(0.05)


def _mark_resume(events: Path, resumed_step: int) -> None:
    """Tells TensorBoard to forget what was written beyond `resumed_step`.

    The mark is written twice, because TensorBoard takes a directory's first one for the
    beginning of the run and only later ones for a restart. It has its own file, made
    before the run's next event file. TensorBoard reads files in the order of their
    names: by the second in which each was made, then with a hyphen before any machine's
    name. So the mark waits for a later second than that of the existing event files.
    """
    wait_for_later_second(events)
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    mark = event_pb2.Event(step=resumed_step + 1, session_log=start)
    name = f"{_PREFIX}{int(time.time()):010d}.-{os.getpid()}.resume"
    with tf.io.TFRecordWriter(str(events / name)) as file:
        for event in (event_pb2.Event(file_version="brain.Event:2"), mark, mark):
            file.write(event.SerializeToString())


def _drop_later_lines(metrics: Path, resumed_step: int) -> None:
    """Drops the lines of later steps, and incomplete ones of a killed process."""
    if not metrics.exists():
        return
    before = files.read(metrics, scores.LARGEST_LOG)
    lines = before.splitlines(keepends=True)
    after = b"".join(line for line in lines if _is_kept(line, resumed_step))
    if after != before:
        files.write_atomically(metrics, after)


def _is_kept(line: bytes, resumed_step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= resumed_step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
