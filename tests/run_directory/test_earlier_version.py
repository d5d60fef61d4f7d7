"""A run that version 1.0.0 wrote is resumed, scored, replayed and audited by this one.

    python train.py --data pictures.npz --model resnet --depth 3 --width 2 \
        --distortions flip_translate --batch_size 8 --max_steps 6 --checkpoint_steps 2 \
        --log_frequency 1 --summary_steps 100000 --eval_steps 2 --deterministic

The checkpoint of step 2 and the event files are left out.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config import run_config

WRITTEN = Path(__file__).parent / "version_1_0_0"


@pytest.fixture
def run(tmp_path):
    """The run, as if this user had trained it here."""
    run = shutil.copytree(WRITTEN, tmp_path / "run")
    path = run / "config.json"
    entries = json.loads(path.read_text())
    places = {"train_dir": str(run), "data_dir": str(WRITTEN / "pictures.npz")}
    path.write_text(json.dumps({**entries, **places}))
    run_config.mark_as_own(path.read_bytes())
    return run


def values(run, step):
    """Returns the values of a checkpoint, by name."""
    found = tf.train.load_checkpoint(str(runs.checkpoint(run, step) / "state"))
    names = [name for name in found.get_variable_to_shape_map() if "/.ATTR" in name]
    return {name: found.get_tensor(name) for name in names}


def test_an_earlier_run_resumes_and_reaches_the_same_end(run):
    shutil.rmtree(runs.checkpoint(run, 6))
    done = runs.call("train.py", "--resume", run)
    assert "from step 4 " in done.stdout, done.stderr
    ended, ends = values(WRITTEN, 6), values(run, 6)
    for name, value in ended.items():
        if value.dtype.kind == "f":  # Other processors round otherwise.
            np.testing.assert_allclose(ends[name], value, 1e-3, 1e-5, err_msg=name)
    (before, after) = (runs.logged(one)[-1] for one in (WRITTEN, run))
    assert (before["step"], after["step"]) == (6, 6)
    assert after["cross_entropy"] == pytest.approx(before["cross_entropy"], rel=1e-3)


def test_the_scores_of_an_earlier_run_have_not_changed(run):
    done = runs.call("eval.py", "--step", 6, "--json", "--train_dir", run)
    lines = (WRITTEN / "eval" / "metrics.jsonl").read_text().splitlines()
    then, now = json.loads(lines[-1]), json.loads(done.stdout)
    for name in ("step", "num_examples", "precision @ 1"):
        assert now[name] == then[name], done.stderr
    assert now["cross_entropy"] == pytest.approx(then["cross_entropy"], rel=1e-4)


def test_an_earlier_run_is_replayed_audited_and_listed(run):
    done = runs.call("cifar10/__main__.py", "replay", run, "--steps", "5:6")
    assert done.returncode == 0, done.stdout + done.stderr
    done = runs.call("cifar10/__main__.py", "audit", run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "an earlier version wrote these checkpoints" in done.stdout
    done = runs.call("cifar10/__main__.py", "runs", run.parent)
    assert "finished" in done.stdout, done.stderr
    done = runs.call("cifar10/__main__.py", "report", run)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_earlier_run_is_replayed_and_audited_after_a_resume(run):
    """Whose lines hold more from there on."""
    done = runs.call("train.py", "--resume", run, "--max_steps", 8)
    assert "from step 6 " in done.stdout, done.stderr
    assert ["penalties" in runs.logged(run)[at] for at in (0, -1)] == [False, True]
    done = runs.call("cifar10/__main__.py", "replay", run, "--steps", "1:8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Steps 1 to 8 are equal" in done.stdout
    done = runs.call("cifar10/__main__.py", "audit", run, "--segments", 9)
    assert done.returncode == 0, done.stdout + done.stderr
