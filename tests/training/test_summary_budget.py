"""Histograms and images take at most 5 % of the time, and so do checkpoints."""

import contextlib
import signal
import time
import types

import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.errors import StoppedError
from cifar10.process.signals import StopSignals
from cifar10.run_directory import checkpoints
from cifar10.training import assembly, periodic, timing, train as training
from cifar10.training.periodic import Saving
from cifar10.training.tensorboard import Summaries


class Written:
    """The steps of a second each that have summaries, which take some seconds."""

    def __init__(self, monkeypatch, steps, *, cost, first_cost=None):
        self.now, self.steps = 1000.0, []
        self._cost, self._first_cost = cost, first_cost or cost
        fake = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(timing, "time", fake)
        model = types.SimpleNamespace(trainable_variables=[])
        training = types.SimpleNamespace(
            config=types.SimpleNamespace(output=types.SimpleNamespace(summary_steps=1)),
            towers=types.SimpleNamespace(
                state=types.SimpleNamespace(model=model),
                gradients=lambda batches: {"kernel": tf.constant([1.0])},
            ),
            sections="in two sections",
        )
        summaries = Summaries(
            types.SimpleNamespace(
                training=training,
                hooks=types.SimpleNamespace(notify=self._write),
                paused_for=lambda part: contextlib.nullcontext(),
                newest_batches=lambda: [(None, None)],
            )
        )
        for step in range(1, steps + 1):
            self.now += 1.0
            summaries.on_step(step)

    def _write(self, event, step, summary):
        del event, summary
        self.now += self._cost if self.steps else self._first_cost
        self.steps.append(step)


def test_cheap_summaries_are_all_written_even_if_the_first_is_slow(monkeypatch):
    """Tracing belongs to the start."""
    written = Written(monkeypatch, 50, cost=0.04, first_cost=1e3)
    assert written.steps == list(range(1, 51))


@pytest.mark.parametrize("cost", [0.1, 20.0])
def test_slow_summaries_take_a_twentieth_of_the_time(monkeypatch, cost):
    written = Written(monkeypatch, 5000, cost=cost)
    counted = (len(written.steps) - 1) * cost  # The first is of the start.
    most = 0.05 * (written.now - 1000.0)
    assert 0.8 * most - cost < counted <= most + cost


class Saved:
    """The steps, of a second each, of which a run of 400 steps saves checkpoints.

    A checkpoint takes `cost` seconds.
    """

    def __init__(self, monkeypatch, *, cost, workers=1, **given):
        self.now, self.steps, self._cost = 1000.0, [], cost
        fake = types.SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(timing, "time", fake)
        placement = types.SimpleNamespace(devices=("/cpu:0",))
        config = Config(**{"precision": "float32", "max_steps": 400, **given})
        config = assembly.resolve_config(config, placement, workers=workers)
        self.progress = types.SimpleNamespace(
            is_over=False, save=lambda: None, last_saved=lambda: 0
        )
        loop = types.SimpleNamespace(
            training=types.SimpleNamespace(
                config=config,
                workers=types.SimpleNamespace(count=workers),
                towers=types.SimpleNamespace(states=[], state=None),
            ),
            progress=self.progress,
            hooks=types.SimpleNamespace(notify=self._save),
            paused_for=lambda part: contextlib.nullcontext(),
            read_results=lambda: None,
        )
        monkeypatch.setattr(periodic, "check_replicas", lambda *_: None)
        monkeypatch.setattr(periodic, "not_finite", lambda _: [])
        saving = Saving(loop)
        saving.on_start(None)
        for step in range(1, 401):
            self.now += 1.0
            self.progress.is_over = step == 400
            saving.on_step(step)

    def _save(self, event, step, *_):
        if event == "on_save":
            self.now += self._cost
            self.steps.append(step)


# Every 5 steps, by nobody's choice.
RECIPE = "checkpoint_steps = 5\n"


def test_slow_checkpoints_take_a_twentieth_of_the_time(monkeypatch, tmp_path):
    recipe = tmp_path / "own.toml"
    recipe.write_text(RECIPE)
    given = {"recipe": str(recipe)}
    every = list(range(5, 401, 5))
    assert Saved(monkeypatch, cost=0.1, **given).steps == every
    dear = Saved(monkeypatch, cost=2.0, **given).steps
    # After the first, 40 seconds pass, and then comes the next fifth step.
    assert dear == [5, 10, *range(50, 400, 40), 400]


def test_requested_checkpoints_are_all_saved(monkeypatch, tmp_path):
    recipe = tmp_path / "own.toml"
    recipe.write_text(RECIPE)
    chosen = Saved(monkeypatch, cost=2.0, checkpoint_steps=5).steps
    assert chosen == list(range(5, 401, 5))
    given = {"recipe": str(recipe), "batch_size": 8}
    workers = Saved(monkeypatch, cost=2.0, workers=2, **given).steps
    assert workers == chosen, "whose clocks differ"
    exact = {"deterministic": True, "on_nan": "rollback", **given}
    assert Saved(monkeypatch, cost=2.0, **exact).steps == chosen, "to roll back to"
    scored = Saved(monkeypatch, cost=2.0, eval_steps=20, keep_best=1, **given).steps
    assert {*range(20, 401, 20)} <= {*scored} < {*chosen}


class Ending:
    """A hook that ends a run after a step, by a signal or an error."""

    def __init__(self, step, stop):
        self._step, self._stop = step, stop

    def on_step(self, step):
        if step >= self._step and self._stop:
            self._stop.requested = signal.SIGTERM
        elif step >= self._step:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("signalled", "steps_per_call", "kept"),
    [(False, 3, [2, 4]), (True, 1, [2, 4, 7])],
)
def test_a_run_resumes_exactly_from_the_last_saved_step(
    tmp_path, stand_in_dir, monkeypatch, signalled, steps_per_call, kept
):
    """With batch statistics and dropout; the losses' averages go on too."""
    recipe = tmp_path / "own.toml"
    recipe.write_text("checkpoint_steps = 2\n")
    options = {"model": "small_runs:small", "batch_size": 8, "log_frequency": 1}
    options |= {"recipe": str(recipe), "num_gpus": 1, "max_steps": 11}
    options["steps_per_call"] = steps_per_call
    straight = runs.train(tmp_path / "straight", stand_in_dir, **options)

    save, lost = checkpoints.save, [0.0]

    def slow_save(*arguments, **given):
        lost[0] += 1e6
        return save(*arguments, **given)

    monkeypatch.setattr(checkpoints, "save", slow_save)
    clock = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + lost[0])
    monkeypatch.setattr(timing, "time", clock)
    run, stop = tmp_path / "run", StopSignals()
    config = Config(
        train_dir=str(run), data="synthetic", data_dir=str(stand_in_dir), **options
    )
    hook = Ending(7, stop if signalled else None)
    with pytest.raises(StoppedError if signalled else ZeroDivisionError):
        training.train(config, stop, hooks=[hook])
    assert checkpoints.steps(run / "checkpoints") == kept
    runs.assert_equal(runs.train(run, stand_in_dir, **options), straight)
    logs = [runs.logged(tmp_path / name) for name in ("straight", "run")]
    losses = [[(x["step"], x["total_loss/average"]) for x in lines] for lines in logs]
    assert losses[0] == losses[1]
