"""What is built to be installed: complete, without tests, and able to run by itself."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata

import pytest

from cifar10.process import invocation
from runs import ROOT

pytestmark = pytest.mark.slow

BUILD = (
    "from setuptools import build_meta as b; b.build_sdist('{0}'); b.build_wheel('{0}')"
)


def run(*command, cwd, **environ):
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the package is built from, and of what stays out of it."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "train.py"):
        shutil.copy(ROOT / name, copy)
    for name in ("cifar10", "tests", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    """The folder with the wheel and the source distribution; no network is needed."""
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-c", BUILD.format(folder), cwd=source)
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The folder that the wheel is installed into, and nothing that it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps"]
    run(*pip, "--target", folder, wheel, cwd=built)
    return folder


def test_distributions_hold_the_package_and_nothing_else(source, built):
    paths = (source / "cifar10").rglob("*")
    files = {path.relative_to(source).as_posix() for path in paths if path.is_file()}
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert files > {
        "cifar10/py.typed",
        "cifar10/config/recipes/fast.toml",
        "cifar10/tools/report.css",
        "cifar10/tools/report.html",
    }
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= files | {"README.md", "LICENSE", "pyproject.toml"}
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def test_the_installed_command_trains_restarts_and_scores(installed, tmp_path):
    """In an empty folder, where neither scripts nor a checkout are beside."""
    cifar10 = installed / "bin" / "cifar10"

    def call(*words):
        where = {"PYTHONPATH": str(installed), "CIFAR10_DATA_DIR": str(tmp_path)}
        return run(sys.executable, cifar10, *words, cwd=tmp_path, **where)

    (info,) = installed.glob("*.dist-info")
    version = metadata.PathDistribution(info).version
    sources = invocation.package_version().partition(" ")[
        2
    ]  # They are those of the checkout.
    assert call("--version") == f"cifar10-multi-gpu {version} {sources}\n"
    assert "python" in call("doctor")
    # By a child process, which has to find the package and its recipes.
    flags = {"max_restarts": 1, "recipe": "resnet", "depth": 3, "width": 4}
    flags |= {"train_dir": "a", "data": "synthetic", "max_steps": 2, "batch_size": 8}
    said = call("train", *(f"--{name}={value}" for name, value in flags.items()))
    score = f"cifar10 eval --run_once --train_dir {tmp_path}/a"
    assert f"  score it:  {score}\n" in said
    assert "precision @ 1 = " in call(*score.split()[1:], "--num_examples", 100)
