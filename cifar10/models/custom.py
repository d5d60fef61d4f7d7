"""Imports users' models and checks that they can be trained."""

import contextlib
import importlib
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from cifar10 import errors
from cifar10.errors import StoppedError, UsageError, reason
from cifar10.layers import NewSection
from cifar10.models import layer_tree
from cifar10.models.architecture import model_error, no_module_error

Builder = Callable[..., keras.Model]

# A model that scales its images by less than this is warned about. A small network that
# reached an accuracy of 0.41 on unscaled images reached 0.29 on images scaled by 0.1,
# 0.25 by 0.05, 0.16 by 1/58, and learned nothing on images scaled by 1/127.5.
_FLAT = 0.1

# Tracebacks leave out lines of these folders, since the mistake is in the user's code.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(module.__file__)), "")  # noqa: PTH118, PTH120
    for module in (errors, keras, os, tf)
)
# What fixes a mistake, by a pattern that the traceback matches.
_HINTS = {
    r"size must be at least|size would be|[Nn]egative dimension|pooling .*primitive": (
        "Keep images whole with --distortions flip_translate, give your pictures a\n"
        "larger --image_size, or begin your own model with keras.layers.Resizing."
    ),
    r"(?s)models/sequential\.py.*(expected axis|merge layer)": (
        "keras.Sequential cannot hold the layers of a network with branches.\n"
        "Use keras.Model(base.input, layers.Dense(classes)(base.layers[-2].output))."
    ),
    r"TypeError: .*(missing|takes|unexpected keyword).* argument": (
        "A model's function takes (image_shape, classes). For --depth and --width it\n"
        "also needs arguments named depth and width."
    ),
    r"using weights=.imagenet": "Give weights=None to train from random values.",
    r"URL fetch failure": (
        "On a machine without internet, put the file of weights into ~/.keras/models,\n"
        "or train from random values."
    ),
}


@contextlib.contextmanager
def explained(name: str, problem: str) -> Iterator[None]:
    """Turns an exception from the code of the model `name` into a `UsageError`."""
    try:
        yield
    except (UsageError, StoppedError, BrokenPipeError):
        raise
    except Exception as error:
        frames = [
            tuple(frame)  # Without column numbers, which would add a line to each.
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(("<", *_LIBRARIES))
        ]
        lines = f"{type(error).__name__}: {reason(error)}\n"
        lines += "".join(traceback.format_list(frames))
        whole = "".join(traceback.format_exception(error))
        lines += "\n".join(
            hint for said, hint in _HINTS.items() if re.search(said, whole)
        )
        message = f"--model {name}: {problem}.\n{lines}".rstrip("\n")
        raise UsageError(message) from error


def import_function(name: str) -> Builder:
    """Imports the function that `--model module:function` names."""
    module_name, _, function_name = name.partition(":")
    with explained(name, f"{module_name} cannot be imported"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # The user's module may exist, but import a module that does not.
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise no_module_error(name) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        file = getattr(module, "__file__", None) or module_name
        raise model_error(
            name,
            f"{file} has no function {function_name}.\nDefine one that takes "
            "(image_shape, classes) and returns a Keras model.",
        )
    return builder


def chained(
    name: str, image_shape: tuple[int, int, int], models: Sequence[keras.Model]
) -> keras.Model:
    """Chains the models of several sections into one model."""
    images = net = keras.Input(image_shape, name="images")
    for number, model in enumerate(models, 1):
        problem = f"model {number} of the returned list does not accept its input"
        with explained(name, problem):
            net = model(NewSection()(net) if number > 1 else net)
    return keras.Model(images, net)


def check(
    name: str, model: object, image_shape: tuple[int, int, int], classes: int
) -> None:
    """Calls a model to check its type, input, output and variables.

    The call creates the variables of a model that has not been built yet.
    """
    if not isinstance(model, keras.Model):
        returned = type(model).__name__
        problem = f"the function returned {returned}, but must return a keras.Model."
        raise model_error(name, problem)
    images = tf.zeros((2, *image_shape))
    declared = getattr(model, "input_shape", None) if model.built else None
    # Keras's own error would blame an inner layer, or take many lines.
    if isinstance(declared, tuple) and not images.shape.is_compatible_with(declared):
        problem = f"the model does not take images of shape {image_shape}: its input"
        fix = "Build the model for the image_shape that is passed to its function"
        if declared[-1] == image_shape[-1]:
            size = ", ".join(map(str, declared[1:-1]))
            fix += f",\nor begin the model with keras.layers.Resizing({size})"
        sides = zip(declared[1:-1], image_shape, strict=False)
        if all(side and side > other for side, other in sides):
            fix += (
                ".\nIf your images are that large but were cropped, --distortions "
                "flip_translate keeps them whole"
            )
        raise model_error(name, f"{problem} shape is {declared[1:]}.\n{fix}.")
    with explained(name, f"the model failed on images of shape {image_shape}"):
        _logits(images, name, model, classes, training=False)
    if not model.trainable_variables:
        raise model_error(name, "the model has no trainable variables.")


def check_training(
    name: str, model: keras.Model, image_shape: tuple[int, int, int], classes: int
) -> None:
    """Traces a model as in a training step, and checks that it returns logits.

    Evaluation does not call this, because it also scores models that return
    probabilities.
    """
    compute = tf.function(_logits, autograph=False)
    with explained(name, f"training failed on images of shape {image_shape}"):
        images = tf.TensorSpec((2, *image_shape))
        traced = compute.get_concrete_function(
            images, name, model, classes, training=True
        )
    op = traced.outputs[0].op
    while op.type in ("Identity", "Cast", "Reshape"):
        op = op.inputs[0].op
    if op.type in ("Softmax", "Sigmoid"):
        # Keras appends _1 to a layer's name when the layer is called a second time.
        layer = op.name.split("/")[-2].removesuffix("_1")
        raise model_error(
            name,
            f"the model ends in a {op.type.lower()} (in layer {layer}), but the loss "
            "takes logits.\nEnd the model in Dense(classes) without an activation, or "
            "pass\nclassifier_activation=None to a network of keras.applications.",
        )


def flattening(model: keras.Model) -> str:
    """Returns a note if a model scales down pixel values that are already standardized.

    Such a model would hardly learn. The scale is the product of all `Rescaling` layers
    before the first layer with weights.
    """
    scale, named = 1.0, ""
    for layer in layer_tree.layers(model):
        if layer.weights and not isinstance(layer, keras.Model):
            break
        if isinstance(layer, keras.layers.Rescaling):
            scale *= float(np.max(np.abs(layer.scale)))
            named = layer.name
    if not named or scale >= _FLAT:
        return ""
    return (
        f"NOTE: images are standardized, but the model's Rescaling layer {named} makes "
        f"them {1 / scale:.3g} times smaller, which hinders learning. Remove the layer."
    )


def _logits(
    images: tf.Tensor, name: str, model: keras.Model, classes: int, *, training: bool
) -> tf.Tensor:
    """Returns a model's logits for two images, after checking their type and shape."""
    logits = model(images, training=training)
    returned, fits = type(logits).__name__, False
    if isinstance(logits, tf.Tensor):
        returned = f"{logits.dtype.name} {tuple(logits.shape)}"
        fits = logits.dtype.is_floating and logits.shape == (2, classes)
    if not fits:
        raise model_error(
            name,
            f"for 2 images the model returned {returned}, but must return logits: one "
            f"floating-point tensor of shape (2, {classes}).",
        )
    return logits
