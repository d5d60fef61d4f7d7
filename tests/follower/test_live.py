"""A training and its follower, side by side in two processes, on the real data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from follow_a_run import BATCH, BATCHES

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 400, 50

# What eval.py computes, in a process with its own arithmetic: oneDNN, unlike the tests.
_EVALUATED = f"""
import sys
from pathlib import Path
from cifar10.config import cli
cli.import_tensorflow()
import numpy as np
import tensorflow as tf
from cifar10.scoring import scorer
from cifar10.run_directory import checkpoints
from cifar10.input import datasets, evaluation
from cifar10.input.pictures import decoding
from cifar10.follower import Follower
from cifar10.follower.trained_model import TrainedModel
run, data, written, png = sys.argv[1:]
images, labels = datasets.find("cifar10", data).read("test")
batches = evaluation.evaluation_batches(
    images[: {BATCH * BATCHES}], labels[: {BATCH * BATCHES}], {BATCH}, "tutorial")
trained = TrainedModel(Path(run))
logits_of = tf.function(scorer.Scorer(trained.model, 10)._logits)
kept = {{}}
for step in checkpoints.steps(Path(run) / "checkpoints"):
    trained.load(checkpoints.verify(Path(run) / "checkpoints", step))
    values = [tf.convert_to_tensor(one) for one in trained.trainable]
    logits = [logits_of(values, images)[0] for images, _, _ in batches]
    kept[str(step)] = np.concatenate(logits)
np.savez(written, **kept)
from PIL import Image
follower = Follower(run)
follower.look()
for number in range(20):
    Image.fromarray(images[number]).save(png)
    read = decoding.decode(decoding.read(Path(png)), "it", 32, 32)
    alone = follower.predict(read[None]).logits[0]
    # Kernels for other batch sizes round otherwise, in bfloat16 up to a hundredth.
    assert np.allclose(alone, kept[str(step)][number], atol=0.05), number
"""


def start(*words):
    environ = {k: v for k, v in os.environ.items() if k != "TF_ENABLE_ONEDNN_OPTS"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environ,
    )


def output_of(process):
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return out


@pytest.mark.slow
def test_a_follower_in_another_process_learns_what_the_training_learns(
    tmp_path, real_data_dir
):
    run = tmp_path / "run"
    following = start(
        "tests/helpers/follow_a_run.py",
        run,
        real_data_dir,
        STEPS,
        tmp_path / "followed.npz",
    )
    training = start(
        *["train.py", "--max_steps", STEPS, "--checkpoint_steps", EVERY],
        *["--keep_checkpoints", 100, "--train_dir", run, "--data_dir", real_data_dir],
    )
    output_of(training)
    swaps = [json.loads(line) for line in output_of(following).splitlines()]
    evaluating = ["-c", _EVALUATED, run, real_data_dir, tmp_path / "evaluated.npz"]
    output_of(start(*evaluating, tmp_path / "image.png"))
    scoring = ["eval.py", "--run_once", "--json", "--train_dir", run]
    of_all = ["--data_dir", real_data_dir, "--num_examples", BATCH * BATCHES]
    scored = json.loads(output_of(start(*scoring, *of_all)))
    print(*swaps, sep="\n")

    steps = [one["step"] for one in swaps]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS
    assert len(steps) >= STEPS // EVERY // 2
    assert [one["refused"] for one in swaps] == [0] * len(swaps)
    correct = [one["correct"] for one in swaps]
    assert (scored["step"], scored["correct"]) == (STEPS, correct[-1])
    assert correct[-1] > correct[len(correct) // 2] > correct[0]
    assert correct[-1] > 0.35 * BATCH * BATCHES
    followed = np.load(tmp_path / "followed.npz")
    evaluated = np.load(tmp_path / "evaluated.npz")
    for step in steps:
        np.testing.assert_array_equal(followed[str(step)], evaluated[str(step)])
