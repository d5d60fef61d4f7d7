"""The console: the rate is of training only, and lines stay lines in a file."""

import contextlib
import types

import pytest

from cifar10 import console
from cifar10.console import Console, Throughput, step_line


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    fake = types.SimpleNamespace(perf_counter=clock)
    monkeypatch.setattr(console, "time", fake)
    return clock


def run_steps(throughput, clock, *seconds):
    for one in seconds:
        clock.now += one
        throughput.count()


def test_rate_is_of_all_steps_and_all_their_images(clock):
    throughput = Throughput(128)
    run_steps(throughput, clock, 0.5, 1.5)

    assert throughput.take() == pytest.approx((128.0, 1.0))


def test_what_runs_under_leave_out_does_not_slow_the_rate(clock):
    throughput = Throughput(128)
    run_steps(throughput, clock, 1.0)
    with throughput.leave_out():
        clock.now += 60.0
    run_steps(throughput, clock, 1.0)
    with throughput.leave_out():
        clock.now += 30.0

    assert throughput.take() == pytest.approx((128.0, 1.0))


def test_time_is_left_out_even_if_what_runs_there_raises(clock):
    throughput = Throughput(128)
    with contextlib.suppress(ZeroDivisionError), throughput.leave_out():
        clock.now += 60.0
        raise ZeroDivisionError
    run_steps(throughput, clock, 2.0)

    assert throughput.take() == pytest.approx((64.0, 2.0))


def test_each_window_begins_anew(clock):
    throughput = Throughput(128)
    run_steps(throughput, clock, 8.0, 8.0)
    with throughput.leave_out():
        clock.now += 60.0
    throughput.take()
    run_steps(throughput, clock, 4.0)

    assert throughput.take() == pytest.approx((32.0, 4.0))


def test_window_without_steps_has_no_rate(clock):
    throughput = Throughput(128)
    clock.now += 5.0

    assert throughput.take() is None


def test_clock_that_stood_still_gives_no_rate(clock):
    throughput = Throughput(128)
    run_steps(throughput, clock, 0.0)

    assert throughput.take() is None


def test_step_line_is_the_tutorials():
    assert (
        step_line(10, 4.6649, (1234.54, 0.10371))
        == "step 10, loss = 4.66 (1234.5 examples/sec; 0.104 sec/batch)"
    )


def test_step_line_without_rate_says_why():
    assert step_line(10, 4.6649, None) == "step 10, loss = 4.66 (not timed)"


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
        step_line(10, 4.66, (1234.5, 0.104)),
        "a path: /tmp/" + "long name/" * 30 + "end",
        "no [bold]markup[/bold] and no [0]",
    ]
    with Console(0, 30) as output:
        for number, line in enumerate(lines, start=1):
            output.advance(10 * number)
            output.line(line)

    written = capsys.readouterr()
    assert written.out == "".join(f"{line}\n" for line in lines)
    assert written.err == ""
