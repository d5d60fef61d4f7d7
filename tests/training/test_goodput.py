"""Goodput: each moment of a run is in one part, whatever kills it."""

import contextlib
import json
import time
import types

import pytest

import runs
from cifar10.training import goodput
from cifar10.training.goodput import PARTS, Goodput

WORK = ("training", "input", "following", "summaries", "evaluation")


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=1000.0)
    fake = types.SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr(goodput, "time", fake)
    return clock


def work(ledger, clock, steps):
    """Steps of 1 s, of which half a second is waiting, and a second of summaries."""
    ledger.enter("training")
    for _ in range(steps):
        clock.now += 1.0
        ledger.waited(0.5)
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
    assert ledger.stepping() == 14.0
    assert ledger.summary(70, 128) == (
        "Time:   35 seconds: 43% start, 26% training, 14% input, 9% summaries, "
        "9% saving; 256 images/s of wall time"
    )


@pytest.mark.parametrize(
    ("resumed", "lost"), [(0, 24), (10, 13), (20, 2), (30, 0), (99, 0)]
)
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
    restarted.go_back(path, resumed, restarted=True)
    seconds = restarted.seconds()
    assert sum(seconds.values()) == 32.0 + 5.0
    assert seconds["work lost"] == lost
    assert (seconds["start"], seconds["saving"]) == (12.0, 1.0)
    work(restarted, clock, 3)
    assert sum(restarted.seconds().values()) == 32.0 + 9.0
    assert restarted.seconds()["work lost"] == lost


def test_a_rollback_is_work_lost_too(tmp_path, clock):
    path = tmp_path / "metrics.jsonl"
    ledger = Goodput()
    for step in (10, 20):
        work(ledger, clock, 10)
        log(path, step, ledger)
    ledger.go_back(path, 10, restarted=False)
    assert nonzero(ledger) == {
        "training": 5,
        "input": 5,
        "summaries": 1,
        "work lost": 11,
    }


GOOD = dict.fromkeys(PARTS, 1.0)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "[]",
        '{"step": 9, "seconds": {"trai',
        "[" * 5000,
        *[
            json.dumps({"step": 9, "seconds": seconds})
            for seconds in (
                *(None, 5, "start", [1.0], {}, {"training": 1.0}),
                *(GOOD | {"start": odd} for odd in ("1", None, [], {}, -1.0, 1e11)),
                *(GOOD | {"start": odd} for odd in (float("nan"), float("inf"))),
                GOOD | {"start": 10**400},
            )
        ],
        *[json.dumps({"step": step, "seconds": GOOD}) for step in (None, "9", 1.5, [])],
        json.dumps({"seconds": GOOD}),
    ],
)
def test_a_damaged_line_costs_that_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps({"step": 5, "seconds": GOOD, "total_loss": None})
    path.write_text(f"{whole}\n{line}\n")
    assert goodput.read(path) == [(5, GOOD)]


def test_a_log_that_cannot_be_read_costs_the_figure(tmp_path):
    ledger = Goodput()
    for path in (tmp_path / "none", tmp_path):
        ledger.go_back(path, 5, restarted=True)
        # Nothing tells how long the first five steps took.
        assert ledger.summary(5, 128).endswith(" 0 images/s of wall time")
    assert ledger.seconds()["work lost"] == 0.0


def trained(run_dir, data_dir, max_steps):
    """Trains in this process; returns what it prints and how many seconds it took."""
    flags = runs.training_flags(
        run_dir, data_dir, max_steps=max_steps, checkpoint_steps=2, log_frequency=1
    )
    began = time.perf_counter()
    found = runs.call("train.py", *flags)
    assert found.returncode == 0, found.stderr
    return found.stdout, time.perf_counter() - began


def test_a_training_logs_and_prints_the_parts_of_its_time(tmp_path, stand_in_dir):
    printed, took = trained(tmp_path / "run", stand_in_dir, 4)
    lines = runs.logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(time.time() - 600 < line["time"] <= time.time() for line in lines)
    sums = [sum(line["seconds"].values()) for line in lines]
    assert sums == sorted(sums)
    assert 0 < sums[-1] < took
    first, last = lines[0]["seconds"], lines[-1]["seconds"]
    assert first["start"] > 0
    assert last["training"] > first["training"]
    assert last["saving"] > first["saving"] == 0.0
    assert last["summaries"] > first["summaries"]
    assert last["work lost"] == last["evaluation"] == 0.0
    assert "\nTime:   " in printed

    # The next one goes on from there.
    _, more = trained(tmp_path / "run", stand_in_dir, 6)
    again = runs.logged(tmp_path / "run")[-1]["seconds"]
    assert sums[-1] < sum(again.values()) < took + more
    assert again["work lost"] == 0.0
    assert all(again[part] >= last[part] for part in PARTS)


@pytest.mark.slow
def test_three_kills_cost_what_was_done_after_the_checkpoint(tmp_path, stand_in_dir):
    run_dir = tmp_path / "run"
    flags = runs.training_flags(
        run_dir,
        stand_in_dir,
        max_steps=60,
        checkpoint_steps=20,
        log_frequency=1,
        precision="float32",
    )
    took = lost = 0.0
    for last_seen in (15, 35, 55):
        began = time.perf_counter()
        with runs.started("train.py", *flags, cwd=runs.ROOT) as process:
            runs.read_until(process.stdout, f"step {last_seen},")
            process.kill()
            process.wait()
        took += time.perf_counter() - began
        saved = sorted((run_dir / "checkpoints").glob("step-*"))
        step = int(saved[-1].name.removeprefix("step-")) if saved else 0
        times = goodput.read(run_dir / "metrics.jsonl")
        (end, last), kept = times[-1], [of for at, of in times if at <= step]
        assert end > step
        of_checkpoint = kept[-1] if kept else dict.fromkeys(PARTS, 0.0)
        cost = sum(last[part] - of_checkpoint[part] for part in WORK)
        assert cost > 0
        lost += cost
    began = time.perf_counter()
    found = runs.run("train.py", *flags)
    took += time.perf_counter() - began
    assert found.returncode == 0, found.stderr
    _, seconds = goodput.read(run_dir / "metrics.jsonl")[-1]
    assert seconds["work lost"] == pytest.approx(lost, abs=0.1)
    # All but what Python takes to start, and what no line tells of.
    assert 0.5 * took < sum(seconds.values()) < took
    assert "work lost" in found.stdout
