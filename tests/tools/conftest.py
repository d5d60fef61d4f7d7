"""A run of a small model, which several tools take."""

import pytest

from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES
from cifar10.run_directory import scores
from small_runs import MODELS, describe, save


@pytest.fixture(scope="module")
def registered():
    """Makes the small models known by their names."""
    with pytest.MonkeyPatch.context() as patch:
        for name, build in MODELS.items():
            patch.setitem(ARCHITECTURES, name, Architecture(build))
        yield


@pytest.fixture(scope="module")
def small_run(registered, tmp_path_factory):
    """A run with checkpoints of steps 10 and 20, the first of which is the best."""
    del registered
    run_dir = tmp_path_factory.mktemp("small") / "run"
    describe(run_dir)
    save(run_dir, 10)
    save(run_dir, 20)
    (run_dir / "eval").mkdir()
    scores.append(run_dir / "eval", 10, {"precision @ 1": 0.5}, 100)
    return run_dir
