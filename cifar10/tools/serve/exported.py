"""An exported SavedModel, with the attributes and methods of a live copy."""

import json
import os
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from cifar10.config.config import DISTORTIONS
from cifar10.errors import UsageError, printable, reason
from cifar10.follower.live_copy import Prediction
from cifar10.input import pipeline
from cifar10.process import files, invocation
from cifar10.tools.export.formats import DESCRIPTION

_SIGNATURE = "serving_default"
_LEAST = np.finfo(np.float32).tiny


class ExportedModel:
    """A SavedModel written by `python -m cifar10 export`; its weights never change."""

    # How often weights were loaded, and how many checkpoints were refused.
    swaps = 1
    refused = 0

    def __init__(self, path: Path, device: str = "/cpu:0") -> None:
        began = time.perf_counter()
        self._device = device
        for name in ("saved_model.pb", DESCRIPTION):
            # `Path.is_file` raises if this user may not read the folder.
            if not os.path.isfile(path / name):  # noqa: PTH113
                raise UsageError(
                    f"--savedmodel {path} holds no exported model: it has no {name}.\n"
                    f"Name a folder written by {invocation.of('export')}."
                )
        try:
            self._read_description(path / DESCRIPTION)
            self._exported_at = (path / "saved_model.pb").stat().st_mtime
            with tf.device(device):
                self._loaded = tf.saved_model.load(str(path))
            self._signature = self._loaded.signatures[_SIGNATURE]
            self._try_signature()
        except Exception as error:  # TensorFlow raises anything for a foreign export.
            why = f"{type(error).__name__}: {reason(error).rstrip('.')}"
            raise UsageError(
                f"--savedmodel: {path} cannot be used: {why}.\n"
                f"Export the model again with {invocation.of('export')}."
            ) from error
        self.swap_seconds: float | None = time.perf_counter() - began

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the model was exported."""
        return max(0.0, time.time() - self._exported_at)

    def predict(self, images: np.ndarray) -> Prediction:
        """Computes the logits of images; any number of threads may call it.

        Args:
            images: uint8 [count, height, width, channels], as in the data set.
        """
        with tf.device(self._device):
            taken = tf.constant(images)
            if not self._prepares:
                taken = pipeline.prepare(taken, self._distortions)
            (logits,) = self._signature(**{self._input: taken}).values()
            if self._prepares:  # They are probabilities, which may be 0.
                logits = tf.math.log(tf.maximum(logits, _LEAST))
        return Prediction(self.weights_step, logits.numpy(), self._class_names)

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

    def _try_signature(self) -> None:
        """Raises an exception unless images give one logit per class."""
        (self._input,) = self._signature.structured_input_signature[1]
        logits = self.predict(np.zeros((2, *self.image_shape), np.uint8)).logits
        if logits.shape != (2, len(self._class_names)):
            raise ValueError(
                f"it computes {list(logits.shape)} values from 2 images, and "
                f"{DESCRIPTION} names {len(self._class_names)} classes"
            )
