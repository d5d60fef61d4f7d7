"""Exact metrics from sums and counts, and their tables as text.

Sums over any split of a set into batches add up to the same result; they are divided
once, at the end, by the number of images that counted.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# A larger confusion matrix does not fit a screen; its most frequent mistakes do.
LARGEST_MATRIX = 20
_SHOWN_MISTAKES = 20
# Fills lines of a terminal, with an indent of four; a long path stays in one piece.
LINES = textwrap.TextWrapper(76, break_long_words=False, break_on_hyphens=False)


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over some images; sums over disjoint sets can be added."""

    cross_entropy: float
    correct_at_5: int  # Images whose class is among the five largest logits.
    confusion: np.ndarray  # int64 [classes, classes]; rows true, columns predicted.

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.cross_entropy + other.cross_entropy,
            self.correct_at_5 + other.correct_at_5,
            self.confusion + other.confusion,
        )

    @classmethod
    def nothing(cls, classes: int) -> Sums:
        """Returns the sums over no image."""
        return cls(0.0, 0, np.zeros((classes, classes), np.int64))

    @property
    def count(self) -> int:
        """Number of images."""
        return int(self.confusion.sum())

    @property
    def correct(self) -> int:
        """Number of images whose class was predicted."""
        return int(np.trace(self.confusion))

    def scalars(self, weight_decay: float) -> dict[str, float]:
        """Returns the metrics, by the names that training uses."""
        cross_entropy = self.cross_entropy / self.count
        return {
            "precision @ 1": self.correct / self.count,
            "precision @ 5": self.correct_at_5 / self.count,
            "total_loss": cross_entropy + weight_decay,
            "cross_entropy": cross_entropy,
            "weight_decay": weight_decay,
        }

    def per_class(self, class_names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns one row per class: its name, number of images, recall, precision.

        Recall and precision are None where they would be divided by zero.
        """
        true, predicted = self.confusion.sum(axis=1), self.confusion.sum(axis=0)
        hits = np.diag(self.confusion)
        return [
            {
                "class": name,
                "images": int(true[number]),
                "recall": _part(hits[number], true[number]),
                "precision": _part(hits[number], predicted[number]),
            }
            for number, name in enumerate(class_names)
        ]

    def commonest_mistakes(self, class_names: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the most frequent pairs of true and predicted class, in order."""
        mistakes = self.confusion - np.diag(np.diag(self.confusion))
        largest = np.argsort(mistakes, axis=None)[::-1][:_SHOWN_MISTAKES]
        places = zip(*np.unravel_index(largest, mistakes.shape), strict=True)
        return [
            {
                "true": class_names[true],
                "predicted": class_names[predicted],
                "images": int(mistakes[true, predicted]),
            }
            for true, predicted in places
            if mistakes[true, predicted]
        ]


def report(
    title: str,
    subject: str,
    sums: Sums,
    scalars: Mapping[str, float],
    class_names: Sequence[str],
) -> str:
    """Returns the result of one evaluation as text.

    The title precedes the tutorial's `precision @ 1 = ...`; the subject says which
    images and variables were used.
    """
    return (
        f"{title}: {headline(scalars['precision @ 1'], len(class_names), {})}\n"
        f"{textwrap.indent(LINES.fill(f'{sums.correct:,} of {subject}'), '    ')}\n"
        f"    precision @ 5 = {scalars['precision @ 5']:.3f}, "
        f"cross_entropy = {scalars['cross_entropy']:.4f}, "
        f"total_loss = {scalars['total_loss']:.4f}\n\n"
        f"{class_table(sums, class_names)}\n\n"
        f"{confusion_table(sums, class_names)}\n"
    )


def headline(precision: float, classes: int, earlier: Mapping[int, float]) -> str:
    """Compares a score with those of earlier checkpoints by step, or with chance."""
    if not earlier:
        return f"precision @ 1 = {precision:.3f} (chance: {1 / classes:.3f})"
    best = max(earlier, key=lambda step: (earlier[step], step))
    rank = f"; best {earlier[best]:.3f} at step {best}"
    if precision >= earlier[best]:
        rank = ", the best so far"
    change = precision - earlier[max(earlier)]
    return f"precision @ 1 = {precision:.3f} ({change:+.3f}{rank})"


def class_table(sums: Sums, class_names: Sequence[str]) -> str:
    """Returns the per-class rows as text."""
    width = max(len(name) for name in (*class_names, "class"))
    lines = [f"{'class':{width}}  images  recall  precision"]
    lines += [
        f"{row['class']:{width}}  {row['images']:6}  {_percent(row['recall']):>6}  "
        f"{_percent(row['precision']):>9}"
        for row in sums.per_class(class_names)
    ]
    return "\n".join(lines)


def confusion_table(sums: Sums, class_names: Sequence[str]) -> str:
    """Returns the confusion matrix as text, or with many classes its largest errors."""
    if len(class_names) > LARGEST_MATRIX:
        lines = ["commonest mistakes (images: true class, taken for)"]
        for mistake in sums.commonest_mistakes(class_names):
            true, predicted = mistake["true"], mistake["predicted"]
            lines.append(f"{mistake['images']:6}: {true}, {predicted}")
        return "\n".join(lines)
    width = max(len(name) for name in class_names)
    cell = max(6, len(str(int(sums.confusion.max()))) + 1)
    header = "".join(f"{name[: cell - 1]:>{cell}}" for name in class_names)
    lines = ["confusion matrix (row: true class, column: taken for)"]
    lines.append(" " * width + header)
    for name, row in zip(class_names, sums.confusion, strict=True):
        lines.append(f"{name:{width}}" + "".join(f"{number:>{cell}}" for number in row))
    return "\n".join(lines)


def _part(some: int, whole: int) -> float | None:
    return float(some / whole) if whole else None


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"
