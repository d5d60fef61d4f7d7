"""Runs a step of a training in a process that may die for lack of memory."""

import json
import sys

import tensorflow as tf

from cifar10.config.config import Config
from cifar10.input import pipeline
from cifar10.tools import child_process
from cifar10.tools.plan import step as steps

# A step that is compiled for a new GPU takes minutes.
_SECONDS = 600.0


def why_not(config: Config, module: str = __name__) -> str:
    """Tries a step in a child process; returns why it failed, empty if it ran.

    `module` has the `main()` of the child process.
    """
    fields = json.dumps(config.values)
    output = child_process.run(module, fields, seconds=_SECONDS)
    if output.error or not output.messages:
        return output.error or "it has not answered"
    return str(output.messages[-1])


def main() -> None:
    """Runs two steps of the configuration that the command line holds as JSON."""
    stdout = child_process.claim_stdout()
    found = ""
    try:
        run(Config.from_values(json.loads(sys.argv[1])))
    except tf.errors.ResourceExhaustedError as error:
        found = error.message.splitlines()[0]
    print(json.dumps(found), file=stdout, flush=True)


def run(config: Config) -> None:
    """Runs two steps, of which the first one chooses how to compute.

    As many batches are in memory as wait in a training's queues.
    """
    step = steps.build(config, lambda _: None)
    towers = step.planner.build(
        step.planner.choose(config.memory.sections, float).sections
    )
    size = step.config.batch.batch_size
    shape = pipeline.image_shape(step.config.images.distortions, step.image_shape)
    waiting = []
    for _ in range(1 + pipeline.QUEUE_CAPACITY):
        batches = []
        for device in towers.devices:
            with tf.device(device):
                batches.append((tf.zeros([size, *shape]), tf.zeros([size], tf.int32)))
        waiting.append(batches)
    for batches in waiting[:2]:
        towers.step(batches).tower_losses.numpy()
