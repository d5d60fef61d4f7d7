"""Metrics from sums, by hand, and the tables that show them."""

import dataclasses

import numpy as np
import pytest

from cifar10.evaluation import metrics
from cifar10.evaluation.metrics import Sums

NAMES = ("cat", "dog", "frog")

# Of 4 cats 3 are recognized, of 5 dogs 1, and the frog is not.
SUMS = Sums(
    cross_entropy=12.0,
    ranks=np.array([4, 5, 0]),
    confusion=np.array([[3, 1, 0], [4, 1, 0], [1, 0, 0]]),
    # Of 4 images with a confidence of 0.5 one is right, of 6 with 0.75 three.
    bins=np.array([[4.0, 6.0], [1.0, 3.0], [2.0, 4.5]]),
)
NO_BINS = np.ones((3, 1))


def of(confusion):
    """Returns sums that a confusion matrix alone matters for."""
    return Sums(0.0, np.zeros(len(confusion), np.int64), confusion, NO_BINS)


def test_scalars_are_divided_by_the_count():
    assert (SUMS.count, SUMS.correct) == (10, 4)
    assert SUMS.scalars(penalties=0.25) == pytest.approx(
        {
            "precision @ 1": 0.4,
            # As R's prop.test(4, 10, correct = FALSE) has it.
            "low of precision @ 1": 0.168180,
            "high of precision @ 1": 0.687326,
            "precision @ 5": 0.9,
            "macro F1": (6 / 12 + 2 / 7 + 0) / 3,
            "balanced accuracy": (3 / 4 + 1 / 5 + 0) / 3,
            "total_loss": 1.45,
            "cross_entropy": 1.2,
            "penalties": 0.25,
            "expected calibration error": 0.1 * abs(1 - 2) + 0.1 * abs(3 - 4.5),
        },
        abs=1e-6,
    )


def test_each_class_has_its_recall_precision_and_f1():
    assert SUMS.per_class(NAMES) == [
        {"class": "cat", "images": 4, "recall": 0.75, "precision": 0.375, "f1": 0.5},
        {"class": "dog", "images": 5, "recall": 0.2, "precision": 0.5, "f1": 2 / 7},
        {"class": "frog", "images": 1, "recall": 0.0, "precision": None, "f1": 0.0},
    ]


def test_each_bin_with_images_has_its_accuracy_and_its_mean_confidence():
    empty = np.zeros((3, 1))
    bins = np.hstack([SUMS.bins[:, :1], empty, SUMS.bins[:, 1:]])
    sums = dataclasses.replace(SUMS, bins=bins)
    assert sums.reliability == [
        {"images": 4, "accuracy": 0.25, "confidence": 0.5},
        {"images": 6, "accuracy": 0.5, "confidence": 0.75},
    ]


def test_classes_without_images_have_no_recall_and_do_not_affect_means():
    sums = of(np.array([[2, 1, 0], [0, 0, 0], [1, 0, 0]]))
    dog = {"class": "dog", "images": 0, "recall": None, "precision": 0.0, "f1": None}
    assert sums.per_class(NAMES)[1] == dog
    scalars = sums.scalars(0.0)
    assert scalars["macro F1"] == pytest.approx((4 / 6 + 0) / 2)
    assert scalars["balanced accuracy"] == pytest.approx((2 / 3 + 0) / 2)
    said = metrics.report("subject", sums, scalars, NAMES)
    assert "2 classes" in said
    marked = [line.split()[0] for line in said.splitlines() if "few images" in line]
    assert marked == ["cat", "dog", "frog"], "fewer than five images each"
    assert f"{sums.correct} correct of subject" in said


def test_the_table_shows_percentages_and_marks_scores_of_few_images():
    """Of 5 images a recall says something, of 4 it does not."""
    said = metrics.report("subject", SUMS, SUMS.scalars(0.25), NAMES)
    summary, table = said.split("\n\n")
    assert summary.startswith("4 correct of subject\n")
    assert "total_loss = 1.4500, " in summary
    assert "classes with images" not in summary, "all have some"
    rows = [line.partition("few images") for line in table.splitlines()[1:]]
    assert [(row.split(), bool(mark)) for row, mark, _ in rows] == [
        (["cat", "4", "75.0%", "37.5%", "50.0%"], True),
        (["dog", "5", "20.0%", "50.0%", "28.6%"], False),
        (["frog", "1", "0.0%", "-", "0.0%"], True),
    ]
