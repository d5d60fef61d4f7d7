r"""Builds the synchronous step of several replicas on one machine, as programs.

Each replica has its device and variables, and runs a separate program in each step: its
towers, one all-reduce of one vector, and the update, which is the same in all replicas.

    batch 0 -> tower 0 on /gpu:0 \              / update of replica 0 on /gpu:0
    batch 1 -> tower 1 on /gpu:1  > all-reduce <  update of replica 1 on /gpu:1
    batch 2 -> tower 2 on /gpu:2 /              \ update of replica 2 on /gpu:2

XLA can compile a program of many steps, all-reduce included, for each GPU. On several
machines, where every process would choose its kernels alone, `replicas.py` does it.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from cifar10.distributed.replicas import all_reduced
from cifar10.towers.copies import OptionalTensor, Tensors, widened
from cifar10.towers.graphs import Traced
from cifar10.towers.towers import Averages, Batch, Gradient, StepResult, TowerBuilder
from cifar10.towers.update import TrainState

# A group of devices keeps its key for the life of the process, so each run takes
# another one. Those of TensorFlow's strategies are small numbers.
_GROUP_KEYS = itertools.count(1_000_000_007)


@dataclasses.dataclass
class Group:
    """The devices of replicas that sum together."""

    devices: Sequence[str]
    key: int = dataclasses.field(default_factory=_GROUP_KEYS.__next__)

    def sum(self, values: Tensors, order: Sequence[tf.Variable]) -> Tensors:
        """Sums each value over all replicas, all in one vector.

        All replicas but one must pass zeros for int64 values. `order` is a variable of
        this replica alone; without it, TensorFlow would let a replica wait for the sum
        of the previous replica, which itself waits for all replicas.
        """
        # Float32 holds each piece of 16 bits exactly.
        parts = [v if v.dtype.is_floating else tf.bitcast(v, tf.uint16) for v in values]
        vector = tf.concat([tf.reshape(part, [-1]) for part in widened(parts)], 0)
        total = tf.raw_ops.CollectiveReduceV2(
            input=vector,
            group_size=len(self.devices),
            group_key=self.key,
            # TensorFlow binds it to a shape; what is frozen adds nothing to the vector.
            instance_key=vector.shape[0],
            ordering_token=[one.handle for one in order],
            merge_op="Add",
            final_op="Id",
            communication_hint="nccl" if "gpu" in self.devices[0] else "ring",
        )
        sums = tf.split(total, [part.shape.num_elements() for part in parts])
        pairs = zip(sums, parts, strict=True)
        sums = [tf.reshape(tf.cast(s, part.dtype), part.shape) for s, part in pairs]
        return [s if s.dtype.is_floating else tf.bitcast(s, tf.int64) for s in sums]


class ProgramBuilder(TowerBuilder):
    """Builds the synchronous step over the programs of several replicas.

    `states` are the replicas', which equally divide `devices`, one for each batch.
    """

    def __init__(
        self, states: Sequence[TrainState], devices: Sequence[str], **parts: Any
    ) -> None:
        share = len(devices) // len(states)
        group = Group([one.device for one in states])
        self._replicas = [
            _Replica(one, devices, slice(n * share, (n + 1) * share), group, **parts)
            for n, one in enumerate(states)
        ]
        super().__init__(states[0], devices, **parts)
        self.states = tuple(states)

    def freeze(self, names: Sequence[str]) -> None:
        """Freezes only the named variables and layers. The next step is retraced."""
        super().freeze(names)
        for replica in self._replicas:
            replica.freeze(names)
        self.are_compiled = self._replicas[0].is_compiled
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
        """Has XLA choose the first program's kernels, which it keeps for the others."""
        # Otherwise replicas might round differently.
        if self.are_compiled and not self._is_tuned:
            first = self._replicas[0]
            compiler = first.program(*count).experimental_get_compiler_ir
            with tf.device(first.state.device):
                compiler(list(batches[first.part]), *count)(stage="optimized_hlo")
            self._is_tuned = True

    def broadcast(self, values: Sequence[int], *, variables: bool = False) -> list[int]:
        """Returns the `values`; can copy the first replica's variables to others."""
        first, *others = self.states
        for state in others if variables else ():
            for one, other in zip(first.variables(), state.variables(), strict=True):
                other.assign(one)
            state.halted.assign(False)
        return [*values]

    def trace_step(self, batches: list[Batch], *_: OptionalTensor) -> StepResult:
        """Builds the calls of the programs, none of which waits for another."""
        return self._call_all(batches)

    def _trace_steps(self, stacked: list[Batch], count: tf.Tensor) -> StepResult:
        """Builds a loop of steps in each program, or else one loop of all replicas."""
        if self.are_compiled:
            return self._call_all(stacked, count)
        # TensorFlow's own collectives meet only in the same loop.
        return super()._trace_steps(stacked, count)

    def _call_all(self, batches: list[Batch], *count: tf.Tensor) -> StepResult:
        results = []
        for one in self._replicas:
            with tf.device(one.state.device):
                results.append(one.program(*count)(batches[one.part], *count))
        return results[0]


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

    def _is_on_one_device(self) -> bool:
        # XLA computes an all-reduce on GPUs alone.
        return super()._is_on_one_device() and "gpu" in self.state.device

    def program(self, *count: tf.Tensor) -> Traced:
        """Returns the program of a step, or of the first `count` of many."""
        return self._steps if count else self._step

    def _trace_averages(self, *given: Any) -> Averages:
        local = super()._trace_averages(*given)
        with tf.device(self.state.device), tf.name_scope("all_reduce"):
            return all_reduced(
                local,
                lambda values: self._group.sum(values, [self._order]),
                replicas=len(self._group.devices),
                first_tower=self.first_tower,
                num_towers=self.num_towers,
            )

    def _warn_of_missing(self, gradients: Sequence[Gradient]) -> None:
        if self.first_tower == 0:
            super()._warn_of_missing(gradients)
