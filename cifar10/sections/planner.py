"""Plans the step of a training: which sections, and the memory that they need."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.layers import NewSection
from cifar10.models import registry
from cifar10.sections import cutting, estimate, memory
from cifar10.sections.sectioned_tower import SectionedTower
from cifar10.sections.tower import SectionTower
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

# Memory of a process for the program of a step: a constant, and a part for each
# operation of the plain step. Measured on CPUs (`docs/lab-notes.md`).
_PROGRAM_BYTES = 10_000_000
_OPERATION_BYTES = 60_000

# A step of more batches before an update than this is planned from this many.
_TRACED_BATCHES = 3

# More sections are worth their time if they need less than this part of the memory that
# fewer need. When this many larger counts have not helped, no larger one will: the
# boundary tensors take what is saved.
_CLEARLY_LESS = 0.97
_PATIENCE = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step over some sections."""

    sections: tuple[cutting.Section, ...]  # One if the step is not sectioned.
    cuts: tuple[str, ...]  # Names of the layers that sections but the first begin with.
    # Bytes that each section keeps for its gradients; empty if the model is not a graph
    # of layers.
    activations: tuple[int, ...]
    # The peak memory of one tower's step: tensors, batches and the kernels' workspace,
    # without the variables.
    tower_bytes: int
    operations: int  # In the graphs of the step.
    # Part of the forward pass's multiplications, in convolutions and matrix products,
    # that run twice.
    recomputed: float


class Planner:
    """Plans and builds the step of a training.

    `batch` has the shapes of one batch, (inputs, labels); a tower computes `accumulate`
    of them before an update. There are `replicas` of the state in this process. The
    other arguments are those of `TowerBuilder` and `SectionedTower`.

    Attributes:
        obstacle: Why `all` has ended early; empty if it has not.
        announce: Called before each graph is traced, which takes long, with a text.
    """

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        batch: tuple,
        *,
        tower: Tower,
        update: Update,
        accumulate: int = 1,
        cache_device: str | None = None,
        replicas: int = 1,
    ) -> None:
        self._state = state
        self._devices = tuple(devices)
        self._batch = batch
        self._tower = tower
        self._update = update
        self.obstacle = ""
        self.announce: Callable[[str], None] = lambda _: None
        self._accumulate = accumulate
        self._cache_device = cache_device
        self._replicas = replicas

    def build(
        self, chosen: Sequence[cutting.Section] = (), batch_devices: Sequence[str] = ()
    ) -> TowerBuilder:
        """Builds the step over some sections, or without any over the whole model.

        There is a device for each batch, by default those of the training.
        """
        devices = [name for name in self._devices for _ in range(self._accumulate)]
        tower, update = self.tower(chosen), self._update
        return TowerBuilder(
            self._state, batch_devices or devices, tower=tower, update=update
        )

    def tower(self, chosen: Sequence[cutting.Section]) -> Tower:
        """Returns what each tower computes over some sections."""
        if len(chosen) < 2 and self._accumulate == 1:
            return self._tower
        ends = itertools.accumulate(len(section.calls) for section in chosen[:-1])
        return SectionedTower(self._tower, [*ends], self._cache_device)

    def description(self, plan: Plan) -> str:
        """Describes a plan for the first lines of a training."""
        needed = _gigabytes(self.total_bytes(plan))
        if len(plan.sections) == 1:
            return f"Sections: none; a step takes about {needed} of memory"
        return (
            f"Sections: {len(plan.sections)}, cut before {', '.join(plan.cuts)}; "
            f"about {needed} of memory instead of "
            f"{_gigabytes(self.total_bytes(self.plain))}, "
            f"{plan.recomputed:.0%} of the forward pass computed twice"
        )

    def choose(self, requested: str | None, limit: Callable[[], float]) -> Plan:
        """Plans the sections that were requested.

        They are the value of `--sections`: a number, names of layers to cut before,
        `auto`, or None for those of the model's own code. For `auto`, `limit` returns
        the bytes that a device may use.
        """
        if requested is None:
            if not has_marks(self._state.model):
                return self.plain
            marks = (isinstance(call.operation, NewSection) for call in self._calls)
            return self._cut([place for place, is_mark in enumerate(marks) if is_mark])
        if requested == "auto":
            return self._fitting(limit())
        if requested.isdecimal():
            return self.into(int(requested))
        names = [name.strip() for name in requested.split(",")]
        return self._cut(cutting.places_before(self._calls, names))

    @functools.cached_property
    def plain(self) -> Plan:
        """The plan of a step that is not sectioned."""
        whole = (cutting.WholeModel(self._state.model),)
        activations: tuple[int, ...] = ()
        if registry.is_graph(self._state.model):
            activations = (sum(self._costs.activations),)
        return Plan(whole, (), activations, *self._step_costs(whole), 0.0)

    def into(self, count: int) -> Plan:
        """Plans a number of sections such that the largest is as small as possible."""
        if count == 1:
            return self.plain
        if count > len(self._calls):
            raise UsageError(
                f"--sections {count}: the model has {len(self._calls)} layers, and "
                "each section needs one.\nGive a smaller number."
            )
        return self._cut(
            estimate.balanced(
                self._state.model,
                self._calls,
                self._costs.activations,
                self._batch[0].shape[0],
                count,
            )
        )

    def all(self) -> Iterator[Plan]:
        """Plans one section, two, and so on, while more of them need clearly less."""
        smallest = self.plain
        yield smallest
        count, useless = 1, 0
        while useless < _PATIENCE:
            count, useless = count + 1, useless + 1
            try:
                plan = self.into(count)
            except UsageError as error:
                self.obstacle = str(error)
                return
            if plan.tower_bytes < _CLEARLY_LESS * smallest.tower_bytes:
                smallest, useless = plan, 0
                yield smallest

    def _fitting(self, limit: float) -> Plan:
        for plan in self.all():
            if self.total_bytes(plan) <= limit:
                return plan
        why = f" More are not possible: {self.obstacle}" if self.obstacle else ""
        raise UsageError(
            f"--sections auto: {len(plan.sections)} sections still take "
            f"{_gigabytes(self.total_bytes(plan))}, and there are {_gigabytes(limit)}."
            f"{why}\nGive a smaller --batch_size, and --accumulate to make up for it."
        )

    def bytes_so_far(self) -> int:
        """Returns the part of `total_bytes` that existing variables hold already."""
        if self._devices[0].startswith("/cpu") or self._state.device in self._devices:
            return self._replicas * sum(self.variable_bytes().values())
        return 0

    def total_bytes(self, plan: Plan) -> int:
        """Returns the memory of each GPU, or of the CPU for all towers together.

        The workspace of kernels is counted as on CPUs.
        """
        variables = self.variable_bytes()
        everything = sum(variables.values())
        if self._devices[0].startswith("/cpu"):
            program = _PROGRAM_BYTES + _OPERATION_BYTES * self.plain.operations
            towers = plan.tower_bytes * len(self._devices)
            return program + everything * self._replicas + towers
        on_gpu = self._state.device == self._devices[0]
        return plan.tower_bytes + (everything if on_gpu else variables["model"])

    def variable_bytes(self) -> dict[str, int]:
        """Returns the bytes of the variables: `model`, `averages`, `optimizer`."""
        state = self._state
        return {
            "model": _bytes(variable.value for variable in state.model.variables),
            "averages": _bytes(state.averages),
            "optimizer": _bytes(slot.value for slot in state.optimizer.variables),
        }

    def gradient_bytes(self) -> int:
        """Returns the bytes of one tower's gradients."""
        trainable = self._state.model.trainable_variables
        return _bytes(variable.value for variable in trainable)

    @functools.cached_property
    def _calls(self) -> list[cutting.Call]:
        return cutting.calls_of(self._state.model)

    @functools.cached_property
    def _costs(self) -> estimate.Costs:
        self.announce("Tracing the layers ...")
        # Where XLA fuses operations, their tensors cannot be seen.
        tower = Tower(self._tower.inference, self._tower.loss)
        compute = SectionTower(self._state, tower)
        return estimate.costs(self._state.model, compute, self._calls, self._batch)

    def _cut(self, places: Sequence[int]) -> Plan:
        places = [place for place in places if place]  # The first section's is 0.
        if not places:
            return self.plain
        chosen = cutting.cut(self._state.model, self._calls, places)
        bounds = [0, *places, len(self._calls)]
        activations, multiplications = (
            [sum(of_calls[begin:end]) for begin, end in itertools.pairwise(bounds)]
            for of_calls in self._costs
        )
        return Plan(
            tuple(chosen),
            tuple(self._calls[place].operation.name for place in places),
            tuple(activations),
            *self._step_costs(chosen),
            sum(multiplications[:-1]) / max(1, sum(multiplications)),
        )

    def _step_costs(self, chosen: Sequence[cutting.Section]) -> tuple[int, int]:
        """Returns `tower_bytes` and `operations` of a plan."""
        self.announce(f"Tracing a step with --sections {len(chosen)} ...")
        count = min(self._accumulate, _TRACED_BATCHES)
        tower_bytes, operations = self._traced_costs(chosen, count)
        if more := self._accumulate - count:
            # Each further batch adds what the last one has added.
            fewer_bytes, fewer_operations = self._traced_costs(chosen, count - 1)
            tower_bytes += more * (tower_bytes - fewer_bytes)
            operations += more * (operations - fewer_operations)
        return tower_bytes, operations

    def _traced_costs(
        self, chosen: Sequence[cutting.Section], num_batches: int
    ) -> tuple[int, int]:
        batches = [self._batch] * num_batches
        traced = self.build(chosen, self._devices[:1] * num_batches).trace(batches)
        kind = "cpu" if memory.on("cpu", self._devices[0]) else "gpu"
        tensors = memory.peak(traced.graph, traced.outputs, kind)
        kernels = memory.workspace(traced.graph, traced.outputs)
        # The batches are in memory until the step has run.
        held = sum(map(memory.size, tf.nest.flatten(batches)))
        return held + tensors + kernels, memory.num_operations(traced.graph)


def has_marks(model: keras.Model) -> bool:
    """Returns whether the model's own code begins sections, with `NewSection`."""
    return registry.is_graph(model) and any(
        isinstance(layer, NewSection) for layer in model.layers
    )


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def _bytes(variables: Iterable[tf.Variable]) -> int:
    return sum(memory.size(variable) for variable in variables)
