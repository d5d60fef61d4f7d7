"""Runs exported models: for `serve`, and in a process of its own to check them."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

from cifar10.config.fields import DISTORTIONS
from cifar10.errors import UsageError, printable, reason
from cifar10.process import files, invocation
from cifar10.tools import child_process

# Describes a model, in the folder of a SavedModel.
DESCRIPTION = "cifar10.json"
# What is computed in another process, in NumPy's format; and how long it may take.
_IMAGES, _OUTPUTS = "images.npy", "outputs.npy"
_CHECK_SECONDS = 3600.0
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
        for name in ("saved_model.pb", DESCRIPTION):
            # `Path.is_file` raises if this user may not read the folder.
            if not os.path.isfile(path / name):  # noqa: PTH113
                raise UsageError(
                    f"--savedmodel {path} holds no exported model: it has no {name}.\n"
                    f"Name a folder written by {invocation.command('export')}."
                )
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
            why = f"{type(error).__name__}: {reason(error).rstrip('.')}"
            raise UsageError(
                f"--savedmodel: {path} cannot be used: {why}.\n"
                f"Export the model again with {invocation.command('export')}."
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


def compute_in_another_process(
    path: Path, file_format: str, images: np.ndarray
) -> np.ndarray:
    """Returns what a model in a file computes where this package's are not loaded.

    Args:
        path: The model. Files beside it are replaced.
        file_format: As in `export --format`.
        images: As the model takes them.

    Raises:
        UsageError: The model cannot be loaded, or fails.
    """
    np.save(path.with_name(_IMAGES), images)
    output = child_process.run(
        __name__,
        file_format,
        str(path),
        seconds=_CHECK_SECONDS,
        # A GPU rounds to TF32, and its memory may be a training's.
        CUDA_VISIBLE_DEVICES="-1",
    )
    if output.error:
        raise UsageError(
            f"The export as --format {file_format} fails in a process of its own; "
            f"{output.error}. Nothing was written.\nA layer may run Python code, or an "
            "operation that the format lacks."
        )
    return np.load(path.with_name(_OUTPUTS))


def main() -> None:
    """Computes the outputs of the model that the command line names.

    The arguments are its format and its path.
    """
    file_format, path = sys.argv[1:]
    child_process.claim_stdout()
    folder = Path(path).parent
    np.save(folder / _OUTPUTS, _compute(file_format, path, np.load(folder / _IMAGES)))


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
