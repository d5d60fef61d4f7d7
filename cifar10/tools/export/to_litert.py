"""Converts a SavedModel to a LiteRT file, in a process of its own.

The converter prints to the console, and it can end its process.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cifar10.tools import child_process

# How the converter names operations that need TensorFlow itself, or an extension.
_LACKING = re.compile(r"'tf\.(\w+)' op is neither a custom op nor a flex op")
_LONGEST_REASON = 300


def main() -> None:
    """Converts the folder that the command line names to the file that it names.

    With a third word, a file of float32 [count, height, width, channels] in NumPy's
    format, it quantizes the model to int8 with ranges from these images. It prints a
    JSON object, with the arguments of an `os_error` or the reason for another `error`.
    """
    folder, path, *samples = sys.argv[1:]
    failure: dict[str, Any] = {}
    with child_process.claim_stdout() as messages:
        try:
            Path(path).write_bytes(_convert(folder, *samples))
        except OSError as error:
            failure["os_error"] = [error.errno, error.strerror]
        except Exception as error:  # noqa: BLE001 - the converter may raise anything.
            failure["error"] = _why(error)
        messages.write(json.dumps(failure) + "\n")


def _convert(folder: str, samples: str | None = None) -> bytes:
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(
        folder, signature_keys=["serving_default"]
    )
    if samples is not None:
        images = np.load(samples)

        def representative() -> Iterator[dict[str, np.ndarray]]:
            for image in images:
                yield {"images": image[None]}

        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = representative
        # Operations without integer kernels stay in float32.
        converter.target_spec.supported_ops = [
            tf.lite.OpsSet.TFLITE_BUILTINS_INT8,
            tf.lite.OpsSet.TFLITE_BUILTINS,
        ]
    return converter.convert()


def _why(error: Exception) -> str:
    """Returns the reason in a line; the converter's own is pages long."""
    if lacking := sorted(set(_LACKING.findall(str(error)))):
        return f"LiteRT lacks these operations of TensorFlow: {', '.join(lacking)}"
    (first, *_) = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:_LONGEST_REASON].rstrip('.')}"
