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
import tensorflow as tf

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
    state = train_dir / "checkpoints" / f"step-{steps:08d}" / "state"
    reader = tf.train.load_checkpoint(str(state))
    names = [
        name
        for name in sorted(reader.get_variable_to_shape_map())
        if name.startswith(("model/", "averages/", "optimizer/"))
        and reader.get_variable_to_dtype_map()[name].is_floating
    ]
    return np.concatenate([reader.get_tensor(name).ravel() for name in names])


def difference(one, other):
    """The norm of the difference over the norm."""
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def differences(directory, data_dir, *, steps, odd_steps, **options):
    """Trains in five ways; returns how far each split ends from its one tower."""
    finals = {
        (towers, batch_size): train(
            directory / f"{towers}x{batch_size}",
            data_dir,
            towers=towers,
            batch_size=batch_size,
            steps=odd_steps if batch_size % 2 else steps,
            **options,
        )
        for towers, batch_size in [(1, 128), (2, 64), (4, 32), (1, 129), (3, 43)]
    }
    # The comparison can fail: another training ends elsewhere.
    assert difference(finals[1, 129], finals[1, 128]) > 1e-3
    return {
        "2 x 64": difference(finals[2, 64], finals[1, 128]),
        "4 x 32": difference(finals[4, 32], finals[1, 128]),
        "3 x 43": difference(finals[3, 43], finals[1, 129]),
    }


def test_towers_equal_one_for_50_steps_in_float64(tmp_path, real_data_dir):
    measured = differences(
        tmp_path, real_data_dir, steps=50, odd_steps=15, precision="float64"
    )
    print("float64, 50 steps:", measured)
    assert max(measured.values()) <= 1e-8, measured


def test_towers_equal_one_for_10_steps_in_float32(tmp_path, real_data_dir):
    least = dict.fromkeys(("2 x 64", "4 x 32", "3 x 43"), np.inf)
    for seed in range(5):
        measured = differences(
            tmp_path / str(seed),
            real_data_dir,
            steps=10,
            odd_steps=10,
            precision="float32",
            seed=seed,
        )
        print("float32, 10 steps, seed", seed, measured)
        assert max(measured.values()) <= 1e-4, measured
        least = {name: min(least[name], measured[name]) for name in least}
        if max(least.values()) <= 1e-6:
            return
    pytest.fail(f"no seed of five within 1e-6: {least}")


def test_momentum_is_in_the_equality(tmp_path, real_data_dir):
    finals = [
        train(
            tmp_path / str(towers),
            real_data_dir,
            towers=towers,
            batch_size=64 // towers,
            steps=6,
            precision="float64",
            momentum=0.9,
        )
        for towers in (1, 4)
    ]
    assert difference(*finals) <= 1e-8
