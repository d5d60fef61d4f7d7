"""Types of arithmetic: which one a device computes natively.

Variables, loss, softmax and batch statistics are float32 in every precision below
float64; the precision is the type of convolutions, matrix products and activations.
"""

import os
from collections.abc import Sequence

import tensorflow as tf

from cifar10.towers import hardware

# Ampere; the first NVIDIA GPUs whose tensor cores take bfloat16.
_NATIVE_CAPABILITY = (8, 0)


def resolve(
    requested: str, devices: Sequence[str], *, deterministic: bool = False
) -> str:
    """Chooses the precision of a run.

    `auto` is bfloat16 where every device has it natively, else float32. It is float32
    in a `deterministic` run, because bfloat16 is emulated without oneDNN.
    """
    if requested != "auto":
        return requested
    return "bfloat16" if has_bfloat16(devices) and not deterministic else "float32"


def has_bfloat16(devices: Sequence[str]) -> bool:
    """Returns whether all devices multiply bfloat16 natively."""
    if _on_gpus(devices):
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
    """Returns a warning if devices of this kind emulate a precision, else nothing."""
    if precision == "bfloat16":
        native = has_bfloat16(devices)
    else:
        native = precision != "float16" or _on_gpus(devices)
    if native:
        return ""
    return (
        f"WARNING: --precision {precision} is usually emulated on such devices, and\n"
        "then slower than float32. --precision auto chooses the fastest."
    )


def _on_gpus(devices: Sequence[str]) -> bool:
    return any("gpu" in device.lower() for device in devices)
