"""Checks exported models: runs them in a separate process, and compares."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from cifar10.errors import UsageError, reason

# Images per batch in LiteRT, which keeps all intermediate values in float32.
_LITERT_BATCH = 64
# The largest difference in float32, relative to the largest value. Summing in another
# order causes less than a third of this difference.
_TOLERANCE = 1e-5


@contextlib.contextmanager
def exporting(file_format: str) -> Iterator[None]:
    """Raises a `UsageError` where a format cannot represent a model."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # Layers, converters and formats may raise anything.
        raise UsageError(
            f"The model cannot be exported as {file_format}: {reason(error)}. Check "
            "for operations that the format lacks, and layers that run Python code."
        ) from error


def compute_in_another_process(
    path: Path, file_format: str, images: np.ndarray
) -> np.ndarray:
    """Returns an export's outputs, computed in a process without this package's layers.

    `export.Options` documents `file_format`. `images` are in the form the export takes.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        exporting(file_format),
        ProcessPoolExecutor(1, spawn, _hide_gpus_and_messages) as process,
    ):
        return process.submit(_compute, file_format, str(path), images).result()


def _hide_gpus_and_messages() -> None:
    # A GPU rounds to TF32, and a training run may need its memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Libraries print when they start.


def _compute(file_format: str, path: str, images: np.ndarray) -> np.ndarray:
    if file_format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return session.run(None, {"images": images})[0]
    if file_format == "litert":
        from ai_edge_litert.interpreter import Interpreter

        run = Interpreter(model_path=path).get_signature_runner()
        batches = np.split(images, range(_LITERT_BATCH, len(images), _LITERT_BATCH))
        parts = [part for batch in batches for part in run(images=batch).values()]
        return np.concatenate(parts)
    if file_format == "keras":
        import keras

        return keras.ops.convert_to_numpy(keras.saving.load_model(path)(images))
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    (computed,) = loaded.signatures["serving_default"](tf.constant(images)).values()
    return computed.numpy()


def compare(computed: np.ndarray, expected: np.ndarray) -> tuple[bool, str]:
    """Returns whether an export computes the same as the run's model, and a report.

    Both compute floating [images, classes], which may differ by rounding.
    """
    if computed.shape != expected.shape or not np.isfinite(computed).all():
        return False, "returns non-finite values, or a different number of values"
    difference = float(np.abs(computed - expected).max() / np.abs(expected).max())
    return difference <= _TOLERANCE, (
        f"differs by {difference:.1e} of the largest value (at most {_TOLERANCE:.0e})"
    )
