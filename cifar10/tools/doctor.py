"""`python -m cifar10 doctor`: finds problems of this machine, and how to fix them.

A fact is a dictionary that describes the machine, NVIDIA's driver or libraries,
TensorFlow, or a computation on a device. A fact with an `error` is a problem.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import flags, layout
from cifar10.config.fields import TRAIN_DIR
from cifar10.config.options import Checked
from cifar10.distributed import cluster
from cifar10.process import invocation
from cifar10.towers import hardware

HELP = "find out why a GPU is not found, and other problems of this machine"
DESCRIPTION = """Finds out why a GPU is not found, and other problems of this machine.

    python -m cifar10 doctor

Checks versions, memory, the disk for runs, NVIDIA's driver and CUDA's
libraries, and computes a little on each device. Lists the problems at the end,
each with its fix. Exit code 0: training can run on this machine, with or
without a GPU; 1: something is broken; 2: a wrong flag.
"""

DRIVER, TENSORFLOW = "driver", "TensorFlow"
LIBRARIES, NCCL, LIBDEVICE = "CUDA libraries", "NCCL", "libdevice"

# TensorFlow 2.21 and 2.22 use no GPU if they cannot open all of these libraries.
_CUDNN = "libcudnn.so.9"
_NAMES = (
    "libcudart.so.12",
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcufft.so.11",
    "libcusolver.so.11",
    "libcusparse.so.12",
    _CUDNN,
)
# XLA links this file into GPU code with functions such as the exponential. It looks in
# --xla_gpu_cuda_data_dir, in NVIDIA's wheel, and in the system's CUDA folders.
_BITCODE = "nvvm/libdevice/libdevice.10.bc"
_CUDA_ROOTS = ("/usr/local/cuda-12.5", "/usr/local/cuda")
_CAPABILITY = (75, 76)  # Attributes with the major and minor number, from cuda.h.
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE.

# cuDNN 9.11 dropped GPUs below this compute capability. With cuDNN before 9.24, which
# PyTorch may install, XLA finds no configuration for convolutions.
NEW_GPU = (7, 5)
OLD_CUDNN = "nvidia-cudnn-cu12==9.10.2.21"
NEW_CUDNN = "nvidia-cudnn-cu12>=9.24,<10"
# The newest compute capability that TensorFlow 2.21 and 2.22 support. The driver
# compiles the small kernels for it, from CUDA 12.5's PTX.
NEWEST_GPU = (9, 0)

# In gigabytes. A run writes tens of MB. CIFAR-10 and its archive take 360 MB.
_LEAST_DISK = 1.0
# Training the tutorial's network took 1.1 GB at most. The rest is for the system.
_LEAST_MEMORY = 2.0
# The driver wakes eight sleeping GPUs in less than half of this time.
_DRIVER_SECONDS = 60.0
# TensorFlow starts in 5 s, or in a minute with a slow disk and eight GPUs. For a GPU
# newer than TensorFlow, the driver first spends minutes compiling kernels.
_COMPUTATION_SECONDS = 600.0
_LONGEST_CAUSE = 300
_SIGNS_OF_FAILURE = re.compile("error|fatal|fail|abort|check", re.IGNORECASE)

_INSTALL = "pip install --force-reinstall 'tensorflow[and-cuda]>=2.21,<2.23'"
_INSTALL_DRIVER = (
    "Install NVIDIA's driver 555 or newer (580 for Pascal and Volta; on Ubuntu: sudo "
    "ubuntu-drivers install; for WSL: in Windows) and restart the machine. If the "
    "driver does not load, sudo dmesg shows why, for example a missing signature. "
    "A container needs --gpus all (Docker) or a limit nvidia.com/gpu (Kubernetes)."
)
_ON_CPU = "To train on the CPU meanwhile, put CUDA_VISIBLE_DEVICES=-1 before a command."
_RESTART = (
    "Restart the machine. If it has an NVSwitch, run sudo systemctl start "
    f"nvidia-fabricmanager. {_ON_CPU} If a restart does not help: "
)
_FIXES = {
    "memory": "End other programs, or give the container more memory.",
    "runs": "Keep fewer checkpoints (--keep_checkpoints), or give another --train_dir.",
    LIBDEVICE: f"Train without --xla (the default), or {_INSTALL}.",
    TENSORFLOW: (
        f"{_INSTALL}. SIGILL means that the processor has no AVX: use another machine, "
        "or pass the host's processor through to the virtual machine."
    ),
}

Fact = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """What to check.

    Attributes:
        train_dir: directory for runs, whose disk is checked
        json: print all facts and problems as JSON
    """

    train_dir: str = TRAIN_DIR
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Advice:
    """A problem if something is broken, otherwise a note; either comes with its fix."""

    finding: str
    fix: str
    broken: bool = True

    def __str__(self) -> str:
        label = "PROBLEM" if self.broken else "NOTE"
        return f"{label}: {self.finding} FIX: {self.fix}"


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    facts = {}
    for name, fact in _find_facts(options):
        facts[name] = fact
        if not options.json:
            shown = [f"{key} {value}" for key, value in fact.items()]
            print(f"{name}: {', '.join(shown)}", flush=True)
    advice = [*advise(facts)]
    broken = any(piece.broken for piece in advice)
    if options.json:
        pieces = [dataclasses.asdict(piece) for piece in advice]
        content = {"ok": not broken, "advice": pieces, "facts": facts}
        print(json.dumps(content, indent=2))
    else:
        print("", *advice, *([] if broken else ["No problem was found."]), sep="\n")
    return int(broken)


def explain_missing_gpus() -> str:
    """Returns why TensorFlow does not find a GPU, with a line for each cause.

    The text is empty if the driver works and TensorFlow finds all GPUs. Unlike the
    command `doctor`, queries TensorFlow in this process and computes nothing.
    """
    facts = {**_examine_driver(), TENSORFLOW: describe_tensorflow()}
    found, count = facts[TENSORFLOW]["gpus"], len(_capabilities(facts))
    has_no_driver = "absent" in facts[DRIVER] or "error" in facts[DRIVER]
    is_missing = found < count or has_no_driver
    return "\n".join(map(str, advise(facts))) if is_missing else ""


def _find_facts(options: Options) -> Iterator[tuple[str, Fact]]:
    yield "system", {"name": platform.platform(), "python": platform.python_version()}
    yield "cifar10", {"version": invocation.package_version()}
    if free := hardware.available_memory():
        yield "memory", _describe_space(free, _LEAST_MEMORY)
    folder = layout.absolute_path(options.train_dir)
    there = next(filter(os.path.exists, (folder, *folder.parents)))
    space = _describe_space(shutil.disk_usage(there).free, _LEAST_DISK)
    if not os.access(there, os.W_OK | os.X_OK):
        space = {"error": f"{there} is not writable"}
    yield "runs", {"path": str(folder), **space}
    driver = _examine_driver()
    yield from driver.items()
    # A driver that does not answer would also block TensorFlow.
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if "unfinished" in driver[DRIVER] else {}
    yield from _ask_child(TENSORFLOW, _COMPUTATION_SECONDS, **hidden).items()


def _describe_space(free: int, least: float) -> Fact:
    """Describes `free` bytes of memory or disk; less than `least` GB is an error."""
    gigabytes = round(free / 10**9, 2)
    error = f"only {gigabytes} GB are free, but training needs {least:g} GB"
    return {"free GB": gigabytes, **({"error": error} if gigabytes < least else {})}


def _examine_driver() -> dict[str, Fact]:
    """Queries NVIDIA's driver, and loads the CUDA libraries that TensorFlow would load.

    TensorFlow looks in LD_LIBRARY_PATH, then in NVIDIA's wheels, then in the system's
    folders.
    """
    search_path = [os.environ.get("LD_LIBRARY_PATH", ""), *_glob_wheels("*/lib")]
    path = ":".join(filter(None, search_path))
    facts = _ask_child(DRIVER, _DRIVER_SECONDS, LD_LIBRARY_PATH=path)
    return facts | ({LIBDEVICE: _find_libdevice()} if _capabilities(facts) else {})


def _glob_wheels(pattern: str) -> list[str]:
    """Returns the paths in NVIDIA's wheels that match a pattern."""
    wheels = importlib.util.find_spec("nvidia")
    folders = (wheels and wheels.submodule_search_locations) or ()
    return [str(path) for folder in folders for path in Path(folder).glob(pattern)]


def _capabilities(facts: dict[str, Fact]) -> list[tuple[int, ...]]:
    """Returns the compute capability of each working GPU, such as (9, 0)."""
    return [tuple(each) for each in facts[DRIVER].get("capabilities", ())]


def advise(facts: dict[str, Fact]) -> Iterator[Advice]:
    """Yields the problems and notes that follow from facts, the most basic first."""
    for name, fact in facts.items():
        if "error" in fact:
            # On one machine, only --variable_update mirrored on several GPUs uses it.
            is_alone = name == NCCL and cluster.TF_CONFIG not in os.environ
            if not is_alone or len(_capabilities(facts)) > 1:
                broken = not is_alone and name != LIBDEVICE
                finding = f"{name}: {fact['error']}."
                yield Advice(finding, _find_fix(name, facts), broken=broken)
        elif name == TENSORFLOW:
            yield from _advise_on_gpus(facts)


def _advise_on_gpus(facts: dict[str, Fact]) -> Iterator[Advice]:
    """Yields advice about what keeps TensorFlow from using the GPUs."""
    found, count = facts[TENSORFLOW]["gpus"], len(_capabilities(facts))
    if not count and "error" not in facts[DRIVER]:
        text = f"There is no NVIDIA GPU: {facts[DRIVER].get('absent')}."
        fix = f"Training needs none. If the machine has one: {_INSTALL_DRIVER}"
        yield Advice(text, fix, broken=False)
    if found < count:
        text = f"TensorFlow finds {found} of {count} NVIDIA GPUs"
        fix = (
            "Fix the other problems first. If that does not help, put "
            "TF_CPP_MAX_VLOG_LEVEL=3 before a command to see the files that it opens."
        )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            text += f", with CUDA_VISIBLE_DEVICES={visible}"
            fix = "Unset CUDA_VISIBLE_DEVICES to use all of them."
        yield Advice(f"{text}.", fix, broken=visible is None)
    if count and not facts[TENSORFLOW]["has_cuda"]:
        fix = f"pip uninstall tensorflow tensorflow-cpu, and then {_INSTALL}."
        yield Advice("TensorFlow was built without CUDA.", fix)
    if facts.get(LIBRARIES, {}).get("cuDNN", [9, 24]) < [9, 24]:
        text = "cuDNN is older than 9.24, so --xla cannot compile convolutions."
        # A cuDNN that is new enough for XLA has no code for old GPUs.
        other = "" if _has_old_gpu(facts) else f", or pip install '{NEW_CUDNN}'"
        fix = f"Train without --xla (the default){other}."
        yield Advice(text, fix, broken=False)


def _has_old_gpu(facts: dict[str, Fact]) -> bool:
    return min(_capabilities(facts), default=NEW_GPU) < NEW_GPU


def _find_fix(name: str, facts: dict[str, Fact]) -> str:
    """Returns how to fix the error in `facts[name]`."""
    if name == DRIVER:
        return ("" if _capabilities(facts) else _RESTART) + _INSTALL_DRIVER
    if name in (LIBRARIES, NCCL):
        path = os.environ.get("LD_LIBRARY_PATH")
        unset = f"Unset LD_LIBRARY_PATH={path}, which comes first, or " if path else ""
        old_cudnn = f" '{OLD_CUDNN}'" if _has_old_gpu(facts) else ""
        return f"{unset}{_INSTALL}{old_cudnn}."
    if name.startswith("/gpu") and _has_old_gpu(facts):
        return (
            f"pip install '{OLD_CUDNN}' (or the extra gpu-old): a later cuDNN has no "
            "code for Pascal and Volta. Train without --xla."
        )
    if name.startswith("/gpu") and max(_capabilities(facts), default=()) > NEWEST_GPU:
        return (
            "TensorFlow has no code for compute capabilities above 9.0. Use NVIDIA's "
            "container nvcr.io/nvidia/tensorflow in an older release, or build "
            f"TensorFlow from source with CUDA 12.8 or newer. {_ON_CPU}"
        )
    return _FIXES.get(name) or (
        "End the programs that fill the device's memory (nvidia-smi lists them), or "
        f"{_INSTALL}. Then restart the machine. {_ON_CPU}"
    )


_OF_CHILD = {
    "TF_CPP_MIN_LOG_LEVEL": "0",  # Any message may give the reason for a failure.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # A training run may need the memory.
}
# Python's option -P keeps files beside the package from hiding modules.
_CHILD = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from cifar10.tools.doctor import find_in_child; find_in_child(sys.argv[2])"
)


def _ask_child(first: str, seconds: float, **variables: str) -> dict[str, Fact]:
    """Finds facts in a child process, because drivers may crash or hang.

    The child queries the driver if `first` is `DRIVER`, or computes on each device if
    `first` is `TENSORFLOW`. It is killed after `seconds`. `variables` are added to its
    environment. If it ends too early to find a fact, the fact's `error` says why.
    """
    process = subprocess.Popen(  # noqa: S603 - this file.
        [sys.executable, "-P", "-c", _CHILD, str(Path(__file__).parents[2]), first],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **_OF_CHILD, **variables},
    )
    try:
        stdout, stderr = process.communicate(timeout=seconds)
        error = _cause_of_death(process.returncode, stderr.decode(errors="replace"))
    except subprocess.TimeoutExpired as expired:
        stdout, error = expired.stdout or b"", f"no answer within {seconds:g} s"
        process.kill()
        # A process that waits for a broken driver may survive even this.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
    finally:
        process.kill()
    complete, _, _ = stdout.rpartition(b"\n")
    found = [json.loads(line) for line in complete.splitlines()] or [(first, None)]
    facts = dict(found)
    unfinished = {"error": error, "unfinished": True}
    return {name: unfinished if fact is None else fact for name, fact in facts.items()}


def _cause_of_death(status: int, stderr: str) -> str:
    """Returns why a process died; a negative `status` is the number of a signal."""
    lines = [line.strip() for line in stderr.splitlines()]
    # Drops stack traces and their titles, which begin with stars.
    lines = [line for line in lines if line and not line.startswith(("***", "@"))]
    failures = [line for line in lines if _SIGNS_OF_FAILURE.search(line)]
    cause = (failures or lines or ["it printed no reason"])[-1][:_LONGEST_CAUSE]
    if status < 0:
        return f"the process died of {signal.Signals(-status).name}: {cause}"
    return f"the process ended with exit code {status}: {cause}"


def find_in_child(first: str) -> None:
    """Prints each fact as JSON: [name, null] before finding it, then [name, fact]."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries must not print between the facts.

    def take(name: str, examine: Callable[..., Fact], *arguments: Any) -> Fact:
        # If the process dies, the parent knows during which fact.
        print(json.dumps([name, None]), file=stdout, flush=True)
        try:
            fact = examine(*arguments)
        except Exception as error:  # noqa: BLE001 - TensorFlow raises many classes.
            fact = {"error": f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE]}
        print(json.dumps([name, fact]), file=stdout, flush=True)
        return fact

    if first == DRIVER:
        # The driver has to count the GPUs that this variable hides, too.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if "capabilities" in take(DRIVER, _describe_driver):
            take(LIBRARIES, _load, *_NAMES)
            take(NCCL, _load, "libnccl.so.2")
    elif "gpus" in (found := take(TENSORFLOW, describe_tensorflow)):
        gpus = [f"/gpu:{number}" for number in range(found["gpus"])]
        for device in ("/cpu:0", *gpus):
            take(device, _compute, device)
    os._exit(0)  # Skips the shutdown of TensorFlow and CUDA, whose errors are harmless.


def _describe_driver() -> Fact:
    """Queries the driver for its GPUs and the newest CUDA that it supports."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        # An installed driver may lack another library, which is an error.
        is_absent = re.search(r"(?i)libcuda\.so\.1\b.*no such file", str(error))
        return {"absent" if is_absent else "error": str(error)}

    def ask(function: str, *arguments: int) -> int:
        number = ctypes.c_int()
        getattr(driver, function)(ctypes.byref(number), *arguments)
        return number.value

    version = divmod(ask("cuDriverGetVersion") // 10, 100)
    fact: Fact = {"CUDA": "{}.{}".format(*version)}
    if status := driver.cuInit(0):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        meaning = (text.value or b"unknown").decode(errors="replace")
        key = "absent" if status == _NO_DEVICE else "error"
        return fact | {key: f"CUDA does not start, error {status}: {meaning}"}
    gpus = [ask("cuDeviceGet", number) for number in range(ask("cuDeviceGetCount"))]
    capabilities = fact["capabilities"] = [
        tuple(ask("cuDeviceGetAttribute", number, gpu) for number in _CAPABILITY)
        for gpu in gpus
    ]
    minor = 5 if max(capabilities) >= NEWEST_GPU else 0
    if version < (12, minor):
        fact["error"] = f"at most CUDA {fact['CUDA']} runs, but GPUs need 12.{minor}"
    return fact


def _load(*names: str) -> Fact:
    """Loads libraries; returns the version of cuDNN if cuDNN is one of them."""
    loaded = {name: ctypes.CDLL(name) for name in names}
    if _CUDNN not in loaded:
        return {"loaded": True}
    major, rest = divmod(loaded[_CUDNN].cudnnGetVersion(), 10_000)
    return {"cuDNN": [major, rest // 100]}


def _find_libdevice() -> Fact:
    """Finds the libdevice file that XLA needs to compile exponentials for a GPU."""
    chosen = re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.getenv("XLA_FLAGS", ""))
    roots = [*chosen, *_glob_wheels("cuda_nvcc"), *_CUDA_ROOTS]
    for path in (Path(root, _BITCODE) for root in roots):
        if path.is_file():
            return {"path": str(path)}
    return {"error": f"XLA finds no {_BITCODE} in {', '.join(roots)}"}


def describe_tensorflow() -> Fact:
    """Returns the versions of TensorFlow and Keras, and the number of GPUs found."""
    import tensorflow as tf

    return {
        "version": tf.__version__,
        "keras": tf.keras.__version__,
        "has_cuda": tf.test.is_built_with_cuda(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def _compute(device: str) -> Fact:
    """Computes a convolution and a matrix product whose result is known."""
    import tensorflow as tf

    with tf.device(device):
        # The exponential is TensorFlow's kernel. The others are cuDNN's and cuBLAS's.
        images, filters = tf.exp(tf.zeros((8, 26, 26, 3))), tf.ones((3, 3, 3, 16))
        convolved = tf.nn.conv2d(images, filters, 1, "VALID")
        result = (tf.reshape(convolved, (-1, 16)) @ tf.ones((16, 64))).numpy()
    # Sums of small integers are exact, even in TF32.
    if (result != 3 * 3 * 3 * 16).any():
        return {"error": f"the result is {result.min():g} to {result.max():g}, not 432"}
    return {"result": "right"}
