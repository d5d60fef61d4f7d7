"""Flags and config.json: one field, one flag; a bad value ends with exit code 2."""

import argparse
import json
import types

import numpy as np
import pytest

from cifar10.config import fields, flags, run_config
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.towers.schedule import CURVES

# One of each kind: a number, a fraction, a word, a text, a switch, one that has none.
GIVEN = {
    "max_steps": 70,
    "momentum": 0.5,
    "precision": "float16",
    "model": "mine:small",
    "xla": True,
    "eval_steps": 29,
}


@pytest.fixture
def parse(monkeypatch):
    """Parses a command line as train_multi_gpu.py does."""

    def parse(*arguments, **fixed):
        monkeypatch.setattr("sys.argv", ["train.py", *map(str, arguments)])
        return flags.from_flags(argparse.ArgumentParser(allow_abbrev=False), **fixed)

    return parse


@pytest.fixture
def refusal(parse, capsys):
    """Parses a bad command line; returns the sentence on stderr, without the usage."""

    def refusal(*arguments):
        with pytest.raises(SystemExit) as caught:
            parse(*arguments)
        assert caught.value.code == 2
        return capsys.readouterr().err.partition("error: ")[2]

    return refusal


def test_flags_become_fields(parse):
    assert parse() == Config()
    words = [f"--{name}={value}" for name, value in GIVEN.items() if value is not True]
    values = parse(*words, "--xla").values
    found = {name: values[name] for name in GIVEN}
    assert repr(found) == repr(GIVEN), "values of the same types"
    assert parse("--checkpoint_dir", "a").run.train_dir == "a"
    assert parse("--fresh", "--no-fresh").run.fresh is False


def test_bad_values_are_refused_with_their_flag(refusal):
    for flag, value in (
        ("num_gpus", 65),
        ("num_gpus", 1.5),
        ("learning_rate", "nan"),
        ("precision", "float8"),
        ("sections", "2,3"),
        ("steps_per_call", 101),
    ):
        assert f"--{flag}" in refusal(f"--{flag}={value}"), (flag, value)
    assert "--global_batch_size" in refusal(
        *("--batch_size", 4), *("--global_batch_size", 8)
    )
    with pytest.raises(UsageError, match=r"^--resume 5"):
        Config(resume=5)


def test_a_parameter_of_another_schedule_is_refused(refusal, parse):
    others = [
        name for name in CURVES if "epochs_per_decay" not in CURVES[name].parameters
    ]
    assert {"linear", "cosine", "one_cycle"} <= {*others}
    for curve in others:
        words = "--epochs_per_decay", 3, "--schedule", curve
        assert f"--epochs_per_decay has no effect with --schedule {curve}" in refusal(
            *words
        )
    assert "--epochs_per_decay" in refusal("--recipe", "fast", "--epochs_per_decay", 3)
    assert parse("--epochs_per_decay", 3).update.epochs_per_decay == 3
    with pytest.raises(UsageError, match="schedule"):
        Config(schedule="bogus", epochs_per_decay=3)


def test_a_recipe_file_with_a_parameter_of_another_schedule_is_refused(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('schedule = "linear"\nepochs_per_decay = 3.0\n')
    with pytest.raises(UsageError, match="--epochs_per_decay has no effect"):
        Config(recipe=recipe)
    staircase = Config(recipe=recipe, schedule="staircase")
    assert staircase.update.epochs_per_decay == 3.0


def test_a_recipe_names_pictures_by_their_path(tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'data = "{tmp_path}/photos"\nimage_size = 16\n')
    found = Config(recipe=recipe).dataset
    assert (found.data, found.data_dir) == ("folder", str(tmp_path / "photos"))
    assert found.image_size == 16
    (tmp_path / "others").mkdir()
    given = Config(recipe=recipe, data=tmp_path / "others").dataset
    assert (given.data, given.data_dir) == ("folder", str(tmp_path / "others"))
    with pytest.raises(UsageError, match="names a path"):
        Config(recipe=recipe, data_dir=tmp_path / "others")
    recipe.write_text('data = "folder"\n')
    given = Config(recipe=recipe, data_dir=tmp_path / "others").dataset
    assert (given.data, given.data_dir) == ("folder", str(tmp_path / "others"))


def test_replace_equals_a_configuration_of_the_same_arguments():
    first = Config(max_steps=20, optimizer="adamw", schedule="cosine")
    for changes in (
        {"eval_steps": 1},
        {"recipe": "fast", "optimizer": "muon"},
        {"data": "cifar100"},
        {"max_steps": np.int64(30)},
    ):
        arguments = {"max_steps": 20, "optimizer": "adamw", "schedule": "cosine"}
        assert first.replace(**changes) == Config(**{**arguments, **changes})
    for name, value in (("bach_size", 16), ("max_epochs", 2.0), ("image_size", 16)):
        with pytest.raises(UsageError, match=name):
            first.replace(**{name: value})
    assert first == Config(max_steps=20, optimizer="adamw", schedule="cosine")
    values = first.with_values(seed=7)
    assert values.replace(max_steps=9).run.seed == 7
    with pytest.raises(UsageError, match="bach_size"):
        values.replace(bach_size=16)


def test_replace_by_none_omits_an_argument():
    first = Config(max_steps=20, schedule="staircase", epochs_per_decay=3.0)
    by_epochs = first.replace(max_steps=None, max_epochs=2.0)
    assert by_epochs == Config(
        max_epochs=2.0, schedule="staircase", epochs_per_decay=3.0
    )
    linear = first.replace(schedule="linear", epochs_per_decay=None)
    assert linear == Config(max_steps=20, schedule="linear")


def test_numpy_arrays_and_ranges_become_lists():
    given = Config(class_weights=np.array([1.0, 2.0])).values
    assert given["class_weights"] == [1.0, 2.0]
    assert Config(class_weights=range(1, 3)).values["class_weights"] == [1, 2]

    class Series:  # As pandas has them: values by name.
        def keys(self):
            return ["dog", "cat"]

        def tolist(self):
            return [1.0, 2.0]

    with pytest.raises(UsageError, match="class_weights"):
        Config(class_weights=Series())


def test_numpy_numbers_become_python_numbers():
    given = {"max_steps": np.int64(5), "momentum": np.float32(0.5), "xla": np.True_}
    values = Config(**given).values
    found = {name: values[name] for name in given}
    assert json.loads(json.dumps(found)) == {"max_steps": 5, "momentum": 0.5, "xla": 1}
    with pytest.raises(UsageError, match="--max_steps"):
        Config(max_steps=np.array([5]))


def test_tuples_become_lists_as_in_config_json():
    """So the program that began a run resumes it."""
    stages = {"until": 0.5, "image_size": 24}, {"frozen": ["conv1a"]}
    given = Config(recipe="fast", stages=stages, class_weights=(1.0, 2.0)).values
    assert given["class_weights"] == [1.0, 2.0]
    assert given["stages"] == [*stages]


def test_paths_and_records_are_accepted_in_place_of_strings(tmp_path):
    record = types.SimpleNamespace(train_dir=tmp_path)  # As `train` returns it.
    assert Config(initial_weights=record) == Config(initial_weights=str(tmp_path))
    assert Config(train_dir=tmp_path) == Config(train_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("schedule", "is_stateful", "more"),
    [
        ("cosine", False, {"max_steps", "max_epochs"}),
        ("staircase", True, {"batch_size"}),
    ],
)
def test_fields_fixed_for_a_run_depend_on_its_schedule_and_state(
    schedule, is_stateful, more
):
    always = set(fields.result_determining(Config()))
    assert always >= {"model", "data", "seed", "learning_rate", "global_batch_size"}
    assert not always & {"max_steps", "train_dir", "data_dir", "fresh"}
    config = Config(schedule=schedule)
    found = fields.result_determining(config, is_stateful=is_stateful)
    assert {*found} == always | more


def test_unrecordable_objects_are_refused_at_the_start():
    with pytest.raises(UsageError, match="JSON"):
        Config(optimizer_arguments={"name": {1, 2}})


# ---- config.json


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config.json"


def write(path, leave_out=(), **changes):
    """Writes a `config.json`; returns its content."""
    values = {**Config(precision="float16").values, "data_division": None}
    values |= {"simulated": True, "parameters": 7, "global_batch_size": 128, **changes}
    for name in leave_out:
        del values[name]
    path.write_text(json.dumps(values))
    return values


def test_read_returns_the_written_records(path):
    written = write(path, seed=5, data_dir="/data")
    run_config.mark_as_own(path.read_bytes())
    run = RecordedRun.read(path.parent)
    assert (run.entries, run.is_own) == (written, True)
    assert (run.config.run.seed, run.config.dataset.data_dir) == (5, "/data")


def test_record_of_an_earlier_version_is_read(path):
    """With flags that are gone, and without those that were not there yet."""
    later = ("clip_norm", "accumulate", "keep_best")
    written = write(path, later, use_fp16=True, verbose=False)
    run = RecordedRun.read(path.parent)
    assert run.entries.items() == {**written, "data_dir": None}.items()
    usual = (run.config.update.clip_norm, run.config.batch.accumulate)
    assert (usual, run.is_own) == ((None, 1), False)
    assert (run.facts.data_is_real, run.facts.on_gpus) == (True, False)


def test_files_with_other_content_are_refused(path, tmp_path):
    with pytest.raises(UsageError, match=str(tmp_path)):
        RecordedRun.read(path.parent)
    for content in (
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"model": "tutorial"}',
    ):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=str(path)):
            RecordedRun.read(path.parent)


# Resuming with what a run has recorded.


@pytest.fixture
def recorded(path):
    """A directory with the `config.json` of a run of two towers."""
    given = {"recipe": "fast", "batch_size": 32, "learning_rate": 0.5, "fresh": True}
    config = Config.from_values(given)
    (data := path.parent / "data").mkdir()
    changes = {"train_dir": "elsewhere", "data": "cifar10", "data_dir": str(data)}
    changes |= {"global_batch_size": 64, "precision": "float32", "worker_timeout": 1.0}
    write(path, **{**config.values, **changes, "towers": 2, "workers": 1})
    run_config.mark_as_own(path.read_bytes())
    return path.parent


def test_resume_uses_the_settings_of_the_run_unless_given(parse, recorded):
    given = ["--max_steps", "7", "--learning_rate", "0.5"]  # The latter it has anyhow.
    config = parse("--resume", f"{recorded}/", *given, num_gpus=1)
    assert config.update.learning_rate == 0.5
    assert config.batch.global_batch_size == 64
    assert config.network.precision == "float32"
    assert config.update.optimizer == "sgd", "the recipe was read again"
    assert config.dataset.data_dir == str(recorded / "data")
    assert (config.run.max_steps, config.batch.num_gpus) == (7, 1)
    assert (config.run.train_dir, config.run.fresh) == (str(recorded), False)
    assert config.processes.worker_timeout == 300.0, "of that process, not of the run"


def test_a_resume_that_begins_to_score_keeps_the_best_checkpoint(parse, recorded):
    def kept(*words):
        return parse("--resume", recorded, *words, num_gpus=1).checkpoints.keep_best

    assert kept() == 0
    assert kept("--eval_steps", "100") == 1
    assert kept("--eval_steps", "100", "--keep_best", "3") == 3


def test_resume_refuses_another_directory_or_recipe(refusal, recorded, tmp_path):
    for words in (
        ["--fresh"],
        ["--recipe", "fast"],
        ["--train_dir", "a"],
    ):
        assert words[0] in refusal("--resume", recorded, *words)
    (tmp_path / "empty").mkdir()
    assert "holds no run" in refusal("--resume", tmp_path / "empty")
