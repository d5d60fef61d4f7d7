"""The lines that eval.py writes and the training reads."""

import json

import pytest

from cifar10.run_directory import scores


def append(folder, step, precision, num_examples=100):
    scores.append(folder, step, {"precision @ 1": precision}, num_examples)


def test_lines_are_json_with_step_scores_and_images(tmp_path):
    scores.append(tmp_path, 10, {"precision @ 1": 0.5, "total_loss": 1.5}, 100)

    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 10,
        "precision @ 1": 0.5,
        "total_loss": 1.5,
        "num_examples": 100,
    }


def test_there_are_no_scores_without_an_evaluation(tmp_path):
    assert scores.read(tmp_path) == {}
    assert scores.read(tmp_path / "absent") == {}


def test_the_last_score_of_a_step_counts(tmp_path):
    append(tmp_path, 10, 0.5)
    append(tmp_path, 20, 0.6)
    append(tmp_path, 10, 0.25)

    assert scores.read(tmp_path) == {10: 0.25, 20: 0.6}


def test_a_look_at_a_few_images_is_no_match_for_the_whole_set(tmp_path):
    append(tmp_path, 10, 0.5)
    append(tmp_path, 20, 1.0, num_examples=3)
    append(tmp_path, 10, 0.9, num_examples=3)

    assert scores.read(tmp_path) == {10: 0.5}


DAMAGE = {
    "torn": b'{"step": 15, "precision @ 1": 0.',
    "zeros": b"\0" * 40,
    "other bytes": b"\xff\xfe",
    "no object": b"[15, 0.9, 100]",
    "a number": b"15",
    "no step": b'{"precision @ 1": 0.9, "num_examples": 100}',
    "no score": b'{"step": 15, "num_examples": 100}',
    "null": b'{"step": 15, "precision @ 1": null, "num_examples": 100}',
    "not a number": b'{"step": 15, "precision @ 1": NaN, "num_examples": 100}',
    "no share": b'{"step": 15, "precision @ 1": 94, "num_examples": 100}',
    "endless": b'{"step": Infinity, "precision @ 1": 0.9, "num_examples": 100}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("end", [b"", b"\n"], ids=["no newline", "newline"])
def test_a_damaged_line_costs_only_itself(tmp_path, damage, end):
    append(tmp_path, 10, 0.5)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage + end)
    assert scores.read(tmp_path) == {10: 0.5}

    append(tmp_path, 20, 0.6)
    assert scores.read(tmp_path) == {10: 0.5, 20: 0.6}
