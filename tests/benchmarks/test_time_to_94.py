"""Ours against airbench94: who may be timed, what the clock and the table say."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import tables
from benchmarks import parity, time_to_94
from benchmarks.child import Child
from benchmarks.rivals import recipe
from benchmarks.time_to_94 import PUBLISHED, Result
from cifar10.config import flags
from cifar10.errors import UsageError
from tables import cells

ABOUT = {
    **tables.ABOUT,
    "data": "CIFAR-10 in /data",
    "seeds": 2,
    "steps": None,
    "images": None,
}


class FewImages:
    """A data set of noise, which stands for one on disk."""

    name, directory, classes = "synthetic", Path("unused"), 10

    def read(self, split):
        count = {"train": 64, "test": 16}[split]
        random = np.random.default_rng(count)
        images = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
        return images, random.integers(0, 10, count, np.int32)


def measured(name, seconds, module="recipe"):
    return Result(
        name,
        module,
        {},
        "bfloat16",
        facts={"operations": 8e14, "images": 4e5, "tried": {}},
        runs=[
            {
                "seconds": each,
                "accuracy": 0.93,
                "accuracy_with_views": 0.94 + place / 100,
            }
            for place, each in enumerate(seconds)
        ],
    )


# Turns.

FAKE = """
    import numpy as np

    def start(dataset, recipe="", change=0.0, breaks=False):
        return Fake(change, breaks)

    class Fake:
        precision = "float32"

        def __init__(self, change, breaks):
            self.change, self.breaks = change, breaks

        def facts(self):
            return {"operations": 2e15, "images": 4e5, "tried": {}}

        def reference(self, count):
            return {"w": np.ones(2)}, np.ones((count, 1)), np.ones(count)

        def check(self, values, images, labels):
            gradient = values["w"] + self.change
            return 1.0, {"w": gradient}, {"w": values["w"] - 0.1 * gradient}

        def run(self, seed):
            if self.breaks and seed:
                raise FloatingPointError("it diverged")
            return {"seconds": 2.0, "accuracy": 0.5, "accuracy_with_views": seed / 4}
"""


def test_rows_train_seed_by_seed_and_others_go_on_without_a_broken_one(
    tmp_path, monkeypatch, capsys
):
    package = tables.write_package(
        tmp_path / "trained", {"recipe": FAKE, "airbench": FAKE}
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [
        Result("ours", "recipe", {"recipe": "fast"}),
        Result("fragile", "recipe", {"breaks": True}),
        Result("same", "airbench", {}),
        Result("changed", "airbench", {"change": 1e-3}),
    ]
    time_to_94.compare(rows, None, seeds=2, package=package)
    ours, fragile, same, changed = rows
    assert ours.of_runs("accuracy_with_views") == [0.0, 0.25]
    assert "FloatingPointError" in fragile.problem
    assert not fragile.is_measured
    assert (same.problem, len(same.runs)) == ("", 2)
    assert "of w" in changed.problem
    assert changed.runs == []
    told = capsys.readouterr().err
    turns = [f"seed {seed}, {name}:" for seed in (0, 1) for name in ("ours", "same")]
    places = [told.index(turn) for turn in turns]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ((1.0, 1.0, 0.5), ""),
        ((1.01, 1.0, 0.5), "loss"),
        ((float("nan"), 1.0, 0.5), "loss"),
        ((1.0, 1.001, 0.5), "gradient"),
        # As much of the value as of its change would hide it.
        ((1.0, 1.0, 0.499), "update"),
    ],
)
def test_another_loss_gradient_or_first_update_is_not_timed(found, problem):
    def step(loss, gradient, value):
        return loss, {"w": np.array([gradient])}, {"w": np.array([value])}

    batch = {"w": np.array([1.0])}, None, None
    agreements = time_to_94.differences(batch, step(1.0, 1.0, 0.5), step(*found))
    said = time_to_94.complaint(*agreements)
    assert problem in said
    assert bool(problem) == bool(said)


# Ours.


def test_steps_that_were_also_traced_count_as_long_as_the_others():
    logged = {"start": 60.0, "training": 7.0, "input": 1.0, "summaries": 0.5}
    logged |= {"saving": 9.0, "evaluation": 9.0}
    # One step and one call of four are not on the clock: 17 of 22 are.
    ends = [0, 1, 2, 6, 10, 14, 18, 22]
    assert recipe.seconds_of_training(logged, ends) == 8.5 * 22 / 17


def test_published_rules_are_the_recipe_that_was_compared_with_them():
    published = flags.with_recipe({"recipe": str(PUBLISHED)})
    images = published.max_steps * published.global_batch_size
    assert (published.model, published.optimizer) == ("airbench", "muon")
    assert images == 8 * 50_000
    assert (published.learning_rate, published.momentum) == (0.24, 0.6)


# The report.


def test_report_has_means_deviations_and_the_ratio_within_turns(tmp_path):
    # The machine halves its speed in the second turn: the ratio stays the same.
    ours = measured("ours", [100.0, 200.0])
    airbench = measured("airbench", [200.0, 400.0], "airbench")
    airbench.facts["tried"] = {"float32": "3.1 s a step", "bfloat16": "2 s a step"}
    airbench.agreement = airbench.update = parity.Agreement(1e-8, 4e-5, "w")
    absent = Result("absent", "airbench", {}, problem="not installed")
    rows = [ours, airbench, absent]
    text = time_to_94.markdown(rows, ABOUT)
    figures = ["94.50 % (0.71)", "93.00 % (0.00)", "2,000", "0.8"]
    assert cells(text, "ours") == ["ours", "bfloat16", "150.0 (70.7)", "0.50", *figures]
    assert cells(text, "airbench")[3] == "1.00"
    assert cells(text, "absent")[2:] == ["not installed", *["-"] * 5]
    for fact in ("3.1 s a step", "1e-08", "A processor"):
        assert fact in text
    assert "Cut short" not in text
    assert "Cut short" in time_to_94.markdown(rows, {**ABOUT, "steps": 4})

    ours, _, absent = json.loads(time_to_94.as_json(rows, ABOUT))["rows"]
    assert [run["seconds"] for run in ours["runs"]] == [100.0, 200.0]
    assert ours["facts"]["operations"] == 8e14
    assert absent["problem"] == "not installed"

    pytest.importorskip("matplotlib")
    assert time_to_94.draw(rows, ABOUT, tmp_path / "time.png") == ""
    assert tables.is_picture(tmp_path / "time.png")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--seeds", "0"),
        ("--steps", "1"),
        ("--rows", "caffe"),
        ("--recipe", "slow"),
        ("--json", "/no/such/folder/x.json"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(flag, value, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["time_to_94", flag, value])
    with pytest.raises(UsageError, match=value):
        time_to_94.main()


# The trainings themselves.


@pytest.fixture(scope="module")
def ours():
    return recipe.Recipe(recipe=str(PUBLISHED), dataset=FewImages())


@pytest.mark.slow
def test_arithmetic_of_an_image_is_that_of_its_layers(ours):
    def convolution(side, inputs, outputs, passes=3):
        return passes * 2 * 9 * side**2 * inputs * outputs

    # Forward, and the gradients of input and filters; the whitening is only forward.
    expected = (
        2 * 4 * 31**2 * 3 * 24
        + convolution(31, 24, 64)
        + convolution(15, 64, 64)
        + convolution(15, 64, 256)
        + convolution(7, 256, 256)
        + convolution(7, 256, 256)
        + convolution(3, 256, 256)
        + 3 * 2 * 256 * 10
    )
    facts = ours.facts()
    assert facts["operations"] / facts["images"] == expected


@pytest.mark.slow
def test_training_is_timed_and_scored(stand_in_dir):
    from cifar10.input import datasets

    class OnDisk(FewImages):
        directory = datasets.find("synthetic", str(stand_in_dir)).directory

    short = {"steps": 3, "batch_size": 4}
    found = recipe.Recipe(recipe=str(PUBLISHED), dataset=OnDisk(), **short).run(1)
    assert found["seconds"] > 0
    for name in ("accuracy", "accuracy_with_views"):
        assert found[name] * 16 in range(17)


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


@pytest.fixture(scope="module")
def airbench():
    from benchmarks.rivals import airbench as module

    options = {"dataset": FewImages(), "steps": 8, "batch_size": 16}
    return module.start(variants=[("float32", False)], **options)


@pytest.mark.peers
@needs_torch
def test_airbench_computes_our_loss_gradients_and_first_update(ours, airbench):
    batch = ours.reference(64)
    expected = ours.check(*batch)
    agreements = time_to_94.differences(batch, expected, airbench.check(*batch))
    assert time_to_94.complaint(*agreements) == ""
    # The first of these changes all gradients, the second the rule of the update.
    changed = {**batch[0], "norm2a/beta": np.ones(256, np.float32)}
    found = airbench.check(changed, *batch[1:])
    agreements = time_to_94.differences(batch, expected, found)
    assert "differs" in time_to_94.complaint(*agreements)


@pytest.mark.peers
@needs_torch
def test_airbench_repeats_a_seed_and_counts_as_ours_does(ours, airbench):
    first, second, other = (airbench.run(seed) for seed in (1, 1, 2))
    assert first["accuracy_with_views"] == second["accuracy_with_views"]
    assert first["accuracy"] == second["accuracy"]
    assert other["seconds"] > 0
    facts, whole = airbench.facts(), ours.facts()
    # It stops at the bias of the whitening in the last 5 of 8 steps, ours does not.
    through_first = 2 * 9 * 31**2 * 24 * 64
    saved = (
        whole["operations"] / whole["images"] - facts["operations"] / facts["images"]
    )
    assert saved == pytest.approx(through_first * 5 / 8)


@pytest.mark.peers
@needs_torch
@pytest.mark.parametrize(
    ("variant", "name"),
    [
        (("bfloat16", False), "bfloat16"),
        (("bfloat16", True), "bfloat16, compiled"),
        (("float16", False), "float16"),
    ],
)
def test_other_variants_train(variant, name):
    options = {"dataset": FewImages(), "steps": 2, "batch_size": 16}
    # In a process of its own: PyTorch's compiler warns of PyTorch.
    options["variants"] = [variant]
    with Child("benchmarks.rivals.airbench", options) as trained:
        assert trained.precision == name
        assert [*trained.ask("facts")["tried"]] == [name]
        assert 0 <= trained.ask("run", 0)["accuracy"] <= 1
