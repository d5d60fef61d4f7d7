"""Trains with a configuration, and kills itself at a moment of a step.

    python killed_training.py CONFIG CORRECT MOMENT STEP    the first two in JSON

CORRECT has by step how many images an evaluation finds, as in `scored_runs.decide`.
"""

import json
import os
import signal
import sys
from pathlib import Path

# As in the tests' process, TensorFlow begins without oneDNN.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
sys.path.insert(0, str(Path(__file__).parents[2]))

import scored_runs
from cifar10 import files
from cifar10.config.config import Config
from cifar10.evaluation import scored_set
from cifar10.run_directory import checkpoints
from cifar10.training import periodic, progress, train


def die(*_):
    """Ends this process at once, as a machine that fails would."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(moment, step):
    """Kills this process at a moment of a step."""
    owner, name, before = {
        "recorded in part": (scored_set.scores, "append", True),
        "scored": (periodic.Validation, "on_step", False),
        "saved in part": (files, "sync", True),
        "saved": (progress.Progress, "save", False),
    }[moment]
    original = getattr(owner, name)
    reached = [0]
    on_step, save = periodic.Validation.on_step, checkpoints.save

    def scored(self, at):
        reached[0] = at
        return on_step(self, at)

    def saved(*arguments, step, **options):
        reached[0] = step
        return save(*arguments, step=step, **options)

    def killing(*arguments, **options):
        if before and reached[0] == step:
            die()
        result = original(*arguments, **options)
        if reached[0] == step:
            die()
        return result

    checkpoints.save = saved
    if moment == "scored":
        original = scored
    else:
        periodic.Validation.on_step = scored
    setattr(owner, name, killing)


if __name__ == "__main__":
    values, found, at_moment, at_step = sys.argv[1:]
    scored_runs.use_few_images(setattr)
    counts = {int(step): count for step, count in json.loads(found).items()}
    scored_runs.decide(setattr, counts)
    kill_at(at_moment, int(at_step))
    config = Config.from_values(json.loads(values))
    config.given = frozenset(
        {"checkpoint_steps"}
    )  # Else they are as many as are cheap.
    train.train(config)
