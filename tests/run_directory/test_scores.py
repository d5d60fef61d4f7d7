"""The lines that eval.py writes and the training reads."""

import json

from cifar10.run_directory import scores


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


def test_a_look_at_a_few_images_is_no_match_for_the_whole_set(tmp_path):
    append(tmp_path, 10, 0.5)
    append(tmp_path, 20, 1.0, num_examples=3)
    append(tmp_path, 10, 0.9, num_examples=3)

    assert read(tmp_path) == {10: 0.5}


def test_a_damaged_line_costs_only_itself(tmp_path):
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
