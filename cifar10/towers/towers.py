r"""Towers: one model computed on several devices at once, trained as if on one.

A tower is a pure function: from the variables' values and a batch, it computes a loss,
gradients and new batch statistics, and writes nothing. The results of all towers are
averaged on the device that holds the variables, usually the CPU. One synchronous update
(`update.py`) then writes all variables. N towers of B / N images compute the same as
one tower of B images, except in models with batch norm or dropout.

    batch 0 -> tower 0 on /gpu:0 \
    batch 1 -> tower 1 on /gpu:1  > average on /cpu:0 -> one update -> global_step + 1
    batch 2 -> tower 2 on /gpu:2 /

Inputs need not be images: towers train any Keras model on batches of inputs and labels.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from cifar10.errors import StoppedError, UsageError
from cifar10.towers import copies
from cifar10.towers.copies import OptionalTensor, Packed, Tensors, mean, read_variables
from cifar10.towers.graphs import check_scalars, join_numbers, traced, xla_pooling
from cifar10.towers.noise_scale import with_square
from cifar10.towers.stages import find_frozen, frozen_as_in_evaluation
from cifar10.towers.update import Averages, Gradient, TrainState, Update

Batch: TypeAlias = "tuple[tf.Tensor, tf.Tensor]"
Inference: TypeAlias = "Callable[..., tuple]"
Loss: TypeAlias = "Callable[..., dict[str, tf.Tensor]]"
Results: TypeAlias = "list[TowerResult]"

logger = logging.getLogger(__name__)


class TowerResult(NamedTuple):
    """What one tower computes from its batch."""

    metrics: dict[str, tf.Tensor]  # Scalars by name, among them `total_loss`.
    gradients: list[Gradient]  # One per trainable variable, in the model's order.
    # What layers assign, in the order of `written_variables`; None if unchanged.
    statistics: list[OptionalTensor]


class StepResult(NamedTuple):
    """The outcome of one step, or of several steps, stacked on the first dimension."""

    # Scalars by name: the loss function's, averaged over all towers, and the update's.
    metrics: dict[str, tf.Tensor]
    tower_losses: tf.Tensor  # floating [towers], the total loss of each tower.
    numbers: tf.Tensor  # Metrics and losses in one tensor, for `split_numbers`.


class Tower:
    """The model as a pure function of the variables' values and a batch.

    Args:
        inference: A function like `model.inference`. It computes a model's outputs, new
            non-trainable values and penalties from given values of the variables.
        loss: A function like `model.loss`. It maps outputs, labels and penalties to
            named scalars, each a mean over the batch. One of them is `total_loss`.
        xla: Whether to compile each tower with XLA.
    """

    def __init__(self, inference: Inference, loss: Loss, *, xla: bool = False) -> None:
        self.inference = inference
        self.loss = loss
        self.xla = xla
        self.frozen: Sequence[str] = ()  # Names not to train.

    def __call__(
        self,
        state: TrainState,
        number: int,
        inputs: tf.Tensor,
        labels: tf.Tensor,
        packed: Packed | None = None,
    ) -> TowerResult:
        """Reads the variables once, then computes loss, gradients and statistics.

        `number` is the tower's index among the towers of all machines. `inputs` go to
        the model and `labels` to the loss, [batch, ...]. `packed`: values read before.
        """
        variables = state.model.trainable_variables
        is_frozen = find_frozen(state.model, variables, self.frozen)
        is_trained = [not frozen for frozen in is_frozen]
        read = packed.unpacked() if packed else read_variables(state.model)
        read[1] = copies.for_tower(state.model, read[1], number)
        scale = tf.convert_to_tensor(state.optimizer.scale_loss(1.0))

        def compute(
            read: list[Tensors], inputs: tf.Tensor, labels: tf.Tensor, scale: tf.Tensor
        ) -> TowerResult:
            trainable, non_trainable = read
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(list(itertools.compress(trainable, is_trained)))
                outputs, statistics, penalties = self.inference(
                    state.model, trainable, non_trainable, inputs, training=True
                )
                metrics = self.loss(outputs, labels, penalties)
                check_scalars(metrics)
                scaled_loss = metrics["total_loss"]
                if isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer):
                    scaled_loss *= tf.cast(scale, scaled_loss.dtype)
            gradients = [
                # An embedding's gradient is sparse and can repeat an index.
                None if gradient is None else tf.convert_to_tensor(gradient)
                for gradient in tape.gradient(scaled_loss, trainable)
            ]
            return TowerResult(metrics, gradients, statistics)

        if self.xla:
            compute = tf.function(compute, jit_compile=True, autograph=False)
        return compute(read, inputs, labels, scale)


class TowerBuilder:
    """Builds the synchronous step over towers on several devices.

    Each tower has an entry in `devices`. A device that is listed several times computes
    its towers' batches one after another.
    """

    def __init__(
        self, state: TrainState, devices: Sequence[str], *, tower: Tower, update: Update
    ) -> None:
        self.state = state
        self.states: Sequence[TrainState] = [state]  # One per replica of this process.
        self.devices = tuple(devices)
        self.first_tower = 0  # The index of this process's first one among all.
        self.tower_names = self.devices  # In all processes, for messages.
        self.tower = tower
        self.update = update
        # Whether one flat tensor is copied between devices instead of many.
        self.packs_copies = any("gpu" in device.lower() for device in self.devices)
        self._names = [variable.path for variable in state.model.trainable_variables]
        self._warned: set[str] = set()
        # Kept for all traces, so that XLA compiles it once for each set of gradients.
        self._update_by_xla = traced(self._trace_writes, xla=True)
        self.freeze(())

    @property
    def num_towers(self) -> int:
        """The number of towers in all processes together."""
        return len(self.tower_names)

    def freeze(self, names: Sequence[str]) -> None:
        """Freezes only the named variables and layers. The next step is retraced."""
        self.tower.frozen = names
        variables = self.state.model.trainable_variables
        is_frozen = find_frozen(self.state.model, variables, names)
        self._warned.update(itertools.compress(self._names, is_frozen))
        # On an H100 a small CNN's step took 0.5 ms, with the tower alone compiled 3.0.
        self.is_compiled = self.tower.xla and self._is_on_one_device()
        self._step = traced(self.trace_step, xla=self.is_compiled)
        self._steps = traced(self._trace_steps, xla=self.is_compiled)
        self._step_and_results = traced(self._trace_step_and_results)
        self._results = traced(functools.partial(self._trace_towers, self.state))

    def compile_steps(self, *, xla: bool = False, xla_update: bool = False) -> None:
        """Turns XLA for the towers and the update on or off; the step is retraced."""
        self.tower.xla = xla
        self.update = dataclasses.replace(self.update, xla=xla_update)
        self.freeze(self.tower.frozen)

    def _is_on_one_device(self) -> bool:
        homes = {one.device for one in self.state.variables()}  # int32 is on the host.
        return len(homes) == 1 and {*self.devices} == {self.state.device}

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """Runs one tower per batch, then an update. All batches have the same shape."""
        with tf.device(self.state.device):  # Results stay there.
            return self._finish(self._step(list(batches)))

    def steps(self, stacked: Sequence[Batch], count: int) -> StepResult:
        """Runs `count` steps without returning to Python in between.

        `stacked` has a batch for each tower, whose first dimension is the steps'. It
        may have more than `count` steps. One program runs any number of them, so the
        result does not depend on how steps are divided into calls.
        """
        with tf.device("/cpu:0"):
            result = self._steps(list(stacked), tf.constant(count))
        if count < len(stacked[0][0]):
            result = tf.nest.map_structure(lambda of_steps: of_steps[:count], result)
        return self._finish(result)

    def _finish(self, result: StepResult) -> StepResult:
        """Returns a step's result. A subclass may first remove metrics it has added."""
        return result

    def results(self, batches: Sequence[Batch], devices: Sequence[str] = ()) -> Results:
        """Computes each tower's result, on given devices; updates no variables."""
        return self._results(tuple(devices) or self.devices, list(batches))

    def step_and_results(self, batches: Sequence[Batch]) -> tuple[StepResult, Results]:
        """Runs a step and also returns the results of each tower."""
        if self.tower.xla or len(self.devices) > len({*self.devices}):
            # As outputs, the gradients would be summed and rounded otherwise.
            results = self.results(batches)
            return self.step(batches), results
        result, results = self._step_and_results(list(batches))
        return self._finish(result), results

    def gradients(self, batches: Sequence[Batch]) -> dict[str, tf.Tensor]:
        """Returns the gradients, averaged over these towers, by variable path."""
        means = average_gradients([one.gradients for one in self.results(batches)])
        self._warn_of_missing(means)
        scale = self.state.optimizer.scale_loss(1.0)
        return {
            name: gradient / tf.cast(scale, gradient.dtype)
            for name, gradient in zip(self._names, means, strict=True)
            if gradient is not None
        }

    def trace(self, batches: Sequence[Batch]) -> tf.types.experimental.ConcreteFunction:
        """Returns the traced step, whose graph TensorBoard shows."""
        return self._step.get_concrete_function(list(batches))

    def agree(self, requests: Sequence[bool]) -> list[bool]:
        """Returns, for each request to end the run, whether it ends after this step."""
        return [*requests]

    def broadcast(self, values: Sequence[int], *, variables: bool = False) -> list[int]:
        """Returns the `values` that process 0 passes. Every process must call this.

        With `variables`, also copies those of the first replica to all replicas.
        """
        del variables  # Here is one replica.
        return [*values]

    def barrier_at_end(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for all processes at a block's exit, unless an error is the cause."""
        if kind is None or issubclass(kind, StoppedError):  # A signal stops all.
            self.broadcast([0])

    def trace_step(
        self, batches: list[Batch], is_wanted: OptionalTensor = None
    ) -> StepResult:
        """Builds the operations of a step: towers, averages, update."""
        return self._trace_step_and_results(batches, is_wanted)[0]

    def _trace_step_and_results(
        self, batches: list[Batch], is_wanted: OptionalTensor = None
    ) -> tuple:
        results = self._trace_towers(self.state, self.devices, batches)
        averages = self._trace_averages(self.state, self.devices, batches, results)
        return self._trace_update(self.state, averages, is_wanted), results

    def _trace_steps(self, stacked: list[Batch], count: tf.Tensor) -> StepResult:
        """Builds a loop of `count` steps, int32 [], over towers' stacked batches."""
        most = stacked[0][0].shape[0]

        def batches_of(step: tf.Tensor | int) -> list[Batch]:
            batches = []
            for device, (inputs, labels) in zip(self.devices, stacked, strict=True):
                with tf.device(device):
                    batches.append((inputs[step], labels[step]))
            return batches

        def run(step: tf.Tensor, rows: list[tf.TensorArray]) -> tuple:
            is_wanted = step < count if self.is_compiled else None
            result = tf.nest.flatten(self.trace_step(batches_of(step), is_wanted))
            pairs = zip(rows, result, strict=True)
            return step + 1, [row.write(step, value) for row, value in pairs]

        outputs = self.trace(batches_of(0)).structured_outputs
        rows = [
            tf.TensorArray(one.dtype, most, element_shape=one.shape)
            for one in tf.nest.flatten(outputs)
        ]
        # XLA knows how often a loop runs only if that is a constant; otherwise the host
        # would wait for each step. So a compiled loop runs for all batches, and from
        # `count` on writes nothing.
        last = most if self.is_compiled else count
        # Each step reads what the step before has written.
        _, rows = tf.while_loop(
            lambda step, _: step < last, run, (0, rows), parallel_iterations=1
        )
        return tf.nest.pack_sequence_as(outputs, [row.stack() for row in rows])

    def _trace_towers(
        self,
        state: TrainState,
        devices: Sequence[str],
        batches: list[Batch],
        first: int = 0,
    ) -> Results:
        """Builds a tower for each batch. All towers read the same variables."""
        if len({inputs.shape for inputs, _ in batches}) != 1:
            # The mean of the losses would not be the loss of the global batch.
            raise ValueError("The batches of all towers must have the same shape.")
        results, packed = [], None
        if self._packs(state, devices):
            with tf.device(state.device), tf.name_scope("flat"):
                packed = Packed(read_variables(state.model), state.device)
        latest: dict[str, list[Gradient]] = {}
        for number, (device, (inputs, labels)) in enumerate(
            zip(devices, batches, strict=True), self.first_tower + first
        ):
            earlier = [g for g in latest.get(device, []) if g is not None]
            with (
                tf.device(device),
                tf.name_scope(f"tower_{number}"),
                tf.control_dependencies(earlier),
                frozen_as_in_evaluation(state.model, self.tower.frozen),
                xla_pooling(state.model, device, self.tower.xla),
            ):
                results.append(self.tower(state, number, inputs, labels, packed))
            latest[device] = results[-1].gradients
        return results

    def _packs(self, state: TrainState, devices: Sequence[str]) -> bool:
        return self.packs_copies and {*devices} != {state.device}

    def _trace_averages(
        self,
        state: TrainState,
        devices: Sequence[str],
        batches: list[Batch],
        results: Results,
        first: int = 0,
    ) -> Averages:
        # The synchronization point: each tower waits here for all others.
        with tf.device(state.device), tf.name_scope("average"):
            self._warn_of_missing(results[0].gradients)
            packs = self._packs(state, devices)
            if self.num_towers > 1:
                results = with_square(
                    state,
                    devices,
                    results,
                    self.num_towers,
                    is_first=self.first_tower + first == 0,
                    xla=self.is_compiled,
                    flat=packs,
                )
            if packs:
                found = copies.packed_means(devices, results, state.device)
                means, statistics, metrics, losses = found
            else:
                sums = [*copies.sum_on_devices(devices, results).values()]
                means = average_gradients(sums, len(results))
                statistics = average_statistics([one.statistics for one in results])
                of_towers = [one.metrics for one in results]
                metrics = {
                    name: tf.add_n([one[name] for one in of_towers]) / len(results)
                    for name in of_towers[0]
                }
                losses = tf.stack([one["total_loss"] for one in of_towers])
            images = batches[0][0].shape[0] * self.num_towers
            return Averages(means, statistics, metrics, losses, images)

    def _trace_update(
        self, state: TrainState, averages: Averages, is_wanted: OptionalTensor = None
    ) -> StepResult:
        by_xla = self.update.xla and not self.is_compiled
        write = self._update_by_xla if by_xla else self._trace_writes
        with tf.device(state.device), tf.name_scope("update"):
            return write(self.update, state, averages, is_wanted)

    def _trace_writes(
        self,
        update: Update,  # Passed, because a trace keeps the one that it was made with.
        state: TrainState,
        averages: Averages,
        is_wanted: OptionalTensor,
    ) -> StepResult:
        xla = update.xla or self.is_compiled
        updated = update(state, averages, is_wanted=is_wanted, xla=xla)
        metrics = averages.metrics | updated
        numbers = join_numbers(metrics, averages.tower_losses)
        return StepResult(metrics, averages.tower_losses, numbers)

    def _warn_of_missing(self, gradients: Sequence[Gradient]) -> None:
        named = zip(gradients, self._names, strict=True)
        missing = [name for gradient, name in named if gradient is None]
        if len(missing) == len(gradients):
            raise UsageError(
                "The loss has no gradient: it depends on no variable. Check that the "
                "model has trainable layers, and that the loss uses its output."
            )
        if new := [name for name in missing if name not in self._warned]:
            self._warned.update(new)
            logger.warning("Not trained, as they have no gradient: %s.", ", ".join(new))


def average_gradients(
    tower_gradients: Sequence[Sequence[Gradient]], count: int | None = None
) -> list[Gradient]:
    """Averages each variable's gradient over all towers.

    With two towers and two variables a and b, whose gradients are

        tower 0: [a0, b0]
        tower 1: [a1, b1]

    the result is [(a0 + a1) / 2, (b0 + b1) / 2]. This is the gradient of the loss over
    the global batch: all batches have the same size, and each tower's loss is the mean
    over the tower's batch plus the weight decay, the same in all towers. (Each replica
    averages its towers here. `distributed/` then averages over the replicas.)

    Args:
        tower_gradients: `[tower][variable]`, or sums over towers, `[device][variable]`.
        count: Number of towers; needed only if `tower_gradients` holds sums.

    Returns:
        One gradient per variable; None if no tower has a gradient.
    """
    return [mean(gradients, count) for gradients in zip(*tower_gradients, strict=True)]


def average_statistics(statistics: list[list[OptionalTensor]]) -> list[OptionalTensor]:
    """Merges the values that layers assign in all towers.

    Averages floating-point values, such as batch statistics. Takes other values from
    the first tower, since counters and states of random generators must advance once
    per step. In `statistics[tower][variable]`, None means an unchanged variable.
    """
    return [
        mean(group) if group[0] is not None and group[0].dtype.is_floating else group[0]
        for group in zip(*statistics, strict=True)
    ]
