"""Scores a run's newest intact checkpoint as `eval.py` does, and finds what is hard."""

from __future__ import annotations

import base64
import dataclasses

import numpy as np
import tensorflow as tf

from cifar10.evaluation import metrics, scoring
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets
from cifar10.input.evaluation import evaluation_batches
from cifar10.tools.report.run import Run

# As many as `eval.py` scores at a time: sums in another order end on other digits.
_BATCH_SIZE = 500
_HARDEST = 24


@dataclasses.dataclass(frozen=True)
class HardImage:
    """An image on which the model is far off.

    Attributes:
        png: It as a PNG file, in base64.
        number: Its number in the test set, from 0.
        true: The name of its class.
        predicted: That of the class that it was taken for.
        confidence: The probability that the model gives to that.
        cross_entropy: Its loss.
    """

    png: str
    number: int
    true: str
    predicted: str
    confidence: float
    cross_entropy: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a checkpoint knows of the test set.

    Attributes:
        step: Its step.
        data: Which images were scored, as a sentence says it.
        class_names: The classes' names, in order.
        sums: The sums over all images.
        scalars: The metrics of these sums, as `eval.py` prints them.
        hardest: The images of the largest loss, beginning with the largest.
    """

    step: int
    data: str
    class_names: tuple[str, ...]
    sums: metrics.Sums
    scalars: dict[str, float]
    hardest: list[HardImage]


def score(run: Run, device: str, data_dir: str | None = None) -> Scores:
    """Scores the newest intact checkpoint of a run on the test set.

    Args:
        run: The run.
        device: Device name.
        data_dir: Folder of the data set; None for the one that the run used.

    Raises:
        UsageError: There is no such checkpoint, model or data set.
    """
    trained = TrainedModel(run.path)
    step = trained.restore()
    dataset = datasets.find_again(
        run.settings["data"],
        run.settings["data_dir"],
        run.settings["data_url"],
        data_dir,
    )
    images, labels = dataset.read("test")
    batches = evaluation_batches(
        images, labels, min(_BATCH_SIZE, len(images)), run.settings["distortions"]
    )
    outcomes: list[scoring.Outcomes] = []
    sums, weight_decay = scoring.Scorer(trained.model, dataset.classes).score(
        trained.trainable, batches, [device], outcomes.append
    )
    return Scores(
        step=step,
        data=f"{sums.count:,} test images of {dataset.description}",
        class_names=dataset.class_names,
        sums=sums,
        scalars=sums.scalars(weight_decay),
        hardest=_hardest(images, labels, outcomes, dataset.class_names),
    )


def _hardest(
    images: np.ndarray,
    labels: np.ndarray,
    outcomes: list[scoring.Outcomes],
    class_names: tuple[str, ...],
) -> list[HardImage]:
    losses = np.concatenate([batch.cross_entropy for batch in outcomes])
    predictions = np.concatenate([batch.predictions for batch in outcomes])
    confidences = np.concatenate([batch.confidence for batch in outcomes])
    numbers = np.argsort(-losses, kind="stable")[:_HARDEST]
    return [
        HardImage(
            png=base64.b64encode(tf.io.encode_png(images[number]).numpy()).decode(),
            number=int(number),
            true=class_names[labels[number]],
            predicted=class_names[predictions[number]],
            confidence=float(confidences[number]),
            cross_entropy=float(losses[number]),
        )
        for number in numbers
    ]
