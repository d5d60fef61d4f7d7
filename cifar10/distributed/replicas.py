"""Builds the synchronous step over several replicas with `tf.distribute`.

A replica is a set of variables with the towers that share it: all towers of a machine,
or a single tower (mirrored variables). An all-reduce averages the gradients of all
replicas, and all replicas apply the same update, so their variables stay equal. The
`tf.distribute` strategy provides the cluster, the replicas and the all-reduce. The
towers and the update are the same as on one machine.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from cifar10.errors import STOP_SIGNALS
from cifar10.towers.copies import OptionalTensor
from cifar10.towers.graphs import traced
from cifar10.towers.towers import Averages, Batch, StepResult, Tower, TowerBuilder
from cifar10.towers.update import TrainState, Update

# The metric of requests to end the run: one for each signal, and one for --max_hours.
_STOP = "stop"
_REQUESTS = len(STOP_SIGNALS) + 1


class ReplicaBuilder(TowerBuilder):
    """Builds the synchronous step over replicas on `tf.distribute`.

    `strategy` runs one replica for each of the `states`, and reduces over the replicas
    of all processes. `devices` names a device for each batch of this process; the
    process divides its batches equally among its replicas. `first_tower` is the index
    of this process's first tower among the towers of all processes.
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
        self.states = tuple(states)
        local = len(self.devices)
        self._towers_per_replica = local // len(self.states)
        if (number := self._towers_per_replica * strategy.num_replicas_in_sync) > local:
            self.tower_names = tuple(
                f"{self.tower_names[tower % local]} of worker {tower // local}"
                for tower in range(number)
            )
        self._requests = tf.Variable(tf.zeros(_REQUESTS), trainable=False)
        self._stop_counts: list[tf.Tensor] = []
        self._broadcast = traced(self._trace_broadcast)

    def _is_on_one_device(self) -> bool:
        return False  # XLA compiles collectives for GPUs alone, and by raw operations.

    def _finish(self, result: StepResult) -> StepResult:
        """Returns the result without its requests to end the run, kept for `agree`."""
        self._stop_counts = [*self._stop_counts[-1:], result.metrics.pop(_STOP)]
        return result

    def agree(self, requests: Sequence[bool]) -> list[bool]:
        """Returns for each request, of any process, if the run ends after this step."""
        # Each step's all-reduce tells all processes the requests of each. This reads
        # the second newest step's result, so as not to wait for the newest.
        if any(requests):
            self._requests.assign(tf.cast(requests, tf.float32))
        if len(self._stop_counts) < 2:
            return [False] * len(requests)
        counts = self._stop_counts[-2].numpy().reshape(-1, len(requests))
        return counts.any(axis=0).tolist()

    def broadcast(self, values: Sequence[int], *, variables: bool = False) -> list[int]:
        """Returns process 0's `values`; can copy its variables to all replicas."""
        if variables:  # A rollback takes hours back. Signals are asked for again.
            self._requests.assign(tf.zeros(_REQUESTS))
            self._stop_counts = []
        return self._broadcast(tf.constant(values, "int64"), variables).numpy().tolist()

    def trace_step(
        self, batches: list[Batch], is_wanted: OptionalTensor = None
    ) -> StepResult:
        """Builds the operations of a step: towers, all-reduce and updates."""
        averages: dict[int, Averages] = {}

        def replica_step() -> None:
            replica = self._replica()
            first = replica * self._towers_per_replica
            towers = slice(first, first + self._towers_per_replica)
            state = self.states[replica]
            with tf.device(state.device):
                these = state, self.devices[towers], batches[towers]
                results = self._trace_towers(*these, first)
                local = self._trace_averages(*these, results, first)
                replicas = self._strategy.num_replicas_in_sync
                # Their mean over all replicas is the sum of requests.
                stops = self._requests * (0 if replica else replicas)
                averages[replica] = all_reduced(
                    local._replace(metrics={**local.metrics, _STOP: stops}),
                    self._sum,
                    replicas=replicas,
                    first_tower=self.first_tower + first,
                    num_towers=self.num_towers,
                )

        self._strategy.run(replica_step)
        # Not within the strategy, where a Keras optimizer would sum gradients again.
        results = [
            self._trace_update(state, averages[replica], is_wanted)
            for replica, state in enumerate(self.states)
        ]
        return results[0]

    def _trace_broadcast(self, numbers: tf.Tensor, with_variables: bool) -> tf.Tensor:
        received: list[tf.Tensor] = []

        def replica_broadcast() -> None:
            replica = self._replica()
            state = self.states[replica]
            is_first = self.first_tower == 0 and replica == 0
            variables = state.variables() if with_variables else []
            with tf.device(state.device):
                *values, first_numbers = self._sum(
                    [_value_or_zero(v, is_first) for v in [*variables, numbers]]
                )
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(tf.cast(value, variable.dtype))
                if with_variables:
                    state.halted.assign(False)
            received.append(first_numbers)

        self._strategy.run(replica_broadcast)
        return received[0]

    def _replica(self) -> int:
        """Returns the traced replica's index among the replicas of this process."""
        context = tf.distribute.get_replica_context()
        number = tf.get_static_value(context.replica_id_in_sync_group)
        return int(number) % len(self.states)

    def _sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each value over all replicas, with one all-reduce per dtype."""
        context = tf.distribute.get_replica_context()
        sums: dict[int, tf.Tensor] = {}
        for dtype in dict.fromkeys(value.dtype for value in values):
            indices = [n for n, value in enumerate(values) if value.dtype == dtype]
            # The strategy reads each value's device; a variable has none.
            tensors = [tf.identity(values[index]) for index in indices]
            totals = context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)
            sums |= dict(zip(indices, totals, strict=True))
        return [sums[index] for index in range(len(values))]


def all_reduced(
    local: Averages,
    sum_all: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    *,
    replicas: int,
    first_tower: int,
    num_towers: int,
) -> Averages:
    """Averages gradients, statistics and metrics over all replicas.

    `sum_all` sums each of several tensors over all replicas. `first_tower` is the index
    of this replica's first tower among those of all.
    """
    averages = (local.gradients, local.statistics, local.metrics)
    flat = tf.nest.flatten(averages)
    values = {n: tf.convert_to_tensor(v) for n, v in enumerate(flat) if v is not None}
    # Counters and random states are the first tower's, as on one machine.
    terms = [
        value if value.dtype.is_floating else _value_or_zero(value, first_tower == 0)
        for value in values.values()
    ]
    # Every tower's loss is collected by a sum, in which other replicas have zeros.
    after = num_towers - first_tower - local.tower_losses.shape[0]
    losses = tf.pad(local.tower_losses, [[first_tower, after]])
    *sums, losses = sum_all([*terms, losses])
    for (index, value), total in zip(values.items(), sums, strict=True):
        is_mean = value.dtype.is_floating
        flat[index] = total / replicas if is_mean else tf.cast(total, value.dtype)
    gradients, statistics, metrics = tf.nest.pack_sequence_as(averages, flat)
    return Averages(gradients, statistics, metrics, losses, local.global_batch_size)


def _value_or_zero(variable: tf.Variable | tf.Tensor, keep: bool) -> tf.Tensor:
    """Returns the value if `keep`, else zeros that leave any sum exactly as it is."""
    value = tf.convert_to_tensor(variable)
    if not value.dtype.is_floating:
        value = tf.cast(value, tf.int64)  # All-reduce does not take every dtype.
        return value if keep else tf.zeros_like(value)
    return value if keep else tf.fill(value.shape, tf.constant(-0.0, value.dtype))
