"""Directories that flags name: a run's, or a folder in it, in any spelling."""

import pytest

from cifar10.config import layout
from cifar10.errors import UsageError


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in ("", "checkpoints/step-00001000", layout.TRAIN_EVENTS, "eval", "mine"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / layout.CONFIG).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "run"


def test_run_is_found_by_its_directory_and_by_folders_in_it(run):
    for name in ("run", "./run/", str(run), "~/run", "~/run/"):
        assert layout.locate_run(name) == run
    folders = layout.CHECKPOINTS, layout.TRAIN_EVENTS, layout.EVALUATION_EVENTS
    for name in (*folders, "checkpoints/step-00001000"):
        assert layout.locate_run(f"run/{name}/") == run
    # What is no part of a run is a directory of its own.
    for name in ("mine", "new/train"):
        assert layout.locate_run(f"run/{name}") == run / name


def test_home_of_an_unknown_user_is_refused(run):
    with pytest.raises(UsageError, match="~nobody-at-all"):
        layout.locate_run("~nobody-at-all/run")
    assert (
        layout.locate_run("./~nobody-at-all/run") == run.parent / "~nobody-at-all/run"
    )
