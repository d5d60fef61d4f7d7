"""Scores the checkpoints of a run, once or as they are written.

Only the run's directory is needed: its `config.json` names the model and the data set.
"""

import contextlib
import json
from datetime import datetime
from typing import Any, Literal

import numpy as np

from cifar10.config import paths
from cifar10.errors import UsageError
from cifar10.evaluation import metrics, scoring
from cifar10.evaluation.options import Options
from cifar10.evaluation.summaries import EvaluationSummaries
from cifar10.follower.followed_run import FollowedRun
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets
from cifar10.input.evaluation import evaluation_batches
from cifar10.run_directory import checkpoints, layout, readers, scores
from cifar10.towers import devices

_SPLITS: dict[str, Literal["test", "train"]] = {"test": "test", "train_eval": "train"}


def run(options: Options) -> None:
    """Scores checkpoints until the training has finished, or the newest one."""
    evaluator = _Evaluator(options, devices.place_evaluation(options.device))
    with contextlib.closing(evaluator):
        steps = evaluator.follow(options.eval_interval_secs, once=options.run_once)
        try:
            for step in steps:
                evaluator.score(step)
        finally:  # The training has ended, or a signal ends this.
            print(evaluator.report, end="", flush=True)


class _Evaluator(FollowedRun):
    """The run that is followed, and the images of its data set."""

    def __init__(self, options: Options, device: str) -> None:
        super().__init__(
            paths.locate_run(options.train_dir),
            use_averages=options.use_averages,
            trust_model=options.trust_model,
        )
        self._options = options
        self._scoring_device = device
        self._held = contextlib.ExitStack()
        self._subject = ""
        self.report = ""  # Of the checkpoint scored last, unless as JSON.

    def _prepare(self, model: TrainedModel) -> None:
        options = self._options
        self._settings = model.settings
        self._dataset = datasets.find_again(model.settings, options.data_dir)
        self._scorer = scoring.Scorer(
            model.model,
            self._dataset.classes,
            test_time_augmentation=options.test_time_augmentation,
        )
        images, labels = self._dataset.read(_SPLITS[options.eval_data])
        count = options.num_examples or len(images)
        if count > len(images):
            raise UsageError(
                f"--num_examples {count}: the set has {len(images):,} images."
            )
        self._batches = evaluation_batches(
            images,
            labels,
            min(options.batch_size, count),
            model.settings["distortions"],
            count,
        )
        self._events = self.directory / options.curve
        if options.eval_dir:
            self._events = paths.locate(options.eval_dir)
        else:
            layout.check_folder(self._events)
        self._summaries = EvaluationSummaries(self._events)
        before, self._subject = self._subject, self._describe(count)
        if self._subject != before and not (options.run_once or options.json):
            print(metrics.LINES.fill(f"Scoring {self._subject}"), flush=True)

    def _use(self, model: TrainedModel, checkpoint: checkpoints.Checkpoint) -> None:
        self._trainable = model.trainable
        # It may be the best one, which the training learns only from its score.
        self._held.close()
        manifest = checkpoint.path / checkpoints.MANIFEST
        self._held.enter_context(readers.reading(manifest))

    def score(self, step: int) -> None:
        """Scores the loaded checkpoint; prints the result in a line, and writes it."""
        with self._held:
            sums, weight_decay = self._scorer.score(
                self._trainable, self._batches, self._scoring_device
            )
            scalars = sums.scalars(weight_decay)
            names = self._dataset.class_names
            notes = f"{self._subject} Rows true, columns predicted: {names}."
            earlier = scores.read(self._events, sums.count)
            earlier.pop(step, None)
            self._summaries.write(step, scalars, sums.confusion, notes)
        if self._options.json:
            print(json.dumps(self._as_json(step, sums, scalars)), flush=True)
            return
        now = datetime.now().astimezone()
        title = f"{now.isoformat(sep=' ', timespec='seconds')}: step {step}"
        self.report = metrics.report(title, self._subject, sums, scalars, names)
        if not self._options.run_once:
            self.report = "\n" + self.report
            result = metrics.headline(scalars["precision @ 1"], len(names), earlier)
            print(f"{now:%H:%M:%S} step {step}: {result}", flush=True)

    def _describe(self, count: int) -> str:
        """Returns which images and variables are scored."""
        variables = scoring.values_scored(
            self._settings, use_averages=self._options.use_averages
        )
        images = "test" if self._options.eval_data == "test" else "training"
        views = ", six views each" if self._options.test_time_augmentation else ""
        simulated = self._settings["simulated"]
        note = " Trained on simulated towers." if simulated else ""
        return (
            f"{count:,} {images} images of {self._dataset.description}; "
            f"{variables}{views}.{note}"
        )

    def _as_json(
        self, step: int, sums: metrics.Sums, scalars: dict[str, float]
    ) -> dict[str, Any]:
        return {
            "step": step,
            "data": self._dataset.name,
            "data_is_real": self._dataset.is_real,
            "eval_data": self._options.eval_data,
            "use_averages": self._options.use_averages,
            "test_time_augmentation": self._options.test_time_augmentation,
            "simulated": self._settings["simulated"],
            "num_examples": sums.count,
            "correct": sums.correct,
            **scalars,
            "per_class": sums.per_class(self._dataset.class_names),
            "confusion": np.asarray(sums.confusion).tolist(),
        }
