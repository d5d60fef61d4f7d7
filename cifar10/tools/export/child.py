"""Runs an exported model in a process that has not loaded this package's models.

Its input and output are files beside the model, in NumPy's format.
"""

import sys
from pathlib import Path

import numpy as np

from cifar10.tools import child_process

IMAGES = "images.npy"
OUTPUTS = "outputs.npy"


def main() -> None:
    """Runs the model that the command line names: its format and its path."""
    file_format, path = sys.argv[1:]
    child_process.claim_stdout()
    run = _run_onnx if file_format == "onnx" else _run_savedmodel
    folder = Path(path).parent
    np.save(folder / OUTPUTS, run(path, np.load(folder / IMAGES)))


def _run_savedmodel(path: str, images: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    outputs = loaded.signatures["serving_default"](tf.constant(images))
    (computed,) = outputs.values()
    return computed.numpy()


def _run_onnx(path: str, images: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (model_input,) = session.get_inputs()
    (computed,) = session.run(None, {model_input.name: images})
    return computed
