"""Runs an exported model in a process that has not loaded this package's models.

Its input and output are files beside the model, in NumPy's format.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cifar10.tools import child_process

IMAGES = "images.npy"
OUTPUTS = "outputs.npy"
# Images that LiteRT computes at once; in float32 it keeps all intermediate values.
_BATCH = 64


def main() -> None:
    """Runs the model that the command line names: its format and its path."""
    file_format, path = sys.argv[1:]
    child_process.claim_stdout()
    folder = Path(path).parent
    computed = _RUNTIMES[file_format](path, np.load(folder / IMAGES))
    np.save(folder / OUTPUTS, computed)


def _savedmodel(path: str, images: np.ndarray) -> np.ndarray:
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    outputs = loaded.signatures["serving_default"](tf.constant(images))
    (computed,) = outputs.values()
    return computed.numpy()


def _onnx(path: str, images: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (model_input,) = session.get_inputs()
    (computed,) = session.run(None, {model_input.name: images})
    return computed


def _keras(path: str, images: np.ndarray) -> np.ndarray:
    import keras

    loaded = keras.saving.load_model(path)
    computed = loaded(images)
    return keras.ops.convert_to_numpy(computed)


def _litert(path: str, images: np.ndarray) -> np.ndarray:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path)
    run = interpreter.get_signature_runner()
    computed = []
    for first in range(0, len(images), _BATCH):
        (of_batch,) = run(images=images[first : first + _BATCH]).values()
        computed.append(of_batch)
    return np.concatenate(computed)


_RUNTIMES: dict[str, Callable[[str, np.ndarray], np.ndarray]] = {
    "savedmodel": _savedmodel,
    "onnx": _onnx,
    "keras": _keras,
    "litert": _litert,
}
