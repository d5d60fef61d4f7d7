"""Builds sectioned towers for a configuration, and finds the memory they may use."""

import ctypes
import functools
import math
import resource
import sys
from pathlib import Path

import keras
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session as session
from tensorflow.python.eager import context

from cifar10.config.config import ResolvedConfig
from cifar10.sections.planner import Planner, has_marks
from cifar10.towers import hardware
from cifar10.towers.devices import Placement
from cifar10.towers.towers import Tower
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update

# Part of the free memory that steps may use; the rest is for the input and checkpoints.
_PART_FOR_STEPS = 0.85

_M_MMAP_THRESHOLD = -3  # In glibc's malloc.h.


def is_requested(config: ResolvedConfig, model: keras.Model) -> bool:
    """Returns whether a flag or the model's own code wants sections or accumulation."""
    return (
        config.memory.sections not in (None, "1")
        or config.batch.accumulate > 1
        or config.memory.section_cache != "device"
        or config.memory.memory_limit is not None
        or (config.memory.sections is None and has_marks(model))
    )


def build_tower(
    config: ResolvedConfig, placement: Placement, planner: Planner, sharing: int = 1
) -> tuple[Tower, str | None]:
    """Builds a tower over the sections that the configuration requests.

    `sharing` is how many workers share this machine. Returns the tower, and a
    description of its sections for the first lines; None if none are requested.
    """
    plan = planner.choose(
        config.memory.sections,
        functools.partial(memory_limit, config, placement, planner, sharing),
    )
    cut = len(plan.sections) > 1
    config.memory.check_use(cut=cut)
    if cut and not placement.on_gpus:
        return_what_is_freed()
    wanted = (
        cut or config.batch.accumulate > 1 or config.memory.sections not in (None, "1")
    )
    return planner.tower(plan.sections), planner.description(plan) if wanted else None


def return_what_is_freed() -> None:
    """Lets blocks of 1 MB or more go back to the system when they are freed.

    Without oneDNN, which brings an allocator, tensors come from glibc. It keeps freed
    blocks of up to 32 MB, and the gaps between them fit no other tensor.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def build_planner(
    config: ResolvedConfig,
    placement: Placement,
    state: TrainState,
    tower: Tower,
    update: Update,
    image_shape: tuple[int, ...],
    replicas: int = 1,
) -> Planner:
    """Builds the planner of a step; the shape is (height, width, channels)."""
    images = [config.batch.batch_size, *image_shape]
    return Planner(
        state,
        placement.devices,
        (tf.TensorSpec(images), tf.TensorSpec(images[:1], tf.int64)),
        tower=tower,
        update=update,
        accumulate=config.batch.accumulate,
        cache_device="/cpu:0" if config.memory.section_cache == "host" else None,
        replicas=replicas,
    )


def memory_limit(
    config: ResolvedConfig, placement: Placement, planner: Planner, sharing: int = 1
) -> float:
    """Returns how many bytes a training may use on a GPU, or on the CPU.

    The `sharing` workers share a CPU evenly; each is assumed to have its own GPUs.
    """
    if config.memory.memory_limit:
        return config.memory.memory_limit * 1e9
    part = _PART_FOR_STEPS if placement.on_gpus else _PART_FOR_STEPS / sharing
    return planner.bytes_so_far() + part * free_memory(placement)


def free_memory(placement: Placement) -> float:
    """Returns the free bytes of a GPU for its tower, or of the CPU for all towers.

    Infinite where that cannot be found out.
    """
    if placement.on_gpus:
        limits = memory_limits()
        return min(limits[name] for name in placement.devices)
    available = hardware.memory().available
    bounds = [math.inf if available is None else available]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        # TensorFlow's allocator reserves regions, each twice as large as the last.
        bounds.append((limit - pages * resource.getpagesize()) / 2)
    return min(bounds)


def memory_limits() -> dict[str, int]:
    """Returns the bytes that TensorFlow may take on each device, by names as `/gpu:0`.

    It asks the devices that this process uses. `device_lib` would open all GPUs once
    more, also those that belong to others, each with hundreds of megabytes.
    """
    context.ensure_initialized()
    # The context has it, but there is no public way to it (TensorFlow 2.21).
    handle = context.context()._handle  # noqa: SLF001
    devices = pywrap_tfe.TFE_ContextListDevices(handle)
    limits = {}
    for number in range(session.TF_DeviceListCount(devices)):
        _, _, name = session.TF_DeviceListName(devices, number).rpartition("device:")
        limits[f"/{name.lower()}"] = session.TF_DeviceListMemoryBytes(devices, number)
    session.TF_DeleteDeviceList(devices)
    return limits
