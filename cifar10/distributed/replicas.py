"""The synchronous step over several sets of variables, on `tf.distribute`.

Each replica has variables of its own: a machine whose towers share them, or a single
tower (mirrored variables). All replicas give their averaged gradients to an all-reduce
and then apply the same update, so their variables stay equal. The strategy brings the
cluster, the replicas and the all-reduce; towers and update are those of one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from signal import Signals

import numpy as np
import tensorflow as tf

from cifar10.errors import STOP_SIGNALS
from cifar10.towers.averaging import Averages
from cifar10.towers.builder import Batch, TowerBuilder
from cifar10.towers.step_result import StepResult
from cifar10.towers.tower import Tower
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

# Where the step tells who has been asked to stop; no metric.
_STOP = "stop"


class ReplicaBuilder(TowerBuilder):
    """Builds the synchronous step over replicas on `tf.distribute`.

    Args:
        strategy: Runs the replicas of this process and reduces over all of them.
        states: One for each replica of this process.
        devices: The devices of its towers, shared out evenly among its replicas.
        first: The number of its first tower among those of all processes.
        tower: What each tower computes.
        update: What the averages of all towers are given to.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        states: Sequence[TrainState],
        devices: Sequence[str],
        *,
        first: int = 0,
        tower: Tower,
        update: Update,
    ) -> None:
        super().__init__(states[0], devices, tower=tower, update=update)
        self.first = first
        self.reduces = True
        self._strategy = strategy
        self._states = tuple(states)
        self._towers_per_replica = len(self.devices) // len(self._states)
        self.number = self._towers_per_replica * strategy.num_replicas_in_sync
        local = len(self.devices)
        if self.number > local:
            self.tower_names = tuple(
                f"{self.devices[number % local]} of worker {number // local}"
                for number in range(self.number)
            )
        self._asked = tf.Variable(tf.zeros([len(STOP_SIGNALS)]), trainable=False)
        self._stops: list[tf.Tensor] = []
        self._meet = tf.function(self._trace_meet, autograph=False)
        self._synchronize = tf.function(self._trace_synchronize, autograph=False)

    def step(self, batches: Sequence[Batch], *, summaries: bool = False) -> StepResult:
        """Runs every tower of this process, and one synchronous update of all."""
        return self._without_stop(super().step(batches, summaries=summaries))

    def steps(self, batches: Sequence[Sequence[Batch]]) -> StepResult:
        """Runs several steps in one call, without returning to Python in between."""
        return self._without_stop(super().steps(batches))

    def agreed_to_stop(self, own: Signals | None) -> Signals | None:
        """Tells whether all processes end here, because one of them was asked to.

        They learn of it by the all-reduce of a step, and look at the step before the
        last one, which has ended; so nobody waits, and all stop at the same step.
        """
        if own is not None:
            self._asked.assign([float(own == one) for one in STOP_SIGNALS])
        if len(self._stops) < 2:
            return None
        counts = self._stops[-2].numpy().reshape(-1, len(STOP_SIGNALS)).sum(axis=0)
        return next((STOP_SIGNALS[place] for place in np.flatnonzero(counts)), None)

    def synchronize(self, numbers: Sequence[int]) -> list[int]:
        """Gives every replica the variables of the first; all processes call it."""
        return [int(one) for one in self._synchronize(tf.constant(numbers, tf.int64))]

    def wait_for_all(self) -> None:
        """Waits until all processes have come here."""
        self._meet()

    def _without_stop(self, result: StepResult) -> StepResult:
        self._stops = [*self._stops[-1:], result.metrics.pop(_STOP)]
        return result

    def _trace_step(self, batches: list[Batch], summaries: bool) -> tuple:
        averages: dict[int, Averages] = {}

        def replica_step() -> None:
            number = self._replica()
            first = number * self._towers_per_replica
            own = slice(first, first + self._towers_per_replica)
            state = self._states[number]
            with tf.device(state.device):
                averages[number] = self._across_replicas(
                    self._trace_averages(
                        state,
                        self.devices[own],
                        batches[own],
                        first=self.first + first,
                        summaries=summaries,
                    ),
                    number,
                )

        self._strategy.run(replica_step)
        # Outside of the strategy, because within it a Keras optimizer would sum the
        # gradients over all replicas once more.
        results = [
            self._trace_update(state, averages[number], summaries=summaries)
            for number, state in enumerate(self._states)
        ]
        return results[0]

    def _across_replicas(self, own: Averages, number: int) -> Averages:
        """Averages over all replicas, in one all-reduce for each type.

        Args:
            own: The averages of one replica's towers.
            number: The replica's number within this process.
        """
        means = {
            key: tf.convert_to_tensor(value)
            for key, value in [
                *enumerate(own.gradients),
                *((("statistics", n), one) for n, one in enumerate(own.statistics)),
                *own.metrics.items(),
            ]
            if value is not None and value.dtype.is_floating
        }
        # Counters and random generators: the first tower's, as on one machine.
        counters = {
            n: one
            for n, one in enumerate(own.statistics)
            if one is not None and not one.dtype.is_floating
        }
        speaks = self._speaks(number)
        told = [_or_neutral(one, speaks) for one in counters.values()]
        # One sum collects every tower's loss: all others have zero in its place.
        first = self.first + number * self._towers_per_replica
        after = self.number - first - self._towers_per_replica
        losses = tf.pad(own.tower_losses, [[first, after]])
        asked = tf.identity(self._asked)
        asked = asked if number == 0 else tf.zeros_like(asked)
        sums = self._sum([*means.values(), *told, losses, asked])
        replicas = self._strategy.num_replicas_in_sync
        mean = {key: one / replicas for key, one in zip(means, sums, strict=False)}
        mean |= {
            ("statistics", n): tf.cast(one, counters[n].dtype)
            for n, one in zip(counters, sums[len(means) :], strict=False)
        }
        *_, losses, asked = sums
        return own._replace(
            gradients=[mean.get(n) for n in range(len(own.gradients))],
            statistics=[
                mean.get(("statistics", n)) for n in range(len(own.statistics))
            ],
            metrics={**{name: mean[name] for name in own.metrics}, _STOP: asked},
            tower_losses=losses,
        )

    def _trace_meet(self) -> None:
        def replica_meet() -> None:
            with tf.device(self._states[self._replica()].device):
                self._sum([tf.zeros([])])

        self._strategy.run(replica_meet)

    def _trace_synchronize(self, numbers: tf.Tensor) -> tf.Tensor:
        received: list[tf.Tensor] = []

        def replica_synchronize() -> None:
            number = self._replica()
            state = self._states[number]
            speaks = self._speaks(number)
            variables = all_variables(state)
            with tf.device(state.device):
                *values, theirs = self._sum(
                    [_or_neutral(one, speaks) for one in [*variables, numbers]]
                )
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(tf.cast(value, variable.dtype))
                state.halted.assign(False)
            received.append(theirs)

        self._strategy.run(replica_synchronize)
        return received[0]

    def _speaks(self, number: int) -> bool:
        """Whether a replica of this process is the first of all."""
        return self.first == 0 and number == 0

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
            # The strategy asks each value for its device; a variable's has none.
            own = [tf.identity(values[place]) for place in places]
            totals = context.all_reduce(tf.distribute.ReduceOp.SUM, own)
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


def _or_neutral(variable: tf.Variable | tf.Tensor, speaks: bool) -> tf.Tensor:
    """Returns a variable's value, or what a sum with it leaves bit for bit as it is."""
    value = tf.convert_to_tensor(variable)
    if not value.dtype.is_floating:
        value = tf.cast(value, tf.int64)  # Types that an all-reduce takes.
        return value if speaks else tf.zeros_like(value)
    return value if speaks else tf.fill(value.shape, tf.constant(-0.0, value.dtype))
