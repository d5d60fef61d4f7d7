"""`python -m cifar10 doctor`: finds this machine's problems and their fixes.

nvidia-smi tells which GPUs there are. A child process tells which of them TensorFlow
finds and whether each device computes, because TensorFlow or the driver may crash.
"""

import argparse
import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from cifar10.config import flags
from cifar10.distributed import gpu_links
from cifar10.errors import counted, reason
from cifar10.process import invocation

HELP = "find out why a GPU is not found, and other problems of this machine"
DESCRIPTION = """Finds out why a GPU is not found, and other problems of this machine.

    python -m cifar10 doctor

Shows versions, asks NVIDIA's driver for its GPUs, and runs a test on each
device. Each problem comes with its fix. Exit code 0: training can run on this
machine, with or without a GPU; 1: something is broken; 2: a wrong flag.
"""

PROBLEM, NOTE = "PROBLEM", "NOTE"

_QUERY = "nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader"
_GPU = re.compile(r"^(\d+\.\d+), (\d+)\.", re.MULTILINE)
# The driver wakes eight sleeping GPUs in less than half of this time.
_DRIVER_SECONDS = 60.0
# The first drivers of CUDA 12.0; of CUDA 12.5, from whose PTX the driver compiles
# TensorFlow's small kernels for the compute capability 9.0; and of CUDA 13.
_LEAST_DRIVER, _HOPPERS_DRIVER, _DRIVER_OF_CUDA_13 = 525, 555, 580
_HOPPER, _BLACKWELL = 9.0, 10.0
_AMD_DRIVER = Path("/dev/kfd")

_OF_CHILD = {
    # TensorFlow names the libraries that it cannot load only on request.
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "dso_loader=1",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # A training run may need the memory.
}
# Python's option -P keeps files beside the package from hiding modules.
_CHILD = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from cifar10.tools.doctor import compute_in_child; compute_in_child()"
)
_NOT_LOADED = re.compile("Could not load dynamic library '([^']+)'")

_INSTALL = "pip install --force-reinstall 'tensorflow[and-cuda]>=2.21,<2.23'"
_INSTALL_DRIVER = (
    "Install NVIDIA's driver 555 or newer (580 for Pascal and Volta; on Ubuntu: sudo "
    "ubuntu-drivers install; for WSL: in Windows) and restart the machine. A container "
    "needs --gpus all (Docker) or an nvidia.com/gpu limit (Kubernetes)."
)
_ONE_KERAS = "pip uninstall -y keras-nightly keras && pip install 'keras>=3.15,<4'"
_ON_BLACKWELL = (
    "Choose another GPU with CUDA_VISIBLE_DEVICES, or the CPU with -1. Compiling for "
    "Blackwell often fails: https://github.com/tensorflow/tensorflow/issues/89272"
)
_FIX_COMPUTATION = (
    "End the programs that fill the device's memory (nvidia-smi lists them), or "
    f"{_INSTALL}. GPUs with compute capability below 7.5 need the extra gpu-old. "
    "SIGILL means that the processor has no AVX. To train on the CPU meanwhile, put "
    "CUDA_VISIBLE_DEVICES=-1 before a command."
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding about a part of the machine."""

    part: str  # Such as "memory".
    text: str  # What was found out.
    kind: str = ""  # `PROBLEM` if it is broken, `NOTE` for advice; empty: all is well.
    fix: str = ""  # How to fix a problem, or what else to do.

    def __str__(self) -> str:
        text = f"{self.part}: {self.text}"
        return f"{self.kind}: {text}. FIX: {self.fix}" if self.kind else text


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    flags.parse(parser, words)
    broken = 0
    for finding in _examine():
        print(finding, flush=True)
        broken += finding.kind == PROBLEM
    print(counted(broken, "problem") if broken else "No problem was found.")
    return 1 if broken else 0


def explain_missing_gpus() -> str:
    """Returns why TensorFlow does not find a GPU, with a line for each cause."""
    count, findings = _examine_driver()
    findings += _examine_tensorflow(count) if count else ()
    return "\n".join(str(finding) for finding in findings if finding.kind)


def _examine() -> Iterator[Finding]:
    yield Finding("system", f"{platform.platform()}, python {sys.version.split()[0]}")
    yield Finding("cifar10", invocation.package_version())
    if all(any(metadata.distributions(name=n)) for n in ("keras", "keras-nightly")):
        text = "keras and keras-nightly are both installed, in the same folder"
        yield Finding("Keras", text, PROBLEM, _ONE_KERAS)
    count, findings = _examine_driver()
    yield from findings
    gpus = []
    for finding in _examine_tensorflow(count):
        yield finding
        if finding.part.startswith("/gpu") and not finding.kind:
            gpus.append(finding.part)
    if len(gpus) > 1:
        if why := gpu_links.find_fault(gpus):
            yield Finding("GPUs together", why, NOTE, gpu_links.ADVICE)
        else:
            yield Finding("GPUs together", "copies and NCCL's sums arrive correctly")


def _examine_driver() -> tuple[int, list[Finding]]:
    """Asks NVIDIA's driver; returns the number of its GPUs, and findings."""
    try:
        said = subprocess.run(  # noqa: S603 - NVIDIA's program.
            _QUERY.split(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DRIVER_SECONDS,
            check=False,
        ).stdout
        is_absent = "No devices were found" in said
    except subprocess.TimeoutExpired:
        said, is_absent = f"no answer within {_DRIVER_SECONDS:g} s", False
    except OSError as error:
        said, is_absent = f"it does not start: {reason(error)}", True
    gpus = [(float(number), int(driver)) for number, driver in _GPU.findall(said)]
    if not gpus:
        text = f"nvidia-smi finds no NVIDIA GPU: {' '.join(said.split())}"
        fix = f"Training needs no GPU. If the machine has one: {_INSTALL_DRIVER}"
        if _AMD_DRIVER.exists():
            fix = "Train on the CPU: TensorFlow's wheels do not compute on AMD's GPUs."
        return 0, [Finding("driver", text, NOTE if is_absent else PROBLEM, fix)]
    capabilities, (version, *_) = zip(*gpus, strict=True)
    shown = ", ".join(map(str, capabilities))
    text = f"version {version}, GPUs of compute capability {shown}"
    least = _HOPPERS_DRIVER if max(capabilities) >= _HOPPER else _LEAST_DRIVER
    if version < least:
        text += f", which need driver {least} or newer"
        return len(gpus), [Finding("driver", text, PROBLEM, _INSTALL_DRIVER)]
    if version >= _DRIVER_OF_CUDA_13:
        text += "; a CUDA 13 driver also runs the CUDA 12 of TensorFlow's wheels"
    findings = [Finding("driver", text)]
    if max(capabilities) >= _BLACKWELL:
        text = "TensorFlow's wheels have no code for Blackwell"
        findings.append(Finding("GPU", text, NOTE, _ON_BLACKWELL))
    return len(gpus), findings


def _examine_tensorflow(count: int) -> Iterator[Finding]:
    """Yields what a child process finds out with TensorFlow about `count` GPUs."""
    environment = {**os.environ, **_OF_CHILD}
    if not count:  # A driver that does not answer would block TensorFlow.
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    child = subprocess.run(  # noqa: S603 - this file.
        [sys.executable, "-P", "-c", _CHILD, str(Path(__file__).parents[2])],
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        check=False,
    )
    parts, lines = ["TensorFlow"], child.stdout.splitlines()
    if lines:
        facts = json.loads(lines[0])
        parts += facts["devices"]
        yield Finding("TensorFlow", f"{facts['version']}, Keras {facts['keras']}")
        if (found := len(facts["devices"]) - 1) < count:
            text = f"finds {found} of {count} NVIDIA GPUs"
            yield _explain(text, facts["has_cuda"], child.stderr)
    yield from (Finding(device, "computes correctly") for device in lines[1:])
    if len(lines) < len(parts):
        status = child.returncode
        end = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        last_line = child.stderr.strip().rpartition("\n")[2]
        text = f"a computation ended with {end}: {last_line}"
        yield Finding(parts[len(lines)], text, PROBLEM, _FIX_COMPUTATION)


def _explain(text: str, has_cuda: bool, messages: str) -> Finding:
    """Adds a reason, which TensorFlow's `messages` tell, and a fix to `text`."""
    kind, fix = PROBLEM, f"Unset LD_LIBRARY_PATH if it is set, and {_INSTALL}."
    if not has_cuda:
        text += ", because it was built without CUDA"
        fix = f"pip uninstall tensorflow tensorflow-cpu, and then {_INSTALL}."
    elif libraries := dict.fromkeys(_NOT_LOADED.findall(messages)):
        text += f", because it cannot load {', '.join(libraries)}"
    elif (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        text += f", with CUDA_VISIBLE_DEVICES={visible}"
        kind, fix = NOTE, "Unset CUDA_VISIBLE_DEVICES to use all of them."
    return Finding("TensorFlow", text, kind, fix)


def compute_in_child() -> None:
    """Prints the devices as a line of JSON, and then each that computes correctly.

    Each device computes a convolution and a matrix product whose result is known.
    """
    import tensorflow as tf

    count = len(tf.config.list_physical_devices("GPU"))
    devices = ["/cpu:0", *(f"/gpu:{number}" for number in range(count))]
    facts = {
        "version": tf.__version__,
        "keras": tf.keras.__version__,
        "has_cuda": tf.test.is_built_with_cuda(),
        "devices": devices,
    }
    print(json.dumps(facts), flush=True)
    exponential = tf.function(tf.exp, jit_compile=True)
    for device in devices:
        with tf.device(device):
            # By XLA, for which a GPU needs NVIDIA's libdevice, by cuDNN and by cuBLAS.
            images = exponential(tf.zeros((8, 26, 26, 3)))
            convolved = tf.nn.conv2d(images, tf.ones((3, 3, 3, 16)), 1, "VALID")
            result = (tf.reshape(convolved, (-1, 16)) @ tf.ones((16, 64))).numpy()
        # Sums of small integers are exact, even in TF32.
        if (result != 3 * 3 * 3 * 16).any():
            sys.exit(f"the result is {result.min():g} to {result.max():g}, not 432")
        print(device, flush=True)
