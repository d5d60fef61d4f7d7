"""--verify_steps: gradients that two devices compute differently end or roll back."""

import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config import layout
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints
from cifar10.towers import towers
from cifar10.towers.verification import not_finite, verified_step
from cifar10.training import results, train
from small_towers import make_towers, random_batch, small_model, split


def config(train_dir, stand_in_dir, **values):
    return Config(
        **{
            "train_dir": str(train_dir),
            "data": "synthetic",
            "data_dir": str(stand_in_dir),
            "model": runs.SMALL,
            "num_gpus": 3,
            "batch_size": 4,
            "max_steps": 8,
            "checkpoint_steps": 4,
            "deterministic": True,
            **values,
        }
    )


def state_of(train_dir):
    reader = tf.train.load_checkpoint(
        str(checkpoints.folder(train_dir / "checkpoints", 8) / "state")
    )
    names = reader.get_variable_to_shape_map()
    return {
        name: reader.get_tensor(name) for name in names if "graph" not in name.lower()
    }


def flip_a_bit(monkeypatch, number, bit, times):
    """Flips a bit of a gradient of one tower, on its own device, a number of times."""
    left = tf.Variable(times)
    called, original = [], towers.Tower.__call__

    def compute(self, state, tower, *given):
        result = original(self, state, tower, *given)
        device = tf.zeros([], tf.float32).device
        if tower != number or not device.endswith(f"CPU:{number}"):
            return result
        called.append(device)
        gradient, *others = result.gradients
        flat = tf.reshape(gradient, [-1])
        bits = tf.bitcast(flat[:1], tf.int32) ^ (1 << bit)
        with tf.control_dependencies([flat]):
            broken = tf.concat([tf.bitcast(bits, tf.float32), flat[1:]], 0)
            is_broken = (left > 0) & (state.global_step == 5)
            gradient = tf.cond(
                is_broken,
                lambda: tf.reshape(broken, gradient.shape),
                lambda: gradient,
            )
        return result._replace(gradients=[gradient, *others])

    monkeypatch.setattr(towers.Tower, "__call__", compute)
    return left


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"num_gpus": 2, "steps_per_call": 4}], ids=str
)
def test_verified_steps_equal_plain_steps(tmp_path, stand_in_dir, options):
    for name, every in (("plain", None), ("verified", 3)):
        values = {"verify_steps": every, **options}
        train.train(config(tmp_path / name, stand_in_dir, **values))
    plain, verified = state_of(tmp_path / "plain"), state_of(tmp_path / "verified")
    assert plain.keys() == verified.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(value, verified[name], err_msg=name)


def test_sums_of_nine_towers_are_unchanged_by_verification(tmp_path, stand_in_dir):
    """TensorFlow would join the sums of the first tower's gradient and of all."""
    found = []
    for name, more in (("plain", []), ("verified", ["--verify_steps", "2"])):
        values = {"num_gpus": 9, "batch_size": 4, "max_steps": 4}
        flags = runs.training_flags(tmp_path / name, stand_in_dir, **values)
        done = runs.run("train_multi_gpu.py", *flags, "--deterministic", *more)
        assert done.returncode == 0
        found.append(runs.variables(runs.checkpoint(tmp_path / name, 4)))
    runs.assert_equal(*found)


@pytest.mark.parametrize("bit", [0, 13, 30])
def test_a_flipped_bit_names_step_tower_and_variable(
    tmp_path, stand_in_dir, monkeypatch, bit
):
    flip_a_bit(monkeypatch, 1, bit, 1)
    with pytest.raises(UsageError) as error:
        train.train(config(tmp_path / "run", stand_in_dir, verify_steps=2))
    said = str(error.value)
    assert "step 6" in said
    assert "tower 1" in said
    assert "kernel" in said
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [4]
    kept = checkpoints.folder(tmp_path / "run" / layout.DEBUG_CHECKPOINTS, 5)
    state = tf.train.load_checkpoint(str(kept / "state"))
    assert state.get_tensor("global_step/.ATTRIBUTES/VARIABLE_VALUE") == 5


def test_each_batch_of_a_device_is_verified_on_another(
    tmp_path, stand_in_dir, monkeypatch
):
    flip_a_bit(monkeypatch, 0, 13, 9)  # On both computations, were they on one device.
    values = {"num_gpus": 2, "accumulate": 2, "verify_steps": 2}
    with pytest.raises(UsageError, match="step 6"):
        train.train(config(tmp_path / "run", stand_in_dir, **values))


def test_a_rollback_leaves_no_images_out(tmp_path, stand_in_dir, monkeypatch, capsys):
    left = flip_a_bit(monkeypatch, 1, 20, 0)
    train.train(config(tmp_path / "plain", stand_in_dir))
    left.assign(1)
    monkeypatch.setattr(results, "say", lambda text: (left.assign(0), print(text)))
    values = {"verify_steps": 3, "on_nan": "rollback"}
    train.train(config(tmp_path / "run", stand_in_dir, **values))
    assert "ROLLED BACK to the checkpoint of step 4: " in capsys.readouterr().out
    plain, run = state_of(tmp_path / "plain"), state_of(tmp_path / "run")
    for name, value in plain.items():
        np.testing.assert_array_equal(value, run[name], err_msg=name)


def test_mirrored_variables_are_refused(tmp_path, stand_in_dir):
    with pytest.raises(UsageError, match="verify_steps"):
        train.train(
            config(
                tmp_path / "run",
                stand_in_dir,
                verify_steps=2,
                variable_update="mirrored",
            )
        )


def test_a_verified_step_freezes_the_variables_of_its_stage(four_cpus):
    """Also after a verified step of another stage, of images of the same size."""
    builder = make_towers(small_model(), four_cpus[:2])
    batches = split(*random_batch(), 2)
    for frozen in ((), ("dense",)):
        builder.freeze(frozen)
        before = [one.numpy() for one in builder.state.model.trainable_variables]
        verified_step(builder, batches, 1e-3)
        after = [one.numpy() for one in builder.state.model.trainable_variables]
        pairs = zip(before, after, strict=True)
        moved = [bool((one != other).any()) for one, other in pairs]
        assert moved == [not frozen] * 2 + [True] * 2


def test_variables_that_are_not_finite_are_named():
    state = make_towers(small_model(), ["/cpu:0"]).state
    assert not not_finite(state)
    kernel, bias = state.model.trainable_variables[:2]
    bias.assign(np.full(bias.shape, np.nan))
    state.averages[0].assign(tf.fill(kernel.shape, -np.inf))
    assert not_finite(state) == [bias.path, f"the average of {kernel.path}"]
