"""Writes a Keras model as a SavedModel or as ONNX, with what it is beside it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from cifar10 import model as models
from cifar10.errors import StoppedError, UsageError

CHOICES = ("savedmodel", "onnx")
DESCRIPTION = "cifar10.json"
_INPUT, _OUTPUT = "images", "logits"
# Characters of an error that are shown.
_LONGEST = 300
_ONNX_PACKAGES = ("tf2onnx", "onnx", "onnxruntime")


def check_packages(file_format: str) -> None:
    """Refuses a format whose packages are not installed, before any work is done.

    Raises:
        UsageError: They are not.
    """
    if file_format != "onnx":
        return
    missing = [name for name in _ONNX_PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        raise UsageError(
            f"--format onnx: {' and '.join(missing)} cannot be imported. Install with "
            "pip install -c constraints.txt -e '.[export]', or choose --format "
            "savedmodel, which needs nothing more."
        )


def unusable(file_format: str, why: str) -> UsageError:
    """Returns the error of a model that cannot be had in a format."""
    return UsageError(
        f"The model cannot be used as --format {file_format}; {why}. Nothing was "
        "left. A layer may need Python, or an operation that the format lacks."
    )


def write(
    model: keras.Model,
    image_shape: tuple[int, int, int],
    path: Path,
    file_format: str,
    description: Mapping[str, Any],
) -> None:
    """Writes a model.

    Args:
        model: A model made by `model.build`, in float32.
        image_shape: Height, width and channels of one image.
        path: File or folder to be made.
        file_format: One of `CHOICES`.
        description: What the model is, as JSON has it. In a SavedModel it is the file
            `cifar10.json`, in ONNX the model's metadata: texts as they are, the rest
            as JSON.

    Raises:
        UsageError: The model has a layer that cannot be converted.
        OSError: It cannot be written.
        tf.errors.OpError: The same, from TensorFlow.
    """
    signature = [tf.TensorSpec((None, *image_shape), tf.float32, name=_INPUT)]
    evaluated = _Evaluated(model)
    evaluated(tf.zeros((1, *image_shape)))
    if file_format == "savedmodel":
        with _converting(file_format):
            evaluated.export(str(path), input_signature=signature, verbose=False)
        text = json.dumps(description, indent=2) + "\n"
        (path / DESCRIPTION).write_text(text, encoding="utf-8")
        return
    with _converting(file_format):
        evaluated.export(
            str(path), format="onnx", input_signature=signature, verbose=False
        )
    _complete_onnx(path, description)


class _Evaluated(keras.Model):
    """A model as evaluation calls it: without dropout, with moving statistics."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name="cifar10", dtype="float32")
        self.model = model

    def call(self, images: tf.Tensor) -> tf.Tensor:
        """Returns the logits, in float32."""
        logits, _, _ = models.inference(
            self.model,
            [variable.value for variable in self.model.trainable_variables],
            [variable.value for variable in self.model.non_trainable_variables],
            images,
            training=False,
        )
        return tf.cast(logits, tf.float32)


def _why(error: Exception) -> str:
    """Returns what went wrong in one line."""
    # Keras writes around it, and makes bold, what a layer has said.
    bold = re.search(r"\x1b\[1m(.*?)\x1b\[0m", str(error), re.DOTALL)
    words = " ".join((bold[1] if bold else str(error)).split())
    return f"{type(error).__name__}: {words[:_LONGEST].rstrip('.')}"


def _complete_onnx(path: Path, description: Mapping[str, Any]) -> None:
    """Names what the converter leaves with names of its own, and adds what it is."""
    import onnx

    written = onnx.load(str(path))
    graph = written.graph
    (output,) = graph.output
    for node in graph.node:
        node.output[:] = [_OUTPUT if n == output.name else n for n in node.output]
        node.input[:] = [_OUTPUT if n == output.name else n for n in node.input]
    output.name = _OUTPUT
    for value in (*graph.input, output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.helper.set_model_props(
        written,
        {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in description.items()
        },
    )
    path.write_bytes(written.SerializeToString())


@contextlib.contextmanager
def _converting(file_format: str) -> Iterator[None]:
    """Hides what Keras and the converter say about their own code, but for why."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, tf.errors.OpError, StoppedError):
        raise
    except Exception as error:  # Whatever a layer or the converter raises.
        raise unusable(file_format, _why(error)) from error
    finally:
        logging.disable(logging.NOTSET)
