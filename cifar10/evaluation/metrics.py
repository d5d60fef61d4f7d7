"""Exact metrics of a set of images, and their table as text.

Sums over the whole set are divided once by the number of images, so no metric depends
on how the set is split into batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cifar10.config.fields import CALIBRATION_ERROR, PRECISION
from cifar10.errors import rounded
from cifar10.run_directory import scores

_FEWEST = 5  # Images of a class whose scores mean something.
_BINS = 15  # As many as in the paper that `run_directory/temperature.py` names.


class Outcomes(NamedTuple):
    """The result for each image of a set, in order."""

    labels: np.ndarray  # int32 [images]
    cross_entropy: np.ndarray  # floating [images]
    # int64 [images], the class of the largest logit; a wrong one if any is not finite.
    predictions: np.ndarray
    # int64 [images], the number of logits above the label's logit; the number of
    # classes if any logit is not finite.
    ranks: np.ndarray
    confidence: np.ndarray  # float32 [images], the probability of the prediction.
    logits: np.ndarray  # floating [images, classes]

    def at(self, temperature: float) -> Outcomes:
        """Returns the outcomes with their confidences recomputed at `temperature`."""
        probabilities = tf.nn.softmax(self.logits / temperature).numpy()
        return self._replace(confidence=probabilities.max(axis=1))


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over a set of images, from which the metrics of the set are computed."""

    cross_entropy: float
    ranks: np.ndarray  # int64 [classes]: number of images with each finite rank.
    confusion: np.ndarray  # int64 [classes, classes]; rows true, columns predicted.
    # float64 [3, bins]: number of images, number of correct images and sum of
    # confidences, in confidence bins of equal width.
    bins: np.ndarray

    @classmethod
    def of(cls, outcomes: Outcomes, classes: int) -> Sums:
        """Sums the outcomes of images whose labels are 0 to `classes - 1`."""
        places = outcomes.labels * np.int64(classes) + outcomes.predictions
        is_right = outcomes.predictions == outcomes.labels
        confidence = np.nan_to_num(outcomes.confidence)  # 0 if not finite.
        bins = np.clip(np.ceil(confidence * _BINS).astype(int) - 1, 0, _BINS - 1)
        of_each = np.ones(len(bins)), is_right, confidence
        return cls(
            float(np.sum(outcomes.cross_entropy, dtype=np.float64)),
            np.bincount(outcomes.ranks, minlength=classes)[:classes],
            np.bincount(places, minlength=classes**2).reshape(classes, classes),
            np.stack([np.bincount(bins, one, _BINS) for one in of_each]),
        )

    @property
    def count(self) -> int:
        """Number of images."""
        return int(self.confusion.sum())

    @property
    def calibration_error(self) -> float:
        """Mean gap between a bin's confidence and accuracy, weighted by bin size."""
        _, right, confidence = self.bins
        return float(np.abs(right - confidence).sum() / self.count)

    @property
    def reliability(self) -> list[dict[str, float]]:
        """Number of images, accuracy and mean confidence of each bin with images."""
        names = ("images", "accuracy", "confidence")
        parts = ((row[0], *row[1:] / row[0]) for row in self.bins.T if row[0])
        return [dict(zip(names, part, strict=True)) for part in parts]

    @property
    def correct(self) -> int:
        """Number of images that were classified correctly."""
        return int(np.trace(self.confusion))

    def scalars(self, penalties: float) -> dict[str, float]:
        """Returns the metrics under the names that training uses.

        `macro F1` and `balanced accuracy` average F1 and recall over the classes that
        have images. `precision @ 1` comes with its 95 % interval.
        """
        cross_entropy = self.cross_entropy / self.count
        interval = scores.interval(self.correct / self.count, self.count)
        every = self.per_class(range(len(self.confusion)))
        rows = [row for row in every if row["images"]]
        return {
            PRECISION: self.correct / self.count,
            f"low of {PRECISION}": interval[0],
            f"high of {PRECISION}": interval[1],
            # Ties at rank 5 all count, as in `tf.math.in_top_k`.
            "precision @ 5": float(self.ranks[:5].sum() / self.count),
            "macro F1": float(np.mean([row["f1"] for row in rows])),
            "balanced accuracy": float(np.mean([row["recall"] for row in rows])),
            "total_loss": cross_entropy + penalties,
            "cross_entropy": cross_entropy,
            "penalties": penalties,
            CALIBRATION_ERROR: self.calibration_error,
        }

    def per_class(self, class_names: Sequence[Any]) -> list[dict[str, Any]]:
        """Returns one row per class: its name, number of images, recall, precision, F1.

        Recall and F1 are None for a class without images, and precision is None for a
        class that was never predicted. F1 is 2 TP / (2 TP + FP + FN).
        """
        true, predicted = self.confusion.sum(axis=1), self.confusion.sum(axis=0)
        hits, both = np.diag(self.confusion), true + predicted
        return [
            {
                "class": name,
                "images": int(true[number]),
                "recall": _part(hits[number], true[number]),
                "precision": _part(hits[number], predicted[number]),
                "f1": _part(2 * hits[number], true[number] and both[number]),
            }
            for number, name in enumerate(class_names)
        ]


def report(
    subject: str, sums: Sums, scalars: Mapping[str, float], class_names: Sequence[str]
) -> str:
    """Formats an evaluation as text, with a table of the metrics of each class.

    `subject` names the images and the variables.
    """
    shown = [
        f"{name} = {rounded(value, 4)}"
        for name, value in scalars.items()
        if not name.endswith(PRECISION)
    ]
    if (scored := np.count_nonzero(sums.confusion.any(axis=1))) < len(class_names):
        shown.append(f"means over the {scored} classes with images")
    width = max(len(name) for name in (*class_names, "class"))
    table = [f"{'class':{width}}  images  recall  precision      F1"]
    table += [
        f"{row['class']:{width}}  {row['images']:6}  {_percent(row['recall']):>6}  "
        f"{_percent(row['precision']):>9}  {_percent(row['f1']):>6}"
        f"{'' if row['images'] >= _FEWEST else '  few images: unreliable'}"
        for row in sums.per_class(class_names)
    ]
    head = [f"{sums.correct:,} correct of {subject}", ", ".join(shown), ""]
    return "\n".join([*head, *table])


def headline(scalars: Mapping[str, float], count: int, classes: int) -> str:
    """Formats precision@1, scored on `count` images, beside chance."""
    text = scores.shown(PRECISION, scalars[PRECISION], count)
    return f"{text} (chance: {1 / classes:.3f})"


def _part(some: int, whole: int) -> float | None:
    return float(some / whole) if whole else None


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"
