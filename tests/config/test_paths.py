"""Directories that flags name: a run's, or a folder in it, in any spelling."""

import pytest

from cifar10.config import paths
from cifar10.errors import UsageError
from cifar10.run_directory import layout


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in ("", "checkpoints/step-00001000", layout.TRAIN_EVENTS, "eval", "mine"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / layout.CONFIG).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "spelling", ["run", "run/", "./run", "{}", "{}/", "~/run", "~/run/"]
)
def test_a_run_is_found_however_its_directory_is_spelled(run, spelling):
    assert paths.locate_run(spelling.format(run)) == run


def test_a_folder_in_a_run_names_the_run(run):
    folders = layout.CHECKPOINTS, layout.TRAIN_EVENTS, layout.EVALUATION_EVENTS
    for name in (*folders, "checkpoints/", "checkpoints/step-00001000"):
        assert paths.locate_run(f"run/{name}") == run
    # What is no part of a run is a directory of its own.
    for name in ("mine", "new/train", "new"):
        assert paths.locate_run(f"run/{name}") == run / name


def test_a_home_that_nobody_has_is_not_made(run):
    with pytest.raises(UsageError, match=r"no home folder ~nobody-at-all\. Is it \./~"):
        paths.locate_run("~nobody-at-all/run")
    assert paths.locate_run("./~nobody-at-all/run") == run.parent / "~nobody-at-all/run"
