"""Runs jobs in an adapter's processes, which wait, are killed, or find a full disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.promises.adapters.protocol import Job

_PATIENCE_SECONDS = 300.0
_DISK_BYTES = 32 << 20
_ROOT = str(Path(__file__).parents[2])
# What gloo, which looks for the machine's own name, and TensorFlow have to be told; and
# where adapters find `protocol`.
_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")])),
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "OMP_NUM_THREADS": "1",
    "KERAS_BACKEND": "tensorflow",
    "HF_HUB_OFFLINE": "1",
}


class NoCheckpointError(Exception):
    """The adapter's pattern of checkpoints matches no file."""


class NotWaitingError(Exception):
    """The adapter ended, or hung, before the update after which it was to wait."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Attributes:
        code: The exit code; None if the process hung and was killed.
        output: What it printed, both streams.
        facts: What it answered; empty if it did not.
        weights: The trained weights.
    """

    code: int | None
    output: str
    facts: dict[str, Any]
    weights: list[np.ndarray]

    @property
    def is_done(self) -> bool:
        """Whether the job came to its end."""
        return self.code == 0 and bool(self.facts)

    @property
    def began(self) -> int:
        """The update after which a run began."""
        last = self.facts.get("step") or 0
        return min(map(int, self.facts["rates"]), default=last + 1) - 1

    @property
    def last_line(self) -> str:
        """The last line of the output that names an error, else the last."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = [
            line.split("]: ", 1)[-1] if line.startswith("[rank") else line
            for line in lines
            if "Error" in line.split(":")[0] or "Error: " in line
        ]
        ours = [one for one in errors if "ChildFailedError" not in one]
        return (ours or lines or ["nothing"])[-1]


class Trials:
    """The jobs of one adapter.

    Args:
        command: The adapter's command, to which the job's file is added.
        folder: For everything that the jobs write.
        patience: Seconds that a job may take.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, patience: float = _PATIENCE_SECONDS
    ) -> None:
        self._command = list(command)
        self._patience = patience
        self._count = 0
        self.folder = folder

    def new_folder(self) -> Path:
        """Returns an empty folder for a run."""
        return Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))

    def do(
        self, task: str, folder: Path | str, data: Path | str, **given: Any
    ) -> Outcome:
        """Does a job to its end, and returns the outcome."""
        with self.started(task, folder, data, **given) as process:
            return process.finish()

    def kill(self, folder: Path, data: Path, **given: Any) -> None:
        """Trains until the trainer waits, and kills all of its processes."""
        with self.started("train", folder, data, **given):
            pass

    def fill_disk(
        self, folder: Path, data: Path, pattern: str = "", **given: Any
    ) -> Outcome:
        """Trains until the trainer waits, then fills the disk, and lets it go on.

        Args:
            folder: Of the run; `pattern` is needed unless it is on a disk of its own.
            data: What is trained on.
            pattern: Of checkpoints. No file may be larger than half of the newest, so
                that the disk is full in the middle of the next.
            **given: Further fields of the job.
        """
        with self.started("train", folder, data, **given) as process:
            ballast = folder / "ballast"
            if pattern:
                half = newest(folder, pattern).stat().st_size // 2
                for one in process.members():
                    resource.prlimit(one, resource.RLIMIT_FSIZE, (half, half))
            else:
                with contextlib.suppress(OSError), ballast.open("wb", 0) as file:
                    while file.write(bytes(4096)):
                        pass
            outcome = process.finish()
        ballast.unlink(missing_ok=True)
        return outcome

    @contextlib.contextmanager
    def started(
        self, task: str, folder: Path | str, data: Path | str, **given: Any
    ) -> Iterator[_Process]:
        """Starts a job, and yields it, waiting if that is what the job says."""
        self._count += 1
        stem = self.folder / f"job-{self._count}"
        names = {name: stem.with_suffix(f".{name}") for name in ("npz", "gate")}
        job = Job(task, str(folder), str(data), *map(str, names.values()), **given)
        file = stem.with_suffix(".json")
        file.write_text(json.dumps(dataclasses.asdict(job)))
        process = _Process([*self._command, str(file)], job, self._patience)
        try:
            if job.wait_at:
                process.wait()
            yield process
        finally:
            process.kill()


class _Process:
    """A process that does a job, with all that it starts."""

    def __init__(self, command: list[str], job: Job, patience: float) -> None:
        self._job = job
        self._end = time.monotonic() + patience
        # Descendants inherit it, whatever their session, and whoever their parent is.
        self._mark = f"PROMISES_JOB={job.answer}"
        name, _, value = self._mark.partition("=")
        self._process = subprocess.Popen(  # noqa: S603 - the adapter's command.
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT | {name: value},
            start_new_session=True,
        )
        self._output: list[bytes] = []
        self._reader = threading.Thread(
            target=lambda: self._output.extend(self._process.stdout or ())
        )
        self._reader.start()

    def wait(self) -> None:
        """Waits until the trainer does.

        Raises:
            NotWaitingError: It never does.
        """
        while not Path(self._job.gate).exists():
            if self._process.poll() is not None or time.monotonic() > self._end:
                raise NotWaitingError(self.finish().last_line)
            time.sleep(0.02)

    def finish(self) -> Outcome:
        """Lets the job go on to its end."""
        Path(self._job.gate).unlink(missing_ok=True)
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(max(0.0, self._end - time.monotonic()))
        self.kill()
        facts, weights = _read(Path(self._job.answer))
        text = b"".join(self._output).decode(errors="replace")
        return Outcome(code, text, facts, weights)

    def kill(self) -> None:
        """Kills all its processes, by SIGKILL."""
        while members := self.members():
            for one in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.01)
        self._process.wait()
        self._reader.join()
        if self._process.stdout:
            self._process.stdout.close()

    def members(self) -> list[int]:
        """Returns its living processes."""
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in file.read_bytes().split(b"\0"):
                    found.append(int(file.parent.name))
        return found


def newest(folder: Path, pattern: str) -> Path:
    """Returns the newest file of a pattern, behind links.

    Raises:
        NoCheckpointError: There is none.
    """
    files = [*folder.glob(pattern)]
    if not files:
        raise NoCheckpointError(f"no file of the run's folder matches {pattern}")
    return max(files, key=lambda one: one.stat().st_mtime).resolve()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Makes a folder a disk of its own, of 32 MB; yields whether root allowed it."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    is_root = os.geteuid() == 0 and shutil.which("mount") is not None
    quiet = subprocess.DEVNULL
    mounts = is_root and not subprocess.call(mount, stderr=quiet)  # noqa: S603
    try:
        yield mounts
    finally:
        if mounts:
            unmount = ["umount", "--lazy", str(folder)]
            subprocess.run(unmount, check=False)  # noqa: S603


def _read(answer: Path) -> tuple[dict[str, Any], list[np.ndarray]]:
    if not answer.exists():
        return {}, []
    with np.load(answer) as file:
        names = sorted({*file} - {"facts"}, key=lambda name: int(name[1:]))
        return json.loads(str(file["facts"])), [file[name] for name in names]
