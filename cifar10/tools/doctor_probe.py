"""A child process of the doctor, because drivers and kernels may crash or hang.

With the argument `nvidia-smi` it asks NVIDIA's driver and loads CUDA's libraries; with
`TensorFlow` it computes on each device. It prints each step as JSON, [name, null]
before and [name, fact] after it, so that the step that ended the process is known.
It runs as a script, without the rest of this package.
"""

import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

SMI, TENSORFLOW = "nvidia-smi", "TensorFlow"
DRIVER, CUDNN, NCCL = "libcuda.so.1", "libcudnn.so.9", "libnccl.so.2"

# What TensorFlow 2.21 and 2.22 open, too. Without one, NCCL apart, they use no GPU.
_LIBRARIES = (
    "libcudart.so.12",
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcufft.so.11",
    "libcusolver.so.11",
    "libcusparse.so.12",
    CUDNN,
    NCCL,
)
# The compute capability is last.
_SMI_QUERY = "--query-gpu=name,driver_version,memory.total,memory.used,compute_cap"

_KILL_SECONDS = 10.0
_LONGEST_CAUSE = 300
_SIGNS_OF_FAILURE = re.compile("error|fatal|fail|abort|check", re.IGNORECASE)

Fact = dict[str, Any]


def find_facts(first: str, seconds: float, **variables: str) -> dict[str, Fact]:
    """Returns the facts that a process finds, which may crash or hang.

    Args:
        first: `SMI` or `TENSORFLOW`, its argument and the name of its first fact.
        seconds: How long the process may take. The fact that it did not finish, within
            this time or at all, says so.
        **variables: Added to its environment.
    """
    # Any of TensorFlow's messages may give the reason for a failure.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", **variables}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as stdout,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr,
    ):
        process = subprocess.Popen(  # noqa: S603 - this file.
            # -P: a file in this folder must not hide a module.
            [sys.executable, "-P", __file__, first],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            process_group=0,
        )
        error = f"no answer within {seconds:g} s"
        try:
            if status := process.wait(seconds):
                stderr.seek(0)
                error = _cause_of_death(status, stderr.read())
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # With what it has started.
                # A process that waits for a broken driver may not even die of this.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_SECONDS)
        stdout.seek(0)
        steps = [json.loads(line) for line in stdout if line.endswith("\n")]
    unfinished = {"error": error, "unfinished": True}
    facts = dict(steps or [(first, None)])
    return {name: unfinished if fact is None else fact for name, fact in facts.items()}


def _cause_of_death(status: int, stderr: str) -> str:
    """Returns why a process died; its status is negative for a signal."""
    lines = [line.strip() for line in stderr.splitlines()]
    # Without stack traces and their titles, which stand between stars.
    lines = [line for line in lines if line and not line.startswith(("***", "@"))]
    failures = [line for line in lines if _SIGNS_OF_FAILURE.search(line)]
    cause = (failures or lines or ["it printed no reason"])[-1][:_LONGEST_CAUSE]
    if status >= 0:
        return f"the process ended with exit code {status}: {cause}"
    return f"the process died of {signal.Signals(-status).name}: {cause}"


def _print_facts() -> None:
    """Prints the steps that the command line requests, as they are taken."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no fact.

    def take(name: str, examine: Callable[[], Fact]) -> bool:
        """Prints a fact; returns whether all is well."""
        print(json.dumps([name, None]), file=stdout, flush=True)
        fact = examine()
        print(json.dumps([name, fact]), file=stdout, flush=True)
        return "error" not in fact

    if sys.argv[1] == SMI:
        # What the variable hides is no fault of the driver.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        take(SMI, _list_gpus)
        # Without a driver no GPU needs the others.
        if take(DRIVER, functools.partial(_load, DRIVER)):
            for name in _LIBRARIES:
                take(name, functools.partial(_load, name))
    else:
        found = describe_tensorflow()
        take(TENSORFLOW, lambda: found)
        devices = ["/cpu:0", *(f"/gpu:{number}" for number in range(found["gpus"]))]
        # Those that fail plainly are not tried with XLA, which may end the process.
        good = [one for one in devices if take(one, functools.partial(_compute, one))]
        for device in good:
            take(f"{device} with XLA", functools.partial(_compute, device, xla=True))
    os._exit(0)  # How TensorFlow and CUDA shut down says nothing about a training.


def _list_gpus() -> Fact:
    try:
        done = subprocess.run(  # noqa: S603 - the driver's own program.
            [SMI, _SMI_QUERY, "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        return {"gpus": [], "cannot be run": str(error)}
    rows = done.stdout.splitlines()
    if done.returncode or any(row.count(", ") != _SMI_QUERY.count(",") for row in rows):
        message = " ".join((done.stdout + done.stderr).split())
        return {"error": message or f"{SMI} ends with exit code {done.returncode}"}
    return {"gpus": rows}


def _load(name: str) -> Fact:
    """Loads a library; returns the version of cuDNN, and of the driver's CUDA."""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return {"error": str(error)}
    if name == CUDNN:
        major, rest = divmod(library.cudnnGetVersion(), 10_000)
        return {"version": f"{major}.{rest // 100}"}
    if name != DRIVER:
        return {"loaded": True}
    number, text = ctypes.c_int(), ctypes.c_char_p()
    library.cuDriverGetVersion(ctypes.byref(number))
    fact: Fact = {"version": f"{number.value // 1000}.{number.value % 1000 // 10}"}
    if status := library.cuInit(0):
        library.cuGetErrorString(status, ctypes.byref(text))
        meaning = (text.value or b"unknown").decode(errors="replace")
        fact["error"] = f"CUDA does not start, error {status}: {meaning}"
    return fact


def describe_tensorflow() -> Fact:
    """Returns the versions of this process's TensorFlow, and how many GPUs it finds."""
    import numpy as np
    import tensorflow as tf

    return {
        "version": tf.__version__,
        "keras": tf.keras.__version__,
        "numpy": np.__version__,
        "has_cuda": tf.test.is_built_with_cuda(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def _compute(device: str, *, xla: bool = False) -> Fact:
    """Computes a convolution and a matrix product whose result is known."""
    import tensorflow as tf

    # The exponential is TensorFlow's kernel, the rest is cuDNN's and cuBLAS's.
    @tf.function(jit_compile=xla)
    def compute(images: tf.Tensor, filters: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
        convolved = tf.nn.conv2d(tf.exp(images), filters, 1, "VALID")
        return tf.matmul(tf.reshape(convolved, (-1, 16)), matrix)

    start = time.perf_counter()
    try:
        for gpu in tf.config.list_physical_devices("GPU"):
            # Another training may need the memory.
            tf.config.experimental.set_memory_growth(gpu, True)
        with tf.device(device):
            images, filters = tf.zeros((8, 26, 26, 3)), tf.ones((3, 3, 3, 16))
            result = compute(images, filters, tf.ones((16, 64))).numpy()
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    # Sums of small integers are exact, even in TF32.
    if (result != 3 * 3 * 3 * 16).any():
        return {"error": f"the result is {result.min():g} to {result.max():g}, not 432"}
    return {"ms": round(1000 * (time.perf_counter() - start))}


if __name__ == "__main__":
    _print_facts()
