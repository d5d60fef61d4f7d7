"""The comparison with the peers: turns, who may be timed, what the tables say."""

import functools
import importlib.util
import sys
from contextlib import closing

import numpy as np
import pytest

import fake_package
from benchmarks import parity, throughput
from benchmarks.rivals import common, keras_fit, towers
from benchmarks.runner import Child, Result, Row
from cifar10.errors import UsageError
from cifar10.input import datasets


def a_row(name, module, images="constant", **options):
    details = {"input": images, "asked": "float32"}
    return Row(name, module, options, details)


# Processes.

FAKE = """
    import os, sys
    import numpy as np

    def start(change=0.0, fault="", towers=1, batch_size=128, **options):
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


def test_sound_rivals_are_timed_even_if_other_rivals_fail(tmp_path, monkeypatch):
    sources = {"good": FAKE, "missing": "import no_such_package"}
    package = fake_package.write(tmp_path / "fakes", sources)
    good = f"{package}.good"
    rows = [
        a_row("changed", good, change=0.01),
        a_row("missing", f"{package}.missing"),
        a_row("dies", good, fault="dies"),
        a_row("sound", good),
        a_row("wide", good, towers=2, batch_size=256),
    ]
    monkeypatch.syspath_prepend(tmp_path)
    reference = throughput.make_reference(good)
    *broken, sound, wide = throughput.compare(rows, reference, repeats=2, steps=8)
    rate = "images_per_second"
    assert sound.figures(rate) == [128 / 0.5] * 2, sound.problem
    # As many images in a window, whatever the batch.
    assert wide.figures(rate) == [512 / 0.5] * 2, wide.problem
    problems = "the loss", "no_such_package", "exit code 3"
    for result, problem in zip(broken, problems, strict=True):
        assert problem in result.problem
        assert result.rounds == []


# The same network.

BATCH = 8


@pytest.fixture(scope="module")
def reference():
    rival = towers.Towers(towers=1, batch_size=BATCH, precision="float32")
    given = rival.initial_values(), *common.constant_batch(BATCH, seed=1)
    return given, rival.check(*given)


def complaint(check, reference, precision="float32", **changed):
    """Returns what is wrong with what a rival computes of the reference's batch."""
    (values, *batch), expected = reference
    values = {name: value.copy() for name, value in values.items()}
    for name, amount in changed.items():
        values[f"{name}/bias"] += amount
    found = check(values, *batch)
    return parity.complaint(throughput.check(found, expected, precision))


def two_towers(precision="float32"):
    half = {"batch_size": BATCH // 2, "precision": precision}
    return towers.Towers(towers=2, **half)


@pytest.mark.parametrize("is_real", [False, True], ids=["constant", "real"])
def test_whole_calls_are_timed_and_divided_among_their_steps(monkeypatch, is_real):
    """As a GPU's training has them: four steps wanted, calls of three."""

    def seconds_of(call, untimed, timed):
        for _ in range(untimed + timed):
            loss = call()
        assert np.isfinite(float(loss))
        return 6.0

    monkeypatch.setattr(common, "seconds_of", seconds_of)
    given = {"dataset": common.black_images((32, 32, 3), 64)} if is_real else {}
    rival = towers.Towers(towers=1, batch_size=BATCH, call=3, **given)
    assert rival.run(1, 4) == 6.0 * 4 / 6
    assert rival._builder.state.global_step == 3 * (1 + 2)
    rival.close()


@pytest.mark.slow
def test_changed_bias_is_noticed_and_checked_values_are_trained(reference):
    rival = two_towers()
    assert "network" in complaint(rival.check, reference, conv2=0.1)
    given = reference[0]
    rival.check(*given)
    for name, value in rival.initial_values().items():
        np.testing.assert_array_equal(value, given[0][name])


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
    with closing(Child("benchmarks.rivals.tutorial", options)) as child:
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
        ("pytorch", {"processes": 2}, "float32"),
    ],
)
def test_pytorch_computes_our_loss_and_gradients(module, options, precision, reference):
    options = {**options, "precision": precision, "batch_size": BATCH}
    with closing(Child(f"benchmarks.rivals.{module}", options)) as child:
        check = functools.partial(child.ask, "check")
        assert complaint(check, reference, precision) == ""
        assert child.ask("run", 1, 1) > 0
        assert complaint(check, reference, precision, local4=1.0)


# The report and the flags.


def test_table_compares_with_tutorial_and_keras():
    def measured(name, module, *rates):
        rounds = [{"images_per_second": rate} for rate in rates]
        return Result(a_row(name, f"rivals.{module}"), "float32", rounds=rounds)

    results = [
        measured("tutorial", "tutorial", 100.0, 110.0),
        measured("fit", "keras_fit", 200.0, 220.0),
        measured("ours", "towers", 400.0, 440.0),
    ]
    about = {**fake_package.ABOUT, "repeats": 2, "steps": 30, "data": "it"}
    text = throughput.markdown(results, about)
    [line] = [line for line in text.splitlines() if "| ours | " in line]
    assert "| 4.00 | 2.00 |" in line


def test_impossible_flags_are_refused_before_anything_starts(monkeypatch):
    for *flag, value in (
        ("--repeats", "0"),
        ("--only", "caffe"),
    ):
        monkeypatch.setattr(sys, "argv", ["throughput", *flag, value])
        with pytest.raises(UsageError, match=value):
            throughput.main()
