"""Runs exported models: for `serve`, and in a process of its own to check them."""

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from cifar10.config.fields import DISTORTIONS
from cifar10.errors import StoppedError, UsageError, printable, reason
from cifar10.process import files, invocation

# Describes a model, in the folder of a SavedModel.
DESCRIPTION = "cifar10.json"
# How long an exported model may compute in another process.
_CHECK_SECONDS = 3600.0
_MAX_ERROR_LENGTH = 300
_SIGNATURE = "serving_default"
# Images that LiteRT computes at once; in float32 it keeps all intermediate values.
_LITERT_BATCH = 64


class ExportedModel:
    """A SavedModel written by `python -m cifar10 export`; its weights never change.

    It has the attributes and methods of `LiveCopy` that the service uses.
    """

    swaps = 1
    refused = 0

    def __init__(self, path: Path, device: str = "/cpu:0") -> None:
        import tensorflow as tf

        began = time.perf_counter()
        self._device = device
        try:
            self._read_description(path / DESCRIPTION)
            self._exported_at = (path / "saved_model.pb").stat().st_mtime
            with tf.device(device):
                self._loaded = tf.saved_model.load(str(path))
            self._signature = self._loaded.signatures[_SIGNATURE]
            (self._input,) = self._signature.structured_input_signature[1]
            _, logits, names = self.predict(np.zeros((2, *self.image_shape), np.uint8))
            if logits.shape != (2, len(names)):
                raise ValueError(  # noqa: TRY301
                    f"it computes {list(logits.shape)} values from 2 images, and "
                    f"{DESCRIPTION} names {len(names)} classes"
                )
        except Exception as error:  # TensorFlow raises anything for a foreign export.
            raise UsageError(
                f"--savedmodel {path} is not a usable model: {described(error)}."
                f"\nName a folder written by {invocation.command('export')}."
            ) from error
        self.swap_seconds: float | None = time.perf_counter() - began

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the model was exported."""
        return max(0.0, time.time() - self._exported_at)

    def predict(self, images: np.ndarray) -> tuple[int, np.ndarray, tuple[str, ...]]:
        """Computes the logits of images; any number of threads may call it.

        Args:
            images: uint8 [count, height, width, channels], as in the data set.

        Returns:
            The step of the weights, float32 [count, classes], and the classes' names.
        """
        import tensorflow as tf

        from cifar10.input import pipeline

        with tf.device(self._device):
            given = tf.constant(images)
            if not self._prepares:
                given = pipeline.prepare(given, self._distortions)
            (computed,) = self._signature(**{self._input: given}).values()
        logits = computed.numpy()
        if self._prepares:  # They are probabilities, which may be 0.
            logits = np.log(np.maximum(logits, np.finfo(np.float32).tiny))
        return self.weights_step, logits, self._class_names

    def _read_description(self, path: Path) -> None:
        description = json.loads(files.read(path, follow=True))
        self._distortions = description["distortions"]
        self._prepares = description["with_preprocessing"]
        height, width, channels = map(int, description["picture_shape"])
        self.image_shape = (height, width, channels)
        self._class_names = tuple(map(printable, description["class_names"]))
        self.names = {"model": description["model"], "class_names": self._class_names}
        self.weights_step: int = description["step"]
        if self._distortions not in DISTORTIONS:
            raise ValueError(f"unknown distortions {self._distortions}")


def described(error: Exception) -> str:
    """Returns an error's class and the beginning of its cause."""
    return f"{type(error).__name__}: {reason(error)[:_MAX_ERROR_LENGTH].rstrip('.')}"


def not_exportable(file_format: str, why: str) -> UsageError:
    """Returns the error to raise for a model that a format cannot represent."""
    return UsageError(
        f"The model cannot be exported as --format {file_format}; {why}. Nothing was "
        "written.\nA layer may run Python code, or an operation that the format lacks."
    )


def compute_in_another_process(
    path: Path, file_format: str, images: np.ndarray
) -> np.ndarray:
    """Returns what an export computes where the layers of this package are unknown.

    Args:
        path: The exported model.
        file_format: As in `export --format`.
        images: As the model takes them.

    Raises:
        UsageError: The model cannot be loaded, or fails.
    """
    spawn = multiprocessing.get_context("spawn")
    arguments = (file_format, str(path), images)
    with ProcessPoolExecutor(1, spawn, _hide_gpus_and_messages) as process:
        try:
            return process.submit(_compute, *arguments).result(_CHECK_SECONDS)
        except StoppedError:
            raise
        except Exception as error:  # A format's library may raise anything.
            is_late = isinstance(error, TimeoutError)
            late = f"no answer within {_CHECK_SECONDS:g} s"
            why = f"in a process of its own: {late if is_late else described(error)}"
            raise not_exportable(file_format, why) from error
        finally:
            for child in multiprocessing.active_children():
                child.kill()


def _hide_gpus_and_messages() -> None:
    # A GPU rounds to TF32, and its memory may be a training's.
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
    (computed,) = loaded.signatures[_SIGNATURE](tf.constant(images)).values()
    return computed.numpy()
