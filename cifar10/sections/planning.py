"""Plans where a model is cut into sections, and the memory of a step over them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from cifar10.config.fields import Memory
from cifar10.errors import UsageError
from cifar10.layers import NewSection
from cifar10.models.layer_tree import is_graph
from cifar10.sections import cutting, memory
from cifar10.sections.sectioned_tower import SectionedTower
from cifar10.towers.devices import Placement
from cifar10.towers.towers import Tower
from cifar10.towers.train_state import TrainState

# Memory of a process for the program of a step: a constant, a part for each operation
# that convolves in the plain step, and copies of the trainable variables: oneDNN's, and
# new values beside the old ones. Measured on CPUs (`docs/lab-notes.md`).
_PROGRAM_BYTES = 8_000_000
_CONVOLUTION_BYTES = 1_500_000
_COPIES = 7
# So many tensors of a layer there are at least while its gradient is computed, however
# small its section: its input, its output and the gradient of that.
_OF_ONE_LAYER = 3

# More sections are worth their time if they need less than this part of the memory that
# fewer need. When this many larger counts have not helped, no larger one will: the
# boundary tensors take what is saved.
_CLEARLY_LESS = 0.97
_PATIENCE = 3

# How much larger than necessary the largest section may be where that saves time.
_ROOM = 1.05

# Part of the free memory that steps may use; the rest is for the input and checkpoints.
_PART_FOR_STEPS = 0.85


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step over some sections.

    Attributes:
        places: As `cutting.cut` takes them; empty if the model is not cut.
        cuts: Names of the layers that sections but the first begin with.
        tower_bytes: The peak of one tower's step: tensors, batches and the kernels'
            workspace, without the variables.
        total_bytes: The peak of each GPU, or of the CPU for all towers together, with
            the variables.
    """

    places: tuple[int, ...]
    cuts: tuple[str, ...]
    tower_bytes: int
    total_bytes: int

    @property
    def count(self) -> int:
        """The number of sections; 1 if the model is not cut."""
        return len(self.places) + 1


@dataclasses.dataclass(frozen=True, eq=False)
class Planner:
    """Plans the step of a training.

    Attributes:
        state: What the step updates.
        tower: What each tower computes, not sectioned.
        devices: A name for each tower of this process.
        images: The shape and type of one batch of a tower: [batch, ...].
        accumulate: How many batches a tower computes before an update.
        replicas: How many sets of the variables are in this process.
    """

    state: TrainState
    tower: Tower
    devices: Sequence[str]
    images: tf.TensorSpec
    accumulate: int = 1
    replicas: int = 1

    def sectioned(self, plan: Plan) -> Tower:
        """Returns what each tower computes over the sections of a plan."""
        return SectionedTower(self.tower, plan.places) if plan.places else self.tower

    def choose(self, requested: str | None, limit: float = math.inf) -> Plan:
        """Plans the sections that were requested.

        Args:
            requested: As `--sections`: a number, names of layers to cut before, `auto`,
                or None for the sections of the model's own code.
            limit: The bytes that `Plan.total_bytes` may be with `auto`.

        Raises:
            UsageError: The model cannot be cut there, or no division fits.
        """
        if requested is None:
            operations = [call.operation for call in self._calls]
            return self._cut([n for n, one in enumerate(operations) if _is_mark(one)])
        if requested == "auto":
            return self._fitting(limit)
        if requested.isdecimal():
            return self.into(int(requested))
        names = [name.strip() for name in requested.split(",")]
        return self._cut(cutting.places_before(self._calls, names))

    def into(self, count: int) -> Plan:
        """Plans a number of sections such that the largest is as small as possible."""
        if count == 1:
            return self.plain
        if count > len(self._calls):
            model = self.state.model
            raise UsageError(
                f"--sections {count}: model {model.name} has {len(self._calls)} "
                "layers, and each section needs one.\nGive a smaller number. A "
                f"{type(model).__name__} counts as one layer unless it is a "
                "keras.Sequential, or a keras.Model(inputs, outputs) with one output."
            )
        return self._cut(balanced(self._costs.kept, self._between, count))

    @functools.cached_property
    def plain(self) -> Plan:
        """The plan of a step that is not sectioned."""
        return self._cut([])

    def all(self) -> Iterator[Plan]:
        """Plans one section, two, and so on, while more of them need clearly less."""
        smallest = self.plain
        yield smallest
        count = 1
        while count <= smallest.count + _PATIENCE:
            count += 1
            try:
                plan = self.into(count)
            except UsageError:
                return
            if plan.tower_bytes < _CLEARLY_LESS * smallest.tower_bytes:
                smallest = plan
                yield smallest

    def _fitting(self, limit: float) -> Plan:
        for plan in self.all():
            if plan.total_bytes <= limit:
                return plan
        self.into(plan.count + 1)  # Raises the reason if the model cannot be cut.
        raise UsageError(
            f"--sections auto: {plan.count} sections still take "
            f"{_gigabytes(plan.total_bytes)}, and there are {_gigabytes(limit)}.\n"
            "Give a smaller --batch_size, and --accumulate to make up for it."
        )

    def description(self, plan: Plan) -> str:
        """Describes a plan for the first lines of a training."""
        needed = _gigabytes(plan.total_bytes)
        if not plan.places:
            return f"Sections: none; a step takes about {needed} of memory"
        return (
            f"Sections: {plan.count}, cut before {', '.join(plan.cuts)}; about "
            f"{needed} of memory instead of {_gigabytes(self.plain.total_bytes)}"
        )

    @property
    def variable_bytes(self) -> int:
        """The bytes of one set of the variables, with averages and optimizer."""
        return _bytes(self.state.variables())

    @property
    def gradient_bytes(self) -> int:
        """The bytes of one tower's gradients."""
        return _bytes(self.state.model.trainable_variables)

    @property
    def bytes_so_far(self) -> int:
        """The part of `Plan.total_bytes` that existing variables hold."""
        if self._on_cpu or self.state.device in self.devices:
            return self.replicas * self.variable_bytes
        return 0

    @property
    def _on_cpu(self) -> bool:
        return self.devices[0].startswith("/cpu")

    @property
    def _labels(self) -> tf.TensorSpec:
        return tf.TensorSpec(self.images.shape[:1], tf.int64)

    @functools.cached_property
    def _graph(self) -> keras.Model:
        return cutting.graph_of(self.state.model, self.images.shape[1:])

    @functools.cached_property
    def _calls(self) -> list[cutting.Call]:
        return cutting.calls_of(self._graph)

    @functools.cached_property
    def _between(self) -> list[int]:
        """The bytes of the tensors before each call but the first."""
        calls = self._calls
        between = []
        for place in range(1, len(calls)):
            tensors = cutting.crossing(self._graph, calls[:place], calls[place:])
            shapes = [(self.images.shape[0], *tensor.shape[1:]) for tensor in tensors]
            specs = map(tf.TensorSpec, shapes, [tensor.dtype for tensor in tensors])
            between.append(sum(map(memory.size, specs)))
        return between

    @functools.cached_property
    def _costs(self) -> memory.Costs:
        """Traces the model, its loss and their gradients; nothing is computed."""
        (section,) = cutting.cut(self._graph, [])

        @tf.function(autograph=False)
        def compute(variables: list, start: list, images: tf.Tensor) -> tuple:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                outputs, statistics, penalties = self.tower.inference(
                    section, variables, start, [images], training=True
                )
                metrics = self.tower.loss(outputs[0], labels, penalties)
            gradients = tape.gradient(metrics["total_loss"], variables)
            return metrics, statistics, gradients

        labels = tf.zeros(self._labels.shape, self._labels.dtype)
        variables = [*map(_spec, section.trainable_variables)]
        start = [*map(_spec, section.non_trainable_variables)]
        traced = compute.get_concrete_function(variables, start, self.images)
        return memory.costs(traced.graph, traced.outputs, section.ends)

    def _cut(self, places: Sequence[int]) -> Plan:
        places = tuple(place for place in places if place)  # The first section's is 0.
        cutting.cut(self._graph, places)  # Refuses a boundary that has a mask.
        costs, gradients = self._costs, self.gradient_bytes
        tensors = max(
            _bytes_of_sections(costs.kept, self._between, places),
            _OF_ONE_LAYER * max(self._between, default=0),
        )
        # All batches stay in memory until the step has run; gradients are added up.
        batch = memory.size(self.images) + memory.size(self._labels)
        sums = gradients if self.accumulate == 1 else 2 * gradients
        tower_bytes = self.accumulate * batch + sums + tensors + costs.workspace
        if self._on_cpu:
            total = _PROGRAM_BYTES + _CONVOLUTION_BYTES * costs.convolutions
            total += _COPIES * gradients + self.replicas * self.variable_bytes
            total += len(self.devices) * tower_bytes
        else:
            has_all = self.state.device == self.devices[0]
            model = _bytes(self.state.model.variables)
            total = tower_bytes + (self.variable_bytes if has_all else model)
        return Plan(
            places,
            tuple(self._calls[place].operation.name for place in places),
            tower_bytes,
            total,
        )


def _bytes_of_sections(
    activations: Sequence[int], between: Sequence[int], places: Sequence[int]
) -> int:
    """Returns what the largest section takes, as `balanced` counts it."""
    bounds, carried = [0, *places, len(activations)], [0, *between, 0]
    return max(
        sum(activations[begin:end])
        + carried[begin]
        + carried[end]
        + sum(carried[place] for place in places if place <= begin)
        for begin, end in itertools.pairwise(bounds)
    )


def balanced(
    activations: Sequence[int], between: Sequence[int], count: int
) -> list[int]:
    """Chooses where to cut so that the largest section is as small as possible.

    When a section runs backward, memory holds its activations, the gradients of its
    inputs and outputs, and the boundary tensors of all earlier sections.

    Args:
        activations: Bytes that each call keeps for its gradients.
        between: Bytes of the boundary's tensors before each call but the first.
        count: The number of sections.

    Returns:
        The places of the calls at which sections but the first one begin.
    """
    total = len(activations)
    sums = [0, *itertools.accumulate(activations)]
    carried = [0, *between, 0]

    # The first sections: bytes of the largest with what waits meanwhile, bytes of what
    # waits between them, and where they begin.
    def extended(before: tuple, begin: int, end: int) -> tuple:
        most, cached, begins = before
        cached += carried[begin]
        section = sums[end] - sums[begin] + carried[begin] + carried[end]
        return max(most, cached + section), cached, [*begins, begin]

    best: dict[int, list[tuple]] = {0: [(0, 0, [])]}  # By where they end.
    for number in range(1, count):
        longer: dict[int, list[tuple]] = {end: [] for end in range(number, total)}
        for end, chosen in longer.items():
            earlier = [begin for begin in best if begin < end]
            for cut in sorted(extended(b, n, end) for n in earlier for b in best[n]):
                if not chosen or cut[1] < chosen[-1][1]:  # Else worse in both.
                    chosen.append(cut)
        best = longer
    cuts = {n: min(extended(b, n, total) for b in best[n]) for n in best}
    # The last section is not recomputed, so it may be a little larger.
    bound = _ROOM * min(cuts.values())[0]
    return cuts[min(begin for begin in cuts if cuts[begin][0] <= bound)][2][1:]


def _is_mark(layer: keras.Layer) -> bool:
    return isinstance(layer, NewSection)


def _bytes(variables: Iterable[tf.Variable | keras.Variable]) -> int:
    return sum(map(memory.size, map(_spec, variables)))


def _spec(value: tf.Variable | keras.Variable) -> tf.TensorSpec:
    return tf.TensorSpec(value.shape, value.dtype)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def is_requested(requested: Memory, model: keras.Model) -> bool:
    """Returns whether a flag or the model's own code wants sections."""
    return (
        requested.sections not in (None, "1")
        or requested.memory_limit is not None
        or (
            requested.sections is None
            and is_graph(model)
            and any(map(_is_mark, model.layers))
        )
    )


def build_tower(
    requested: Memory, placement: Placement, planner: Planner, sharing: int = 1
) -> tuple[Tower, str | None]:
    """Builds a tower over the sections that the flags request.

    `sharing` is how many workers share this machine. Returns the tower, and a
    description of its sections for the first lines; None if none are requested.
    """
    limit = math.inf
    if requested.sections == "auto":
        limit = memory_limit(requested.memory_limit, placement, planner, sharing)
    elif requested.memory_limit is not None:
        raise UsageError(
            f"--memory_limit {requested.memory_limit}: only --sections auto uses it. "
            "Add that, or leave it out."
        )
    plan = planner.choose(requested.sections, limit)
    if plan.places and not placement.on_gpus:
        memory.return_freed_blocks()
    is_told = plan.places or requested.sections == "auto"
    return planner.sectioned(plan), planner.description(plan) if is_told else None


def memory_limit(
    gigabytes: float | None, placement: Placement, planner: Planner, sharing: int = 1
) -> float:
    """Returns how many bytes a training may use on a GPU, or on the CPU.

    These are the `gigabytes` if given, else 85 % of what is free. The `sharing` workers
    share a CPU evenly; each is assumed to have its own GPUs.
    """
    if gigabytes:
        return gigabytes * 1e9
    part = _PART_FOR_STEPS if placement.on_gpus else _PART_FOR_STEPS / sharing
    return planner.bytes_so_far + part * memory.free(placement)
