"""The flags of the scaling prediction: what they take and how they refuse."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.prediction import hardware
from benchmarks.prediction.hardware import LINKS
from cifar10.errors import UsageError

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("text", LINKS)
def test_link_by_name(text):
    link = hardware.parse_link("--within", text)

    assert link.bandwidth > 1e9
    assert 1e-6 < link.latency < 1e-4
    assert link.source


def test_link_by_figures():
    link = hardware.parse_link("--within", "25:10")

    assert (link.bandwidth, link.latency) == (25e9, pytest.approx(10e-6))


@pytest.mark.parametrize(
    "text", ["", "nvlink9", "25", "25:", ":5", "0:5", "-1:5", "nan:5", "inf:5", "5:-1"]
)
def test_link_that_is_none_is_told(text):
    with pytest.raises(UsageError, match=f"^--network {text}: .*25:10"):
        hardware.parse_link("--network", text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch_size", "0"], "--batch_size 0: .* at least 1; try 128"),
        (["--gpus_per_machine", "-2"], "--gpus_per_machine -2: .* at least 1; try 8"),
        (["--step_ms", "0"], "--step_ms 0: .* above 0; try 1"),
        (["--step_ms", "nan"], "--step_ms nan: .* finite"),
        (["--memory_gb_s", "inf"], "--memory_gb_s inf: .* finite .* try 150"),
        (["--repeats", "-1"], "--repeats -1: .* 0 or more; try 15"),
        (["--repeats", "0"], "--repeats 0: .* try --step_ms 1"),
        (["--plot", "figure.pdf"], r"--plot figure.pdf: .* end in \.png"),
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere; create it"),
    ],
)
def test_flag_out_of_range_is_told(flags, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags])

    with pytest.raises(UsageError, match=message):
        scaling.parse_flags()


def test_missing_matplotlib_is_told_before_the_work(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--plot", str(tmp_path / "x.png")])

    with pytest.raises(UsageError, match=r"not installed.*'\.\[peers\]'.*leave --plot"):
        scaling.parse_flags()


def test_wrong_flag_is_exit_code_2_and_one_line():
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", "--network", "pigeon"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("scaling.py: --network pigeon: it is one of pcie3,")
    assert ended.stderr.count("\n") == 1
