"""Which checkpoints stay, and what somebody finds whose checkpoint goes."""

import pytest
import tensorflow as tf

from cifar10.config.fields import Checkpoints
from cifar10.errors import DiskError
from cifar10.run_directory import checkpoints, restoring, scores
from recorded_runs import recorded


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "eval").mkdir()
    return tmp_path


def save(run_dir, *steps):
    for step in steps:
        variable = {"weights": tf.Variable(float(step))}
        checkpoints.save(run_dir / "checkpoints", variable, step=step, facts={})


def folder_of(run_dir, step):
    return checkpoints.folder(run_dir / "checkpoints", step)


def score(run_dir, precisions):
    for step, precision in precisions.items():
        scores.append(run_dir / "eval", step, {"precision @ 1": precision}, 100)


def keep(run_dir, newest=1, best=0, step=10**9, known=None):
    """Applies rules; returns the steps that are left."""
    rules = Checkpoints(keep_checkpoints=newest, keep_best=best)
    checkpoints.delete_old(run_dir / "checkpoints", rules, step, known or {})
    return checkpoints.steps(run_dir / "checkpoints")


# The newest.


def test_only_the_oldest_checkpoints_are_deleted(run_dir):
    save(run_dir, 1, 2, 3, 4)
    (folder_of(run_dir, 1) / checkpoints.MANIFEST).unlink()  # It is damaged.

    for newest, left in ((9, [1, 2, 3, 4]), (4, [1, 2, 3, 4]), (2, [3, 4]), (1, [4])):
        assert keep(run_dir, newest) == left
        names = {path.name for path in (run_dir / "checkpoints").iterdir()}
        assert names == {f"step-{step:08d}" for step in left}, "a part of one is left"


def test_the_newest_checkpoint_stays_even_if_its_name_sorts_first(run_dir):
    save(run_dir, 99_999_999, 100_000_000)

    assert keep(run_dir) == [100_000_000]


def test_stray_and_foreign_checkpoints_are_neither_counted_nor_deleted(run_dir):
    save(run_dir, 1, 2, 3, 9)  # The run has not reached step 9.
    folder = run_dir / "checkpoints"
    (folder / "step-00000010").write_text("a file")
    (folder / "damaged-step-00000001-1").mkdir()
    (folder / "notes").mkdir()
    strays = {*folder.iterdir()} - {*folder.glob("step-0000000[1239]")}

    assert keep(run_dir, newest=2, step=3) == [2, 3, 9]
    assert all(stray.exists() for stray in strays)


# The best.


def test_the_best_and_the_newest_checkpoints_stay(run_dir):
    save(run_dir, 2, 3, 4, 5, 6)
    score(run_dir, {1: 0.9, 2: 0.7, 3: 0.5, 4: 0.6})  # Step 1 is deleted already.
    assert keep(run_dir, newest=2, best=2) == [2, 4, 5, 6]

    score(run_dir, {6: 0.65})
    assert keep(run_dir, newest=1, best=2) == [2, 6]


def test_the_earlier_of_two_equal_checkpoints_stays(run_dir):
    save(run_dir, 1, 2, 3, 4)
    score(run_dir, {3: 0.5, 2: 0.5, 1: 0.5})

    assert keep(run_dir, newest=1, best=2) == [1, 2, 4]
    assert keep(run_dir, newest=1, best=1) == [1, 4]


def test_the_best_stays_although_its_score_could_not_be_logged(run_dir):
    save(run_dir, 1, 2, 3)
    score(run_dir, {2: 0.5, 3: 0.6})
    known = {1: 0.9}

    assert keep(run_dir, best=2, known=known) == [1, 3]
    score(run_dir, {1: 0.4})
    assert keep(run_dir, best=1, known=known) == [3], "the log has the last word"


def test_unreadable_scores_delete_nothing(run_dir):
    """Else the best would go."""
    save(run_dir, 1, 2)
    (run_dir / "eval" / "metrics.jsonl").mkdir()

    with pytest.raises(DiskError, match="metrics"):
        keep(run_dir, best=1)
    assert checkpoints.steps(run_dir / "checkpoints") == [1, 2]
    assert keep(run_dir, best=0) == [2], "the scores are not needed"


# What a user has marked.


def test_a_marked_checkpoint_stays_intact(run_dir):
    save(run_dir, 1, 2, 3)
    (folder_of(run_dir, 2) / checkpoints.KEEP).touch()
    assert keep(run_dir) == [2, 3]
    assert checkpoints.verify(run_dir / "checkpoints", 2).step == 2


# What somebody is reading.


def test_a_checkpoint_deleted_during_reading_is_skipped(run_dir, monkeypatch):
    save(run_dir, 1, 2)
    sha256 = checkpoints.files.sha256

    def delete_first(path):
        checkpoints.delete(run_dir / "checkpoints", 2)
        return sha256(path)

    loaded = []
    monkeypatch.setattr(checkpoints.files, "sha256", delete_first)
    restoring.restore_newest(
        run_dir / "checkpoints", loaded.append, recorded(seed=None)
    )
    assert [found.step for found in loaded] == [1]
