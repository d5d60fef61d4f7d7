"""How much memory a training may use, and how it gives memory back."""

import contextlib
import ctypes
import math
import resource
import sys
from pathlib import Path

import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.towers import devices, hardware
from cifar10.towers.devices import Placement

# Part of the free memory that steps may use; the rest is for the input and checkpoints.
_PART_FOR_STEPS = 0.85

_M_MMAP_THRESHOLD = -3  # In glibc's malloc.h.


def memory_limit(
    gigabytes: float | None, placement: Placement, held: int, sharing: int = 1
) -> float:
    """Returns how many bytes a training may use on a GPU, or on the CPU for all towers.

    Args:
        gigabytes: As `--memory_limit`; None for 85 % of what is free.
        placement: Where the towers run.
        held: The bytes that the training holds already.
        sharing: How many workers share the CPU; each is assumed to have its own GPUs.

    Returns:
        The bytes; infinite where what is free cannot be found out.
    """
    if gigabytes:
        return gigabytes * 1e9
    if placement.on_gpus:
        on_gpus = _free_on_gpus()
        return held + _PART_FOR_STEPS * min(on_gpus[name] for name in placement.devices)
    return held + _PART_FOR_STEPS / sharing * _free_on_cpu()


def _free_on_cpu() -> float:
    available = hardware.available_memory()
    free = math.inf if available is None else available
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return free
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    # TensorFlow's allocator reserves regions, each twice as large as the last.
    return min(free, (limit - pages * resource.getpagesize()) / 2)


def _free_on_gpus() -> dict[str, float]:
    """Returns the free bytes of each GPU, or of each part of one, such as `/gpu:0`."""
    sizes: list[float] = []
    for gpu in tf.config.get_visible_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(gpu) or []
        limits = [part.memory_limit for part in parts]
        if any(limits):
            sizes += [megabytes * 2**20 for megabytes in limits]
            continue
        sizes.append(math.inf)
        with contextlib.suppress(OSError, UsageError):  # Its driver does not say.
            sizes[-1] = devices.free_memory(gpu)
    return {f"/gpu:{number}": count for number, count in enumerate(sizes)}


def return_freed_blocks() -> None:
    """Lets blocks of 1 MB or more go back to the system when they are freed.

    Without oneDNN, which brings an allocator, tensors come from glibc. It keeps freed
    blocks of up to 32 MB, and the gaps between them fit no other tensor.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
