"""Runs an exported model where nothing of this package's models is loaded.

It is the code of a process of its own: images come in on stdin and logits go out on
stdout, both as NumPy writes arrays.
"""

from __future__ import annotations

import io
import os
import sys

import numpy as np


def main() -> None:
    """Runs the model that the command line names: its format and its path."""
    file_format, path = sys.argv[1:]
    # What a library prints on stdout must not come between the numbers.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    images = np.load(io.BytesIO(sys.stdin.buffer.read()))
    run = _run_onnx if file_format == "onnx" else _run_savedmodel
    # Not saved into the pipe itself, in which NumPy cannot ask for its position.
    logits = io.BytesIO()
    np.save(logits, run(path, images))
    with answer:
        answer.write(logits.getvalue())


def _run_savedmodel(path: str, images: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    outputs = loaded.signatures["serving_default"](tf.constant(images))
    (logits,) = outputs.values()
    return logits.numpy()


def _run_onnx(path: str, images: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (only,) = session.get_inputs()
    (logits,) = session.run(None, {only.name: images})
    return logits
