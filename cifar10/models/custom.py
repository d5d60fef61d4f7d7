"""Users' models: imports them and checks that the towers can train them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.layers import NewSection
from cifar10.models import names

Builder = Callable[..., keras.Model]


def find(name: str, known: Iterable[str]) -> Builder:
    """Imports the function that `--model module:function` names."""
    names.check(name, known)
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A failing import inside the user's module keeps its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise names.no_module(name) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        file = getattr(module, "__file__", None) or module_name
        raise names.error(
            name,
            f"{file} has no function {function_name}.\nIt takes (image_shape, classes) "
            "and returns a Keras model.",
        )
    return builder


def check_arguments(name: str, builder: Builder, given: Mapping[str, int]) -> None:
    """Checks that a function takes (image_shape, classes) and the `given` arguments."""
    try:
        signature = inspect.signature(builder)
        signature.bind((24, 24, 3), 10)
    except TypeError as error:
        function = name.rpartition(":")[2]
        problem = f"{function} has to take (image_shape, classes); {error}."
        raise names.error(name, problem) from error
    for key, value in given.items():
        try:
            signature.bind((24, 24, 3), 10, **{key: value})
        except TypeError as error:
            raise UsageError(
                f"--{key} {value}: the model {name} has no {key}; omit the flag."
            ) from error


def chained(
    name: str, image_shape: tuple[int, int, int], models: Sequence[keras.Model]
) -> keras.Model:
    """Makes one model of several sections; each takes what the previous one returns."""
    images = net = keras.Input(image_shape, name="images")
    try:
        for number, model in enumerate(models, 1):
            net = model(NewSection()(net) if number > 1 else net)
        return keras.Model(images, net)
    except (TypeError, ValueError) as error:
        # `number` is the last if two of them have the same name.
        problem = f"model {number} of its list does not fit the previous ones: {error}"
        raise names.error(name, problem) from error


def check(
    name: str, model: object, image_shape: tuple[int, int, int], classes: int
) -> None:
    """Checks that the towers can train a model, by calling it.

    This makes the variables of a model that has not been called yet.
    """
    if not isinstance(model, keras.Model):
        returned = type(model).__name__
        problem = f"the function returned {returned}; it has to return a keras.Model."
        raise names.error(name, problem)
    images = tf.zeros((2, *image_shape))
    declared = getattr(model, "input_shape", None) if model.built else None
    try:
        # For a Sequential model Keras would report it in many lines.
        if declared and not images.shape.is_compatible_with(declared):
            raise ValueError(f"its input shape is {declared[1:]}")  # noqa: TRY301
        logits = model(images, training=False)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        problem = f"the model does not take images of shape {image_shape}: {error}"
        raise names.error(name, problem) from error
    returned, fits = type(logits).__name__, False
    if isinstance(logits, tf.Tensor):
        returned = f"{logits.dtype.name} {tuple(logits.shape)}"
        fits = logits.dtype.is_floating and logits.shape == (2, classes)
    if not fits:
        raise names.error(
            name,
            f"for 2 images the model returns {returned}; it has to return one floating "
            f"tensor, the logits, of shape (2, {classes}).",
        )
    if not model.trainable_variables:
        raise names.error(name, "the model has no trainable variables.")
