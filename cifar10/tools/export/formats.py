"""Writes a Keras model in each of the formats, together with its description."""

import contextlib
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10.errors import StoppedError, UsageError
from cifar10.follower.trained_model import evaluation_logits
from cifar10.models import names
from cifar10.tools import child_process
from cifar10.tools.export import keras_alone, preparation, to_litert

DESCRIPTION = "cifar10.json"
# A GPU rounds to TF32, and its memory may be a training's.
NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}
# How long the conversion to LiteRT may take.
_CONVERSION_SECONDS = 3600.0
_MAX_ERROR_LENGTH = 300


def unusable(file_format: str, why: str) -> UsageError:
    """Returns the error for a model that a format cannot represent."""
    return UsageError(
        f"The model cannot be exported as --format {file_format}; {why}. Nothing was "
        "written.\nA layer may run Python code, or an operation that the format lacks."
    )


def write(
    model: keras.Model,
    path: Path,
    file_format: str,
    description: Mapping[str, Any],
    samples: np.ndarray | None = None,
) -> None:
    """Writes a float32 model, with the input and output that its description names.

    A SavedModel holds the description in its file `cifar10.json`, ONNX in its metadata,
    strings as they are and other values as JSON. Files of Keras and LiteRT are also ZIP
    archives, in which it is `cifar10.json`. A failing disk raises `OSError` or
    `tf.errors.OpError`.

    Args:
        model: The model of the run.
        path: What to make.
        file_format: As in `--format`.
        description: What the model is, as JSON values.
        samples: Images as the model takes them, from which LiteRT estimates the
            ranges of its int8 values; None for float32.
    """
    text = json.dumps(description, indent=2) + "\n"
    if file_format == "keras":
        with _converting(file_format):
            keras_alone.build(model, description).save(path)
    elif file_format == "litert":
        _write_litert(model, path, description, samples)
    else:
        _export(model, path, file_format, description)
    if file_format == "onnx":
        _describe_onnx(path, description)
    elif file_format == "savedmodel":
        (path / DESCRIPTION).write_text(text, encoding="utf-8")
    else:
        # LiteRT's own convention: an archive follows the model in its file.
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(DESCRIPTION, text)


def _export(
    model: keras.Model, path: Path, file_format: str, description: Mapping[str, Any]
) -> None:
    """Writes what TensorFlow traces of a model, as a SavedModel or as ONNX."""
    evaluated = _Evaluated(model, description)
    signature = tf.TensorSpec(**description["input"])
    with _converting(file_format):
        evaluated(tf.zeros([size or 1 for size in signature.shape], signature.dtype))
        evaluated.export(
            str(path),
            format="onnx" if file_format == "onnx" else "tf_saved_model",
            input_signature=[signature],
            verbose=False,
        )


def _write_litert(
    model: keras.Model,
    path: Path,
    description: Mapping[str, Any],
    samples: np.ndarray | None,
) -> None:
    if description["model"] in names.BUILT_IN:
        model = keras_alone.rebuild(model)  # It has integer kernels throughout.
    folder = path.with_name("savedmodel")
    _export(model, folder, "litert", description)
    words = [str(folder), str(path)]
    if samples is not None:
        words.append(str(path.with_name("samples.npy")))
        np.save(words[-1], samples)
    output = child_process.run(
        to_litert.__name__, *words, seconds=_CONVERSION_SECONDS, **NO_GPU
    )
    (failure,) = output.messages or [{"error": output.error}]
    if "os_error" in failure:
        raise OSError(*failure["os_error"])
    if "error" in failure:
        raise unusable("litert", failure["error"])


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
        shape = tuple(self._description["picture_shape"])
        images = preparation.prepare(images, shape, self._description["distortions"])
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
