"""`python -m cifar10 runs`: the state of each run, and what --prune removes."""

import argparse
import csv
import errno
import inspect
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

import runs
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.follower.followed_run import FollowedRun
from cifar10.interface.train import read_record
from cifar10.run_directory import checkpoints, logs, scores, starting
from cifar10.run_directory.lock import RunLock
from cifar10.training import preflight
from small_runs import describe, save

pytestmark = pytest.mark.usefixtures("registered")
ENDED_EARLY = {"score": 0.5, "images": 9, "step": 10, "without_gain": 2}
ENDED_EARLY |= {"best_by": "precision @ 1"}


@pytest.fixture(scope="module")
def originals(registered, tmp_path_factory):
    """Runs with a checkpoint of step 10, in the states that their names say."""
    del registered
    folder = tmp_path_factory.mktemp("originals")
    (folder / "trials").mkdir()
    names = "finished", "stopped", "trials/killed", "lost", "not_finite", "no_config"
    for name in (*names, "no_manifest", "no_gain", "hours", "training", "by_f1"):
        run = folder / name
        most = 10 if name == "finished" else 30
        parts = ["train", "val", "test"]
        ended = {"max_steps": most, "stop_after_no_gain": 2}
        facts = {"validation": ENDED_EARLY} if name == "no_gain" else {}
        if name == "by_f1":
            ended["best_by"] = "macro F1"
            facts = {"validation": {**ENDED_EARLY, "best_by": "macro F1"}}
        if name == "hours":
            ended["max_hours"], facts = 1.0, {"hours": 1.01}
        describe(run, parameters=1, data_parts=parts, data_division="", **ended)
        save(run, 10, **facts)
        (run / "metrics.jsonl").write_text('{"step": 5}\n{"step": 10}\n{"st')
    (folder / "trials/killed/metrics.jsonl").write_text('{"step": 11}\n')
    (folder / "lost/metrics.jsonl").write_text('{"step": 20}\n')
    shutil.copytree(folder / "stopped/checkpoints", folder / "not_finite/debug")
    (folder / "not_finite/debug/step-00000010").rename(
        folder / "not_finite/debug/step-00000017"
    )
    (folder / "no_config/config.json").write_text('{"model": ')
    manifest = folder / "no_manifest/checkpoints/step-00000010/manifest.json"
    manifest.write_text(manifest.read_text().replace("10", "11"))
    for part, precision in (("eval", 0.9), ("eval_val", 0.5)):
        (folder / "finished" / part).mkdir()
        scores.append(folder / "finished" / part, 10, {"precision @ 1": precision}, 9)
    (folder / "other").mkdir()
    (folder / "other/config.json").write_text('{"model": "of another program"}')
    return folder


@pytest.fixture
def folder(originals, tmp_path):
    shutil.copytree(originals, tmp_path / "runs")
    return tmp_path / "runs"


def call(*words):
    return runs.call("cifar10/__main__.py", "runs", *words)


def listed(*words):
    done = call(*words, "--json")
    assert done.returncode == 0, done.stderr
    return {run["name"]: run for run in json.loads(done.stdout)}


def remaining(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_the_state_of_each_run_follows_from_its_files(folder):
    (folder / "link").symlink_to(folder / "stopped")
    with RunLock(folder / "training"):
        found = listed(folder)
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished",
        "no_gain": "finished",
        "hours": "finished",
        "by_f1": "finished",
        "stopped": "stopped",
        "trials/killed": "failed",
        "lost": "failed",
        "not_finite": "failed",
        "training": "training",
        "no_config": "damaged",
        "no_manifest": "damaged",
    }
    assert found["no_config"]["problem"]
    assert (found["not_finite"]["step"], found["lost"]["step"]) == (17, 20)
    assert (found["finished"]["step"], found["finished"]["max_steps"]) == (10, 10)
    assert (found["hours"]["step"], found["hours"]["max_steps"]) == (10, None)
    assert found["finished"]["best"] == {
        "part": "val",
        "by": "precision @ 1",
        "score": 0.5,
        "step": 10,
        "images": 9,
    }
    files = [path for path in (folder / "lost").rglob("*") if path.is_file()]
    assert found["lost"]["bytes"] >= sum(path.stat().st_size for path in files)
    newest = max(path.stat().st_mtime for path in files)
    assert found["lost"]["changed"] == pytest.approx(newest, abs=1)
    # A run that is refused touches the lock, and a report is no news either.
    for path in files:
        is_log = path.name == "metrics.jsonl"
        os.utime(path, (2e9, 1e9 + 1 if is_log else 1e9))
    with RunLock(folder / "lost"):
        (folder / "lost/report.html").touch()
    assert listed(folder)["lost"]["changed"] == 1e9 + 1
    lines = call(folder).stdout.splitlines()
    assert len(lines) == len(found) + 1
    # Wilson's interval of a half of nine.
    best = "best precision @ 1 = 0.500 [0.227, 0.773] on val at step 10"
    assert [line for line in lines if line.endswith(best)]
    assert listed(folder / "stopped").keys() == {"."}


def test_a_copy_with_an_edited_seed_is_no_other_seed(folder):
    """Three copies of a run would be the mean of three seeds, without a deviation."""
    (run := folder / "stopped").joinpath("eval").mkdir()
    describe(run, parameters=1, data_parts=["train", "test"], max_steps=30)
    scores.append(run / "eval", 10, {"precision @ 1": 0.7}, 9)
    shutil.copytree(run, folder / "copy")
    settings = json.loads((run / "config.json").read_text()) | {"seed": 1}
    (folder / "copy/config.json").write_text(json.dumps(settings))
    said = call(folder).stdout
    assert "the checkpoint of step 10: its seed is 0, but 1 in config.json" in said
    assert "mean of 2 seeds" not in said


def test_a_list_shows_the_facts_of_each_run_in_every_order(folder):
    """As text and as a table; what has most or changed last comes first."""
    (folder / "lost/big").write_bytes(bytes(3 * 10**6))
    run = folder / "stopped"
    describe(run, parameters=1, data_parts=["train", "test"], max_steps=30, seed=1)
    shutil.rmtree(run / "checkpoints")
    save(run, 10, seed=1)
    describe(folder / "finished", parameters=1, max_steps=10)
    (run / "eval").mkdir()
    scores.append(run / "eval", 5, {"precision @ 1": 0.1}, 9)
    (folder / "hours/eval_val").mkdir()
    scores.append(folder / "hours/eval_val", 10, {"precision @ 1": 0.3}, 9)
    scores.append(run / "eval", 10, {"precision @ 1": 0.7}, 9)
    for step in (0, 10):
        starting.record_start(RecordedRun.read(run), step)
    starting.record_start(RecordedRun.read(folder / "finished"), 0)
    event = {"step": 9, "time": 1e9, "event": "divergence", "what": "it guesses"}
    (run / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    for path in (folder / "lost").rglob("*"):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    found = listed(folder)

    lines = call(folder).stdout.splitlines()
    told = {line.split()[0]: " ".join(line.split()) for line in lines}
    assert told["lost"].startswith("lost failed 3.")
    assert " MB 2 days, 0:0" in told["lost"]
    assert told["lost"].endswith(" ago step 20 of 30")
    for part in ("2 starts, the last from step 10", "divergence at step 9"):
        assert part in told["stopped"]
        assert part not in told["lost"]
    assert "start" not in told["finished"], "it was never resumed"
    assert "precision @ 1 = 0.8000 on test at step 10, mean of 2 seeds" in lines[-2]
    assert lines[-2].endswith(": finished, stopped")
    total = sum(one["bytes"] for one in found.values()) / 1e6
    assert lines[-1] == f"{len(found)} runs in {folder}, {total:,.1f} MB"

    rows = [*csv.DictReader(call(folder, "--csv").stdout.splitlines())]
    assert [row["name"] for row in rows] == [*found]
    for row, one in zip(rows, found.values(), strict=True):
        assert (row["state"], row["step"]) == (one["state"], str(one.get("step", "")))
        score = one.get("scores", {}).get("precision @ 1", "")
        assert row["precision @ 1"] == str(score)
        assert row["seed"] == str(one.get("settings", {}).get("seed", ""))
    scored = {row["name"]: row["scored"] for row in rows if row["precision @ 1"]}
    assert scored == {"finished": "test", "stopped": "test", "hours": "val"}
    assert found["lost"]["scored"] == "val", "by which its best will be chosen"

    for order, most in (("age", "changed"), ("size", "bytes"), ("state", None)):
        names = [*listed(folder, "--sort", order)]
        values = [found[name][most or "state"] for name in names]
        assert values == sorted(values, reverse=bool(most)), order
        assert {*names} == {*found}
    assert [*listed(folder, "--sort", "score")][:2] == ["finished", "stopped"]
    assert call(folder, "--json", "--csv").returncode == 2


@pytest.mark.parametrize("name", ["metrics.jsonl.1", "metrics.jsonl-20261129"])
def test_a_killed_run_stays_failed_after_its_log_is_moved_away(folder, name):
    log = folder / "trials/killed/metrics.jsonl"
    event = {"step": 11, "time": 1.0, "event": "skip", "what": "NaN"}
    timed = '{"step": 11, "time": 1.0}'
    log.write_text(f'{{"step": 10}}\n{json.dumps(event)}\n{timed}\n')
    log.rename(log.with_name(name))
    found = listed(folder)["trials/killed"]
    assert (found["state"], found["step"]) == ("failed", 11)
    assert found["event"]["what"] == "NaN"
    # A resume computes the step again, and stops before it logs.
    for begun in (0, 10):
        starting.record_start(RecordedRun.read(folder / "trials/killed"), begun)
    found = listed(folder)["trials/killed"]
    assert (found["state"], found["step"], found["event"]) == ("stopped", 10, None)


def test_a_run_without_its_configuration_is_damaged(folder):
    starting.record_start(RecordedRun.read(folder / "stopped"), 0)
    (folder / "stopped/config.json").unlink()
    assert listed(folder)["stopped"]["state"] == "damaged"


def test_a_table_is_utf8_and_always_has_its_columns_in_one_order(folder):
    """Of a name that is none, and of runs with and without scores."""
    (folder / "stopped").rename(folder / os.fsdecode(b"bad\xff, \n"))
    orders = []
    for order in ("name", "score"):
        table = call(folder, "--csv", "--sort", order).stdout
        assert "bad\\udcff, " in table
        orders.append(next(csv.reader(table.splitlines())))
    first, second = orders
    assert first == second
    assert first[:4] == ["name", "state", "step", "scored"]
    assert first.index("precision @ 1") < first.index("batch_size")


def test_a_log_too_large_to_read_does_not_damage_a_run(folder, monkeypatch):
    log = folder / "trials/killed/metrics.jsonl"
    monkeypatch.setattr(logs, "_RECENT", 100)
    monkeypatch.setattr(logs, "LARGEST_LOG", 1000)
    lines = (f'{{"step": {step}, "time": 1.0}}\n' for step in range(1, 301))
    log.write_text("".join(lines))
    found = listed(folder)["trials/killed"]
    assert (found["state"], found["step"]) == ("failed", 300)
    # A resume goes on with a new log.
    for begun in (0, 200):
        starting.record_start(RecordedRun.read(folder / "trials/killed"), begun)
    logs.forget_later(folder / "events", log, 200)
    logs.append_line(log, {"step": 201})
    assert [line["step"] for line in logs.read_steps(log)] == [201]
    assert log.with_name("metrics.jsonl.1").exists()
    assert listed(folder)["trials/killed"]["step"] == 201


def test_a_resume_keeps_the_events_of_hanging_steps(folder):
    log = folder / "stopped/metrics.jsonl"
    for step, event in ((10, "skip"), (11, "silence"), (12, "skip")):
        line = {"step": step, "time": 1.0, "event": event, "what": "as told"}
        logs.append_line(log, line)
    logs.forget_later(folder / "events", log, 10)
    lines = [(line["step"], line.get("event")) for line in logs.read_lines(log)]
    assert lines == [(5, None), (10, None), (10, "skip"), (11, "silence")]
    assert listed(folder)["stopped"]["event"]["event"] == "silence"
    assert listed(folder)["stopped"]["state"] == "stopped"


def test_an_inaccessible_folder_is_named(folder, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if os.fspath(path).endswith("trials"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    done = call(folder)
    assert "stopped" in done.stdout
    assert f"{folder / 'trials'} is left out" in done.stderr


def test_a_file_deleted_meanwhile_does_not_end_the_list(folder, monkeypatch):
    """By the training of a run that is listed."""
    lstat = Path.lstat

    def late(path):
        if path.name == "state.index":
            path.unlink(missing_ok=True)
        return lstat(path)

    before = listed(folder)["stopped"]
    monkeypatch.setattr(Path, "lstat", late)
    after = listed(folder)["stopped"]
    assert 0 < after["bytes"] < before["bytes"]


def test_a_table_holds_the_tables_of_a_configuration(folder):
    config = json.loads((folder / "stopped/config.json").read_text())
    config["optimizer_arguments"] = {"nesterov": True}
    (folder / "stopped/config.json").write_text(json.dumps(config))
    rows = {
        row["name"]: row
        for row in csv.DictReader(call(folder, "--csv").stdout.splitlines())
    }
    assert json.loads(rows["stopped"]["optimizer_arguments"]) == {"nesterov": True}
    assert rows["hours"]["optimizer_arguments"] == ""


def test_a_run_within_another_counts_once(folder):
    alone = listed(folder)["stopped"]["bytes"]
    shutil.copytree(folder / "lost", folder / "stopped/within")
    found = listed(folder)
    assert found["stopped"]["bytes"] == alone
    assert found["stopped/within"]["bytes"] == found["lost"]["bytes"]


def test_only_named_runs_are_removed_and_only_after_confirmation(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "picture.png").touch()
    (folder / "lost/pictures").symlink_to(outside)
    before = remaining(folder)
    words = folder, "--prune", "lost", "no_config", "trials/killed/"
    shown = call(*words)
    assert shown.returncode == 0
    assert [line.split()[0] for line in shown.stdout.splitlines()][:-1] == [
        "lost",
        "no_config",
        "trials/killed",
    ]
    assert call(folder, "--yes").returncode == 2
    assert remaining(folder) == before
    assert call(*words, "--yes").returncode == 0
    gone = "lost", "no_config", "trials/killed"
    assert remaining(folder) == [name for name in before if not name.startswith(gone)]
    assert (outside / "picture.png").exists()


@pytest.mark.parametrize(
    "name", ["training", "link", "other", "trials", "../outside", "outer"]
)
def test_prune_removes_nothing_if_one_run_is_in_use_or_invalid(folder, tmp_path, name):
    shutil.copytree(folder / "stopped", tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    shutil.copytree(folder / "stopped", folder / "outer")
    shutil.copytree(folder / "stopped", folder / "outer/inner")
    with RunLock(folder / "training"):
        before = remaining(tmp_path)
        done = call(folder, "--prune", "stopped", name, "--yes")
        assert remaining(tmp_path) == before
    assert done.returncode == 2
    assert name in done.stderr


def test_a_run_started_meanwhile_is_kept(folder, monkeypatch):
    from cifar10.tools import runs as command

    monkeypatch.setattr(command, "is_locked", lambda _: False)
    with RunLock(folder / "stopped"):
        assert call(folder, "--prune", "stopped", "--yes").returncode == 2
    assert (folder / "stopped/config.json").exists()


def test_a_missing_directory_and_a_directory_without_runs_have_different_messages(
    tmp_path,
):
    assert listed(tmp_path) == {}
    assert call(tmp_path / "none").returncode == 2


def test_folders_beyond_the_recursion_limit_cause_no_traceback(folder):
    (folder / "stopped" / "/".join(["d"] * 250)).mkdir(parents=True)
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack()) + 200)
        done = call(folder)
    finally:
        sys.setrecursionlimit(before)
    is_recursive = sys.version_info < (3, 12)
    assert done.returncode == (2 if is_recursive else 0), done.stderr
    assert (str(folder) in done.stderr) == is_recursive


def test_runs_are_listed_without_tensorflow(folder):
    code = (
        "import sys, runpy; sys.argv = ['cifar10', 'runs', sys.argv[1]]\n"
        "try: runpy.run_module('cifar10', run_name='__main__')\n"
        "except SystemExit: print({'tensorflow', 'keras', 'numpy'} & {*sys.modules})"
    )
    done = runs.run_anew("-c", code, folder)
    assert "finished" in done.stdout, done.stderr
    assert done.stdout.endswith("set()\n")


# ---- A finished run keeps its best checkpoint


@pytest.fixture
def done_run(folder):
    """A finished run of three checkpoints, of which the second has the best score."""
    run = folder / "finished"
    describe(run, data_parts=["train", "test"], max_steps=30)
    for step in (20, 30):
        save(run, step)
    (run / "metrics.jsonl").write_text('{"step": 30}\n')
    for step, score in ((10, 0.5), (20, 0.7), (30, 0.6)):
        scores.append(run / "eval", step, {"precision @ 1": score}, 100)
    return run


def prune(folder, *words):
    return call(folder, "--prune", *words)


def saved(run):
    return checkpoints.steps(run / "checkpoints")


def test_a_finished_run_keeps_its_best_checkpoint_and_its_records(folder, done_run):
    others = [path for path in remaining(folder) if "checkpoints/" not in path]
    words = "finished", "--keep", "best"
    assert prune(folder, *words).returncode == 0
    assert saved(done_run) == [10, 20, 30], "only listed"
    for says in (True, False):  # As by cron, which would mail it.
        done = prune(folder, *words, "--yes")
        assert (done.returncode, bool(done.stderr)) == (0, says)
        assert saved(done_run) == [20]
    assert checkpoints.verify(done_run / "checkpoints", 20)
    now = [path for path in remaining(folder) if "checkpoints/" not in path]
    assert {*others} < {*now}
    found = listed(folder)["finished"]
    assert (found["state"], found["step"], found["best"]["step"]) == (
        "finished",
        30,
        20,
    )


def test_a_run_with_corrections_is_not_removed(folder, done_run):
    """They may be a person's work, and another run may depend on them."""
    (done_run / "corrections.csv").write_text("picture,class\n")
    done = prune(folder, "finished", "--yes")
    assert (done.returncode, "corrections.csv" in done.stderr) == (2, True)
    assert prune(folder, "finished", "--keep", "best", "--yes").returncode == 0
    assert (done_run / "corrections.csv").exists()


def test_the_record_of_a_pruned_run_has_its_best_step_and_its_limit(folder, done_run):
    describe(done_run, data_parts=["train", "test"], max_steps=30, max_epochs=2.0)
    assert prune(folder, "finished", "--keep", "best", "--yes").returncode == 0
    record = read_record(done_run, 20, 1.0, Config())
    assert record.best == (20, 0.7)
    assert record.ended == "max_epochs"


def test_a_diverged_run_stays_diverged_after_pruning(folder, done_run):
    """Its best checkpoint is from before."""
    lost = {"lost steps": 1.0, "first loss": 2.0, "highest loss": 1e9}
    shutil.rmtree(runs.checkpoint(done_run, 30))
    save(done_run, 30, loss_averages=lost)
    assert listed(folder)["finished"]["state"] == "diverged"
    for _ in range(2):
        assert prune(folder, "finished", "--keep", "best", "--yes").returncode == 0
        assert saved(done_run) == [20]
        assert listed(folder)["finished"]["state"] == "diverged"


def test_a_checkpoint_marked_by_the_user_stays_beside_the_best(folder, done_run):
    (runs.checkpoint(done_run, 10) / "keep").touch()
    assert prune(folder, "finished", "--keep", "best", "--yes").returncode == 0
    assert saved(done_run) == [10, 20]


@pytest.mark.parametrize("name", ["stopped", "no_gain", "no_config", "../outside", "x"])
def test_a_run_needing_its_newest_checkpoint_or_without_a_best_stays_intact(
    folder, tmp_path, done_run, name
):
    shutil.copytree(done_run, tmp_path / "outside")
    before = remaining(tmp_path)
    done = prune(folder, "finished", name, "--keep", "best", "--yes")
    assert (done.returncode, remaining(tmp_path)) == (2, before)
    assert name in done.stderr


def test_prune_follows_no_links_to_other_checkpoints(folder, tmp_path, done_run):
    outside = tmp_path / "outside"
    shutil.copytree(done_run / "checkpoints", outside)
    runs.checkpoint(done_run, 15).symlink_to(outside / "step-00000030")
    os.link(outside / "step-00000010/manifest.json", outside / "hard")
    hard = runs.checkpoint(done_run, 10) / "manifest.json"
    hard.unlink()
    os.link(outside / "hard", hard)
    before = remaining(outside)
    words = "finished", "--keep", "best", "--yes"
    assert prune(folder, *words).returncode == 0
    assert saved(done_run) == [20]
    assert (remaining(outside), (outside / "hard").exists()) == (before, True)
    shutil.rmtree(done_run / "checkpoints")
    (done_run / "checkpoints").symlink_to(outside)
    assert prune(folder, *words).returncode == 2
    assert remaining(outside) == before


def test_a_run_with_a_damaged_best_or_continued_meanwhile_stays_intact(
    folder, done_run, monkeypatch
):
    words = "finished", "--keep", "best", "--yes"
    state = runs.checkpoint(done_run, 20) / "state.index"
    content = state.read_bytes()
    state.write_bytes(b"x" + content)
    assert prune(folder, *words).returncode == 2
    assert saved(done_run) == [10, 20, 30]
    state.write_bytes(content)
    (done_run / "pruned").mkdir()  # It cannot be marked.
    assert prune(folder, *words).returncode == 2
    assert saved(done_run) == [10, 20, 30]
    (done_run / "pruned").rmdir()
    locked = RunLock.__enter__

    def trained(lock):
        """A run that began and ended between the list and the lock."""
        os.utime(done_run / "metrics.jsonl", (2e9, 2e9))
        return locked(lock)

    for more in ([], words[1:3]):
        with monkeypatch.context() as patch:
            patch.setattr(RunLock, "__enter__", trained)
            os.utime(done_run / "metrics.jsonl", (1e9, 1e9))
            assert prune(folder, "finished", *more, "--yes").returncode == 2
        assert saved(done_run) == [10, 20, 30]


def test_a_crash_leaves_a_loadable_run_for_the_next_prune_to_finish(
    folder, done_run, monkeypatch
):
    words = "finished", "--keep", "best", "--yes"
    delete, rmtree = checkpoints.delete, shutil.rmtree
    for at in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(*((shutil, "rmtree"), (checkpoints, "delete"))[at], crash)
            with pytest.raises(KeyboardInterrupt):
                prune_here(folder, *words)
        assert 20 in saved(done_run)
        assert listed(folder)["finished"]["state"] == "finished"
    assert (checkpoints.delete, shutil.rmtree) == (delete, rmtree)
    assert prune(folder, *words).returncode == 0
    assert [path.name for path in (done_run / "checkpoints").iterdir()] == [
        "step-00000020"
    ]


def crash(*_, **__):
    raise KeyboardInterrupt


def prune_here(folder, *words):
    from cifar10.tools import runs as command

    parser = argparse.ArgumentParser()
    return command.main(parser, [str(folder), "--prune", *words])


def test_a_run_that_is_removed_only_in_part_is_named(folder, monkeypatch):
    def fail(path):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(UsageError, match=r"stopped-removed.*must remove.* busy"):
        prune_here(folder, "stopped", "--yes")
    assert "stopped" not in listed(folder)


def test_runs_are_chosen_by_age(folder, done_run):
    def age(name, days):
        for path in (folder / name).rglob("*"):
            os.utime(path, (time.time() - 86400 * days,) * 2)

    for name in ("finished", "stopped", "trials/killed"):
        age(name, 40)
    age("hours", 2)
    old = {"finished", "stopped", "trials/killed"}
    assert {*listed(folder, "--older_than", "30d")} == old
    assert {*listed(folder, "--older_than", "47h")} == {*old, "hours"}
    with RunLock(folder / "stopped"):
        before = remaining(folder)
        for words, age_of, code in (
            (["lost"], "30d", 2),
            (["stopped"], "30d", 2),
            ([], "1x", 2),
            ([], "30d", 0),
        ):
            done = prune(folder, *words, "--older_than", age_of)
            assert (done.returncode, remaining(folder)) == (code, before)
        done = call(folder, "--keep", "best", "--older_than", "30d", "--yes")
        assert (done.returncode, remaining(folder)) == (2, before), "without --prune"
        assert prune(folder, "--yes").returncode == 2, "no name and no age"
        words = "--older_than", "30d", "--yes"
        assert prune(folder, "--keep", "best", *words).returncode == 0
        assert saved(done_run) == [20]
        assert {*listed(folder)} >= old, "whole runs stay"
        assert prune(folder, *words).returncode == 0
    assert {*listed(folder)} & old == {"stopped"}, "which is in use"


def test_a_broken_run_does_not_stop_pruning_the_others(folder, tmp_path, done_run):
    """Chosen by age, as by cron: what is wrong with one is no reason for the others."""
    shutil.copytree(done_run, bad := folder / "a bad one")
    (bad / "checkpoints").rename(tmp_path / "moved")
    (bad / "checkpoints").symlink_to(tmp_path / "moved")
    done = prune(folder, "--keep", "best", "--older_than", "0h", "--yes")
    assert (done.returncode, "a bad one" in done.stderr) == (2, True)
    assert saved(done_run) == [20]
    assert len([*(tmp_path / "moved").glob("step-*")]) == 3


def test_a_pruned_run_is_not_continued_from_its_best_checkpoint(done_run):
    checkpoints.delete_all_but_best(done_run)
    run = starting.find_run(done_run)
    for longer in ({"max_steps": 60}, {"max_hours": 1.0}, {"stop_after_no_gain": 9}):
        wanted = RecordedRun.of(done_run, {**run.entries, **longer})
        with pytest.raises(UsageError, match="--initial_weights"):
            preflight.check_run(wanted, {}, fresh=False)
        assert preflight.check_run(wanted, {}, fresh=True) == run
    followed = FollowedRun(done_run, "/cpu:0", None)
    assert list(followed.follow(0.01, once=False)) == [20], "it ends"
