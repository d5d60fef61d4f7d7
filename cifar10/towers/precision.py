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

# Ampere; the first NVIDIA GPUs whose tensor cores take bfloat16.
_NATIVE_CAPABILITY = (8, 0)

# The timed convolution is the tutorial's second one for a few images: large enough to
# keep every core busy, and done in milliseconds.
_PROBE_IMAGES = (16, 12, 12, 64)
_PROBE_FILTERS = (5, 5, 64, 64)

# Two measurements of the same type differ by less.
_LEAST_SLOWDOWN = 1.1


def resolve(
    requested: str, devices: Sequence[str], *, deterministic: bool = False
) -> str:
    """Chooses the precision of a run.

    Args:
        requested: One of `CHOICES`. `auto` is bfloat16 where every device has it
            natively, else float32.
        devices: The towers' device names.
        deterministic: Whether the run has to repeat bit for bit; `auto` is then
            float32, because bfloat16 is emulated without oneDNN.

    Returns:
        The precision, one of `CHOICES` but `auto`.
    """
    if requested != "auto":
        return requested
    return "bfloat16" if has_bfloat16(devices) and not deterministic else "float32"


def has_bfloat16(devices: Sequence[str]) -> bool:
    """Returns whether all devices multiply bfloat16 natively."""
    if any("gpu" in device.lower() for device in devices):
        capabilities = [
            tf.config.experimental.get_device_details(gpu).get("compute_capability")
            for gpu in tf.config.get_visible_devices("GPU")
        ]
        return all(
            capability is not None and capability >= _NATIVE_CAPABILITY
            for capability in capabilities
        )
    if os.environ.get("TF_ENABLE_ONEDNN_OPTS") == "0":
        return False  # TensorFlow's own kernels do not use these instructions.
    features = hardware.processor().features or ()
    return any(name in features for name in hardware.BFLOAT16_FEATURES)


def warning(precision: str, devices: Sequence[str]) -> str:
    """Measures an emulated precision, and returns a warning if it is slower.

    Args:
        precision: The precision of the run.
        devices: The towers' device names; the first device is measured.

    Returns:
        The warning; empty if the precision is native or no slower than float32.
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
    """Returns the median time of a convolution."""
    with tf.device(device):
        images = tf.cast(tf.fill(_PROBE_IMAGES, 0.5), precision)
        filters = tf.cast(tf.fill(_PROBE_FILTERS, 0.5), precision)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            tf.nn.conv2d(images, filters, 1, "SAME").numpy()
            times.append(time.perf_counter() - began)
    return statistics.median(times)
