"""Two machines in two network namespaces, whose cable is pulled and put back."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cifar10.distributed import cluster

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0 or not shutil.which("ip"),
        reason="network namespaces need root and the program ip",
    ),
]

SCRIPT = Path(__file__).parent.parent / "train_multi_gpu.py"
STEPS = 120
ADDRESSES = ["10.77.0.1:2222", "10.77.0.2:2222"]


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)  # noqa: S607


@pytest.fixture
def machines():
    """Two namespaces with one cable between them."""
    names = [f"cifar10-{number}-{os.getpid()}" for number in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        cable = ["link", "add", "cable", "netns", names[0], "type", "veth"]
        ip(*cable, "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            host = address.partition(":")[0]
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)  # noqa: S607


def command(train_dir, stand_in_dir, *more):
    flags = {
        "num_gpus": 2,
        "batch_size": 8,
        "max_steps": STEPS,
        "checkpoint_steps": 20,
        "max_restarts": 3,
        "train_dir": train_dir,
        "data": "synthetic",
        "data_dir": stand_in_dir,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, str(SCRIPT), "--deterministic", *words, *more]


def start(machines, train_dir, stand_in_dir, delay=0.0):
    """Starts a worker on each machine; the second one `delay` seconds later."""
    processes = []
    for index, name in enumerate(machines):
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command(train_dir, stand_in_dir)],  # noqa: S607
                env={
                    **os.environ,
                    cluster.TF_CONFIG: cluster.tf_config(ADDRESSES, index),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        time.sleep(delay if index == 0 else 0)
    return processes


def final_files(train_dir):
    folder = train_dir / "checkpoints" / f"step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, stand_in_dir):
    """The same two workers, on this machine and left alone."""
    train_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = subprocess.run(
        command(train_dir, stand_in_dir, "--local_workers=2"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return train_dir


@pytest.mark.parametrize(
    ("seconds", "restarts"), [(0, False), (6, False), (20, None), (45, True)]
)
def test_an_interrupted_network_changes_nothing(
    machines, tmp_path, stand_in_dir, undisturbed, seconds, restarts
):
    train_dir = tmp_path / "run"
    processes = start(machines, train_dir, stand_in_dir, delay=30 if not seconds else 0)
    assert any("step 50," in line for line in processes[0].stdout)
    if seconds:
        for name in machines:
            ip("-n", name, "link", "set", "cable", "down")
        time.sleep(seconds)
        for name in machines:
            ip("-n", name, "link", "set", "cable", "up")
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    if restarts is not None:
        assert ["Restarting all" in one for one in said] == [restarts] * 2, said
    assert final_files(train_dir) == final_files(undisturbed)


def test_a_vanished_machine_is_missed_within_half_a_minute(
    machines, tmp_path, stand_in_dir
):
    processes = start(machines, tmp_path / "run", stand_in_dir)
    assert any("step 50," in line for line in processes[0].stdout)
    began = time.monotonic()
    ip("-n", machines[1], "link", "set", "cable", "down")
    lines = itertools.takewhile(
        lambda line: "has lost worker 1" not in line, processes[0].stdout
    )
    assert "Done." not in "".join(lines)
    waited = time.monotonic() - began
    for process in processes:
        process.kill()
        process.communicate()
    subprocess.run(["pkill", "-9", "-f", str(tmp_path)], check=False)  # noqa: S607
    assert 1 < waited < 30
