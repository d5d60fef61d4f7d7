"""Runs a function of this package in another process, which may crash or hang.

A broken driver ends the process that asks it, or never answers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

_PACKAGE_FOLDER = Path(__file__).resolve().parents[3]
_LONGEST = 300
_TELLING = re.compile("error|fatal|fail|abort|check", re.IGNORECASE)


def start(module: str, *arguments: str, stderr: IO[Any]) -> subprocess.Popen[str]:
    """Starts `main()` of a module of this package.

    Args:
        module: Its name, as in `cifar10.tools.doctor.probe`.
        arguments: What it finds in `sys.argv`.
        stderr: File for what it and its libraries write.

    Returns:
        The process; its stdout is a pipe.
    """
    path = [str(_PACKAGE_FOLDER), os.environ.get("PYTHONPATH", "")]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # All of TensorFlow's messages: one of them may be the reason.
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    code = f"import importlib; importlib.import_module({module!r}).main()"
    # -P: a file in the current folder must not take the place of a module.
    return subprocess.Popen(  # noqa: S603 - only ourselves.
        [sys.executable, "-P", "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environ,
        text=True,
    )


def end(process: subprocess.Popen[str], seconds: float = 10.0) -> int | None:
    """Ends a child, and returns its exit status; None if it cannot be ended."""
    process.kill()
    if process.stdout:
        process.stdout.close()
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:  # It waits for the driver.
        return None


def last_words(status: int | None, written: str) -> str:
    """Returns why a child died, from its exit status and what it wrote.

    Args:
        status: Its exit status, negative for a signal.
        written: Its stderr.
    """
    said = [line.strip() for line in written.splitlines()]
    # Stack traces, and their titles between stars.
    said = [line for line in said if line and not line.startswith(("***", "@"))]
    telling = [line for line in said if _TELLING.search(line)]
    words = (telling or said or ["it said nothing"])[-1][:_LONGEST]
    if status is not None and status < 0:
        return f"the process died of {_signal_name(-status)}: {words}"
    return f"the process ended with exit code {status}: {words}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
