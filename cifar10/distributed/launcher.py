"""Starts a training again when it was lost, and several workers on this machine.

It stands for what a cluster does: it gives each worker its `TF_CONFIG`, passes signals
on, and starts all that it has started again when one of them was lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from cifar10.config import command_line
from cifar10.distributed import cluster
from cifar10.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_LOST_WORKER,
    EXIT_USAGE,
    STOP_SIGNALS,
    LostWorkerError,
    StoppedError,
    UsageError,
)

# Exit codes after which starting again changes nothing: bad usage, an output that
# nobody reads, and the ends that signals ask for.
_STOPPED = {128 + number for number in STOP_SIGNALS}
_FINAL = (EXIT_USAGE, *sorted(_STOPPED), EXIT_BROKEN_PIPE)
# Another worker was lost; killed, as shells count it.
_LOST = {EXIT_LOST_WORKER, 128 + signal.SIGKILL}
# The others need so long to miss a worker, and some more to end.
_SECONDS_TO_NOTICE = 40.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def launch(
    workers: int | None, max_restarts: int, command: Sequence[str], train_dir: Path
) -> None:
    """Runs a training in other processes until all have ended.

    Args:
        workers: How many; None for one that trains alone, or as `TF_CONFIG` says.
        max_restarts: How often to start all again after one was lost.
        command: The script and its flags.
        train_dir: Directory of the run.

    Raises:
        StoppedError: The training has ended in a way that a restart does not mend.
        LostWorkerError: A worker was lost once too often.
        UsageError: The workers cannot be started here.
    """
    if workers and os.environ.get(cluster.TF_CONFIG):
        raise UsageError(
            "--local_workers: TF_CONFIG is set, so this is a worker already. Unset one "
            "of them."
        )
    command = command_line.without(command, "local_workers", "max_restarts")
    earlier = _identity(train_dir)
    for restart in range(max_restarts + 1):
        with _Processes(workers, command) as processes:
            codes = processes.wait()
        if not any(codes):
            return
        _raise_if_final(codes, processes.passed_on)
        lost = ", ".join(
            _how(f"worker {index}" if workers else "the training", code)
            for index, code in enumerate(codes)
        )
        if restart < max_restarts:
            _say(f"{lost}. Starting all again, {restart + 1} of {max_restarts} times.")
            if _identity(train_dir) != earlier:  # The new run has begun.
                command = command_line.without(command, "fresh")
    how = (
        "The same command, without --fresh, goes on from the last checkpoint; with "
        "--max_restarts N it does so by itself."
    )
    if faults := [code for code in codes if code > 0 and code not in _LOST]:
        raise StoppedError(f"{lost}. {how}", faults[0])
    raise LostWorkerError(f"{lost}. {how}")


def _raise_if_final(codes: Sequence[int], passed_on: int | None) -> None:
    """Ends as the processes have, if starting them again would change nothing."""
    for code in _FINAL:
        if code in codes:
            why = "as it was asked to" if code in _STOPPED else "as is said above"
            raise StoppedError(f"ended {why}; not started again.", code)
    if passed_on is not None:  # Before they could note it.
        raise StoppedError("ended as it was asked to.", 128 + passed_on)


def _identity(train_dir: Path) -> tuple[int, int] | None:
    """Tells one run in a directory from another."""
    try:
        status = (train_dir / "config.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


class _Processes:
    """The workers' processes; as a context manager it leaves none behind."""

    def __init__(self, workers: int | None, command: Sequence[str]) -> None:
        self.passed_on: int | None = None
        self._processes = [
            subprocess.Popen(  # noqa: S603 - this very program.
                [sys.executable, *command],
                env={**os.environ, **own},
                # The chief's output is the training's; the others complain by name.
                stderr=subprocess.PIPE if index else None,
                # Ctrl-C reaches them through this process, and so once.
                start_new_session=True,
                # It sets one number of the kernel's, so threads do not matter.
                preexec_fn=_end_with_parent,  # noqa: PLW1509
            )
            for index, own in enumerate(_environments(workers) if workers else [{}])
        ]
        self._readers = [
            threading.Thread(target=_pass_on, args=(one.stderr, index), daemon=True)
            for index, one in enumerate(self._processes)
            if one.stderr
        ]
        for reader in self._readers:
            reader.start()

    def wait(self) -> list[int]:
        """Waits until all have ended; ends those that do not notice a lost one.

        Returns:
            Their exit codes; negative for those that a signal has killed.
        """
        deadline = float("inf")
        while None in (codes := [one.poll() for one in self._processes]):
            if any(codes) and deadline == float("inf"):
                deadline = time.monotonic() + _SECONDS_TO_NOTICE
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(0.1)
        return [one.wait() for one in self._processes]

    def __enter__(self) -> Self:
        self._before = {
            one: signal.signal(one, self._pass_signal) for one in STOP_SIGNALS
        }
        return self

    def __exit__(self, *unused: object) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._kill()
        for reader in self._readers:  # What is written is shown before it goes on.
            reader.join()

    def _pass_signal(self, number: int, _frame: object) -> None:
        self.passed_on = number
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def _how(who: str, code: int) -> str:
    if code < 0:
        return f"{who} was killed by {signal.Signals(-code).name}"
    return f"{who} ended with exit code {code}"


def _environments(workers: int) -> list[dict[str, str]]:
    """Returns what tells each of several workers its place, and its GPUs."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(workers)]
    return [
        {**gpus, cluster.TF_CONFIG: cluster.tf_config(addresses, index)}
        for index, gpus in enumerate(_gpus(workers))
    ]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _gpus(workers: int) -> list[dict[str, str]]:
    """Returns the environment that gives each worker its part of the GPUs."""
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    if visible is None:
        found = [path.name[6:] for path in Path("/dev").glob("nvidia[0-9]*")]
        visible = ",".join(sorted(found, key=int))
    each = visible.split(",") if visible and visible != "-1" else []
    if not each:
        return [{}] * workers
    share = len(each) // workers
    if not share:
        raise UsageError(
            f"--local_workers {workers}: this machine has {len(each)} GPUs. Start at "
            f"most {len(each)}, or put {name}=-1 before the command."
        )
    return [
        {name: ",".join(each[index * share : (index + 1) * share])}
        for index in range(workers)
    ]


def _end_with_parent() -> None:
    """Asks Linux to stop a worker, in good order, when its launcher is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _pass_on(stream: IO[bytes], index: int) -> None:
    with stream:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            _say(f"[worker {index}] {text}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
