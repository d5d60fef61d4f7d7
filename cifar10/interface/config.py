"""What a program trains: the flags as arguments, with objects in place of names."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from cifar10.config import config as flags_config, data_flag, flags
from cifar10.config.options import is_a, names
from cifar10.errors import UsageError, did_you_mean, reason
from cifar10.models import names as model_names

# Flags that one training in one process cannot have.
_OF_LAUNCHER = ("local_workers", "max_restarts")


class Config:
    """What to train, on what, and how.

        Config(model=small, data=(x, y), max_steps=500, optimizer="adamw")

    Every flag of train_multi_gpu.py is an argument, with the same default, by recipe.
    So are a recipe's other settings, such as `stages`, and `resume="runs/mine"`.

    Args:
        model: The name of a model, or a function that takes (image_shape, classes) and
            returns a Keras model.
        data: The name of a data set or the path of pictures, as --data takes it; or
            arrays (x, y) or ((x, y), (x_test, y_test)), or an object with the
            attributes of `cifar10.input.datasets.Dataset`. Images are uint8
            [count, height, width, 3], 0 to 255, or grey as [count, height, width] or
            [count, height, width, 1]; labels are integers [count] or [count, 1].
        **given: The other flags.

    Attributes:
        flags: All flags as they are in effect.
        model: As given.
        data: As given.

    Raises:
        UsageError: A value is impossible, or there is no such flag.
    """

    def __init__(
        self,
        *,
        model: str | Callable[..., Any] | None = None,
        data: Any = None,
        **given: Any,
    ) -> None:
        self.model = model
        self.data = data
        for name in given:
            _check_name(name)
        named = {
            name: os.fspath(value) if isinstance(value, Path) else value
            for name, value in given.items()
        }
        if model is not None:
            named["model"] = _name_of_model(model)
        if data is not None:
            named["data"] = name_of_data(data)
        types = {**get_type_hints(flags_config.Config), "resume": str}
        check_types("Config", named, types)
        self.flags: flags_config.Config = flags.with_recipe(named)

    def __repr__(self) -> str:
        return f"Config({self.flags})"


def _check_name(name: str) -> None:
    known = names(flags_config.Config) - set(_OF_LAUNCHER) | {"resume"}
    if name in _OF_LAUNCHER:
        raise UsageError(
            f"Config: {name} starts other processes, which the command cifar10 train "
            "does. Give it there."
        )
    if name not in known:
        raise UsageError(f"Config: there is no {name}.{did_you_mean(name, known)}")


def check_types(called: str, given: dict[str, Any], types: Mapping[str, Any]) -> None:
    """Refuses arguments of another type, or that `config.json` could not hold."""
    for name, value in given.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            kind = type(value).__name__
            raise UsageError(
                f"{called}: {name}, of type {kind}, cannot be written as JSON: "
                f"{reason(error)}. Give plain numbers, strings, lists and dicts; "
                "NumPy's become that by .item() and .tolist()."
            ) from error
        if not is_a(value, types[name]):
            kind = getattr(types[name], "__name__", types[name])
            raise UsageError(f"{called}: {name}={value!r} is not of type {kind}.")


def _name_of_model(model: str | Callable[..., Any]) -> str:
    if isinstance(model, str):
        return model
    if hasattr(model, "layers") or not callable(model):
        raise UsageError(
            f"Config: model={model!r} is not a function. Give one that takes "
            "(image_shape, classes) and returns a new Keras model."
        )
    return model_names.of(model)


def name_of_data(data: Any) -> str:
    """Returns what `config.json` calls data."""
    if isinstance(data, str | Path):
        return os.fspath(data)
    kind = "arrays" if isinstance(data, tuple) else "dataset"
    return data_flag.PYTHON + kind
