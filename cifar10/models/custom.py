"""Imports users' models and checks that they can be trained."""

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from cifar10 import errors
from cifar10.errors import StoppedError, UsageError, reason

# Tracebacks leave out lines of these folders, since the mistake is in the user's code.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(module.__file__)), "")  # noqa: PTH118, PTH120
    for module in (errors, keras, os, tf)
)


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
        raise UsageError(f"--model {name}: {problem}.\n{lines.rstrip()}") from error


def import_function(name: str) -> Callable[..., keras.Model]:
    """Imports the function that `--model module:function` names."""
    module_name, _, function_name = name.partition(":")
    with explained(name, f"{module_name} cannot be imported"):
        module = importlib.import_module(module_name)
    builder = getattr(module, function_name, None)
    if not callable(builder):
        file = getattr(module, "__file__", None) or module_name
        raise UsageError(
            f"--model {name}: {file} has no function {function_name}. Define one that "
            "takes (image_shape, classes) and returns a Keras model."
        )
    return builder


def check(
    name: str, model: object, image_shape: tuple[int, int, int], classes: int
) -> None:
    """Checks a model by a call, which creates the variables of one not built yet."""
    if not isinstance(model, keras.Model):
        returned = type(model).__name__
        problem = f"the function returned {returned}, but must return a keras.Model."
        raise UsageError(f"--model {name}: {problem}")
    images = tf.zeros((2, *image_shape))
    with explained(name, f"the model failed on images of shape {image_shape}"):
        _logits(images, name, model, classes, training=False)
    if not model.trainable_variables:
        raise UsageError(f"--model {name}: the model has no trainable variables.")


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
        raise UsageError(
            f"--model {name}: it ends in a {op.type.lower()}, but the loss takes "
            "logits. Leave out the activation (in keras.applications, "
            "classifier_activation=None)."
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
        raise UsageError(
            f"--model {name}: for 2 images it returned {returned}, but must return "
            f"logits: one floating-point tensor of shape (2, {classes})."
        )
    return logits
