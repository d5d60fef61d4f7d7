"""Goodput: each moment of a run is in one part, whatever kills it."""

import contextlib
import json
import time
import types

import pytest

import runs
from cifar10.training import timing
from cifar10.training.timing import PARTS, Goodput


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=1000.0)
    fake = types.SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(timing, "time", fake)
    return clock


def work(ledger, clock, steps):
    """Steps of 1 s, of which half a second is waiting, and a second of summaries."""
    ledger.enter("training")
    for _ in range(steps):
        clock.now += 0.5
        with ledger.during("input"):
            clock.now += 0.5
    with ledger.during("summaries"):
        clock.now += 1.0


def log(path, step, ledger):
    line = {"step": step, "time": 1.0, "seconds": ledger.seconds()}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def nonzero(ledger):
    return {part: of for part, of in ledger.seconds().items() if of}


def test_each_moment_is_in_one_part(clock):
    ledger = Goodput(began=990.0)
    clock.now += 5.0
    work(ledger, clock, 10)
    with contextlib.suppress(ZeroDivisionError), ledger.during("saving"):
        clock.now += 3.0
        with ledger.during("summaries"):
            clock.now += 2.0
        raise ZeroDivisionError
    clock.now += 4.0
    expected = {"start": 15, "training": 9, "input": 5, "summaries": 3, "saving": 3}
    assert nonzero(ledger) == expected
    assert sum(ledger.seconds().values()) == clock.now - 990.0
    assert ledger.stepping() == (14.0, 5.0)
    assert "43% start" in ledger.summary(70, 128)


@pytest.mark.parametrize(("resumed", "lost"), [(0, 24), (10, 13), (99, 0)])
def test_a_restart_goes_on_and_says_what_the_kill_cost(tmp_path, clock, resumed, lost):
    """Saved at step 20, killed at 30; the last step logged is the 22nd."""
    killed = Goodput(began=clock.now)
    path = tmp_path / "metrics.jsonl"
    clock.now += 7.0
    for step in (10, 20):
        work(killed, clock, 10)
        log(path, step, killed)
    with killed.during("saving"):
        clock.now += 1.0
    killed.enter("training")
    clock.now += 2.0
    log(path, 22, killed)
    clock.now += 8.0
    clock.now += 3600.0  # The machine is off.
    restarted = Goodput(began=clock.now)
    clock.now += 5.0
    restarted.enter("start")
    restarted.go_back(path, resumed)
    seconds = restarted.seconds()
    assert sum(seconds.values()) == 32.0 + 5.0
    assert seconds["work lost"] == lost
    assert (seconds["start"], seconds["saving"]) == (12.0, 1.0)
    work(restarted, clock, 3)
    assert sum(restarted.seconds().values()) == 32.0 + 9.0
    assert restarted.seconds()["work lost"] == lost


@pytest.mark.parametrize(
    ("logged", "rate"), [(10, "8.33 images/s"), (0, "7.69 images/s")]
)
def test_the_rate_leaves_out_steps_whose_time_the_log_has_lost(
    tmp_path, clock, logged, rate
):
    """Resumed from step 20, although the log ends at step 10 or is gone."""
    path = tmp_path / "metrics.jsonl"
    if logged:
        saved = Goodput(began=clock.now)
        work(saved, clock, logged)  # Takes 11 seconds.
        log(path, logged, saved)
    restarted = Goodput(began=clock.now)
    clock.now += 2.0
    restarted.go_back(path, 20)
    work(restarted, clock, 10)  # 13 seconds with the start.
    assert rate in restarted.summary(30, 10)


def test_a_damaged_line_costs_that_line(tmp_path):
    path, good = tmp_path / "metrics.jsonl", dict.fromkeys(PARTS, 1.0)
    odd = ["1", -1.0, float("nan"), 10**400]
    damaged = [None, {"training": 1.0}, *(good | {"start": of} for of in odd)]
    lines = [
        "null",
        '{"step": 9, "seconds": {"trai',
        "[" * 5000,
        *[json.dumps({"step": 9, "seconds": seconds}) for seconds in damaged],
    ]
    intact = json.dumps({"step": 5, "seconds": good, "total_loss": None})
    path.write_text("".join(f"{line}\n" for line in [intact, *lines]))
    assert timing.read_seconds(path) == [(5, good)]


def test_a_training_logs_the_parts_of_its_time(tmp_path, stand_in_dir):
    options = {"max_steps": 2, "checkpoint_steps": 1, "log_frequency": 1}
    began = time.perf_counter()
    runs.train(tmp_path / "run", stand_in_dir, num_gpus=1, batch_size=4, **options)
    took = time.perf_counter() - began
    first, last = (line["seconds"] for line in runs.logged(tmp_path / "run"))
    assert 0 < sum(first.values()) < sum(last.values()) < took
    assert first["start"] > 0
    assert last["saving"] > first["saving"] == last["work lost"] == 0.0
