"""`--on_nan`: a gradient that is infinite on one tower at one step, on purpose.

One image of the set is white, so that standardized it is zero everywhere, and the model
has a layer which makes the gradient or the loss infinite for such an image. In an epoch
the image comes once: in step 6, on the second of two towers.
"""

import json
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import cifar, pipeline
from cifar10.run_directory import checkpoints
from cifar10.run_directory.gains import Gains
from cifar10.towers import towers
from cifar10.training import assembly, train as training

IMAGES = 256
CALLS = [1, pytest.param(3, marks=pytest.mark.slow)]  # Steps in one.
BAD_STEP = 6
BAD_TOWER = "tower 1 (/cpu:1)"


@tf.custom_gradient
def infinite_gradient(x, factor):
    return tf.identity(x), lambda upstream: (upstream * factor, None)


class Trap(keras.layers.Layer):
    """Passes its input on; the gradient or the output is infinite for a white image."""

    def __init__(self, kind):
        super().__init__(name="trap")
        self.kind = kind

    def call(self, x, images):
        # White is 2.06 or more in every channel; the brightest of the others is 1.3.
        white = tf.reduce_min(images, axis=[1, 2, 3]) > 2.0
        factor = tf.where(tf.reduce_any(white), np.inf, 1.0)
        return infinite_gradient(x, factor) if self.kind == "gradient" else x * factor


@pytest.fixture
def train(tmp_path, stand_in_dir, monkeypatch):
    """Trains a small model with a trap in a directory, two towers of four images."""

    def trapped(kind):
        def build(image_shape, classes):
            images = keras.Input(image_shape)
            x = keras.layers.Flatten()(images)
            x = keras.layers.Dense(4, name="hidden")(x)
            x = keras.layers.BatchNormalization(name="norm")(x)
            x = Trap(kind)(x, images)
            return keras.Model(images, keras.layers.Dense(classes, name="head")(x))

        return build

    for kind in ("gradient", "loss"):
        monkeypatch.setitem(models.REGISTRY, f"{kind}_trap", trapped(kind))

    place = tf.constant([(BAD_STEP - 1) * 8 + 5], tf.int64)
    (white,) = pipeline.shuffled_indices(place, IMAGES, 0).numpy()

    def train(name, *, whites=(white,), hooks=(), **options):
        random = np.random.default_rng(0)
        images = random.integers(0, 200, (IMAGES, 32, 32, 3), dtype=np.uint8)
        labels = random.integers(0, 10, IMAGES, dtype=np.int32)
        images[list(whites)] = 255
        arguments = {
            "model": "gradient_trap",
            "max_steps": 10,
            "checkpoint_steps": 4,
            "log_frequency": 4,
            "momentum": 0.9,
            **options,
        }
        with monkeypatch.context() as patched:
            patched.setattr(
                cifar.BinaryDataset, "read", lambda self, part: (images, labels)
            )
            return training.train(
                Config(
                    num_gpus=2,
                    batch_size=4,
                    distortions="none",
                    train_dir=str(tmp_path / name),
                    data="synthetic",
                    data_dir=str(stand_in_dir),
                    precision="float32",
                    **arguments,
                ),
                hooks=hooks,
            )

    return train


@pytest.fixture
def reference(train, monkeypatch):
    """Trains without any white image, as a policy should have ended."""

    def train_on(name, *, shift=0, without_update_of=None, **options):
        opened, step = assembly.open_batches, towers.TowerBuilder.step

        def shifted(*arguments, **options):
            *others, start_batch, step = arguments
            return opened(*others, start_batch + shift, step, **options)

        def stepped(builder, batches, *, return_gradients=False):
            state = builder.state
            if int(state.global_step) + 1 != without_update_of:
                builder.last = step(builder, batches, return_gradients=return_gradients)
            else:
                state.global_step.assign_add(1)
            return builder.last

        with monkeypatch.context() as patched:
            patched.setattr(assembly, "open_batches", shifted)
            patched.setattr(towers.TowerBuilder, "step", stepped)
            train(name, whites=(), **options)

    return train_on


def assert_equal(folder, other):
    values = runs.variables(folder)
    runs.assert_equal(values, runs.variables(other))
    for name, value in values.items():
        assert np.isfinite(value).all(), name


def assert_same_end(tmp_path, step=10):
    assert_equal(
        *(runs.checkpoint(tmp_path / name, step) for name in ("run", "reference"))
    )


# ---- stop


@pytest.mark.parametrize("steps_per_call", CALLS)
def test_stop_names_what_is_wrong_and_keeps_the_state_before(
    tmp_path, train, reference, steps_per_call
):
    with pytest.raises(UsageError) as caught:
        train("run", steps_per_call=steps_per_call)
    said = str(caught.value)
    debug = tmp_path / "run" / "debug"
    assert f"at step {BAD_STEP} the norm of the averaged gradients is" in said
    assert (
        f"gradients of {BAD_TOWER} are not finite in hidden/kernel, hidden/bi" in said
    )
    assert "norm/gamma and 1 more" in said
    assert "tower 0" not in said
    assert "head" not in said
    assert f"state before that step is in {debug / 'step-00000005'}" in said
    assert "last good checkpoint is of step 4" in said
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [4]

    reference("reference", max_steps=BAD_STEP - 1)
    manifest = checkpoints.verify(debug, BAD_STEP - 1).manifest
    assert manifest["not_finite"]["step"] == BAD_STEP
    assert manifest["not_finite"]["gradients"] == {
        BAD_TOWER: ["hidden/kernel", "hidden/bias", "norm/gamma", "norm/beta"]
    }
    assert_equal(
        debug / "step-00000005", runs.checkpoint(tmp_path / "reference", BAD_STEP - 1)
    )


@pytest.mark.slow
def test_after_a_stop_the_same_command_with_skip_goes_on(tmp_path, train, reference):
    for _ in range(2):
        with pytest.raises(UsageError, match=f"at step {BAD_STEP} "):
            train("run")
    kept = {path.name for path in (tmp_path / "run" / "debug").iterdir()}
    assert kept == {"step-00000005", "earlier-step-00000005-1"}
    assert train("run", on_nan="skip") == 10
    reference("reference", without_update_of=BAD_STEP)
    assert_same_end(tmp_path)


def test_a_loss_names_its_tower(train):
    with pytest.raises(UsageError) as caught:
        train("run", model="loss_trap")
    assert f"at step {BAD_STEP} the loss of {BAD_TOWER} is" in str(caught.value)
    assert f"the gradients of {BAD_TOWER} are not finite in" in str(caught.value)


# ---- skip


@pytest.mark.parametrize(
    "kind", ["gradient", pytest.param("loss", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("steps_per_call", CALLS)
def test_skip_leaves_out_that_update_and_nothing_else(
    tmp_path, train, reference, capsys, kind, steps_per_call
):
    options = {"model": f"{kind}_trap"}
    train("run", on_nan="skip", steps_per_call=steps_per_call, **options)
    said = capsys.readouterr().err
    assert said.count("SKIPPED the update of step") == 1
    assert f"SKIPPED the update of step {BAD_STEP}: the " in said
    assert "hidden" not in said, "by the time of the look there were other updates"
    reference("reference", without_update_of=BAD_STEP, **options)
    assert_same_end(tmp_path)
    assert [line["skipped_steps"] for line in runs.logged(tmp_path / "run")] == [0, 1]
    assert not (tmp_path / "run" / "debug").exists()


def test_skip_names_the_variables_where_no_update_came_in_between(
    tmp_path, train, capsys
):
    train("run", on_nan="skip", model="loss_trap", log_frequency=1, max_steps=8)
    said = capsys.readouterr().err
    assert f"the loss of {BAD_TOWER} is" in said
    assert f"; the gradients of {BAD_TOWER} are not finite in hidden/kernel" in said
    bad = runs.logged(tmp_path / "run")[BAD_STEP - 1]
    assert bad["step"] == BAD_STEP
    assert bad["total_loss"] is None
    assert bad["total_loss/average"] is not None


def test_a_count_of_skipped_steps_goes_on_after_a_resume(tmp_path, train, reference):
    train("run", on_nan="skip", max_steps=8)
    train("run", on_nan="skip", max_steps=12)
    assert [line["skipped_steps"] for line in runs.logged(tmp_path / "run")] == [
        0,
        1,
        1,
    ]
    reference("reference", without_update_of=BAD_STEP, max_steps=12)
    assert_same_end(tmp_path, 12)


def test_skip_stops_where_it_would_go_on_for_ever(tmp_path, train):
    with pytest.raises(
        UsageError, match=r"last 12 steps were all skipped.*--clip_norm"
    ):
        train("run", on_nan="skip", whites=range(IMAGES), max_steps=20)
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [4, 8]


# ---- rollback


@pytest.mark.parametrize("steps_per_call", CALLS)
def test_rollback_goes_on_from_the_checkpoint_with_later_images(
    tmp_path, train, reference, capsys, steps_per_call
):
    train("run", on_nan="rollback", steps_per_call=steps_per_call)
    said = capsys.readouterr().err
    assert "ROLLED BACK to the checkpoint of step 4" in said
    assert "without the images of steps 5 to 6: at step 6 the norm of the" in said
    assert f"the gradients of {BAD_TOWER} are not finite in hidden/kernel" in said
    assert checkpoints.verify(tmp_path / "run" / "debug", 5).manifest["left_out"] == 0

    reference("reference", max_steps=4)
    reference("reference", shift=2)
    assert_same_end(tmp_path)
    manifest = checkpoints.verify(tmp_path / "run" / "checkpoints", 10).manifest
    assert manifest["left_out"] == 2
    assert manifest["position"] == 8 * (10 + 2)


def test_rollback_takes_back_scores_and_what_they_decide(tmp_path, train, monkeypatch):
    """Steps 5 to 10 are scored again; of step 6 there is no score the first time."""
    counted = []
    after = Gains.after

    def noted(gains, step, *_):
        counted.append((step, gains.without_gain))
        return after(gains, step, 0, IMAGES)

    monkeypatch.setattr(Gains, "after", noted)
    train("run", on_nan="rollback", eval_steps=1, stop_after_no_gain=20)
    steps = [*range(1, 6), *range(5, 11)]
    assert counted == [(step, max(step - 2, 0)) for step in steps]
    scored = (tmp_path / "run" / "eval" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in scored] == [*range(1, 11)]


def test_hooks_are_told_of_a_rollback_and_once_of_the_end(tmp_path, train):
    told = []
    hook = types.SimpleNamespace(
        on_start=lambda run: told.append(("start", run.step)),
        on_log=lambda step, metrics: told.append(("log", step)),
        on_end=lambda step, why: told.append((why, step)),
    )
    train("run", on_nan="rollback", log_frequency=1, hooks=[hook])
    # Step 6 is not finite.
    before = [("start", 0), *(("log", step) for step in range(1, 6))]
    after = [("start", 4), *(("log", step) for step in range(5, 11))]
    assert told == [*before, *after, ("finished", 10)]
    lines = runs.logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [*range(1, 11)]


def test_a_resume_after_a_rollback_keeps_the_place_in_the_input(
    tmp_path, train, reference
):
    train("run", on_nan="rollback", max_steps=7)
    train("run", on_nan="stop")
    reference("reference", max_steps=4)
    reference("reference", shift=2)
    assert_same_end(tmp_path)


@pytest.mark.slow
def test_rollback_without_a_checkpoint_begins_with_the_initial_values(
    tmp_path, train, reference
):
    train("run", on_nan="rollback", checkpoint_steps=100, log_frequency=1)
    reference("reference", shift=BAD_STEP)
    assert_same_end(tmp_path)
    lines = runs.logged(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 11))
    shifted = [line["total_loss"] for line in runs.logged(tmp_path / "reference")]
    assert [lines[step - 1]["total_loss"] for step in (4, 8)] == shifted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "shifts"),
    [(7, {4: 0, 10: 3}), (12, {4: 0, 8: 2, 10: 4})],
    ids=["from the same checkpoint", "from a later one"],
)
def test_a_second_rollback_leaves_out_what_the_first_did(
    tmp_path, train, reference, second, shifts
):
    """After batch 6, batches 5 and 6 are left out: 7 is step 5 then, and 12 step 10."""
    places = tf.constant([(number - 1) * 8 for number in (6, second)], tf.int64)
    whites = pipeline.shuffled_indices(places, IMAGES, 0).numpy()
    train("run", on_nan="rollback", whites=whites)
    for last, shift in shifts.items():
        reference("reference", max_steps=last, shift=shift)
    assert_same_end(tmp_path)
    manifest = checkpoints.verify(tmp_path / "run" / "checkpoints", 10).manifest
    assert manifest["left_out"] == shifts[10]


def test_rollbacks_that_do_not_help_end(tmp_path, train, capsys):
    with pytest.raises(
        UsageError, match="3 rollbacks to the checkpoint of step 0 have"
    ):
        train("run", on_nan="rollback", whites=range(IMAGES), log_frequency=1)
    assert capsys.readouterr().err.count("ROLLED BACK") == 3
    assert len(list((tmp_path / "run" / "debug").iterdir())) == 4


@pytest.mark.slow
def test_a_debug_checkpoint_that_cannot_be_written_does_not_hide_the_reason(
    tmp_path, train
):
    with pytest.raises(UsageError, match="at step 6"):
        train("run")
    shutil.rmtree(tmp_path / "run" / "debug")
    (tmp_path / "run" / "debug").write_text("in the way")
    with pytest.raises(UsageError, match=r"at step 6 the norm .* is lost: .*debug"):
        train("run")


# ---- Within one program of XLA


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_the_policies_hold_within_one_program(
    tmp_path, train, reference, capsys, policy
):
    """The bad step is the second of a call of three."""
    if policy == "stop":
        with pytest.raises(UsageError) as caught:
            train("run", xla=True, steps_per_call=3)
        said = str(caught.value)
        assert f"at step {BAD_STEP} the norm of the averaged gradients is" in said
        assert f"gradients of {BAD_TOWER} are not finite in hidden/kernel" in said
        folder = tmp_path / "run" / "debug" / "step-00000005"
        reference("reference", max_steps=BAD_STEP - 1)
        expected = runs.checkpoint(tmp_path / "reference", BAD_STEP - 1)
    else:
        train("run", xla=True, steps_per_call=3, on_nan=policy)
        said = capsys.readouterr().err
        if policy == "skip":
            assert said.count("SKIPPED the update of step") == 1
            assert f"SKIPPED the update of step {BAD_STEP}: the " in said
            reference("reference", without_update_of=BAD_STEP)
        else:
            assert "without the images of steps 5 to 6: at step 6 the norm" in said
            reference("reference", max_steps=4)
            reference("reference", shift=2)
        folder, expected = (
            runs.checkpoint(tmp_path / name, 10) for name in ("run", "reference")
        )
    difference = runs.largest_difference(
        runs.variables(folder), runs.variables(expected)
    )
    assert difference < 1e-4, "more than other kernels round"
