"""Accepts Python objects as loss, metrics, optimizer and learning rate of a `Config`.

`config.json` records a function by its name, and a Keras object by its class and
configuration. A run resumes only if these records are the same.
"""

from collections.abc import Callable, Mapping
from typing import Any

from cifar10.errors import UsageError
from cifar10.models.registry import PYTHON, name_of_function

METRICS = "metrics/"  # The prefix of a program's metrics, and of no other metrics.


def resolve(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts arguments of `Config` to fields, and sets those that follow."""
    for name, kind in given.items():
        if isinstance(kind, type) and hasattr(kind, "get_config"):
            raise UsageError(f"{name} is a class. Give {name}={kind.__name__}().")
    given, optimizer = dict(given), given.get("optimizer")
    if hasattr(optimizer, "get_config"):
        given = {**_settings(optimizer), **given, "optimizer": type(optimizer)}
    rate: Any = given.get("learning_rate")
    if hasattr(rate, "get_config"):
        first = rate.get_config().get("initial_learning_rate", 0.0)
        given |= {"keras_schedule": rate, "learning_rate": first}
        given = {"schedule": "staircase", "warmup_epochs": 0.0, **given}
    if callable(loss := given.get("loss")):
        given = {"label_smoothing": 0.0, "class_weights": None, **given}
        described: dict[str, Any] = getattr(loss, "get_config", dict)()
        if described.get("from_logits") is False:
            raise UsageError("The loss gets logits. Create it with from_logits=True.")
    if given.get("metrics") is not None:
        given["metrics"] = OwnMetrics(given["metrics"])
    return given


class OwnMetrics(dict[str, Callable]):
    """A user's metric functions, by the names under which their values are logged."""

    def __init__(self, metrics: Any) -> None:
        given = metrics.values() if isinstance(metrics, Mapping) else [None]
        if not all(callable(one) and not hasattr(one, "reset_state") for one in given):
            raise UsageError(
                f"metrics {metrics!r}: give a dict of functions that keep no state,\n"
                "such as metrics={'top': keras.metrics.sparse_categorical_accuracy}."
            )
        super().__init__({f"{METRICS}{name}": metrics[name] for name in metrics})

    def __call__(self, labels: Any, logits: Any) -> dict[str, Any]:
        """Returns the value of each metric, by name."""
        return {name: metric(labels, logits) for name, metric in self.items()}


def _settings(optimizer: Any) -> dict[str, Any]:
    config = optimizer.get_config()
    config.pop("name")  # Keras numbers its objects in their names.
    usual, rate = type(optimizer)(0.0).get_config(), config.pop("learning_rate")
    if isinstance(rate, Mapping):
        import keras

        rate = keras.optimizers.schedules.deserialize(rate)
    arguments = {name: value for name, value in config.items() if value != usual[name]}
    return {"learning_rate": rate, "momentum": 0.0, "optimizer_arguments": arguments}


def record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts fields to values for `config.json`, and the field `metrics` to None."""
    return {name: _recorded(values[name]) for name in values} | {"metrics": None}


def _recorded(value: Any) -> Any:
    if isinstance(value, type):
        return PYTHON + value.__name__
    if hasattr(value, "get_config"):
        return f"{type(value).__name__} {value.get_config()}"
    return name_of_function(value) if callable(value) else value
