"""The console: the lines of steps, forecasts, and the same lines in a file."""

import math
import sys
import types

import pytest

import runs
from cifar10.training import timing
from cifar10.training.console import Console, forecast_line, step_line
from cifar10.training.results import Results

METRICS = {
    "total_loss": 1.6449,
    "cross_entropy": 1.2951,
    "precision @ 1": 0.5417,
    "examples_per_sec": 1760.7,
}


@pytest.fixture(autouse=True)
def script(monkeypatch):
    """Forecasts are for a training by flags, unless a test says otherwise."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


def test_step_line_shows_loss_accuracy_and_a_rate_without_false_digits():
    assert step_line(1200, METRICS, 128) == (
        "step 1200, loss 1.64 (CE 1.30), accuracy 0.542, 1,760 images/s, 0.073 s/batch"
    )
    assert "timed" in step_line(10, METRICS | {"examples_per_sec": math.nan}, 128)


def test_forecast_is_of_trainings_that_take_long(monkeypatch):
    assert forecast_line(600, 9.0) == forecast_line(0, 0.0) == ""
    assert "12 minutes" in forecast_line(600, 724.0)
    assert "--resume" in forecast_line(600, 724.0)
    hours = forecast_line(100_000, 36_000.0)
    assert "10 hours" in hours
    assert "10,000" in hours, "the steps of one hour, as there is no GPU"
    monkeypatch.setattr(sys, "argv", ["/venv/ipykernel_launcher.py", "-f", "x.json"])
    assert "--" not in forecast_line(100_000, 36_000.0)


def test_output_to_a_file_is_the_lines_and_nothing_else(monkeypatch, capsys):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    lines = ["a path: /tmp/" + "long name/" * 30, "no [bold]markup[/bold] and no [0]"]
    output = Console(30, 8)
    output.on_start(types.SimpleNamespace(step=0))
    for number, line in enumerate(lines, start=1):
        output.on_step(10 * number)
        output.on_message(line)
    output.on_end(30, "finished")
    assert capsys.readouterr() == ("".join(f"{line}\n" for line in lines), "")


def test_a_training_forecasts_its_end_once_and_names_a_sudden_rise(
    tmp_path, stand_in_dir, monkeypatch, capsys
):
    ledger = timing.Throughput
    monkeypatch.setattr(ledger, "forecast", lambda throughput, steps: 60.0 * steps)
    forecasts = iter([False, True])
    monkeypatch.setattr(ledger, "allows_forecast", lambda _: next(forecasts, False))
    rises = iter(["UNSTABLE: by far"])
    monkeypatch.setattr(Results, "take_warning", lambda _: next(rises, ""))
    options = {"num_gpus": 1, "max_steps": 20, "log_frequency": 5}
    runs.train(tmp_path / "run", stand_in_dir, **options)
    lines = capsys.readouterr().out.splitlines()
    beginnings = [line.partition(" ")[0] for line in lines if line[0] != " "]
    assert beginnings.count("About") == 1
    assert beginnings.index("About") < beginnings.index("step")
    assert any("18 steps" in line for line in lines)
    assert beginnings.count("UNSTABLE:") == 1
    assert beginnings.count("step") == 4
