"""`python -m cifar10 plan --find_batch`, and `--json`."""

import dataclasses
import functools
import json
import types

import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.sections import assembly as sections
from cifar10.tools.plan import largest_batch, one_step, plan, step as steps
from cifar10.tools.plan.options import Options

PROGRAM = "cifar10/__main__.py"
SMALL = {"model": runs.SMALL, "num_gpus": 1}


def test_largest_batch_that_fits_is_found_by_few_looks():
    for bytes_of in (
        lambda size: 1000 + 7 * size,
        lambda size: 1000 + 7 * size + max(0, 20 * (size - 300)),
        lambda size: 1000 + 0.01 * size**2,
        lambda size: 1000 + 300 * size**0.5,
    ):
        for most in (1, 2, 1000, 50_000):
            for limit in (1001, 1100, 3_000, 9_000, 10**9):
                counted = functools.cache(bytes_of)
                found = largest_batch.largest(counted, limit, most)
                assert 0 <= found <= most
                assert not found or bytes_of(found) <= limit
                next_one = found + max(1, int(found * 0.01))
                assert next_one > most or bytes_of(next_one) > limit
                slope = (bytes_of(most) - bytes_of(0)) / most
                is_line = bytes_of(1) - bytes_of(0) == slope
                assert counted.cache_info().misses <= (7 if is_line else 30)


def estimated(**flags):
    """Returns the planner's estimate for a step, without a search."""
    step = steps.build(Config(**flags), lambda _: None)
    return step.planner.total_bytes(step.planner.plain)


def test_batch_that_was_found_fits_and_a_larger_one_does_not():
    flags = {**SMALL, "precision": "float32", "accumulate": 2}
    requested = Config(memory_limit=0.2, **flags)
    found = largest_batch.find(requested, lambda _: None)
    assert not found.is_verified  # On a CPU it would cost what else is in memory.
    assert found.estimated_bytes == estimated(batch_size=found.batch_size, **flags)
    assert found.estimated_bytes <= 0.2e9 == found.limit
    larger = int(found.batch_size * 1.02) + 1
    assert estimated(batch_size=larger, **flags) > 0.2e9
    assert found.most == 25_000
    step = steps.build(requested, lambda _: None).of_batch_size(3)
    assert (step.config.batch.batch_size, step.config.global_batch_size) == (3, 6)


def test_command_says_what_to_train_with():
    words = runs.flags(**SMALL, memory_limit=0.1)
    done = runs.call(PROGRAM, "plan", "--find_batch", "--json", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["batch_size"] > 8
    assert found["estimated_bytes"] <= found["limit"] == 1e8
    assert found["next"].endswith(f" --num_gpus=1 --batch_size={found['batch_size']}")


def test_flags_that_contradict_it_are_refused(monkeypatch):
    for flag, value in (
        ("--batch_size", 8),
        ("--global_batch_size", 8),
        ("--sections", "auto"),
    ):
        done = runs.call(PROGRAM, "plan", "--find_batch", flag, value)
        assert done.returncode == 2
        assert flag in done.stderr
    # A recipe's batch size is no contradiction.
    config = Config(recipe="fast", global_batch_size=2000)
    Options(find_batch=True).check_with(config, {"recipe": "fast"})
    monkeypatch.setattr(sections, "memory_limit", lambda *_: float("inf"))
    with pytest.raises(UsageError, match="--memory_limit"):
        largest_batch.find(Config(**SMALL), lambda _: None)


@pytest.fixture
def on_gpus(monkeypatch):
    """Lets the search take the CPU for a GPU, on which it tries a step."""
    build = steps.build

    def built(*arguments):
        step = build(*arguments)
        placement = types.SimpleNamespace(on_gpus=True, devices=step.placement.devices)
        return dataclasses.replace(step, placement=placement)

    monkeypatch.setattr(steps, "build", built)
    monkeypatch.setattr(sections, "memory_limit", lambda *_: 1e8)


@pytest.mark.usefixtures("on_gpus")
def test_step_that_never_runs_is_no_batch(monkeypatch):
    monkeypatch.setattr(one_step, "why_not", lambda _: "no driver")
    text, fits = plan.report_largest_batch(Config(**SMALL), {})
    assert not fits
    assert {line.partition(": ")[2] for line in text.splitlines()} == {"no driver"}


def too_large(_):
    raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating\nmore")


def test_real_step_runs_and_a_failure_is_told(monkeypatch, capfd):
    one_step.run(Config(**SMALL | {"num_gpus": 2}, batch_size=2, accumulate=2))
    monkeypatch.setattr(one_step, "run", too_large)
    monkeypatch.setattr("sys.argv", ["-c", json.dumps({"num_gpus": 1})])
    monkeypatch.setattr(one_step.child_process, "claim_stdout", lambda: None)
    one_step.main()
    assert json.loads(capfd.readouterr().out) == "OOM when allocating"


@pytest.mark.slow
def test_child_that_dies_is_an_answer(tmp_path, monkeypatch):
    killed = "import os\nmain = lambda: os.kill(os.getpid(), 9)\n"
    (tmp_path / "killed.py").write_text(killed)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{runs.ROOT / 'tests' / 'helpers'}")
    config = Config(**SMALL, batch_size=2)
    assert "SIGKILL" in one_step.why_not(config, "killed")
    assert one_step.why_not(config) == ""
