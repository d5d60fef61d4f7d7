"""Estimates the memory of a step, plain and over sections, and chooses where to cut.

A sectioned step is planned by running its cycle on shapes in place of tensors: the same
code that orders a real cycle calls each function, and `memory.py` derives from the
function's graph how much memory it needs. Nothing is computed.
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
from cifar10.sections.builder import SectionedBuilder
from cifar10.sections.cutting import Call, Section, crossing, is_masked
from cifar10.sections.functions import Wrap
from cifar10.sections.tower import SectionTower
from cifar10.towers.towers import TowerBuilder
from cifar10.towers.train_state import TrainState

# How much larger than possible the largest section may be where that saves time.
_ROOM = 1.05

_NEVER = 10**18  # Bytes.


class StepCosts(NamedTuple):
    """The costs of a step.

    Attributes:
        tensors: Peak bytes of the tensors of all towers and the update, batches
            included, variables not.
        kernels: Bytes of the kernels' workspace.
        operations: Number of operations in the graphs.
    """

    tensors: int
    kernels: int
    operations: int


class _Ledger:
    """Shapes that stand for tensors, and how many bytes of them are held together."""

    def __init__(self, device: str) -> None:
        self.held = 0
        self.peak = 0
        self.workspace = 0
        self.operations = 0
        self._kind = "cpu" if memory.on("cpu", device) else "gpu"

    def hold(self, structure: Any) -> Any:
        """Returns shapes in place of tensors; each counts as long as it is referenced.

        So the plan holds a tensor for exactly as long as the code of the cycle does.
        """
        # Tensors that share memory share a shape, so that it counts once.
        shapes: dict[tuple, tf.TypeSpec] = {}

        def hold_one(tensor: Any) -> Any:
            if not isinstance(tensor, tf.Tensor):
                return self._hold_one(tensor, "")
            root = memory.root(tensor)
            key = root.name, tuple(tensor.shape)
            if key not in shapes:
                shapes[key] = self._hold_one(tensor, root.device)
            return shapes[key]

        return tf.nest.map_structure(hold_one, structure)

    def stand_in(self, function: Any) -> Callable[..., Any]:
        """Returns a stand-in for a function, from shapes to shapes."""
        peaks: dict[Any, int] = {}

        def call(*arguments: Any) -> Any:
            # Copies, because a function holds the shapes that it was traced for.
            copies = tf.nest.map_structure(_copy, arguments)
            traced = function.get_concrete_function(*copies)
            if traced not in peaks:
                peaks[traced] = self._measure(traced)
            self.peak = max(self.peak, self.held + peaks[traced])
            return self.hold(traced.structured_outputs)

        return call

    def run(self, traced: Any) -> None:
        """Counts a traced function as running now."""
        self.peak = max(self.peak, self.held + self._measure(traced))

    def costs(self) -> StepCosts:
        """Returns the costs of all that has run."""
        return StepCosts(self.peak, self.workspace, self.operations)

    def _measure(self, traced: Any) -> int:
        workspace = memory.workspace(traced.graph, traced.outputs)
        self.workspace = max(self.workspace, workspace)
        self.operations += len(traced.graph.get_operations())
        return memory.peak(traced.graph, traced.outputs, self._kind)

    def _hold_one(self, tensor: Any, device: str) -> tf.TypeSpec | None:
        if tensor is None:
            return None
        if isinstance(tensor, tf.IndexedSlices):
            shape = tf.type_spec_from_value(tensor)
            size = memory.size(tensor.values) + memory.size(tensor.indices)
        else:
            shape = tf.TensorSpec(tensor.shape, tensor.dtype)
            size = memory.size(tensor) if memory.on(self._kind, device) else 0
        self.held += size
        weakref.finalize(shape, self._release, size)
        return shape

    def _release(self, size: int) -> None:
        self.held -= size


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


def plain_step_costs(builder: TowerBuilder, batches: Sequence[tuple]) -> StepCosts:
    """Returns the costs of a step that is not sectioned.

    Args:
        builder: Builds the step.
        batches: Shapes of (inputs, labels), one for each tower.
    """
    ledger = _Ledger(builder.devices[0])
    held = ledger.hold(list(batches))
    ledger.run(builder.trace(batches))
    del held  # The batches are there until the step has run.
    return ledger.costs()


def sectioned_step_costs(
    build: Callable[[Wrap], SectionedBuilder], device: str, batches: Sequence[tuple]
) -> StepCosts:
    """Returns the costs of a step over sections.

    Args:
        build: Builds the step of one tower.
        device: The device of the tower.
        batches: Shapes of (inputs, labels), one for each batch of the tower.
    """
    ledger = _Ledger(device)
    build(ledger.stand_in).run(ledger.hold(list(batches)))
    return ledger.costs()


class Costs(NamedTuple):
    """The costs of each call of a model.

    Attributes:
        activations: Bytes that each call keeps for the gradients.
        multiplications: Multiplications of each call's forward pass.
    """

    activations: list[int]
    multiplications: list[int]


def costs(
    state: TrainState, tower: SectionTower, calls: Sequence[Call], batch: tuple
) -> Costs:
    """Returns the costs of each call of a model.

    Args:
        state: Holds the model.
        tower: Computes sections.
        calls: The model's calls.
        batch: Shapes of (inputs, labels).
    """
    section = _Marked(calls, state.model.inputs, state.model.outputs)

    def compute(start: list, inputs: list, labels: tf.Tensor) -> tuple:
        return tower.last(state, section, start, inputs, labels, [])

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
    """Chooses where to cut so that the largest section is as small as possible.

    When a section runs backward, its activations are in memory, the gradients of its
    inputs and outputs, and the boundary tensors of all earlier sections.

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
        """Returns the most bytes of the sections so far, with a further one."""
        cached = sum(carried[place] for place in [*before[1], begin])
        section = sums[end] - sums[begin] + carried[begin] + carried[end]
        return max(before[0], cached + section)

    # By the end of the first sections: their most bytes, and where they begin.
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
    # The last section is not recomputed, so it may be a little larger.
    bound = _ROOM * min(ends.values())
    last = min(begin for begin, size in ends.items() if size <= bound)
    return [*best[last][1], last][1:]


def _carried(
    model: keras.Model, calls: Sequence[Call], place: int, batch_size: int
) -> int:
    """Returns the bytes of a boundary's tensors; far too many where no cut can be."""
    tensors = crossing(model, calls[:place], calls[place:])
    if any(map(is_masked, tensors)):
        return _NEVER
    return sum(
        memory.size(tf.TensorSpec([batch_size, *tensor.shape[1:]], tensor.dtype))
        for tensor in tensors
    )
