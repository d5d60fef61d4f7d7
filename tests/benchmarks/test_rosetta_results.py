"""The tables, the JSON and the plots of the comparison of frameworks."""

import json

import numpy as np
import pytest

import tables
from benchmarks.rosetta import parity, plots, results
from benchmarks.rosetta.rows import ROWS, Epoch, Result
from tables import cells

ABOUT = {
    **tables.ABOUT,
    "threads": 2,
    "data": {"cnn": "CIFAR-10 in /data"},
    "examples": {"cnn": 640},
    "epochs": {"cnn": 3},
}


def a_result(row, seconds, **others):
    update = (1e-3, "a")
    agreement = parity.Agreement(
        1e-7, 1e-7, (2e-6, "a"), update, True, 1.1, [1.0], True
    )
    epochs = [
        Epoch(0, one, 1.0, 0.7 + 0.01 * one, one == seconds[-1]) for one in seconds
    ]
    return Result(row, "cnn", "", agreement, 4.0, epochs, **others)


def test_table_ranks_those_that_are_the_same_network():
    slow, fast = a_result(ROWS[0], [4.0, 5.0, 6.0]), a_result(ROWS[2], [2.0, 2.0, 2.5])
    other = Result(ROWS[4], "cnn", "not the same network: its loss differs by 0.1")
    text = results.markdown([other, slow, fast], ABOUT)
    names = [row.name for row in (ROWS[2], ROWS[0], ROWS[4])]
    places = [text.index(f"| {name} |") for name in names]
    assert places == sorted(places)
    assert cells(text, ROWS[2].name)[:3] == ["1", "TensorFlow", "2.17 ± 0.29 (3)"]
    expected = ["2", ROWS[0].name, "5.00 ± 1.00 (3)", "128", "2.31", "4.0"]
    assert cells(text, ROWS[0].name)[:6] == expected
    assert cells(text, ROWS[0].name)[6:8] == ["76.0 % (1)", "2e-06"]
    assert cells(text, ROWS[4].name)[0] == "-"
    assert cells(text, ROWS[4].name)[-1] == other.problem


def test_json_and_plots_hold_every_row(tmp_path):
    two = a_result(ROWS[0], [4.0, 5.0])
    rows = [two, Result(ROWS[4], "cnn", "absent"), a_result(ROWS[2], [np.nan])]
    assert cells(results.markdown([two], ABOUT), ROWS[0].name)[2] == "4.50 (2)"
    text = results.as_json(rows, ABOUT)
    assert "NaN" not in text
    one, other, _ = json.loads(text)["rows"]
    assert one["epochs"][0]["seconds"] == 4.0
    assert one["agreement"]["gradient"] == [2e-6, "a"]
    assert other["problem"] == "absent"
    pytest.importorskip("matplotlib")
    paths = tmp_path / "time.png", tmp_path / "accuracy.png"
    plots.draw(rows[:2], *paths)
    assert all(map(tables.is_picture, paths))
