"""N towers of B / N images end where one tower of B images ends.

The whole program runs: the real data with its distortions, `train_multi_gpu.py`'s own
training function, checkpoints compared.

In float32 only a few steps can be compared, and not at every seed. Splitting a batch
changes the rounding of the gradient's sums, and where two values compete within that
rounding, in a max pooling or at the edge of a ReLU, the other one wins: the difference
jumps from 1e-9 to 1e-7 and then feeds on itself. That happens about once in 25 steps
(dev/LOG.md), by chance; a fault in the towers shows at every seed. In float64 it
practically never happens, which shows the equality over many steps.
"""

import numpy as np
import pytest

import runs
from cifar10.config.augmentation import PARTS


def train(train_dir, data_dir, *, towers, images=16, steps=4, **options):
    """Trains from the start in float64; returns the variables at the end."""
    runs.train(
        train_dir,
        data_dir,
        **{
            "data": "cifar10",
            "num_gpus": towers,
            "batch_size": images // towers,
            "max_steps": steps,
            "checkpoint_steps": steps // 2,
            "precision": "float64",
            "deterministic": True,
            **options,
        },
    )
    return trained(train_dir, steps)


def trained(train_dir, step):
    """Returns the variables of a checkpoint, joined to one."""
    values = runs.variables(runs.checkpoint(train_dir, step))
    return np.concatenate(
        [
            value.ravel()
            for name, value in sorted(values.items())
            if name.startswith(("model/", "averages/", "optimizer/"))
            and np.issubdtype(value.dtype, np.floating)
        ]
    )


def difference(one, other):
    """The norm of the difference over the norm."""
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def differences(directory, data_dir, ways, **options):
    """Trains in several ways; returns how far the others end from the first."""
    ends = [
        train(directory / str(number), data_dir, **{**options, **way})
        for number, way in enumerate(ways)
    ]
    # The comparison can fail: half the training ends elsewhere.
    half = trained(directory / "0", options.get("steps", 4) // 2)
    assert difference(half, ends[0]) > 1e-3
    return [difference(end, ends[0]) for end in ends[1:]]


def test_towers_equal_a_single_tower_in_float64(tmp_path, real_data_dir):
    ways = [{"towers": 1}, {"towers": 4}]
    assert max(differences(tmp_path, real_data_dir, ways)) <= 1e-8


TUTORIAL = {"model": "tutorial", "images": 24}
TOWERS = [{"towers": number} for number in (1, 2, 3, 4)]


@pytest.mark.slow
def test_towers_equal_a_single_tower_for_50_steps(tmp_path, real_data_dir):
    options = {**TUTORIAL, "images": 12, "steps": 50}
    measured = differences(tmp_path, real_data_dir, TOWERS, **options)
    print("float64, 50 steps, 2 to 4 towers:", measured)
    assert max(measured) <= 1e-8, measured


@pytest.mark.slow
def test_towers_equal_a_single_tower_in_float32(tmp_path, real_data_dir):
    least, beyond = np.full(3, np.inf), []
    for seed in range(5):
        options = {"steps": 10, "precision": "float32", "seed": seed, **TUTORIAL}
        measured = differences(tmp_path / str(seed), real_data_dir, TOWERS, **options)
        print("float32, 10 steps, 2 to 4 towers, seed", seed, measured)
        if max(measured) > 1e-4:
            beyond.append(max(measured))
        # Rounding may move a maximum: 1.04e-4 by seed 3 on an Emerald Rapids Xeon.
        assert len(beyond) <= 1, beyond
        assert max(measured) <= 1.1e-4, measured
        least = np.minimum(least, measured)
        if max(least) <= 1e-6:
            return
    pytest.fail(f"no seed of five within 1e-6: {least}")


WAYS = [
    {"towers": 1},
    {"towers": 4, "steps_per_call": 2},
    {"towers": 2, "variable_update": "mirrored"},
    {"towers": 2, "sections": "2"},
]
AUGMENTATION = {
    **{name: {} for name in PARTS},
    "mixup": {"probability": 0.5},
    "cutmix": {"probability": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {
            "optimizer": "adamw",
            "schedule": "cosine",
            "optimizer_arguments": {"weight_decay": 0.05, "beta_2": 0.99},
        },
        {"optimizer": "lion", "schedule": "one_cycle"},
        {"augmentation": AUGMENTATION, "label_smoothing": 0.1, "momentum": 0.9},
        {"class_weights": [0.5, 9, 1, 1, 0, 2, 1, 3, 1, 0.25]},
    ],
    ids=["adamw", "lion", "augmentation", "class weights"],
)
def test_towers_equal_one_with_the_options_of_recipes(tmp_path, real_data_dir, options):
    measured = differences(
        tmp_path, real_data_dir, WAYS, **{"learning_rate": 0.01, **options}
    )
    assert max(measured) <= 1e-8, measured
