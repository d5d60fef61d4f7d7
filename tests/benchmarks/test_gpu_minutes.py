"""The measurements for a GPU run where there is none, so that none fails on one."""

import contextlib
import dataclasses
import json
import subprocess
import sys
import time

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


SLEEPER = """
import pathlib, subprocess, sys, time
code = "import pathlib, time; time.sleep(4); pathlib.Path({path!r}).touch()"
subprocess.Popen([sys.executable, "-c", code], stdout=-3, stderr=-3)
time.sleep({more})
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["by itself", "by the limit"])
def test_processes_started_by_a_measurement_end_with_it(tmp_path, ends):
    late = tmp_path / "late"
    more = 0 if ends == "by itself" else 60
    words = [sys.executable, "-c", SLEEPER.format(path=str(late), more=more)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        gpu_minutes._with_all_it_starts(words, {}, 2)
    time.sleep(5)
    assert not late.exists()


def test_a_short_trial_does_not_count_as_a_measurement(tmp_path, monkeypatch):
    line = dataclasses.replace(gpu_minutes.LINES[0], name="one")
    monkeypatch.setattr(gpu_minutes, "LINES", [line])
    said = '{"ms a step": 7}', None
    monkeypatch.setattr(gpu_minutes, "_with_all_it_starts", lambda *_: said)
    gpu_minutes.measure(line, tmp_path, 3)
    assert "ms a step 7" in gpu_minutes.table(tmp_path, 3)
    assert "ms a step 7" not in gpu_minutes.table(tmp_path, None)
    gpu_minutes.measure(line, tmp_path, None)
    assert "ms a step 7" in gpu_minutes.table(tmp_path, None)


def test_flags_of_xla_join_those_that_name_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_cuda_data_dir=cuda")
    [line] = [one for one in gpu_minutes.LINES if one.name.endswith("out CUDA graphs")]
    found = []
    monkeypatch.setattr(
        gpu_minutes,
        "_with_all_it_starts",
        lambda _, given, limit: found.append(given["XLA_FLAGS"]) or ("{}", limit),
    )
    gpu_minutes.measure(line, tmp_path, 3)
    own = line.environment["XLA_FLAGS"]
    assert found == [f"--xla_gpu_cuda_data_dir=cuda {own}"]


def test_each_line_has_its_own_name_and_fifteen_minutes_are_enough():
    names = [line.name for line in gpu_minutes.LINES]
    assert len(names) == len({*names})
    # But for unpacking TensorFlow on the machine, and lines that end early.
    assert sum(line.seconds for line in gpu_minutes.LINES) <= 20 * 60
