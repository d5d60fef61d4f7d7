"""Metrics from sums, by hand, and the tables that show them."""

import numpy as np
import pytest

from cifar10.input import records
from cifar10.scoring import metrics
from cifar10.scoring.metrics import Sums

NAMES = ("cat", "dog", "frog")

# Of 4 cats 3 are recognized, of 5 dogs 1, of 1 frog none; nothing is taken for a frog.
SUMS = Sums(
    cross_entropy=12.0,
    ranks=np.array([4, 5, 0]),
    confusion=np.array([[3, 1, 0], [4, 1, 0], [1, 0, 0]]),
)


def of(confusion):
    """Returns sums that a confusion matrix alone matters for."""
    return Sums(0.0, np.zeros(len(confusion), np.int64), confusion)


def test_sums_of_two_parts_add_up():
    part = Sums(0.5, np.array([1, 0, 5]), np.array([[1, 2, 0], [0, 0, 3], [0, 1, 0]]))
    both = SUMS + part
    assert (both.cross_entropy, both.ranks.tolist()) == (12.5, [5, 5, 5])
    assert both.confusion.tolist() == [[4, 3, 0], [4, 1, 3], [1, 1, 0]]
    assert (both.count, both.correct) == (17, 5)


def test_nothing_added_changes_nothing():
    for total in (Sums.nothing(3) + SUMS, SUMS + Sums.nothing(3)):
        assert (total.cross_entropy, total.ranks.tolist()) == (12.0, [4, 5, 0])
        np.testing.assert_array_equal(total.confusion, SUMS.confusion)
    assert (Sums.nothing(3).count, Sums.nothing(3).correct) == (0, 0)


def test_scalars_are_divided_by_the_count():
    assert (SUMS.count, SUMS.correct) == (10, 4)
    assert SUMS.scalars(weight_decay=0.25) == pytest.approx(
        {
            "precision @ 1": 0.4,
            "precision @ 5": 0.9,
            "macro F1": (6 / 12 + 2 / 7 + 0) / 3,
            "balanced accuracy": (3 / 4 + 1 / 5 + 0) / 3,
            "total_loss": 1.45,
            "cross_entropy": 1.2,
            "weight_decay": 0.25,
        }
    )


def test_recall_and_precision_of_each_class():
    assert SUMS.per_class(NAMES) == [
        {"class": "cat", "images": 4, "recall": 0.75, "precision": 0.375, "f1": 0.5},
        {"class": "dog", "images": 5, "recall": 0.2, "precision": 0.5, "f1": 2 / 7},
        {"class": "frog", "images": 1, "recall": 0.0, "precision": None, "f1": 0.0},
    ]


def test_a_class_without_images_has_no_recall():
    sums = of(np.array([[2, 1], [0, 0]]))
    assert sums.per_class(("cat", "dog")) == [
        {"class": "cat", "images": 3, "recall": 2 / 3, "precision": 1.0, "f1": 0.8},
        {"class": "dog", "images": 0, "recall": None, "precision": 0.0, "f1": None},
    ]


def test_classes_without_images_count_in_no_mean_and_that_is_said():
    sums = of(np.array([[2, 1, 0], [0, 0, 0], [1, 0, 0]]))
    scalars = sums.scalars(0.0)
    assert scalars["macro F1"] == pytest.approx((4 / 6 + 0) / 2)
    assert scalars["balanced accuracy"] == pytest.approx((2 / 3 + 0) / 2)
    assert (
        "balanced accuracy = 0.333, of the 2 classes with images\n"
        in metrics.report("title", "subject", sums, scalars, NAMES)
    )
    complete = metrics.report("title", "subject", SUMS, SUMS.scalars(0.0), NAMES)
    assert "\n    macro F1 = 0.262, balanced accuracy = 0.317\n" in complete


def test_ranks_are_summed_to_the_precision_at_any_k():
    sums = Sums(0.0, np.array([3, 2, 0, 1, 1, 1, 0]), np.diag([3, 5, 0, 0, 0, 0, 2]))
    found = sums.scalars(0.0, [3, 1, 6])
    at_k = {name: found[name] for name in found if name.startswith("precision")}
    assert [*at_k.items()] == [
        ("precision @ 1", 1.0),  # By the predictions, which a tie may decide.
        ("precision @ 3", 0.5),
        ("precision @ 5", 0.7),
        ("precision @ 6", 0.8),
    ]


def test_a_score_is_compared_with_chance_and_then_with_earlier_scores():
    found = [
        metrics.headline(precision, 10, earlier)
        for precision, earlier in (
            (0.1, {}),
            (0.652, {1000: 0.621}),
            (0.652, {1000: 0.652}),
            (0.648, {1000: 0.655, 2000: 0.655, 100_000: 0.652}),
        )
    ]
    assert found == [
        "precision @ 1 = 0.100 (chance: 0.100)",
        "precision @ 1 = 0.652 (+0.031, the best so far)",
        "precision @ 1 = 0.652 (+0.000; best 0.652 at step 1000)",
        "precision @ 1 = 0.648 (-0.004; best 0.655 at step 1000)",
    ]
    assert max(len(line) for line in found) <= 80 - len("23:59:59 step 9999999: ")


@pytest.mark.parametrize("path", ["/data/folder-of-cifar-10", "/long" * 20])
def test_a_report_fits_a_terminal_except_for_a_long_path(path):
    names = records.CIFAR10.default_names
    sums = of(np.full((10, 10), 1000))
    subject = f"100,000 test images of CIFAR-10 in {path}; the variables themselves."
    title = "2026-11-22 13:59:25+00:00: step 100000"
    text = metrics.report(title, subject, sums, sums.scalars(0.0), names)
    assert "precision @ 1 = 0.100 (chance: 0.100)\n    10,000 of 100,000" in text
    wide = [line.strip() for line in text.splitlines() if len(line) > 80]
    assert wide == [f"{path};"] * (len(path) > 80)


def test_class_table_has_a_row_for_each_class():
    header, *rows = metrics.class_table(SUMS, NAMES).splitlines()
    assert header.split() == ["class", "images", "recall", "precision", "F1"]
    assert [row.split() for row in rows] == [
        ["cat", "4", "75.0%", "37.5%", "50.0%"],
        ["dog", "5", "20.0%", "50.0%", "28.6%"],
        ["frog", "1", "0.0%", "-", "0.0%"],
    ]
    assert len({len(line) for line in (header, *rows)}) == 1


def test_confusion_table_has_true_classes_in_rows():
    title, header, *rows = metrics.confusion_table(SUMS, NAMES).splitlines()
    assert "row: true class, column: taken for" in title
    assert header.split() == list(NAMES)
    assert [row.split() for row in rows] == [
        ["cat", "3", "1", "0"],
        ["dog", "4", "1", "0"],
        ["frog", "1", "0", "0"],
    ]


def test_confusion_table_keeps_large_numbers_and_long_names_apart():
    names = ("automobile", "aeroplane")
    sums = of(np.array([[1_234_567, 2_345_678], [3, 4]]))
    _, header, *rows = metrics.confusion_table(sums, names).splitlines()
    assert [row.split() for row in rows] == [
        ["automobile", "1234567", "2345678"],
        ["aeroplane", "3", "4"],
    ]
    assert header.split() == ["automob", "aeropla"]
    assert len({len(line) for line in (header, *rows)}) == 1


@pytest.mark.parametrize(("classes", "is_matrix"), [(20, True), (21, False)])
def test_many_classes_are_shown_by_their_mistakes(classes, is_matrix):
    names = [f"c{number}" for number in range(classes)]
    sums = of(np.eye(classes, dtype=np.int64))
    lines = metrics.confusion_table(sums, names).splitlines()
    assert len(lines) == (2 + classes if is_matrix else 1)
    assert ("confusion matrix" in lines[0]) == is_matrix


def test_commonest_mistakes_come_first_and_hits_not_at_all():
    names = [f"c{number}" for number in range(30)]
    confusion = np.diag(np.full(30, 1000))
    confusion[4, 7], confusion[7, 4], confusion[29, 0] = 12, 3, 250
    title, *lines = metrics.confusion_table(of(confusion), names).splitlines()
    assert "commonest mistakes" in title
    assert [line.strip() for line in lines] == [
        "250: c29, c0",
        "12: c4, c7",
        "3: c7, c4",
    ]


def test_only_the_twenty_commonest_mistakes_are_listed():
    names = [f"c{number}" for number in range(30)]
    confusion = np.zeros((30, 30), np.int64)
    confusion[0, 1:] = np.arange(1, 30)
    _, *lines = metrics.confusion_table(of(confusion), names).splitlines()
    assert [int(line.split(":")[0]) for line in lines] == list(range(29, 9, -1))
