"""The comparison with the peers: turns, who may be timed, what the tables say."""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from benchmarks import flags as shared, machine, parity, plot, report, throughput
from benchmarks.child import Child, RivalError
from benchmarks.rivals import common, keras_fit, towers
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

ABOUT = {
    "date": "2026-11-21T12:00:00+00:00",
    "commit": "abc1234",
    "processor": "A processor",
    "cores": 2,
    "accelerators": [],
    "bfloat16": ["avx512_bf16"],
    "versions": {"tensorflow": "2.21.0", "torch": "not installed"},
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
    log = []

    def runner(name, seconds):
        return lambda untimed, timed: log.append((name, untimed, timed)) or seconds

    first, second = Result(a_row("first")), Result(a_row("second"))
    runners = [(first, runner("first", 3.0)), (second, runner("second", 1.5))]
    throughput.take_turns(runners, repeats=2, steps=30)
    assert log == [("first", 10, 30), ("second", 10, 30)] * 2
    assert first.rates == [30 * 128 / 3.0] * 2
    assert second.rates == [30 * 128 / 1.5] * 2


def test_windows_have_as_many_images_whatever_the_batch():
    result = Result(a_row("wide", images_per_step=512))
    asked = []
    runner = lambda untimed, timed: asked.append(timed) or 2.0  # noqa: E731
    throughput.take_turns([(result, runner)], repeats=1, steps=40)
    assert asked == [10]
    assert result.rates == [40 * 128 / 2.0]


def test_one_who_breaks_in_the_middle_is_left_out_and_the_rest_goes_on():
    turns = []

    def breaks(*steps):
        turns.append(steps)
        if len(turns) == 2:
            raise RivalError("out of memory")
        return 1.0

    broken, sound = Result(a_row("broken")), Result(a_row("sound"))
    runners = [(broken, breaks), (sound, lambda untimed, timed: 1.0)]
    throughput.take_turns(runners, repeats=4, steps=3)
    assert len(turns) == 2
    assert broken.problem == "out of memory"
    assert not broken.is_measured
    assert len(sound.rates) == 4


# Processes.

FAKES = {
    "good": """
        import numpy as np

        def start(change=0.0):
            return Fake(change)

        class Fake:
            precision = "float32"

            def __init__(self, change):
                self.change = change

            def initial_values(self):
                return {"w": np.ones(3, np.float32)}

            def check(self, values, images, labels):
                print("on stdout")
                changed = values["w"] + np.float32(self.change)
                return float(changed.sum()), {"w": changed * images.mean()}

            def run(self, untimed, timed):
                return timed * 0.5
    """,
    "towers": """
        from fakes.good import Fake

        def start(towers, batch_size, precision):
            return Fake(0.0)
    """,
    "missing": "import no_such_package",
    "refuses": """
        def start():
            raise ValueError("The first line | of two.\\nThe second.")
    """,
    "dies": """
        import os, sys
        from fakes import good

        def start():
            return Dies(0.0)

        class Dies(good.Fake):
            def run(self, untimed, timed):
                print("out of luck", file=sys.stderr, flush=True)
                os._exit(3)
    """,
    "hangs": """
        import time

        def start():
            time.sleep(60)
    """,
}


@pytest.fixture(scope="module")
def fakes(tmp_path_factory):
    """A package of rivals that need no TensorFlow."""
    root = tmp_path_factory.mktemp("rivals")
    (root / "fakes").mkdir()
    (root / "fakes" / "__init__.py").touch()
    for name, source in FAKES.items():
        (root / "fakes" / f"{name}.py").write_text(textwrap.dedent(source))
    sys.path.insert(0, str(root))
    yield "fakes"
    sys.path.remove(str(root))


@pytest.fixture(scope="module")
def results(fakes):
    """What becomes of sound, wrong, missing and breaking rivals in one run, by name."""
    rows = [
        a_row("sound"),
        a_row("changed", options={"change": 0.01}),
        a_row("slightly changed", options={"change": 1e-6}),
        a_row("missing", module="missing"),
        a_row("refuses", module="refuses"),
        a_row("dies", module="dies"),
        a_row("last"),
    ]
    found = throughput.compare(rows, {}, repeats=2, steps=4, package=fakes)
    return {result.row.name: result for result in found}


def test_sound_rivals_are_timed_whatever_befalls_the_others(results):
    for name in ("sound", "slightly changed", "last"):
        assert results[name].rates == [128 / 0.5] * 2, results[name].problem
        assert results[name].precision == "float32"


def test_a_changed_initial_value_is_not_timed(results):
    assert results["changed"].problem.startswith("not the same network: its loss")
    assert results["changed"].rates == []


def test_a_missing_package_is_named_with_the_way_to_get_it(results):
    problem = results["missing"].problem
    assert problem == "not installed (no_such_package): pip install -e .[peers]"


def test_an_error_is_shown_by_its_first_line(results):
    assert results["refuses"].problem == "ValueError: The first line / of two."


def test_a_process_that_dies_leaves_its_code_and_last_words(results):
    assert results["dies"].problem == "its process ended with exit code 3 out of luck"


def test_every_problem_is_in_its_own_row_of_the_table(results):
    text = report.markdown(list(results.values()), ABOUT)
    for name, result in results.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert line.count("|") == 8
        assert result.problem in line


def test_one_who_does_not_answer_is_given_up(fakes):
    with pytest.raises(RivalError, match="no answer within 1 seconds"):
        Child(f"{fakes}.hangs", {}, patience=1)


# The same network.


@pytest.fixture(scope="module")
def reference():
    rival = towers.Towers(towers=1, batch_size=32, precision="float32")
    return parity.reference(lambda name, *given: getattr(rival, name)(*given), 32)


RIVALS = {
    "2 x 16": lambda: towers.Towers(towers=2, batch_size=16, precision="float32"),
    "2 x 32": lambda: towers.Towers(towers=2, batch_size=32, precision="float32"),
    "fit": lambda: keras_fit.KerasFit(1, 32),
    "mirrored": lambda: keras_fit.KerasFit(2, 32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
def test_rivals_compute_our_loss_and_gradients(name, reference):
    given = reference.values, reference.images, reference.labels
    agreement = parity.compare(reference, *RIVALS[name]().check(*given))
    assert parity.complaint(agreement, "float32") == ""


@pytest.mark.slow
def test_bfloat16_is_another_arithmetic_but_the_same_network(reference):
    rival = towers.Towers(towers=1, batch_size=32, precision="bfloat16")
    given = reference.values, reference.images, reference.labels
    agreement = parity.compare(reference, *rival.check(*given))
    assert parity.complaint(agreement, rival.precision) == ""
    assert parity.complaint(agreement, "float32")
    changed = {**reference.values, "local4/bias": np.ones(192, np.float32)}
    agreement = parity.compare(reference, *rival.check(changed, *given[1:]))
    assert parity.complaint(agreement, rival.precision)


def with_one_bias_changed(values):
    changed = {name: value.copy() for name, value in values.items()}
    changed["conv2/bias"][7] += 0.1
    return changed


@pytest.mark.parametrize("name", ["2 x 16", "fit"])
def test_one_changed_bias_is_noticed(name, reference):
    given = with_one_bias_changed(reference.values), reference.images, reference.labels
    agreement = parity.compare(reference, *RIVALS[name]().check(*given))
    assert "not the same network" in parity.complaint(agreement, "float32")


@pytest.mark.slow
def test_tutorials_graph_computes_our_loss_and_gradients(reference, stand_in_dir):
    dataset = datasets.find("synthetic", str(stand_in_dir))
    options = {"batch_size": 32, "dataset": dataset}
    # In its own process: its initial values have no seeds, which determinism forbids.
    with Child("benchmarks.rivals.tutorial", options) as child:
        images = reference.images, reference.labels
        agreement = parity.compare(
            reference, *child.ask("check", reference.values, *images)
        )
        assert parity.complaint(agreement, "float32") == ""
        changed = with_one_bias_changed(reference.values)
        agreement = parity.compare(reference, *child.ask("check", changed, *images))
        assert parity.complaint(agreement, "float32")


def test_a_rival_trains_from_the_values_it_was_checked_with(reference):
    rival = towers.Towers(towers=2, batch_size=16, precision="float32")
    rival.check(reference.values, reference.images, reference.labels)
    for name, value in rival.initial_values().items():
        np.testing.assert_array_equal(value, reference.values[name])


@pytest.mark.parametrize(
    ("gradients", "variable"),
    [
        ({"a": np.ones(2), "b": np.full(2, np.nan)}, "b"),
        ({"a": np.ones(2), "b": np.ones((2, 1))}, "b"),
        ({"a": np.ones(2)}, "b"),
        ({"a": np.array([1.0, 1.1]), "b": np.ones(2)}, "a"),
    ],
    ids=["not a number", "another shape", "left out", "another value"],
)
def test_gradients_that_differ_are_named(gradients, variable):
    ours = parity.Reference({}, None, None, 1.0, {"a": np.ones(2), "b": np.ones(2)})
    agreement = parity.compare(ours, 1.0, gradients)
    assert f"the gradient of {variable}" in parity.complaint(agreement, "float32")


def test_half_precision_may_differ_more():
    agreement = parity.Agreement(5e-4, 0.15, "conv1/kernel")
    assert parity.complaint(agreement, "float32")
    assert not parity.complaint(agreement, "bfloat16")


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


@pytest.mark.peers
@needs_torch
@pytest.mark.parametrize(
    ("module", "options", "precision"),
    [
        ("pytorch", {"compiled": False}, "float32"),
        ("pytorch", {"compiled": False}, "bfloat16"),
        ("pytorch_parallel", {}, "float32"),
    ],
)
def test_pytorch_computes_our_loss_and_gradients(module, options, precision, reference):
    options = {**options, "precision": precision, "batch_size": 32}
    with Child(f"benchmarks.rivals.{module}", options) as child:
        given = reference.values, reference.images, reference.labels
        agreement = parity.compare(reference, *child.ask("check", *given))
        assert parity.complaint(agreement, precision) == ""
        assert child.ask("run", 1, 1) > 0
        changed = {**reference.values, "local4/bias": np.ones(192, np.float32)}
        agreement = parity.compare(reference, *child.ask("check", changed, *given[1:]))
        assert parity.complaint(agreement, precision)


# The report.


def cells(text, name):
    [line] = [line for line in text.splitlines() if line.startswith(f"| {name} | ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_are_medians_of_windows_of_one_turn():
    # The machine halves its speed in the second turn: the ratio stays the same.
    slow, fast = measured("slow", [100.0, 50.0]), measured("fast", [300.0, 150.0])
    assert report.ratio(fast, slow) == 3.0
    assert report.ratio(slow, None) is None
    assert report.ratio(slow, Result(a_row("absent"), problem="not installed")) is None


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
    assert "float32: loss within 1e-07 (bound 0.0001)" in first


def test_report_says_where_and_with_what():
    text = report.markdown([measured("one", [1.0])], ABOUT)
    for fact in ("A processor, 2 cores", "native (avx512_bf16)", "no GPU", "abc1234"):
        assert fact in text
    assert "tensorflow 2.21.0, torch not installed" in text
    assert "Real input: CIFAR-10 in /data." in text


def test_json_holds_every_window_and_every_problem():
    broken = Result(a_row("broken"), problem="not installed")
    written = json.loads(report.as_json([measured("one", [1.0, 3.0]), broken], ABOUT))
    assert written["commit"] == "abc1234"
    one, other = written["rows"]
    assert one["images_per_second"] == [1.0, 3.0]
    assert one["median"] == 2.0
    assert one["gradient_difference"] == 2e-6
    assert other["problem"] == "not installed"
    assert other["median"] is None


def test_plot_is_a_picture_of_the_measured_rows(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.png"
    results = [measured("one", [1.0, 3.0]), Result(a_row("absent"), problem="absent")]
    assert plot.draw(results, ABOUT, path) == ""
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    problem = plot.draw([measured("one", [1.0])], ABOUT, tmp_path / "rates.png")
    assert problem == "matplotlib is not installed: pip install -e .[peers]"


# Rows, flags and the machine.


def test_rows_have_names_of_their_own():
    titles = [row.title for row in all_rows()]
    assert len(set(titles)) == len(titles)


def test_only_takes_any_part_of_a_name_and_lists_all_names_for_a_wrong_one():
    rows = all_rows()
    select = functools.partial(shared.select, name_of=lambda row: row.title)
    chosen = select(rows, ["tutorial", "1 X 128, real"])
    assert {row.family for row in chosen} == {TUTORIAL, OURS}
    assert len(chosen) == 3
    assert select(rows, []) == rows
    with pytest.raises(UsageError, match="Keras fit, constant input"):
        select(rows, ["caffe"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeats", "0"], "--repeats 0: it is at least 1"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--only", "caffe"], "no row is called so"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(flags, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["throughput", *flags])
    with pytest.raises(UsageError, match=message):
        throughput.main()


def test_commit_is_unknown_outside_a_clone(tmp_path):
    assert machine.commit(tmp_path) == machine.UNKNOWN


def test_commit_of_a_repository_around_an_archive_is_not_ours(tmp_path):
    git = shutil.which("git") or pytest.skip("git is not installed")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    commands = (
        ["init", "--quiet"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "--allow-empty", "-qm0"],
    )
    for command in commands:
        subprocess.run([git, "-C", tmp_path, *command], check=True, env=environment)
    assert machine.commit(tmp_path) != machine.UNKNOWN
    (tmp_path / "archive").mkdir()
    assert machine.commit(tmp_path / "archive") == machine.UNKNOWN


def test_training_that_diverges_is_an_error():
    losses = iter([1.0, 2.0, float("nan")])
    with pytest.raises(FloatingPointError, match="diverged"):
        common.seconds_of(lambda: next(losses), untimed=1, timed=2)
