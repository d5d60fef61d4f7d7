"""Users' models: imports them and checks that the towers can train them."""

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

# Images have a deviation of 1. A small network that reached an accuracy of 0.41 reached
# 0.29 when they were scaled by 0.1, 0.25 by 0.05, 0.16 by 1/58, and nothing by 1/127.5.
_FLAT = 0.1

# Whoever wrote a model looks for the mistake in its lines, not in those of libraries.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(module.__file__)), "")  # noqa: PTH118, PTH120
    for module in (errors, keras, os, tf)
)
# What helps, by what is found in a traceback.
_HINTS = {
    r"size must be at least|size would be|[Nn]egative dimension|pooling .*primitive": (
        "With --distortions flip_translate images are whole, not cropped; your own\n"
        "pictures may have a larger --image_size, and your own model may begin with a\n"
        "keras.layers.Resizing."
    ),
    r"(?s)models/sequential\.py.*(expected axis|merge layer)": (
        "keras.Sequential chains layers; a network with branches is not a chain.\n"
        "Use keras.Model(base.input, layers.Dense(classes)(base.layers[-2].output))."
    ),
    r"TypeError: .*(missing|takes|unexpected keyword).* argument": (
        "A model's function takes (image_shape, classes); --depth and --width need\n"
        "arguments of these names."
    ),
    r"using weights=.imagenet": ("Give weights=None, to train from initial values."),
    r"URL fetch failure": (
        "Without a network, put the file into ~/.keras/models, or train from initial\n"
        "values."
    ),
}


@contextlib.contextmanager
def explained(name: str, problem: str) -> Iterator[None]:
    """Turns what the code of `--model name` raises into a `UsageError`."""
    try:
        yield
    except (UsageError, StoppedError, BrokenPipeError):
        raise
    except Exception as error:
        frames = [
            tuple(frame)  # Without the columns, which would be a line of their own.
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
            # It may be an import inside the user's module that fails.
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise no_module_error(name) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        file = getattr(module, "__file__", None) or module_name
        raise model_error(
            name,
            f"{file} has no function {function_name}.\nIt takes (image_shape, classes) "
            "and returns a Keras model.",
        )
    return builder


def chained(
    name: str, image_shape: tuple[int, int, int], models: Sequence[keras.Model]
) -> keras.Model:
    """Makes one model of several sections; each takes what the previous one returns."""
    images = net = keras.Input(image_shape, name="images")
    for number, model in enumerate(models, 1):
        problem = f"model {number} of its list does not fit the previous ones"
        with explained(name, problem):
            net = model(NewSection()(net) if number > 1 else net)
    return keras.Model(images, net)


def check(
    name: str, model: object, image_shape: tuple[int, int, int], classes: int
) -> None:
    """Checks that the towers can train a model, by calling it.

    This makes the variables of a model that has not been called yet.
    """
    if not isinstance(model, keras.Model):
        returned = type(model).__name__
        problem = f"the function returned {returned}; it has to return a keras.Model."
        raise model_error(name, problem)
    images = tf.zeros((2, *image_shape))
    declared = getattr(model, "input_shape", None) if model.built else None
    # Keras would report it by a layer in the model, or in many lines.
    if isinstance(declared, tuple) and not images.shape.is_compatible_with(declared):
        problem = f"the model does not take images of shape {image_shape}: its input"
        fix = "Build it for the image_shape that its function is given"
        if declared[-1] == image_shape[-1]:
            size = ", ".join(map(str, declared[1:-1]))
            fix += f",\nor have it begin with keras.layers.Resizing({size})"
        sides = zip(declared[1:-1], image_shape, strict=False)
        if all(side and side > other for side, other in sides):
            fix += (
                ".\nIf your images are that large and were cropped, --distortions "
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
    """Traces the model as a tower would run it, and checks that it returns logits.

    Evaluation does not require logits; it scores any trained model.
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
        # Keras adds a number to the name of a layer that is called again.
        layer = op.name.split("/")[-2].removesuffix("_1")
        raise model_error(
            name,
            f"it ends in a {op.type.lower()} (in {layer}).\nThe loss has a softmax of "
            "its own and takes logits: end in Dense(classes)\nwithout an activation; "
            "in keras.applications, give classifier_activation=None.",
        )


def flattening(model: keras.Model) -> str:
    """Returns a note if a model scales its images as if they were pixels, up to 255.

    Images come standardized, and such a model would hardly see them. The factors of
    all its rescaling layers before its first weights are multiplied.
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
        f"NOTE: images come standardized; layer {named} of the model (Rescaling) makes "
        f"them {1 / scale:.3g} times smaller, so that it hardly learns. Leave it out."
    )


def _logits(
    images: tf.Tensor, name: str, model: keras.Model, classes: int, *, training: bool
) -> tf.Tensor:
    """Calls a model on two images, and checks that it returns logits."""
    logits = model(images, training=training)
    returned, fits = type(logits).__name__, False
    if isinstance(logits, tf.Tensor):
        returned = f"{logits.dtype.name} {tuple(logits.shape)}"
        fits = logits.dtype.is_floating and logits.shape == (2, classes)
    if not fits:
        raise model_error(
            name,
            f"for 2 images the model returns {returned}; it has to return one floating "
            f"tensor, the logits, of shape (2, {classes}).",
        )
    return logits
