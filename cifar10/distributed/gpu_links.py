"""Checks in a child process that this machine's GPUs exchange data correctly.

With an IOMMU between GPUs, NCCL may wait for ever, or silently transfer wrong bytes.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cifar10 import files
from cifar10.errors import UsageError

_SECONDS, _SUMS = 60.0, 100
_GPUS = "nvidia-smi --query-gpu=uuid,driver_version --format=csv,noheader"
# As in tools/doctor.py.
_CHILD = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from cifar10.distributed import gpu_links; gpu_links.check_in_child(sys.argv[2:])"
)
# Environment variables that change what the GPUs do, by their beginnings.
_DECIDING = ("CUDA", "NCCL")
_OF_CHILD = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "2"}
ADVICE = "Give --variable_update towers, or set NCCL_P2P_DISABLE=1."


def refuse_faulty(devices: Sequence[str], version: str) -> None:
    """Refuses GPUs that fail the check."""
    # A passed check holds for its driver, this TensorFlow, and CUDA or NCCL settings.
    known_by = [version, *devices]
    known_by += sorted(f"{n}={v}" for n, v in os.environ.items() if n[:4] in _DECIDING)
    note = None
    with contextlib.suppress(OSError, subprocess.SubprocessError, RuntimeError):
        gpus = subprocess.check_output(_GPUS.split(), text=True, timeout=_SECONDS)  # noqa: S603 - NVIDIA's.
        note = files.note_path("gpus", repr([gpus, *known_by]).encode())
        if note.exists():
            return
    if why := find_fault(devices):
        raise UsageError(f"--variable_update mirrored: {why}. {ADVICE}")
    with contextlib.suppress(OSError):
        if note:
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            note.touch()


def find_fault(devices: Sequence[str]) -> str:
    """Returns the fault that a child process finds in devices; "" if none."""
    words = [str(Path(__file__).parents[2]), *devices]
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(  # noqa: S603 - this file.
            [sys.executable, "-P", "-c", _CHILD, *words],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_OF_CHILD},
        )
        try:
            code = child.wait(_SECONDS)
            end = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)  # In the driver it may never end.
            code, end = None, f"had not ended after {_SECONDS:g} s"
        said.seek(0)
        lines = said.read().splitlines()
    for part in _parts(devices):
        if f"{part}: 0 wrong numbers" not in lines:
            wrong = [line for line in lines if line.startswith(part)]
            return wrong[0] if wrong else f"{part}: the check {end}"
    return f"the check of the GPUs {end}" if code != 0 else ""


def _parts(devices: Sequence[str]) -> list[str]:
    pairs = [f"copies from {a} to {b}" for a in devices for b in devices if a != b]
    return [*pairs, "sums by NCCL"]


def check_in_child(devices: Sequence[str]) -> None:
    """Prints, for each part of the check, how many numbers were wrong."""
    for part, wrong in zip(_parts(devices), _count_wrong(devices), strict=True):
        print(f"{part}: {wrong} wrong numbers", flush=True)


def _count_wrong(devices: Sequence[str]) -> Iterator[Any]:
    import numpy as np
    import tensorflow as tf

    from cifar10.distributed.programs import Group

    right = np.random.default_rng(0).integers(2**12, size=2**20).astype(np.float32)
    sent, orders = [], []
    for device in devices:
        with tf.device(device):
            sent.append(tf.constant(right))
            orders.append(tf.Variable(0.0))
    for source, numbers in zip(devices, sent, strict=True):
        for target in devices:
            if target != source:
                with tf.device(target):
                    yield np.count_nonzero(tf.identity(numbers).numpy() != right)
    group = Group(devices)

    @tf.function(autograph=False)
    def total() -> list[tf.Tensor]:
        sums = []
        for device, numbers, order in zip(devices, sent, orders, strict=True):
            with tf.device(device):
                sums += group.sum([numbers], [order])
        return sums

    right *= len(devices)  # Sums of such whole numbers are exact.
    differ = (one.numpy() != right for _ in range(_SUMS) for one in total())
    yield sum(map(np.count_nonzero, differ))
