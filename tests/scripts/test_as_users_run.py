"""Users' trainings: with oneDNN, without determinism, each in a process of its own.

All other tests switch oneDNN off and determinism on, so that they can compare bits.
Here results are equal but for rounding.
"""

import functools
import re

import numpy as np
import pytest

import runs

STEPS, IMAGES = 4, 32
# Of the norm of all that a step writes. Measured (Emerald Rapids): 7e-9, 8e-5, 5e-8; a
# maximum that competes within the rounding may be another one elsewhere.
BOUNDS = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}
WAYS = {
    "4 towers": {"num_gpus": 4},
    "mirrored": {"num_gpus": 2, "variable_update": "mirrored"},
    "accumulate": {"accumulate": 4},
    "towers in sections": {"num_gpus": 2, "sections": 2},
    "2 workers": {"local_workers": 2},
    "calls": {"num_gpus": 2, "steps_per_call": 3},
}


@pytest.fixture(scope="module")
def train(tmp_path_factory, stand_in_dir):
    """Trains by the script, in a process of its own; returns the folder of the run."""
    home = tmp_path_factory.mktemp("users")

    def train(name, **values):
        given = {
            "data": "synthetic",
            "data_dir": stand_in_dir,
            "max_steps": STEPS,
            "global_batch_size": IMAGES,
            "log_frequency": 1,
            "precision": "float32",
            "train_dir": home / name,
            **values,
        }
        done = runs.run_anew("train_multi_gpu.py", *runs.flags(**given))
        assert done.returncode == 0, done.stderr
        return home / name

    return train


@pytest.fixture(scope="module")
def one_tower(train):
    return functools.cache(
        lambda precision: train(f"one {precision}", num_gpus=1, precision=precision)
    )


def end(run, step=STEPS):
    """Returns the floating-point values of a checkpoint in one vector."""
    values = runs.variables(runs.checkpoint(run, step))
    of_run = ("model/", "averages/", "optimizer/")
    return np.concatenate(
        [
            value.ravel()
            for name, value in sorted(values.items())
            if name.startswith(of_run) and np.issubdtype(value.dtype, np.floating)
        ]
    )


def assert_alike(run, other, precision):
    one, two = end(run), end(other)
    far = np.linalg.norm(one - two) / np.linalg.norm(two)
    assert far <= BOUNDS[precision]
    losses = [[line["total_loss"] for line in runs.logged(r)] for r in (run, other)]
    np.testing.assert_allclose(*losses, rtol=BOUNDS[precision])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_division_of_a_batch_ends_as_on_one_tower(train, one_tower, way):
    assert_alike(train(way, **WAYS[way]), one_tower("float32"), "float32")


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param("bfloat16", marks=pytest.mark.slow),
        pytest.param("float16", marks=pytest.mark.soak),  # Minutes, on most CPUs.
    ],
)
def test_four_towers_agree_with_one_tower_in_16_bits(train, one_tower, precision):
    run = train(f"four {precision}", num_gpus=4, precision=precision)
    assert_alike(run, one_tower(precision), precision)


@pytest.mark.slow
def test_a_resumed_run_ends_as_an_uninterrupted_run(train, one_tower):
    train("resumed", num_gpus=1, max_steps=2)
    run = train("resumed", num_gpus=1)
    assert_alike(run, one_tower("float32"), "float32")


@pytest.mark.soak
@pytest.mark.parametrize("recipe", ["fast", "accurate", "resnet", "pictures"])
def test_every_recipe_trains_scores_and_fine_tunes(train, recipe):
    run = train(recipe, recipe=recipe, num_gpus=1, max_steps=12)
    losses = [line["total_loss"] for line in runs.logged(run)]
    assert np.isfinite(losses).all()
    done = runs.run_anew(
        "eval.py", "--run_once", "--train_dir", run, "--num_examples", 64
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"precision @ 1 = 0\.\d+", done.stdout)
    tuned = train(f"{recipe} tuned", recipe="finetune", initial_weights=run, num_gpus=2)
    assert np.isfinite(end(tuned)).all()
