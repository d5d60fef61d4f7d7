"""The logs of a run: `metrics.jsonl`, with one JSON object a line, and event files.

Their disk may fail, and a run may take steps back. A line that a killed process left
incomplete, or a disk damaged, costs that line and nothing else.
"""

import contextlib
import errno
import json
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar10.errors import DiskError, reason, say
from cifar10.process import files
from cifar10.run_directory.lock import DirectoryGuard

LARGEST_LOG = 2**30  # Bytes; far more than a training of millions of steps logs.
_PREFIX = "events.out.tfevents."  # TensorFlow's; the second follows.
_GO_ON = (
    "Make room there or make it writable, then give the same command again, without "
    "--fresh."
)


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Appends an entry to a log, as one line of JSON: all of it, or an `OSError`."""
    line = f"{json.dumps(entry)}\n".encode()
    # Unbuffered, so that a full disk is noticed when writing.
    with files.opened(path, "a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            line = b"\n" + line  # Keeps an incomplete line before from joining.
        try:
            # A disk with room for a part of it takes that part without an error.
            while line:
                line = line[file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


def read_lines(path: Path) -> list[Any]:
    """Returns the JSON values of a log, one per line; None for a damaged line."""
    try:
        lines = files.read(path, LARGEST_LOG).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.unreadable(path, error) from error
    return [_value(line) for line in lines if line.strip()]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log that belong to a step, in the order of steps."""
    lines = [line for line in read_lines(path) if isinstance(line, dict)]
    of_steps = [line for line in lines if type(line.get("step")) is int]
    return sorted(of_steps, key=operator.itemgetter("step"))


def _value(line: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


@contextlib.contextmanager
def writing(directory: Path, fix: str = _GO_ON) -> Iterator[None]:
    """Raises a `DiskError` where event files or logs cannot be written."""
    import tensorflow as tf

    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise DiskError(
            f"The event files and logs in {directory} cannot be written: "
            f"{reason(error)}.",
            fix,
        ) from error


class LogWriter:
    """Writes to the logs of a run; a failing disk costs what is logged meanwhile.

    It reports the failure once, and the recovery once. Nothing is written where the
    directory has vanished, or belongs to another training.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._guard = DirectoryGuard(directory)
        self._failed = False

    def attempt(self, write: Callable[[], object]) -> bool:
        """Calls a function that writes; returns whether it could."""
        try:
            with writing(self._directory):
                if problem := self._guard.problem():
                    raise OSError(errno.ESTALE, problem)
                self._directory.stat()  # One that has vanished is not created again.
                write()
        except DiskError as error:
            if not self._failed:
                loss = "The training continues; what it logs meanwhile is lost."
                say(f"{error.what} {loss}")
            self._failed = True
            return False
        if self._failed:
            self._failed = False
            say(f"The event files and logs in {self._directory} are written again.")
        return True


def forget_later(events: Path, log: Path, step: int) -> None:
    """Drops what event files and a log, if there are any, record beyond a step.

    A run that resumes from this step, or is rolled back to it, repeats what came later.
    """
    if events.exists():
        _mark_resume(events, step)
    drop_later_lines(log, step)


def wait_for_later_second(events: Path) -> None:
    """Waits until the clock has passed the second of the newest event file."""
    while any(events.glob(f"{_PREFIX}{int(time.time()):010d}.*")):
        time.sleep(0.05)


def _mark_resume(events: Path, resumed_step: int) -> None:
    """Tells TensorBoard to forget what was written beyond `resumed_step`.

    The mark is written twice, because TensorBoard takes a directory's first one for the
    beginning of the run and only later ones for a restart. It has its own file, made
    before the run's next event file. TensorBoard reads files in the order of their
    names, which have the second and the machine; in the mark's name a hyphen, which
    sorts first, is the machine. So the mark waits for a second without event files.
    """
    import tensorflow as tf
    from tensorboard.compat.proto import event_pb2

    wait_for_later_second(events)
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    mark = event_pb2.Event(step=resumed_step + 1, session_log=start)
    name = f"{_PREFIX}{int(time.time()):010d}.-{os.getpid()}.resume"
    with tf.io.TFRecordWriter(str(events / name)) as file:
        for event in (event_pb2.Event(file_version="brain.Event:2"), mark, mark):
            file.write(event.SerializeToString())


def drop_later_lines(log: Path, resumed_step: int) -> None:
    """Drops the lines of later steps, and incomplete ones of a killed process."""
    if not log.exists():
        return
    before = files.read(log, LARGEST_LOG)
    lines = before.splitlines(keepends=True)
    after = b"".join(line for line in lines if _is_kept(line, resumed_step))
    if after != before:
        files.write_atomically(log, after)


def _is_kept(line: bytes, resumed_step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= resumed_step
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
