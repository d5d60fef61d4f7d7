"""`python -m cifar10 plan`: which sections fit."""

import json

import runs

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
        (1e7, 1, "No plan"),
    ):
        options["memory_limit"] = 1e-9 * limit + 1e-4
        found, printed = planned(recipe="tutorial", **options)
        assert found == code
        assert named in " ".join(printed.split())


def test_a_model_larger_than_the_memory_ends_in_a_sentence():
    flags = runs.flags(model="resnet", width=10**12, num_gpus=1)
    found = runs.call(PROGRAM, "plan", *flags)
    assert found.returncode == 2
    assert f"width={10**12}" in found.stderr
    assert "Traceback" not in found.stderr
