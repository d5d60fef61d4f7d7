"""Runs exported models in a separate process, to check them."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from cifar10.errors import StoppedError, UsageError, reason

_MAX_ERROR_LENGTH = 300
# Images per batch in LiteRT, which keeps all intermediate values in float32.
_LITERT_BATCH = 64


def described(error: Exception) -> str:
    """Returns an error's class and the beginning of its message."""
    return f"{type(error).__name__}: {reason(error)[:_MAX_ERROR_LENGTH].rstrip('.')}"


def not_exportable(file_format: str, why: str) -> UsageError:
    """Returns the error to raise for a model that a format cannot represent."""
    return UsageError(
        f"The model cannot be exported as {file_format}: {why}. Nothing was written.\n"
        "Check for operations that the format lacks and layers that run Python code."
    )


def compute_in_another_process(
    path: Path, file_format: str, images: np.ndarray
) -> np.ndarray:
    """Returns an export's outputs, computed in a process without this package's layers.

    `export.Options` documents `file_format`. `images` are in the form the export takes.

    Raises:
        UsageError: The export cannot be loaded, or fails.
    """
    spawn = multiprocessing.get_context("spawn")
    arguments = (file_format, str(path), images)
    with ProcessPoolExecutor(1, spawn, _hide_gpus_and_messages) as process:
        try:
            return process.submit(_compute, *arguments).result()
        except StoppedError:
            raise
        except Exception as error:  # A format's library may raise anything.
            why = f"in a separate process, it fails with {described(error)}"
            raise not_exportable(file_format, why) from error
        finally:
            for child in multiprocessing.active_children():
                child.kill()


def _hide_gpus_and_messages() -> None:
    # A GPU rounds to TF32, and a training run may need its memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Libraries print when they start.


def _compute(file_format: str, path: str, images: np.ndarray) -> np.ndarray:
    if file_format == "onnx":
        import onnxruntime

        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(path, providers=providers)
        (model_input,) = session.get_inputs()
        (computed,) = session.run(None, {model_input.name: images})
        return computed
    if file_format == "litert":
        from ai_edge_litert.interpreter import Interpreter

        run = Interpreter(model_path=path).get_signature_runner()
        computed = []
        for first in range(0, len(images), _LITERT_BATCH):
            (of_batch,) = run(images=images[first : first + _LITERT_BATCH]).values()
            computed.append(of_batch)
        return np.concatenate(computed)
    if file_format == "keras":
        import keras

        model = keras.saving.load_model(path)
        return keras.ops.convert_to_numpy(model(images))
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    (computed,) = loaded.signatures["serving_default"](tf.constant(images)).values()
    return computed.numpy()
