"""Trains a model: assembles the run, restores its checkpoint and runs the loop."""

import contextlib
from collections.abc import Sequence

from cifar10.config import layout
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.distributed.cluster import Cluster
from cifar10.distributed.workers import Workers
from cifar10.errors import UsageError
from cifar10.input import datasets
from cifar10.process.moving_line import LINE
from cifar10.process.signals import StopSignals
from cifar10.run_directory import checkpoints, starting
from cifar10.run_directory.early_stopping import why_ended
from cifar10.run_directory.lock import RunLock
from cifar10.training import initial_weights, preflight
from cifar10.training.assembly import assemble
from cifar10.training.console import first_lines, last_lines, wrap
from cifar10.training.hooks import check_hooks
from cifar10.training.loop import Loop
from cifar10.training.periodic import build_hooks


def train(
    config: Config,
    stop: StopSignals | None = None,
    cluster: Cluster | None = None,
    *,
    hooks: Sequence[object] = (),
    dataset: datasets.Dataset | None = None,
    lock: RunLock | None = None,
) -> int:
    """Trains to the end of the run, resuming from the newest checkpoint.

    `max_steps`, `max_hours` or, without a better score, `stop_after_no_gain` end it.

    Args:
        config: The configuration.
        stop: The signals that end training early.
        cluster: The machines that train together; None for this machine alone.
        hooks: Objects with methods for the events of `hooks.Hook`.
        dataset: The data set; None for the one that `config.dataset.data` names.
        lock: The lock of the run's directory that `preflight.locked_run` yields; None
            to lock the directory here.

    Returns:
        The step reached.

    Raises:
        StoppedError: A signal has ended training, after a checkpoint was saved.
        LostWorkerError: Another worker is gone.
        UsageError: The run cannot start or continue; the message says what to do.
    """
    check_hooks(hooks)
    stop = stop or StopSignals()
    workers = Workers(cluster, config.processes.worker_timeout)
    if workers.count > 1:  # Other workers may print on the same terminal.
        LINE.stream = None
    training = assemble(config, dataset, workers=workers, stop=stop)
    loop = Loop(training, stop)
    with contextlib.ExitStack() as stack:
        stack.enter_context(workers.reporting_losses())
        # Before the run begins, because they refuse links in place of folders.
        in_order = build_hooks(loop, hooks)
        if lock is None:
            lock = RunLock(training.train_dir)
            if workers.is_chief:
                stack.enter_context(lock)
        in_common = training.in_common if workers.count > 1 else {}
        messages = workers.begin(in_common, lambda: _begin_run(loop, lock))
        loop.progress.broadcast(training.towers)
        if loop.progress.is_over:
            if workers.is_chief:
                found = loop.progress.early_stopping
                messages += [preflight.nothing_to_do(training.config, loop.step, found)]
            _print(messages)
            return loop.step
        stop.defer()
        _print(messages)
        stack.push(training.towers.barrier_at_end)
        loop.run(in_order)
        if workers.is_chief:
            _print(last_lines(loop))
    return loop.step


def _begin_run(loop: Loop, lock: RunLock) -> list[str]:
    """Claims the directory and restores the run; returns messages for the user."""
    training = loop.training
    config, run, fresh = training.config, training.run, training.config.run.fresh
    earlier = preflight.check_run(run, training.determining(), fresh=fresh)
    note = taken = ""
    saved = None if fresh else loop.progress.last_saved()
    if saved is None and (why := getattr(training.towers.state.model, "not_new", "")):
        raise UsageError(why)
    if config.fine_tuning.initial_weights and saved is None:
        state = training.towers.state
        taken = initial_weights.take_initial_weights(config, state, run, earlier)
    # A run that cannot be restored keeps its config.json; a fresh one has no directory.
    restored = [] if fresh else loop.progress.restore()
    # A finished run keeps its config.json, unless this step has become its end.
    if starts := not loop.progress.is_over or _ends_here(loop, earlier):
        note = starting.start_run(run, earlier, lock, fresh=fresh) or ""
    if fresh:
        restored = loop.progress.restore()
    restored.append(loop.progress.first_line())
    if starts:
        starting.record_start(run, loop.step)
    return [*first_lines(training), wrap(note), wrap(taken), *restored]


def _ends_here(loop: Loop, earlier: RecordedRun | None) -> bool:
    """Returns whether a new limit ends here a run that its old ones would continue."""
    path, step = loop.training.train_dir, loop.step
    is_beyond = step > loop.training.config.run.max_steps
    if earlier is None or is_beyond or (path / layout.PRUNED).exists():
        return False
    manifest = checkpoints.read_manifest(path / layout.CHECKPOINTS, step)
    return why_ended(earlier.config, manifest) is None


def _print(lines: list[str]) -> None:
    for line in filter(None, lines):
        # One write per line, because several workers may share the output.
        print(f"{line}\n", end="", flush=True)
