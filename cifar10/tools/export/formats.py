"""Writes a Keras model as a SavedModel or as ONNX, together with its description."""

import contextlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from cifar10.errors import StoppedError, UsageError
from cifar10.follower.trained_model import evaluation_logits
from cifar10.input import pipeline
from cifar10.tools.export import preparation

DESCRIPTION = "cifar10.json"
_MAX_ERROR_LENGTH = 300


def unusable(file_format: str, why: str) -> UsageError:
    """Returns the error for a model that a format cannot represent."""
    return UsageError(
        f"The model cannot be exported as --format {file_format}; {why}. Nothing was "
        "written.\nA layer may run Python code, or an operation that the format lacks."
    )


def write(
    model: keras.Model, path: Path, file_format: str, description: Mapping[str, Any]
) -> None:
    """Writes a float32 model, with the input and output that its description names.

    A SavedModel holds the description in its file `cifar10.json`, ONNX in its metadata,
    strings as they are and other values as JSON. A failing disk raises `OSError` or
    `tf.errors.OpError`.
    """
    evaluated = _Evaluated(model, description)
    signature = tf.TensorSpec(**description["input"])
    evaluated(tf.zeros([size or 1 for size in signature.shape], signature.dtype))
    with _converting(file_format):
        evaluated.export(
            str(path),
            format="onnx" if file_format == "onnx" else "tf_saved_model",
            input_signature=[signature],
            verbose=False,
        )
    if file_format == "onnx":
        _describe_onnx(path, description)
    else:
        text = json.dumps(description, indent=2) + "\n"
        (path / DESCRIPTION).write_text(text, encoding="utf-8")


def logits(model: keras.Model, images: tf.Tensor) -> tf.Tensor:
    """Returns the logits that an evaluation scores, in float32."""
    computed, _ = evaluation_logits(
        model,
        [variable.value for variable in model.trainable_variables],
        [variable.value for variable in model.non_trainable_variables],
        images,
    )
    return computed


class _Evaluated(keras.Model):
    """A model as evaluation calls it: without dropout, with moving statistics."""

    def __init__(self, model: keras.Model, description: Mapping[str, Any]) -> None:
        super().__init__(name="cifar10", dtype="float32")
        self.model = model
        self._description = description

    def call(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the logits, or the probabilities of images that it prepares."""
        output = self._description["output"]["name"]
        if not self._description["with_preprocessing"]:
            return {output: logits(self.model, images)}
        images = pipeline.prepare(
            preparation.fit(images, tuple(self._description["picture_shape"])),
            self._description["distortions"],
        )
        return {output: tf.nn.softmax(logits(self.model, images))}


def _describe_onnx(path: Path, description: Mapping[str, Any]) -> None:
    import onnx

    model = onnx.load(str(path))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    properties = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in description.items()
    }
    onnx.helper.set_model_props(model, properties)
    path.write_bytes(model.SerializeToString())


@contextlib.contextmanager
def _converting(file_format: str) -> Iterator[None]:
    """Hides the warnings of Keras and the converter, and rewords their errors."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, tf.errors.OpError, StoppedError):
        raise
    except Exception as error:  # A layer or the converter may raise anything.
        raise unusable(file_format, _one_line(error)) from error
    finally:
        logging.disable(logging.NOTSET)


def _one_line(error: Exception) -> str:
    # Keras prints a layer's own message in bold, between explanations.
    bold = re.search(r"\x1b\[1m(.*?)\x1b\[0m", str(error), re.DOTALL)
    message = " ".join((bold[1] if bold else str(error)).split())
    return f"{type(error).__name__}: {message[:_MAX_ERROR_LENGTH].rstrip('.')}"
