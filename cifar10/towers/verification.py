"""Runs steps on two devices (`--verify_steps`), and checks variables before a save."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from cifar10.errors import CorruptedError
from cifar10.models.layer_tree import written_variables
from cifar10.towers.copies import widened
from cifar10.towers.rounding import relative_difference
from cifar10.towers.towers import Batch, StepResult, TowerBuilder
from cifar10.towers.update import TrainState


def verified_step(
    towers: TowerBuilder, batches: Sequence[Batch], bound: float
) -> StepResult:
    """Runs a step that other devices compute too, and returns its result.

    Args:
        towers: The towers of the step.
        batches: A batch for each of them.
        bound: Largest norm of a gradient's difference, relative to its norm; 0: equal.

    Raises:
        CorruptedError: Devices differ by more; the variables are as before the step.
    """
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


def check_replicas(states: Sequence[TrainState], step: int) -> None:
    """Raises a `CorruptedError` if, after a step, two replicas hold different bits."""
    model, optimizer = states[0].model, states[0].optimizer
    trained = [*model.trainable_variables, *model.non_trainable_variables]
    paths = [variable.path for variable in (*trained, *optimizer.variables)]
    of_all = zip(*(state.variables() for state in states), strict=True)
    names = itertools.chain(paths, itertools.repeat("moving average"))
    for variables, name in zip(of_all, names, strict=False):
        first, *others = (variable.numpy().tobytes() for variable in variables)
        for number, other in enumerate(others, start=1):
            if other != first:
                where = f"replica {number} on {states[number].device}"
                what = f"{where} and replica 0 no longer hold the same {name}"
                raise CorruptedError(step + 1, what)


def not_finite(state: TrainState) -> list[str]:
    """Names the model's variables, and averages of them, that are not finite."""
    named = [(one.path, one.value) for one in written_variables(state.model)]
    averages = zip(state.model.trainable_variables, state.averages, strict=True)
    named += [(f"the average of {one.path}", average) for one, average in averages]
    named = [(name, one) for name, one in named if one.dtype.is_floating]
    with tf.device(state.device):
        values = map(tf.math.is_finite, widened(one for _, one in named))
        flags = tf.stack([*map(tf.reduce_all, values)]).numpy()  # Waits only once.
    return [name for (name, _), flag in zip(named, flags, strict=True) if not flag]
