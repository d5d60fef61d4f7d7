"""Trains a model: puts data, model, towers and loop together.

The only module that knows all others.
"""

import contextlib
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cifar10 import model as models
from cifar10.config import initial_weights_flag, options, paths
from cifar10.config.config import Config, ResolvedConfig
from cifar10.distributed import probe, rendezvous
from cifar10.distributed.cluster import Cluster
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.errors import UsageError
from cifar10.input import datasets, on_device, pipeline
from cifar10.models import custom
from cifar10.process.signals import StopSignals
from cifar10.run_directory import claim, layout
from cifar10.towers import devices, precision
from cifar10.towers.many_steps import ManySteps
from cifar10.towers.towers import TowerBuilder
from cifar10.training import (
    assembly,
    bottleneck,
    class_weights,
    initial_weights,
    no_gain,
    one_program,
    preflight,
    settings as run_settings,
    several_workers,
)
from cifar10.training.activations import activations_of
from cifar10.training.console import Console
from cifar10.training.curves import Curves
from cifar10.training.goodput import Goodput
from cifar10.training.hooks import Hooks, check as check_hooks
from cifar10.training.loop import Loop, Scores, StopRequest
from cifar10.training.not_finite import OpenBatches
from cifar10.training.profiling import StepProfile
from cifar10.training.progress import Progress
from cifar10.training.validation import Validation
from cifar10.training.watchdog import Watchdog

_COMPILED = (
    "NOTE: the model's compile() is not used; --optimizer and --learning_rate are.\n"
    "It named {}."
)

# What XLA says where it has no convolution to choose from.
_NO_CUDNN = "could not find any supported configs"

_APART = "--xla compiles each tower alone here, not whole calls (docs/speed.md)."


def train(
    config: Config,
    stop: StopSignals | None = None,
    cluster: Cluster | None = None,
    *,
    hooks: Sequence[object] = (),
    dataset: datasets.Dataset | None = None,
    held: contextlib.ExitStack | None = None,
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
        held: Keeps other trainings out of the run's directory, as `early.claimed`
            yields it; None to do so here.
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
    parts = _assemble(config, stop, cluster, dataset)
    is_chief = cluster is None or cluster.is_chief
    watchdog = _build_watchdog(parts, cluster, goodput)
    of_chief = (
        Console(config.max_steps, config.batch_size),
        Curves(parts.train_dir, goodput),
        *hooks,
    )
    all_hooks = Hooks([watchdog, *(of_chief if is_chief else ())])
    loop = _build_loop(parts, stop, goodput, all_hooks, is_chief=is_chief)
    with contextlib.ExitStack() as stack:
        if cluster:
            stack.enter_context(rendezvous.reporting_lost_workers(cluster))
        if is_chief and held is None:
            with rendezvous.sharing_refusals(cluster):
                held = stack.enter_context(claim.hold(parts.train_dir))
        messages = _begin(loop, parts, cluster, held or stack)
        is_due = not loop.progress.is_over
        if is_due:
            stop.defer()
        elif is_chief:
            found = loop.progress.gains
            messages.append(preflight.nothing_to_do(config, loop.step, found))
        _print(messages)
        if is_due:
            if isinstance(parts.towers, ReplicaBuilder):
                stack.enter_context(parts.towers.barrier_at_end())
            with watchdog:
                _run(loop, parts, cluster)
            if is_chief:
                summary = goodput.summary(loop.step, parts.config.global_batch_size)
                time = run_settings.wrap(summary)
                reached = loop.step, loop.progress.gains
                best = no_gain.outcome(config, *reached)
                done = run_settings.last_lines(
                    parts.train_dir,
                    config.model,
                    config.data,
                    no_gain.step_to_score(config, *reached),
                )
                _print([*_speed(parts, loop), time, best, done])
    return loop.step


class _Parts(NamedTuple):
    """What a training consists of."""

    config: ResolvedConfig
    train_dir: Path
    placement: devices.Placement
    images: datasets.Images
    labels: np.ndarray  # int32 [count]
    make: pipeline.BatchMaker
    towers: TowerBuilder
    sections: str | None  # Describes the towers' sections, if there are any.
    settings: dict[str, Any]  # The content of `config.json`.
    validation: Validation | None  # Of the chief, with --eval_steps.


def _assemble(
    requested: Config,
    stop: StopSignals,
    cluster: Cluster | None,
    dataset: datasets.Dataset | None,
) -> _Parts:
    if requested.log_device_placement:  # Graphs heed it only from the very first on.
        tf.debugging.set_log_device_placement(True)
    placement = devices.place_towers(requested.num_gpus, requested.split_gpu)
    strategy, replicas = None, 1
    if cluster or requested.variable_update == "mirrored":
        strategy, replicas = several_workers.connect(
            requested, placement, cluster, stop
        )
    if requested.deterministic:
        tf.config.experimental.enable_op_determinism()
        # Ampere and newer GPUs would round float32 to 10 bits in matrix products.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    with rendezvous.sharing_refusals(cluster):
        workers = len(cluster.workers) if cluster else 1
        config = run_settings.resolve(requested, placement, workers=workers)
        initial_weights_flag.check_use(config.initial_weights, config.pretrained_rate)
        # Before a download, which takes long, also with several workers.
        models.find(config.model)
        train_dir = paths.locate_run(config.train_dir)
        if dataset is None:
            # An older run goes on with the parts that it began with.
            kept = {"data_division": claim.division(train_dir, fresh=config.fresh)}
            with stop.at_once():
                dataset = datasets.find_for({**vars(config), **kept})
        images, labels = dataset.read("train")
        run_settings.check_epoch(config, len(images))
        on_device.check(config.input_device, images)
        weights = class_weights.of_training_set(
            config.class_weights, labels, dataset.class_names
        )
        states = assembly.build_states(config, placement, replicas, dataset, images)
        settings = run_settings.collect(config, placement, dataset, states)
        towers, sections = assembly.build_towers(
            config,
            placement,
            states,
            strategy,
            cluster,
            images,
            class_weights=weights,
        )
        validation = None
        if config.eval_steps and (cluster is None or cluster.is_chief):
            state, device = towers.state, towers.devices[0]
            validation = Validation(
                config.eval_steps,
                config.batch_size,
                train_dir,
                settings,
                dataset,
                state,
                device,
            )
    return _Parts(
        config,
        train_dir,
        placement,
        images,
        labels,
        assembly.build_maker(config, dataset.classes),
        towers,
        sections,
        settings,
        validation,
    )


def _build_loop(
    parts: _Parts,
    stop: StopSignals,
    goodput: Goodput,
    hooks: Hooks,
    *,
    is_chief: bool,
) -> Loop:
    config, train_dir, towers = parts.config, parts.train_dir, parts.towers
    progress = Progress(train_dir, towers.state, config, len(parts.images))
    stop_request: StopRequest = stop
    validation: Scores | None = parts.validation
    if isinstance(towers, ReplicaBuilder):
        shared = several_workers.SharedProgress
        kind = shared if is_chief else several_workers.WorkersProgress
        progress = kind(train_dir, towers, config, len(parts.images))
        stop_request = several_workers.AgreedStop(stop, towers)
        if config.eval_steps:
            validation = several_workers.SharedValidation(towers, parts.validation)
    profile = None
    if is_chief and config.profiled_steps:
        first, last = config.profiled_steps
        events = train_dir / layout.TRAIN_EVENTS
        profile = StepProfile(first, min(last, config.max_steps), events)
    activations = None
    # A sectioned tower has no room for the activations of the whole model.
    if is_chief and parts.sections is None:
        activations = activations_of(towers.state.model, towers.devices[0])
    return Loop(
        config,
        train_dir,
        towers,
        progress,
        stop_request,
        activations=activations,
        profile=profile,
        many_steps=_build_many_steps(parts) if config.steps_per_call > 1 else None,
        hooks=hooks,
        validation=validation,
        goodput=goodput,
    )


def _build_many_steps(parts: _Parts) -> ManySteps:
    config, _, placement, images, labels, make, towers, *_ = parts
    data = images, labels
    if config.xla and one_program.is_possible(config, placement, towers, *data):
        return one_program.OneProgram(config, towers, images, labels, make)
    return ManySteps(towers)


def _build_watchdog(
    parts: _Parts, cluster: Cluster | None, goodput: Goodput
) -> Watchdog:
    devices = ", ".join(parts.towers.devices)
    # It sees only when a call of several steps has ended.
    timeout = (parts.config.hang_timeout or 0.0) * parts.config.steps_per_call
    if cluster is None:
        return Watchdog(timeout, devices, None, lambda: goodput.part)
    return Watchdog(
        timeout,
        f"{devices} or the network",
        functools.partial(rendezvous.ask_who_hangs, cluster),
        lambda: goodput.part,
        unreachable=probe.Probe(cluster).unreachable,
    )


def _begin(
    loop: Loop, parts: _Parts, cluster: Cluster | None, held: contextlib.ExitStack
) -> list[str]:
    """Takes the directory over and restores the run; returns messages for the user."""
    begin_chief = functools.partial(_begin_chief, loop, parts, held)
    if cluster:
        messages = several_workers.begin(cluster, parts.settings, begin_chief)
    else:
        messages = begin_chief()
    if isinstance(loop.progress, several_workers.SharedProgress):
        loop.progress.share()
    return messages


def _begin_chief(loop: Loop, parts: _Parts, held: contextlib.ExitStack) -> list[str]:
    settings, model = parts.settings, parts.towers.state.model
    # Batch statistics and dropout make a tower's batch part of the result.
    stateful = {"stateful_model": bool(model.non_trainable_variables)}
    determining = options.result_determining(ResolvedConfig, {**settings, **stateful})
    determining.append("data_fingerprint")
    fresh = parts.config.fresh
    earlier = claim.check(parts.train_dir, settings, determining, fresh=fresh)
    taken = ""
    if parts.config.initial_weights:
        resumes = not fresh and loop.progress.has_checkpoint()
        taken = initial_weights.begin(
            parts.config, parts.towers.state, settings, earlier, resumes=resumes
        )
    note = claim.begin(parts.train_dir, settings, earlier, held, fresh=fresh)
    return [
        run_settings.first_lines(settings, len(parts.images)),
        _COMPILED.format(type(model.optimizer).__name__) if model.compiled else "",
        run_settings.wrap(custom.flattening(model)),
        run_settings.wrap(parts.validation.first_line if parts.validation else ""),
        run_settings.wrap(parts.sections or ""),
        _APART if parts.config.xla and type(loop.many_steps) is ManySteps else "",
        precision.warning(parts.config.precision, parts.placement.devices),
        run_settings.wrap(note or ""),
        run_settings.wrap(taken),
        *loop.restore(),
    ]


def _run(loop: Loop, parts: _Parts, cluster: Cluster | None) -> None:
    """Runs the steps that are left; if they do not fit in memory, says what helps."""
    open_batches: OpenBatches = functools.partial(
        assembly.open_batches,
        parts.config,
        parts.placement,
        cluster,
        parts.images,
        parts.labels,
        make=parts.make,
    )
    if isinstance(loop.many_steps, one_program.OneProgram):
        open_batches = loop.many_steps.open_batches
    try:
        loop.run(open_batches, parts.settings)
    except tf.errors.ResourceExhaustedError as error:
        if getattr(error, "__notes__", ()):  # It was raised by a hook, not by a step.
            raise
        raise UsageError(
            f"--batch_size {parts.config.batch_size}: a step does not fit into the "
            f"memory of its device. Try half of it. {loop.progress.how_to_resume()}"
        ) from error
    except tf.errors.OpError as error:
        if _NO_CUDNN in error.message:
            why = (
                "it finds no convolution in this cuDNN; it wants 9.24 or newer, which "
                "GPUs of compute capability below 7.5 cannot use."
            )
        elif "tf2xla" in error.message:
            # In front of what it says of the graph; with several towers it is numbered.
            said = re.split(r"\n(?:\t|The op is)", error.message)[0].rpartition("\n")[2]
            why = re.sub(r"^ *\(0\) \w+: *|{{.*?}}", "", said)
        else:
            raise
        raise UsageError(
            f"--xla: XLA cannot compile this step: {why}\nLeave it out, with --fresh "
            "or another --train_dir."
        ) from error


def _speed(parts: _Parts, loop: Loop) -> list[str]:
    """Returns what limited the steps, and on request how their time divides."""
    lines = [loop.throughput.verdict()]
    if loop.profile:
        lines.append(loop.profile.warning())
    if parts.config.report_bottleneck:
        lines.append(
            bottleneck.report(loop.throughput, parts.towers, loop.newest_batches)
        )
    return lines


def _print(lines: list[str]) -> None:
    for line in filter(None, lines):
        # In one piece: several workers may write to the same file.
        print(f"{line}\n", end="", flush=True)
