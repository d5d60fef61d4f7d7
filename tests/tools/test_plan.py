"""`python -m cifar10 plan`: which sections and which batch fit."""

import json

import keras

import runs
from cifar10.sections import memory
from cifar10.tools import plan

PROGRAM = "cifar10/__main__.py"
SMALL = {"model": runs.SMALL, "num_gpus": 1, "precision": "float32"}


def planned(*words, **flags):
    """Runs the command; returns its exit code and what it prints."""
    done = runs.call(PROGRAM, "plan", *words, *runs.flags(**flags))
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def test_the_fewest_sections_that_fit_are_named():
    options = {**SMALL, "model": "resnet", "depth": 3, "batch_size": 512}
    _, printed = planned("--json", recipe="tutorial", **options)
    plans = json.loads(printed)["plans"]
    totals = [one["total_bytes"] for one in plans]
    assert [len(one["cuts"]) for one in plans][:2] == [0, 1]
    assert totals == sorted(totals, reverse=True)
    for limit, code, named in (
        (totals[0], 0, "--sections 1"),
        (totals[1], 0, f"--sections={','.join(plans[1]['cuts'])}"),
        (1e7, 1, "none"),
    ):
        options["memory_limit"] = 1e-9 * limit + 1e-4
        found, printed = planned(recipe="tutorial", **options)
        assert found == code
        assert named in " ".join(printed.split())


def test_a_batch_that_was_found_fits_and_a_larger_one_does_not():
    flags = {**SMALL, "accumulate": 2}
    code, printed = planned("--find_batch", "--json", memory_limit=0.1, **flags)
    found = json.loads(printed)
    assert code == 0
    assert 8 < found["batch_size"] < found["most"] == 25_000
    assert found["next"].endswith(f" --batch_size={found['batch_size']}")
    assert "memory_limit" not in found["next"]
    for more in (0, 1):
        size = found["batch_size"] + more
        _, printed = planned("--json", batch_size=size, sections=1, **flags)
        (only,) = json.loads(printed)["plans"]
        assert (only["total_bytes"] <= 1e8) is not bool(more)
        if not more:
            assert only["total_bytes"] == found["plans"][0]["total_bytes"]
    assert "no larger batch fits" in plan._text(found)
    assert "has no more images" in plan._text({**found, "batch_size": found["most"]})
    code, printed = planned("--find_batch", memory_limit=1e-3, **flags)
    assert code == 1
    assert "no batch fits" in printed


def test_flags_that_contradict_the_search_are_refused(monkeypatch):
    for flag, value in (
        ("--batch_size", 8),
        ("--global_batch_size", 8),
        ("--sections", "auto"),
    ):
        done = runs.call(PROGRAM, "plan", "--find_batch", flag, value)
        assert done.returncode == 2
        assert flag in done.stderr
    monkeypatch.setattr(memory, "memory_limit", lambda *_: float("inf"))
    done = runs.call(PROGRAM, "plan", "--find_batch", *runs.flags(**SMALL))
    assert done.returncode == 2
    assert "--memory_limit" in done.stderr


def test_a_model_larger_than_the_memory_is_refused_unbuilt():
    for width in (100_000, 10**12):
        flags = runs.flags(model="resnet", width=width)
        found = runs.call(PROGRAM, "plan", *flags)
        assert found.returncode == 2
        assert f"--width {width}" in found.stderr
    with keras.StatelessScope():  # Its end gives values to variables that wait.
        pass
