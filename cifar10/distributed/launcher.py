"""Starts workers on this machine, and restarts a training run that was killed.

Like a cluster's scheduler, the launcher sets `TF_CONFIG` for each worker, forwards
signals, and restarts all workers after one of them was lost.
"""

import contextlib
import ctypes
import itertools
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cifar10 import errors, hardware
from cifar10.config import fields, flags, layout
from cifar10.config.run_config import RecordedRun
from cifar10.distributed import cluster
from cifar10.errors import LostWorkerError, StoppedError, UsageError, counted, say
from cifar10.process import invocation
from cifar10.process.signals import stop_signals
from cifar10.run_directory import starting
from cifar10.run_directory.seeds import final_scores, grouped

# Exit codes after which a restart is useless; 128 and more are those of signals.
_ENDS = errors.EXIT_USAGE, errors.EXIT_DIVERGED, errors.EXIT_BROKEN_PIPE
_FINAL = (*_ENDS, *(128 + number for number in errors.STOP_SIGNALS))
# How long the other workers need to detect a lost worker and to end.
_SECONDS_TO_NOTICE = 40.0
_GPUS = "CUDA_VISIBLE_DEVICES"


def launch(
    workers: int | None, max_restarts: int, command: Sequence[str], train_dir: Path
) -> None:
    """Runs the training `command` in other processes, and waits for their end.

    If `workers` is None, a single process trains, alone or as a worker of `TF_CONFIG`.
    After a process is lost, all are restarted, at most `max_restarts` times.
    """
    command = flags.without(command, "local_workers", "max_restarts")
    earlier_run = _beginning_of_run(train_dir)
    for restart in range(max_restarts + 1):
        environments = _environments(workers) if workers else [{}]
        codes, stops = _run_workers(environments, command)
        if not any(codes):
            return
        # A worker that a forwarded signal stopped may have had no handler yet.
        ends = [code for code in _FINAL if code in codes]
        if ends := [*ends, *(128 + number for number in stops)]:
            why = f"the run ended with exit code {ends[0]} and is not restarted."
            raise StoppedError(why, ends[0])
        names = [f"worker {n}" for n in range(workers)] if workers else ["the training"]
        losses = ", ".join(
            f"{name} was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"{name} ended with exit code {code}"
            for name, code in zip(names, codes, strict=True)
        )
        if restart < max_restarts:
            say(f"{losses}. Restarting all ({restart + 1} of {max_restarts}).")
            # On a restart, --fresh must not move aside the run that has just begun.
            if _beginning_of_run(train_dir) != earlier_run:
                command = flags.without(command, "fresh")
            if not workers and not cluster.is_requested():
                command = _on_gpus_left(command, train_dir)
    again = "The same command, without --fresh, resumes"
    by_itself = "With --max_restarts N, it restarts automatically up to N times."
    message = f"{losses}.\n{again} from the last checkpoint. {by_itself}"
    if max_restarts:
        many = f"{counted(max_restarts, 'restart')}, the limit of --max_restarts"
        message = f"{losses}, after {many}. {again} it."
    faults = [code for code in codes if code > 0 and code != errors.EXIT_TRY_AGAIN]
    raise StoppedError(message, faults[0]) if faults else LostWorkerError(message)


def train_seeds(seeds: str, command: Sequence[str], train_dir: Path) -> None:
    """Runs the training `command` with several seeds, FIRST:END, one after another.

    Prints the mean of their scores at the end. Seeds that have been trained before are
    not trained again. A seed that diverged counts, and the exit code tells of it.
    """
    first, end = map(int, seeds.split(":"))
    if first >= end:
        raise UsageError(f"--seeds {seeds}: give FIRST:END with FIRST below END.")
    if any(word.partition("=")[0] in ("--resume", "--seed") for word in command):
        raise UsageError("--seeds takes no --resume or --seed. Leave them out.")
    command, found = flags.without(command, "seeds", "seed", "train_dir"), {}
    diverged, folders = False, {n: train_dir / f"seed-{n}" for n in range(first, end)}
    if "--fresh" not in command:
        _check_alike(filter(None, map(starting.find_run, folders.values())))
    # Existing ones first: if one is refused, the others have not been trained in vain.
    for seed in sorted(folders, key=lambda seed: not os.path.lexists(folders[seed])):
        run_dir = folders[seed]
        say(f"Seed {seed} of {seeds}:")
        given = ["--seed", str(seed), "--train_dir", str(run_dir)]
        (code,), stops = _run_workers([{}], [*command, *given])
        diverged |= code == errors.EXIT_DIVERGED
        if stops or code not in (0, errors.EXIT_DIVERGED):
            code = 128 + stops[0] if stops else abs(code) + 128 * (code < 0)
            why = f"Seed {seed} ended with exit code {code}."
            if code != errors.EXIT_USAGE:
                why += " The same command, without --fresh, resumes there."
            raise StoppedError(why, code)
        run = RecordedRun.read(run_dir)
        found[seed] = run_dir.name, run, *final_scores(run)
    for one in grouped(found[seed] for seed in folders):
        print(one)
    if not any(line for *_, line in found.values()):
        say("No seed was scored. Score each with eval: --eval_steps is too late now.")
    if diverged:
        raise StoppedError("Some seeds have diverged.", errors.EXIT_DIVERGED)


def _check_alike(runs: Iterable[RecordedRun]) -> None:
    """Refuses runs of seeds that a single command cannot all continue."""
    for run, other in itertools.pairwise(runs):
        names = {*fields.result_determining(other.config)} - {"seed"}
        now = {name: other.values[name] for name in sorted(names)}
        for name in starting.find_differences(run, now):
            why = f"{run.directory} and {other.directory} differ in {name}"
            raise UsageError(f"--seeds: {why}. Move one, or give another --train_dir.")


def _on_gpus_left(command: Sequence[str], train_dir: Path) -> Sequence[str]:
    """Returns the command for the GPUs that are left, if some were lost."""
    try:
        run = RecordedRun.read(train_dir)
    except UsageError:
        return command  # It had not begun.
    used, on_gpus = run.config.machine.towers, run.facts.on_gpus
    if run.facts.simulated or not on_gpus or (left := hardware.count_gpus()) >= used:
        return command
    # Towers keep their batch size, and compute more batches for an equal update.
    batches = used * run.config.batch.accumulate
    towers = max((n for n in range(1, left + 1) if batches % n == 0), default=0)
    now = f"{left} of {counted(used, 'GPU')} are left"
    if not towers:
        raise errors.MissingGpuError(f"{now}: the run cannot continue on this machine.")
    say(
        f"{now}: continuing with {counted(towers, 'tower')}, each of "
        f"{counted(batches // towers, 'batch', 'batches')}, and the same result."
    )
    command = flags.without(command, "num_gpus", "accumulate")
    given = invocation.as_flags(num_gpus=towers, accumulate=batches // towers)
    return [*command, *given.split()]


def _beginning_of_run(train_dir: Path) -> int:
    """Returns when the run in a directory began, or 0 if there is no run."""
    with contextlib.suppress(OSError):
        return (train_dir / layout.CONFIG).stat().st_mtime_ns
    return 0


def _run_workers(
    environments: Sequence[Mapping[str, str]], command: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Runs all workers to their end; returns exit codes and the forwarded signals."""
    processes: list[subprocess.Popen[bytes]] = []
    stops: list[int] = []
    with contextlib.ExitStack() as stack:
        for number in stop_signals():
            before = signal.signal(number, lambda received, _: stops.append(received))
            stack.callback(signal.signal, number, before)
        for environment in environments:
            process = subprocess.Popen(  # noqa: S603 - this very program.
                invocation.to_spawn(command),
                env={**os.environ, **environment},
                # Ctrl-C reaches workers only through this process, and so only once.
                start_new_session=True,
                # The function makes a single system call, which is safe with threads.
                preexec_fn=_end_with_parent,  # noqa: PLW1509
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        deadline, passed_on = math.inf, 0
        while None in (codes := [process.poll() for process in processes]):
            for received in stops[passed_on:]:  # Includes signals during the start.
                passed_on += 1
                for process in processes:
                    process.send_signal(received)
            if any(codes):
                deadline = min(deadline, time.monotonic() + _SECONDS_TO_NOTICE)
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    return [process.wait() for process in processes], stops


def _end_with_parent() -> None:
    """Makes Linux send SIGTERM to this worker when the launcher is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _environments(workers: int) -> list[dict[str, str]]:
    """Returns, for each worker, the environment variables for its cluster and GPUs."""
    with contextlib.ExitStack() as stack:
        # All sockets are open at once, so that every worker gets a different port.
        sockets = [stack.enter_context(socket.socket()) for _ in range(workers)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]
    if (visible := os.environ.get(_GPUS)) is None:
        visible = ",".join(map(str, range(hardware.count_gpus())))
    gpus = [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]
    share, rest = divmod(len(gpus), workers)
    if rest:
        used = ",".join(gpus[: share * workers]) or "-1"
        raise UsageError(
            f"--local_workers {workers}: {counted(len(gpus), 'GPU')} cannot be divided "
            f"equally. Give --local_workers {len(gpus)}, or put {_GPUS}={used} before "
            "the command" + (", to use the CPU." if used == "-1" else ".")
        )
    # By default NCCL would listen on the network, not only on loopback.
    shared = {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")}
    environments = []
    for index in range(workers):
        own = {cluster.TF_CONFIG: cluster.tf_config(addresses, index)}
        if gpus:
            own[_GPUS] = ",".join(gpus[index * share : (index + 1) * share])
        environments.append({**shared, **own})
    return environments
