"""Run directories: resumed, moved aside or refused, but never deleted."""

import errno
import json
import os
import shlex
import sys

import pytest

from cifar10.errors import UsageError
from cifar10.run_directory import claim

SETTINGS = {
    "batch_size": 128,
    "model": "cnn",
    "max_steps": 1000,
    "versions": {"python": "3.11.7", "tensorflow": "2.21.0"},
}
DETERMINING = ["batch_size", "model"]


def prepare(path, settings=SETTINGS, *, fresh=False, command=("train.py",)):
    path = path.absolute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", list(command))
        earlier = claim.check(path, settings, DETERMINING, fresh=fresh)
    with claim.hold(path) as held:
        return claim.begin(path, settings, earlier, held, fresh=fresh)


def read_config(path):
    return json.loads((path / "config.json").read_text(encoding="utf-8"))


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def everything(path):
    """All files below a folder with their content."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file()
    }


@pytest.fixture
def run(tmp_path):
    """A run directory with something in it."""
    path = tmp_path / "run"
    prepare(path)
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "weights").write_bytes(b"precious")
    return path


def refusal(path, settings, command=("train.py",)):
    """The message that refuses other settings."""
    with pytest.raises(UsageError) as error:
        prepare(path, settings, command=command)
    return str(error.value)


def commands_in(message):
    """The commands that a refusal suggests, as the shell would split them."""
    lines = [line.strip() for line in message.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("python ")]


# New and resumed runs.


@pytest.mark.parametrize("name", ["new", "a/b/new"])
def test_new_directory_is_made_with_only_its_configuration(tmp_path, name):
    path = tmp_path / name

    assert prepare(path) is None

    assert names(path) == ["config.json"]
    assert read_config(path) == SETTINGS


@pytest.mark.parametrize("hidden", [None, ".DS_Store"])
def test_existing_empty_directory_is_taken(tmp_path, hidden):
    if hidden:
        (tmp_path / hidden).touch()

    assert prepare(tmp_path) is None
    assert read_config(tmp_path) == SETTINGS


def test_same_settings_resume_and_touch_nothing(run):
    before = everything(run)

    assert prepare(run) is None
    assert everything(run) == before


def test_other_entry_that_does_not_determine_the_result_is_taken_over(run):
    assert prepare(run, {**SETTINGS, "max_steps": 2000}) is None

    assert read_config(run)["max_steps"] == 2000
    assert (run / "checkpoints" / "weights").read_bytes() == b"precious"


def test_flags_that_are_gone_do_not_keep_a_run_from_going_on(run):
    earlier = {**SETTINGS, "use_fp16": True, "verbose": False}
    (run / "config.json").write_text(json.dumps(earlier))

    assert prepare(run) is None


def test_other_versions_are_noted_with_both_numbers(run):
    versions = {"python": "3.11.7", "tensorflow": "2.21.1", "keras": "3.15.1"}

    note = prepare(run, {**SETTINGS, "versions": versions})

    assert note.index("tensorflow 2.21.0") < note.index("2.21.1")
    assert "python" not in note
    assert read_config(run)["versions"] == versions


def test_other_code_is_noted_once_with_what_wrote_the_run_and_what_continues_it(run):
    """Also if the run does not say which code wrote it."""
    notes = []
    for code in ("A", "A", "B", "B"):
        versions = {**SETTINGS["versions"], "cifar10": f"0.1.0 (sources {code})"}
        notes.append(prepare(run, {**SETTINGS, "versions": versions}))

    unknown, same, other, same_again = notes
    assert "unknown" in unknown
    assert "0.1.0 (sources A)" in unknown
    assert (same, same_again) == (None, None)
    assert other.index("sources A") < other.index("sources B")
    assert "\n" not in other


# The sessions of a run.


def session(devices, *, tensorflow="2.21.0", simulated=False):
    versions = {"tensorflow": tensorflow}
    return {
        **SETTINGS,
        "devices": devices,
        "versions": versions,
        "simulated": simulated,
    }


def test_earlier_sessions_are_kept_in_order_and_only_those_that_differ(tmp_path):
    run = tmp_path / "run"
    prepare(run, session("1 tower on A"))
    prepare(run, session("1 tower on A"))
    assert "earlier_sessions" not in read_config(run)

    prepare(run, session("2 towers on A"))
    prepare(run, session("2 towers on A", tensorflow="2.21.1"))
    prepare(run, session("2 towers on A", tensorflow="2.21.1"))

    config = read_config(run)
    assert config["devices"] == "2 towers on A"
    assert config["versions"] == {"tensorflow": "2.21.1"}
    assert config["earlier_sessions"] == [
        {"devices": "1 tower on A", "versions": {"tensorflow": "2.21.0"}},
        {"devices": "2 towers on A", "versions": {"tensorflow": "2.21.0"}},
    ]


def test_a_run_that_was_once_simulated_says_so_for_ever(tmp_path):
    run = tmp_path / "run"
    prepare(run, session("2 towers on A"))
    assert read_config(run)["simulated"] is False
    prepare(run, session("2 SIMULATED towers", simulated=True))
    for _ in range(2):
        prepare(run, session("2 towers on A"))
        assert read_config(run)["simulated"] is True

    prepare(run, session("2 towers on A"), fresh=True)

    assert read_config(run)["simulated"] is False, "a new run has no past"
    assert "earlier_sessions" not in read_config(run)


# Another configuration.


def test_other_determining_entries_are_refused_and_nothing_changes(run):
    before = everything(run.parent)

    message = refusal(run, {**SETTINGS, "batch_size": 64, "max_steps": 5})

    assert "batch_size: 128 there, 64 now" in message
    assert "model:" not in message
    assert "max_steps" not in message
    assert everything(run.parent) == before


def test_every_differing_entry_is_named(run):
    message = refusal(run, {**SETTINGS, "batch_size": 64, "model": "resnet"})

    assert "batch_size: 128 there, 64 now" in message
    assert "model: cnn there, resnet now" in message


def test_entry_that_an_older_run_did_not_record_had_the_defaults_value(run):
    (run / "config.json").write_text(json.dumps({"batch_size": 128}))

    assert "model: tutorial there, cnn now" in refusal(run, SETTINGS)
    prepare(run, {**SETTINGS, "model": "tutorial"})


def test_entry_that_has_no_default_is_a_difference(run):
    with pytest.raises(UsageError, match="towers: not recorded there, 2 now"):
        claim.check(run, {"towers": 2, **SETTINGS}, ["model", "towers"], fresh=False)


@pytest.mark.parametrize(
    "train_dir_flags",
    [["--train_dir", "{run}"], ["--train_dir={run}"], []],
    ids=["two words", "one word", "the default"],
)
def test_refusal_suggests_two_commands_to_paste(run, train_dir_flags):
    flags = [flag.format(run=run) for flag in train_dir_flags]
    command = ["my scripts/train.py", "--batch_size", "64", *flags, "--seed=3"]

    elsewhere, anew = commands_in(refusal(run, {**SETTINGS, "batch_size": 64}, command))

    others = ["my scripts/train.py", "--batch_size", "64", "--seed=3"]
    assert elsewhere == ["python", *others, "--train_dir", f"{run}.1"]
    assert anew == ["python", *command, "--fresh"]


def test_suggested_directory_is_an_unused_one(run):
    (run.parent / "run.1").mkdir()

    elsewhere, _ = commands_in(refusal(run, {**SETTINGS, "batch_size": 64}))

    assert elsewhere[-1] == f"{run}.2"


@pytest.mark.parametrize("fresh", [False, True])
def test_current_directory_as_run_is_handled_like_any_other(run, monkeypatch, fresh):
    monkeypatch.chdir(run)
    here = type(run)()

    if fresh:
        assert "moved to" in prepare(here, fresh=True)
    else:
        assert "batch_size" in refusal(here, {**SETTINGS, "batch_size": 64})


# Beginning anew.


def test_fresh_moves_the_earlier_run_aside_with_all_its_content(run):
    before = everything(run)

    note = prepare(run, {**SETTINGS, "batch_size": 64}, fresh=True)

    assert str(run.parent / "run.1") in note
    assert everything(run.parent / "run.1") == before
    assert names(run) == ["config.json"]
    assert read_config(run)["batch_size"] == 64


def test_fresh_never_overwrites_what_was_moved_aside_before(run):
    first = everything(run)
    prepare(run, {**SETTINGS, "batch_size": 64}, fresh=True)
    (run.parent / "run.2").write_text("somebody's file")

    prepare(run, {**SETTINGS, "batch_size": 32}, fresh=True)

    assert everything(run.parent / "run.1") == first
    assert (run.parent / "run.2").read_text() == "somebody's file"
    assert read_config(run.parent / "run.3")["batch_size"] == 64
    assert read_config(run)["batch_size"] == 32


def test_fresh_in_a_new_directory_moves_nothing(tmp_path):
    assert prepare(tmp_path / "run", fresh=True) is None
    assert names(tmp_path) == ["run"]


# What is no run.


@pytest.mark.parametrize("fresh", [False, True])
def test_directory_with_files_but_no_run_is_refused(tmp_path, fresh):
    path = tmp_path / "home"
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")

    with pytest.raises(UsageError, match=r"config\.json is missing"):
        prepare(path, fresh=fresh)

    assert names(tmp_path) == ["home"]
    assert everything(path) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("fresh", [False, True])
def test_file_as_directory_is_refused(tmp_path, fresh):
    path = tmp_path / "file"
    path.write_text("content")

    with pytest.raises(UsageError, match="is a file"):
        prepare(path, fresh=fresh)

    assert path.read_text() == "content"


def test_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(UsageError, match="cannot be used: Not a directory"):
        prepare(tmp_path / "file" / "run")


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    "damaged", [b"", b'{"batch_size": 12', b"\xff\xfe\x00", b"[1]", b"null"]
)
def test_damaged_configuration_is_refused_and_kept(run, damaged, fresh):
    (run / "config.json").write_bytes(damaged)

    with pytest.raises(
        UsageError, match=r"config\.json (cannot be read|was not written)"
    ):
        prepare(run, fresh=fresh)

    assert (run / "config.json").read_bytes() == damaged
    assert names(run.parent) == ["run"]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    "foreign",
    ['{"name": "app", "version": "1.0"}', '{"model_type": "bert", "seed": 3}', "{}"],
)
def test_configuration_of_another_package_is_refused_and_kept(run, foreign, fresh):
    (run / "config.json").write_text(foreign)
    before = everything(run.parent)

    with pytest.raises(UsageError, match="was not written by this package"):
        prepare(run, fresh=fresh)

    assert everything(run.parent) == before


# Directories that cannot be written to.


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_write_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UsageError, match="cannot be used: Permission denied"):
            prepare(tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


def test_full_disk_leaves_the_earlier_configuration_whole(run, monkeypatch):
    before = everything(run)

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be used: No space left on device"):
        prepare(run, {**SETTINGS, "max_steps": 2000})

    assert everything(run) == before


@pytest.mark.parametrize("batch", [0, -8, None, "x", [1], True, {"a": 1}, 10**400])
def test_a_batch_that_is_no_number_is_a_difference_without_advice(run, batch):
    entries = {**read_config(run), "batch_size": batch}
    (run / "config.json").write_text(json.dumps(entries))
    settings = {**SETTINGS, "global_batch_size": 128}
    message = refusal(run, settings)
    assert f"batch_size: {batch} there, 128 now" in message
    assert "Keep its batches" not in message
