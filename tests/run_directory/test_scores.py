"""The lines that eval.py writes and the training reads."""

import json
import math

import pytest

from cifar10.config.run_config import RecordedRun
from cifar10.run_directory import scores
from recorded_runs import recorded


def append(folder, step, precision, num_examples=100):
    events = folder / "eval"
    events.mkdir(parents=True, exist_ok=True)
    scores.append(events, step, {"precision @ 1": precision}, num_examples)


def read(folder):
    return scores.deciding(folder).values


def test_lines_are_json_and_the_last_score_of_a_step_counts(tmp_path):
    assert read(tmp_path) == read(tmp_path / "absent") == {}
    (tmp_path / "eval").mkdir()
    scores.append(tmp_path / "eval", 10, {"precision @ 1": 0.5, "total_loss": 1.5}, 100)

    [line] = (tmp_path / "eval/metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 10,
        "precision @ 1": 0.5,
        "total_loss": 1.5,
        "num_examples": 100,
    }
    append(tmp_path, 20, 0.6)
    append(tmp_path, 10, 0.25)
    assert read(tmp_path) == {10: 0.25, 20: 0.6}


def test_a_score_on_few_images_does_not_replace_a_full_score(tmp_path):
    append(tmp_path, 10, 0.5)
    append(tmp_path, 20, 1.0, num_examples=3)
    append(tmp_path, 10, 0.9, num_examples=3)

    assert read(tmp_path) == {10: 0.5}


def test_only_the_damaged_line_of_a_log_is_lost(tmp_path):
    for number, damage in enumerate(
        [
            b'{"step": 15, "precision @ 1": 0.',
            b"\xff\xfe\0",
            b'{"step": 15, "precision @ 1": NaN, "num_examples": 100}',
            b"[" * 100_000,
        ]
    ):
        for end in (b"", b"\n"):
            folder = tmp_path / f"{number}{len(end)}"
            folder.mkdir()
            append(folder, 10, 0.5)
            with (folder / "eval/metrics.jsonl").open("ab") as file:
                file.write(damage + end)
            assert read(folder) == {10: 0.5}

            append(folder, 20, 0.6)
            assert read(folder) == {10: 0.5, 20: 0.6}


def test_nonfinite_scores_are_null_and_rank_last(tmp_path, monkeypatch):
    """As in the training's own log, so that every program can read the lines."""
    kept = {"precision @ 1": 0.1, "own": [math.nan, 1]}
    (tmp_path / "eval").mkdir()
    for step, entropy in ((10, math.nan), (20, 2.5), (30, math.inf)):
        entry = {**kept, "cross_entropy": entropy}
        scores.append(tmp_path / "eval", step, entry, 100)
    lines = (tmp_path / "eval/metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert [one["cross_entropy"] for one in found] == [None, 2.5, None]
    assert found[0]["own"] == [None, 1]
    run = recorded(tmp_path, data_parts=["train", "test"], best_by="cross_entropy")
    monkeypatch.setattr(RecordedRun, "read", lambda _: run)
    assert scores.best(tmp_path, [10, 20, 30], 3) == [20, 10, 30]
