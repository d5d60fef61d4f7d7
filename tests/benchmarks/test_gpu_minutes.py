"""The measurements for a GPU run where there is none, so that none fails on one."""

import json

import pytest

import runs
from benchmarks import gpu_minutes

OF_EACH_KIND = (
    "program of 50, 128 images",
    "default training, 20,000 steps",
    "resumed with XLA",
    "copies of 4.27 MB",
)


@pytest.mark.slow
def test_lines_run_on_a_cpu_and_are_not_measured_twice(tmp_path):
    words = ["benchmarks.gpu_minutes", "--out", tmp_path, "--steps", 3]
    for only in (OF_EACH_KIND[1:], OF_EACH_KIND):
        done = runs.run("-m", *words, "--only", *only)
        assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [*OF_EACH_KIND]
    assert "failed" not in done.stdout
    assert done.stderr.count("seconds in all") == 1, "the others had their files"
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert found[2]["equal to the bit"]


def test_each_line_has_its_own_name_and_fifteen_minutes_are_enough():
    names = [line.name for line in gpu_minutes.LINES]
    assert len(names) == len({*names})
    # But for unpacking TensorFlow on the machine, and lines that end early.
    assert sum(line.seconds for line in gpu_minutes.LINES) <= 20 * 60
