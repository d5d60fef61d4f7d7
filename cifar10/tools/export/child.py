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
    folder = Path(path).parent
    images = np.load(folder / IMAGES)
    if file_format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (model_input,) = session.get_inputs()
        (computed,) = session.run(None, {model_input.name: images})
    else:
        import tensorflow as tf

        loaded = tf.saved_model.load(path)
        outputs = loaded.signatures["serving_default"](tf.constant(images))
        (computed,) = outputs.values()
    np.save(folder / OUTPUTS, computed)
