"""Exports a Keras model for other programs, with Keras's `Model.export` and `save`.

The exported model computes logits like an evaluation. On request, it also prepares
images and returns probabilities. A `.keras` file names the Python classes of its
layers, but programs that load the file may not have this package. So this package's
layers are replaced by Keras's, which compute the same in float32 up to rounding, but
train more slowly. LiteRT has integer kernels for Keras's layers, too.
"""

import json
import math
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from cifar10 import layers as ours
from cifar10.config.fields import WHOLE
from cifar10.config.layout import DESCRIPTION
from cifar10.input import datasets
from cifar10.input.distortions import image_shape, prepare
from cifar10.models.architecture import channel_statistics
from cifar10.models.registry import ARCHITECTURES, build_model
from cifar10.tools import exported
from cifar10.trained_model import TrainedModel

# Layers of this package, and the layers of Keras that compute the same more slowly.
_FASTER = {
    ours.FusedBatchNormalization: keras.layers.BatchNormalization,
    ours.NewSection: keras.layers.Identity,
    ours.WideConv2D: keras.layers.Conv2D,
}
# Endings of settings that a layer uses only in training.
_FOR_TRAINING = ("_initializer", "_regularizer", "_constraint")


def describe(
    trained: TrainedModel, step: int, *, with_preprocessing: bool
) -> dict[str, Any]:
    """Describes an export, its run, and how to prepare images, as JSON values."""
    config = trained.run.config
    distortion = config.images.distortions
    return {
        "model": config.network.model,
        "step": step,
        "use_averages": trained.use_averages,
        "temperature": trained.temperature,
        "precision": "float32",
        "data": config.dataset.data,
        "data_is_real": trained.run.facts.data_is_real,
        "class_names": list(trained.class_names),
        "image_shape": list(trained.image_shape),
        "picture_shape": list(trained.picture_shape),
        "distortions": distortion,
        "preparation": preparation(distortion, trained.picture_shape),
        "with_preprocessing": with_preprocessing,
    }


def preparation(distortion: str, picture_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Describes `prepare` as JSON values, for programs in any language.

    Images are resized, cropped, and standardized: (value - mean) / deviation. If the
    description has no `mean` and `deviation` of each channel, they are those of all
    values of an image, and the deviation is at least `least_deviation`.
    """
    height, width, channels = image_shape(distortion, picture_shape)
    top, left = (picture_shape[0] - height) // 2, (picture_shape[1] - width) // 2
    described: dict[str, Any] = {
        "resize": "the largest centre of these proportions, bicubic, antialiased",
        "size": [*picture_shape[:2]],
        "crop": {"top": top, "left": left, "height": height, "width": width},
    }
    if distortion in WHOLE:
        pairs = zip(("mean", "deviation"), channel_statistics(channels), strict=True)
        described |= {name: [255.0 * one for one in values] for name, values in pairs}
    else:
        described["least_deviation"] = 1.0 / math.sqrt(height * width * channels)
    return described


def as_input(images: Any, picture_shape: tuple[int, int, int], distortion: str) -> Any:
    """Prepares uint8 images of `picture_shape` for a model, as `preparation` says.

    Only Keras's operations are used, so that `images` may be the symbolic input of a
    model that loads without this package. LiteRT has no float64, so float32 is used.
    """
    how = preparation(distortion, picture_shape)
    values, crop = ops.cast(images, "float32"), how["crop"]
    if distortion in WHOLE:
        mean, deviation = (np.array(how[k], "float32") for k in ("mean", "deviation"))
        return (values - mean) / deviation
    rows = slice(crop["top"], crop["top"] + crop["height"])
    values = values[:, rows, slice(crop["left"], crop["left"] + crop["width"])]
    centred = values - ops.mean(values, axis=(1, 2, 3), keepdims=True)
    deviation = ops.sqrt(ops.mean(centred * centred, axis=(1, 2, 3), keepdims=True))
    return centred / ops.maximum(deviation, how["least_deviation"])


def in_float32(trained: TrainedModel) -> keras.Model:
    """Returns the model of a run in float32, the only precision of the converters."""
    name, classes = trained.run.config.network.model, len(trained.class_names)
    model = build_model(name, trained.image_shape, classes, options=trained.options)
    variables = model.trainable_variables + model.non_trainable_variables
    values = [*trained.trainable, *trained.non_trainable]
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
    return model


def write_model(
    model: keras.Model, path: Path, file_format: str, description: Mapping[str, Any]
) -> None:
    """Exports a float32 model, with its description.

    The description is `cifar10.json`: a file in a SavedModel's folder, an entry of an
    ONNX file's metadata, or a file in the ZIP archive inside a Keras or LiteRT file.
    A file's `path` ends as its format (`export.Options.file_format`) requires.
    """
    with exported.exporting(file_format), warnings.catch_warnings(action="ignore"):
        wrapped = wrap(model, file_format, description)
        if file_format == "keras":
            wrapped.save(path)
        else:
            kind = "tf_saved_model" if file_format == "savedmodel" else file_format
            how = {"verbose": False, "input_signature": wrapped.inputs}
            wrapped.export(path, kind, **how)
    text = json.dumps(description, indent=2) + "\n"
    if file_format == "savedmodel":
        (path / DESCRIPTION).write_text(text, encoding="utf-8")
    elif file_format == "onnx":
        import onnx

        written = onnx.load(path)
        onnx.helper.set_model_props(written, {DESCRIPTION: text})
        onnx.save(written, path)
    else:
        # By LiteRT's convention, a ZIP archive follows the model in its file.
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(DESCRIPTION, text)


def wrap(
    model: keras.Model, file_format: str, description: Mapping[str, Any]
) -> keras.Model:
    """Wraps a model to have the input and output that `description` declares."""
    is_ours = description["model"] in ARCHITECTURES
    if file_format == "keras" or (file_format == "litert" and is_ours):
        model = with_keras_layers(model)
    # A user's layer may behave as in training without `training=False`.
    if description["with_preprocessing"]:
        shape, distortions = description["picture_shape"], description["distortions"]
        images = keras.Input(shape, dtype="uint8", name="images")
        prepared = as_input(images, tuple(shape), distortions)
        logits = model(prepared, training=False) / description["temperature"]
        output = {"probabilities": keras.ops.softmax(logits)}
    elif file_format == "keras":
        return model  # It may be trained further.
    else:
        images = keras.Input(description["image_shape"], name="images")
        output = {"logits": model(images, training=False)}
    if file_format == "keras":  # Its callers need no name.
        (output,) = output.values()
    return keras.Model(images, output, name="cifar10")


def with_keras_layers(model: keras.Model) -> keras.Model:
    """Returns a copy of a model, with this package's layers replaced by Keras's.

    Raises a `ValueError` for a subclass of `keras.Model`, and for a user's layer.
    """

    def copy(layer: keras.Operation) -> keras.Operation:
        if not isinstance(layer, keras.layers.Layer):  # An operation of keras.ops.
            return layer
        if compute := _COMPOSED.get(type(layer)):
            _, *shape = layer.get_build_config()["input_shape"]
            inputs = keras.Input(shape)
            return keras.Model(inputs, compute(layer, inputs), name=layer.name)
        kind = _FASTER.get(type(layer), type(layer))
        if kind.__module__.partition(".")[0] != "keras":
            raise ValueError(f"the layer {layer.name} is not part of Keras")
        config = layer.get_config()
        kept = {k: config[k] for k in config if not k.endswith(_FOR_TRAINING)}
        return kind.from_config(kept)

    rebuilt = keras.models.clone_model(model, clone_function=copy, recursive=True)
    rebuilt.set_weights(model.get_weights())
    if isinstance(rebuilt, keras.Sequential):
        # Without a new Input the model would keep the batch size of its first call.
        images = keras.Input(model.input_shape[1:], name="images")
        rebuilt = keras.Sequential([images, *rebuilt.layers], name=model.name)
    return rebuilt


def _normalized(
    layer: ours.LocalResponseNormalization, inputs: keras.KerasTensor
) -> keras.KerasTensor:
    """Computes x * s^-beta by operations of Keras's."""
    indices = np.arange(inputs.shape[-1])
    near = abs(indices[:, None] - indices) <= layer.depth_radius
    energies = layer.alpha * near.astype(np.float32)
    energy = keras.ops.matmul(inputs * inputs, energies) + layer.bias
    if layer.beta != 0.75:
        return inputs * energy**-layer.beta
    # LiteRT has an integer kernel for reciprocal roots, but none for powers.
    root = keras.ops.rsqrt(energy)
    return inputs * root * keras.ops.rsqrt(energy * root)


_COMPOSED: dict[type, Callable[[Any, keras.KerasTensor], keras.KerasTensor]] = {
    ours.LocalResponseNormalization: _normalized,
    ours.QuickGelu: lambda _, x: x * keras.ops.sigmoid(ours.GELU_SLOPE * x),
}


def examples(
    model: keras.Model, dataset: datasets.Dataset, description: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns test images as inputs of an export, and the float32 model's outputs."""
    images, _ = dataset.read("test")
    chosen = np.linspace(0, len(images) - 1, min(256, len(images)), dtype=int)
    pixels = np.asarray(images[chosen])
    prepared = prepare(tf.constant(pixels), description["distortions"]).numpy()
    logits = model(prepared, training=False)
    if description["with_preprocessing"]:
        return pixels, tf.nn.softmax(logits / description["temperature"]).numpy()
    return prepared, logits.numpy()
