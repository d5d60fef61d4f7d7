"""Plans the step of a training: which sections, and what it takes in memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from cifar10 import model as models
from cifar10.errors import UsageError
from cifar10.layers import NewSection
from cifar10.sections import cutting, estimate, memory
from cifar10.sections.builder import SectionedBuilder
from cifar10.sections.functions import SectionFunctions
from cifar10.sections.plan import Plan, gigabytes
from cifar10.sections.tower import SectionTower
from cifar10.towers.builder import TowerBuilder
from cifar10.towers.tower import Inference, Loss, Tower
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

# What a process takes for the program of a step: at least so much, and so much for
# each operation of the plain step. Measured on CPUs (`docs/lab-notes.md`).
_PROGRAM_BYTES = 10_000_000
_OPERATION_BYTES = 60_000

# More sections are worth their time where they take less than such a part of what fewer
# do. After so many numbers of which none does, none will: boundary tensors take what is
# saved.
_CLEARLY = 0.97
_PATIENCE = 3


class Planner:
    """Plans and builds the step of a training.

    Args:
        state: What the step updates.
        devices: One device name per tower.
        batch: Shapes of one batch, (inputs, labels).
        inference: As for `Tower`.
        loss: As for `Tower`.
        tower: What each tower computes where it is not sectioned.
        update: The rule of the update.
        accumulate: Batches that a tower computes before an update.
        cache_device: Where boundary tensors wait; None: where they are computed.

    Attributes:
        tower: As above.
        update: As above.
        obstacle: Why `all` has ended early; empty if it has not.
    """

    def __init__(
        self,
        state: TrainState,
        devices: Sequence[str],
        batch: tuple,
        *,
        inference: Inference,
        loss: Loss,
        tower: Tower,
        update: Update,
        accumulate: int = 1,
        cache_device: str | None = None,
    ) -> None:
        self._state = state
        self._devices = tuple(devices)
        self._batch = batch
        self.tower = tower
        self._section_tower = SectionTower(inference, loss)
        self.update = update
        self.obstacle = ""
        self._accumulate = accumulate
        self._cache_device = cache_device

    def build(self, chosen: Sequence[cutting.Section] = ()) -> TowerBuilder:
        """Builds the step over some sections; without any, that of whole towers."""
        whole = [cutting.WholeModel(self._state.model)]
        return self._build(chosen or whole, self._devices)

    def description(self, plan: Plan) -> str:
        """Says what a plan does, for the first lines of a training."""
        plain = self.plain()
        if len(plan.sections) == 1:
            need = gigabytes(self.total_bytes(plain))
            return f"Sections: none; a step takes about {need} of memory"
        now, before = self.total_bytes(plan), self.total_bytes(plain)
        return (
            f"Sections: {len(plan.sections)}, cut before {', '.join(plan.begin)}; "
            f"about {gigabytes(now)} of memory in place of {gigabytes(before)}, "
            f"{plan.twice:.0%} of the forward pass computed twice"
        )

    def choose(self, asked: str | None, limit: Callable[[], float]) -> Plan | None:
        """Plans what `--sections` says.

        Args:
            asked: A number, names of layers, `auto`, or None for the model's own.
            limit: Returns the bytes that a device may take; for `auto`.

        Returns:
            The plan; None for a step that is not sectioned.

        Raises:
            UsageError: The model cannot be cut so, or nothing fits.
        """
        if asked is None:
            plan = self.marked()
        elif asked == "auto":
            plan = self._fitting(limit())
        elif asked.isdecimal():
            plan = self.into(int(asked))
        else:
            plan = self.before([name.strip() for name in asked.split(",")])
        if self._accumulate > 1:
            return plan or self.plain()
        return plan if plan and len(plan.sections) > 1 else None

    def plain(self) -> Plan:
        """Plans a step that is not sectioned."""
        return self._plain

    @functools.cached_property
    def _plain(self) -> Plan:
        whole = (cutting.WholeModel(self._state.model),)
        activations: tuple[int, ...] = ()
        if models.is_graph(self._state.model):
            activations = (sum(self._costs.activations),)
        costs = self._plain_costs
        return Plan(whole, (), activations, costs.tensors + costs.kernels, 0.0)

    @functools.cached_property
    def _plain_costs(self) -> estimate.StepCosts:
        return self._step_costs([cutting.WholeModel(self._state.model)])

    def before(self, names: Sequence[str]) -> Plan:
        """Plans sections that begin with the layers of some names.

        Raises:
            UsageError: There is no such layer, or it cannot be cut there.
        """
        return self._cut(cutting.places_before(self._calls, names))

    def marked(self) -> Plan | None:
        """Plans the sections that the model's own code begins; None without any."""
        model = self._state.model
        if not models.is_graph(model):
            return None
        places = [
            place
            for place, call in enumerate(self._calls)
            if isinstance(call.operation, NewSection) and place
        ]
        return self._cut(places) if places else None

    def into(self, count: int) -> Plan:
        """Plans a number of sections, such that the largest is small.

        Raises:
            UsageError: The model has not so many layers.
        """
        if count == 1:
            return self.plain()
        if count > len(self._calls):
            raise UsageError(
                f"--sections {count}: the model consists of {len(self._calls)} layers, "
                "and each section has at least one."
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
        """Plans one section, two, and so on, while more of them take clearly less."""
        least = self.plain()
        yield least
        count, in_vain = 1, 0
        while in_vain < _PATIENCE:
            count, in_vain = count + 1, in_vain + 1
            try:
                plan = self.into(count)
            except UsageError as error:
                self.obstacle = str(error)
                return
            if plan.tower_bytes < _CLEARLY * least.tower_bytes:
                least, in_vain = plan, 0
                yield least

    def _fitting(self, limit: float) -> Plan:
        for plan in self.all():
            if self.total_bytes(plan) <= limit:
                return plan
        why = f" More are not possible: {self.obstacle}" if self.obstacle else ""
        raise UsageError(
            f"--sections auto: {len(plan.sections)} sections still take "
            f"{gigabytes(self.total_bytes(plan))}, and there are {gigabytes(limit)}. "
            f"Give a smaller --batch_size, and --accumulate to make up for it.{why}"
        )

    def bytes_so_far(self) -> int:
        """Returns what there is already of `total_bytes`, with the variables made."""
        if self._devices[0].startswith("/cpu") or self._state.device in self._devices:
            return sum(self.variable_bytes().values())
        return 0

    def total_bytes(self, plan: Plan) -> int:
        """Returns what a device takes: each GPU, or the CPU for all towers together.

        What kernels take for themselves is in it as on CPUs.
        """
        variables = self.variable_bytes()
        home = sum(variables.values())
        if self._devices[0].startswith("/cpu"):
            program = _PROGRAM_BYTES + _OPERATION_BYTES * self._plain_costs.operations
            return program + home + plan.tower_bytes * len(self._devices)
        beside = self._state.device == self._devices[0]
        return plan.tower_bytes + (home if beside else variables["model"])

    def variable_bytes(self) -> dict[str, int]:
        """Returns the bytes of the variables: `model`, `averages`, `optimizer`."""
        state = self._state
        return {
            "model": _bytes(variable.value for variable in state.model.variables),
            "averages": _bytes(state.averages),
            "optimizer": _bytes(one.value for one in state.optimizer.variables),
        }

    def gradient_bytes(self) -> int:
        """Returns the bytes of one tower's gradients."""
        return _bytes(one.value for one in self._state.model.trainable_variables)

    @functools.cached_property
    def _calls(self) -> list[cutting.Call]:
        return cutting.calls_of(self._state.model)

    @functools.cached_property
    def _costs(self) -> estimate.Costs:
        return estimate.costs(
            self._state, self._section_tower, self._calls, self._batch
        )

    def _cut(self, places: Sequence[int]) -> Plan:
        if not places:
            return self.plain()
        chosen = cutting.cut(self._state.model, self._calls, places)
        bounds = [0, *places, len(self._calls)]
        activations, multiplications = (
            [sum(of_calls[begin:end]) for begin, end in itertools.pairwise(bounds)]
            for of_calls in self._costs
        )
        costs = self._step_costs(chosen)
        return Plan(
            tuple(chosen),
            tuple(self._calls[place].operation.name for place in places),
            tuple(activations),
            costs.tensors + costs.kernels,
            sum(multiplications[:-1]) / max(1, sum(multiplications)),
        )

    def _step_costs(self, chosen: Sequence[cutting.Section]) -> estimate.StepCosts:
        towers = self._build(chosen, self._devices[:1])
        return estimate.step_costs(towers, [self._batch] * self._accumulate)

    def _build(
        self, chosen: Sequence[cutting.Section], devices: Sequence[str]
    ) -> TowerBuilder:
        if len(chosen) == 1 and self._accumulate == 1:
            return TowerBuilder(
                self._state, devices, tower=self.tower, update=self.update
            )
        functions = SectionFunctions(
            self._state, devices, self._section_tower, self._cache_device
        )
        return SectionedBuilder(
            self._state,
            devices,
            tower=self.tower,
            update=self.update,
            sections=chosen,
            functions=functions.build(chosen),
            accumulate=self._accumulate,
        )


def _bytes(variables: Iterable[tf.Variable]) -> int:
    return sum(memory.size(variable) for variable in variables)
