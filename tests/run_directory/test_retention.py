"""Which checkpoints stay, and that nobody loses one while reading it."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from cifar10.config import regular_files
from cifar10.errors import DiskError
from cifar10.run_directory import checkpoints, readers, restoring, retention

REPOSITORY = Path(__file__).parents[2]
HOUR = 3600
BEGIN = 1_700_000_000


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "eval").mkdir()
    return tmp_path


def save(run_dir, *steps):
    """Saves checkpoints; step N is written N minutes after the begin."""
    for step in steps:
        variable = {"weights": tf.Variable(float(step))}
        folder = checkpoints.save(
            run_dir / "checkpoints", variable, step=step, facts={}
        )
        written = BEGIN + 60 * step
        os.utime(folder / checkpoints.MANIFEST, (written, written))


def score(run_dir, scores, num_examples=100):
    with (run_dir / "eval" / "metrics.jsonl").open("a") as file:
        for step, precision in scores.items():
            line = {
                "step": step,
                "precision @ 1": precision,
                "num_examples": num_examples,
            }
            file.write(json.dumps(line) + "\n")


def keep(run_dir, newest=1, best=0, hours=None, step=10**9):
    """Applies rules; returns the steps that are left."""
    rules = retention.Rules(newest, best, hours, run_dir / "eval")
    retention.apply(run_dir / "checkpoints", rules, step)
    return checkpoints.steps(run_dir / "checkpoints")


# The newest.


@pytest.mark.parametrize(
    ("newest", "left"), [(1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4])]
)
def test_only_the_oldest_go(run_dir, newest, left):
    save(run_dir, 1, 2, 3, 4)

    assert keep(run_dir, newest) == left
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in left], "a part of one is left"
    assert checkpoints.verify(run_dir / "checkpoints", 4).step == 4


def test_those_after_the_newest_are_not_this_runs(run_dir):
    save(run_dir, 1, 2, 3, 9)

    assert keep(run_dir, step=3) == [3, 9]


def test_the_newest_stays_where_its_name_sorts_before_the_older_one(run_dir):
    save(run_dir, 99_999_999, 100_000_000)

    assert keep(run_dir) == [100_000_000]


def test_strays_are_neither_counted_nor_deleted(run_dir):
    save(run_dir, 1, 2, 3)
    folder = run_dir / "checkpoints"
    (folder / "step-00000009").write_text("a file")
    (folder / "step-00000008").mkdir()  # Beyond the run, and no checkpoint.
    (folder / "damaged-step-00000001-1").mkdir()
    (folder / "notes").mkdir()
    strays = sorted(set(folder.iterdir()) - set(folder.glob("step-0000000[123]")))

    assert keep(run_dir, newest=2, step=3) == [2, 3, 8]
    assert all(stray.exists() for stray in strays)


def test_one_that_cannot_be_deleted_is_named(run_dir, monkeypatch):
    save(run_dir, 1, 2)
    rename = Path.rename

    def rename_others(path, target):
        if path.name == "step-00000001":
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_others)
    with pytest.raises(DiskError, match=r"step-00000001 cannot be renamed .*: Permis"):
        keep(run_dir)
    assert checkpoints.steps(run_dir / "checkpoints") == [1, 2]


# The best.


def test_the_best_stay_besides_the_newest(run_dir):
    save(run_dir, 1, 2, 3, 4, 5, 6)
    score(run_dir, {1: 0.3, 2: 0.7, 3: 0.5, 4: 0.6})

    assert keep(run_dir, newest=1, best=2) == [2, 4, 6]


def test_one_of_the_newest_can_be_the_best(run_dir):
    save(run_dir, 1, 2, 3)
    score(run_dir, {1: 0.3, 3: 0.7})

    assert keep(run_dir, newest=2, best=1) == [2, 3]


def test_of_equal_ones_the_earlier_stays(run_dir):
    save(run_dir, 1, 2, 3, 4)
    score(run_dir, {3: 0.5, 2: 0.5, 1: 0.5})

    assert keep(run_dir, newest=1, best=2) == [1, 2, 4]
    assert keep(run_dir, newest=1, best=1) == [1, 4]


def test_a_better_one_takes_the_place_of_the_best(run_dir):
    save(run_dir, 1, 2, 3)
    score(run_dir, {1: 0.5})
    assert keep(run_dir, newest=2, best=1) == [1, 2, 3]

    save(run_dir, 4)
    score(run_dir, {2: 0.6})
    assert keep(run_dir, newest=2, best=1) == [2, 3, 4]


def test_scores_of_deleted_checkpoints_take_no_place(run_dir):
    save(run_dir, 2, 3, 4)
    score(run_dir, {1: 0.9, 2: 0.5})

    assert keep(run_dir, newest=1, best=1) == [2, 4]


def test_scores_are_not_asked_for_where_none_is_kept_for_them(run_dir):
    save(run_dir, 1, 2)
    (run_dir / "eval" / "metrics.jsonl").mkdir()

    assert keep(run_dir, best=0) == [2]


def test_scores_that_cannot_be_read_delete_nothing(run_dir):
    """Else the best would go."""
    save(run_dir, 1, 2)
    (run_dir / "eval" / "metrics.jsonl").mkdir()

    with pytest.raises(DiskError, match=r"metrics\.jsonl cannot be read: Is a dir"):
        keep(run_dir, best=1)
    assert checkpoints.steps(run_dir / "checkpoints") == [1, 2]


# One every some hours.


def test_one_every_hour_stays(run_dir):
    kept = []
    for step in range(10, 211, 25):  # 10, 35, 60, 85, 110, 135, 160, 185, 210 minutes
        save(run_dir, step)
        kept = keep(run_dir, newest=1, hours=1)

    assert kept == [10, 85, 160, 210]


def test_the_same_ones_stay_whenever_it_is_decided(run_dir):
    save(run_dir, *range(10, 211, 25))

    assert keep(run_dir, newest=1, hours=1) == [10, 85, 160, 210]
    assert keep(run_dir, newest=1, hours=1) == [10, 85, 160, 210]


def test_what_was_kept_for_good_stays_without_the_rule_and_with_other_times(run_dir):
    save(run_dir, 10, 85, 160)
    keep(run_dir, newest=1, hours=1)
    for manifest in (run_dir / "checkpoints").glob("*/manifest.json"):
        os.utime(manifest, (BEGIN, BEGIN))

    assert keep(run_dir, newest=1) == [10, 85, 160]
    save(run_dir, 170)
    assert keep(run_dir, newest=1, hours=100) == [10, 85, 170]


def test_a_clock_that_was_set_back_costs_no_checkpoint(run_dir):
    save(run_dir, 10, 85, 160, 235)
    folder = checkpoints.folder(run_dir / "checkpoints", 10)
    years_ahead = BEGIN + 10**8
    os.utime(folder / checkpoints.MANIFEST, (years_ahead, years_ahead))

    assert keep(run_dir, newest=1, hours=1) == [10, 85, 160, 235]


def test_a_checkpoint_is_kept_by_hand(run_dir):
    save(run_dir, 1, 2, 3)
    (checkpoints.folder(run_dir / "checkpoints", 2) / retention.KEEP).touch()

    assert keep(run_dir) == [2, 3]
    assert checkpoints.verify(run_dir / "checkpoints", 2).step == 2


def test_the_newest_has_the_same_files_with_the_rule_and_without(run_dir, tmp_path):
    save(run_dir, 10, 85)
    keep(run_dir, newest=1, hours=1)
    (tmp_path / "other").mkdir()
    save(tmp_path / "other", 85)

    one, other = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (
            checkpoints.folder(run_dir / "checkpoints", 85),
            checkpoints.folder(tmp_path / "other" / "checkpoints", 85),
        )
    )
    assert one == other


def test_a_mark_that_cannot_be_made_deletes_nothing(run_dir, monkeypatch):
    save(run_dir, 1, 2, 3)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(regular_files, "opened", full)
    with pytest.raises(DiskError, match=r"keep cannot be written, .*: No space left"):
        keep(run_dir, hours=1)
    assert checkpoints.steps(run_dir / "checkpoints") == [1, 2, 3]


# What somebody is reading.


@pytest.fixture
def reader(run_dir):
    """Starts a process that reads a checkpoint until it is killed."""
    started = []

    def start(step):
        code = """
import sys, time
from pathlib import Path
from cifar10.run_directory import readers

with readers.reading(Path(sys.argv[1])):
    print("reading", flush=True)
    time.sleep(60)
"""
        manifest = checkpoints.folder(run_dir / "checkpoints", step)
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(manifest / checkpoints.MANIFEST)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "reading\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_what_is_being_read_stays_until_its_reader_has_died(run_dir, reader):
    save(run_dir, 1, 2, 3)
    processes = [reader(2), reader(2)]

    assert keep(run_dir) == [2, 3]
    for process in processes:
        assert checkpoints.verify(run_dir / "checkpoints", 2).step == 2
        assert keep(run_dir) == [2, 3]
        process.kill()
        process.wait()
    assert keep(run_dir) == [3]


def test_a_reader_that_has_done_holds_nothing(run_dir):
    save(run_dir, 1, 2)
    checkpoints.verify(run_dir / "checkpoints", 1)

    assert keep(run_dir) == [2]


def test_restoring_counts_as_reading(run_dir, monkeypatch):
    save(run_dir, 1, 2)
    sha256, kept = checkpoints.files.sha256, []

    def meanwhile(path):
        kept.append(keep(run_dir))
        return sha256(path)

    monkeypatch.setattr(checkpoints.files, "sha256", meanwhile)
    load = lambda _: kept.append(keep(run_dir))  # noqa: E731
    restoring.restore_step(run_dir / "checkpoints", 1, load, {})

    assert kept == [[1, 2]] * 3


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_without_locks_reading_and_deleting_go_on(run_dir, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    save(run_dir, 1, 2)
    monkeypatch.setattr(fcntl, "flock", fail)

    folder = checkpoints.folder(run_dir / "checkpoints", 1)
    with readers.reading(folder / checkpoints.MANIFEST):
        assert keep(run_dir) == [2]
    with pytest.raises(FileNotFoundError):
        checkpoints.verify(run_dir / "checkpoints", 1)


def test_a_checkpoint_without_manifest_is_deleted_like_others(run_dir):
    save(run_dir, 1, 2)
    folder = checkpoints.folder(run_dir / "checkpoints", 1)
    (folder / checkpoints.MANIFEST).unlink()

    assert keep(run_dir, hours=1) == [2]
