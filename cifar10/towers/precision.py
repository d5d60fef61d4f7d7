"""Types of arithmetic: which one a device computes natively.

Variables, loss, softmax and batch statistics are float32 in every precision below
float64; the precision is the type of convolutions, matrix products and activations.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

import tensorflow as tf

from cifar10.towers import hardware

CHOICES = ("auto", "float32", "bfloat16", "float16", "float64")

# What Linux calls the instructions that multiply bfloat16: matrix tiles, and vectors.
_NATIVE_FLAGS = {"amx_bf16", "avx512_bf16"}

# Ampere; the first NVIDIA GPUs whose tensor cores take bfloat16.
_NATIVE_CAPABILITY = (8, 0)

# The convolution that tells how slow an emulated type is, the tutorial's second one for
# a few images: large enough to keep every core busy, and done in milliseconds.
_PROBE_IMAGES = (16, 12, 12, 64)
_PROBE_FILTERS = (5, 5, 64, 64)

# Emulation is slower by more than what two measurements differ by.
_LEAST_SLOWDOWN = 1.1


def resolve(asked: str, devices: Sequence[str], *, deterministic: bool = False) -> str:
    """Chooses the precision of a run.

    Args:
        asked: One of `CHOICES`. `auto` is bfloat16 where every device has it natively,
            else float32.
        devices: The towers' device names.
        deterministic: Whether the run has to repeat bit for bit; `auto` is then
            float32, because bfloat16 is emulated without oneDNN.

    Returns:
        The precision, one of `CHOICES` but `auto`.
    """
    if asked != "auto":
        return asked
    return "bfloat16" if has_bfloat16(devices) and not deterministic else "float32"


def has_bfloat16(devices: Sequence[str]) -> bool:
    """Tells whether all devices multiply bfloat16 natively."""
    if any("gpu" in device.lower() for device in devices):
        capabilities = [
            tf.config.experimental.get_device_details(gpu).get("compute_capability")
            for gpu in tf.config.get_visible_devices("GPU")
        ]
        return all(
            own is not None and own >= _NATIVE_CAPABILITY for own in capabilities
        )
    if os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        return False  # TensorFlow's own kernels do not use these instructions.
    return bool(_NATIVE_FLAGS & set(hardware.processor().features or ()))


def warning(precision: str, devices: Sequence[str]) -> str:
    """Returns a warning if a precision is emulated, with the slowdown measured now.

    Args:
        precision: The precision of the run.
        devices: The towers' device names; the first one is measured.

    Returns:
        A sentence, or nothing where the precision pays.
    """
    if precision not in ("bfloat16", "float16"):
        return ""
    if precision == "bfloat16" and has_bfloat16(devices):
        return ""
    slowdown = _seconds(precision, devices[0]) / _seconds("float32", devices[0])
    if slowdown < _LEAST_SLOWDOWN:
        return ""
    return (
        f"WARNING: --precision {precision} is emulated here: a convolution takes "
        f"{slowdown:.1f} times as long as in float32. --precision auto chooses the "
        "fastest."
    )


def _seconds(precision: str, device: str) -> float:
    """Returns how long a convolution takes, the median of a few."""
    with tf.device(device):
        images = tf.cast(tf.fill(_PROBE_IMAGES, 0.5), precision)
        filters = tf.cast(tf.fill(_PROBE_FILTERS, 0.5), precision)
        measured = []
        for _ in range(5):
            began = time.perf_counter()
            tf.nn.conv2d(images, filters, 1, "SAME").numpy()
            measured.append(time.perf_counter() - began)
    return statistics.median(measured)
