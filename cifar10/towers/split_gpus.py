"""Several towers on one GPU, for trying out what needs several (`--split_gpu`)."""

import ctypes
from collections.abc import Sequence

import tensorflow as tf

from cifar10.errors import UsageError

# The rest of the free memory is for CUDA's libraries, which take theirs beside
# TensorFlow's allocator, and for an evaluation beside the training.
_PART_FOR_TOWERS = 0.8


def split(gpus: Sequence[tf.config.PhysicalDevice], parts: int) -> None:
    """Makes `parts` logical devices of each GPU, which share its free memory evenly."""
    for gpu in gpus:
        if len(tf.config.get_logical_device_configuration(gpu) or []) == parts:
            continue  # By an earlier training of this process, for good.
        megabytes = int(free_memory(gpu) * _PART_FOR_TOWERS / parts / 2**20)
        part = tf.config.LogicalDeviceConfiguration(memory_limit=megabytes)
        tf.config.set_logical_device_configuration(gpu, [part] * parts)


def free_memory(gpu: tf.config.PhysicalDevice) -> int:
    """Returns the free bytes of a GPU, as its driver counts them.

    TensorFlow would have to take the GPU first, and could not split it then.
    """
    driver = ctypes.CDLL("libcuda.so.1")  # It numbers GPUs as TensorFlow does.
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    number = int(gpu.name.rpartition(":")[2])
    if (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), number)
        # TensorFlow uses the same context, and what that takes is no longer free.
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or driver.cuCtxPushCurrent_v2(context)
        or driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    ):
        raise UsageError(
            f"--split_gpu: the driver does not say how much memory {gpu.name} has.\n"
            "Leave it out, and give --num_gpus 1."
        )
    return free.value
