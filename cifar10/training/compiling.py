"""Decides at the start whether XLA compiles whole steps, by trying it.

A GPU starts the kernels of a small model one by one, which can take longer than they
compute; a program of many steps needs one start. A large model gains nothing.
"""

import time
from collections.abc import Callable

import tensorflow as tf

from cifar10.config.config import ResolvedConfig
from cifar10.errors import counted, say
from cifar10.input import calls
from cifar10.towers.devices import Placement
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
        and config.speed.steps_per_call != 1
        and not config.speed.deterministic
        and not config.memory.sections
        and not config.checkpoints.verify_steps
        and config.batch.variable_update != "mirrored"
        and config.machine.workers == 1
        and config.run.max_steps >= _LEAST_STEPS
    )


def try_program(towers: TowerBuilder, batches: list[Batch], steps: int) -> bool:
    """Returns whether a program of so many steps is faster; if so, leaves it compiled.

    Both ways compute on `batches`, one for each tower, and write no variable.
    """
    plain = _seconds(lambda: towers.results(batches)[-1].metrics["total_loss"])
    towers.compile_steps(True)
    stacked = calls.stacked([batches], steps)
    try:
        gain = plain * steps / _seconds(lambda: towers.steps(stacked, 0).numbers)
        program = f"a program of {counted(steps, 'step')}"
        why = f"{program} takes {1 / gain:.2f} of their time"
    except tf.errors.OpError as error:
        gain, why = 0.0, f"it cannot compile them: {error.message.splitlines()[0]}"
    is_faster = gain >= _LEAST_GAIN
    say(f"XLA {'compiles' if is_faster else 'does not compile'} the steps: {why}")
    if not is_faster:
        towers.compile_steps(False)
    return is_faster


def _seconds(compute: Callable[[], tf.Tensor]) -> float:
    """Returns how long the second call takes, when all is traced and compiled."""
    compute().numpy()
    began = time.perf_counter()
    compute().numpy()
    return time.perf_counter() - began
