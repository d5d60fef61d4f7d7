"""How much memory a step takes, plain and over sections, and where to cut.

A step is planned by running its cycle on shapes in place of tensors: the same code that
orders a real cycle asks for each function, and `memory.py` tells from the function's
graph what it takes. Nothing is computed.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from cifar10.sections import memory
from cifar10.sections.cutting import Call, Section, crossing, is_masked
from cifar10.sections.tower import SectionTower
from cifar10.towers.builder import TowerBuilder
from cifar10.towers.train_state import TrainState

# How much more than the least a section may take, where that saves time.
_ROOM = 1.05

_NEVER = 10**18  # Bytes.


class _Ledger:
    """Shapes that stand for tensors, and how many bytes of them are held together."""

    def __init__(self, kind: str) -> None:
        self.held = 0
        self.peak = 0
        self.workspace = 0
        self.operations = 0
        self._kind = kind

    def hold(self, structure: Any) -> Any:
        """Returns shapes in place of tensors; each counts until nobody refers to it."""
        # Tensors that share memory share a shape, so that it counts once.
        shapes: dict[tuple, tf.TypeSpec] = {}

        def hold_one(tensor: Any) -> Any:
            if not isinstance(tensor, tf.Tensor):
                return self._hold_one(tensor, "")
            own = memory.root(tensor)
            key = own.name, tuple(tensor.shape)
            if key not in shapes:
                shapes[key] = self._hold_one(tensor, own.device)
            return shapes[key]

        return tf.nest.map_structure(hold_one, structure)

    def stand_in(self, function: Any) -> Callable[..., Any]:
        """Returns what stands for a function: from shapes, it returns shapes."""
        peaks: dict[Any, int] = {}

        def call(*arguments: Any) -> Any:
            # Copies, because a function holds the shapes that it was traced for.
            copies = tf.nest.map_structure(_copy, arguments)
            traced = function.get_concrete_function(*copies)
            if traced not in peaks:
                peaks[traced] = memory.peak(traced.graph, traced.outputs, self._kind)
                workspace = memory.workspace(traced.graph, traced.outputs)
                self.workspace = max(self.workspace, workspace)
                self.operations += len(traced.graph.get_operations())
            self.peak = max(self.peak, self.held + peaks[traced])
            return self.hold(traced.structured_outputs)

        return call

    def _hold_one(self, tensor: Any, device: str) -> tf.TypeSpec | None:
        if tensor is None:
            return None
        if isinstance(tensor, tf.IndexedSlices):
            shape = tf.type_spec_from_value(tensor)
            taken = memory.size(tensor.values) + memory.size(tensor.indices)
        else:
            shape = tf.TensorSpec(tensor.shape, tensor.dtype)
            taken = memory.size(tensor) if memory.on(self._kind, device) else 0
        self.held += taken
        weakref.finalize(shape, self._forget, taken)
        return shape

    def _forget(self, taken: int) -> None:
        self.held -= taken


def _copy(shape: Any) -> Any:
    return copy.copy(shape) if isinstance(shape, tf.TypeSpec) else shape


class _Marked(Section):
    """A section that notes how many operations its graph has after each call."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ends: list[int] = []

    def make(self, call: Call, values: dict[int, tf.Tensor], **options: Any) -> None:
        """Makes one call."""
        super().make(call, values, **options)
        self.ends.append(len(tf.compat.v1.get_default_graph().get_operations()))


class StepCosts(NamedTuple):
    """What a step takes.

    Attributes:
        tensors: The most bytes at a time of the tensors of all towers and the update,
            batches included, without the variables.
        kernels: Bytes that kernels take for themselves.
        operations: How many its graphs have.
    """

    tensors: int
    kernels: int
    operations: int


def step_costs(towers: TowerBuilder, batch: Sequence[tuple]) -> StepCosts:
    """Returns what a step takes.

    Args:
        towers: Builds the step.
        batch: Shapes of (inputs, labels), one for each tower and batch.
    """
    ledger = _Ledger("cpu" if memory.on("cpu", towers.devices[0]) else "gpu")
    towers.wrapped(ledger.stand_in).step(ledger.hold(list(batch)))
    return StepCosts(ledger.peak, ledger.workspace, ledger.operations)


class Costs(NamedTuple):
    """What each call of a model costs.

    Attributes:
        activations: Bytes that it keeps for the gradients.
        multiplications: Of its forward pass.
    """

    activations: list[int]
    multiplications: list[int]


def costs(
    state: TrainState, tower: SectionTower, calls: Sequence[Call], batch: tuple
) -> Costs:
    """Returns what each call of a model costs.

    Args:
        state: With the model.
        tower: Computes sections.
        calls: The model's calls.
        batch: Shapes of (inputs, labels).
    """
    section = _Marked(calls, state.model.inputs, state.model.outputs)

    def compute(start: list, taken: list, labels: tf.Tensor) -> tuple:
        return tower.last(state, section, start, taken, labels, [])

    traced = tf.function(compute, autograph=False).get_concrete_function(
        [tf.TensorSpec(v.shape, v.dtype) for v in section.non_trainable_variables],
        tf.nest.flatten(batch[0]),
        batch[1],
    )
    return Costs(
        memory.kept(traced.graph, traced.outputs, section.ends),
        memory.multiplications(traced.graph, section.ends),
    )


def balanced(
    model: keras.Model,
    calls: Sequence[Call],
    activations: Sequence[int],
    batch_size: int,
    count: int,
) -> list[int]:
    """Chooses where to cut so that the largest section takes as little as it can.

    When a section runs backward there are its own activations, the gradients of what it
    gives and of what it takes, and the boundary tensors of all earlier sections.

    Args:
        model: The model.
        calls: Its calls.
        activations: Bytes that each call keeps.
        batch_size: Images of a batch.
        count: How many sections.

    Returns:
        The calls at which sections begin, but the first one.
    """
    total = len(calls)
    sums = [0, *itertools.accumulate(activations)]
    between = [_carried(model, calls, n, batch_size) for n in range(1, total)]
    carried = [0, *between, 0]

    def largest(before: tuple[int, list[int]], begin: int, end: int) -> int:
        """The most bytes of the sections so far, with a further one."""
        cached = sum(carried[place] for place in [*before[1], begin])
        own = sums[end] - sums[begin] + carried[begin] + carried[end]
        return max(before[0], cached + own)

    # By where the first sections end: the most bytes, and where they begin.
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for number in range(1, count):
        best = {
            end: min(
                (largest(before, begin, end), [*before[1], begin])
                for begin, before in best.items()
                if begin < end
            )
            for end in range(number, total)
        }
    ends = {begin: largest(before, begin, total) for begin, before in best.items()}
    # The last section is not computed twice, so it may take a little more.
    bound = _ROOM * min(ends.values())
    last = min(begin for begin, size in ends.items() if size <= bound)
    return [*best[last][1], last][1:]


def _carried(
    model: keras.Model, calls: Sequence[Call], place: int, batch_size: int
) -> int:
    """Returns the bytes that a boundary keeps; too many where it cannot be."""
    tensors = crossing(model, calls[:place], calls[place:])
    if any(map(is_masked, tensors)):
        return _NEVER
    return sum(
        memory.size(tf.TensorSpec([batch_size, *tensor.shape[1:]], tensor.dtype))
        for tensor in tensors
    )
