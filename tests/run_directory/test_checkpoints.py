"""Checkpoints: bitwise, complete or absent, and never trusted unseen."""

import errno
import gc
import hashlib
import json
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10 import files
from cifar10.errors import DiskError, UsageError
from cifar10.run_directory import checkpoints, restoring
from cifar10.towers.update import TrainState
from recorded_runs import recorded

DATA = "state.data-00000-of-00001"
INDEX = "state.index"
MANIFEST = checkpoints.MANIFEST


def new_state(units=(4, 3), inputs=5, fill=None):
    """A small model with optimizer; `fill` seeds other values for every variable."""
    # Names as in a new process: those that Keras numbers go into the files.
    layers = [
        keras.layers.Dense(width, name=f"dense_{number}")
        for number, width in enumerate(units)
    ]
    model = keras.Sequential([keras.Input((inputs,)), *layers], name="model")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")
    state = TrainState(model, optimizer)
    if fill is not None:
        random = np.random.default_rng(fill)
        for variable in state.variables():
            value = 1000 * random.normal(size=tuple(variable.shape))
            variable.assign(np.asarray(value).astype(variable.numpy().dtype))
    return state


def content(state):
    return [variable.numpy().tobytes() for variable in state.variables()]


def tiny(value=1.0):
    """The smallest state there is, for tests of folders and files."""
    return {"weights": tf.Variable([value, 2.0])}


def save(directory, step, *, facts=None, state=None):
    if state:
        state.global_step.assign(step)
    values = state.trackables() if state else tiny(float(step))
    return checkpoints.save(directory, values, step=step, facts=facts or {})


def fail(error):
    def failing(*_args, **_kwargs):
        raise error

    return failing


def newest_intact(directory):
    """Looks for the newest checkpoint; returns its step and the damaged ones."""
    run = recorded(seed=None)  # As these manifests, which name none.
    newest, refused = restoring.restore_newest(directory, lambda _: None, run)
    return newest and newest.step, refused


def names(directory):
    return sorted(path.name for path in directory.iterdir())


# Saving and restoring.


def test_a_checkpoint_holds_the_state_of_random_generators(tmp_path):
    layers = [keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    state = TrainState(model, keras.optimizers.SGD(0.1))
    (generator,) = model.non_trainable_variables
    generator.assign([7, 8])
    checkpoints.save(tmp_path, state.trackables(), step=0, facts={})
    generator.assign([0, 0])
    checkpoints.restore(checkpoints.verify(tmp_path, 0), state.trackables())
    assert generator.numpy().tolist() == [7, 8]


def test_a_restored_state_and_its_files_equal_the_saved_bit_for_bit(tmp_path):
    saved, other = new_state(fill=1), new_state(fill=2)
    once = save(tmp_path / "once", 7, state=saved, facts={"seed": 3})
    assert not set(content(saved)) & set(content(other))

    checkpoints.restore(checkpoints.verify(tmp_path / "once", 7), other.trackables())

    assert content(other) == content(saved)
    resumed = save(tmp_path / "resumed", 7, state=other, facts={"seed": 3})
    assert runs.files(resumed) == runs.files(once)


def test_restore_into_another_model_is_refused(tmp_path):
    save(tmp_path, 7, state=new_state())
    checkpoint = checkpoints.verify(tmp_path, 7)
    # Another input, another width, a layer more.
    for units, inputs in (((4, 3), 6), ((5, 3), 5), ((4, 3, 3), 5)):
        other = new_state(units, inputs).trackables()
        with pytest.raises(UsageError, match="model"):
            checkpoints.restore(checkpoint, other)
        part = {name: other[name] for name in ("model", "averages")}
        with pytest.raises(UsageError, match="model"):
            checkpoints.restore(checkpoint, part, partly=True)
    with pytest.raises(UsageError, match="model"):  # A layer less.
        checkpoints.restore(checkpoint, new_state((4,), 5).trackables())


def test_a_partial_restore_is_refused(tmp_path, caplog):
    save(tmp_path, 7, state=new_state())
    # Not the model: all of this one's variables are the optimizer's too.
    for left_out in ("optimizer", "averages", "global_step"):
        part = new_state().trackables()
        del part[left_out]
        with pytest.raises(UsageError, match="model"):
            checkpoints.restore(checkpoints.verify(tmp_path, 7), part)
    gc.collect()  # TensorFlow lists the values that it has not restored.
    assert "unrestored" not in caplog.text


def test_a_checkpoint_lost_after_verification_is_damaged_or_missing(tmp_path):
    for step, lost in enumerate((INDEX, DATA)):
        folder = save(tmp_path, step)
        checkpoint = checkpoints.verify(tmp_path, step)
        (folder / lost).unlink()
        (folder / lost).mkdir()  # Even root cannot read a folder as a file.
        with pytest.raises(checkpoints.DamagedError, match=lost):
            checkpoints.restore(checkpoint, tiny())
        shutil.rmtree(folder)
        with pytest.raises(FileNotFoundError):
            checkpoints.restore(checkpoint, tiny())
        with pytest.raises(FileNotFoundError):
            checkpoints.verify(tmp_path, step)


def test_an_unreadable_checkpoint_does_not_count_as_damaged(tmp_path, monkeypatch):
    """A resumed training would set it aside for good, and go back."""
    save(tmp_path, 7)
    not_allowed = PermissionError(errno.EACCES, "Permission denied")
    for owner, name, error in (
        (files, "sha256", OSError(errno.EMFILE, "Too many open files")),
        (files, "opened", not_allowed),
        (Path, "iterdir", not_allowed),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail(error))
            with pytest.raises(DiskError, match=error.strerror):
                newest_intact(tmp_path)
    broken = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(tf.train.Checkpoint, "read", fail(broken))
    with pytest.raises(DiskError, match="step-00000007"):
        checkpoints.restore(checkpoints.verify(tmp_path, 7), tiny())


# Which checkpoints there are.


def test_steps_ignores_other_names(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 123456789)
    for stray in (
        "step-0000005",
        "step-000000064",  # As that of step 64, it would keep it from being written.
        "step-\u0660" + "\u0660" * 7,
        "step-00000005.tmp",
        ".incomplete-step-00000005-77",
        "damaged-step-00000005-1",
    ):
        (tmp_path / stray).mkdir()
    file = tmp_path / "step-00000006"
    file.touch()

    assert checkpoints.steps(tmp_path) == [3, 123456789]
    assert newest_intact(tmp_path) == (123456789, {})
    assert checkpoints.steps(tmp_path / "absent") == checkpoints.steps(file) == []
    assert newest_intact(tmp_path / "absent") == (None, {})


# Damage.


def flip_one_bit(folder):
    data = bytearray((folder / DATA).read_bytes())
    data[len(data) // 2] ^= 0b0000_1000
    (folder / DATA).write_bytes(data)


def edited(edit):
    def damage(folder):
        manifest = json.loads((folder / MANIFEST).read_text())
        edit(manifest)
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return damage


def test_verify_detects_damage(tmp_path):
    folder = save(tmp_path, 1, facts={"seed": 0})
    edited(lambda _: None)(folder)  # Another layout of the same content is no damage.
    assert checkpoints.verify(tmp_path, 1).manifest["seed"] == 0
    for step, damage in enumerate(
        [
            flip_one_bit,
            lambda folder: os.truncate(folder / DATA, 10),
            lambda folder: (folder / INDEX).unlink(),
            lambda folder: (folder / MANIFEST).unlink(),
            lambda folder: (folder / MANIFEST).write_text("[1, 2]"),
            edited(lambda manifest: manifest.update(seed=1)),
            edited(lambda manifest: manifest.pop("sha256")),
            lambda folder: folder.rename(folder.with_name("step-00000099")),
        ],
        start=2,
    ):
        damage(save(tmp_path, step, facts={"seed": 0}))
        with pytest.raises(checkpoints.DamagedError, match="step-000000"):
            checkpoints.verify(tmp_path, checkpoints.steps(tmp_path)[-1])


def test_a_checkpoint_from_another_run_is_neither_loaded_nor_passed_over(tmp_path):
    mine = recorded(seed=1, global_batch_size=8, data_fingerprint="a")
    ours = mine.config.identity
    link = {"settings": {"learning_rate": 0.1}}
    save(tmp_path, 1, facts={**ours, checkpoints.LINK: link})
    other = {checkpoints.LINK: {"settings": {"learning_rate": 0.2}}}

    def of_data(fingerprint):
        return {checkpoints.LINK: {"settings": {"data_fingerprint": fingerprint}}}

    for name, there in (
        ("seed", {"seed": 3}),
        ("global_batch_size", {"global_batch_size": 3}),
        ("learning_rate", other),
        ("data_fingerprint", of_data("b")),
    ):
        save(tmp_path, 2, facts={**ours, **there})
        loaded = []
        with pytest.raises(UsageError, match=name):
            restoring.restore_newest(tmp_path, loaded.append, mine)
        assert not loaded
        newest, refused = restoring.restore_newest(
            tmp_path, loaded.append, mine, tolerate=UsageError
        )
        assert ([found.step for found in loaded], list(refused)) == ([1], [2])
        assert newest == loaded[0]
        shutil.rmtree(tmp_path / "step-00000002")
    # The same data, or data that one of both does not know.
    unknown = recorded(seed=1, global_batch_size=8)
    for run, there in ((mine, "a"), (mine, None), (unknown, "b")):
        save(tmp_path, 2, facts={**ours, **of_data(there)})
        newest, _ = restoring.restore_newest(tmp_path, loaded.append, run)
        assert newest.step == 2
        shutil.rmtree(tmp_path / "step-00000002")


def forge(folder, **entries):
    """Changes a manifest as somebody does who gets its sum right."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    manifest.update(entries)
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest))


def test_invalid_content_with_correct_checksums_counts_as_damage(tmp_path):
    forge(save(tmp_path, 5))
    assert newest_intact(tmp_path) == (5, {})
    for step, names in ((6, []), (7, {"../outside": {"bytes": 1, "sha256": "0"}})):
        forge(save(tmp_path, step), files=names)
    step, refused = newest_intact(tmp_path)
    assert (step, [*refused]) == (5, [7, 6])


@pytest.mark.parametrize(
    "entry",
    [
        {"hours": "1"},
        {"left_out": "1"},
        {"left_out": 10**30},
        {"left_out": -1},
        {"skipped_steps": None},
        {"loss_averages": {"total_loss": "1"}},
        {"time": "now"},
    ],
)
def test_entries_of_the_wrong_type_count_as_damage(tmp_path, entry):
    save(tmp_path, 5)
    forge(save(tmp_path, 6), **entry)
    step, refused = newest_intact(tmp_path)
    assert (step, [*refused]) == (5, [6])


def test_set_aside_hides_a_checkpoint_and_keeps_its_content(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "damaged-step-00000005-1").symlink_to("nowhere")
    kept = []
    for _ in range(2):  # The same step can be damaged again after a resume.
        folder = save(tmp_path, 5)
        flip_one_bit(folder)
        expected = runs.files(folder)
        kept.append((checkpoints.set_aside(tmp_path, 5), expected))

    assert checkpoints.steps(tmp_path) == [4]
    assert [aside.name[-2:] for aside, _ in kept] == ["-2", "-3"]
    save(tmp_path, 6)
    for aside, expected in kept:
        assert runs.files(aside) == expected


# Failing and dying while writing.


def test_failing_write_publishes_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    no_space = OSError(errno.ENOSPC, "No space left on device")
    exhausted = tf.errors.ResourceExhaustedError(None, None, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail(no_space))
        with pytest.raises(DiskError, match="step 1 could not be written"):
            save(tmp_path, 1)
    earlier = runs.files(save(tmp_path, 1))

    for owner, name, error in (
        (os, "fsync", no_space),
        (tf.train.Checkpoint, "write", exhausted),
        (Path, "rename", no_space),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail(error))
            with pytest.raises(DiskError, match="No space"):
                save(tmp_path, 2)
        assert names(tmp_path) == ["step-00000001"]
        assert runs.files(tmp_path / "step-00000001") == earlier

    with monkeypatch.context() as patch:  # A disk that takes no deletion either.
        patch.setattr(Path, "rename", fail(no_space))
        patch.setattr(checkpoints.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(DiskError):
            save(tmp_path, 2)
    assert len(names(tmp_path)) == 2
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert newest_intact(tmp_path) == (3, {})


def test_all_of_a_checkpoint_is_on_disk_before_it_is_published(tmp_path, monkeypatch):
    synced = []

    def sync(path):
        synced.append((path.name, names(tmp_path)))

    monkeypatch.setattr(files, "sync", sync)
    published = save(tmp_path, 1)
    *before, last = synced
    assert last == (tmp_path.name, [published.name])
    present = {name for _, names_then in before for name in names_then}
    assert published.name not in present
    assert {name for name, _ in before} == present | set(names(published))


def test_a_kill_while_saving_publishes_nothing(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
import tensorflow as tf
from cifar10.run_directory import checkpoints

def save(step):
    weights = {"weights": tf.Variable(tf.zeros([1 << 18]))}
    checkpoints.save(Path(sys.argv[1]), weights, step=step, facts={})

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

save(1)
MOMENT = die
save(2)
"""
    for moment in ("os.fsync", "Path.rename"):
        done = runs.run("-c", code.replace("MOMENT", moment), tmp_path)
        assert done.returncode == -9, done.stderr
        assert len(names(tmp_path)) == 2
        assert newest_intact(tmp_path) == (1, {})
        checkpoints.delete_incomplete(tmp_path)
        assert names(tmp_path) == ["step-00000001"]
        shutil.rmtree(tmp_path / "step-00000001")
