"""The comparison with the peers: turns, who may be timed, what the tables say."""

import functools
import importlib.util
import json
import sys

import numpy as np
import pytest

import tables
from benchmarks import flags as shared, parity, plot, report, throughput
from benchmarks.child import Child, RivalError
from benchmarks.rivals import keras_fit, towers
from benchmarks.rows import (
    CONSTANT,
    INPUT,
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
from tables import cells

ABOUT = {
    **tables.ABOUT,
    "repeats": 2,
    "steps": 30,
    "data": {"real": "CIFAR-10 in /data"},
}


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
    import os, sys, time
    import numpy as np

    def start(change=0.0, fault="", **options):
        if fault == "refuses":
            raise ValueError("The first line | of two.\\nThe second.")
        if fault == "hangs":
            time.sleep(60)
        return Fake(change, fault)

    class Fake:
        precision = "float32"

        def __init__(self, change, fault):
            self.change, self.fault = change, fault

        def initial_values(self):
            return {"w": np.ones(3, np.float32)}

        def check(self, values, images, labels):
            print("on stdout")
            changed = values["w"] + np.float32(self.change)
            return float(changed.sum()), {"w": changed * images.mean()}

        def run(self, untimed, timed):
            if self.fault == "dies":
                print("out of luck", file=sys.stderr, flush=True)
                os._exit(3)
            return timed * 0.5
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What becomes of sound, wrong, missing and breaking rivals in one run, by name."""
    root = tmp_path_factory.mktemp("rivals")
    sources = {"good": FAKE, "towers": FAKE, "missing": "import no_such_package"}
    package = tables.write_package(root / "fakes", sources)
    rows = [
        a_row("sound"),
        a_row("changed", options={"change": 0.01}),
        a_row("slightly changed", options={"change": 1e-6}),
        a_row("missing", module="missing"),
        a_row("refuses", options={"fault": "refuses"}),
        a_row("dies", options={"fault": "dies"}),
        a_row("last"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        found = throughput.compare(rows, {}, repeats=2, steps=4, package=package)
        with pytest.raises(RivalError, match="no answer"):
            Child(f"{package}.good", {"fault": "hangs"}, patience=1)
    return {result.row.name: result for result in found}


def test_sound_rivals_are_timed_whatever_befalls_the_others(results):
    for name in ("sound", "slightly changed", "last"):
        assert results[name].rates == [128 / 0.5] * 2, results[name].problem
        assert results[name].precision == "float32"
    for name, problem in (
        ("changed", "its loss"),
        ("missing", "no_such_package"),
        ("refuses", "ValueError: The first line / of two."),
        ("dies", "exit code 3 out of luck"),
    ):
        assert problem in results[name].problem
        assert results[name].rates == []


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
def test_bfloat16_is_another_arithmetic_but_the_same_network(reference):
    rival = two_towers("bfloat16")
    assert complaint(rival.check, reference, rival.precision) == ""
    assert complaint(rival.check, reference)
    assert complaint(rival.check, reference, rival.precision, local4=1.0)


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


# The report.


def test_table_compares_with_tutorial_keras_and_the_best_of_pytorch():
    one, two = {"towers": 1}, {"towers": 2}
    results = [
        measured("tutorial", [100.0, 110.0], family=TUTORIAL, images=REAL),
        measured("fit", [200.0, 220.0], family=KERAS),
        measured("eager", [50.0, 55.0]),
        measured("compiled", [80.0, 88.0]),
        measured("one", [400.0, 440.0], family=OURS, images=REAL, options=one),
        measured("two", [380.0, 418.0], family=OURS, images=REAL, options=two),
        measured("input", [9e4, 1e5], family=INPUT, images=REAL),
    ]
    text = report.markdown(results, ABOUT)
    first, scaling, alone = text.split("| what |")[1:]
    rate = "420 (400 to 440)"
    row = ["one", "real", "float32", rate, "4.00", "2.00", "5.00"]
    assert cells(first, "one") == row
    assert cells(scaling, "two") == ["two", "real", "float32", "0.95"]
    assert cells(alone, "input") == ["input", "real", "95,000 (90,000 to 100,000)"]
    for fact in ("A processor", "avx512_bf16", "abc1234", "tensorflow 2.21.0", "/data"):
        assert fact in text


def test_json_and_plot_hold_the_measured_rows(tmp_path):
    rows = [measured("one", [1.0, 3.0]), Result(a_row("broken"), problem="absent")]
    written = json.loads(report.as_json(rows, ABOUT))
    assert written["commit"] == "abc1234"
    one, other = written["rows"]
    assert one["images_per_second"] == [1.0, 3.0]
    assert one["median"] == 2.0
    assert one["gradient_difference"] == 2e-6
    assert (other["problem"], other["median"]) == ("absent", None)
    pytest.importorskip("matplotlib")
    assert plot.draw(rows, ABOUT, tmp_path / "rates.png") == ""
    assert tables.is_picture(tmp_path / "rates.png")


# Rows, flags and the machine.


def test_rows_are_chosen_by_any_part_of_their_names():
    rows = all_rows()
    assert len({row.title for row in rows}) == len(rows)
    select = functools.partial(shared.select, name_of=lambda row: row.title)
    chosen = select(rows, ["tutorial", "1 X 128, real"])
    assert {row.family for row in chosen} == {TUTORIAL, OURS}
    assert len(chosen) == 3
    assert select(rows, []) == rows
    with pytest.raises(UsageError, match="caffe"):
        select(rows, ["caffe"])


@pytest.mark.parametrize(
    ("flag", "value"), [("--repeats", "0"), ("--json", "/no/such/folder/x.json")]
)
def test_wrong_flags_are_refused_before_anything_starts(flag, value, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["throughput", flag, value])
    with pytest.raises(UsageError, match=f"{flag} {value}"):
        throughput.main()
