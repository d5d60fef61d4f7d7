"""The flags of the scaling prediction: which values they accept and refuse."""

import pytest

import runs
from benchmarks import scaling
from benchmarks.prediction import hardware
from cifar10.errors import UsageError


def test_link_is_named_or_given_by_figures():
    for name in hardware.LINKS:
        link = hardware.parse_link("--within", name)
        assert link.bandwidth > 1e9
        assert 1e-6 < link.latency < 1e-4
        assert link.source
    link = hardware.parse_link("--within", "25:10")
    assert (link.bandwidth, link.latency) == (25e9, pytest.approx(10e-6))
    for text in ("", "nvlink9", "25", "25:", ":5", "0:5", "nan:5", "5:-1"):
        with pytest.raises(UsageError, match="--network"):
            hardware.parse_link("--network", text)


def test_values_out_of_range_are_refused(monkeypatch, tmp_path):
    for flag, value in (
        ("--batch_size", 0),
        ("--gpus_per_machine", -2),
        ("--step_ms", 0),
        ("--step_ms", "nan"),
        ("--memory_gb_s", "inf"),
        ("--repeats", -1),
        ("--repeats", 0),
        ("--plot", "figure.pdf"),
        ("--json", "/nowhere/x.json"),
    ):
        monkeypatch.setattr("sys.argv", ["scaling.py", flag, str(value)])
        with pytest.raises(UsageError, match=flag):
            scaling.parse_flags()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["scaling.py", "--plot", str(tmp_path / "x.png")])
    with pytest.raises(UsageError, match="peers"):
        scaling.parse_flags()


def test_refusal_is_exit_code_2_and_one_line():
    done = runs.call("benchmarks/scaling.py", "--network", "pigeon")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--network" in done.stderr
    assert done.stderr.count("\n") == 1
