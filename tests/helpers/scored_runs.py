"""Helpers: trainings whose evaluations are of few images, or find what a test says."""

import dataclasses
import json
import signal
from pathlib import Path

import numpy as np

import runs
from cifar10.evaluation import metrics, scored_set
from cifar10.evaluation.scored_set import Scorer
from cifar10.training import periodic

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


def killed(config, correct, moment, step):
    """Trains in a process of its own, which is killed at a moment of a step."""
    words = json.dumps(config.values), json.dumps(correct), moment, step
    done = runs.run(Path(__file__).with_name("killed_training.py"), *words)
    assert done.returncode == -signal.SIGKILL, done.stderr
