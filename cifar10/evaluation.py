"""Scores the checkpoints of a run, once or as they come.

All that is needed is the run's directory: the model and the data set come from its
`config.json`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from cifar10 import (
    checkpoints,
    config as configuration,
    datasets,
    devices,
    distortions,
    input as input_queues,
    metrics,
    model as models,
    run_directory,
)
from cifar10.errors import UsageError
from cifar10.summaries import EvaluationSummaries

_SPLITS: dict[str, Literal["test", "train"]] = {"test": "test", "train_eval": "train"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to score and how; the flags of `eval.py`.

    Attributes:
        checkpoint_dir: Directory of the run.
        eval_dir: Folder of the event files; None for `eval` in the run's directory.
        eval_data: `test`, or `train_eval` for the training images without distortions.
        data_dir: Folder of the data set; None for the one that the run used.
        num_examples: Images to score, the first ones; None for all.
        batch_size: Images per batch; it does not change the result.
        run_once: Whether to score the newest checkpoint and return.
        eval_interval_secs: Seconds between two looks for a new checkpoint.
        use_averages: Whether to use the variables' moving averages.
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
    device: str = "auto"
    as_json: bool = False

    def __post_init__(self) -> None:
        for name in ("num_examples", "batch_size", "eval_interval_secs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name} {value}: it has to be more than 0.")


def evaluate(
    model: keras.Model,
    trainable: Sequence[tf.Tensor],
    batches: tf.data.Dataset,
    classes: int,
    device_names: Sequence[str],
) -> tuple[metrics.Sums, float]:
    """Scores a model on every image of some batches, each exactly once.

    Args:
        model: The model; its non-trainable variables are used as they are.
        trainable: Values for its trainable variables, such as their averages.
        batches: (images, labels, mask) as `input.evaluation_batches` makes them.
        classes: Number of classes.
        device_names: Devices that take the batches in turn.

    Returns:
        The sums over all images that the masks let count, and the weight decay.
    """

    @tf.function(autograph=False)
    def score(
        values: list[tf.Tensor], images: tf.Tensor, labels: tf.Tensor, mask: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        logits, _, penalties = models.inference(
            model, values, model.non_trainable_variables, images, training=False
        )
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        predictions = tf.argmax(logits, axis=1)
        confusion = tf.math.confusion_matrix(
            labels,
            predictions,
            classes,
            weights=tf.cast(mask, tf.int64),
            dtype=tf.int64,
        )
        among_5 = tf.math.in_top_k(labels, tf.cast(logits, tf.float32), min(5, classes))
        return (
            tf.reduce_sum(tf.where(mask, tf.cast(cross_entropy, tf.float64), 0.0)),
            tf.math.count_nonzero(among_5 & mask),
            confusion,
            tf.add_n(list(penalties)) if penalties else tf.constant(0.0),
        )

    total = metrics.Sums.nothing(classes)
    weight_decay = tf.constant(0.0)
    values = list(trainable)
    for number, batch in enumerate(batches):
        with tf.device(device_names[number % len(device_names)]):
            cross_entropy, correct_at_5, confusion, weight_decay = score(values, *batch)
        total += metrics.Sums(
            float(cross_entropy), int(correct_at_5), confusion.numpy()
        )
    return total, float(weight_decay)


def run(options: Options) -> None:
    """Scores checkpoints as `options` say, until the training has finished.

    Raises:
        UsageError: There is nothing to score, or something stands in the way.
    """
    device = devices.place_evaluation(options.device)
    directory = Path(options.checkpoint_dir)
    scored: int | None = None
    evaluator: _Evaluator | None = None
    told = None
    while True:
        newest = _newest(directory)
        if newest is not None and newest.step != scored:
            evaluator = evaluator or _Evaluator(options, device)
            try:
                evaluator.score(newest)
                scored = newest.step
            except FileNotFoundError:
                _tell(
                    f"The checkpoint of step {newest.step} vanished while it was read."
                )
                if not options.run_once:
                    continue
                raise UsageError("Give the command again for a newer one.") from None
        if options.run_once:
            if scored is None:
                raise UsageError(_nothing_to_score(directory))
            return
        if scored is not None and scored >= _max_steps(directory):
            _tell(f"The training has finished at step {scored}.")
            return
        waiting = (
            _nothing_to_score(directory)
            if scored is None
            else f"Waiting for a checkpoint after step {scored} in {directory}."
        )
        if waiting != told:
            _tell(f"{waiting} Looking every {options.eval_interval_secs:g} s.")
            told = waiting
        time.sleep(options.eval_interval_secs)


def _newest(directory: Path) -> checkpoints.Checkpoint | None:
    if not (directory / run_directory.CONFIG).exists():
        return None
    newest, damaged = checkpoints.newest_intact(directory / run_directory.CHECKPOINTS)
    for step, reason in damaged.items():
        _tell(f"PASSING OVER the damaged checkpoint of step {step}: {reason}.")
    return newest


def _max_steps(directory: Path) -> int:
    """Returns the step that the training is to reach; a resume may have raised it."""
    return configuration.read(directory / run_directory.CONFIG)["max_steps"]


def _nothing_to_score(directory: Path) -> str:
    if not directory.is_dir():
        return (
            f"--checkpoint_dir {directory} does not exist; no training has begun there."
        )
    if not (directory / run_directory.CONFIG).exists():
        return (
            f"--checkpoint_dir {directory} holds no run: there is no "
            f"{run_directory.CONFIG} of train.py or train_multi_gpu.py in it."
        )
    return f"There is no checkpoint in {directory} yet; the training writes the first."


def _tell(sentence: str) -> None:
    """Says something about the evaluation itself; results alone go to stdout."""
    print(sentence, file=sys.stderr, flush=True)


class _Evaluator:
    """The model and the images of one run, ready to score its checkpoints."""

    def __init__(self, options: Options, device: str) -> None:
        directory = Path(options.checkpoint_dir)
        self.options = options
        self.device = device
        self.settings = configuration.read(directory / run_directory.CONFIG)
        self.dataset = _find_data(self.settings, options.data_dir)
        self.model = models.build(
            self.settings["model"],
            (distortions.CROP_SIZE, distortions.CROP_SIZE, 3),
            self.dataset.classes,
            precision=self.settings["precision"],
        )
        if self.model.count_params() != self.settings["parameters"]:
            raise UsageError(
                f"--model {self.settings['model']} has {self.model.count_params():,} "
                f"parameters now and had {self.settings['parameters']:,} when it was "
                "trained; its code has changed since."
            )
        self.averages = [
            tf.Variable(variable.value, trainable=False)
            for variable in self.model.trainable_variables
        ]
        images, labels = self.dataset.read(_SPLITS[options.eval_data])
        count = options.num_examples or len(images)
        if count > len(images):
            raise UsageError(
                f"--num_examples {count}: the set has {len(images):,} images."
            )
        self.batches = input_queues.evaluation_batches(
            images[:count], labels[:count], options.batch_size
        )
        self.summaries = EvaluationSummaries(
            Path(options.eval_dir or directory / run_directory.EVALUATION_EVENTS)
        )

    def score(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Scores one checkpoint, prints the result and writes it for TensorBoard."""
        checkpoints.restore(
            checkpoint, {"model": self.model, "averages": self.averages}, partly=True
        )
        raw = [variable.value for variable in self.model.trainable_variables]
        used = self.averages if self.options.use_averages else raw
        sums, weight_decay = evaluate(
            self.model, used, self.batches, self.dataset.classes, [self.device]
        )
        scalars = sums.scalars(weight_decay)
        what = self._what(sums)
        self.summaries.write(checkpoint.step, scalars, sums.confusion, what)
        if self.options.as_json:
            print(json.dumps(self._as_json(checkpoint.step, sums, scalars)), flush=True)
        else:
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            title = f"{now}: step {checkpoint.step}"
            names = self.dataset.class_names
            print(metrics.report(title, what, sums, scalars, names), flush=True)

    def _what(self, sums: metrics.Sums) -> str:
        kind = "averaged" if self.options.use_averages else "raw"
        images = "test" if self.options.eval_data == "test" else "training"
        simulated = (
            " Trained on simulated towers." if self.settings["simulated"] else ""
        )
        return (
            f"{sums.count:,} {images} images of {self.dataset.description}; "
            f"{kind} variables.{simulated}"
        )

    def _as_json(
        self, step: int, sums: metrics.Sums, scalars: dict[str, float]
    ) -> dict[str, Any]:
        return {
            "step": step,
            "data": self.dataset.name,
            "data_is_real": self.dataset.is_real,
            "eval_data": self.options.eval_data,
            "use_averages": self.options.use_averages,
            "simulated": self.settings["simulated"],
            "num_examples": sums.count,
            "correct": sums.correct,
            **scalars,
            "per_class": sums.per_class(self.dataset.class_names),
            "confusion": np.asarray(sums.confusion).tolist(),
        }


def _find_data(settings: dict[str, Any], data_dir: str | None) -> datasets.Dataset:
    """Finds the run's own data set, where it was or where the user says."""
    recorded = settings["data_dir"]
    if data_dir is None and Path(recorded).is_dir():
        data_dir = recorded
    return datasets.find(settings["data"], data_dir, settings["data_url"])
