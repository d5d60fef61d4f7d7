"""A model that was exported as a SavedModel, to be asked as a live copy is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10.errors import UsageError, reason
from cifar10.follower.live_copy import Prediction
from cifar10.input import evaluation, records
from cifar10.tools.export.formats import DESCRIPTION

_SIGNATURE = "serving_default"
_ORIGINAL = (records.HEIGHT, records.WIDTH, records.CHANNELS)
_TYPES = {
    "model": str,
    "distortions": str,
    "image_shape": list,
    "class_names": list | None,
    "step": int,
}

# What a SavedModel that is damaged or of another make raises when it is tried: it has
# no signature of this name, several outputs, or takes something else.
_FOREIGN = (
    OSError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    tf.errors.OpError,
)


class ExportedModel:
    """A SavedModel of `python -m cifar10 export`; its weights never change.

    Args:
        path: The SavedModel's folder.
        device: Where it computes.

    Attributes:
        weights_step: The step of its weights.
        swaps: How often it was loaded: once.
        swap_seconds: What that took.
        refused: How many checkpoints were refused: none.

    Raises:
        UsageError: It is none, or not one of this package.
    """

    def __init__(self, path: Path, device: str = "/cpu:0") -> None:
        began = time.perf_counter()
        described = _described(path)
        self._path = path
        self._device = device
        self._kind = described["distortions"]
        self._class_names = tuple(described["class_names"] or ())
        self.weights_step: int | None = described["step"]
        self.swaps = 1
        self.refused = 0
        try:
            self._since = (path / "saved_model.pb").stat().st_mtime
            with tf.device(device):
                self._loaded = tf.saved_model.load(str(path))
            self._signature = self._loaded.signatures[_SIGNATURE]
            self._check(described["image_shape"])
        except _FOREIGN as error:
            raise UsageError(
                f"--savedmodel {path} cannot be used: {reason(error)}. Export it "
                "anew with python -m cifar10 export."
            ) from error
        self.swap_seconds: float | None = time.perf_counter() - began

    @property
    def age_seconds(self) -> float | None:
        """Seconds since it was exported."""
        return max(0.0, time.time() - self._since)

    def why_no_weights(self) -> str:
        """Says why there are no weights; there always are."""
        return f"{self._path} has weights."

    def predict(self, images: np.ndarray) -> Prediction:
        """Computes the logits of some images; any number of threads may call it.

        Args:
            images: uint8 [count, height, width, channels], as in the data set.
        """
        with tf.device(self._device):
            prepared = evaluation.prepare(tf.constant(images), self._kind)
            (logits,) = self._signature(**{self._input: prepared}).values()
        return Prediction(
            self.weights_step or 0,
            logits.numpy(),
            self._class_names or tuple(map(str, range(logits.shape[1]))),
        )

    def _check(self, image_shape: list[int]) -> None:
        """Refuses a signature that is not one image batch in, one of logits out.

        It raises anything in `_FOREIGN` besides.
        """
        inputs = self._signature.structured_input_signature[1]
        takes = [
            list(spec.shape)[1:] if spec.dtype == tf.float32 else spec.dtype.name
            for spec in inputs.values()
        ]
        made = list(evaluation.image_shape(self._kind, _ORIGINAL))
        if takes != [image_shape] or image_shape != made:
            raise UsageError(
                f"--savedmodel {self._path} takes images of shape {takes}, "
                f"{DESCRIPTION} says {image_shape}, and --distortions {self._kind} "
                f"makes {made}; they have to be one. Export it anew."
            )
        (self._input,) = inputs
        outputs = self.predict(np.zeros((2, *_ORIGINAL), np.uint8)).logits.shape
        if outputs != (2, len(self._class_names) or outputs[-1]):
            raise UsageError(
                f"--savedmodel {self._path} makes logits of shape {outputs} of 2 "
                f"images, and {DESCRIPTION} names {len(self._class_names)} classes. "
                "Export it anew."
            )


def _described(path: Path) -> dict[str, Any]:
    """Reads what the export has written beside the SavedModel."""
    # Not `Path.is_file`, which raises where this user may not look.
    if not os.path.isfile(path / "saved_model.pb"):  # noqa: PTH113
        raise UsageError(
            f"--savedmodel {path} is no SavedModel: there is no saved_model.pb in it. "
            "Name the folder that python -m cifar10 export has written."
        )
    try:
        values = json.loads((path / DESCRIPTION).read_text(encoding="utf-8"))
        why = _what_is_wrong(values)
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error)
    if why:
        raise UsageError(
            f"{path / DESCRIPTION} does not say how images are prepared for the model: "
            f"{why}. Export it anew with python -m cifar10 export."
        )
    return values


def _what_is_wrong(values: Any) -> str | None:
    if not isinstance(values, dict):
        return "it is no object"
    for name, one in _TYPES.items():
        if not isinstance(values.get(name), one):
            return f"{name} is {values.get(name, 'missing')}"
    if values["distortions"] not in evaluation.DISTORTIONS:
        return f"distortions is {values['distortions']}"
    return None
