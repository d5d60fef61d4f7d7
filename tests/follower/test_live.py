"""A training and its follower, side by side in two processes, on the real data."""

import json

import numpy as np
import pytest

import follow_a_run
import runs
from cifar10.input import datasets
from small_runs import evaluated

STEPS, EVERY = 200, 25


@pytest.mark.slow
def test_a_follower_in_another_process_learns_what_the_training_learns(
    tmp_path, real_data_dir
):
    run, written = tmp_path / "run", tmp_path / "followed.npz"
    images, _ = datasets.find("cifar10", real_data_dir).read("test")
    images = images[: follow_a_run.IMAGES]
    script = "tests/helpers/follow_a_run.py"
    flags = runs.training_flags(
        run,
        real_data_dir,
        data="cifar10",
        batch_size=128,
        max_steps=STEPS,
        checkpoint_steps=EVERY,
        keep_checkpoints=100,
    )
    with runs.started(script, run, real_data_dir, STEPS, written) as following:
        trained = runs.run("train.py", *flags)
        assert trained.returncode == 0, trained.stderr
        out, err = following.communicate()
    assert following.returncode == 0, err
    swaps = [json.loads(line) for line in out.splitlines()]
    steps = [one["step"] for one in swaps]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS
    assert len(steps) >= STEPS // EVERY // 2
    assert [one["refused"] for one in swaps] == [0] * len(swaps)
    correct = [one["correct"] for one in swaps]
    assert correct[-1] > correct[0]
    followed = np.load(written)
    for step in steps:
        expected = evaluated(run, step, images=images)
        np.testing.assert_array_equal(followed[str(step)], expected)
    scoring = runs.flags(
        train_dir=run, data_dir=real_data_dir, num_examples=len(images)
    )
    scored = json.loads(runs.call("eval.py", "--run_once", "--json", *scoring).stdout)
    assert (scored["step"], scored["correct"]) == (STEPS, correct[-1])
