"""Scores the checkpoints of a run, once or as they are written.

Only the run's directory is needed: its `config.json` names the model and the data set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from datetime import datetime
from typing import Any, Literal

import numpy as np

from cifar10.errors import UsageError
from cifar10.evaluation import metrics, scoring
from cifar10.evaluation.summaries import EvaluationSummaries
from cifar10.follower.followed_run import FollowedRun
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets, pipeline
from cifar10.run_directory import checkpoints, layout, readers
from cifar10.towers import devices

# Far above any sensible value; a larger one is a typing error.
_LARGEST = 10**9
_SPLITS: dict[str, Literal["test", "train"]] = {"test": "test", "train_eval": "train"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of `eval.py`.

    Attributes:
        checkpoint_dir: Directory of the run.
        eval_dir: Folder of the event files; None for `curve` in the run's directory.
        eval_data: `test`, or `train_eval` for the training images without distortions.
        data_dir: Folder of the data set; None for the one that the run used.
        num_examples: Images to score, the first ones; None for all.
        batch_size: Images per batch; it does not change the result.
        run_once: Whether to score the newest checkpoint and return.
        eval_interval_secs: Seconds between two looks for a new checkpoint.
        use_averages: Whether to use the variables' moving averages.
        test_time_augmentation: Whether to average over six views of each image.
        device: `auto`, `cpu`, `gpu` or `gpu:NUMBER`.
        as_json: Whether to print one JSON object per checkpoint instead of text.
    """

    checkpoint_dir: str
    eval_dir: str | None = None
    eval_data: str = "test"
    data_dir: str | None = None
    num_examples: int | None = None
    batch_size: int = 500
    run_once: bool = False
    eval_interval_secs: float = 30.0
    use_averages: bool = True
    test_time_augmentation: bool = False
    device: str = "auto"
    as_json: bool = False

    @property
    def curve(self) -> str:
        """The folder of the event files, one for each kind of evaluation."""
        folder = layout.EVALUATION_EVENTS
        folder += "" if self.eval_data == "test" else "_train"
        folder += "" if self.use_averages else "_raw"
        return folder + ("_augmented" if self.test_time_augmentation else "")

    def __post_init__(self) -> None:
        for name in ("num_examples", "batch_size", "eval_interval_secs"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _LARGEST:
                raise UsageError(
                    f"--{name} {value}: it must be above 0 and at most {_LARGEST:,}."
                )


def run(options: Options) -> None:
    """Scores checkpoints until the training has finished, or the newest one.

    Raises:
        UsageError: There is nothing to score, or the run or its data cannot be used.
    """
    evaluator = _Evaluator(options, devices.place_evaluation(options.device))
    with contextlib.closing(evaluator):
        for step in evaluator.follow(options.eval_interval_secs, once=options.run_once):
            evaluator.score(step)


class _Evaluator(FollowedRun):
    """The run that is followed, and the images of its data set."""

    def __init__(self, options: Options, device: str) -> None:
        super().__init__(
            layout.locate(options.checkpoint_dir), use_averages=options.use_averages
        )
        self._options = options
        self._scoring_device = device
        self._held = contextlib.ExitStack()

    def _prepare(self, model: TrainedModel) -> None:
        options = self._options
        self._settings = model.settings
        self._dataset = datasets.find_again(
            model.settings["data"],
            model.settings["data_dir"],
            model.settings["data_url"],
            options.data_dir,
        )
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
        self._batches = pipeline.evaluation_batches(
            images[:count],
            labels[:count],
            min(options.batch_size, count),
            model.settings["distortions"],
        )
        self._summaries = EvaluationSummaries(
            layout.locate(options.eval_dir)
            if options.eval_dir
            else self.directory / options.curve
        )

    def _use(self, model: TrainedModel, checkpoint: checkpoints.Checkpoint) -> None:
        self._trainable = model.trainable
        # It may be the best one, which the training learns only from its score.
        self._held.close()
        manifest = checkpoint.path / checkpoints.MANIFEST
        self._held.enter_context(readers.reading(manifest))

    def score(self, step: int) -> None:
        """Scores the loaded checkpoint, and prints and writes the result."""
        with self._held:
            sums, weight_decay = self._scorer.score(
                self._trainable, self._batches, [self._scoring_device]
            )
            scalars = sums.scalars(weight_decay)
            subject = self._subject(sums)
            names = self._dataset.class_names
            notes = (
                f"{subject} Confusion matrix: rows true, columns predicted: {names}."
            )
            self._summaries.write(step, scalars, sums.confusion, notes)
        if self._options.as_json:
            print(json.dumps(self._as_json(step, sums, scalars)), flush=True)
        else:
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            title = f"{now}: step {step}"
            print(metrics.report(title, subject, sums, scalars, names), flush=True)

    def _subject(self, sums: metrics.Sums) -> str:
        """Returns which images and variables were scored."""
        variables = "averaged" if self._options.use_averages else "raw"
        images = "test" if self._options.eval_data == "test" else "training"
        views = ", six views each" if self._options.test_time_augmentation else ""
        simulated = (
            " Trained on simulated towers." if self._settings["simulated"] else ""
        )
        return (
            f"{sums.count:,} {images} images of {self._dataset.description}; "
            f"{variables} variables{views}.{simulated}"
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
