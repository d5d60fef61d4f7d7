"""Accepts Python objects as loss, metrics, optimizer and learning rate of a `Config`.

`config.json` records a function by its name, and a Keras object by its class and
configuration. A run resumes only if these records are the same.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cifar10.errors import UsageError
from cifar10.models.registry import PYTHON, name_of_function
from cifar10.towers import schedule
from cifar10.towers.optimizers import EXCLUDED

# Losses and metrics, however their names are spelled.
_OF_PROBABILITIES = (
    *("categoricalgeneralizedcrossentropy", "ctc", "dice", "kldivergence"),
    *("poisson", "tversky"),
)
_NOT_TAKEN = {"LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW"}
METRICS = "metrics/"  # The prefix of a program's metrics, and of no other metrics.


def resolve(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts arguments of `Config` to fields, and sets dependent fields."""
    for name, kind in given.items():
        if isinstance(kind, type) and hasattr(kind, "get_config"):
            raise UsageError(f"{name} is a class. Give {name}={kind.__name__}().")
    given, optimizer = dict(given), given.get("optimizer")
    if hasattr(optimizer, "get_config"):
        settings = _settings(optimizer)
        more = given.get("optimizer_arguments") or {}
        if isinstance(more, Mapping):  # Else the check of types refuses it.
            given["optimizer_arguments"] = settings["optimizer_arguments"] | {**more}
        given = {**settings, **given, "optimizer": type(optimizer)}
    rate: Any = given.get("learning_rate")
    if hasattr(rate, "get_config"):
        first = _described(rate).get("initial_learning_rate", 0.0)
        _refuse(given, "a Keras schedule", "schedule", *schedule.PARAMETERS)
        given |= {"keras_schedule": rate, "learning_rate": first}
        given = {"schedule": "staircase", "warmup_epochs": 0.0, **given}
    if callable(loss := given.get("loss")):
        _refuse(given, "a custom loss", "label_smoothing", "class_weights")
        given = {"label_smoothing": 0.0, "class_weights": None, **given}
        _check_takes_logits("The loss", loss)
    if given.get("metrics") is not None:
        given["metrics"] = OwnMetrics(given["metrics"])
    return given


def _refuse(given: Mapping[str, Any], beside: str, *names: str) -> None:
    """Refuses settings that have no effect."""
    for name in filter(given.get, names):
        raise UsageError(f"{name} has no effect with {beside}. Leave it out.")


def _check_takes_logits(subject: str, function: Callable) -> None:
    """Refuses a loss or metric that would take logits for probabilities."""
    from_logits = None
    if hasattr(function, "get_config"):
        from_logits = function.get_config().get("from_logits")
    else:
        # A built-in callable may have no signature.
        with contextlib.suppress(KeyError, TypeError, ValueError):
            from_logits = inspect.signature(function).parameters["from_logits"].default
    function = getattr(function, "func", function)  # Unwraps a `functools.partial`.
    name = getattr(function, "__name__", type(function).__name__)
    if name.replace("_", "").lower() in _OF_PROBABILITIES:
        raise UsageError(f"{subject}, {name}, expects probabilities, but gets logits.")
    if name in ("categorical_accuracy", "top_k_categorical_accuracy"):
        raise UsageError(f"{subject} gets whole numbers as labels. Give sparse_{name}.")
    if from_logits is False:
        fix = "from_logits=True, or give functools.partial(FUNCTION, from_logits=True)"
        raise UsageError(f"{subject} gets logits. Create it with {fix}.")


class OwnMetrics(dict[str, Callable]):
    """A user's metric functions, by the names under which their values are logged."""

    def __init__(self, metrics: Any) -> None:
        given = metrics.values() if isinstance(metrics, Mapping) else [None]
        if not all(callable(one) and not hasattr(one, "reset_state") for one in given):
            fix = "give a dict of functions that keep no state"
            example = "metrics={'top': keras.metrics.sparse_categorical_accuracy}"
            raise UsageError(f"metrics {metrics!r}: {fix},\nsuch as {example}.")
        for name, metric in metrics.items():
            if not (name and isinstance(name, str)):
                raise UsageError(f"metrics: {name!r} is not a name. Give a word.")
            _check_takes_logits(f"The metric {name}", metric)
        super().__init__({f"{METRICS}{name}": metrics[name] for name in metrics})

    def __call__(self, labels: Any, logits: Any) -> dict[str, Any]:
        """Returns the value of each metric, by name."""
        return {name: metric(labels, logits) for name, metric in self.items()}


def _settings(optimizer: Any) -> dict[str, Any]:
    name = type(optimizer).__name__
    if not _NOT_TAKEN.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        why = f"{name} wraps other optimizers, or evaluates values other than it trains"
        fix = "Give another optimizer; precision='float16' scales the loss"
        raise UsageError(f"optimizer: {why}. {fix}.")
    try:
        usual = type(optimizer)(learning_rate=0.0).get_config()
    except TypeError as error:
        why = f"{name} cannot be created as {name}(learning_rate=0.0)"
        fix = f"Give its other arguments defaults.\n{error}"
        raise UsageError(f"optimizer: {why}. {fix}") from error
    config = _described(optimizer)
    for argument, one in inspect.signature(type(optimizer)).parameters.items():
        is_kept = argument in config or one.default is one.empty  # As **kwargs.
        value = getattr(optimizer, argument, one.empty)
        if not is_kept and repr(value) != repr(one.default):  # Arrays compare by item.
            why = f"get_config() of {name} lacks {argument}, which towers take from it"
            raise UsageError(f"optimizer: {why}. Let it return all arguments.")
    config.pop("name")  # Keras numbers its objects in their names.
    rate = config.pop("learning_rate")
    if not isinstance(rate, float):  # Keras could recreate only what is registered.
        rate = vars(optimizer)["_learning_rate"]
    arguments = {name: value for name, value in config.items() if value != usual[name]}
    if vars(optimizer).get("_exclude_from_weight_decay"):
        why = "the variables are not in the model to train. Give var_names"
        raise UsageError(f"optimizer.exclude_from_weight_decay(var_list=...): {why}.")
    if pattern := vars(optimizer).get("_exclude_from_weight_decay_pattern"):
        arguments[EXCLUDED] = "|".join(sorted(pattern.pattern.split("|")))  # Of a set.
    return {"learning_rate": rate, "momentum": 0.0, "optimizer_arguments": arguments}


def _described(given: Any) -> dict[str, Any]:
    """Returns the configuration of an object of Keras."""
    try:
        return given.get_config()
    except NotImplementedError as error:
        fix = "its learning rate needs a get_config() method that returns its arguments"
        why = "a resumed run must have the same ones"
        raise UsageError(f"{type(given).__name__}: {fix}: {why}.") from error


def record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts fields to values for `config.json`, and the field `metrics` to None."""
    return {name: _recorded(values[name]) for name in values} | {"metrics": None}


def _recorded(value: Any) -> Any:
    if isinstance(value, type):
        return PYTHON + value.__name__
    if hasattr(value, "get_config"):
        return f"{type(value).__name__} {value.get_config()}"
    return name_of_function(value) if callable(value) else value
