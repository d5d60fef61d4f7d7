"""Helpers: trainings whose evaluations are of few images, or find what a test says."""

import dataclasses
import json
import os
import signal

import numpy as np

import runs
from cifar10 import files
from cifar10.evaluation import metrics, scored_set
from cifar10.evaluation.scored_set import Scorer
from cifar10.run_directory import checkpoints
from cifar10.training import periodic, progress

# Of the stand-in's 2,000 test images, so few that an evaluation takes no time.
IMAGES = 200


def use_few_images(patch):
    """Scores the first images alone, here and in `eval.py` in this process."""
    build = scored_set.ScoredSet.__init__

    def built(*arguments, **more):
        *others, options = arguments
        build(*others, dataclasses.replace(options, num_examples=IMAGES), **more)

    patch(scored_set.ScoredSet, "__init__", built)


def outcomes(right, images):
    """Returns outcomes of images of one class, of which the first are recognized."""
    ranks = np.repeat([0, 1], [right, images - right])
    loss, confidence = np.full(images, 0.1), np.full(images, 0.9, np.float32)
    labels, logits = np.zeros(images, int), np.zeros((images, 2), np.float32)
    return metrics.Outcomes(labels, loss, ranks, ranks, confidence, logits)


def decide(patch, correct):
    """Makes evaluations find so many correct images by step, at other steps none."""
    now = [0]
    on_step = periodic.Validation.on_step

    def noted(self, step):
        now[0] = step
        return on_step(self, step)

    def found(*_, **__):
        return outcomes(correct.get(now[0], 0), IMAGES), 0.0

    patch(periodic.Validation, "on_step", noted)
    patch(Scorer, "score", found)


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


# Trains with a configuration, and kills itself at a moment of a step. As in the tests'
# process, TensorFlow begins without oneDNN.
_KILLED = f"""
import json, os, sys
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
sys.path[:0] = {[str(runs.ROOT), str(runs.ROOT / "tests/helpers")]}
import scored_runs
from cifar10.config.config import Config
from cifar10.training import train
options, correct, moment, step = sys.argv[1:]
scored_runs.use_few_images(setattr)
correct = json.loads(correct).items()
scored_runs.decide(setattr, {{int(at): count for at, count in correct}})
scored_runs.kill_at(moment, int(step))
config = Config.from_values(json.loads(options))
config.given = frozenset({{"checkpoint_steps"}})  # Else they are as many as are cheap.
train.train(config)
"""


def killed(config, correct, moment, step):
    """Trains in a process of its own, which is killed at a moment of a step."""
    words = json.dumps(config.values), json.dumps(correct), moment, step
    done = runs.run("-c", _KILLED, *words)
    assert done.returncode == -signal.SIGKILL, done.stderr
