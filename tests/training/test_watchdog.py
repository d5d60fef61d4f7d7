"""A step that hangs is told, with its cause, and on request it ends the run."""

import contextlib
import threading
import types

import pytest
import tensorflow as tf

import runs
from cifar10.errors import EXIT_TRY_AGAIN
from cifar10.input.pipeline import PrefetchQueues
from cifar10.training import periodic, watchdog
from cifar10.training.timing import Timer
from cifar10.training.watchdog import Watchdog


class Clock:
    """The time, for the module `time` and the event that ends the watchdog's thread.

    What happens in it are pairs of seconds until then and an action.
    """

    def __init__(self, script):
        self._script = [*script]
        self.now = 1000.0
        self.is_over = False

    def monotonic(self):
        return self.now

    def is_set(self):
        return self.is_over

    def set(self):
        self.is_over = True

    def wait(self, tick):
        if self._script and self._script[0][0] <= 0:
            self._script.pop(0)[1]()
        if not self._script:
            return True
        seconds, action = self._script[0]
        self._script[0] = (seconds - tick, action)
        self.now += tick
        return False


class AtOnce(threading.Thread):
    """A thread that ends before its start returns."""

    start = threading.Thread.run

    def join(self, timeout=None):
        pass


def loop_of(
    hang_timeout=None,
    *,
    part="training",
    steps_per_call=1,
    gpus=0,
):
    """What a watchdog looks at in a loop; `gpus` hold copies of the variables."""
    config = types.SimpleNamespace(
        checkpoints=types.SimpleNamespace(hang_timeout=hang_timeout),
    )
    training = types.SimpleNamespace(
        config=config,
        steps_per_call=steps_per_call,
        placement=types.SimpleNamespace(suits_nccl=gpus > 0),
        workers=types.SimpleNamespace(count=1),
        planner=types.SimpleNamespace(replicas=max(1, gpus)),
    )
    timer = Timer()
    timer.enter(part)
    events = []
    progress = types.SimpleNamespace(log_event=lambda *event: events.append(event))
    return types.SimpleNamespace(
        training=training, timer=timer, progress=progress, events=events
    )


class Watched:
    """What a watchdog did while steps took so many seconds.

    A script has pairs of seconds and what happens then: a step, a machine that was
    stopped, or a part of the time that begins.
    """

    def __init__(self, script, *options, part="training", **more):
        self.codes, self.told = [], []
        self._steps = 0
        actions = [
            (seconds, lambda what=what: self._act(what)) for seconds, what in script
        ]
        self.clock = Clock(actions)
        fakes = {
            "time": self.clock,
            "write_line": self.told.append,
            "threading": types.SimpleNamespace(Event=lambda: self.clock, Thread=AtOnce),
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, fake in fakes.items():
                patch.setattr(watchdog, name, fake)
            self.loop = loop_of(*options, part=part, **more)
            self.dog = Watchdog(self.loop, self.codes.append)
            self.dog.on_start(None)
            self.dog.on_end(0, "finished")

    def _act(self, what):
        if what == "step":
            self._steps += 1
            self.dog.on_step(self._steps)
        elif what == "stopped":
            self.clock.now += 5000.0
        else:
            self.loop.timer.enter(what)

    @property
    def steps_told(self):
        return [int(line.split()[1]) for line in self.told]


QUICK = [(1.0, "step")] * 5


def test_a_far_too_long_step_is_reported_once():
    for script, hangs in (
        ([*QUICK, (700.0, "step")], [6]),
        ([*QUICK, (70.0, "step"), (1.0, "step"), (70.0, "step")], [6, 8]),
        # Steps that take long: 20 times the median of 10 seconds.
        ([(10.0, "step")] * 5 + [(190.0, "step"), (220.0, "step")], [7]),
        # The first step is compiled.
        ([(580.0, "step")], []),
        # Ctrl-Z, or a machine that slept: nothing hung.
        ([*QUICK, (5.0, "stopped"), (5.0, "step")], []),
    ):
        watched = Watched(script)
        assert watched.codes == []
        assert watched.steps_told == hangs
        events = [(step, event) for step, event, _ in watched.loop.events]
        assert events == [(step, "silence") for step in hangs], "for alerts"


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_step_hanging_in_nccl_gets_advice(gpus):
    (told,) = Watched([*QUICK, (70.0, "step")], gpus=gpus).told
    assert ("NCCL_P2P_DISABLE=1" in told) is (gpus > 1)
    (told,) = Watched([*QUICK, (0.0, "input"), (70.0, "step")], gpus=gpus).told
    assert "NCCL" not in told


@pytest.mark.parametrize(("gpus", "codes"), [(1, []), (2, [75])])
def test_a_step_hanging_in_nccl_ends_the_run(gpus, codes):
    """NCCL may wait for ever; whoever started the run is not asked to know that."""
    assert {*Watched([*QUICK, (620.0, "step")], gpus=gpus).codes} == {*codes}


def test_a_hanging_step_ends_the_run_on_request():
    evaluation = [*QUICK, (1.0, "evaluation")]
    for script, part, ends in (
        ([(290.0, "step"), (29.0, "step"), (35.0, "step")], "training", True),
        ([(310.0, "step")], "training", True),
        ([*QUICK, (5.0, "stopped"), (5.0, "step")], "training", False),
        # A later step that is compiled may take longer, and an evaluation, whose
        # time does not count to the step after it.
        ([*QUICK, (310.0, "step")], "start", True),
        ([*evaluation, (250.0, "training"), (25.0, "step")], "training", False),
        ([*evaluation, (310.0, "training"), (1.0, "step")], "training", True),
    ):
        watched = Watched(script, 30.0, part=part)
        assert set(watched.codes) == ({EXIT_TRY_AGAIN} if ends else set())
        assert any("--hang_timeout" in line for line in watched.told) is ends
    # It is notified only after each call of several steps.
    script = [*QUICK, (70.0, "step")]
    codes = [Watched(script, 30.0, steps_per_call=n).codes for n in (1, 2, 3)]
    assert [bool(found) for found in codes] == [True, True, False]


# ---- What it waits for, in real time


@contextlib.contextmanager
def watching(dog):
    dog.on_start(None)
    yield
    dog.on_end(41, "finished")


def ending(**options):
    """A watchdog that is soon impatient, its codes, and an event once it has ended."""
    codes, released = [], threading.Event()

    def end(code):
        codes.append(code)
        released.set()

    dog = Watchdog(loop_of(0.3, **options), end)
    dog.on_step(41)
    return dog, codes, released


def test_a_blocked_input_is_named(capfd):
    dog, codes, released = ending(part="input")

    def blocked():
        released.wait(100)
        yield [(tf.constant(1), tf.constant(2))]

    with PrefetchQueues(blocked(), ["/cpu:0"]) as queues, watching(dog):
        queues.get()
    assert codes[0] == EXIT_TRY_AGAIN
    said = capfd.readouterr().err
    assert "step 42 " in said
    assert "input batches" in said


def test_every_run_has_a_watchdog_while_its_steps_run(
    tmp_path, stand_in_dir, monkeypatch
):
    alive = []

    class Noted(Watchdog):
        def on_step(self, step):
            super().on_step(step)
            names = [thread.name for thread in threading.enumerate()]
            alive.append((step, names.count("watchdog")))

    monkeypatch.setattr(periodic, "Watchdog", Noted)
    options = {"num_gpus": 2, "batch_size": 4, "log_frequency": 2, "max_steps": 2}
    options |= {"steps_per_call": 2, "checkpoint_steps": 2}
    runs.train(tmp_path / "run", stand_in_dir, **options)
    assert alive == [(2, 1)]
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
