"""Ours against airbench94: who may be timed, what the clock and the table say."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import fake_package
from benchmarks import parity, time_to_94
from benchmarks.rivals import recipe
from benchmarks.runner import Result, Row
from benchmarks.time_to_94 import PUBLISHED
from cifar10.errors import UsageError
from cifar10.input.dataset_base import Dataset


def few_images(directory=Path("unused")):
    """A data set of noise, which stands for one on disk."""

    def read(split):
        count = {"train": 2000, "test": 16}[split]
        random = np.random.default_rng(count)
        images = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
        return images, random.integers(0, 10, count, np.int32)

    return Dataset(
        name="synthetic",
        directory=directory,
        image_shape=(32, 32, 3),
        class_names=tuple("0123456789"),
        description="noise",
        read=read,
    )


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ((1.0, 1.0, 0.5), ""),
        ((float("nan"), 1.0, 0.5), "loss"),
        ((1.0, 1.001, 0.5), "gradient"),
        # As much of the value as of its change would hide it.
        ((1.0, 1.0, 0.499), "update"),
    ],
)
def test_a_rival_with_another_loss_gradient_or_first_update_is_refused(found, problem):
    def step(loss, gradient, value):
        return loss, {"w": np.array([gradient])}, {"w": np.array([value])}

    values = {"w": np.array([1.0])}
    checks = time_to_94.check(values, step(*found), step(1.0, 1.0, 0.5))
    said = parity.complaint(checks)
    assert problem in said
    assert bool(problem) == bool(said)


# Ours.


def test_traced_steps_count_as_long_as_the_other_steps():
    logged = {"start": 60.0, "training": 7.0, "input": 1.0, "summaries": 0.5}
    logged |= {"saving": 9.0, "evaluation": 9.0}
    # One step and one call of four are not on the clock: 17 of 22 are.
    ends = [0, 1, 2, 6, 10, 14, 18, 22]
    assert recipe.seconds_of_training(logged, ends, [22]) == 8.5 * 22 / 17
    # Nor is the first call of four of a second stage.
    assert recipe.seconds_of_training(logged, ends, [6, 22]) == 8.5 * 22 / 13
    with pytest.raises(UsageError, match="more steps"):
        recipe.seconds_of_training(logged, [0, 1, 2, 3], [1, 2, 3])


# The report and the flags.


def test_ratio_is_taken_within_turns():
    """Where the machine halves its speed in the second, too."""

    def measured(name, *seconds):
        facts = {"operations": 8e14, "images": 4e5}
        scores = {"accuracy": 0.93, "accuracy_with_views": 0.94}
        runs = [{"seconds": each, **scores} for each in seconds]
        row = Row(name, f"benchmarks.rivals.{name}")
        return Result(row, "bfloat16", facts=facts, rounds=runs)

    rows = [measured("recipe", 100.0, 200.0), measured("airbench", 200.0, 400.0)]
    rows.append(Result(Row("absent", time_to_94.AIRBENCH), problem="not installed"))
    about = {"data": "CIFAR-10", "seeds": 2, "steps": None, "images": None}
    text = time_to_94.markdown(rows, {**fake_package.ABOUT, **about})
    [line] = [line for line in text.splitlines() if "| recipe | " in line]
    assert "| 150.0 ± 70.7 (2) | 0.50 |" in line
    assert "not installed" in text


def test_too_few_steps_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["time_to_94", "--steps", "1"])
    with pytest.raises(UsageError, match="1"):
        time_to_94.main()


# The trainings themselves.


@pytest.fixture(scope="module")
def ours():
    return recipe.Recipe(recipe=str(PUBLISHED), dataset=few_images())


@pytest.mark.slow
def test_training_is_timed_and_scored(stand_in_dir):
    from cifar10.input import datasets

    on_disk = few_images(datasets.find("synthetic", str(stand_in_dir)).directory)
    short = {"steps": 3, "batch_size": 4}
    found = recipe.Recipe(recipe=str(PUBLISHED), dataset=on_disk, **short).run(1)
    assert found["seconds"] > 0
    for name in ("accuracy", "accuracy_with_views"):
        assert found[name] * 16 in range(17)


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


@pytest.fixture(scope="module")
def airbench():
    from benchmarks.rivals import airbench as module

    options = {"dataset": few_images(), "steps": 8, "batch_size": 16}
    return module.Airbench("float32", False, **options)


@pytest.mark.peers
@needs_torch
def test_airbench_computes_our_loss_gradients_and_first_update(ours, airbench):
    batch = ours.reference(64)
    expected = ours.check(*batch)
    checks = time_to_94.check(batch[0], airbench.check(*batch), expected)
    assert parity.complaint(checks) == ""
    # The first of these changes all gradients, the second the rule of the update.
    changed = {**batch[0], "norm2a/beta": np.ones(256, np.float32)}
    found = airbench.check(changed, *batch[1:])
    checks = time_to_94.check(batch[0], found, expected)
    assert "difference" in parity.complaint(checks)
