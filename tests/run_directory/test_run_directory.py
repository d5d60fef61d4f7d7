"""Run directories: resumed, moved aside or refused, but never deleted."""

import errno
import json
import os

import pytest

from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.run_directory import starting
from cifar10.run_directory.lock import RunLock
from cifar10.training import preflight
from recorded_runs import recorded

SETTINGS = {
    **Config(batch_size=128, max_steps=1000).values,
    "model": "cnn",
    "global_batch_size": 128,
    "parameters": 1,
    "simulated": False,
}
DETERMINING = ("batch_size", "model")


def prepare(path, settings=SETTINGS, *, fresh=False):
    path = path.absolute()
    run = recorded(path, **settings)
    determining = {name: settings[name] for name in DETERMINING}
    earlier = preflight.check_run(run, determining, fresh=fresh)
    with RunLock(path) as lock:
        return starting.start_run(run, earlier, lock, fresh=fresh)


def read_config(path):
    return json.loads((path / "config.json").read_text(encoding="utf-8"))


def names(path):
    return sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")


def everything(path):
    """All files below a folder but locks, with their content."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


@pytest.fixture
def run(tmp_path):
    """A run directory with something in it."""
    path = tmp_path / "run"
    prepare(path)
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "weights").write_bytes(b"precious")
    return path


def refusal(path, settings, *, fresh=False):
    """The message of a refusal, which changes nothing on the disk."""
    before = everything(path.parent)
    with pytest.raises(UsageError) as error:
        prepare(path, settings, fresh=fresh)
    assert everything(path.parent) == before
    return str(error.value)


# New and resumed runs.


def test_new_or_empty_directory_gets_only_its_configuration(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").touch()
    for place, fresh in (("new", False), ("a/b/new", True), ("empty", False)):
        assert prepare(tmp_path / place, fresh=fresh) is None
        assert read_config(tmp_path / place) == SETTINGS
    assert names(tmp_path) == ["a", "empty", "new"]
    assert names(tmp_path / "new") == ["config.json"]


def test_the_same_settings_resume_and_harmless_changes_are_adopted(run):
    before = everything(run)
    assert prepare(run) is None
    assert everything(run) == before

    # A flag that a later version has no more does not matter either.
    (run / "config.json").write_text(json.dumps({**SETTINGS, "use_fp16": True}))
    assert prepare(run, {**SETTINGS, "max_steps": 2000}) is None
    assert read_config(run)["max_steps"] == 2000
    assert (run / "checkpoints" / "weights").read_bytes() == b"precious"


def test_a_run_stays_marked_as_simulated_until_a_new_run_begins(tmp_path):
    run = tmp_path / "run"
    for simulated, fresh, is_told in (
        (False, False, False),
        (True, False, True),
        (False, False, True),
        (False, True, False),
    ):
        prepare(run, {**SETTINGS, "simulated": simulated}, fresh=fresh)
        assert read_config(run)["simulated"] is is_told


def test_a_resume_reports_changed_versions(run):
    assert not prepare(run, {**SETTINGS, "versions": {}})
    prepare(run, {**SETTINGS, "versions": {"cifar10": "1 (sources a)", "numpy": "2"}})
    said = prepare(
        run, {**SETTINGS, "versions": {"cifar10": "1 (sources b)", "numpy": "2"}}
    )
    assert "sources a" in said
    assert "numpy" not in said


# Another configuration.


def test_every_differing_entry_is_named_and_nothing_changes(run):
    message = refusal(run, {**SETTINGS, "batch_size": 64, "max_steps": 5})
    assert "batch_size: 128 there, 64 now" in message
    assert "model:" not in message
    assert "max_steps" not in message

    older = {name: SETTINGS[name] for name in SETTINGS if name != "batch_size"}
    (run / "config.json").write_text(json.dumps(older))
    # An entry that an older run did not record had the default's value.
    message = refusal(run, {**SETTINGS, "batch_size": 64})
    assert "batch_size: 128 there, 64 now" in message
    prepare(run)


def test_a_lost_recipe_does_not_hide_how_a_run_differs(run):
    (run / "checkpoints" / "step-00000010").mkdir()
    wanted = {**SETTINGS, "batch_size": 7, "recipe": str(run.parent / "gone.toml")}
    said = refusal(run, wanted)
    assert "batch_size" in said
    assert f"--initial_weights {run}" in said


def test_an_entry_without_a_default_counts_as_a_difference(run):
    with pytest.raises(UsageError, match="towers"):
        preflight.check_run(recorded(run), {"model": "cnn", "towers": 2}, fresh=False)


# Beginning anew.


def test_fresh_moves_the_earlier_run_aside_with_all_its_content(run, monkeypatch):
    first = everything(run)
    monkeypatch.chdir(run)
    note = prepare(type(run)(), {**SETTINGS, "batch_size": 64}, fresh=True)
    assert str(run.parent / "run.1") in note
    assert names(run) == ["config.json"]
    (run.parent / "run.2").write_text("somebody's file")

    prepare(run, {**SETTINGS, "batch_size": 32}, fresh=True)

    assert everything(run.parent / "run.1") == first
    assert (run.parent / "run.2").read_text() == "somebody's file"
    assert read_config(run.parent / "run.3")["batch_size"] == 64
    assert read_config(run)["batch_size"] == 32


# Other things than runs, and directories that cannot be written to.


@pytest.mark.parametrize("fresh", [False, True])
def test_other_files_are_refused_and_left_unchanged(tmp_path, fresh):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    before = home.stat().st_mtime_ns
    assert "config.json" in refusal(home, SETTINGS, fresh=fresh)
    with pytest.raises(UsageError, match="config"):
        RunLock(home).__enter__()
    assert home.stat().st_mtime_ns == before, "something was written"
    assert "file" in refusal(home / "thesis.tex", SETTINGS, fresh=fresh)
    with pytest.raises(UsageError, match="directory"):
        prepare(home / "thesis.tex" / "run", fresh=fresh)


@pytest.mark.parametrize("fresh", [False, True])
def test_damaged_or_foreign_configuration_is_refused_and_kept(run, fresh):
    for content in (
        b'{"batch_size": 12',
        b"\xff\xfe\x00",
        b"[1]",
        b'{"model_type": "bert", "seed": 3}',
    ):
        (run / "config.json").write_bytes(content)
        assert "config.json" in refusal(run, SETTINGS, fresh=fresh)


def test_a_directory_that_cannot_be_read_is_refused(tmp_path):
    assert "too long" in refusal(tmp_path / ("x" * 300), SETTINGS)


def test_a_link_to_a_missing_folder_is_refused_until_the_folder_is_there(tmp_path):
    """Its disk may not be mounted."""
    link, folder = tmp_path / "link", tmp_path / "disk"
    link.symlink_to(folder)
    assert f"{folder}, which is missing" in refusal(link, SETTINGS)
    assert not folder.exists()
    (tmp_path / "loop").symlink_to("loop")
    assert f"{tmp_path}/loop" in refusal(tmp_path / "loop", SETTINGS)
    folder.mkdir()
    prepare(link)
    assert read_config(folder)["model"] == "cnn"


def test_a_start_that_cannot_be_recorded_is_refused(run):
    (run / "starts.jsonl").mkdir()
    with pytest.raises(UsageError, match=f"{run} cannot be used"):
        starting.record_start(recorded(run, **SETTINGS), 0)


def test_full_disk_leaves_the_earlier_configuration_whole(run, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space" in refusal(run, {**SETTINGS, "max_steps": 2000})
