"""Shared by all tests: four logical devices, real data where there is some."""

import gc
import os
import signal
from pathlib import Path

import pytest

from cifar10.input import synthetic

# Before TensorFlow is imported anywhere.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # As with --deterministic.
gc.disable()  # Imports leave no garbage.


def pytest_configure(config):
    """Hides GPUs, so that towers are tested on the CPU; not from `pytest -m gpu`."""
    if not config.getoption("markexpr").startswith("gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def pytest_collection_finish():
    """Searches rarely for cycles, among millions of objects: 6 % of the time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def four_cpus():
    """Splits the CPU once: towers are tested on logical devices.

    A GPU that is not hidden is split too.
    """
    import tensorflow as tf

    from cifar10.towers import devices

    # Some tests train with --deterministic, which TensorFlow cannot take back.
    tf.config.experimental.enable_op_determinism()
    devices._split_cpu(4)
    devices._take("the tests", tf.config.list_physical_devices("GPU")[:1], 4)
    # Whatever test comes first, it must not split them otherwise.
    tf.config.list_logical_devices()
    return tuple(f"/cpu:{number}" for number in range(4))


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory):
    """Keeps what the tests note and prepare out of the user's home."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def earlier_event_files(monkeypatch):
    """Makes event files a second older where a resume would wait for the next one."""

    from cifar10.run_directory import logs

    def make_older(events):
        for path in sorted(events.glob("events.out.tfevents.*")):
            words = path.name.split(".")
            words[3] = f"{int(words[3]) - 1:010d}"
            path.rename(path.with_name(".".join(words)))

    monkeypatch.setattr(logs, "wait_for_later_second", make_older)


# Seconds until a test that hangs is ended, on a machine several times slower than most.
LIMITS = {"soak": 0, "slow": 900, "gpu": 900, "peers": 3600}


@pytest.fixture(autouse=True)
def time_limit(request):
    """Ends a test that waits for what will never come, which no other limit would."""

    def fail(*_):
        pytest.fail("the test hangs")

    marks = (mark.name for mark in request.node.iter_markers())
    limit = next((LIMITS[name] for name in marks if name in LIMITS), 300)
    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit, 60.0)  # Once more: clean-up hangs too.
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def real_data_dir():
    """The folder of the real CIFAR-10, from CIFAR10_DATA_DIR."""
    directory = os.environ.get("CIFAR10_DATA_DIR")
    if not directory or not Path(directory).is_dir():
        pytest.skip("CIFAR10_DATA_DIR does not name a folder with the real CIFAR-10")
    return Path(directory).resolve()


@pytest.fixture(scope="session")
def stand_in_dir(tmp_path_factory):
    """A data folder with the stand-in, generated once for all tests."""
    directory = tmp_path_factory.mktemp("data")
    synthetic.generate(directory / synthetic.FOLDER)
    return directory
