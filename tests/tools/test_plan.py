"""`python -m cifar10 plan`: which sections fit."""

import re

import runs

PROGRAM = "cifar10/__main__.py"


def planned(**flags):
    """Runs the command; returns its exit code and what it prints."""
    done = runs.call(PROGRAM, "plan", *runs.flags(**flags))
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def test_the_fewest_sections_that_fit_are_named():
    options = {"model": "resnet", "depth": 3, "batch_size": 512, "num_gpus": 1}
    options |= {"precision": "float32", "recipe": "tutorial"}
    _, printed = planned(**options)
    rows = re.findall(r"^ +(\d) +[\d,.]+ MB +([\d,.]+) MB", printed, re.MULTILINE)
    assert [int(count) for count, _ in rows][:2] == [1, 2]
    totals = [float(total.replace(",", "")) for _, total in rows]
    assert totals == sorted(totals, reverse=True)
    (cut,) = re.findall(r"^ +2 .* MB  (\w+)$", printed, re.MULTILINE)
    for limit, code, named in (
        (totals[0], 0, "--sections 1"),
        (totals[1], 0, f"--sections={cut}"),
        (10, 1, "No plan"),
    ):
        options["memory_limit"] = 1e-3 * limit + 1e-4
        found, printed = planned(**options)
        assert found == code
        assert named in " ".join(printed.split())


def test_a_model_larger_than_the_memory_ends_in_a_sentence():
    flags = runs.flags(model="resnet", width=10**12, num_gpus=1)
    found = runs.call(PROGRAM, "plan", *flags)
    assert found.returncode == 2
    assert f"'width': {10**12}" in found.stderr
    assert "Traceback" not in found.stderr
