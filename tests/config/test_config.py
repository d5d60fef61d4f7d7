"""Flags and config.json: one field, one flag; a bad value ends with exit code 2."""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cifar10.config import config, config_file, flags, options, origin
from cifar10.config.config import Config, ResolvedConfig
from cifar10.errors import UsageError

# Every field, at a value that is not its default.
OTHER_VALUES = {
    "recipe": "fast",
    "label_smoothing": 0.125,
    "optimizer": "muon",
    "schedule": "linear",
    "steps_per_call": 13,
    "variable_device": "cpu",
    "input_device": "gpu",
    "xla": True,
    "log_device_placement": True,
    "report_bottleneck": True,
    "profile": "3:4",
    "num_gpus": 3,
    "split_gpu": 2,
    "batch_size": 7,
    "max_steps": 37,
    "train_dir": "/tmp/elsewhere",  # noqa: S108 - never made.
    "fresh": True,
    "model": "mine:small",
    "data": "tfds:mnist",
    "image_size": 48,
    "validation_fraction": 0.25,
    "max_bad_images": 0.5,
    "data_dir": "some/folder",
    "data_url": "http://here,http://there",
    "distortions": "crop_flip",
    "precision": "float16",
    "learning_rate": 0.25,
    "epochs_per_decay": 12.5,
    "momentum": 0.9,
    "moving_average_decay": 0.5,
    "seed": 13,
    "deterministic": True,
    "checkpoint_steps": 17,
    "keep_checkpoints": 2,
    "keep_best": 3,
    "eval_steps": 29,
    "stop_after_no_gain": 4,
    "keep_every_hours": 1.5,
    "hang_timeout": 600.0,
    "on_save_error": "continue",
    "on_nan": "rollback",
    "warmup_epochs": 2.5,
    "initial_weights": "runs/earlier",
    "freeze": "conv1",
    "clip_norm": 5.0,
    "variable_update": "mirrored",
    "local_workers": 2,
    "max_restarts": 4,
    "worker_timeout": 60.0,
    "log_frequency": 19,
    "summary_steps": 23,
    "depth": 5,
    "width": 8,
    "accumulate": 3,
    "sections": "conv2,local3",
    "section_cache": "host",
    "memory_limit": 1.5,
}


@pytest.fixture
def parse(monkeypatch):
    """Parses a command line as train_multi_gpu.py does."""

    def parse(*arguments, **fixed):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        return flags.from_flags(argparse.ArgumentParser(allow_abbrev=False), **fixed)

    return parse


@pytest.fixture
def refusal(parse, capsys):
    """Parses a bad command line; returns what it writes to stderr."""

    def refusal(*arguments, **fixed):
        with pytest.raises(SystemExit) as caught:
            parse(*arguments, **fixed)
        assert caught.value.code == 2
        return capsys.readouterr().err

    return refusal


def test_without_flags_there_are_the_defaults(parse):
    assert parse() == Config()


# What does not go together is given apart.
APART = {"sections": OTHER_VALUES["sections"], "accumulate": OTHER_VALUES["accumulate"]}


def test_every_field_has_a_flag(parse):
    names = options.names(Config, in_flags=True)
    # The batch size is given in one of two ways.
    assert sorted([*OTHER_VALUES, "global_batch_size"]) == sorted(names)
    assert parse("--global_batch_size", "21").global_batch_size == 21
    together = {key: value for key, value in OTHER_VALUES.items() if key not in APART}
    for values in (together, APART):
        arguments = []
        for name, value in values.items():
            assert value != getattr(Config(), name)
            arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        parsed = dataclasses.asdict(parse(*arguments))
        del parsed["stages"]  # The recipe's, which no flag overrides.
        assert parsed | {"stages": None} == dataclasses.asdict(Config()) | values
        types = {name: type(value) for name, value in values.items()}
        assert {name: type(parsed[name]) for name in values} == types


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sections": ","}, "a whole number from 1 on, or names"),
        ({"sections": "0"}, "a whole number from 1 on, or names"),
        ({"sections": "-1"}, "a whole number from 1 on, or names"),
        ({"sections": "2,3"}, "a whole number from 1 on, or names"),
    ],
)
def test_sections_that_cannot_be_are_refused(fields, said):
    with pytest.raises(UsageError, match=said):
        Config(**fields)


@pytest.mark.parametrize("name", ["worker_timeout", "hang_timeout"])
def test_a_wait_that_no_timer_takes_is_refused(name):
    assert Config(**{name: 600_000.0})
    with pytest.raises(UsageError, match=rf"^--{name} 1e\+18: the maximum is"):
        Config(**{name: 1e18})


@pytest.mark.parametrize("name", ["fresh", "deterministic", "xla"])
def test_booleans_can_be_switched_both_ways(parse, name):
    assert getattr(parse(f"--{name}"), name) is True
    assert getattr(parse(f"--no-{name}"), name) is False
    assert getattr(parse(f"--{name}", f"--no-{name}"), name) is False


@pytest.mark.parametrize("arguments", [["--fresh", "False"], ["--fresh=False"]])
def test_a_boolean_takes_no_value(refusal, arguments):
    assert "False" in refusal(*arguments)


def test_a_field_that_the_script_decides_has_no_flag(parse, refusal):
    assert parse(num_gpus=1).num_gpus == 1
    assert "--num_gpus 2" in refusal("--num_gpus", "2", num_gpus=1)


@pytest.mark.parametrize("flag", ["--num_gpu", "--learning-rate", "--steps"])
def test_an_unknown_flag_is_an_error(refusal, flag):
    assert flag in refusal(flag, "1")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--num_gpus", "0"),
        ("--num_gpus", "-1"),
        ("--num_gpus", "65"),
        ("--num_gpus", "abc"),
        ("--num_gpus", "1.5"),
        ("--batch_size", "0"),
        ("--max_steps", "0"),
        ("--checkpoint_steps", "0"),
        ("--keep_checkpoints", "0"),
        ("--log_frequency", "0"),
        ("--summary_steps", "0"),
        ("--learning_rate", "-1"),
        ("--learning_rate", "nan"),
        ("--learning_rate", "inf"),
        ("--learning_rate", "1e999"),
        ("--epochs_per_decay", "0"),
        ("--momentum", "1.5"),
        ("--momentum", "-0.1"),
        ("--moving_average_decay", "1.01"),
        ("--seed", "-1"),
        ("--seed", "2147483648"),
        ("--data", "foo"),
        ("--distortions", "foo"),
        ("--precision", "float8"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(refusal, flag, value):
    # The last line: the usage before it names every flag.
    sentence = refusal(flag, value).splitlines()[-1]
    assert flag in sentence
    assert value in sentence or value == "1e999"


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--num_gpus", "64"),
        ("--learning_rate", "0"),
        ("--momentum", "1"),
        ("--seed", "2147483647"),
    ],
)
def test_values_on_the_border_are_taken(parse, flag, value):
    assert getattr(parse(flag, value), flag[2:]) == float(value)


def test_code_is_held_to_the_same_rules():
    with pytest.raises(UsageError, match=r"--distortions blur.*crop_flip"):
        Config(distortions="blur")
    with pytest.raises(UsageError, match="--batch_size 0"):
        Config(batch_size=0)


@pytest.fixture
def help_of(parse, capsys):
    """Returns what --help or --help_all prints."""

    def help_of(flag):
        with pytest.raises(SystemExit) as caught:
            parse(flag)
        assert caught.value.code == 0
        return capsys.readouterr().out

    return help_of


def test_help_all_explains_every_flag_with_its_default(help_of):
    written = help_of("--help_all")
    text = " ".join(written.split())
    for name in OTHER_VALUES:
        assert f" --{name}" in text
    assert text.count("(default: ") == len(options.names(Config, in_flags=True))
    assert "from which it falls (default: 0.1)" in text
    sections = re.findall(r"^([a-z ,]+):$", written, re.MULTILINE)
    assert sections[:2] == ["options", config.FIRST]
    assert len(sections) == len(set(sections)) == 11
    assert "TF_CPP_MIN_LOG_LEVEL" in written.splitlines()[-1]


def test_help_shows_the_main_flags_and_how_to_see_the_rest(help_of):
    written = help_of("--help")
    shown = set(re.findall(r"^  --(\w+)", written, re.MULTILINE)) - {
        "help_all",
        "resume",
    }
    assert shown == options.names(Config, section=config.FIRST)
    assert len(shown) == 12
    more = len(options.names(Config, in_flags=True)) - len(shown)
    last = written.splitlines()[-1]
    assert last == f"{more} more flags, by subject: python train.py --help_all"


def test_a_run_may_change_where_and_how_long_but_not_what():
    determining = set(options.result_determining(Config))
    assert determining >= {"model", "data", "seed", "learning_rate", "precision"}
    assert not determining & {"max_steps", "train_dir", "data_dir", "fresh"}


@pytest.mark.parametrize(
    ("entries", "more"),
    [
        ({"schedule": "staircase", "stateful_model": False}, set()),
        ({"schedule": "linear", "stateful_model": False}, {"max_steps"}),
        ({"schedule": "cosine", "stateful_model": False}, {"max_steps"}),
        (
            {"schedule": "one_cycle", "stateful_model": True},
            {"max_steps", "batch_size"},
        ),
        ({"schedule": "staircase", "stateful_model": True}, {"batch_size"}),
    ],
)
def test_what_else_a_run_is_decides_whether_some_fields_may_change(entries, more):
    always = set(options.result_determining(ResolvedConfig))
    assert "global_batch_size" in always
    found = set(options.result_determining(ResolvedConfig, entries))
    assert found == always | more


def test_a_resolved_configuration_leaves_nothing_open():
    values = dataclasses.asdict(Config()) | {"global_batch_size": 128}
    resolved = ResolvedConfig(**{**values, "precision": "float32"}, towers=1, workers=1)
    assert resolved.global_batch_size == 128
    with pytest.raises(UsageError, match="--precision auto"):
        ResolvedConfig(**values, towers=1, workers=1)


# ---- config.json


def test_a_record_of_an_earlier_version_is_read(tmp_path):
    """With flags that are gone, and without those that were not there yet."""
    path = tmp_path / "config.json"
    written = {
        **dataclasses.asdict(Config(precision="float16")),
        "use_fp16": True,
        "verbose": False,
        "log_device_placement": False,
        "simulated": True,
        "parameters": 7,
        "global_batch_size": 128,
    }
    for name in ("clip_norm", "accumulate", "keep_best"):
        del written[name]
    path.write_text(json.dumps(written))
    # How its pictures were divided is noted as what that version did.
    added = {"data_division": "", "is_own": False}
    assert config_file.read(path) == {**written, **added}


def test_a_run_whose_images_an_older_version_cropped_is_refused(tmp_path):
    """They were 24 x 24 with --distortions none, which are 32 x 32 now."""
    path = tmp_path / "config.json"
    written = {
        **dataclasses.asdict(Config(distortions="none")),
        "simulated": True,
        "parameters": 7,
        "global_batch_size": 128,
    }
    path.write_text(json.dumps(written))
    with pytest.raises(UsageError, match="an older version has trained this run"):
        config_file.read(path)
    path.write_text(json.dumps({**written, "data_division": None}))
    assert config_file.read(path)["distortions"] == "none"


def test_a_division_that_is_no_number_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"data_division": "0123x"}))
    with pytest.raises(UsageError, match="data_division"):
        config_file.read(path)


def test_read_returns_what_was_written(tmp_path):
    path = tmp_path / "config.json"
    written = {
        **dataclasses.asdict(Config(seed=5, data_dir="/data")),
        "data_division": None,
        "simulated": True,
        "parameters": 7,
        "global_batch_size": 128,
    }
    path.write_text(json.dumps(written))
    origin.remember(path.read_bytes())
    assert config_file.read(path) == {**written, "is_own": True}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "holds no run"),
        (b"", "cannot be read"),
        (b'{"model": "tutorial"', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"[1, 2]", "is not a configuration"),
        (b"null", "is not a configuration"),
        (b'{"model": "tutorial"}', "is not a configuration"),
    ],
    ids=["missing", "empty", "cut off", "binary", "list", "null", "foreign"],
)
def test_read_refuses_what_is_not_a_configuration(tmp_path, content, named):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        config_file.read(path)
    assert str(path if content is not None else tmp_path) in str(caught.value)
    assert named in str(caught.value)


def test_read_refuses_a_folder(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        config_file.read(tmp_path / "config.json")


def test_flags_are_checked_before_tensorflow_is_imported():
    program = (
        "import argparse, sys\n"
        "from cifar10.config import cli, flags\n"
        "sys.argv = ['train.py', '--num_gpus', '2']\n"
        "assert flags.from_flags(argparse.ArgumentParser()).num_gpus == 2\n"
        "print([n for n in ('tensorflow', 'keras', 'numpy') if n in sys.modules])\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(config.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (finished.stdout, finished.stderr) == ("[]\n", "")


# Resuming with what a run has recorded.


@pytest.fixture
def recorded(tmp_path):
    """A directory with the `config.json` of a run of two towers."""
    values = {
        **vars(Config(recipe="fast", batch_size=32, learning_rate=0.5, fresh=True)),
        "train_dir": "elsewhere",
        "global_batch_size": 64,
        "precision": "float32",
        "data": "cifar10",
        "towers": 2,
        "workers": 1,
        "parameters": 1,
        "simulated": False,
        "data_dir": "/data",
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    origin.remember((tmp_path / "config.json").read_bytes())
    return tmp_path


def test_resume_takes_all_from_the_run_but_what_is_given(parse, recorded):
    config = parse("--resume", f"{recorded}/", "--max_steps", "7", num_gpus=1)
    assert config.learning_rate == 0.5
    assert config.global_batch_size == 64
    assert config.precision == "float32"
    assert config.optimizer == "sgd", "the recipe was read again"
    assert config.data_dir == "/data"
    assert (config.max_steps, config.num_gpus) == (7, 1)
    assert (config.train_dir, config.fresh) == (str(recorded), False)


def test_resume_accepts_what_the_run_has_anyhow(parse, recorded):
    assert parse("--resume", str(recorded), "--learning_rate", "0.5").seed == 0


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--learning_rate", "0.1"], ["--learning_rate 0.1", "has 0.5"]),
        (["--data", "synthetic"], ["--data synthetic", "has cifar10"]),
        (["--fresh"], ["--fresh and --resume do not go together"]),
        (["--recipe", "fast"], ["--recipe and --resume do not go together"]),
        (["--train_dir", "a"], ["--train_dir and --resume do not go together"]),
    ],
)
def test_resume_refuses_what_would_change_the_run(
    parse, recorded, capsys, words, parts
):
    with pytest.raises(SystemExit) as ended:
        parse("--resume", str(recorded), *words)
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert all(part in said for part in parts), said


def test_resume_without_a_run_is_refused(parse, tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse("--resume", str(tmp_path))
    assert f"{tmp_path} holds no run" in capsys.readouterr().err


def test_checkpoint_dir_is_another_name_of_train_dir(parse):
    assert parse("--checkpoint_dir", "a").train_dir == "a"
