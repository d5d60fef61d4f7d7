"""`make` shows what there is, and `make train` trains once and says what comes next."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT


def make(*words, **environ):
    # The installation is taken as it is.
    command = ["make", "-o", ".venv/installed", *map(str, words)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_make_alone_names_all_targets():
    phony = re.search(r"^\.PHONY:(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[
        1
    ]
    shown = make().stdout
    for target in set(phony.split()) - {"help"}:
        assert re.search(rf"^make {target}\b", shown, re.MULTILINE)


def test_a_second_make_train_says_what_to_do(tmp_path):
    (tmp_path / "report.html").touch()
    done = make("train", f"TRAIN_DIR={tmp_path}", "BIN=/nonexistent")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path} was trained before" in done.stdout
    assert f"make train TRAIN_DIR={tmp_path}.1" in done.stdout
    assert "precision" not in done.stdout


def make_train_without_a_network(tmp_path, *words):
    done = make(
        "train",
        f"TRAIN_DIR={tmp_path / 'run'}",
        f"BIN={Path(sys.executable).parent}",
        *words,
        HOME=str(tmp_path),
        CIFAR10_DATA_DIR="",
        https_proxy="http://127.0.0.1:1",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_make_train_without_a_network(tmp_path):
    shown = make_train_without_a_network(tmp_path, "STEPS=20")
    assert "was trained before" not in shown
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    last = shown.rpartition("SYNTHETIC")[2]
    for part in ("chance", "report.html", "train_multi_gpu", "eval.py", "tensorboard"):
        assert part in last


@pytest.mark.soak
def test_make_train_learns_the_stand_in(tmp_path):
    shown = make_train_without_a_network(tmp_path)
    # What the stand-in is made for: neither a lottery nor a foregone conclusion.
    assert "UNSTABLE" not in shown
    score = re.search(r"step 750: precision @ 1 = (\S+)", shown)[1]
    assert 0.8 < float(score) < 0.97
