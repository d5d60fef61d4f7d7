"""A step that hangs is told, with what it waits for, and on request it ends the run."""

import re
import socket
import threading
import types

import pytest
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.distributed import probe
from cifar10.distributed.cluster import Cluster, Worker
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.errors import EXIT_TRY_AGAIN, STOP_SIGNALS
from cifar10.input.pipeline import PrefetchQueues
from cifar10.run_directory.gains import Gains
from cifar10.training import train, watchdog
from cifar10.training.watchdog import Watchdog


class Clock:
    """The time, and what happens in it: (seconds until then, action) one by one."""

    def __init__(self, *script):
        self._script = [*script]
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def is_set(self):
        return False

    def wait(self, tick):
        if self._script and self._script[0][0] <= 0:
            self._script.pop(0)[1]()
        if not self._script:
            return True
        seconds, action = self._script[0]
        self._script[0] = (seconds - tick, action)
        self.now += tick
        return False


@pytest.fixture
def told(monkeypatch):
    """What watchdogs have written."""
    lines = []
    monkeypatch.setattr(watchdog, "write_line", lines.append)
    return lines


def watch(
    monkeypatch,
    script,
    hang_timeout=None,
    part=str,
    during_asking=None,
    parts=None,
    unreachable=lambda dog: [],
):
    """Runs a script of seconds and steps under a watchdog; returns its exit codes.

    What happens is also a part of the time, which is added to `parts`.
    """
    codes = []

    def ask_workers(*_):
        if during_asking:
            during_asking(dog)
        return ""

    dog = Watchdog(
        hang_timeout,
        "/gpu:0",
        ask_workers,
        part,
        unreachable=lambda: unreachable(dog),
        end=codes.append,
    )
    clock = Clock()
    steps = iter(range(1, 1000))

    def act(what):
        if what == "stopped":
            clock.now += 5000.0
        elif what != "step":
            parts.append(what)
        else:
            dog.on_step(next(steps))

    clock._script = [(seconds, lambda what=what: act(what)) for seconds, what in script]
    monkeypatch.setattr(watchdog, "time", clock)
    dog._over = clock
    dog._watched = threading.get_ident()
    dog._watch()
    return codes


QUICK = [(1.0, "step")] * 5


@pytest.mark.parametrize(
    ("script", "hangs"),
    [
        ([*QUICK, (55.0, "step")], []),
        ([*QUICK, (70.0, "step")], [6]),
        ([*QUICK, (700.0, "step")], [6]),
        ([*QUICK, (70.0, "step"), (1.0, "step"), (70.0, "step")], [6, 8]),
        # Steps that take long: 20 times the median of 10 seconds.
        ([(10.0, "step")] * 5 + [(190.0, "step"), (220.0, "step")], [7]),
        # The first one is compiled.
        ([(580.0, "step")], []),
        ([(620.0, "step")], [1]),
        # Ctrl-Z, or a machine that slept: nothing hung.
        ([*QUICK, (5.0, "stopped"), (5.0, "step")], []),
    ],
)
def test_a_step_that_takes_far_longer_than_others_is_told_once(
    monkeypatch, told, script, hangs
):
    assert watch(monkeypatch, script) == []
    assert [int(line.split()[1]) for line in told] == hangs
    assert all("--hang_timeout" not in line for line in told)


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        ([(290.0, "step"), (29.0, "step"), (29.0, "step")], False),
        ([(290.0, "step"), (29.0, "step"), (35.0, "step")], True),
        ([(310.0, "step")], True),
        ([*QUICK, (5.0, "stopped"), (5.0, "step")], False),
    ],
)
def test_on_request_it_ends_the_run(monkeypatch, told, script, ends):
    codes = watch(monkeypatch, script, hang_timeout=30.0)
    assert set(codes) == ({EXIT_TRY_AGAIN} if ends else set())
    assert any("Ended by --hang_timeout" in line for line in told) is ends


@pytest.mark.parametrize(("seconds", "ends"), [(290.0, False), (310.0, True)])
def test_a_later_step_that_is_compiled_may_take_longer(
    monkeypatch, told, seconds, ends
):
    script = [*QUICK, (seconds, "step")]
    codes = watch(monkeypatch, script, 30.0, part=lambda: "start")
    assert bool(codes) is ends
    assert bool(told) is ends


@pytest.mark.parametrize(
    ("script", "first", "ends"),
    [
        ([*QUICK, (1.0, "evaluation"), (250.0, "training"), (25.0, "step")], "", False),
        (
            [*QUICK, (1.0, "evaluation"), (310.0, "training"), (1.0, "step")],
            "the evaluation after step 5 has not ended after",
            True,
        ),
        (
            [*QUICK, (1.0, "evaluation"), (250.0, "training"), (35.0, "step")],
            "step 6 has not ended after",
            True,
        ),
    ],
)
def test_an_evaluation_may_take_longer_than_a_step(
    monkeypatch, told, script, first, ends
):
    """And what it takes does not count to the step after it."""
    parts = ["training"]
    codes = watch(monkeypatch, script, 30.0, part=lambda: parts[-1], parts=parts)
    assert bool(codes) is ends
    assert told[:1] == [line for line in told if line.startswith(first)][:1]
    assert bool(told) is ends


def end_step(dog):
    dog.on_step(99)


def end_training(dog):
    dog._over.is_set = lambda: True


@pytest.mark.parametrize("happens", [end_step, end_training])
def test_a_step_that_ends_while_the_others_are_asked_ends_no_run(
    monkeypatch, told, happens
):
    script = [*QUICK, (35.0, "step")]
    assert watch(monkeypatch, script, 30.0, during_asking=happens) == []
    assert told == []


@pytest.mark.parametrize("seconds", [15.0, 25.0])
def test_a_worker_that_cannot_be_reached_ends_a_step_that_hangs(
    monkeypatch, told, seconds
):
    """Without --hang_timeout; but no step that is as quick as most."""
    gone = ["worker 2 at c:1"]
    script = [*QUICK, (seconds, "step"), (1.0, "step")]
    codes = watch(monkeypatch, script, unreachable=lambda dog: gone)
    assert bool(codes) is (seconds > 20)
    assert set(codes) <= {EXIT_TRY_AGAIN}
    assert [gone[0] in line for line in told] == [True] * len(codes)


@pytest.mark.parametrize("part", ["start", "training", "evaluation"])
def test_workers_that_are_reached_end_no_step_however_slow(monkeypatch, told, part):
    asked = []
    script = [(500.0, "step"), *QUICK, (500.0, "step")]

    def probe(dog):
        asked.append(dog)
        return []

    codes = watch(monkeypatch, script, part=lambda: part, unreachable=probe)
    assert codes == []
    assert 60 < len(asked) < 120
    assert all("reach" not in line for line in told)


@pytest.mark.parametrize("happens", [end_step, end_training])
def test_a_step_that_ends_while_the_others_are_probed_ends_no_run(
    monkeypatch, told, happens
):
    def probe(dog):
        happens(dog)
        return ["worker 2 at c:1"]

    assert watch(monkeypatch, [*QUICK, (25.0, "step")], unreachable=probe) == []
    assert told == []


@pytest.fixture
def released():
    """Set once the watchdog ends the run, so that what hangs goes on."""
    return threading.Event()


def ending(released, ask_workers=None):
    """A watchdog that is soon impatient."""
    codes = []

    def end(code):
        codes.append(code)
        released.set()

    dog = Watchdog(0.3, "/cpu:0", ask_workers, end=end)
    dog.on_step(41)
    return dog, codes


def test_an_input_that_blocks_is_named(capfd, released):
    def blocked():
        released.wait(100)
        yield [(tf.constant(1), tf.constant(2))]

    dog, codes = ending(released)
    with PrefetchQueues(blocked(), ["/cpu:0"]) as queues, dog:
        queues.get()
    assert codes[0] == 75
    said = capfd.readouterr().err
    assert ": step 42 has not ended after 0 s.\n" in said
    assert re.search(r"It waits in cifar10/input/pipeline.py:\d+ for its input\.", said)


class Blocked:
    """A result that a device does not deliver."""

    def __init__(self, released):
        self._released = released

    def numpy(self):
        self._released.wait(100)
        return tf.zeros([len(STOP_SIGNALS)]).numpy()


@pytest.mark.parametrize(
    ("ask_workers", "cause"),
    [
        (None, "/cpu:0"),
        (lambda *_: "", "/cpu:0"),
        (lambda *asked: f"worker 1 of {asked}", "worker 1 of (41, '')"),
        (lambda *_: threading.Event().wait(), "the chief, which does not answer"),
    ],
)
def test_devices_and_other_workers_are_named(
    capfd, monkeypatch, released, ask_workers, cause
):
    monkeypatch.setattr(watchdog, "_SECONDS_TO_ANSWER", 0.3)
    dog, codes = ending(released, ask_workers)
    towers = types.SimpleNamespace(_stop_counts=[Blocked(released)] * 2)
    with dog:
        assert ReplicaBuilder.agree_to_stop(towers, None) is None
    assert codes[0] == 75
    said = capfd.readouterr().err
    place = r"in cifar10/distributed/replicas.py:\d+"
    assert re.search(rf"It waits {place} for {re.escape(cause)}\.", said)


def test_every_training_has_one_while_its_steps_run(monkeypatch, tmp_path):
    seen, dogs = [], []

    def build(*arguments):
        dogs.append(Watchdog(*arguments))
        return dogs[0]

    def run(loop, *_):
        names = [thread.name for thread in threading.enumerate()]
        seen.append(names.count("watchdog"))
        loop.hooks.notify("on_step", 5)

    def build_loop(*arguments, **__):
        return types.SimpleNamespace(
            step=0,
            hooks=arguments[3],
            progress=types.SimpleNamespace(gains=Gains(), is_over=False),
        )

    towers = types.SimpleNamespace(devices=("/cpu:0", "/cpu:1"), state=None)
    config = Config(
        hang_timeout=33.0,
        steps_per_call=10,
        global_batch_size=256,
        train_dir=str(tmp_path),
    )
    parts = types.SimpleNamespace(
        config=config, towers=towers, train_dir=tmp_path, settings={}
    )
    for name, fake in {
        "_assemble": lambda *_: parts,
        "_build_loop": build_loop,
        "_begin": lambda *_: [],
        "_run": run,
        "_speed": lambda *_: [],
        "Watchdog": build,
    }.items():
        monkeypatch.setattr(train, name, fake)
    train.train(config, hooks=[types.SimpleNamespace(on_step=seen.append)])
    assert seen == [1, 5]
    (dog,) = dogs
    assert dog._step == 5
    assert (dog._hang_timeout, dog._devices) == (330.0, "/cpu:0, /cpu:1")
    assert not dog._thread.is_alive()


def test_a_worker_of_a_training_probes_the_others(monkeypatch):
    built = {}
    monkeypatch.setattr(train, "Watchdog", lambda *_, **options: built.update(options))
    parts = types.SimpleNamespace(
        config=Config(), towers=types.SimpleNamespace(devices=("/cpu:0",))
    )
    monkeypatch.setattr(probe, "SECONDS_BETWEEN", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        workers = (Worker("worker", 0, "a:1"), Worker("worker", 1, f"127.0.0.1:{port}"))
        train._build_watchdog(parts, Cluster(workers, 0), None)
        other.accept()[0].close()
        assert built["unreachable"]() == []
        monkeypatch.setattr(probe, "_answers", lambda _: False)
        assert built["unreachable"]() == [workers[1]]
