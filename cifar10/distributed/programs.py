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

from cifar10.distributed.replicas import all_reduced, check_replicas
from cifar10.towers.towers import (
    Averages,
    Batch,
    Gradient,
    StepResult,
    Tower,
    TowerBuilder,
)
from cifar10.towers.update import TrainState, Update

# A group of devices keeps its key for the life of the process, so each training takes
# another one. Those of TensorFlow's strategies are small numbers.
_GROUP_KEYS = itertools.count(1_000_000_007)
_PIECES = tf.int64.size // tf.uint16.size


class Group(NamedTuple):
    """The replicas that sum together."""

    key: int
    size: int
    hint: str  # How: `nccl` on GPUs, `ring` on CPUs.

    @classmethod
    def of(cls, devices: Sequence[str]) -> "Group":
        """Returns a new group of devices, one for each replica."""
        hint = "nccl" if "gpu" in devices[0].lower() else "ring"
        return cls(next(_GROUP_KEYS), len(devices), hint)

    def sum(
        self, values: Sequence[tf.Tensor], order: Sequence[tf.Variable]
    ) -> list[tf.Tensor]:
        """Sums each value over all replicas, all in one vector.

        `order` is a variable of this replica alone. Without it, TensorFlow would have
        a replica wait for the sum of the one before, which waits for all.
        """
        floats = [value.dtype for value in values if value.dtype.is_floating]
        widest = max([tf.float32, *floats], key=lambda dtype: dtype.size)
        parts = [
            value if value.dtype.is_floating else _pieces(value) for value in values
        ]
        flat = [tf.reshape(tf.cast(part, widest), [-1]) for part in parts]
        total = tf.raw_ops.CollectiveReduceV2(
            input=tf.concat(flat, 0),
            group_size=self.size,
            group_key=self.key,
            instance_key=1,
            ordering_token=[one.handle for one in order],
            merge_op="Add",
            final_op="Id",
            communication_hint=self.hint,
        )
        sums = tf.split(total, [part.shape.num_elements() for part in parts])
        shaped = [
            tf.reshape(tf.cast(one, part.dtype), part.shape)
            for one, part in zip(sums, parts, strict=True)
        ]
        return [
            one if value.dtype.is_floating else tf.bitcast(one, tf.int64)
            for one, value in zip(shaped, values, strict=True)
        ]


def _pieces(value: tf.Tensor) -> tf.Tensor:
    """Cuts int64 into pieces of 16 bits, which float32 holds exactly.

    A sum keeps them if all other replicas have zeros.
    """
    return tf.bitcast(value, tf.uint16)


class _Replica(TowerBuilder):
    """The program of a replica."""

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        group: Group,
        names: Sequence[str],
        first_tower: int,
        *,
        tower: Tower,
        update: Update,
    ) -> None:
        super().__init__(state, devices, tower=tower, update=update)
        self.first_tower, self.tower_names = first_tower, tuple(names)
        self._group = group
        with tf.device(state.device):
            self._order = tf.Variable(0.0, trainable=False)

    def _is_on_one_device(self) -> bool:
        # XLA computes an all-reduce on GPUs alone.
        return super()._is_on_one_device() and "gpu" in self.state.device

    @property
    def is_compiled(self) -> bool:
        """Whether XLA compiles the whole program."""
        return self._compiles

    def compute(self, batches: list[Batch], count: tf.Tensor | None) -> StepResult:
        """Calls the compiled program of a step, or of the `count` first of many."""
        with tf.device(self.state.device):
            if count is None:
                return self._step(batches)
            return self._steps(batches, count)

    def tune(self, batches: list[Batch], count: tf.Tensor | None) -> None:
        """Has XLA choose kernels, which the other replicas' programs will share."""
        program = self._step if count is None else self._steps
        given = [batches] if count is None else [batches, count]
        compiler = program.experimental_get_compiler_ir(*given)
        with tf.device(self.state.device):
            compiler(stage="optimized_hlo")

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
        averages = self._all_reduce(averages)
        yield None
        yield self._trace_update(self.state, averages, is_wanted)

    def _all_reduce(self, local: Averages) -> Averages:
        with tf.device(self.state.device), tf.name_scope("all_reduce"):
            return all_reduced(
                local,
                lambda values: self._group.sum(values, [self._order]),
                replicas=self._group.size,
                first_tower=self.first_tower,
                num_towers=self.num_towers,
            )

    def _warn_of_missing(self, gradients: Sequence[Gradient]) -> None:
        if self.first_tower == 0:
            super()._warn_of_missing(gradients)


class ProgramBuilder(TowerBuilder):
    """Builds the synchronous step over the programs of several replicas.

    `states` are the replicas'. `devices` names a device for each batch; the replicas
    divide them equally.
    """

    def __init__(
        self,
        states: Sequence[TrainState],
        devices: Sequence[str],
        *,
        tower: Tower,
        update: Update,
    ) -> None:
        self._states = tuple(states)
        self._share = len(devices) // len(states)
        group = Group.of([state.device for state in states])
        self._replicas = [
            _Replica(
                state,
                self._part(devices, number),
                group,
                devices,
                number * self._share,
                tower=tower,
                update=update,
            )
            for number, state in enumerate(states)
        ]
        super().__init__(states[0], devices, tower=tower, update=update)

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
        self._tune(batches, None)
        return super().step(batches)

    def steps(self, stacked: Sequence[Batch], count: int) -> StepResult:
        """Runs `count` steps without returning to Python in between."""
        self._tune(stacked, tf.constant(count))
        return super().steps(stacked, count)

    def _tune(self, batches: Sequence[Batch], count: tf.Tensor | None) -> None:
        """Tunes before each program is compiled, so that no two round differently."""
        if self.are_compiled and not self._is_tuned:
            self._replicas[0].tune(self._part(batches, 0), count)
            self._is_tuned = True

    def share(self, numbers: Sequence[int], *, variables: bool = False) -> list[int]:
        """Returns the `numbers`; can copy the first replica's variables to others."""
        if variables:
            first, *others = self._states
            for state in others:
                pairs = zip(state.variables(), first.variables(), strict=True)
                for variable, value in pairs:
                    variable.assign(value)
                state.halted.assign(first.halted)
        return [*numbers]

    def check_replicas(self, step: int) -> None:
        """Raises a `CorruptedError` if, after `step`, replicas hold other bits."""
        check_replicas(self._states, step)

    def trace_step(
        self, batches: list[Batch], is_wanted: tf.Tensor | None = None
    ) -> StepResult:
        """Builds the operations of a step: the calls of all programs, or their phases.

        The phases of all replicas alternate, so that no operation without variables
        waits for the sum of a replica before its own replica takes part.
        """
        if self.are_compiled:
            return self._calls(batches, None)
        parts = [
            replica.phases(self._part(batches, number), is_wanted)
            for number, replica in enumerate(self._replicas)
        ]
        *_, results = zip(*parts, strict=True)
        return results[0]

    def _trace_steps(self, stacked: list[Batch], count: tf.Tensor) -> StepResult:
        """Builds a loop of steps in each program, or else one loop of all programs.

        A collective of TensorFlow's own meets those of other replicas only in the same
        loop.
        """
        if self.are_compiled:
            return self._calls(stacked, count)
        return super()._trace_steps(stacked, count)

    def _calls(self, batches: list[Batch], count: tf.Tensor | None) -> StepResult:
        results = [
            replica.compute(self._part(batches, number), count)
            for number, replica in enumerate(self._replicas)
        ]
        return results[0]

    def _part(self, of_all: Sequence, number: int) -> list:
        """Returns a replica's part of a sequence over all batches."""
        return list(of_all[number * self._share : (number + 1) * self._share])

    def _is_on_one_device(self) -> bool:
        return False  # Each program is.
