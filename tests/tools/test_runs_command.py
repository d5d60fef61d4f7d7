"""`python -m cifar10 runs`: the state of each run, and what --prune removes."""

import inspect
import json
import os
import shutil
import sys

import pytest

import runs
from cifar10.run_directory import scores
from cifar10.run_directory.lock import RunLock
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


def test_each_run_has_the_state_that_its_files_tell(folder):
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
    # A training that is refused touches the lock, and a report is no news either.
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
    assert call(folder, "--yes").returncode == 0
    assert remaining(folder) == before
    assert call(*words, "--yes").returncode == 0
    gone = "lost", "no_config", "trials/killed"
    assert remaining(folder) == [name for name in before if not name.startswith(gone)]
    assert (outside / "picture.png").exists()


@pytest.mark.parametrize(
    "name", ["training", "link", "other", "trials", "../outside", "outer"]
)
def test_prune_removes_nothing_if_one_name_is_in_use_or_no_run(folder, tmp_path, name):
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


def test_a_training_that_begins_meanwhile_keeps_its_run(folder, monkeypatch):
    from cifar10.tools import runs as command

    monkeypatch.setattr(command, "is_locked", lambda _: False)
    with RunLock(folder / "stopped"):
        assert call(folder, "--prune", "stopped", "--yes").returncode == 2
    assert (folder / "stopped/config.json").exists()


def test_a_missing_directory_and_one_without_runs_have_different_messages(tmp_path):
    assert listed(tmp_path) == {}
    assert call(tmp_path / "none").returncode == 2


def test_folders_nested_deeper_than_calls_are_named(folder):
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
