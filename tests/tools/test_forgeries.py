"""Forged runs: what an audit finds, lists as unchecked, or does not see."""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import pytest

import forging
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.tools import audit
from cifar10.training import train
from cifar10.training.replay import Replay
from forging import forge

PAGE = Path(__file__).parents[2] / "docs" / "auditing.md"
# What no command shows, or each computes anew, by file. Digests are the forger's own.
UNSHOWN = {
    "config.json": {"fresh"},
    "manifest.json": {"epoch", "position"},
    "eval/metrics.jsonl": {"part", "temperature"},
    "eval_val/metrics.jsonl": {"part", "temperature"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs of 12 steps with four checkpoints: one is exact, and one is not."""
    folder = tmp_path_factory.mktemp("forged")
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": rng.integers(0, 255, (count, 32, 32, 3), np.uint8)
        if kind == "x"
        else np.arange(count) % 2
        for kind in "xy"
        for part, count in (("train", 64), ("test", 24))
    }
    np.savez(folder / "set.npz", **arrays)
    values = {"data": str(folder / "set.npz"), "val_fraction": 0.25, "batch_size": 4}
    values |= {"num_gpus": 1, "max_steps": 12, "checkpoint_steps": 3, "eval_steps": 6}
    values |= {"log_frequency": 2, "keep_best": 0, "optimizer": "adam"}
    values |= {"learning_rate": 0.01, "model": "small_model:normalized"}
    for name in ("exact", "not exact"):
        exact = {"deterministic": name == "exact", "train_dir": str(folder / name)}
        train.train(Config(**values, **exact))
    return folder


@pytest.fixture
def run(made, tmp_path):
    return forging.copied(made / "exact", tmp_path / "run")


@pytest.fixture
def rounded(made, tmp_path):
    return forging.copied(made / "not exact", tmp_path / "run")


def audited(run, capsys, *words):
    """The report of an audit of all segments; None if it refuses the run."""
    capsys.readouterr()
    words = [str(run), "--segments", "9", "--json", *words]
    trusted = ["--trust_model", "small_model:normalized"]
    try:
        code = audit.main(argparse.ArgumentParser(), [*words, *trusted])
    except UsageError:
        return None
    found = json.loads(capsys.readouterr().out)
    assert code == bool(found["breaks"] or found["differences"])
    return found


def is_found(found):
    return found is None or bool(found["breaks"] or found["differences"])


def is_unchecked(found, file, name):
    for line in found["unchecked"]:
        names, _, rest = line.partition(" in ")
        if rest.startswith(f"{file}:") and name in names.split(", "):
            return True
    return False


def assert_noticed(run, capsys, draws):
    passed = []
    for seed in draws:
        random_one = random.Random(seed)
        forged = forging.copied(run, run.with_name(f"forged-{seed}"))
        file, name = forging.change_at_random(forged, random_one)
        forge(forged)
        found = audited(forged, capsys)
        if is_found(found) or name in UNSHOWN.get(file, ()):
            continue
        # A setting that changes no number: the run is what that setting gives, too.
        determines = file == "config.json" and name in Replay(forged).determining
        if not determines and not is_unchecked(found, file, name):
            passed.append((seed, file, name))
    assert not passed


@pytest.mark.parametrize("name", ["exact", "not exact"])
def test_an_honest_run_does_not_differ(made, capsys, name):
    found = audited(made / name, capsys)
    assert not is_found(found)
    assert found["exact"] is (name == "exact")
    assert found["bound"].partition(" ")[0] == ("0" if name == "exact" else "0.5")
    assert found["agree"] == 1.0
    assert "verified" not in json.dumps(found)


@pytest.mark.slow
def test_whatever_is_changed_is_noticed(run, capsys):
    assert_noticed(run, capsys, range(40))


@pytest.mark.soak
def test_whatever_is_changed_is_noticed_in_500_draws(run, capsys):
    assert_noticed(run, capsys, range(1000, 1500))
