"""GPUs that hang, lie or die together are found out in another process."""

import subprocess
import time

import numpy as np
import pytest
import tensorflow as tf

from cifar10.distributed import gpu_links
from cifar10.distributed.workers import Workers
from cifar10.errors import UsageError
from cifar10.process.signals import StopSignals
from cifar10.towers.devices import Placement

TWO = ("/gpu:0", "/gpu:1")
PLACEMENT = Placement(TWO, False, "two GPUs", ("NVIDIA H100",))
FIRST = "copies from /gpu:0 to /gpu:1: 0 wrong numbers"
LINES = [FIRST, "copies from /gpu:1 to /gpu:0: 0 wrong numbers"]
LINES.append("sums by NCCL: 0 wrong numbers")


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Makes the child print lines and then do something; returns its starts."""
    starts = tmp_path / "starts"
    starts.touch()

    def child(lines, end=""):
        note = f"open({str(starts)!r}, 'a').write('x'); "
        shown = f"print({chr(10).join(lines)!r}, flush=True); "
        code = f"import os, sys, time; {note}{shown}{end}"
        monkeypatch.setattr(gpu_links, "_CHILD", code)
        return starts

    return child


@pytest.fixture
def nvidia_smi(monkeypatch):
    """Makes nvidia-smi answer; returns a function that changes its answer."""

    def answer(text):
        monkeypatch.setattr(gpu_links.subprocess, "check_output", lambda *_, **__: text)

    answer(f"GPU-{time.time()}, 570.1")  # GPUs that were never checked.
    return answer


def connect():
    return Workers().connect("mirrored", PLACEMENT, StopSignals())


@pytest.mark.parametrize(
    ("lines", "end", "why"),
    [
        ([], "time.sleep(60)", "copies from /gpu:0 to /gpu:1: .* not ended after 2 s"),
        (LINES[:2], "time.sleep(60)", "sums by NCCL: .* not ended after 2 s"),
        (LINES, "time.sleep(60)", "GPUs had not ended after 2 s"),
        ([*LINES[:2], LINES[2].replace("0", "7")], "", "NCCL: 7 wrong numbers"),
        ([LINES[0].replace(": 0", ": 10"), *LINES[1:]], "", "gpu:1: 10 wrong numbers"),
        (LINES[1:], "", "from /gpu:0 to /gpu:1: .* exit code 0"),
        (LINES[:1], "os.kill(os.getpid(), 6)", "from /gpu:1 to /gpu:0: .* code -6"),
        (LINES, "sys.exit(3)", "exit code 3"),
    ],
)
@pytest.mark.usefixtures("nvidia_smi")
def test_hanging_incorrect_and_crashing_gpus_are_refused(
    child, monkeypatch, lines, end, why
):
    monkeypatch.setattr(gpu_links, "_SECONDS", 2.0)
    starts = child(lines, end)
    for number in range(1, 3):
        with pytest.raises(UsageError, match=why) as refused:
            connect()
        assert "--variable_update towers" in str(refused.value)
        assert len(starts.read_text()) == number, "a failure is not kept"
    assert Workers().connect("auto", PLACEMENT, StopSignals()) == (None, 1)
    assert len(starts.read_text()) == 2


def test_the_faulty_pair_of_many_gpus_is_named(child):
    wrong = "copies from /gpu:0 to /gpu:1: 5 wrong numbers"
    child([wrong, "copies from /gpu:0 to /gpu:10: 0 wrong numbers"])
    assert gpu_links.find_fault(("/gpu:0", "/gpu:1", "/gpu:10")) == wrong


def test_passing_gpus_are_checked_once_per_driver(child, nvidia_smi, monkeypatch):
    starts = child(LINES)
    for _ in range(2):
        assert connect() == (None, 2)
    assert len(starts.read_text()) == 1
    nvidia_smi(f"GPU-{time.time()}, 580.1")
    connect()
    assert len(starts.read_text()) == 2
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    connect()
    assert len(starts.read_text()) == 3

    def fail(*_, **__):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(gpu_links.subprocess, "check_output", fail)
    for _ in range(2):
        connect()
    assert len(starts.read_text()) == 5, "nothing to know the GPUs by"


def test_the_check_itself_finds_wrong_copies_and_sums(four_cpus, monkeypatch, capsys):
    monkeypatch.setattr(gpu_links, "_SUMS", 2)
    gpu_links.check_in_child(four_cpus[:3])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 7
    assert all(line.endswith(": 0 wrong numbers") for line in said)

    reduce, copy = tf.raw_ops.CollectiveReduceV2, tf.identity
    one = np.zeros(2**20, np.float32)
    one[5] = 1.0
    monkeypatch.setattr(tf.raw_ops, "CollectiveReduceV2", lambda **a: reduce(**a) + one)
    monkeypatch.setattr(tf, "identity", lambda numbers: copy(numbers) + one)
    gpu_links.check_in_child(four_cpus[:3])
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == [
        *["1 wrong numbers"] * 6,
        "6 wrong numbers",
    ]


def test_a_check_that_survives_its_end_is_named_without_waiting_for_it(monkeypatch):
    class Stuck:
        def __init__(self, *_, **__):
            self.kill = list

        def wait(self, seconds):
            raise subprocess.TimeoutExpired("check", seconds)

    monkeypatch.setattr(gpu_links.subprocess, "Popen", Stuck)
    assert "had not ended" in gpu_links.find_fault(TWO)
