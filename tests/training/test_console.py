"""The console: lines that fit a terminal, and stay lines in a file."""

import math
import sys
import types

import pytest

import runs
from cifar10.towers import precision
from cifar10.training import console, results, timing
from cifar10.training.console import Console, forecast_line, significant, step_line


def metrics(**changed):
    return {
        "total_loss": 1.6449,
        "cross_entropy": 1.2951,
        "precision @ 1": 0.5417,
        "examples_per_sec": 1760.7,
        **changed,
    }


def test_step_line_shows_loss_accuracy_and_a_rate_without_false_digits():
    assert step_line(1200, metrics(), 128) == (
        "step 1200, loss 1.64 (CE 1.30), accuracy 0.542, 1,760 images/s, 0.073 s/batch"
    )


def test_step_line_fits_a_terminal():
    assert len(step_line(99_999, metrics(examples_per_sec=98765.4), 128)) <= 80
    exploded = metrics(total_loss=3e22, cross_entropy=7.9e22)
    assert len(step_line(1000, exploded, 128)) <= 80


def test_step_line_without_rate_says_why():
    assert step_line(10, metrics(examples_per_sec=math.nan), 128).endswith(
        ", not timed"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.31416, "0.314"),
        (8.0, "8"),
        (99.96, "100"),
        (876.54, "877"),
        (17654.3, "17,700"),
        (1234567.8, "1,230,000"),
    ],
)
def test_three_digits_of_a_rate_are_shown(value, text):
    assert significant(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (11.4, "11 seconds"),
        (89, "89 seconds"),
        (95, "1.6 minutes"),
        (724, "12 minutes"),
        (5390, "90 minutes"),
        (7.46 * 3600, "7.5 hours"),
        (35 * 3600, "35 hours"),
        (36.1 * 3600, "1.5 days"),
        (123 * 24 * 3600, "120 days"),
    ],
)
def test_durations_have_a_unit_that_suits_them(seconds, text):
    assert console.duration(seconds) == text


@pytest.fixture(autouse=True)
def script(monkeypatch):
    """Forecasts are for a training by flags, unless a test says otherwise."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


def test_forecast_says_how_long_it_takes_and_how_to_stop():
    assert forecast_line(600, 724.0) == (
        "About 12 minutes for the 600 steps left. Ctrl-C saves; --resume continues."
    )


def test_forecast_of_a_program_that_has_no_flags(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/venv/ipykernel_launcher.py", "-f", "x.json"])
    text = forecast_line(100_000, 36_000.0)
    assert "the same call continues" in text
    assert "--" not in text


def test_what_ends_soon_needs_no_forecast():
    assert forecast_line(600, 9.0) == ""
    assert forecast_line(0, 0.0) == ""


@pytest.mark.parametrize(
    ("native", "why"),
    [
        (True, "No GPU is used."),
        (
            False,
            "No GPU is used, and bfloat16 is not native here; float32 takes long.",
        ),
    ],
)
def test_forecast_of_hours_on_a_cpu_says_what_helps(monkeypatch, native, why):
    monkeypatch.setattr(precision, "has_bfloat16", lambda devices: native)
    lines = forecast_line(100_000, 36_000.0).splitlines()
    assert lines == [
        "About 10 hours for the 100,000 steps left. Ctrl-C saves; --resume continues.",
        why,
        "An hour is enough for 10,000 steps; --max_steps sets their number.",
    ]
    assert all(len(line) <= 80 for line in lines)


def test_forecast_of_hours_on_a_gpu_gives_no_advice(monkeypatch):
    monkeypatch.setattr(
        console.tf.config, "get_visible_devices", lambda kind: ["a GPU"]
    )
    assert len(forecast_line(100_000, 36_000.0).splitlines()) == 1


@pytest.fixture
def narrow_file(monkeypatch):
    """Narrow output that is no terminal, whatever the tests run in."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")


@pytest.mark.usefixtures("narrow_file")
def test_output_to_a_file_is_the_lines_and_nothing_else(capsys):
    lines = [
        step_line(10, metrics(), 8),
        "a path: /tmp/" + "long name/" * 30 + "end",
        "no [bold]markup[/bold] and no [0]",
    ]
    output = Console(30, 8)
    output.on_start(types.SimpleNamespace(step=0))
    for number, line in enumerate(lines, start=1):
        output.on_step(10 * number)
        output.on_message(line)
    output.on_end(30, "finished")

    written = capsys.readouterr()
    assert written.out == "".join(f"{line}\n" for line in lines)
    assert written.err == ""


def test_the_progress_bar_takes_one_line_of_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    output = Console(1_000_000, 8)
    output.on_start(types.SimpleNamespace(step=999_999))
    output.on_end(999_999, "failed")
    lines = output._console.render_lines(output._progress.get_renderable())
    text = "".join(segment.text for segment in lines[0])
    assert len(lines) == 1
    assert text.startswith("step 999999 of 1000000 ")
    assert text.rstrip().endswith("left")


def test_a_training_forecasts_its_end_once_and_names_a_sudden_rise(
    tmp_path, stand_in_dir, monkeypatch, capsys
):
    monkeypatch.setattr(timing, "_FORECAST_AFTER", 1e-9)
    monkeypatch.setattr(console, "_WORTH_SAYING", 0.0)
    monkeypatch.setattr(results, "_RISE", -100.0)
    runs.train(
        tmp_path / "run",
        stand_in_dir,
        model="small_runs:small",
        num_gpus=1,
        batch_size=8,
        max_steps=20,
        log_frequency=5,
    )
    lines = capsys.readouterr().out.splitlines()
    beginnings = [line.partition(" ")[0] for line in lines if line[0] != " "]
    # The second step is the first that is timed.
    assert beginnings.count("About") == 1
    assert beginnings.index("About") < beginnings.index("step")
    assert any(" for the 18 steps left. " in line for line in lines)
    assert beginnings.count("UNSTABLE:") == 1
    assert beginnings.count("step") == 4
