r"""Builds the synchronous step of several replicas on one machine, as programs.

Each replica has its device and its variables. Its part of a step is a program of its
own: towers, one all-reduce of one vector, and the update, which is the same in all.

    batch 0 -> tower 0 on /gpu:0 \              / update of replica 0 on /gpu:0
    batch 1 -> tower 1 on /gpu:1  > all-reduce <  update of replica 1 on /gpu:1
    batch 2 -> tower 2 on /gpu:2 /              \ update of replica 2 on /gpu:2

XLA can compile a program of many steps, all-reduce included, for each GPU. On several
machines, where every process would choose its kernels alone, `replicas.py` does it.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from cifar10.distributed.replicas import all_reduced
from cifar10.towers.towers import Batch, Gradient, StepResult, TowerBuilder
from cifar10.towers.update import TrainState

# A group of devices keeps its key for the life of the process, so each training takes
# another one. Those of TensorFlow's strategies are small numbers.
_GROUP_KEYS = itertools.count(1_000_000_007)


class Group(NamedTuple):
    """The replicas that sum together."""

    key: int
    size: int
    hint: str  # How: `nccl` on GPUs, `ring` on CPUs.

    @classmethod
    def of(cls, devices: Sequence[str]) -> "Group":
        """Returns a new group of devices, one for each replica."""
        hint = "nccl" if "gpu" in devices[0] else "ring"
        return cls(next(_GROUP_KEYS), len(devices), hint)

    def sum(
        self, values: Sequence[tf.Tensor], order: Sequence[tf.Variable]
    ) -> list[tf.Tensor]:
        """Sums each value over all replicas, all in one vector.

        Of int64 all replicas but one have to give zeros. `order` is a variable of this
        replica alone. Without it, TensorFlow would have a replica wait for the sum of
        the one before, which waits for all.
        """
        floats = [value.dtype for value in values if value.dtype.is_floating]
        widest = max([tf.float32, *floats], key=lambda dtype: dtype.size)
        # Float32 holds each piece of 16 bits exactly.
        parts = [
            value if value.dtype.is_floating else tf.bitcast(value, tf.uint16)
            for value in values
        ]
        total = tf.raw_ops.CollectiveReduceV2(
            input=tf.concat([tf.reshape(tf.cast(p, widest), [-1]) for p in parts], 0),
            group_size=self.size,
            group_key=self.key,
            instance_key=1,
            ordering_token=[one.handle for one in order],
            merge_op="Add",
            final_op="Id",
            communication_hint=self.hint,
        )
        sums = []
        sizes = [part.shape.num_elements() for part in parts]
        for part, one in zip(parts, tf.split(total, sizes), strict=True):
            shaped = tf.reshape(tf.cast(one, part.dtype), part.shape)
            is_float = part.dtype.is_floating
            sums.append(shaped if is_float else tf.bitcast(shaped, tf.int64))
        return sums


class ProgramBuilder(TowerBuilder):
    """Builds the synchronous step over the programs of several replicas.

    `states` are the replicas'. `devices` names a device for each batch; the replicas
    divide them equally.
    """

    def __init__(
        self, states: Sequence[TrainState], devices: Sequence[str], **parts: Any
    ) -> None:
        group = Group.of([state.device for state in states])
        self._share = len(devices) // len(states)
        self._replicas = [
            _Replica(state, devices, slice(first, first + self._share), group, **parts)
            for first, state in zip(
                range(0, len(devices), self._share), states, strict=True
            )
        ]
        super().__init__(states[0], devices, **parts)
        self.states = tuple(states)

    @property
    def are_compiled(self) -> bool:
        """Whether XLA compiles each replica's program."""
        return self._replicas[0].is_compiled

    def freeze(self, names: Sequence[str]) -> None:
        """Freezes only the named variables and layers. The next step is retraced."""
        super().freeze(names)
        for replica in self._replicas:
            replica.freeze(names)
        self._is_tuned = False

    def step(self, batches: Sequence[Batch]) -> StepResult:
        """Runs one tower per batch, then an update. All batches have the same shape."""
        self._tune(batches)
        return super().step(batches)

    def steps(self, stacked: Sequence[Batch], count: int) -> StepResult:
        """Runs `count` steps without returning to Python in between."""
        self._tune(stacked, tf.constant(count))
        return super().steps(stacked, count)

    def _tune(self, batches: Sequence[Batch], *count: tf.Tensor) -> None:
        """Has XLA choose the first program's kernels, which it keeps for the others.

        Otherwise replicas might round differently.
        """
        if self.are_compiled and not self._is_tuned:
            first = self._replicas[0]
            compiler = first.program(*count).experimental_get_compiler_ir
            with tf.device(first.state.device):
                compiler(list(batches[first.part]), *count)(stage="optimized_hlo")
            self._is_tuned = True

    def share(self, numbers: Sequence[int], *, variables: bool = False) -> list[int]:
        """Returns the `numbers`; can copy the first replica's variables to others."""
        first, *others = self.states
        for state in others if variables else ():
            for one, other in zip(first.variables(), state.variables(), strict=True):
                other.assign(one)
            state.halted.assign(False)
        return [*numbers]

    def trace_step(
        self, batches: list[Batch], is_wanted: tf.Tensor | None = None
    ) -> StepResult:
        """Builds the operations of a step: the calls of all programs, or their phases.

        The phases of all replicas alternate, because an operation without variables
        waits for the one before, which must not wait for a sum.
        """
        if self.are_compiled:
            return self._calls(batches)
        phases = [one.phases(batches[one.part], is_wanted) for one in self._replicas]
        *_, results = zip(*phases, strict=True)
        return results[0]

    def _trace_steps(self, stacked: list[Batch], count: tf.Tensor) -> StepResult:
        """Builds a loop of steps in each program, or else one loop of all replicas.

        TensorFlow's own collectives meet only in the same loop.
        """
        if self.are_compiled:
            return self._calls(stacked, count)
        return super()._trace_steps(stacked, count)

    def _calls(self, batches: list[Batch], *count: tf.Tensor) -> StepResult:
        results = []
        for one in self._replicas:
            with tf.device(one.state.device):
                results.append(one.program(*count)(batches[one.part], *count))
        return results[0]

    def _is_on_one_device(self) -> bool:
        return False  # Each program is.


class _Replica(TowerBuilder):
    """The program of a replica, which takes its `part` of the batches of all."""

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        part: slice,
        group: Group,
        **parts: Any,
    ) -> None:
        super().__init__(state, devices[part], **parts)
        self.first_tower, self.tower_names = part.start, tuple(devices)
        self.part, self._group = part, group
        with tf.device(state.device):
            self._order = tf.Variable(0.0, trainable=False)

    @property
    def is_compiled(self) -> bool:
        """Whether XLA compiles the whole program."""
        return self._compiles

    def _is_on_one_device(self) -> bool:
        # XLA computes an all-reduce on GPUs alone.
        return super()._is_on_one_device() and "gpu" in self.state.device

    def program(self, *count: tf.Tensor) -> tf.types.experimental.PolymorphicFunction:
        """Returns the program of a step, or of the first `count` of many."""
        return self._steps if count else self._step

    def trace_step(
        self, batches: list[Batch], is_wanted: tf.Tensor | None = None
    ) -> StepResult:
        """Builds the operations of this replica's step."""
        *_, result = self.phases(batches, is_wanted)
        return result

    def phases(
        self, batches: list[Batch], is_wanted: tf.Tensor | None
    ) -> Iterator[Any]:
        """Builds a step in three phases: towers, all-reduce, update with the result."""
        these = self.state, self.devices, batches
        averages = self._trace_averages(*these, self._trace_towers(*these))
        yield None
        with tf.device(self.state.device), tf.name_scope("all_reduce"):
            averages = all_reduced(
                averages,
                lambda values: self._group.sum(values, [self._order]),
                replicas=self._group.size,
                first_tower=self.first_tower,
                num_towers=self.num_towers,
            )
        yield None
        yield self._trace_update(self.state, averages, is_wanted)

    def _warn_of_missing(self, gradients: Sequence[Gradient]) -> None:
        if self.first_tower == 0:
            super()._warn_of_missing(gradients)
