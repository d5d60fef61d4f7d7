"""Runs an exported model in a process that has not loaded this package's models.

Images come in on stdin and logits go out on stdout, both in NumPy's file format.
"""

from __future__ import annotations

import io
import sys

import numpy as np

from cifar10.tools import child_process


def main() -> None:
    """Runs the model that the command line names: its format and its path."""
    file_format, path = sys.argv[1:]
    stdout = child_process.claim_stdout("wb")
    images = np.load(io.BytesIO(sys.stdin.buffer.read()))
    run = _run_onnx if file_format == "onnx" else _run_savedmodel
    logits = io.BytesIO()  # NumPy needs a file's position, and a pipe has none.
    np.save(logits, run(path, images))
    with stdout:
        stdout.write(logits.getvalue())


def _run_savedmodel(path: str, images: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    outputs = loaded.signatures["serving_default"](tf.constant(images))
    (logits,) = outputs.values()
    return logits.numpy()


def _run_onnx(path: str, images: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (model_input,) = session.get_inputs()
    (logits,) = session.run(None, {model_input.name: images})
    return logits
