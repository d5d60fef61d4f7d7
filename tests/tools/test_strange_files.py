"""What strangers' run directories hold costs only itself, and ends no command."""

import json
import math
import os
import shutil

import pytest
import tensorflow as tf

import forging
from cifar10.config import schema
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints, lock, scores, temperature
from cifar10.tools import runs as runs_command
from small_runs import describe, save

pytestmark = pytest.mark.usefixtures("registered")
ENDED = {"images": 9, "step": 5, "without_gain": 2, "score": 0.5, "best_by": "loss"}


@pytest.fixture
def run(tmp_path):
    describe(tmp_path / "run", parameters=1, data_parts=["train", "test"])
    save(tmp_path / "run", 5)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "entries",
    [
        {"validation": [1]},
        {"validation": {"images": 3}},
        {"validation": {**ENDED, "step": "5"}},
        {"validation": {**ENDED, "without_gain": True}},
        {"time": math.nan},
        {"time": 1e300},
        {"hours": math.nan},
        {"hours": -1e308},
        {"hours": 1e308},
        {"skipped_steps": -1},
        {"skipped_steps": 10**400},
        {"skipped_steps": True},
        {"loss_averages": {"total_loss": math.inf}},
        {"loss_averages": {"total_loss": True}},
        {"loss_averages": 5},
    ],
)
def test_a_manifest_with_other_values_is_damaged(run, entries):
    forging.write_manifest(run, 5, forging.manifest_of(run, 5) | entries)
    with pytest.raises(checkpoints.DamagedError):
        checkpoints.read_manifest(run / "checkpoints", 5)


def test_a_manifest_with_more_entries_is_intact(run):
    more = {
        "validation": {**ENDED, "more": 1},
        "hours": 2,
        "skipped_steps": 0,
        "new": 1,
    }
    forging.write_manifest(run, 5, forging.manifest_of(run, 5) | more)
    assert checkpoints.read_manifest(run / "checkpoints", 5)["hours"] == 2


def test_a_run_of_version_1_0_is_not_listed_as_damaged(run):
    record = {**ENDED, "images": 0, "correct": 1}
    manifest = forging.manifest_of(run, 5) | {"validation": record}
    forging.write_manifest(run, 5, manifest)
    assert runs_command.find_runs(run.parent)["run"]["state"] != "damaged"


SCORE = {"step": 5, "precision @ 1": 0.5, "num_examples": 100}


@pytest.mark.parametrize(
    "entry",
    [
        {"num_examples": 0},
        {"num_examples": -1},
        {"num_examples": 10**400},
        {"num_examples": True},
        {"precision @ 1": True},
        {"precision @ 1": 1.5},
        {"precision @ 1": math.nan},
        {"step": -1},
        {"step": 10**30},
    ],
)
def test_an_invalid_score_does_not_hide_other_runs(run, tmp_path, capsys, entry):
    (run / "eval").mkdir()
    lines = [{**SCORE, **entry}, SCORE]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (run / "eval" / "metrics.jsonl").write_text(text)
    assert [*scores.merged_by_step(lines)] == [5]
    shutil.copytree(run, tmp_path / "another")
    assert {*runs_command.find_runs(tmp_path)} == {"run", "another"}
    runs_command._print(runs_command.find_runs(tmp_path), tmp_path)
    assert capsys.readouterr().out.count("precision @ 1 = 0.500") == 2


def test_a_best_score_of_any_size_is_listed(run, tmp_path):
    describe(run, parameters=1, data_parts=["train", "test"], best_by="cross_entropy")
    (run / "eval").mkdir()
    lines = [{**SCORE, "cross_entropy": of} for of in (10**400, True, 2.5)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (run / "eval" / "metrics.jsonl").write_text(text)
    assert runs_command.find_runs(tmp_path)["run"]["best"]["score"] == 2.5


def test_schemas_refuse_a_bool_in_place_of_a_number():
    for one in (schema.MANIFEST, schema.SCORES, schema.VALIDATION, schema.START):
        for name, (kind, *_) in one.items():
            if kind in (int, float):
                assert schema.wrong({name: True}, one)


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff", b"", b"\x0a\x02\x0a\x00"])
def test_a_damaged_object_graph_is_refused(run, content):
    """With the digests of whoever wrote it."""
    folder = forging.folder_of(run, 5)
    reader = tf.train.load_checkpoint(str(folder / "state"))
    values = {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}
    values["_CHECKPOINTABLE_OBJECT_GRAPH"] = content
    for file in folder.glob("state*"):
        file.unlink()
    tf.raw_ops.SaveV2(
        prefix=str(folder / "state"),
        tensor_names=[*values],
        shape_and_slices=[""] * len(values),
        tensors=[tf.constant(one) for one in values.values()],
    )
    forging.forge(run)
    found = checkpoints.verify(run / "checkpoints", 5)
    with pytest.raises(UsageError):
        checkpoints.restore(found, {"averages": [tf.Variable(0.0)]})


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_other_than_a_file_is_named(run, tmp_path, kind):
    path = run / ".lock"
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(tmp_path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(UsageError, match="lock"):
        lock.is_locked(run)
    found = runs_command.find_runs(tmp_path)["run"]
    assert found["state"] == "damaged"
    assert str(path) in found["problem"]


def test_a_hidden_run_within_a_run_is_not_removed(run, tmp_path):
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy").rename(run / ".backup")
    runs = runs_command.find_runs(tmp_path)
    with pytest.raises(UsageError, match="contains other runs"):
        runs_command._to_prune(runs, ["run"], None)
    assert runs_command._to_prune(runs, [], None) == {}
    shutil.rmtree(run / ".backup")
    assert runs_command._to_prune(runs, ["run"], None) == runs


@pytest.mark.parametrize("text", ["2_0", "0", "nan", "1e300", "x", "\udcff"])
def test_a_temperature_other_than_a_number_is_refused(tmp_path, text):
    path = tmp_path / "temperature.txt"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError):
        temperature.read(path)
