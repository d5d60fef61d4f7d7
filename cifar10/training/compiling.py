"""Decides by trials at the start whether XLA compiles whole steps or the update.

A GPU starts the kernels of a small model one by one, which can take longer than they
compute; a program of many steps needs one start. A large model gains nothing.
"""

import time

import tensorflow as tf

from cifar10.config.config import ResolvedConfig
from cifar10.errors import say
from cifar10.input import calls
from cifar10.towers.devices import Placement
from cifar10.towers.graphs import traced
from cifar10.towers.towers import Batch, TowerBuilder

# Compiling took 13 s on an H100, and saved 4 ms a step (docs/speed.md).
_LEAST_STEPS = 5000
# A program also rounds otherwise, so a small gain does not choose it.
_LEAST_GAIN = 1.2


def is_possible(config: ResolvedConfig, placement: Placement) -> bool:
    """Returns whether one GPU computes and holds everything, for many steps."""
    return (
        placement.on_gpus
        and len(placement.devices) == 1
        and config.speed.variable_device != "cpu"
        and not config.speed.deterministic
        and config.batch.variable_update != "mirrored"
        and config.machine.workers == 1
        and config.run.max_steps >= _LEAST_STEPS
    )


def try_programs(
    towers: TowerBuilder, batches: list[Batch], steps: int
) -> dict[str, bool]:
    """Has XLA compile `steps` whole steps if faster, else the update, or nothing.

    Tries no program of a single step. All compute on `batches`, one for each tower, and
    write no variable. Returns the values of the fields `xla` and `xla_update`.
    """
    plain, nothing = _seconds(towers, batches), {"xla": False, "xla_update": False}
    tried = {"xla": steps} if steps > 1 else {}
    for name, count in {**tried, "xla_update": 1}.items():
        what = "the update" if count == 1 else f"a program of {count} steps"
        towers.compile_steps(**{name: True})
        try:
            gain = plain / _seconds(towers, batches, count)
            why = f"steps take {1 / gain:.2f} of the time without it"
        except tf.errors.OpError as error:
            gain, why = 0.0, f"it cannot: {error.message.splitlines()[0]}"
        is_faster = gain >= _LEAST_GAIN
        say(f"XLA {'compiles' if is_faster else 'does not compile'} {what}: {why}")
        if is_faster:
            return nothing | {name: True}
    towers.compile_steps()
    return nothing


def _seconds(towers: TowerBuilder, batches: list[Batch], steps: int = 1) -> float:
    """Returns how long a compiled step takes, alone or in a program; writes nothing."""
    stacked = calls.stacked([batches], steps)
    idle = traced(lambda batches: towers.trace_step(batches, tf.constant(False)))
    for _ in range(2):
        began = time.perf_counter()
        result = towers.steps(stacked, 0) if steps > 1 else idle(batches)
        result.numbers.numpy()
    return (time.perf_counter() - began) / steps
