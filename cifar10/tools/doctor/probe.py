"""What TensorFlow sees and whether it computes, tried in a child process.

A process announces each computation and then reports its result, so that the cause of
its death is known; another process continues with the computations that are left.
"""

import dataclasses
import json
import os
import re
import sys
import time
from typing import Any

from cifar10.tools import child_process

OPERATIONS = ("matrix product", "convolution")

# The numbers are small integers, so that a right result is exact even in TF32.
_LARGEST_ERROR = 0.01
# The error of a computation until its result is reported.
_UNFINISHED = "not finished"


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU as TensorFlow sees it; an unknown capability is empty."""

    name: str
    model: str
    capability: str


@dataclasses.dataclass(frozen=True)
class Computation:
    """One of `OPERATIONS` on a device; no error if the result was right."""

    device: str
    operation: str
    xla: bool
    error: str = ""
    ms: float = 0.0


@dataclasses.dataclass(frozen=True)
class Probe:
    """What TensorFlow says of itself, and what it computes; unknown texts are empty."""

    cuda: str = ""
    cudnn: str = ""
    built_for: tuple[str, ...] = ()  # Compute capabilities, oldest first.
    gpus: tuple[Device, ...] = ()
    error: str = ""  # Why TensorFlow does not start.
    message: str = ""  # Its last one about CUDA or GPUs.
    computations: tuple[Computation, ...] = ()


def look() -> Probe:
    """Asks the TensorFlow of this process, and computes nothing."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    gpus = []
    for index, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ())))
        gpus.append(Device(f"/gpu:{index}", details.get("device_name", ""), capability))
    # Such as sm_80 and compute_90.
    names = build.get("cuda_compute_capabilities", ())
    digits = sorted({int(re.sub(r"\D", "", name)) for name in names})
    return Probe(
        cuda=build.get("cuda_version", ""),
        cudnn=build.get("cudnn_version", ""),
        built_for=tuple(f"{number // 10}.{number % 10}" for number in digits),
        gpus=tuple(gpus),
    )


def run(seconds: float, *, compute: bool = True, module: str = __name__) -> Probe:
    """Starts TensorFlow in a child process, and computes on each device.

    A computation may take `seconds`. `module` has the `main()` of the child process.
    """
    found: Probe | None = None
    computations: list[Computation] = []
    while True:
        output = child_process.run(
            module, str(int(compute)), str(len(computations)), seconds=seconds
        )
        if found is None:
            found = _found(output)
        reported = [Computation(**message) for message in output.messages[1:]]
        computations += [result for result in reported if result.error != _UNFINISHED]
        if not reported or reported[-1].error != _UNFINISHED:
            return dataclasses.replace(found, computations=tuple(computations))
        computations.append(dataclasses.replace(reported[-1], error=output.error))


def _found(output: child_process.Output) -> Probe:
    if not output.messages:
        return Probe(error=output.error)
    content = output.messages[0]
    pattern = re.compile("dlopen|cuda|cudnn|gpu|nvidia", re.IGNORECASE)
    lines = [line for line in output.stderr.splitlines() if pattern.search(line)]
    return dataclasses.replace(
        Probe(**content),
        gpus=tuple(Device(**gpu) for gpu in content["gpus"]),
        message=next(reversed(lines), ""),
    )


def main() -> None:
    """Computes on each device, in a child process, and prints what happens."""
    compute, finished = map(int, sys.argv[1:])
    stdout = child_process.claim_stdout()

    def send(content: Probe | Computation) -> None:
        print(json.dumps(dataclasses.asdict(content)), file=stdout, flush=True)

    found = look()
    send(found)
    computations = [
        Computation(device, operation, xla, error=_UNFINISHED)
        for device in ("/cpu:0", *(gpu.name for gpu in found.gpus))
        for xla in (False, True)
        for operation in OPERATIONS
        if compute
    ]
    for computation in computations[finished:]:
        send(computation)
        send(_compute(computation))
    os._exit(0)  # How TensorFlow shuts down says nothing about a training.


def _compute(computation: Computation) -> Computation:
    """Computes on a device, and compares the result with NumPy's."""
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        # Another training may need the memory.
        tf.config.experimental.set_memory_growth(gpu, True)
    first, second, expected = _problem(computation.operation)

    # Halving is a kernel of TensorFlow, the rest is NVIDIA's: either may fail alone.
    @tf.function(jit_compile=computation.xla)
    def compute(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
        if computation.operation == "convolution":
            return tf.nn.conv2d(first, second, 1, "VALID") * 0.5
        return tf.matmul(first, second) * 0.5

    start = time.perf_counter()
    try:
        with tf.device(computation.device):
            result = compute(tf.constant(first), tf.constant(second)).numpy()
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        message = f"{type(error).__name__}: {error}"[:500]
        return dataclasses.replace(computation, error=message)
    difference = float(abs(result - expected).max())
    right = difference <= _LARGEST_ERROR  # False for NaN.
    return dataclasses.replace(
        computation,
        error="" if right else f"the result is wrong by {difference:g}",
        ms=1000 * (time.perf_counter() - start),
    )


def _problem(operation: str) -> tuple[Any, Any, Any]:
    """Returns two operands and half of their product, as NumPy computes it."""
    import numpy as np  # Not at the start of every program.

    random = np.random.default_rng(0)

    def integers(*shape: int) -> np.ndarray:
        return random.integers(-2, 3, shape).astype(np.float32)

    if operation == "matrix product":
        first, second = integers(64, 64), integers(64, 64)
        return first, second, 0.5 * (first @ second)
    images, filters = integers(8, 26, 26, 3), integers(3, 3, 3, 16)
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2))
    return images, filters, 0.5 * np.einsum("nyxcij,ijcf->nyxf", windows, filters)
