"""A recipe of ours, trained as by `train.py` and scored as by `eval.py`."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import tempfile
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import arithmetic, machine
from benchmarks.rivals import common
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import datasets
from cifar10.process import entry_point

if TYPE_CHECKING:
    import keras

    from cifar10.towers.towers import TowerBuilder
    from cifar10.trained_model import TrainedModel

# What a run's clock counts to the training. Saving and tracing are other parts.
_ON_THE_CLOCK = ("training", "input", "summaries")
_SCORED_AT_ONCE = 2000  # As airbench94 does.


def start(**options: Any) -> Recipe:
    """Prepares the training; the options are the arguments of `Recipe`."""
    entry_point.import_tensorflow()
    return Recipe(**options)


class Recipe:
    """A run that can be repeated with other seeds.

    Args:
        recipe: As `--recipe`.
        dataset: What to train on and to score.
        steps: As `--max_steps`; None for the recipe's.
        batch_size: As `--global_batch_size`; None for the recipe's.
    """

    def __init__(
        self,
        *,
        recipe: str,
        dataset: datasets.Dataset,
        steps: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        from cifar10.towers import devices
        from cifar10.training import assembly

        self._dataset = dataset
        asked = {"max_steps": steps, "global_batch_size": batch_size}
        config = Config(
            **{
                "recipe": recipe,
                "data": dataset.name,
                "data_dir": str(dataset.directory),
                "num_gpus": 1,
                **{name: value for name, value in asked.items() if value},
            }
        )
        # Nothing but logged losses leaves the device, the last ones at the last step.
        self._config = config.with_values(
            log_frequency=math.gcd(config.output.log_frequency, config.run.max_steps),
            checkpoint_steps=config.run.max_steps,
            summary_steps=config.run.max_steps + 1,
        )
        self._placement = devices.place_towers(1)
        self._resolved = assembly.resolve_config(self._config, self._placement)
        self.precision = self._resolved.network.precision

    def run(self, seed: int) -> dict[str, Any]:
        """Trains to the end and scores; returns what `airbench.Airbench.run` does.

        And `joules` of all of it, start, saving and the score without views included.
        """
        from cifar10.trained_model import TrainedModel
        from cifar10.training import train

        ends = [0]  # The steps at which calls have ended.
        energy = machine.Energy()

        def note(step: int) -> None:
            ends.append(step)
            energy.joules()

        noting = types.SimpleNamespace(on_step=note)
        with tempfile.TemporaryDirectory() as directory:
            config = self._config.with_values(seed=seed, train_dir=directory)
            train.train(config, hooks=[noting])
            if ends[-1] != config.run.max_steps:
                raise RuntimeError(
                    f"Stopped after {ends[-1]} of {config.run.max_steps} steps."
                )
            metrics = Path(directory, "metrics.jsonl").read_text(encoding="utf-8")
            trained = TrainedModel(Path(directory), self._placement.devices[0])
            self._whiten(trained.model)
            whitening = self._whiten(trained.model)  # Once warm, as airbench's.
            trained.restore()
        logged = json.loads(metrics.splitlines()[-1])["seconds"]
        seconds = seconds_of_training(
            logged, ends, [stage.end for stage in self._resolved.all_stages]
        )
        accuracy, _ = self._score(trained, views=False)
        with_views, seconds_of_views = self._score(trained, views=True)
        return {
            "seconds": float(whitening + seconds + seconds_of_views),
            "accuracy": accuracy,
            "accuracy_with_views": with_views,
            "joules": energy.joules(),
        }

    def facts(self) -> dict[str, Any]:
        """Returns the operations of a run, and of how many images they are.

        Operations are those of the convolutions and matrix products of all losses and
        gradients; a multiplication and an addition are two.
        """
        batch = self._resolved.global_batch_size
        images = self._config.run.max_steps * batch
        works = arithmetic.count(
            self._config.run.recipe, max_steps=self._config.run.max_steps
        )
        operations = sum(batch * work.steps * work.per_image for work in works[1])
        return {"operations": operations, "images": images}

    def reference(
        self, count: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Returns initial values by name, and noise and labels to compare with.

        In photographs neighbouring patches are often equal, so that in a pool the
        rounding decides which of them gets the gradient: filters' gradients of two
        frameworks then differ by half a percent.
        """
        model = self._towers().state.model
        values = {
            variable.path: variable.numpy()
            for variable in model.variables
            if "moving" not in variable.path and "seed" not in variable.path
        }
        shape = model.input_shape[1:]
        return values, *common.constant_batch(count, seed=1, shape=shape)

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the loss, the gradients and the values after the first update."""
        import tensorflow as tf

        towers = self._towers()
        model = towers.state.model
        for variable in model.variables:
            if variable.path in values:
                variable.assign(values[variable.path])
        with tf.device(towers.devices[0]), common.full_float32():
            batch = tf.constant(images), tf.constant(labels)
            found = towers.gradients([batch])
            result = towers.step([batch])
        gradients = {name: value.numpy() for name, value in found.items()}
        updated = {one.path: one.numpy() for one in model.trainable_variables}
        return float(result.metrics["total_loss"]), gradients, updated

    def _towers(self) -> TowerBuilder:
        """Builds one tower in float32 with initial values of its own."""
        from cifar10.training import assembly

        config = self._config.with_values(precision="float32", xla=False)
        return assembly.assemble(config, self._dataset).towers

    def _whiten(self, model: keras.Model) -> float:
        """Computes the variables that come from images; returns the seconds."""
        from cifar10.input import distortions
        from cifar10.models.registry import find_architecture

        images, _ = self._dataset.read("train")
        distortion = self._resolved.images.distortions
        began = time.perf_counter()
        initialize = find_architecture(self._resolved.network.model).initialize
        initialize(
            model, images, lambda chosen: distortions.prepare(chosen, distortion)
        )
        return time.perf_counter() - began

    def _score(self, trained: TrainedModel, *, views: bool) -> tuple[float, float]:
        """Returns the part of the test images that are right, and the seconds."""
        from cifar10.evaluation.scored_set import Scorer, evaluation_batches

        images, labels = self._dataset.read("test")
        at_once = min(_SCORED_AT_ONCE, len(images))
        distortion = self._resolved.images.distortions
        batches = evaluation_batches(images, labels, at_once, distortion)
        scorer = Scorer(trained.model, test_time_augmentation=views)
        device = self._placement.devices[0]
        scorer.score(trained.trainable, batches.take(1), device)  # Traces.
        began = time.perf_counter()
        outcomes, _ = scorer.score(trained.trainable, batches, device)
        right = np.mean(outcomes.predictions == outcomes.labels)
        return float(right), time.perf_counter() - began


def seconds_of_training(
    logged: dict[str, float], ends: Sequence[int], stage_ends: Sequence[int]
) -> float:
    """Returns how long the steps of a run took, with those that were not timed.

    In each stage, the first call of each length is also traced, and counts to the
    start. Here it counts as long as the others.

    Args:
        logged: The seconds of each part of the run, of its last step's log line.
        ends: The steps at which calls have ended, from 0 on.
        stage_ends: The last step of each stage.

    Raises:
        UsageError: No step was timed.
    """
    steps = ends[-1] - ends[0]
    traced = {
        (bisect.bisect(stage_ends, first), last - first)
        for first, last in itertools.pairwise(ends)
    }
    timed = steps - sum(count for _, count in traced)
    if not timed:
        raise UsageError(
            f"{steps} steps: none was timed, because a stage's first is also traced. "
            "Train for more steps."
        )
    return sum(logged[part] for part in _ON_THE_CLOCK) * steps / timed
