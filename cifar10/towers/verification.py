"""Runs steps that two devices compute (`--verify_steps`)."""

from collections.abc import Sequence

from cifar10.errors import CorruptedError
from cifar10.towers.rounding import relative_difference
from cifar10.towers.towers import Batch, StepResult, TowerBuilder


def verified_step(
    towers: TowerBuilder, batches: Sequence[Batch], bound: float
) -> StepResult:
    """Runs a step; undoes it with a `CorruptedError` if other devices differ."""
    state, devices = towers.state, towers.devices
    of_each = len(devices) // len({*devices})  # Batches per device.
    elsewhere = devices[of_each:] + devices[:of_each]
    repeated = towers.results(batches, elsewhere)
    before = [(one, one.read_value()) for one in state.variables()]
    result, first = towers.step_and_results(batches)
    names = [variable.path for variable in state.model.trainable_variables]
    for tower, pair in enumerate(zip(first, repeated, strict=True)):
        both = zip(names, *(one.gradients for one in pair), strict=True)
        far, name = max((relative_difference(*two), name) for name, *two in both)
        if far > bound:
            for variable, value in before:
                variable.assign(value)
            where = f"tower {tower} on {devices[tower]} and {elsewhere[tower]}"
            what = f"gradients of {name} differ by {far:.2g} of their norm, {where}"
            raise CorruptedError(int(state.global_step) + 1, what)
    return result
