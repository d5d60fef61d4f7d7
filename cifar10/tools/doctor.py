"""`python -m cifar10 doctor`: what is wrong with this machine, and how to fix it.

A fact is a dictionary: of the machine, of NVIDIA's driver or libraries, of TensorFlow,
or of a computation on a device. If something is wrong, it has an `error`.
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

HELP = "find out why a GPU is not found, or what else is wrong here"
DESCRIPTION = """Finds out why a GPU is not found, or what else is wrong here.

    python -m cifar10 doctor

Looks at versions, memory, the disk of runs, NVIDIA's driver and CUDA's libraries,
and computes a little on each device. Problems are listed at the end, each with its
fix. Exit code 0: training can run as the machine stands, with or without a GPU;
1: something is broken; 2: a wrong flag.
"""

DRIVER, TENSORFLOW = "driver", "TensorFlow"
LIBRARIES, NCCL, LIBDEVICE = "CUDA libraries", "NCCL", "libdevice"

# The libraries that TensorFlow 2.21 and 2.22 open. Without one they use no GPU.
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
# The file that XLA links into GPU code with an exponential or the like, and where it
# looks: in --xla_gpu_cuda_data_dir, in NVIDIA's wheel, and in the system's CUDA.
_BITCODE = "nvvm/libdevice/libdevice.10.bc"
_CUDA_ROOTS = ("/usr/local/cuda-12.5", "/usr/local/cuda")
_CAPABILITY = (75, 76)  # Its major and minor number, in NVIDIA's cuda.h.
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE.

# cuDNN 9.11 dropped GPUs below this capability; in versions before 9.24, which PyTorch
# may bring, XLA finds no configuration for convolutions.
NEW_GPU = (7, 5)
OLD_CUDNN = "nvidia-cudnn-cu12==9.10.2.21"
NEW_CUDNN = "nvidia-cudnn-cu12>=9.24,<10"
# The newest compute capability for which TensorFlow 2.21 and 2.22 have code. The
# driver compiles the small kernels for it, from CUDA 12.5's PTX.
NEWEST_GPU = (9, 0)

# In gigabytes. A run writes tens of megabytes, the data set 360 with its archive.
_LEAST_DISK = 1.0
# A training of the tutorial's network took 1.1 at most; the rest is for the system.
_LEAST_MEMORY = 2.0
# The driver wakes eight sleeping GPUs in less than half of it.
_DRIVER_SECONDS = 60.0
# TensorFlow starts in 5 s, with a slow disk and eight GPUs in a minute; for a GPU newer
# than TensorFlow the driver first compiles kernels.
_COMPUTATION_SECONDS = 600.0
_LONGEST_CAUSE = 300
_SIGNS_OF_FAILURE = re.compile("error|fatal|fail|abort|check", re.IGNORECASE)

_INSTALL = "pip install --force-reinstall 'tensorflow[and-cuda]>=2.21,<2.23'"
_INSTALL_DRIVER = (
    "Install NVIDIA's driver 555 or newer (for Pascal and Volta 580, the last one; "
    "Ubuntu: sudo ubuntu-drivers install; for WSL in Windows) and restart the machine; "
    "sudo dmesg shows why it does not load, such as for lack of a signature. "
    "A container needs --gpus all (Docker) or a limit nvidia.com/gpu (Kubernetes)."
)
_ON_CPU = "To train on the CPU meanwhile, put CUDA_VISIBLE_DEVICES=-1 before a command."
_RESTART = (
    "Restart the machine; if it has an NVSwitch, sudo systemctl start "
    f"nvidia-fabricmanager. {_ON_CPU} Otherwise: "
)
_FIXES = {
    "memory": "End other programs, or give the container more memory.",
    "runs": "Keep fewer checkpoints (--keep_checkpoints), or give another --train_dir.",
    LIBDEVICE: f"Train without --xla, which is the default, or {_INSTALL}.",
    TENSORFLOW: (
        f"{_INSTALL}. SIGILL means that the processor has no AVX: use another machine, "
        "or pass the host's processor through to a virtual one."
    ),
}

Fact = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """What to look at.

    Attributes:
        train_dir: directory of runs
        json: print all that was found as JSON
    """

    train_dir: str = TRAIN_DIR
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Advice:
    """A problem, or a note if nothing is broken, and what to do about it."""

    finding: str
    fix: str
    broken: bool = True

    def __str__(self) -> str:
        label = "PROBLEM" if self.broken else "NOTE"
        return f"{label}: {self.finding} FIX: {self.fix}"


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with these arguments and returns the exit code."""
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
    """Returns why TensorFlow lacks a GPU that was asked for, a line for each cause.

    It computes nothing, and uses the TensorFlow of this process. The text is empty if
    TensorFlow finds all GPUs that there are.
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
    # A driver that does not answer would stall TensorFlow.
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if "unfinished" in driver[DRIVER] else {}
    yield from _ask_child(TENSORFLOW, _COMPUTATION_SECONDS, **hidden).items()


def _describe_space(free: int, least: float) -> Fact:
    """Describes the free bytes of a memory or disk; `least` is in gigabytes."""
    gigabytes = round(free / 10**9, 2)
    error = f"only {gigabytes} GB are free; a training needs {least:g}"
    return {"free GB": gigabytes, **({"error": error} if gigabytes < least else {})}


def _examine_driver() -> dict[str, Fact]:
    """Asks NVIDIA's driver, and loads CUDA's libraries where TensorFlow finds them.

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
    """Returns the compute capability of each GPU that works, such as (9, 0)."""
    return [tuple(each) for each in facts[DRIVER].get("capabilities", ())]


def advise(facts: dict[str, Fact]) -> Iterator[Advice]:
    """Yields what is wrong and what is worth knowing, the most basic first."""
    for name, fact in facts.items():
        if "error" in fact:
            # On one machine only --variable_update mirrored needs it, on several GPUs.
            is_alone = name == NCCL and cluster.TF_CONFIG not in os.environ
            if not is_alone or len(_capabilities(facts)) > 1:
                broken = not is_alone and name != LIBDEVICE
                finding = f"{name}: {fact['error']}."
                yield Advice(finding, _find_fix(name, facts), broken=broken)
        elif name == TENSORFLOW:
            yield from _advise_on_gpus(facts)


def _advise_on_gpus(facts: dict[str, Fact]) -> Iterator[Advice]:
    """Yields what keeps TensorFlow from using the GPUs."""
    found, count = facts[TENSORFLOW]["gpus"], len(_capabilities(facts))
    if not count and "error" not in facts[DRIVER]:
        text = f"There is no NVIDIA GPU: {facts[DRIVER].get('absent')}."
        fix = f"None is needed. If there is one: {_INSTALL_DRIVER}"
        yield Advice(text, fix, broken=False)
    if found < count:
        text = f"TensorFlow finds {found} of {count} NVIDIA GPUs"
        fix = (
            "Fix the rest; if that does not help, TF_CPP_MAX_VLOG_LEVEL=3 before a "
            "command shows which files TensorFlow opens."
        )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            text += f" of those in CUDA_VISIBLE_DEVICES={visible}"
            fix = "Unset CUDA_VISIBLE_DEVICES to use all of them."
        yield Advice(f"{text}.", fix, broken=visible is None)
    if count and not facts[TENSORFLOW]["has_cuda"]:
        fix = f"pip uninstall tensorflow tensorflow-cpu, and then {_INSTALL}."
        yield Advice("TensorFlow was built without CUDA.", fix)
    if facts.get(LIBRARIES, {}).get("cuDNN", [9, 24]) < [9, 24]:
        text = "cuDNN is older than 9.24, so --xla cannot compile convolutions."
        # Nobody can have both: a cuDNN for XLA has no code for old GPUs.
        other = "" if _has_old_gpu(facts) else f", or pip install '{NEW_CUDNN}'"
        fix = f"Train without --xla, which is the default{other}."
        yield Advice(text, fix, broken=False)


def _has_old_gpu(facts: dict[str, Fact]) -> bool:
    return min(_capabilities(facts), default=NEW_GPU) < NEW_GPU


def _find_fix(name: str, facts: dict[str, Fact]) -> str:
    """Returns what to do about the error of a fact."""
    if name == DRIVER:
        return ("" if _capabilities(facts) else _RESTART) + _INSTALL_DRIVER
    if name in (LIBRARIES, NCCL):
        path = os.environ.get("LD_LIBRARY_PATH")
        unset = f"LD_LIBRARY_PATH={path} comes first: unset it, or " if path else ""
        old_cudnn = f" '{OLD_CUDNN}'" if _has_old_gpu(facts) else ""
        return f"{unset}{_INSTALL}{old_cudnn}."
    if name.startswith("/gpu") and _has_old_gpu(facts):
        return (
            f"pip install '{OLD_CUDNN}', as the extra gpu-old does: a later cuDNN has "
            "no code for Pascal and Volta. Train without --xla."
        )
    if name.startswith("/gpu") and max(_capabilities(facts), default=()) > NEWEST_GPU:
        return (
            "TensorFlow has no code for compute capabilities above 9.0: use NVIDIA's "
            "container, an older release of nvcr.io/nvidia/tensorflow, or a "
            f"TensorFlow built from source with CUDA 12.8 or newer. {_ON_CPU}"
        )
    return _FIXES.get(name) or (
        "End the programs that fill its memory (nvidia-smi lists them), or "
        f"{_INSTALL}; restart the machine. {_ON_CPU}"
    )


_OF_CHILD = {
    "TF_CPP_MIN_LOG_LEVEL": "0",  # Any message may give the reason for a failure.
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # Another training may need the memory.
}
# With -P: no file beside the package may hide a module.
_CHILD = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from cifar10.tools.doctor import find_in_child; find_in_child(sys.argv[2])"
)


def _ask_child(first: str, seconds: float, **variables: str) -> dict[str, Fact]:
    """Returns the facts that a child process finds, as drivers may crash or hang.

    The child asks the `DRIVER` or computes by `TENSORFLOW`, whichever is named `first`,
    for at most `seconds`, with the `variables` added to its environment. A fact that it
    does not finish gets the reason as its error.
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
        # A process that waits for a broken driver may not even die of this.
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
    """Returns why a process died; its status is negative for a signal."""
    lines = [line.strip() for line in stderr.splitlines()]
    # Without stack traces and their titles, which stand between stars.
    lines = [line for line in lines if line and not line.startswith(("***", "@"))]
    failures = [line for line in lines if _SIGNS_OF_FAILURE.search(line)]
    cause = (failures or lines or ["it printed no reason"])[-1][:_LONGEST_CAUSE]
    if status < 0:
        return f"the process died of {signal.Signals(-status).name}: {cause}"
    return f"the process ended with exit code {status}: {cause}"


def find_in_child(first: str) -> None:
    """Prints [name, null] before each step and [name, fact] after it, as JSON."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print is no fact.

    def take(name: str, examine: Callable[..., Fact], *arguments: Any) -> Fact:
        # So the step that ended the process is known.
        print(json.dumps([name, None]), file=stdout, flush=True)
        try:
            fact = examine(*arguments)
        except Exception as error:  # noqa: BLE001 - TensorFlow's are of many classes.
            fact = {"error": f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE]}
        print(json.dumps([name, fact]), file=stdout, flush=True)
        return fact

    if first == DRIVER:
        # What the variable hides is no fault of the driver.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if "capabilities" in take(DRIVER, _describe_driver):
            take(LIBRARIES, _load, *_NAMES)
            take(NCCL, _load, "libnccl.so.2")
    elif "gpus" in (found := take(TENSORFLOW, describe_tensorflow)):
        gpus = [f"/gpu:{number}" for number in range(found["gpus"])]
        for device in ("/cpu:0", *gpus):
            take(device, _compute, device)
    os._exit(0)  # How TensorFlow and CUDA shut down says nothing about a training.


def _describe_driver() -> Fact:
    """Asks the driver for its GPUs and the newest CUDA that it supports."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        # Of an installed driver, another library may be missing.
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
        fact["error"] = f"it runs CUDA {fact['CUDA']} at most; the GPUs need 12.{minor}"
    return fact


def _load(*names: str) -> Fact:
    """Loads libraries, and returns cuDNN's version; an error names its library."""
    loaded = {name: ctypes.CDLL(name) for name in names}
    if _CUDNN not in loaded:
        return {"loaded": True}
    major, rest = divmod(loaded[_CUDNN].cudnnGetVersion(), 10_000)
    return {"cuDNN": [major, rest // 100]}


def _find_libdevice() -> Fact:
    """Finds the file without which XLA compiles no exponential for a GPU."""
    chosen = re.findall(r"--xla_gpu_cuda_data_dir=(\S+)", os.getenv("XLA_FLAGS", ""))
    roots = [*chosen, *_glob_wheels("cuda_nvcc"), *_CUDA_ROOTS]
    for path in (Path(root, _BITCODE) for root in roots):
        if path.is_file():
            return {"path": str(path)}
    return {"error": f"XLA finds no {_BITCODE} in {', '.join(roots)}"}


def describe_tensorflow() -> Fact:
    """Returns the versions of this process's TensorFlow, and how many GPUs it finds."""
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
        # The exponential is TensorFlow's kernel, the rest is cuDNN's and cuBLAS's.
        images, filters = tf.exp(tf.zeros((8, 26, 26, 3))), tf.ones((3, 3, 3, 16))
        convolved = tf.nn.conv2d(images, filters, 1, "VALID")
        result = (tf.reshape(convolved, (-1, 16)) @ tf.ones((16, 64))).numpy()
    # Sums of small integers are exact, even in TF32.
    if (result != 3 * 3 * 3 * 16).any():
        return {"error": f"the result is {result.min():g} to {result.max():g}, not 432"}
    return {"result": "right"}
