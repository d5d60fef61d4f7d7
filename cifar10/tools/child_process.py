"""Runs modules of this package in child processes, which may crash or hang."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

_PACKAGE_FOLDER = Path(__file__).resolve().parents[2]

# TensorFlow starts in 5 s; with a slow disk and eight GPUs in a minute.
_START_SECONDS = 180.0
_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0
_LONGEST_CAUSE = 300
_SIGNS_OF_FAILURE = re.compile("error|fatal|fail|abort|check", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Output:
    """The JSON values that a child process printed, and what it wrote to stderr.

    `error` says why it ended early, and is empty if it did not.
    """

    messages: list[Any]
    stderr: str
    error: str


def run(module: str, *arguments: str, seconds: float, **variables: str) -> Output:
    """Runs `main()` of a module that prints JSON values as it proceeds.

    It may take `seconds` from one message to the next, and finds `variables` in its
    environment.
    """
    code = f"from {module} import main; main()"
    search_path = [str(_PACKAGE_FOLDER), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        # Any of TensorFlow's messages may give the reason for a failure.
        "TF_CPP_MIN_LOG_LEVEL": "0",
        **variables,
    }
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stdout,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
    ):
        process = subprocess.Popen(  # noqa: S603 - this package's own module.
            # -P: a file in the current folder must not hide a module.
            [sys.executable, "-P", "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            process_group=0,
        )
        try:
            error = _wait(process, stdout, seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # With what it has started.
            # A process that waits for a broken driver may not even die of this.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)
        stdout.seek(0)
        stderr.seek(0)
        written = stderr.read()
        messages = [json.loads(line) for line in stdout if line.endswith("\n")]
    if process.returncode and not error:
        error = cause_of_death(process.returncode, written)
    return Output(messages, written, error)


def _wait(process: subprocess.Popen[bytes], stdout: IO[str], seconds: float) -> str:
    """Waits for the end of a process; returns an error if it stalls."""
    size, limit, last_message = 0, max(_START_SECONDS, seconds), time.monotonic()
    while process.poll() is None:
        if time.monotonic() - last_message > limit:
            return f"no answer within {limit:g} s"
        time.sleep(_POLL_SECONDS)
        if (new_size := os.fstat(stdout.fileno()).st_size) > size:
            size, limit, last_message = new_size, seconds, time.monotonic()
    return ""


def claim_stdout() -> IO[str]:
    """Opens stdout for only a child's messages; libraries print to stderr."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stdout


def cause_of_death(status: int, stderr: str) -> str:
    """Returns why a process died; its status is negative for a signal."""
    lines = [line.strip() for line in stderr.splitlines()]
    # Without stack traces and their titles, which stand between stars.
    lines = [line for line in lines if line and not line.startswith(("***", "@"))]
    failures = [line for line in lines if _SIGNS_OF_FAILURE.search(line)]
    cause = (failures or lines or ["it printed no reason"])[-1][:_LONGEST_CAUSE]
    if status >= 0:
        return f"the process ended with exit code {status}: {cause}"
    return f"the process died of {signal.Signals(-status).name}: {cause}"
