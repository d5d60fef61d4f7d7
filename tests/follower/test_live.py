"""A follower beside a run in another process."""

import time

import numpy as np
import pytest

import runs
from cifar10.follower import Follower
from cifar10.input import datasets
from small_runs import evaluated

STEPS, IMAGES = 200, 500


@pytest.mark.slow
def test_a_follower_in_another_process_tracks_the_run(tmp_path, real_data_dir):
    run = tmp_path / "run"
    images, labels = datasets.find("cifar10", real_data_dir).read("test")
    images, labels = images[:IMAGES], labels[:IMAGES]
    options = {"data": "cifar10", "batch_size": 128, "max_steps": STEPS}
    options |= {"checkpoint_steps": 25, "keep_checkpoints": 100}
    flags = runs.training_flags(run, real_data_dir, **options)
    logits = {}
    with runs.started("train.py", *flags) as training, Follower(run) as follower:
        while STEPS not in logits:
            assert training.poll() in (None, 0), "the training has failed"
            time.sleep(0.02)
            if follower.look():
                answer = follower.predict(images)
                logits[answer.step] = answer.logits
        training.communicate()
        assert (training.returncode, follower.refusals) == (0, [])
    assert len(logits) > 1
    assert [*logits] == sorted(logits)
    correct = [np.sum(each.argmax(axis=1) == labels) for each in logits.values()]
    assert correct[-1] > correct[0]
    for step, found in logits.items():
        np.testing.assert_array_equal(found, evaluated(run, step, images=images))
