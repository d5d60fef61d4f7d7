"""`make train` installs what fits, trains once and says what comes next."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import runs
from runs import ROOT


def make(*words, installed=True, **environ):
    """Runs make; it takes the installation as it is where that is `installed`."""
    command = ["make", *(["-o", ".venv/installed"] if installed else []), *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_second_make_train_suggests_another_directory(tmp_path):
    (tmp_path / "report.html").touch()
    done = make("train", f"TRAIN_DIR={tmp_path}", "BIN=/nonexistent")
    assert done.returncode == 0, done.stderr
    assert f"make train TRAIN_DIR={tmp_path}.1" in done.stdout


def smi(folder, script):
    """Puts an nvidia-smi into a folder; returns a PATH that finds it first."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_installed_libraries_fit_the_gpus(tmp_path):
    """Those older than Turing need an older cuDNN, which serves newer ones too."""
    for capabilities, extras in (
        (["7.5", "12.0"], "dev,gpu"),
        (["8.6", "7.0"], "dev,gpu-old"),
        ([], "dev"),
    ):
        lines = "\n".join(f"echo {each}" for each in capabilities)
        path = smi(tmp_path, f'case "$*" in *compute_cap*) {lines or "exit 9"} ;; esac')
        shown = make("-n", "-B", ".venv/installed", PATH=path, installed=False).stdout
        assert f"--editable '.[{extras}]'" in shown


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ((3, 10, 13), False),
        ((3, 11, 3), False),
        ((3, 11, 4), True),
        ((3, 13, 9), True),
        ((3, 14, 0), False),
        (None, False),
    ],
)
def test_an_unsuitable_python_is_refused_before_anything_is_made(
    tmp_path, version, fits
):
    python, text = tmp_path / "python", ".".join(map(str, version or ()))
    if version:  # A fake of this version, which makes no venv; else there is none.
        pretend = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
        python.write_text(
            f"#!/bin/sh\necho CALLED $* >> {tmp_path}/calls\n"
            f'case $1 in -c) exec {sys.executable} -c "{pretend}" "$2" ;;\n'
            f"--version) echo Python {text} ;; *) exit 7 ;; esac\n"
        )
        python.chmod(0o755)
    done = make("-B", ".venv/installed", f"PYTHON={python}", installed=False)
    assert done.returncode == 2
    assert ("uv python install 3.13" in done.stderr) is not fits
    assert fits or text in done.stderr
    if version:
        assert ("-m venv" in (tmp_path / "calls").read_text()) is fits
        needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert SpecifierSet(needs["requires-python"]).contains(text) is fits


@pytest.mark.parametrize(
    "script", ["echo 'NVIDIA-SMI has failed'; exit 9", "exec sleep 1000", "echo 8.0"]
)
def test_make_train_uses_the_gpus_only_with_a_working_driver(tmp_path, script):
    """The programs note how they are called, and which GPUs they see."""
    answers = script == "echo 8.0"
    driver, python = tmp_path / "nvidia0", tmp_path / "python"
    driver.touch()
    python.write_text('#!/bin/sh\necho "CALLED $CUDA_VISIBLE_DEVICES: $*"\n')
    python.chmod(0o755)
    done = make(
        "train",
        f"TRAIN_DIR={tmp_path / 'run'}",
        f"BIN={tmp_path}",
        f"DRIVER={driver}",
        "SMI_SECONDS=0.2",
        PATH=smi(tmp_path, script),
        CUDA_VISIBLE_DEVICES="0",
    )
    assert done.returncode == 0, done.stderr
    hidden, towers = ("0", "") if answers else ("-1", "--num_gpus 4 ")
    assert f"CALLED {hidden}: train_multi_gpu.py {towers}" in done.stdout
    assert ("doctor" in done.stdout) is not answers
    way_on = done.stdout.rpartition("Next")[2]
    assert ("CUDA_VISIBLE_DEVICES=-1 python" in way_on) is not answers


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
def test_make_train_works_without_a_network(tmp_path):
    shown = make_train_without_a_network(tmp_path, "STEPS=20")
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert len(runs.logged(tmp_path / "run" / "eval")) > 1, "no curve, but a dot"
    last = shown.rpartition("SYNTHETIC")[2]
    for part in ("chance", "report.html", "train_multi_gpu", "eval.py", "tensorboard"):
        assert part in last


@pytest.mark.soak
def test_make_train_learns_the_stand_in(tmp_path):
    shown = make_train_without_a_network(tmp_path)
    # What the stand-in is made for: neither a lottery nor a foregone conclusion.
    score = re.search(r"step 750: precision @ 1 = (\S+)", shown)[1]
    assert 0.8 < float(score) < 0.97
