"""The examples and the notebook run as they are, with few steps, and say what is so."""

import contextlib
import importlib.util
import json
import os
import re
import sqlite3
import struct
import time

import numpy as np
import pytest

import runs
from cifar10.config.config import read_recipe
from cifar10.input import synthetic

pytestmark = pytest.mark.slow

EXAMPLES = runs.ROOT / "examples"


def needs(*packages):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    why = f"{', '.join(missing)}: make test-all installs the extra `examples`"
    return pytest.mark.skipif(bool(missing), reason=why)


@pytest.fixture
def environment(tmp_path, stand_in_dir):
    """That of a user without a network, who has the stand-in already."""
    cache = tmp_path / ".cache" / "cifar10"
    cache.mkdir(parents=True)
    (cache / synthetic.FOLDER).symlink_to(stand_in_dir / synthetic.FOLDER)
    return {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(runs.ROOT),
        "CIFAR10_DATA_DIR": "",
        "https_proxy": "http://127.0.0.1:1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }


@pytest.fixture
def example(tmp_path, environment):
    def run(name, *words, **variables):
        env = {**environment, **variables}
        done = runs.run(EXAMPLES / name, *words, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_own_model_example_trains_and_resumes(example):
    assert "step 6: " in example("01_own_model.py", 6)
    again = example("01_own_model.py", 9)
    assert "from step 6" in again
    assert "python:small" in again


@needs("sklearn")
def test_the_own_data_example_learns_the_digits(example):
    printed = example("02_own_data.py", 300)
    best = re.search(r"^best: ([\d.]+)% at step", printed, re.MULTILINE)
    assert float(best[1]) > 90, "digits are easy"


@needs("mlflow")
def test_a_resumed_run_continues_its_record_in_mlflow(example, tmp_path):
    database = tmp_path / "mlflow.db"  # What a server keeps.
    for steps in (10, 20):
        example("03_mlflow.py", steps, MLFLOW_TRACKING_URI=f"sqlite:///{database}")
    with contextlib.closing(sqlite3.connect(database)) as recorded:
        (run,) = recorded.execute("SELECT run_uuid, status FROM runs")
        asked = "SELECT step, value FROM metrics WHERE key = 'train/total_loss'"
        history = dict(recorded.execute(asked))
    train_dir = tmp_path / "runs" / "mlflow"
    assert run == ((train_dir / "mlflow_run_id").read_text(), "FINISHED")
    losses = {line["step"]: line["total_loss"] for line in runs.logged(train_dir)}
    assert history == pytest.approx(losses)


def wandb_history(log):
    """Returns what a file of wandb holds, by step: blocks of records, as LevelDB's."""
    from wandb.proto import wandb_internal_pb2

    content, place, whole, found = log.read_bytes(), 7, b"", {}
    while place + 7 <= len(content):
        if 32_768 - place % 32_768 < 7:
            place += -place % 32_768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # A whole record, or the last part of one.
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if items:
                found.setdefault(record.history.step.num, {}).update(items)
    return found


@needs("wandb")
def test_a_resumed_run_continues_its_record_in_wandb(example, tmp_path):
    for steps in (10, 20):
        example("09_trackers.py", steps, "wandb", WANDB_MODE="offline")
    train_dir = tmp_path / "runs" / "tracked"
    name = (train_dir / "wandb_run").read_text()
    logs = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    assert len(logs) == 2, "both parts are of one run"
    history = {step: row for log in logs for step, row in wandb_history(log).items()}
    losses = {line["step"]: line["total_loss"] for line in runs.logged(train_dir)}
    found = {step: row["train/total_loss"] for step, row in history.items()}
    assert found == pytest.approx(losses)
    scores = {
        line["step"]: line["precision @ 1"] for line in runs.logged(train_dir / "eval")
    }
    assert scores == {step: row["test/precision @ 1"] for step, row in history.items()}


@needs("optuna")
def test_a_search_continues_and_ends_in_a_recipe(example, tmp_path):
    first = example("04_optuna.py", 1, 4)
    assert "runs/search/best.toml" in first
    example("04_optuna.py", 1, 4)
    trials = sorted(path.name for path in (tmp_path / "runs/search").glob("trial_*"))
    assert trials == ["trial_0", "trial_1"]
    folders = [tmp_path / "runs/search" / name for name in trials]
    rates = [
        json.loads((folder / "config.json").read_text())["learning_rate"]
        for folder in folders
    ]
    assert rates[0] != rates[1]
    best = read_recipe(str(tmp_path / "runs/search/best.toml"))
    assert best["learning_rate"] in rates


def test_a_copy_answers_while_the_model_is_trained(example):
    printed = example("05_follow.py", 30)
    steps = [*map(int, re.findall(r"^weights of step (\d+):", printed, re.MULTILINE))]
    assert steps == sorted(set(steps))
    assert steps[-1] == 30
    assert all(step % 10 == 0 for step in steps)


@needs("matplotlib")
def test_sections_train_the_same_and_take_less_memory(example, tmp_path):
    printed = example("07_sections.py", 3)
    differs = re.search(r"\nlargest difference of the losses: (\S+)\n", printed)
    assert float(differs[1]) < 1e-4
    assert re.search(r" -[\d.]+% memory", printed)
    assert (tmp_path / "sections.png").stat().st_size > 1_000


def test_the_rate_finder_rises_to_its_limit_and_suggests_a_lower_rate(
    example, tmp_path
):
    printed = example("08_find_rate.py", 20, 0.2)
    highest = re.search(r"loss (.*) up to a rate of (\S+)\. ", printed)
    assert (highest[1], float(highest[2])) == ("did not explode", 0.2)
    assert 0 < float(printed.split("--learning_rate")[1]) < 0.07
    assert "exploded" in example("08_find_rate.py", 20, 1e6)
    assert not (tmp_path / "runs").exists()


@needs("ray")
def test_ray_replaces_a_lost_worker_and_the_run_ends_as_without_ray(
    environment, tmp_path
):
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_worker_niceness"] = "0"  # Else a busy machine starves them.
    run, output = tmp_path / "runs" / "ray", tmp_path / "output"
    program = [EXAMPLES / "06_ray.py", "12"]
    with (
        output.open("w") as file,
        runs.started(
            *program, cwd=tmp_path, env=environment, stdout=file, stderr=file
        ) as process,
    ):
        while not runs.checkpoint(run, 1).exists():
            assert process.poll() is None, output.read_text()
            time.sleep(0.05)
        second = re.search(r"pid=(\d+)\) world_rank=1", output.read_text())
        os.kill(int(second[1]), 9)
        assert process.wait() == 0, output.read_text()
    printed = output.read_text()
    assert "Resuming from step" in printed
    assert "Done." in printed
    plain = [runs.ROOT / "train_multi_gpu.py", "--local_workers", 2, "--max_steps", 12]
    plain += ["--train_dir", tmp_path / "plain"]
    done = runs.run(*plain, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    ended = [
        runs.variables(runs.checkpoint(of, 12)) for of in (run, tmp_path / "plain")
    ]
    assert runs.largest_difference(*ended) < 1e-4


@needs("nbclient", "nbformat", "ipykernel", "matplotlib")
def test_the_notebook_runs(environment, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "first-run.ipynb", as_version=4)
    (chosen,) = (cell for cell in notebook.cells if "steps = 1000" in cell.source)
    chosen.source = chosen.source.replace("1000", "10")
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept out of git"
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    printed = "".join(out.get("text", "") for out in outputs)
    assert "Done." in printed
    assert "Successfully installed" not in printed
    shown = [out["data"] for out in outputs if "data" in out]
    assert sum("image/png" in data for data in shown) == 2
    assert any("'precision @ 1'" in data["text/plain"] for data in shown)


def test_the_notebook_installs_from_the_clone_or_the_address(tmp_path, monkeypatch):
    cells = json.loads((EXAMPLES / "first-run.ipynb").read_text())["cells"]
    (cell,) = ("".join(one["source"]) for one in cells if "%pip" in str(one["source"]))
    code = re.sub("%pip (.*)", r'install(f"\1")', cell)  # IPython's own command.
    installed = []
    scope = {"install": installed.append, "repository": ""}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(EXAMPLES)
    exec(code, scope)  # noqa: S102
    assert f" {runs.ROOT} " in installed.pop()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="repository"):
        exec(code, scope)  # noqa: S102
    assert not installed
    scope["repository"] = "https://example.com/a.git"
    exec(code, scope)  # noqa: S102
    assert " git+https://example.com/a.git " in installed.pop()
    # The kernel has another NumPy than the one that pip has just installed.
    monkeypatch.setattr(np, "__version__", "1.26.4")
    with pytest.raises(SystemExit, match="Restart"):
        exec(code, scope)  # noqa: S102
