"""Trains a model: assembles it, restores the run, loops, and says what comes next."""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from cifar10.config import fields, options
from cifar10.config.config import Config
from cifar10.distributed.cluster import Cluster
from cifar10.distributed.workers import Workers
from cifar10.errors import UsageError
from cifar10.input import datasets
from cifar10.models import custom
from cifar10.process.signals import StopSignals
from cifar10.run_directory import early_stopping, starting
from cifar10.run_directory.lock import RunLock
from cifar10.towers import precision
from cifar10.towers.many_steps import ManySteps
from cifar10.training import bottleneck, initial_weights, preflight
from cifar10.training.assembly import assemble, settings_in_common
from cifar10.training.console import Console, first_lines, last_lines, wrap
from cifar10.training.hooks import Hooks, check_hooks
from cifar10.training.loop import Loop
from cifar10.training.periodic import Log, Saving, StepProfile, Validation
from cifar10.training.tensorboard import Summaries, TensorBoard
from cifar10.training.timing import Goodput
from cifar10.training.watchdog import Watchdog

# What XLA says where it has no convolution to choose from.
_NO_CUDNN = "could not find any supported configs"


def train(
    config: Config,
    stop: StopSignals | None = None,
    cluster: Cluster | None = None,
    *,
    hooks: Sequence[object] = (),
    dataset: datasets.Dataset | None = None,
    lock: RunLock | None = None,
    began: float | None = None,
) -> int:
    """Trains to `config.max_steps`, resuming from the newest checkpoint.

    With `config.stop_after_no_gain` it ends earlier, when its score no longer rises.

    Args:
        config: The configuration.
        stop: Says when to end early.
        cluster: The machines that train together; None if this one trains alone.
        hooks: Called as things happen, as `hooks.Hook` says.
        dataset: What to train on, if `config.data` does not name it.
        lock: Keeps other trainings out of the run's directory, as
            `preflight.locked_run` yields it; None to do so here.
        began: When the program began, by `time.perf_counter`; None for now.

    Returns:
        The step reached.

    Raises:
        StoppedError: A signal has ended the training, with a checkpoint.
        LostWorkerError: Another machine is gone.
        UsageError: Something outside the program stands in the way; the message says
            what and how to continue.
    """
    check_hooks(hooks)
    stop = stop or StopSignals()
    goodput = Goodput(began)
    workers = Workers(cluster, config.processes.worker_timeout)
    training = assemble(config, dataset, workers=workers, stop=stop)
    loop = Loop(training, stop, goodput)
    with contextlib.ExitStack() as stack:
        stack.enter_context(workers.reporting_losses())
        with workers.sharing_refusals():
            validation = Validation(loop)
            if lock is None:
                lock = RunLock(training.train_dir)
                if workers.is_chief:
                    stack.enter_context(lock)
        begin = functools.partial(_begin_run, loop, validation, lock)
        messages = workers.begin(settings_in_common(training.settings), begin)
        loop.progress.share(training.towers)
        if loop.progress.is_over:
            if workers.is_chief:
                found = loop.progress.early_stopping
                messages.append(preflight.nothing_to_do(config, loop.step, found))
            _print(messages)
            return loop.step
        stop.defer()
        _print(messages)
        stack.enter_context(training.towers.barrier_at_end())
        with _explaining_failures(loop):
            loop.run(_in_order(loop, validation, hooks))
        if workers.is_chief:
            _print(_last_lines(loop))
    return loop.step


def _in_order(loop: Loop, validation: Validation, users: Sequence[object]) -> Hooks:
    """Returns the hooks of a training in the order in which they are called.

    Those of users see a step before it is logged, scored and saved. Only the chief
    prints and writes.
    """
    training = loop.training
    log, saving = Log(loop), Saving(loop)
    hooks = Hooks([log, validation, saving])
    if training.workers.is_chief:
        config = training.config
        hooks = Hooks(
            [
                StepProfile(loop),
                Console(config.run.max_steps, config.batch.batch_size),
                TensorBoard(training.train_dir, loop.goodput),
                *users,
                Summaries(loop),
                *(log, validation, saving),
            ],
            users=users,
        )
    hooks.insert_first(_watchdog(loop, hooks))
    return hooks


def _watchdog(loop: Loop, hooks: Hooks) -> Watchdog:
    training = loop.training
    workers, devices = training.workers, ", ".join(training.towers.devices)
    workers.watch_connections()
    return Watchdog(
        # It sees only when a call of several steps has ended.
        (training.config.checkpoints.hang_timeout or 0.0)
        * training.config.speed.steps_per_call,
        devices if workers.count == 1 else f"{devices} or the network",
        workers.ask_who_hangs if workers.count > 1 else None,
        lambda: loop.goodput.part,
        called=lambda: hooks.called,
        unreachable=workers.unreachable,
    )


def _begin_run(loop: Loop, validation: Validation, lock: RunLock) -> list[str]:
    """Takes the directory over and restores the run; returns messages for the user."""
    training = loop.training
    config, settings = training.config, training.settings
    model = training.towers.state.model
    # Batch statistics and dropout make a tower's batch part of the result.
    stateful = {"stateful_model": bool(model.non_trainable_variables)}
    determining = options.result_determining(fields.RECORDED, {**settings, **stateful})
    determining.append("data_fingerprint")
    earlier = preflight.check_run(
        training.train_dir, settings, determining, fresh=config.run.fresh
    )
    taken = ""
    if config.fine_tuning.initial_weights:
        resumes = not config.run.fresh and loop.progress.has_checkpoint()
        taken = initial_weights.begin(
            config, training.towers.state, settings, earlier, resumes=resumes
        )
    note = starting.start_run(
        training.train_dir, settings, earlier, lock, fresh=config.run.fresh
    )
    compiled = ""
    if model.compiled:
        compiled = (
            "NOTE: the model's compile() is not used; --optimizer and --learning_rate "
            f"are.\nIt named {type(model.optimizer).__name__}."
        )
    apart = "--xla compiles each tower alone here, not whole calls (docs/speed.md)."
    is_apart = config.speed.xla and type(training.many_steps) is ManySteps
    return [
        first_lines(settings, len(training.images)),
        compiled,
        wrap(custom.flattening(model)),
        wrap(validation.first_line),
        wrap(training.sections or ""),
        apart if is_apart else "",
        precision.warning(config.network.precision, training.placement.devices),
        wrap(note or ""),
        wrap(taken),
        *loop.restore(),
    ]


@contextlib.contextmanager
def _explaining_failures(loop: Loop) -> Iterator[None]:
    """Turns TensorFlow's errors about a step into what the user can do about it."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if getattr(error, "__notes__", ()):  # It was raised by a user's hook.
            raise
        raise UsageError(
            f"--batch_size {loop.training.config.batch.batch_size}: a step does not "
            "fit into the memory of its device. Try half of it. "
            f"{loop.progress.how_to_resume()}"
        ) from error
    except tf.errors.OpError as error:
        if _NO_CUDNN in error.message:
            why = (
                "it finds no convolution in this cuDNN; it wants 9.24 or newer, which "
                "GPUs of compute capability below 7.5 cannot use."
            )
        elif "tf2xla" in error.message:
            # The cause stands before the graph; with several towers it is numbered.
            said = re.split(r"\n(?:\t|The op is)", error.message)[0].rpartition("\n")[2]
            why = re.sub(r"^ *\(0\) \w+: *|{{.*?}}", "", said)
        else:
            raise
        raise UsageError(
            f"--xla: XLA cannot compile this step: {why}\nLeave it out, with --fresh "
            "or another --train_dir."
        ) from error


def _last_lines(loop: Loop) -> list[str]:
    """Returns what limited the steps, where the time went, and what to do next."""
    training = loop.training
    config, record = training.config, loop.progress.early_stopping
    lines = [loop.throughput.verdict()]
    if config.output.report_bottleneck:
        batches = loop.newest_batches
        lines.append(bottleneck.report(loop.throughput, training.towers, batches))
    best = early_stopping.best_kept(training.train_dir, record)
    to_score = best if best != loop.step else None
    return [
        *lines,
        wrap(loop.goodput.summary(loop.step, config.global_batch_size)),
        early_stopping.outcome(config, loop.step, record),
        last_lines(
            training.train_dir, config.network.model, config.dataset.data, to_score
        ),
    ]


def _print(lines: list[str]) -> None:
    for line in filter(None, lines):
        # In one piece: several workers may write to the same file.
        print(f"{line}\n", end="", flush=True)
