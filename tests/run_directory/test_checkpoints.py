"""Checkpoints: bitwise, complete or absent, and never trusted unseen."""

import contextlib
import errno
import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.config import regular_files
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, files, restoring
from cifar10.towers.train_state import TrainState

REPOSITORY = Path(__file__).parents[2]
DATA = "state.data-00000-of-00001"
INDEX = "state.index"


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
        for variable in variables(state):
            value = 1000 * random.normal(size=tuple(variable.shape))
            variable.assign(np.asarray(value).astype(variable.numpy().dtype))
    return state


def trackables(state):
    return {
        "model": state.model,
        "optimizer": state.optimizer,
        "averages": state.averages,
        "global_step": state.global_step,
    }


def variables(state):
    return [
        *state.model.variables,
        *state.optimizer.variables,
        *state.averages,
        state.global_step,
    ]


def content(state):
    return [variable.numpy().tobytes() for variable in variables(state)]


def tiny(value=1.0):
    """The smallest state there is, for tests of folders and files."""
    return {"weights": tf.Variable([value, 2.0])}


def save(directory, step, *, facts=None, state=None):
    if state:
        state.global_step.assign(step)
    return checkpoints.save(
        directory,
        trackables(state) if state else tiny(float(step)),
        step=step,
        facts=facts or {},
    )


NOT_ALLOWED = PermissionError(errno.EACCES, "Permission denied")


def fail(error):
    def failing(*_args, **_kwargs):
        raise error

    return failing


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def newest_intact(directory):
    """Looks for the newest checkpoint; returns its step and the damaged ones."""
    newest, refused = restoring.restore_newest(directory, lambda _: None, {})
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


def test_restore_brings_back_every_variable_to_the_bit(tmp_path):
    saved = new_state(fill=1)
    save(tmp_path, 7, state=saved)
    other = new_state(fill=2)
    assert not set(content(saved)) & set(content(other))

    checkpoints.restore(checkpoints.verify(tmp_path, 7), trackables(other))

    assert content(other) == content(saved)


def test_saves_of_one_state_are_equal_to_the_byte_even_after_a_restore(tmp_path):
    first = new_state(fill=1)
    once = save(tmp_path / "once", 7, state=first, facts={"seed": 3})
    twice = save(tmp_path / "twice", 7, state=first, facts={"seed": 3})
    second = new_state(fill=2)
    checkpoints.restore(checkpoints.verify(tmp_path / "once", 7), trackables(second))
    resumed = save(tmp_path / "resumed", 7, state=second, facts={"seed": 3})

    assert files_of(twice) == files_of(once)
    assert files_of(resumed) == files_of(once)


def test_model_and_averages_are_restored_without_the_rest(tmp_path):
    saved, other = new_state(fill=1), new_state(fill=2)
    save(tmp_path, 7, state=saved)
    untouched = [variable.numpy().tobytes() for variable in other.optimizer.variables]

    part = {"model": other.model, "averages": other.averages}
    checkpoints.restore(checkpoints.verify(tmp_path, 7), part, partly=True)

    wanted = [*saved.model.variables, *saved.averages]
    got = [*other.model.variables, *other.averages]
    for expected, actual in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    assert [v.numpy().tobytes() for v in other.optimizer.variables] == untouched


def test_manifest_holds_step_facts_and_the_sums_of_all_other_files(tmp_path):
    folder = save(tmp_path, 7, facts={"epoch": 2, "loss_averages": {"total_loss": 0.5}})

    manifest = checkpoints.verify(tmp_path, 7).manifest

    assert folder == tmp_path / "step-00000007"
    assert manifest["step"] == 7
    assert manifest["epoch"] == 2
    assert manifest["loss_averages"] == {"total_loss": 0.5}
    content = files_of(folder)
    del content[checkpoints.MANIFEST]
    assert set(content) == {DATA, INDEX}
    assert manifest["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in content.items()
    }


@pytest.mark.parametrize(
    ("units", "inputs"),
    [
        pytest.param((4, 3), 6, id="other input"),
        pytest.param((5, 3), 5, id="other width"),
        pytest.param((4, 3, 3), 5, id="one layer more"),
        pytest.param((4,), 5, id="one layer less"),
    ],
)
def test_restore_into_another_model_is_refused(tmp_path, units, inputs):
    save(tmp_path, 7, state=new_state())
    checkpoint = checkpoints.verify(tmp_path, 7)
    other = trackables(new_state(units, inputs))

    with pytest.raises(UsageError, match="step-00000007 does not fit the model"):
        checkpoints.restore(checkpoint, other)


def test_restore_of_a_part_into_another_model_is_refused(tmp_path):
    save(tmp_path, 7, state=new_state())
    other = trackables(new_state((5, 3), 5))
    part = {name: other[name] for name in ("model", "averages")}

    with pytest.raises(UsageError, match="step-00000007 does not fit the model"):
        checkpoints.restore(checkpoints.verify(tmp_path, 7), part, partly=True)


@contextlib.contextmanager
def nothing_of_tensorflows(caplog):
    """TensorFlow lists what it has not restored when that is forgotten."""
    yield
    gc.collect()
    assert "unrestored" not in caplog.text


# Not the model: all of this one's variables are the optimizer's too.
@pytest.mark.parametrize("left_out", ["optimizer", "averages", "global_step"])
def test_restore_of_a_part_is_refused_unless_it_is_asked_for(
    tmp_path, caplog, left_out
):
    save(tmp_path, 7, state=new_state())
    part = trackables(new_state())
    del part[left_out]

    with (
        nothing_of_tensorflows(caplog),
        pytest.raises(UsageError, match="step-00000007 does not fit the model"),
    ):
        checkpoints.restore(checkpoints.verify(tmp_path, 7), part)


def test_restore_of_a_vanished_checkpoint_says_that_it_is_gone(tmp_path):
    folder = save(tmp_path, 7)
    checkpoint = checkpoints.verify(tmp_path, 7)
    shutil.rmtree(folder)

    with pytest.raises(FileNotFoundError):
        checkpoints.restore(checkpoint, tiny())


@pytest.mark.parametrize("gone", [INDEX, DATA])
def test_restore_names_the_file_that_was_lost_since_it_was_verified(tmp_path, gone):
    folder = save(tmp_path, 7)
    checkpoint = checkpoints.verify(tmp_path, 7)
    (folder / gone).unlink()
    (folder / gone).mkdir()  # Even root cannot read a folder as a file.

    with pytest.raises(checkpoints.DamagedError) as caught:
        checkpoints.restore(checkpoint, tiny())

    assert f"{folder / gone} is missing or unreadable" in str(caught.value)


def test_what_this_process_has_used_up_is_no_damage(tmp_path, monkeypatch):
    """A resumed training would pass over the checkpoint for good."""
    save(tmp_path, 7)
    used_up = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(files, "sha256", fail(used_up))

    with pytest.raises(UsageError, match="cannot be read: Too many open files"):
        newest_intact(tmp_path)


def test_restore_that_fails_below_tensorflow_is_a_usage_error(tmp_path, monkeypatch):
    folder = save(tmp_path, 7)
    broken = OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(tf.train.Checkpoint, "read", fail(broken))

    with pytest.raises(UsageError, match=f"{folder} cannot be read: Input/output"):
        checkpoints.restore(checkpoints.verify(tmp_path, 7), tiny())


# Which checkpoints there are.


@pytest.mark.parametrize(
    "stray",
    [
        "step-x",
        "step-0000005",
        "step-00000005.tmp",
        "a-step-00000005",
        ".incomplete-step-00000005-77",
        "damaged-step-00000005-1",
    ],
)
@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_steps_ignores_other_names(tmp_path, stray, make):
    save(tmp_path, 3)
    make(tmp_path / stray)

    assert checkpoints.steps(tmp_path) == [3]


def test_newest_intact_ignores_a_file_with_the_name_of_a_checkpoint(tmp_path):
    save(tmp_path, 3)
    tmp_path.joinpath("step-00000005").write_text("stray")

    assert newest_intact(tmp_path) == (3, {})


def test_there_are_no_steps_where_there_is_no_folder(tmp_path):
    file = tmp_path / "file"
    file.touch()

    assert checkpoints.steps(tmp_path / "absent") == []
    assert checkpoints.steps(file) == []


# Damage.


def flip_one_bit(folder):
    data = bytearray((folder / DATA).read_bytes())
    data[len(data) // 2] ^= 0b0000_1000
    (folder / DATA).write_bytes(data)


def cut_off_a_byte(folder):
    data = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(data[:-1])


def write_manifest(text):
    return lambda folder: (folder / checkpoints.MANIFEST).write_text(text)


def cut_manifest(folder):
    path = folder / checkpoints.MANIFEST
    path.write_bytes(path.read_bytes()[:-20])


DAMAGE = {
    "flipped bit": flip_one_bit,
    "truncated": cut_off_a_byte,
    "empty data": lambda folder: (folder / DATA).write_bytes(b""),
    "empty index": lambda folder: (folder / INDEX).write_bytes(b""),
    "no data": lambda folder: (folder / DATA).unlink(),
    "no index": lambda folder: (folder / INDEX).unlink(),
    "no manifest": lambda folder: (folder / checkpoints.MANIFEST).unlink(),
    "empty manifest": write_manifest(""),
    "torn manifest": cut_manifest,
    "binary manifest": lambda folder: (folder / checkpoints.MANIFEST).write_bytes(
        b"\xff\x00\xfe"
    ),
    "foreign list": write_manifest("[1, 2]"),
    "foreign object": write_manifest('{"name": "app", "start_url": "/"}'),
    "files are a list": write_manifest(f'{{"step": 5, "files": ["{DATA}"]}}'),
    "files have no sums": write_manifest(f'{{"step": 5, "files": {{"{DATA}": 1}}}}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_verify_detects(tmp_path, damage):
    folder = save(tmp_path, 5)
    checkpoints.verify(tmp_path, 5)

    damage(folder)

    with pytest.raises(checkpoints.DamagedError, match="step-00000005"):
        checkpoints.verify(tmp_path, 5)


def test_verify_detects_a_manifest_without_files(tmp_path):
    folder = save(tmp_path, 5)
    write_manifest('{"step": 5, "files": {}}')(folder)

    with pytest.raises(checkpoints.DamagedError, match=r"manifest\.json is"):
        checkpoints.verify(tmp_path, 5)


@pytest.mark.parametrize(
    "edit",
    [
        lambda manifest: manifest.update(seed=1),
        lambda manifest: manifest.pop("seed"),
        lambda manifest: manifest.update(note="mine"),
        lambda manifest: manifest["files"].pop(DATA),
        lambda manifest: manifest.pop("sha256"),
    ],
    ids=["other value", "entry gone", "entry more", "file left out", "no sum"],
)
def test_verify_detects_an_edited_manifest(tmp_path, edit):
    path = save(tmp_path, 5, facts={"seed": 0}) / checkpoints.MANIFEST
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest))
    checkpoints.verify(tmp_path, 5)  # Another layout of the same content is no edit.

    edit(manifest)
    path.write_text(json.dumps(manifest))

    with pytest.raises(checkpoints.DamagedError, match=r"manifest\.json is"):
        checkpoints.verify(tmp_path, 5)


def test_verify_detects_a_folder_renamed_by_hand(tmp_path):
    save(tmp_path, 5).rename(tmp_path / "step-00000009")

    not_its_own = r"step-00000009/manifest\.json is not the one that was written here"
    with pytest.raises(checkpoints.DamagedError, match=not_its_own):
        checkpoints.verify(tmp_path, 9)


def test_verify_of_an_absent_checkpoint_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoints.verify(tmp_path, 5)


def test_checkpoint_deleted_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    folder = save(tmp_path, 5)
    read = files.sha256

    def read_too_late(path):
        shutil.rmtree(folder, ignore_errors=True)
        return read(path)

    monkeypatch.setattr(files, "sha256", read_too_late)

    with pytest.raises(FileNotFoundError):
        checkpoints.verify(tmp_path, 5)


def test_newest_intact_passes_over_damaged_ones_and_names_them(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    flip_one_bit(tmp_path / "step-00000004")
    (tmp_path / "step-00000003" / checkpoints.MANIFEST).unlink()
    before = names(tmp_path)

    newest, damaged = newest_intact(tmp_path)

    assert newest == 2
    assert list(damaged) == [4, 3]
    assert DATA in str(damaged[4])
    assert checkpoints.MANIFEST in str(damaged[3])
    assert names(tmp_path) == before


def test_where_all_are_damaged_each_is_named(tmp_path):
    cut_off_a_byte(save(tmp_path, 1))
    (save(tmp_path, 2) / checkpoints.MANIFEST).unlink()

    newest, damaged = newest_intact(tmp_path)
    error = str(restoring.none_usable(tmp_path, damaged))

    assert newest is None
    assert f"step-00000001/{DATA} differs" in error
    assert "step-00000002/manifest.json is missing" in error
    assert "--train_dir" in error


@pytest.mark.parametrize("name", [".", "absent"])
def test_newest_intact_is_none_where_there_is_no_checkpoint(tmp_path, name):
    assert newest_intact(tmp_path / name) == (None, {})


@pytest.mark.parametrize("name", ["seed", "global_batch_size"])
def test_a_checkpoint_of_another_run_is_neither_loaded_nor_passed_over(tmp_path, name):
    mine = {"seed": 1, "global_batch_size": 8}
    save(tmp_path, 1, facts=mine)
    save(tmp_path, 2, facts={**mine, name: 3})
    loaded = []

    with pytest.raises(UsageError, match=f"step-00000002 is of another run: .*{name}"):
        restoring.restore_newest(tmp_path, loaded.append, mine)
    assert not loaded
    newest, refused = restoring.restore_newest(
        tmp_path, loaded.append, mine, tolerate=UsageError
    )
    assert ([found.step for found in loaded], list(refused)) == ([1], [2])
    assert newest == loaded[0]


@pytest.mark.parametrize("held", [6, 8])
def test_a_checkpoint_whose_name_is_not_its_step_is_refused(tmp_path, held):
    checkpoints.save(tmp_path, {"global_step": tf.Variable(held)}, step=7, facts={})

    with pytest.raises(UsageError, match=f"step-00000007 holds global_step {held}, no"):
        checkpoints.restore(
            checkpoints.verify(tmp_path, 7), {"global_step": tf.Variable(0)}
        )


def forge(folder, change):
    """Changes a checkpoint as somebody does who gets all of its sums right."""
    path = folder / checkpoints.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    for name in change(folder, manifest) or ():
        content = (folder / name).read_bytes()
        sum_of = hashlib.sha256(content).hexdigest()
        manifest["files"][name] = {"bytes": len(content), "sha256": sum_of}
    manifest["sha256"] = checkpoints._sha256_of(manifest)
    path.write_text(json.dumps(manifest))


def entry(**entries):
    return lambda _, manifest: manifest.update(entries)


def named(name):
    def change(_, manifest):
        manifest["files"][name] = manifest["files"][DATA]

    return change


def added(name):
    def change(folder, _):
        (folder / name).write_bytes(b"content")
        return [name]

    return change


def unnamed(folder, _):
    (folder / "state.data-00001-of-00002").write_bytes(b"")


def absolute(folder, _):
    (folder.parent / "file").write_bytes(b"content")
    return [str(folder.parent / "file")]


def stated(**entries):
    return lambda _, manifest: manifest["files"][DATA].update(entries)


FORGERIES = {
    "zero byte": named("state.\0"),
    "surrogate": named("state.\udc80"),
    "above": added("../state.data"),
    "absolute": absolute,
    "other name": added("notes"),
    "no files": entry(files=[]),
    "not in the manifest": unnamed,
    "stated length": stated(bytes=3),
    "length of no kind": stated(bytes="3"),
    "left_out": entry(left_out="1"),
    "left_out below": entry(left_out=-1),
    "left_out above": entry(left_out=10**30),
    "skipped_steps": entry(skipped_steps=None),
    "skipped_steps true": entry(skipped_steps=True),
    "loss_averages": entry(loss_averages=[1.0]),
    "an average": entry(loss_averages={"total_loss": "1"}),
    "an average above": entry(loss_averages={"total_loss": 10**400}),
    "an average true": entry(loss_averages={"total_loss": True}),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_odd_content_with_the_right_sums_is_damage(tmp_path, change):
    forge(save(tmp_path, 5), lambda *_: None)
    assert newest_intact(tmp_path) == (5, {})
    forge(save(tmp_path, 6), change)
    step, refused = newest_intact(tmp_path)
    assert (step, list(refused)) == (5, [6])


@pytest.mark.parametrize("length", [0, 10])
def test_data_that_are_shorter_than_their_index_are_damage(tmp_path, length):
    def cut(folder, _):
        (folder / DATA).write_bytes((folder / DATA).read_bytes()[:length])
        return [DATA]

    state = new_state()
    forge(save(tmp_path, 5, state=state), cut)
    with pytest.raises(checkpoints.DamagedError, match="Read less bytes"):
        checkpoints.restore(checkpoints.verify(tmp_path, 5), trackables(state))


def test_set_aside_hides_a_checkpoint_and_keeps_its_content(tmp_path):
    save(tmp_path, 4)
    kept = []
    for _ in range(2):  # The same step can be damaged again after a resume.
        folder = save(tmp_path, 5)
        flip_one_bit(folder)
        expected = files_of(folder)
        kept.append((checkpoints.set_aside(tmp_path, 5), expected))

    assert checkpoints.steps(tmp_path) == [4]
    assert kept[0][0] != kept[1][0]
    for aside, expected in kept:
        assert files_of(aside) == expected
    assert checkpoints.delete_incomplete(tmp_path) == []
    save(tmp_path, 6)
    assert all(aside.is_dir() for aside, _ in kept)


def test_set_aside_takes_no_name_of_a_link_that_leads_nowhere(tmp_path):
    save(tmp_path, 5)
    (tmp_path / "damaged-step-00000005-1").symlink_to("nowhere")
    assert checkpoints.set_aside(tmp_path, 5).name == "damaged-step-00000005-2"


@pytest.mark.parametrize("name", ["step-000000064", "step-\u0660" + "\u0660" * 7])
def test_a_folder_of_another_spelling_is_no_checkpoint(tmp_path, name):
    """As one that is there already, that of its step would not be written."""
    (tmp_path / name).mkdir()
    assert checkpoints.steps(tmp_path) == []
    assert checkpoints.steps(save(tmp_path, 123456789).parent) == [123456789]


def test_set_aside_that_is_not_allowed_names_the_folder_and_the_way_on(
    tmp_path, monkeypatch
):
    folder = save(tmp_path, 5)
    monkeypatch.setattr(Path, "rename", fail(NOT_ALLOWED))

    with pytest.raises(UsageError) as caught:
        checkpoints.set_aside(tmp_path, 5)

    assert f"{folder} cannot be renamed to damaged-" in str(caught.value)
    assert f"Permission denied. Make {tmp_path} writable" in str(caught.value)


@pytest.mark.parametrize("name", [checkpoints.MANIFEST, DATA])
def test_file_that_may_not_be_read_is_no_damage(tmp_path, monkeypatch, name):
    """As damage the training would set the checkpoint aside and go back."""
    folder = save(tmp_path, 5)
    open_any = regular_files.opened

    def open_others(path, *arguments, **options):
        if path.name == name:
            raise NOT_ALLOWED
        return open_any(path, *arguments, **options)

    monkeypatch.setattr(regular_files, "opened", open_others)
    with pytest.raises(UsageError, match=f"{folder / name} cannot be read: Permission"):
        newest_intact(tmp_path)


def test_folder_that_may_not_be_looked_into_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "iterdir", fail(NOT_ALLOWED))
    with pytest.raises(UsageError, match=f"{tmp_path} cannot be read: Permission"):
        newest_intact(tmp_path)


# Failing and dying while writing.


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
FAILURES = {
    "fsync": (os, "fsync", NO_SPACE),
    "write": (tf.train.Checkpoint, "write", NO_SPACE),
    "write in TensorFlow": (
        tf.train.Checkpoint,
        "write",
        tf.errors.ResourceExhaustedError(None, None, "No space left on device"),
    ),
    "rename": (Path, "rename", NO_SPACE),
}


@pytest.mark.parametrize("where", FAILURES.values(), ids=FAILURES)
def test_failing_write_publishes_nothing_and_leaves_nothing(
    tmp_path, monkeypatch, where
):
    owner, name, error = where
    earlier = files_of(save(tmp_path, 1))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail(error))
        with pytest.raises(UsageError) as raised:
            save(tmp_path, 2)

    assert "checkpoint of step 2 could not be written" in str(raised.value)
    assert "No space left on device" in str(raised.value)
    assert "step 1 is kept" in str(raised.value)
    assert names(tmp_path) == ["step-00000001"]
    assert files_of(tmp_path / "step-00000001") == earlier
    save(tmp_path, 2)  # The same command goes on once there is room.
    assert newest_intact(tmp_path) == (2, {})


def test_all_of_a_checkpoint_is_on_disk_before_it_is_published(tmp_path, monkeypatch):
    synced = []

    def sync(path):
        synced.append((path.name, names(tmp_path)))

    monkeypatch.setattr(checkpoints.regular_files, "sync", sync)
    published = save(tmp_path, 1)
    *before, last = synced
    assert last == (tmp_path.name, [published.name])
    present = {name for _, names_then in before for name in names_then}
    assert published.name not in present
    assert {name for name, _ in before} == present | set(names(published))


def test_failing_first_write_does_not_promise_an_earlier_checkpoint(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", fail(NO_SPACE))

    with pytest.raises(UsageError, match="There is no earlier one"):
        save(tmp_path, 1)


def in_new_process(code, directory):
    """Saves step 1 in a process of its own and then runs `code` in it."""
    begin = """
import os, resource, signal, sys
from pathlib import Path
import tensorflow as tf
from cifar10.run_directory import checkpoints
from cifar10.errors import UsageError

directory = Path(sys.argv[1])
state = {"weights": tf.Variable(tf.zeros([1 << 18]))}
def save(step):
    checkpoints.save(directory, state, step=step, facts={})

save(1)

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    return subprocess.run(
        [sys.executable, "-c", begin + code, str(directory)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
def test_disk_that_is_really_full_leaves_the_earlier_checkpoint(tmp_path):
    code = """
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # The state has 1 MiB.
try:
    save(2)
except UsageError as error:
    print(error)
"""
    done = in_new_process(code, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "checkpoint of step 2 could not be written" in done.stdout
    assert "step 1 is kept" in done.stdout
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoints.verify(tmp_path, 1).step == 1


@pytest.mark.parametrize(
    "moment", ["os.fsync", pytest.param("Path.rename", marks=pytest.mark.slow)]
)
def test_killed_while_saving_publishes_nothing(tmp_path, moment):
    done = in_new_process(f"{moment} = die\nsave(2)\n", tmp_path)

    assert done.returncode == -9, done.stderr
    assert checkpoints.steps(tmp_path) == [1]
    assert len(names(tmp_path)) == 2
    assert len(checkpoints.delete_incomplete(tmp_path)) == 1
    assert names(tmp_path) == ["step-00000001"]
    assert newest_intact(tmp_path) == (1, {})


def test_delete_incomplete_names_what_it_deletes_and_leaves_the_rest(tmp_path):
    save(tmp_path, 1)
    for name in (".incomplete-step-00000002-77", ".incomplete-step-00000003-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / DATA).write_bytes(b"half")
    (tmp_path / "damaged-step-00000004-1").mkdir()

    deleted = checkpoints.delete_incomplete(tmp_path)

    assert deleted == [".incomplete-step-00000002-77", ".incomplete-step-00000003-old"]
    assert names(tmp_path) == ["damaged-step-00000004-1", "step-00000001"]
