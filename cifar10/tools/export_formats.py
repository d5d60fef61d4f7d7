"""Exports a Keras model for other programs, with Keras's `Model.export` and `save`.

The exported model computes logits like an evaluation. On request, it also prepares
images and returns probabilities. A `.keras` file names the Python classes of its
layers, but programs that load the file may not have this package. So this package's
layers are replaced by Keras's, which compute the same in float32 up to rounding, but
train more slowly. LiteRT can also compute Keras's layers in integers.
"""

import contextlib
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10 import layers as ours
from cifar10.errors import StoppedError, counted
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import datasets, pipeline
from cifar10.input.records import Split
from cifar10.models.registry import ARCHITECTURES, build_model
from cifar10.tools import preparation
from cifar10.tools.exported import described, not_exportable

# File with the description of an export.
_DESCRIPTION = "cifar10.json"
# Keras's names of the formats.
_KERAS_FORMATS = {"savedmodel": "tf_saved_model", "onnx": "onnx", "litert": "litert"}
# Number of test images on which the export must agree with the run's model, and the
# largest difference in float32, relative to the largest value. Summing in another order
# causes less than a third of this difference.
_IMAGES = 256
_TOLERANCE = 1e-5
# With --quantize: the most test images to classify, and the training images from which
# the ranges of activations are estimated. TensorFlow's guide recommends 100 to 500.
# With good estimates, int8 loses less than a percentage point of accuracy
# (https://arxiv.org/abs/2004.09602).
_CLASSIFIED = 10_000
_SAMPLES = 500
_MOST_LOST = 0.01
# LiteRT's converter names the operations that it lacks in this form.
_LACKING = re.compile(r"'tf\.(\w+)' op is neither a custom op nor a flex op")
# Layers of this package, and the layers of Keras that compute the same more slowly.
_FASTER = {
    ours.FusedBatchNormalization: keras.layers.BatchNormalization,
    ours.NewSection: keras.layers.Identity,
    ours.WideConv2D: keras.layers.Conv2D,
}
# Endings of settings that a layer uses only in training.
_FOR_TRAINING = ("_initializer", "_regularizer", "_constraint")


def describe(trained: TrainedModel, with_preprocessing: bool) -> dict[str, Any]:
    """Describes the exported model's run, input and output as JSON values."""
    settings, channels = trained.settings, trained.picture_shape[-1]
    given = {"dtype": "float32", "shape": [None, *trained.image_shape]}
    if with_preprocessing:
        given = {"dtype": "uint8", "shape": [None, None, None, channels]}
    return {
        "model": settings["model"],
        "distortions": settings["distortions"],
        "image_shape": list(trained.image_shape),
        "picture_shape": list(trained.picture_shape),
        "class_names": list(trained.class_names),
        "trained_precision": settings["precision"],
        "data": settings["data"],
        "data_is_real": settings.get("data_is_real", True),
        "simulated": settings["simulated"],
        "preparation": preparation.describe(
            settings["distortions"], trained.picture_shape
        ),
        "with_preprocessing": with_preprocessing,
        "input": {"name": "images", **given},
        "output": {
            "name": "probabilities" if with_preprocessing else "logits",
            "dtype": "float32",
            "shape": [None, len(trained.class_names)],
        },
    }


def in_float32(trained: TrainedModel) -> keras.Model:
    """Returns the model of a run in float32, with the restored values.

    The converters support no other precision.
    """
    model = build_model(
        trained.settings["model"],
        trained.image_shape,
        len(trained.class_names),
        precision="float32",
        options=trained.options,
    )
    variables = model.trainable_variables + model.non_trainable_variables
    values = [*trained.trainable, *trained.non_trainable]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
    return model


def write_model(
    model: keras.Model,
    path: Path,
    file_format: str,
    description: Mapping[str, Any],
    samples: np.ndarray | None = None,
) -> None:
    """Exports a float32 model, with its description.

    The description is a file `cifar10.json` in a SavedModel's folder, or in the ZIP
    archive inside a Keras or LiteRT file. An ONNX file has it as metadata, in which
    values other than strings are JSON.

    Args:
        model: The model of the run.
        path: Folder or file to create; a file's name ends as its format requires.
        file_format: As `export.Options.file_format`.
        description: Description of the export as JSON values, with its input and
            output.
        samples: Prepared images from which LiteRT estimates the ranges of int8 values;
            None for float32.

    Raises:
        UsageError: The format cannot represent the model.
        OSError, tf.errors.OpError: The export cannot be written.
    """
    with _reworded_errors(file_format):
        wrapped = wrap(model, file_format, description)
        if file_format == "keras":
            wrapped.save(path)
        else:
            wrapped.export(
                str(path),
                format=_KERAS_FORMATS[file_format],
                verbose=False,
                input_signature=[keras.InputSpec(**description["input"])],
                **(_litert_options(samples) if file_format == "litert" else {}),
            )
    text = json.dumps(description, indent=2) + "\n"
    if file_format == "onnx":
        _describe_onnx(path, description)
    elif file_format == "savedmodel":
        (path / _DESCRIPTION).write_text(text, encoding="utf-8")
    else:
        # By LiteRT's convention, a ZIP archive follows the model in its file.
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(_DESCRIPTION, text)


def wrap(
    model: keras.Model, file_format: str, description: Mapping[str, Any]
) -> keras.Model:
    """Wraps a model to have the input and output that `description` declares."""
    is_ours = description["model"] in ARCHITECTURES
    if file_format == "keras" or (file_format == "litert" and is_ours):
        model = with_keras_layers(model)
    if file_format == "keras" and not description["with_preprocessing"]:
        return model
    signature = {**description["input"], "shape": description["input"]["shape"][1:]}
    images = keras.Input(**signature)
    prepared = images
    if description["with_preprocessing"]:
        shape = tuple(description["picture_shape"])
        prepared = preparation.prepare(images, shape, description["distortions"])
    # A user's layer may behave as in training without this argument. A .keras file may
    # be trained further, and gets the argument from its caller.
    training = {} if file_format == "keras" else {"training": False}
    output = keras.ops.cast(model(prepared, **training), "float32")
    if description["with_preprocessing"]:
        if description["temperature"] != 1.0:
            output = output / description["temperature"]
        output = keras.layers.Softmax(name="probabilities")(output)
    if file_format != "keras":
        output = {description["output"]["name"]: output}
    return keras.Model(images, output, name="cifar10")


def _litert_options(samples: np.ndarray | None) -> dict[str, Any]:
    """Returns the options for a conversion that uses only LiteRT's operations."""
    operations = [tf.lite.OpsSet.TFLITE_BUILTINS]
    if samples is None:
        return {"target_spec": {"supported_ops": operations}}
    return {
        "optimizations": [tf.lite.Optimize.DEFAULT],
        "representative_dataset": lambda: ({"images": each[None]} for each in samples),
        # Operations without integer kernels stay in float32.
        "target_spec": {
            "supported_ops": [tf.lite.OpsSet.TFLITE_BUILTINS_INT8, *operations]
        },
    }


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
def _reworded_errors(file_format: str) -> Iterator[None]:
    """Hides warnings of Keras and converters, and turns errors into a `UsageError`."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (OSError, tf.errors.OpError, StoppedError):
        raise
    except Exception as error:  # A layer or the converter may raise anything.
        why = described(error)
        if lacking := sorted(set(_LACKING.findall(str(error)))):
            why = f"LiteRT lacks these operations of TensorFlow: {', '.join(lacking)}"
        raise not_exportable(file_format, why) from error
    finally:
        logging.disable(logging.NOTSET)


def with_keras_layers(model: keras.Model) -> keras.Model:
    """Returns a copy of a model, with this package's layers replaced by Keras's.

    Raises:
        ValueError: The model is neither functional nor sequential, or has a layer that
            the user defined.
    """
    copies = []

    def copy(layer: keras.Operation) -> keras.Operation:
        if not isinstance(layer, keras.layers.Layer):  # An operation of keras.ops.
            return layer
        if type(layer) in _COMPOSED:
            return _COMPOSED[type(layer)](layer)
        kind = _FASTER.get(type(layer), type(layer))
        if kind.__module__.partition(".")[0] != "keras":
            raise ValueError(
                f"the layer {layer.name} is of the class {kind.__module__}."
                f"{kind.__qualname__}, which is not part of Keras"
            )
        config = {
            key: value
            for key, value in layer.get_config().items()
            if not key.endswith(_FOR_TRAINING)
        }
        copies.append((layer, kind.from_config(config)))
        return copies[-1][1]

    rebuilt = keras.models.clone_model(model, clone_function=copy, recursive=True)
    for layer, same in copies:
        same.set_weights(layer.get_weights())
    if isinstance(rebuilt, keras.Sequential):
        # Without a new Input the model would keep the batch size of its first call.
        images = keras.Input(model.input_shape[1:], name="images")
        rebuilt = keras.Sequential([images, *rebuilt.layers], name=model.name)
    return rebuilt


def _local_response_normalization(
    layer: ours.LocalResponseNormalization,
) -> keras.Model:
    """Builds x * s^-beta from Keras's layers; a 1 x 1 convolution of x^2 computes s."""
    inputs = _input_of(layer)
    channels = inputs.shape[-1]
    window = keras.layers.Conv2D(channels, 1, trainable=False, name="energy")
    energy = window(inputs * inputs)
    places = np.arange(channels)
    near = abs(places[:, None] - places) <= layer.depth_radius
    window.set_weights([layer.alpha * near[None, None], np.full(channels, layer.bias)])
    power = energy**-layer.beta
    if layer.beta == 0.75:
        # LiteRT has an integer kernel for reciprocal roots, but none for powers.
        root = keras.ops.rsqrt(energy)
        power = root * keras.ops.rsqrt(energy * root)
    return keras.Model(inputs, inputs * power, name=layer.name)


def _quick_gelu(layer: ours.QuickGelu) -> keras.Model:
    inputs = _input_of(layer)
    outputs = inputs * keras.ops.sigmoid(ours.GELU_SLOPE * inputs)
    return keras.Model(inputs, outputs, name=layer.name)


def _input_of(layer: keras.layers.Layer) -> keras.KerasTensor:
    _, *shape = layer.get_build_config()["input_shape"]
    return keras.Input(shape)


_COMPOSED: dict[type, Callable[[Any], keras.Model]] = {
    ours.LocalResponseNormalization: _local_response_normalization,
    ours.QuickGelu: _quick_gelu,
}


def calibration_images(dataset: datasets.Dataset, distortions: str) -> np.ndarray:
    """Returns prepared training images for calibrating the ranges of int8 values."""
    images, _ = _sample(dataset, "train", _SAMPLES)
    return pipeline.prepare(tf.constant(images), distortions).numpy()


def examples(
    model: keras.Model, dataset: datasets.Dataset | None, description: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs for an exported model, the outputs to expect, and the labels.

    `model` is the run's model in float32. The inputs are test images. Without a data
    set, the images are random, which is enough to compare, and the labels mean nothing.
    """
    shape = (_IMAGES, *description["picture_shape"])
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    labels = np.zeros(_IMAGES, np.int32)
    if dataset:
        most = _IMAGES if description["precision"] == "float32" else _CLASSIFIED
        images, labels = _sample(dataset, "test", most)
    prepared = pipeline.prepare(tf.constant(images), description["distortions"])
    expected = tf.concat(
        [
            model(prepared[first : first + _IMAGES], training=False)
            for first in range(0, len(images), _IMAGES)
        ],
        axis=0,
    )
    if description["with_preprocessing"]:
        probabilities = tf.nn.softmax(expected / description["temperature"])
        return images, probabilities.numpy(), labels
    return prepared.numpy(), expected.numpy(), labels


def _sample(
    dataset: datasets.Dataset, split: Split, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `most` images and labels, evenly spread over a split."""
    images, labels = dataset.read(split)
    count = min(most, len(images))
    chosen = np.arange(count) * len(images) // count
    return np.asarray(images[chosen]), np.asarray(labels[chosen])


def compare(
    computed: np.ndarray, expected: np.ndarray, labels: np.ndarray, precision: str
) -> tuple[bool, str]:
    """Returns whether an export computes what the run's model does, and a report.

    In float32, outputs may differ by rounding. In int8, the export must classify nearly
    as many images correctly as the run's model.

    Args:
        computed: Outputs of the export, floating [images, classes].
        expected: Outputs of the run's model in float32, of the same shape.
        labels: Labels of the images, integers [images].
        precision: `float32` or `int8`.
    """
    if computed.shape != expected.shape or not np.isfinite(computed).all():
        return False, "returns values that are not finite, or another number of them"
    if precision == "float32":
        difference = float(np.abs(computed - expected).max() / np.abs(expected).max())
        return difference <= _TOLERANCE, (
            f"differs by\n        {difference:.1e} of the largest value "
            f"(at most {_TOLERANCE:.0e})"
        )
    correct, ours = (
        int(np.count_nonzero(logits.argmax(axis=1) == labels))
        for logits in (computed, expected)
    )
    most_lost = max(1, int(_MOST_LOST * len(labels)))
    return ours - correct <= most_lost, (
        f"has\n        precision @ 1 = {correct / len(labels):.4f} in int8, and the "
        f"run's model\n        {ours / len(labels):.4f} in float32 (int8 may lose "
        f"{counted(most_lost, 'image')})"
    )
