"""The comparison with the peers: turns, who may be timed, what the tables say."""

import functools
import importlib.util
import sys

import numpy as np
import pytest

import fake_package
from benchmarks import flags as shared, parity, report, throughput
from benchmarks.child import Child
from benchmarks.rivals import keras_fit, towers
from benchmarks.rows import (
    CONSTANT,
    KERAS,
    OURS,
    PYTORCH,
    REAL,
    TUTORIAL,
    Result,
    Row,
    all_rows,
)
from cifar10.errors import UsageError
from cifar10.input import datasets


def a_row(name, family=PYTORCH, images=CONSTANT, module="good", **others):
    options = others.pop("options", {})
    return Row(family, name, images, "float32", module, options, **others)


def measured(name, rates, **others):
    agreement = parity.Agreement(1e-7, 2e-6, "conv1/kernel")
    return Result(a_row(name, **others), "float32", agreement=agreement, rates=rates)


# Turns.


def test_rivals_alternate_and_untimed_steps_come_first():
    log, first, wide = [], Result(a_row("first")), a_row("wide", images_per_step=512)
    wide = Result(wide)

    def runner(name, seconds):
        return lambda untimed, timed: log.append((name, untimed, timed)) or seconds

    runners = [(first, runner("first", 3.0)), (wide, runner("wide", 1.5))]
    throughput.take_turns(runners, repeats=2, steps=40)
    # As many images in a window, whatever the batch.
    assert [(name, timed) for name, _, timed in log[1:]] == [
        *(("wide", 10), ("first", 40), ("wide", 10))
    ]
    assert log[0] == ("first", 10, 40)
    assert first.rates == [40 * 128 / 3.0] * 2
    assert wide.rates == [40 * 128 / 1.5] * 2


# Processes.

FAKE = """
    import os, sys
    import numpy as np

    def start(change=0.0, fault="", **options):
        return Fake(change, fault)

    class Fake:
        precision = "float32"

        def __init__(self, change, fault):
            self.change, self.fault = change, fault

        def initial_values(self):
            return {"w": np.ones(3, np.float32)}

        def check(self, values, images, labels):
            changed = values["w"] + np.float32(self.change)
            return float(changed.sum()), {"w": changed * images.mean()}

        def run(self, untimed, timed):
            if self.fault == "dies":
                print("out of luck", file=sys.stderr, flush=True)
                os._exit(3)
            return timed * 0.5
"""


def test_sound_rivals_are_timed_whatever_befalls_the_others(tmp_path, monkeypatch):
    sources = {"good": FAKE, "towers": FAKE, "missing": "import no_such_package"}
    package = fake_package.write(tmp_path / "fakes", sources)
    rows = [
        a_row("changed", options={"change": 0.01}),
        a_row("missing", module="missing"),
        a_row("dies", options={"fault": "dies"}),
        a_row("sound"),
    ]
    monkeypatch.syspath_prepend(tmp_path)
    found = throughput.compare(rows, {}, repeats=2, steps=4, package=package)
    *broken, sound = found
    assert sound.rates == [128 / 0.5] * 2, sound.problem
    problems = "its loss", "no_such_package", "out of luck"
    for result, problem in zip(broken, problems, strict=True):
        assert problem in result.problem
        assert result.rates == []


# The same network.

BATCH = 8


@pytest.fixture(scope="module")
def reference():
    rival = towers.Towers(towers=1, batch_size=BATCH, precision="float32")
    return parity.reference(lambda name, *given: getattr(rival, name)(*given), BATCH)


def complaint(check, reference, precision="float32", **changed):
    """Returns what is wrong with what a rival computes of the reference's batch."""
    values = {name: value.copy() for name, value in reference.values.items()}
    for name, amount in changed.items():
        values[f"{name}/bias"] += amount
    found = check(values, reference.images, reference.labels)
    return parity.complaint(parity.compare(reference, *found), precision)


def two_towers(precision="float32"):
    half = {"batch_size": BATCH // 2, "precision": precision}
    return towers.Towers(towers=2, **half)


@pytest.mark.slow
def test_changed_bias_is_noticed_and_checked_values_are_trained(reference):
    rival = two_towers()
    assert "network" in complaint(rival.check, reference, conv2=0.1)
    rival.check(reference.values, reference.images, reference.labels)
    for name, value in rival.initial_values().items():
        np.testing.assert_array_equal(value, reference.values[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "rival",
    [
        two_towers,
        lambda: keras_fit.KerasFit(1, BATCH),
        lambda: keras_fit.KerasFit(2, BATCH),
    ],
    ids=["towers", "fit", "mirrored"],
)
def test_rivals_compute_our_loss_and_gradients(rival, reference):
    check = rival().check
    assert complaint(check, reference) == ""
    assert complaint(check, reference, conv2=0.1)


@pytest.mark.slow
def test_tutorials_graph_computes_our_loss_and_gradients(reference, stand_in_dir):
    dataset = datasets.find("synthetic", str(stand_in_dir))
    options = {"batch_size": BATCH, "dataset": dataset}
    # In its own process: its initial values have no seeds, which determinism forbids.
    with Child("benchmarks.rivals.tutorial", options) as child:
        check = functools.partial(child.ask, "check")
        assert complaint(check, reference) == ""
        assert complaint(check, reference, conv2=0.1)


@pytest.mark.peers
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)
@pytest.mark.parametrize(
    ("module", "options", "precision"),
    [
        ("pytorch", {"compiled": False}, "float32"),
        ("pytorch", {"compiled": False}, "bfloat16"),
        ("pytorch_parallel", {}, "float32"),
    ],
)
def test_pytorch_computes_our_loss_and_gradients(module, options, precision, reference):
    options = {**options, "precision": precision, "batch_size": BATCH}
    with Child(f"benchmarks.rivals.{module}", options) as child:
        check = functools.partial(child.ask, "check")
        assert complaint(check, reference, precision) == ""
        assert child.ask("run", 1, 1) > 0
        assert complaint(check, reference, precision, local4=1.0)


# The report and the flags.


def test_table_compares_with_tutorial_and_keras():
    one = {"towers": 1}
    results = [
        measured("tutorial", [100.0, 110.0], family=TUTORIAL, images=REAL),
        measured("fit", [200.0, 220.0], family=KERAS),
        measured("ours", [400.0, 440.0], family=OURS, images=REAL, options=one),
    ]
    about = {**fake_package.ABOUT, "repeats": 2, "steps": 30, "data": {"real": "it"}}
    text = report.markdown(results, about)
    [line] = [line for line in text.splitlines() if "| ours | " in line]
    assert "| 4.00 | 2.00 |" in line


def test_flags_that_cannot_be_met_are_refused_before_anything_starts(monkeypatch):
    for flag, value in (("--repeats", "0"), ("--json", "/no/such/folder/x.json")):
        monkeypatch.setattr(sys, "argv", ["throughput", flag, value])
        with pytest.raises(UsageError, match=f"{flag} {value}"):
            throughput.main()
    with pytest.raises(UsageError, match="caffe"):
        shared.select(all_rows(), ["caffe"], name_of=lambda row: row.title)
