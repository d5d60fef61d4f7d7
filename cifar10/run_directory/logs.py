"""The logs of a run: `metrics.jsonl`, with one JSON object per line, and event files.

Lines of `metrics.jsonl` with the key `event` say what went wrong, for alerts.
`forget_later` discards the entries of steps that a run is about to repeat. Readers skip
lines that a killed process left incomplete or that a disk has damaged.
"""

import contextlib
import json
import operator
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10 import files
from cifar10.config.schema import wrong
from cifar10.errors import DiskError, reason, say

LARGEST_LOG = 2**30  # Bytes; far more than millions of training steps log.
_RECENT = 2**25  # Bytes, of some 50,000 steps: what a list of runs reads.
_PREFIX = "events.out.tfevents."  # TensorFlow's prefix; a time in seconds follows.
_GO_ON = "Free space or make it writable, then repeat the command without --fresh."


def as_json(value: Any) -> str:
    """Returns JSON with null for numbers that are not finite."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """Appends one JSON line to a log; after an `OSError` the log is unchanged."""
    line = f"{as_json(entry)}\n".encode()
    # Unbuffered, so that `write` fails on a full disk.
    with files.opened(path, "a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            line = b"\n" + line  # Ends an incomplete last line.
        try:
            # A disk that is almost full accepts part of the line without an error.
            while line:
                line = line[file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


def read_lines(path: Path, last: int | None = None) -> list[Any]:
    """Returns the JSON value of each line of a log; None for a damaged line.

    With `last`, reads only so many bytes, at the end.
    """
    try:
        whole = files.read_end(path, last) if last else files.read(path, LARGEST_LOG)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise files.unreadable(path, error) from error
    return [_value(line) for line in whole.splitlines() if line.strip()]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a log with a possible step, ordered by step; no events."""
    lines = [one for one in filter(_has_step, read_lines(path)) if "event" not in one]
    return sorted(lines, key=operator.itemgetter("step"))


def read_recent(path: Path) -> list[dict[str, Any]]:
    """Returns the last entries with a step in a log and the log last moved away."""
    found = path.parent.glob(f"{path.name}[.-]*[0-9]")
    aside = [one for one in found if one.is_file() and not one.is_symlink()]
    newest = sorted(aside, key=lambda one: one.stat().st_mtime)[-1:]
    lines = [line for one in (*newest, path) for line in read_lines(one, last=_RECENT)]
    return [*filter(_has_step, lines)]


def intact(lines: Sequence[Any], schema: Mapping[str, tuple]) -> list[dict[str, Any]]:
    """Returns the lines of a log that `schema` describes, without other entries."""
    whole = [one for one in lines if not wrong(one, schema, needs_all=True)]
    return [{name: one[name] for name in schema} for one in whole]


def _value(line: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


def _has_step(value: Any) -> bool:
    """Returns whether a line's value has a possible step."""
    step = value.get("step") if isinstance(value, dict) else None
    return type(step) is int and 0 <= step < 2**63


@contextlib.contextmanager
def writing(directory: Path, fix: str = _GO_ON) -> Iterator[None]:
    """Turns a failed write to event files or logs into a `DiskError`."""
    import tensorflow as tf

    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise DiskError(
            f"{directory}: event files and logs cannot be written: {reason(error)}.",
            fix,
        ) from error


class LogWriter:
    """Writes to a run's logs; if that fails, says so once and lets the run continue."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._failed = False

    def attempt(self, write: Callable[[], object]) -> bool:
        """Calls `write`; returns whether it succeeded."""
        try:
            with writing(self._directory):
                self._directory.stat()  # Fails if the directory has vanished.
                write()
        except DiskError as error:
            if not self._failed:
                loss = "Training continues, but log entries are lost meanwhile."
                say(f"{error.problem} {loss}")
            self._failed = True
            return False
        self._failed = False
        return True


def forget_later(events: Path, log: Path, step: int) -> None:
    """Discards all records after `step`, which will be run again, and damaged lines.

    A `silence` stays, which no step repeats. A log too large to be read moves away.
    """
    if events.exists():
        _mark_resume(events, step)
    if log.exists() and log.lstat().st_size > LARGEST_LOG:
        aside = files.rename(log, files.unused(log.with_name(f"{log.name}.")))
        say(f"The log was moved to {aside}, since it has over {LARGEST_LOG:,} bytes.")
    kept = lines_up_to(log, step)
    if log.exists() and kept != files.read(log, LARGEST_LOG):
        files.write_atomically(log, kept)


def wait_for_later_second(events: Path) -> None:
    """Waits until the current second is not in the name of any event file."""
    while any(events.glob(f"{_PREFIX}{int(time.time()):010d}.*")):
        time.sleep(0.05)


def _mark_resume(events: Path, resumed_step: int) -> None:
    """Tells TensorBoard to discard the events after `resumed_step`."""
    # TensorBoard takes the first start event of a directory for the beginning of the
    # run, not for a restart. So this writes a start event twice, into a new file, which
    # TensorBoard must read before the run's next event file. It reads files in the
    # order of their names, which contain the time in seconds, then the host. So the new
    # file's name has a hyphen, which sorts first, in place of the host.
    import tensorflow as tf
    from tensorboard.compat.proto import event_pb2

    wait_for_later_second(events)
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    mark = event_pb2.Event(step=resumed_step + 1, session_log=start)
    name = f"{_PREFIX}{int(time.time()):010d}.-{os.getpid()}.resume"
    with tf.io.TFRecordWriter(str(events / name)) as file:
        for event in (event_pb2.Event(file_version="brain.Event:2"), mark, mark):
            file.write(event.SerializeToString())


def lines_up_to(log: Path, step: int, *, events: bool = True) -> bytes:
    """Returns the intact lines of a log up to a step; none if there is no log."""
    if not log.exists():
        return b""
    lines = files.read(log, LARGEST_LOG).splitlines(keepends=True)
    complete = [(line, _value(line)) for line in lines if line.endswith(b"\n")]
    found = [(line, value) for line, value in complete if _has_step(value)]
    return b"".join(
        line
        for line, value in found
        if (value["step"] <= step or value.get("event") == "silence")
        and (events or "event" not in value)
    )
