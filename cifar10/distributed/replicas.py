"""The synchronous step over several sets of variables, on `tf.distribute`.

A replica is a set of variables with the towers that share it: all towers of a machine,
or a single tower (mirrored variables). All replicas give their averaged gradients to an
all-reduce and then apply the same update, so their variables stay equal. The strategy
brings the cluster, the replicas and the all-reduce; towers and update are those of one
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from signal import Signals
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.errors import STOP_SIGNALS
from cifar10.towers.towers import Averages, Batch, StepResult, Tower, TowerBuilder
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

# Carries the requests to stop through the metrics of a step.
_STOP = "stop"


class ReplicaBuilder(TowerBuilder):
    """Builds the synchronous step over replicas on `tf.distribute`.

    Args:
        strategy: Runs the replicas of this process and reduces over all of them.
        states: One for each replica of this process.
        devices: The devices of its towers, shared out evenly among its replicas.
        first_tower: The number of its first tower among those of all processes.
        tower: What each tower computes.
        update: What the averages of all towers are given to.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        states: Sequence[TrainState],
        devices: Sequence[str],
        *,
        first_tower: int = 0,
        tower: Tower,
        update: Update,
    ) -> None:
        super().__init__(states[0], devices, tower=tower, update=update)
        self.first_tower = first_tower
        self._strategy = strategy
        self._states = tuple(states)
        local = len(self.devices)
        self._towers_per_replica = local // len(self._states)
        number = self._towers_per_replica * strategy.num_replicas_in_sync
        if number > local:
            self.tower_names = tuple(
                f"{self.devices[tower % local]} of worker {tower // local}"
                for tower in range(number)
            )
        self._stop_requests = tf.Variable(
            tf.zeros([len(STOP_SIGNALS)]), trainable=False
        )
        self._stop_counts: list[tf.Tensor] = []
        self._barrier = tf.function(self._trace_barrier, autograph=False)
        self._synchronize = tf.function(self._trace_synchronize, autograph=False)

    def result(self, outputs: tuple) -> StepResult:
        """Returns the result of a step, and keeps the requests to stop."""
        result = super().result(outputs)
        self._stop_counts = [*self._stop_counts[-1:], result.metrics.pop(_STOP)]
        return result

    def agree_to_stop(self, requested: Signals | None) -> Signals | None:
        """Returns the signal on which all processes stop after the same step.

        A request travels with the all-reduce of a step. Each process reads the counts
        of the step before the last one, which has ended, so none of them waits.

        Args:
            requested: The signal that this process has received.
        """
        if requested is not None:
            self._stop_requests.assign(
                [float(requested == signal) for signal in STOP_SIGNALS]
            )
        if len(self._stop_counts) < 2:
            return None
        counts = self._stop_counts[-2].numpy().reshape(-1, len(STOP_SIGNALS))
        stops = np.flatnonzero(counts.sum(axis=0))
        return next((STOP_SIGNALS[index] for index in stops), None)

    def synchronize(self, numbers: Sequence[int]) -> list[int]:
        """Gives every replica the variables of the first; all processes call it.

        Args:
            numbers: Some integers.

        Returns:
            Those of the first process.
        """
        return [
            int(number) for number in self._synchronize(tf.constant(numbers, tf.int64))
        ]

    def barrier(self) -> None:
        """Waits until all processes have called this."""
        self._barrier()

    def trace_step(self, batches: list[Batch], return_gradients: bool) -> tuple:
        """Builds the operations of a step: towers, all-reduce, updates."""
        averages: dict[int, Averages] = {}

        def replica_step() -> None:
            replica = self._replica()
            first = replica * self._towers_per_replica
            towers = slice(first, first + self._towers_per_replica)
            state = self._states[replica]
            with tf.device(state.device):
                local = self._trace_averages(
                    state,
                    self.devices[towers],
                    batches[towers],
                    self.first_tower + first,
                )
                averages[replica] = self._all_reduce(local, replica)

        self._strategy.run(replica_step)
        # Outside of the strategy, because within it a Keras optimizer would sum the
        # gradients over all replicas once more.
        results = [
            self._trace_update(state, averages[replica], return_gradients)
            for replica, state in enumerate(self._states)
        ]
        return results[0]

    def _all_reduce(self, local: Averages, replica: int) -> Averages:
        """Averages over all replicas, in one all-reduce for each type.

        Args:
            local: The averages of one replica's towers.
            replica: The replica's number within this process.
        """
        named: dict[Any, tf.Tensor | None] = {
            **{("gradient", n): value for n, value in enumerate(local.gradients)},
            **{("statistic", n): value for n, value in enumerate(local.statistics)},
            **local.metrics,
        }
        values = {
            name: tf.convert_to_tensor(value)
            for name, value in named.items()
            if value is not None
        }
        means = {name: v for name, v in values.items() if v.dtype.is_floating}
        # Counters and random generators: the first tower's, as on one machine.
        counters = {name: v for name, v in values.items() if not v.dtype.is_floating}
        is_first = self._is_first(replica)
        # One sum collects every tower's loss: all others have zero in its place.
        before = self.first_tower + replica * self._towers_per_replica
        after = self.num_towers - before - self._towers_per_replica
        losses = tf.pad(local.tower_losses, [[before, after]])
        stops = tf.identity(self._stop_requests)
        sums = self._sum(
            [
                *means.values(),
                *(_value_or_zero(value, is_first) for value in counters.values()),
                losses,
                stops if replica == 0 else tf.zeros_like(stops),
            ]
        )
        *_, losses, stops = sums
        replicas = self._strategy.num_replicas_in_sync
        reduced = {
            name: total / replicas for name, total in zip(means, sums, strict=False)
        }
        reduced |= {
            name: tf.cast(total, counters[name].dtype)
            for name, total in zip(counters, sums[len(means) :], strict=False)
        }
        return local._replace(
            gradients=[
                reduced.get(("gradient", n)) for n in range(len(local.gradients))
            ],
            statistics=[
                reduced.get(("statistic", n)) for n in range(len(local.statistics))
            ],
            metrics={**{name: reduced[name] for name in local.metrics}, _STOP: stops},
            tower_losses=losses,
        )

    def _trace_barrier(self) -> None:
        def replica_barrier() -> None:
            with tf.device(self._states[self._replica()].device):
                self._sum([tf.zeros([])])

        self._strategy.run(replica_barrier)

    def _trace_synchronize(self, numbers: tf.Tensor) -> tf.Tensor:
        received: list[tf.Tensor] = []

        def replica_synchronize() -> None:
            replica = self._replica()
            state = self._states[replica]
            is_first = self._is_first(replica)
            variables = all_variables(state)
            with tf.device(state.device):
                *values, first_numbers = self._sum(
                    [_value_or_zero(v, is_first) for v in [*variables, numbers]]
                )
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(tf.cast(value, variable.dtype))
                state.halted.assign(False)
            received.append(first_numbers)

        self._strategy.run(replica_synchronize)
        return received[0]

    def _is_first(self, replica: int) -> bool:
        """Whether a replica of this process is the first of all."""
        return self.first_tower == 0 and replica == 0

    def _replica(self) -> int:
        """Returns the number, within this process, of the replica being traced."""
        context = tf.distribute.get_replica_context()
        number = tf.get_static_value(context.replica_id_in_sync_group)
        return int(number) % len(self._states)

    def _sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all replicas; one all-reduce takes values of one type only."""
        context = tf.distribute.get_replica_context()
        sums: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(value.dtype for value in values):
            places = [n for n, value in enumerate(values) if value.dtype == dtype]
            # The strategy reads each value's device; a variable has none.
            tensors = [tf.identity(values[place]) for place in places]
            totals = context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)
            sums |= dict(zip(places, totals, strict=True))
        return [sums[place] for place in range(len(values))]


def all_variables(state: TrainState) -> list[tf.Variable]:
    """Returns every variable that a step writes, in a fixed order."""
    keras_variables = [
        *state.model.trainable_variables,
        *state.model.non_trainable_variables,
        *state.optimizer.variables,
    ]
    return [
        *[variable.value for variable in keras_variables],
        *state.averages,
        state.global_step,
    ]


def _value_or_zero(variable: tf.Variable | tf.Tensor, keep: bool) -> tf.Tensor:
    """Returns a value, or the zero that leaves a sum with it bit for bit as it is."""
    value = tf.convert_to_tensor(variable)
    if not value.dtype.is_floating:
        value = tf.cast(value, tf.int64)  # Types that an all-reduce takes.
        return value if keep else tf.zeros_like(value)
    return value if keep else tf.fill(value.shape, tf.constant(-0.0, value.dtype))
