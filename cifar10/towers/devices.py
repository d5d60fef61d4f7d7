"""Chooses the devices of towers, variables and evaluations."""

import contextlib
import ctypes
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from cifar10.errors import MissingGpuError, UsageError, counted
from cifar10.process import invocation

# One of these files exists where an NVIDIA driver is installed, on Linux and on WSL,
# even if TensorFlow cannot use the GPU.
_NVIDIA_DRIVERS = (Path("/dev/nvidia0"), Path("/usr/lib/wsl/lib/libcuda.so.1"))

_FOR_TRYING = "right for trying things out; more towers are not faster"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices on which the towers run."""

    devices: tuple[str, ...]  # One device name per tower.
    simulated: bool  # Whether several towers share the CPU or a GPU.
    description: str  # One line for the user.
    gpu_names: tuple[str, ...] = ()  # The kinds of GPUs.

    def batch_devices(self, accumulate: int) -> tuple[str, ...]:
        """Returns each batch's device in a step of `accumulate` batches per tower."""
        return tuple(device for device in self.devices for _ in range(accumulate))

    @property
    def on_gpus(self) -> bool:
        """Whether the towers run on GPUs."""
        return self.devices[0].startswith("/gpu")

    @property
    def suits_nccl(self) -> bool:
        """Whether NCCL can reduce over the towers, so that all compute alike.

        NCCL accepts neither two towers on one GPU nor parts of a GPU (MIG). GPUs of
        different kinds round differently: their copies of the variables would drift.
        """
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        is_divided = self.simulated or "MIG" in " ".join([visible, *self.gpu_names])
        return self.on_gpus and not is_divided and len(self.gpu_names) < 2


def place_towers(num_gpus: int | None, split_gpu: int = 1) -> Placement:
    """Chooses one device per tower and configures TensorFlow for them.

    Call this before anything else uses TensorFlow's devices. `num_gpus` is the number
    of towers; None means all GPUs, or one tower on the CPU if there is no GPU.
    `split_gpu` is the number of towers on each GPU.
    """
    if not (gpus := tf.config.list_physical_devices("GPU")) and split_gpu == 1:
        return _place_on_cpu(num_gpus)
    count = num_gpus or max(len(gpus), 1) * split_gpu
    used, rest = divmod(count, split_gpu)
    if rest or used > len(gpus):
        raise MissingGpuError(
            f"--num_gpus {count} --split_gpu {split_gpu}: give a multiple of "
            f"{split_gpu}, at most {len(gpus) * split_gpu}: this machine has "
            f"{len(gpus)} GPUs. To simulate towers, raise --split_gpu, or leave it out "
            "and put CUDA_VISIBLE_DEVICES=-1 before the command."
        )
    describe = tf.config.experimental.get_device_details
    names = sorted({describe(gpu).get("device_name", gpu.name) for gpu in gpus[:used]})
    kind = "SIMULATED " if split_gpu > 1 else ""
    description = f"{counted(count, f'{kind}tower')} on {', '.join(names)}"
    if len(names) > 1:
        why = "each step waits for the slowest; CUDA_VISIBLE_DEVICES chooses"
        description += f" (unlike GPUs: {why})"
    if split_gpu > 1:
        description += f", {split_gpu} on each GPU ({_FOR_TRYING})"
    taken = _take(f"--num_gpus {count}", gpus[:used], split_gpu)
    return Placement(taken, split_gpu > 1, description, tuple(names))


def chooses_gpus(requested: str, placement: Placement, *, by_default: bool) -> bool:
    """Returns whether --variable_device chooses the towers' GPUs, and not the CPU.

    `requested` is `cpu`, `gpu` or `auto`: the GPUs, if there are any and `by_default`.
    """
    if requested == "gpu" and not placement.on_gpus:
        why = "the towers have no GPU. Give --variable_device auto."
        raise UsageError(f"--variable_device gpu: {why}")
    is_wanted = requested == "gpu" or (requested == "auto" and by_default)
    return placement.on_gpus and is_wanted


def place_evaluation(device: str) -> str:
    """Chooses an evaluation's device (`auto`: a GPU if any), and hides other GPUs."""
    gpus = tf.config.list_physical_devices("GPU")
    if device == "gpu" and not gpus:
        raise MissingGpuError("--device gpu: there is no GPU. Give --device cpu.")
    chosen = _take(f"--device {device}", [] if device == "cpu" else gpus[:1])
    return chosen[0] if chosen else "/cpu:0"


def let_memory_grow(gpus: Sequence[tf.config.PhysicalDevice]) -> None:
    """Makes TensorFlow allocate only as much GPU memory as needed.

    Has no effect if TensorFlow has already started or the GPU has a memory limit.
    """
    for gpu in gpus:
        with contextlib.suppress(RuntimeError, ValueError):
            tf.config.experimental.set_memory_growth(gpu, True)


def _take(
    flag: str, gpus: Sequence[tf.config.PhysicalDevice], parts: int = 1
) -> tuple[str, ...]:
    """Leaves only `gpus` visible, each split into `parts`; returns device names."""
    try:
        tf.config.set_visible_devices(gpus, "GPU")
        for gpu in gpus if parts > 1 else ():
            if len(tf.config.get_logical_device_configuration(gpu) or []) == parts:
                continue  # Split by an earlier run of this process.
            # The rest is for CUDA's libraries, which do not use TensorFlow's allocator,
            # and for an evaluation during the training.
            megabytes = int(free_memory(gpu) * 0.8 / parts / 2**20)
            part = tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)
            tf.config.set_logical_device_configuration(gpu, [part] * parts)
    except RuntimeError as error:
        raise _too_late(flag) from error
    for gpu in gpus:
        if len(tf.config.get_logical_device_configuration(gpu) or [None]) != parts:
            raise _too_late(flag)
    if parts == 1:
        let_memory_grow(gpus)
    return tuple(f"/gpu:{number}" for number in range(len(gpus) * parts))


def free_memory(gpu: tf.config.PhysicalDevice) -> int:
    """Returns the free memory of a GPU in bytes, as the driver reports it."""
    # TensorFlow reports it only for an initialized GPU, which can no longer be split.
    driver = ctypes.CDLL("libcuda.so.1")  # Numbers GPUs as TensorFlow does.
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), int(gpu.name.rpartition(":")[2]))
        # TensorFlow will use this context, so its memory must not count as free.
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or driver.cuCtxPushCurrent_v2(context)
        or driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    ):
        why = f"--split_gpu: the free memory of {gpu.name} is unknown"
        raise UsageError(f"{why}. Leave it out.")
    return free.value


def _too_late(flag: str) -> UsageError:
    return UsageError(
        f"{flag}: TensorFlow has already started with other devices. Restart the "
        "program (in a notebook, the kernel), and name all devices first."
    )


def _place_on_cpu(num_gpus: int | None) -> Placement:
    count = num_gpus or 1
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    unusable = not hidden and any(path.exists() for path in _NVIDIA_DRIVERS)
    doctor = invocation.command("doctor")
    if num_gpus and unusable:
        raise MissingGpuError(
            f"--num_gpus {count}: TensorFlow cannot use this machine's NVIDIA GPU. To "
            f"find out why, run: {doctor}\nTo train on the CPU, put "
            "CUDA_VISIBLE_DEVICES=-1 before the command."
        )
    if count == 1:
        why = f"TensorFlow cannot use the NVIDIA GPU; {doctor} says why"
        description = f"1 tower on the CPU ({why if unusable else 'no GPU was found'})"
        return Placement(("/cpu:0",), simulated=False, description=description)
    _split_cpu(count)
    names = tuple(f"/cpu:{number}" for number in range(count))
    said = f"{count} SIMULATED towers on the CPU, because no GPU was found"
    return Placement(names, simulated=True, description=f"{said} ({_FOR_TRYING})")


def _split_cpu(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as error:
        # TensorFlow has started. An earlier run may have split the CPU enough.
        if len(tf.config.list_logical_devices("CPU")) < count:
            raise _too_late(f"--num_gpus {count}") from error


def divide_cores(towers: int) -> None:
    """Divides the cores among simulated towers, unless TensorFlow has started."""
    # Towers run at the same time. If every operation used all cores, operations would
    # wait for each other: 4 towers of 32 images took a fifth longer (dev/LOG.md).
    if "TF_NUM_INTRAOP_THREADS" not in os.environ:  # Unless the user set it.
        threads = max(1, len(os.sched_getaffinity(0)) // towers)
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(threads)
