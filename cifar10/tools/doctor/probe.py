"""What TensorFlow sees and whether it computes: tried in a process that may die.

The process tells what it begins and how it ended, so that the parent knows what it died
of; another one goes on with what is left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

from cifar10.tools.doctor import child

OPERATIONS = ("matrix product", "convolution")

# TensorFlow starts in 5 s; with a slow disk and eight GPUs in a minute.
_START_SECONDS = 180.0
# To end by itself, once it has said that it is finished.
_END_SECONDS = 10.0
_MOST_MESSAGES = 10
# The numbers are small integers, so that a right result is exact even in TF32.
_LARGEST_ERROR = 0.01


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU as TensorFlow sees it; capability (9, 0) is Hopper's."""

    name: str
    model: str
    capability: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class View:
    """What TensorFlow says of itself.

    Attributes:
        cuda: Version of CUDA that it was built for; empty for none.
        cudnn: The same of cuDNN.
        built_for: What it has kernels for, as in `sm_80` or `compute_90`.
        gpus: What it found.
    """

    cuda: str
    cudnn: str
    built_for: tuple[str, ...]
    gpus: tuple[Device, ...]


@dataclasses.dataclass(frozen=True)
class Computation:
    """One small computation.

    Attributes:
        device: As TensorFlow names it.
        operation: One of `OPERATIONS`.
        xla: Whether it was compiled with XLA.
        error: Why it failed; empty if the result was right.
        first_ms: Milliseconds of the first run, with compilation.
        ms: Milliseconds of the second.
    """

    device: str
    operation: str
    xla: bool
    error: str = ""
    first_ms: float = 0.0
    ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Probe:
    """What was tried.

    Attributes:
        view: What TensorFlow says; None if it did not start.
        error: Why it did not start, or the computations ended early.
        messages: What it wrote about CUDA and GPUs at its start.
        computations: In the order of the devices.
    """

    view: View | None
    error: str = ""
    messages: tuple[str, ...] = ()
    computations: tuple[Computation, ...] = ()


def view() -> View:
    """Asks TensorFlow, in this process."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    gpus = []
    for number, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(gpu)
        gpus.append(
            Device(
                f"/gpu:{number}",
                details.get("device_name", "unknown"),
                details.get("compute_capability"),
            )
        )
    return View(
        build.get("cuda_version", ""),
        build.get("cudnn_version", ""),
        tuple(build.get("cuda_compute_capabilities", ())),
        tuple(gpus),
    )


def run(seconds: float, *, compute: bool = True, module: str = __name__) -> Probe:
    """Starts TensorFlow in another process and lets it compute.

    Args:
        seconds: How long each computation may take.
        compute: Whether it computes at all.
        module: Where `main` of the child is.
    """
    seen: View | None = None
    messages: tuple[str, ...] = ()
    done: list[Computation] = []
    while True:
        trial, begun = _one_process(done, seconds, compute, module)
        seen, messages = seen or trial.view, messages or trial.messages
        done.extend(trial.computations)
        if not trial.error or begun is None:
            return Probe(seen, trial.error, messages, tuple(done))
        done.append(dataclasses.replace(begun, error=trial.error))


def _one_process(
    done: list[Computation], seconds: float, compute: bool, module: str
) -> tuple[Probe, Computation | None]:
    """Runs one process to its end, and returns what it had begun when it died."""
    asked = {"compute": compute, "done": [_key(computation) for computation in done]}
    heard: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = child.start(module, json.dumps(asked), stderr=stderr)
        try:
            error = _listen(process, seconds, heard)
        finally:
            status = child.end(process)
        stderr.seek(0)
        written = stderr.read()
    said = {kind: content for one in heard for kind, content in one.items()}
    if "finished" not in said and not error:
        error = child.last_words(status, written)
    begun = (
        Computation(**heard[-1]["begin"]) if heard and "begin" in heard[-1] else None
    )
    trial = Probe(
        _read_view(said["view"]) if "view" in said else None,
        error,
        _about_gpus(written),
        tuple(Computation(**one["end"]) for one in heard if "end" in one),
    )
    return trial, begun


def _listen(
    process: subprocess.Popen[str], seconds: float, heard: list[dict[str, Any]]
) -> str:
    """Hears what a child says until it ends; returns why we stopped before."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        limit = seconds if any("view" in one for one in heard) else _START_SECONDS
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            return f"no answer within {limit:g} s"
        if not line:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                return "" if heard and "finished" in heard[-1] else "it does not end"
            return ""
        heard.append(json.loads(line))


def _read_view(content: dict[str, Any]) -> View:
    gpus = tuple(
        Device(gpu["name"], gpu["model"], tuple(gpu["capability"] or ()) or None)
        for gpu in content.pop("gpus")
    )
    return View(**{**content, "built_for": tuple(content["built_for"]), "gpus": gpus})


def _about_gpus(written: str) -> tuple[str, ...]:
    """Returns warnings and errors that name CUDA or its libraries."""
    told = [
        line.strip()
        for line in written.splitlines()
        if re.search(r"dlopen|cuda|cudnn|gpu|nvidia", line, re.IGNORECASE)
    ]
    return tuple(dict.fromkeys(told[:_MOST_MESSAGES]))


def _key(computation: Computation) -> list[str | bool]:
    return [computation.device, computation.operation, computation.xla]


def main() -> None:
    """Computes, in a process of its own, and says on stdout what it does."""
    asked = json.loads(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Whatever libraries print to stdout.

    def say(**what: Any) -> None:
        print(json.dumps(what), file=channel, flush=True)

    seen = view()
    say(view=dataclasses.asdict(seen))
    for device in ("/cpu:0", *(gpu.name for gpu in seen.gpus)):
        for xla in (False, True):
            for operation in OPERATIONS:
                begun = Computation(device, operation, xla)
                if asked["compute"] and _key(begun) not in asked["done"]:
                    say(begin=dataclasses.asdict(begun))
                    say(end=dataclasses.asdict(_compute(begun)))
    say(finished=True)


def _compute(asked: Computation) -> Computation:
    """Computes twice on a device, and compares the result with NumPy's."""
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        # A training beside us may need the memory.
        tf.config.experimental.set_memory_growth(gpu, True)
    first, second, expected = _problem(asked.operation)

    # Halving is a kernel of TensorFlow's own, the rest NVIDIA's: one may fail alone.
    @tf.function(jit_compile=asked.xla)
    def compute(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        if asked.operation == "convolution":
            return tf.nn.conv2d(first, second, 1, "SAME") * 0.5
        return tf.matmul(first, second) * 0.5

    times = []
    try:
        with tf.device(asked.device):
            for _ in range(2):
                began = time.perf_counter()
                result = compute(tf.constant(first), tf.constant(second)).numpy()
                times.append(1000 * (time.perf_counter() - began))
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        return dataclasses.replace(
            asked, error=f"{type(error).__name__}: {error}"[:500]
        )
    difference = float(np.abs(result - expected).max())
    wrong = not difference <= _LARGEST_ERROR  # NaN is wrong too.
    return dataclasses.replace(
        asked,
        error=f"the result is wrong by {difference:g}" if wrong else "",
        first_ms=times[0],
        ms=times[1],
    )


def _problem(operation: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns two operands and half of their product, as NumPy computes it."""
    random = np.random.default_rng(0)

    def integers(*shape: int) -> np.ndarray:
        return random.integers(-2, 3, shape).astype(np.float32)

    if operation == "matrix product":
        first, second = integers(64, 64), integers(64, 64)
        return first, second, 0.5 * (first @ second)
    images, filters = integers(8, 24, 24, 3), integers(3, 3, 3, 16)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    products = [
        padded[:, row : row + 24, column : column + 24] @ filters[row, column]
        for row in range(3)
        for column in range(3)
    ]
    return images, filters, 0.5 * np.sum(products, axis=0)
