"""`python -m cifar10 plan`: which sections and which batch fit."""

import re

import runs

PROGRAM = "cifar10/__main__.py"


def planned(**flags):
    """Runs the command; returns its exit code and what it prints."""
    done = runs.call(PROGRAM, "plan", *runs.flags(**flags))
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def test_the_fewest_fitting_sections_are_named():
    options = {"model": "tutorial", "batch_size": 512, "num_gpus": 1}
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


def largest(printed):
    """Returns the images of the largest batches, by number of sections."""
    found = re.findall(
        r"--batch_size (\d+)(?: --sections (\d+))?$", printed, re.MULTILINE
    )
    return {int(sections or 1): int(size) for size, sections in found}


def test_the_largest_batch_fits_and_a_larger_one_does_not():
    given = {"model": "tutorial", "num_gpus": 2, "accumulate": 2}
    given |= {"precision": "float32", "recipe": "tutorial", "memory_limit": 0.6}
    code, printed = planned(batch_size=4, **given)
    assert code == 0
    found = largest(printed)
    assert found.keys() == {1, max(found)}
    assert 16 < found[1] < found[max(found)] < 50_000 // 4
    code, printed = planned(batch_size=found[1] * 5 // 4, **given)
    assert code == 0, "it fits in sections"
    assert "without sections" not in printed
    code, printed = planned(batch_size=found[max(found)] * 5 // 4, **given)
    assert code == 1
    assert largest(printed) == found


def test_a_fine_tuning_is_planned_without_its_weights():
    """It is the command that a fine-tuning out of memory prints."""
    code, printed = planned(model=runs.SMALL, recipe="finetune", num_gpus=1)
    assert (code, "A step fits" in printed) == (0, True)


def test_a_batch_never_exceeds_the_training_set_and_may_not_fit_at_all():
    small = {"model": runs.SMALL, "num_gpus": 3, "precision": "float32"}
    _, printed = planned(memory_limit=1000, **small)
    assert 10_000 < largest(printed)[1] <= 50_000 // 3
    code, printed = planned(memory_limit=1e-3, **small)
    assert code == 1
    assert largest(printed) == {}
    assert "No batch" in printed


def test_a_model_larger_than_the_memory_is_refused_without_a_traceback():
    flags = runs.flags(model="resnet", width=10**12, num_gpus=1)
    found = runs.call(PROGRAM, "plan", *flags)
    assert found.returncode == 2
    assert f"'width': {10**12}" in found.stderr
    assert "Traceback" not in found.stderr
