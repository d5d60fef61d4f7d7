"""Scores a checkpoint of a run as `eval.py` does."""

import base64
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.config.shared_options import SCORED_BATCH_SIZE
from cifar10.evaluation import metrics, scorer
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets
from cifar10.input.evaluation import evaluation_batches
from cifar10.run_directory.restoring import Wanted
from cifar10.tools.report.run import Run

_HARDEST = 24


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a checkpoint on the test set."""

    step: int
    data: str  # What was scored, in words.
    class_names: tuple[str, ...]
    sums: metrics.Sums
    scalars: dict[str, float]  # The metrics as `eval.py` prints them.
    hardest: list[dict[str, Any]]  # The images of the largest loss, descending.


def score(
    run: Run,
    device: str,
    data_dir: str | None = None,
    trust_model: str | None = None,
    wanted: Wanted = None,
) -> Scores:
    """Scores the newest intact checkpoint of a run, or the wanted one, on the test set.

    Without `data_dir`, the data set is where the run found it, if it is the user's own.
    """
    trained = TrainedModel(run.path, trust_model=trust_model)
    step = trained.restore(wanted)
    dataset = datasets.find_again(run.settings, data_dir)
    images, labels = dataset.read("test")
    batches = evaluation_batches(
        images, labels, min(SCORED_BATCH_SIZE, len(images)), run.settings["distortions"]
    )
    outcomes: list[scorer.Outcomes] = []
    sums, weight_decay = scorer.Scorer(trained.model, dataset.classes).score(
        trained.trainable, batches, device, outcomes.append
    )
    return Scores(
        step=step,
        data=f"{sums.count:,} test images of {dataset.description}, "
        f"{scorer.values_scored(run.settings)}",
        class_names=dataset.class_names,
        sums=sums,
        scalars=sums.scalars(weight_decay),
        hardest=_hardest(images, labels, outcomes, dataset.class_names),
    )


def _hardest(
    images: datasets.Images,
    labels: np.ndarray,
    outcomes: list[scorer.Outcomes],
    class_names: tuple[str, ...],
) -> list[dict[str, Any]]:
    losses, predictions, confidences = map(np.concatenate, zip(*outcomes, strict=True))
    numbers = np.argsort(-losses, kind="stable")[:_HARDEST]
    return [
        {
            "png": base64.b64encode(tf.io.encode_png(image).numpy()).decode(),
            "height": image.shape[0],
            "width": image.shape[1],
            "number": int(number),  # Its index in the set.
            "true": class_names[labels[number]],
            "predicted": class_names[predictions[number]],
            "confidence": float(confidences[number]),
            "cross_entropy": float(losses[number]),
        }
        for number, image in zip(numbers, images[numbers], strict=True)
    ]
