"""N towers of B / N images end where one tower of B images ends.

The whole program runs: the real data with its distortions, `train_multi_gpu.py`'s own
training function, checkpoints compared.

In float32 only a few steps can be compared, and not at every seed. Splitting a batch
changes the rounding of the gradient's sums, and where two values compete within that
rounding, in a max pooling or at the edge of a ReLU, the other one wins: the difference
jumps from 1e-9 to 1e-7 and then feeds on itself. That happens about once in 25 steps
(docs/lab-notes.md), by chance; a fault in the towers shows at every seed. In float64 it
practically never happens, which shows the equality over many steps.
"""

import numpy as np
import pytest

import runs
from cifar10.config.config import Config
from cifar10.training import train as training


def train(train_dir, data_dir, *, towers, batch_size, steps, precision, **options):
    """Trains from the start; returns the checkpoint's variables, joined to one."""
    config = Config(
        num_gpus=towers,
        batch_size=batch_size,
        max_steps=steps,
        precision=precision,
        train_dir=str(train_dir),
        data="cifar10",
        data_dir=str(data_dir),
        deterministic=True,
        **options,
    )
    assert training.train(config) == steps
    values = runs.variables(runs.checkpoint(train_dir, steps))
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


def differences(directory, data_dir, **options):
    """Trains on 24 images a step in four ways; returns how far each ends from one."""

    def end(towers, **others):
        return train(
            directory / f"{towers}{others}",
            data_dir,
            towers=towers,
            batch_size=24 // towers,
            **{**options, **others},
        )

    whole, *split = (end(towers) for towers in (1, 2, 3, 4))
    # The comparison can fail: a shorter training ends elsewhere.
    assert difference(end(1, steps=options["steps"] // 2), whole) > 1e-3
    return {f"{n} towers": difference(one, whole) for n, one in enumerate(split, 2)}


def test_towers_equal_one_for_4_steps_in_float64(tmp_path, real_data_dir):
    whole, quarter, shorter = (
        train(
            tmp_path / f"{towers}_{steps}",
            real_data_dir,
            towers=towers,
            batch_size=16 // towers,
            steps=steps,
            precision="float64",
        )
        for towers, steps in ((1, 4), (4, 4), (1, 3))
    )
    assert difference(quarter, whole) <= 1e-8
    assert difference(shorter, whole) > 1e-3, "the comparison can fail"


@pytest.mark.slow
def test_towers_equal_one_for_50_steps_in_float64(tmp_path, real_data_dir):
    measured = differences(tmp_path, real_data_dir, steps=50, precision="float64")
    print("float64, 50 steps:", measured)
    assert max(measured.values()) <= 1e-8, measured


@pytest.mark.slow
def test_towers_equal_one_for_10_steps_in_float32(tmp_path, real_data_dir):
    least = dict.fromkeys(("2 towers", "3 towers", "4 towers"), np.inf)
    for seed in range(5):
        measured = differences(
            tmp_path / str(seed),
            real_data_dir,
            steps=10,
            precision="float32",
            seed=seed,
        )
        print("float32, 10 steps, seed", seed, measured)
        assert max(measured.values()) <= 1e-4, measured
        least = {name: min(least[name], measured[name]) for name in least}
        if max(least.values()) <= 1e-6:
            return
    pytest.fail(f"no seed of five within 1e-6: {least}")


def train_briefly(folder, data_dir, towers, **options):
    """Trains for 4 steps of 16 images in all, in float64."""
    return train(
        folder,
        data_dir,
        towers=towers,
        batch_size=16 // towers,
        steps=4,
        precision="float64",
        **options,
    )


def assert_all_ways_agree(folder, data_dir, **options):
    """Trains briefly, plainly and in three other ways; returns where it ends."""
    ways = [
        (1, {}),
        (4, {"steps_per_call": 2}),
        (2, {"variable_update": "mirrored"}),
        (2, {"sections": "2"}),
    ]
    whole, *others = (
        train_briefly(folder / str(number), data_dir, towers, **options, **how)
        for number, (towers, how) in enumerate(ways)
    )
    assert [difference(other, whole) for other in others] == pytest.approx(
        [0.0] * len(others), abs=1e-8
    )
    return whole


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
        {
            "augmentation": {
                "rand_augment": {},
                "random_erasing": {},
                "cutout": {},
                "mixup": {"probability": 0.5},
                "cutmix": {"probability": 0.5},
            },
            "label_smoothing": 0.1,
        },
    ],
    ids=["adamw", "lion", "augmentation"],
)
def test_recipes_are_in_the_equality(tmp_path, real_data_dir, options):
    assert_all_ways_agree(tmp_path, real_data_dir, learning_rate=1e-3, **options)


@pytest.mark.slow
def test_class_weights_are_in_the_equality(tmp_path, real_data_dir):
    weights = {"class_weights": [0.5, 9, 1, 1, 0, 2, 1, 3, 1, 0.25]}
    whole = assert_all_ways_agree(tmp_path, real_data_dir, **weights)
    unweighted = train_briefly(tmp_path / "plain", real_data_dir, 1)
    assert difference(unweighted, whole) > 1e-3


@pytest.mark.slow
def test_momentum_is_in_the_equality(tmp_path, real_data_dir):
    finals = [
        train_briefly(tmp_path / str(towers), real_data_dir, towers, momentum=0.9)
        for towers in (1, 4)
    ]
    assert difference(*finals) <= 1e-8
