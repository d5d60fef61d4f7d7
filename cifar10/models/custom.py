"""Models of the user's own: finds them and says what does not fit."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.layers import NewSection

Builder = Callable[..., keras.Model]


def find(name: str, known: Iterable[str]) -> Builder:
    """Imports the function that `--model` names.

    Args:
        name: `module:function`.
        known: The names that need no module.

    Raises:
        UsageError: There is none.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not function_name or module_name[:1] in ("", "."):
        raise UsageError(
            f"--model {name}: there is no such model. Known are {', '.join(known)}; "
            "for one of your own say module:function, as in --model my_models:small."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A failing import inside the user's module keeps its traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"--model {name}: there is no module {module_name} in {Path.cwd()} "
            "or among the installed packages."
        ) from error
    builder = getattr(module, function_name, None)
    if not callable(builder):
        raise UsageError(
            f"--model {name}: {getattr(module, '__file__', None) or module_name} has "
            f"no function {function_name}. It takes (image_shape, classes) and returns "
            "a Keras model."
        )
    return builder


def check_arguments(name: str, builder: Builder, given: Mapping[str, int]) -> None:
    """Refuses a function that cannot be called as it has to be.

    Args:
        name: As `--model` says it.
        builder: The function.
        given: Its arguments besides the shape of an image and the number of classes.

    Raises:
        UsageError: It does not take them.
    """
    try:
        signature = inspect.signature(builder)
        signature.bind((24, 24, 3), 10)
    except TypeError as error:
        raise UsageError(
            f"--model {name}: {name.rpartition(':')[2]} has to take (image_shape, "
            f"classes); {error}."
        ) from error
    for key, value in given.items():
        try:
            signature.bind((24, 24, 3), 10, **{key: value})
        except TypeError as error:
            raise UsageError(
                f"--{key} {value}: the model {name} takes no {key}; leave it out."
            ) from error


def chained(
    name: str, image_shape: tuple[int, int, int], models: Sequence[keras.Model]
) -> keras.Model:
    """Makes one model of several, with a section for each.

    Args:
        name: As `--model` says it.
        image_shape: Height, width and channels of one image.
        models: Keras models, each for what the one before returns.

    Raises:
        UsageError: They are none, or do not fit one another.
    """
    if not models or not all(isinstance(one, keras.Model) for one in models):
        kinds = ", ".join(type(one).__name__ for one in models) or "nothing"
        raise UsageError(
            f"--model {name}: the function returned a list of {kinds}; it has to hold "
            "Keras models."
        )
    images = net = keras.Input(image_shape, name="images")
    for number, one in enumerate(models):
        try:
            net = one(NewSection()(net) if number else net)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--model {name}: number {number + 1} of the models does not take what "
                f"comes before it: {error}"
            ) from error
    try:
        return keras.Model(images, net)
    except ValueError as error:  # Two of them have the same name.
        raise UsageError(
            f"--model {name}: the models do not go together: {error}"
        ) from error


def check(
    name: str, model: object, image_shape: tuple[int, int, int], classes: int
) -> None:
    """Refuses what the towers cannot train, with the shape that was expected.

    A model that has not been called yet is called here, which makes its variables.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"--model {name}: the function returned {type(model).__name__}; "
            "it has to return a keras.Model."
        )
    declared = getattr(model, "input_shape", None) if model.built else None
    if isinstance(declared, tuple) and not _fits(image_shape, declared[1:]):
        raise UsageError(
            f"--model {name}: the model does not take images of shape {image_shape}; "
            f"its own is {declared[1:]}."
        )
    try:
        logits = model(tf.zeros((2, *image_shape)), training=False)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        raise UsageError(
            f"--model {name}: the model does not take images of shape {image_shape}: "
            f"{error}"
        ) from error
    if not isinstance(logits, tf.Tensor) or not logits.dtype.is_floating:
        kind = type(logits).__name__
        if isinstance(logits, tf.Tensor):
            kind = f"a tensor of {logits.dtype.name}"
        raise UsageError(
            f"--model {name}: the model returns {kind}; it has to return one floating "
            "tensor, the logits."
        )
    shape = tuple(logits.shape)
    if shape != (2, classes):
        raise UsageError(
            f"--model {name}: for 2 images the model returns shape {shape}; it has to "
            f"return logits of shape (2, {classes}), one per class."
        )
    if not model.trainable_variables:
        raise UsageError(f"--model {name}: the model has no trainable variables.")


def _fits(shape: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    """Tells whether a shape is one that a model declares; None stands for any size."""
    return len(shape) == len(declared) and all(
        size in (own, None) for own, size in zip(shape, declared, strict=True)
    )
