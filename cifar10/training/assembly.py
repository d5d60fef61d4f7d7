"""Assembles a training run: devices, data, model, towers and batches.

training = assemble(Config(...))
with training.open_batches(0, 0) as batches:
    result = training.towers.step(batches.get())
"""

import dataclasses
import functools
import math
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10 import hardware
from cifar10.config import augmentation, fields, layout, python_objects, run_config
from cifar10.config.config import Config, ResolvedConfig
from cifar10.config.run_config import RecordedRun
from cifar10.distributed.programs import ProgramBuilder
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.distributed.workers import Workers, mirrored_strategy
from cifar10.errors import UsageError, say
from cifar10.input import calls, cifar, datasets, distortions, on_device, pipeline
from cifar10.input.augmentation import Augmentation
from cifar10.input.dataset_base import Images
from cifar10.input.samples import sampled
from cifar10.model import inference, loss, probe
from cifar10.models.registry import OPTIONS, build_model, find_architecture, is_code
from cifar10.process import invocation
from cifar10.process.signals import StopSignals
from cifar10.run_directory import starting
from cifar10.sections import planning
from cifar10.towers import devices, schedule
from cifar10.towers.class_weights import resolve_class_weights
from cifar10.towers.optimizers import build_optimizer
from cifar10.towers.stages import prepare_model
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.update import TrainState, Update
from cifar10.training import compiling, own_functions
from cifar10.training.initial_weights import check_initial_weights


@dataclasses.dataclass(frozen=True)
class Training:
    """The parts of a training run, ready for its first step."""

    config: ResolvedConfig  # Includes the values that depend on the machine.
    train_dir: Path  # The run's directory; `assemble` writes nothing to it.
    workers: Workers  # The processes that train together.
    placement: devices.Placement  # The devices of this process's towers.
    dataset: datasets.Dataset
    images: Images  # For training, uint8 [count, height, width, channels].
    labels: np.ndarray  # One per image, int32 [count].
    towers: TowerBuilder  # Runs the synchronous step on all towers.
    planner: planning.Planner  # Plans the memory of a step.
    sections: str | None  # Describes the towers' sections; None without sections.

    @functools.cached_property
    def run(self) -> RecordedRun:
        """What `config.json` records: settings, data, devices, versions."""
        config, dataset, states = self.config, self.dataset, self.towers.states
        placement, corrections = self.placement, config.dataset.corrections
        is_own, model = is_code(config.network.model), states[0].model
        shape = distortions.image_shape(config.images.distortions, dataset.image_shape)
        entries = {
            **python_objects.record(config.values),
            "data": dataset.name,
            "data_dir": dataset.directory and str(dataset.directory.absolute()),
            "corrections": corrections and str(layout.absolute_path(corrections)),
            "data_is_real": dataset.is_real,
            "data_description": dataset.description,
            "data_division": dataset.division,
            "data_fingerprint": dataset.fingerprint,
            "data_uncorrected": dataset.uncorrected,
            "data_parts": list(dataset.splits),
            "data_sample": sampled(self.images),
            "image_shape": list(dataset.image_shape),
            "classes": dataset.classes,
            "class_names": list(dataset.class_names),
            "parameters": model.count_params(),
            "model_logits": probe(model, shape) if is_own else [],
            "devices": placement.description,
            "on_gpus": placement.on_gpus,
            "variables_on": ", ".join(state.device for state in states),
            "simulated": placement.simulated,
            "versions": {
                "cifar10": invocation.package_version(),
                "python": platform.python_version(),
                **hardware.describe(on_gpus=placement.on_gpus),
                # From modules: TensorFlow's release candidates install keras-nightly.
                **{one.__name__: one.__version__ for one in (tf, keras, np)},
            },
        }
        return RecordedRun.of(self.train_dir, entries)

    @functools.cached_property
    def steps_per_call(self) -> int:
        """The maximum of steps per TensorFlow call; a resumed run may use another."""
        default = self.config, self.placement, self.images.shape[1:]
        return self.config.speed.steps_per_call or default_steps_per_call(*default)

    def open_batches(
        self, batch: int, step: int, *, in_calls: bool = False
    ) -> pipeline.PrefetchQueues:
        """Opens the queues of training batches, beginning with batch number `batch`.

        Batches are numbered from 0. Images are sized for the stage of step `step` + 1.
        With `in_calls`, the batches of each call are stacked, to the stage's end.
        """
        config, images, labels = self.config, self.images, self.labels
        batch_devices = self.placement.batch_devices(config.batch.accumulate)
        given = config.images.augmentation
        maker = pipeline.BatchMaker(
            config.images.distortions,
            config.run.seed,
            image_size=config.stage(step).image_size,
            augmentation=Augmentation(given, self.dataset.classes) if given else None,
        )
        source = images, labels, maker
        order: dict[str, Any] = {
            "batch_size": config.batch.batch_size,
            "start_step": batch,
            "worker": (self.workers.index, self.workers.count),
        }
        counts = config.calls(step, most := self.steps_per_call)
        batches: Iterable
        # GPUs that can hold the whole data set also distort the images.
        fits = on_device.fits(images, labels, config.batch.split_gpu)
        if self.placement.on_gpus and fits:
            if in_calls:
                order["counts"], order["most"] = counts, most
            batches = on_device.device_batches(*source, devices=batch_devices, **order)
        else:
            towers = len(batch_devices)
            batches = pipeline.training_batches(*source, towers=towers, **order)
            if in_calls:
                batches = calls.in_calls(batches, counts, most)
        capacity = 1 if in_calls else pipeline.QUEUE_CAPACITY
        return pipeline.PrefetchQueues(batches, batch_devices, capacity)

    def try_xla(self) -> dict[str, bool]:
        """Compiles with XLA if faster; returns the fields `xla` and `xla_update`."""
        trial = dataclasses.replace(self, config=self.config.replace(xla=True))
        is_single = self.sections or self.config.checkpoints.verify_steps
        steps = 1 if is_single else trial.steps_per_call
        with self.open_batches(0, 0) as queues:
            return compiling.try_programs(self.towers, queues.get(), steps)

    def determining(self) -> dict[str, Any]:
        """Returns the recorded entries that a resumed run must not change."""
        # With batch norm or dropout, the result depends on the batch size of a tower.
        is_stateful = bool(self.towers.state.model.non_trainable_variables)
        names = fields.result_determining(self.config, is_stateful=is_stateful)
        names.append(starting.FINGERPRINT)
        if own_functions.synchronized(self.towers.state.model):
            names.append("towers")  # They share statistics.
        return {name: self.run.entries[name] for name in names}

    @property
    def in_common(self) -> dict[str, Any]:
        """What must be equal on all workers, except for rounding."""
        of_code = own_functions.of_code(self.config, self.towers, self.dataset.classes)
        of_code[f"{run_config.COMPUTED}--model"] = self.run.facts.model_logits
        return self.run.in_common | of_code


def assemble(
    requested: Config,
    dataset: datasets.Dataset | None = None,
    *,
    workers: Workers | None = None,
    stop: StopSignals | None = None,
) -> Training:
    """Assembles a training run; neither trains nor writes to the run's directory.

    Call it before anything else uses TensorFlow's devices.

    Args:
        requested: The configuration.
        dataset: The data set; None for the one that `requested.dataset.data` names.
        workers: The processes that train together; None for this process alone.
        stop: The signals, which connecting several machines may claim.
    """
    workers, stop = workers or Workers(), stop or StopSignals()
    # TensorFlow applies this only to graphs that are built afterwards.
    if requested.output.log_device_placement:
        tf.debugging.set_log_device_placement(True)
    batch = requested.batch
    placement = devices.place_towers(batch.num_gpus, batch.split_gpu)
    count = len(placement.devices)
    # Rounding depends on the number of threads: a deterministic run keeps all cores.
    if count > 1 and not placement.on_gpus and not requested.speed.deterministic:
        devices.divide_cores(count)
    strategy, replicas = workers.connect(batch.variable_update, placement, stop)
    if requested.speed.deterministic:
        tf.config.experimental.enable_op_determinism()
        # Ampere and newer GPUs would round float32 to 10 bits in matrix products.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    resolved = resolve_config(requested, placement, workers=workers.count)
    check_initial_weights(resolved)
    # Refuses a wrong --model before a download, which may take long.
    find_architecture(resolved.network.model)
    train_dir = layout.absolute_path(resolved.run.train_dir)
    earlier = None if resolved.run.fresh else starting.find_run(train_dir)
    # A resumed run keeps its division of the images into splits, and so does a run that
    # begins with its weights, which have seen its training images.
    divided_as = earlier or run_config.run_of_weights(resolved.values)
    dataset = datasets.find_for(resolved.dataset, dataset, run=divided_as)
    images, labels = dataset.read("train")
    dataset = cifar.fingerprinted(dataset, images, labels)
    config = complete_config(resolved, earlier, len(images))
    states = build_states(config, placement, replicas, dataset, images)
    weights, names = config.loss.class_weights, dataset.class_names
    class_weights = resolve_class_weights(weights, labels, names)
    given = config, placement, states, strategy, workers, images
    built = build_towers(*given, classes=dataset.classes, class_weights=class_weights)
    parts = workers, placement, dataset, images, labels, *built
    training = Training(config, train_dir, *parts)
    if config.speed.xla is not None:
        return training
    is_chosen = config.speed.xla_update or "xla_update" in config.given
    is_tried = not is_chosen and compiling.is_possible(config, placement)
    found = training.try_xla() if is_tried else {"xla": False}
    return dataclasses.replace(training, config=config.replace(**found))


def resolve_config(
    config: Config, placement: devices.Placement, *, workers: int = 1
) -> ResolvedConfig:
    """Resolves the settings that depend on the machine, such as batch sizes.

    Raises:
        UsageError: A step's images do not divide into its batches, or these into pairs.
    """
    batch = config.batch
    towers = len(placement.devices) * workers
    batches = towers * batch.accumulate
    images = batch.global_batch_size or batch.batch_size * batches
    if images % batches:
        below = images - images % batches
        divisible = f"{below} or {below + batches}" if below else f"{batches}"
        raise UsageError(
            f"--global_batch_size {images} does not divide into {batches} batches "
            f"(towers times --accumulate). Give {divisible}, or, to resume, "
            "another number of towers."
        )
    augmentation.check_batch(config.images.augmentation, images // batches)
    how = config.network.precision, placement.devices
    exactly = config.speed.deterministic
    found = {
        "precision": hardware.resolve_precision(*how, deterministic=exactly),
        "batch_size": images // batches,
        "global_batch_size": images,
        "towers": towers,
        "workers": workers,
    }
    resolved = ResolvedConfig.from_values({**config.values, **found})
    resolved.given = config.given
    return resolved


def complete_config(
    config: ResolvedConfig, earlier: RecordedRun | None, examples_per_epoch: int
) -> ResolvedConfig:
    """Resolves the settings that depend on the data and on the run to resume."""
    changes: dict[str, Any] = {}
    if epochs := config.run.max_epochs:
        steps = epochs * examples_per_epoch / config.global_batch_size
        # Rounded because 1.1 * 10 is more than 11 in floating point.
        changes["max_steps"] = max(1, math.ceil(round(steps, 6)))
    if config.speed.xla is None and earlier:
        changes["xla"] = earlier.config.speed.xla
        if "xla_update" not in config.given:
            changes["xla_update"] = earlier.config.speed.xla_update
    warmup = config.update.warmup_epochs
    is_recorded = earlier and earlier.config.update.warmup_epochs == warmup
    is_given = is_recorded or config.given & {"warmup_epochs", "resume"}
    completed = config.with_values(**changes)
    return check_epoch(completed, examples_per_epoch, may_shorten=not is_given)


def check_epoch(
    config: ResolvedConfig, examples_per_epoch: int, *, may_shorten: bool = False
) -> ResolvedConfig:
    """Checks the batch size and the warm-up against the size of the training set.

    Returns the configuration. With `may_shorten`, because no user has chosen the
    warm-up, shortens it to at most half of the steps of a schedule with an end.
    """
    images, update = config.global_batch_size, config.update
    steps = config.run.max_steps
    if images > examples_per_epoch:
        most = examples_per_epoch // (config.machine.towers * config.batch.accumulate)
        raise UsageError(
            f"--batch_size {config.batch.batch_size}: the global batch of {images:,} "
            f"images is larger than the training set of {examples_per_epoch:,}. Give "
            + (f"at most --batch_size {most}." if most else "fewer towers.")
        )
    epochs = steps * images / examples_per_epoch
    if may_shorten and update.schedule_ends and update.warmup_epochs > epochs / 2:
        say(f"Note: the warm-up is shortened to {epochs / 2:.3g} epochs, half the run.")
        return config.with_values(warmup_epochs=epochs / 2)
    # The staircase has no end: a resumed run may raise --max_steps past the warm-up.
    if update.schedule_ends and update.warmup_epochs >= epochs:
        raise UsageError(
            f"--warmup_epochs {update.warmup_epochs} is too long for {epochs:.2f} "
            f"epochs ({steps} steps) with --schedule {update.schedule}. Lower it, or "
            "raise --max_steps or --max_epochs."
        )
    return config


def default_steps_per_call(
    config: ResolvedConfig, placement: devices.Placement, shape: tuple[int, int, int]
) -> int:
    """Returns the default number of steps that one call to TensorFlow runs."""
    # Between two calls a GPU waits for Python; several steps per call make this rarer.
    is_mirrored = config.batch.variable_update == "mirrored"
    # XLA makes a program for one GPU, or with NCCL one for each.
    is_program = (is_mirrored and placement.suits_nccl) or len(placement.devices) == 1
    can_loop = is_program if config.speed.xla else not is_mirrored
    is_divided = config.memory.sections or config.machine.workers > 1
    if not (placement.on_gpus and can_loop) or is_divided:
        return 1
    images = config.batch.batch_size * config.batch.accumulate
    size = math.prod(distortions.image_shape(config.images.distortions, shape))
    fitting = 2**27 // (images * size * tf.float32.size)  # Bytes of a call's batches.
    most = 50 if config.speed.xla else 10
    return max(1, min(fitting, most))


def build_states(
    config: ResolvedConfig,
    placement: devices.Placement,
    replicas: int,
    dataset: datasets.Dataset,
    images: Images,
) -> list[TrainState]:
    """Builds the `TrainState` of each replica."""
    device = config.speed.variable_device
    if replicas == 1:
        # An update by Muon takes 0.1 s for airbench on a CPU.
        is_faster = len(placement.devices) == 1 or config.update.optimizer == "muon"
        on_gpu = devices.chooses_gpus(device, placement, by_default=is_faster)
        homes = [placement.devices[0] if on_gpu else "/cpu:0"]
    elif device != "auto":
        raise UsageError(
            f"--variable_device {device}: mirrored variables are on every tower's "
            "device. Leave --variable_device out, or give --variable_update towers."
        )
    else:
        homes = list(placement.devices)
    shape, distortion = images.shape[1:], config.images.distortions
    states = [build_state(config, home, shape, dataset.classes) for home in homes]
    trained = [id(v) for state in states for v in state.model.trainable_variables]
    if len({*trained}) < len(trained):
        why = "replicas would share layers. Build these in the function, for each model"
        raise UsageError(f"--model {config.network.model}: {why}.")
    prepare = functools.partial(distortions.prepare, distortion=distortion)
    for state in states:
        find_architecture(config.network.model).initialize(state.model, images, prepare)
    return states


def build_state(
    config: ResolvedConfig, home: str, shape: tuple[int, int, int], classes: int
) -> TrainState:
    """Builds an initialized model and its optimizer on the device `home`."""
    image_shape = distortions.image_shape(config.images.distortions, shape)
    name = config.network.model
    model = build_model(
        name,
        image_shape,
        classes,
        precision=config.network.precision,
        seed=config.run.seed,
        device=home,
        options={option: getattr(config.network, option) for option in OPTIONS},
        deterministic=config.speed.deterministic,
    )
    if config.update.stages or config.fine_tuning.freeze:
        prepare_model(model, name, config.all_stages, image_shape, classes)
    with tf.device(home):  # The optimizer's scalars are variables too.
        optimizer = build_optimizer(
            config.update.optimizer,
            config.update.learning_rate,
            config.update.momentum,
            config.update.optimizer_arguments,
            variables=model.trainable_variables,
            trained_parts=find_architecture(name).trained_parts,
            scale_loss=config.network.precision == "float16",
            scale_updates=config.fine_tuning.pretrained_rate != 1.0,
        )
    return TrainState(model, optimizer, home)


def build_towers(
    config: ResolvedConfig,
    placement: devices.Placement,
    states: list[TrainState],
    strategy: tf.distribute.Strategy | None,
    workers: Workers,
    images: Images,
    *,
    classes: int,
    class_weights: np.ndarray | None = None,
) -> tuple[TowerBuilder, planning.Planner, str | None]:
    """Builds the towers, the planner of their memory and a line about the sections.

    `strategy` reduces gradients across replicas; it is None for a single process.
    `class_weights` weigh the loss by class. The line is None if no sections are wanted.
    """
    xla, accumulate = bool(config.speed.xla), config.batch.accumulate
    tower = build_tower(config.loss, class_weights=class_weights, xla=xla)
    shape = distortions.image_shape(config.images.distortions, images.shape[1:])
    if is_code(config.network.model):
        sharing = len(placement.devices) // len(states)
        count = config.machine.towers * accumulate
        own_functions.check_model(states[0].model, shape, sharing, count)
    if config.loss.loss or config.loss.metrics:
        mixed = augmentation.mixes(config.images.augmentation)
        given = config.loss, classes, config.network.precision, mixed
        tower.loss = own_functions.with_own(tower.loss, *given)
    if callable(rate_of := config.update.keras_schedule):
        steps = 1 if config.run.max_hours else config.run.max_steps
        is_muon = config.update.optimizer == "muon"  # It divides by its highest rate.
        most = config.update.learning_rate if is_muon else math.inf
        own_functions.check_schedule(rate_of, steps, most)
    batch = tf.TensorSpec([config.batch.batch_size, *shape])
    planner = planning.Planner(
        states[0], tower, placement.devices, batch, accumulate, replicas=len(states)
    )
    tower, description = planning.build_sectioned(config.memory, placement, planner)
    batch_devices = placement.batch_devices(accumulate)
    what: dict[str, Any] = {"tower": tower, "update": build_update(config, len(images))}
    if (strategy or len(states) > 1) and config.checkpoints.verify_steps:
        why = "with several workers or mirrored variables"
        raise UsageError(f"Leave out --verify_steps {why}.")
    towers = TowerBuilder(states[0], batch_devices, **what)
    # Keras's layers find other replicas by a strategy; NCCL takes no part of a GPU.
    suits_programs = placement.suits_nccl or not placement.on_gpus
    if strategy is None and len(states) > 1:
        if suits_programs and not own_functions.synchronized(states[0].model):
            towers = ProgramBuilder(states, batch_devices, **what)
        else:
            devices_of = [state.device for state in states]
            strategy = mirrored_strategy(devices_of, by_nccl=placement.suits_nccl)
    if strategy is not None:
        what["first_tower"] = workers.index * len(batch_devices)
        towers = ReplicaBuilder(strategy, states, batch_devices, **what)
    return towers, planner, description


def build_tower(
    declared: fields.Loss, *, class_weights: np.ndarray | None = None, xla: bool = False
) -> Tower:
    """Builds the `Tower`, which computes the loss and its gradients."""
    compute = functools.partial(loss, label_smoothing=declared.label_smoothing)
    if class_weights is not None:
        compute = functools.partial(compute, class_weights=class_weights)
    return Tower(inference, compute, xla=xla)


def build_update(config: ResolvedConfig, examples_per_epoch: int) -> Update:
    """Builds the `Update`: learning rate, moving averages and gradient clipping."""
    update, images = config.update, config.global_batch_size
    curve = schedule.CURVES[update.schedule]
    given = {name: getattr(update, name) for name in curve.parameters}
    examples = config.run.max_steps * images
    if curve.period:
        examples = given.pop(curve.period) * examples_per_epoch

    def rate(examples_seen: tf.Tensor | int) -> tf.Tensor:
        if callable(of_steps := update.keras_schedule):
            return tf.cast(of_steps(examples_seen // images), tf.float64)
        time = tf.cast(examples_seen, tf.float64) / examples  # Counts repeats.
        return update.learning_rate * curve.function(time, **given)

    learning_rate: schedule.Schedule = rate
    if update.warmup_epochs:
        rising = update.warmup_epochs * examples_per_epoch
        learning_rate = functools.partial(schedule.warmed_up, rate, rising, images)
    return Update(
        learning_rate,
        functools.partial(schedule.average_decay, update.moving_average_decay),
        clip_norm=update.clip_norm,
        halts=config.checkpoints.on_nan != "skip",
        xla=config.speed.xla_update,
    )
