"""Losses, metrics, optimizers and learning rates that a program gives as objects.

`config.json` records a function by its name, and an object of Keras by its class and
configuration, so that a run resumes only with the same. Nothing here imports Keras
unless the program has done so.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cifar10.errors import UsageError, reason
from cifar10.models.registry import PYTHON, name_of_function
from cifar10.towers.optimizers import KERAS_NAMES

# What a training or an evaluation calls numbers of its own.
_TAKEN = (
    *("step", "time", "seconds", "part", "num_examples", "total_loss"),
    *("cross_entropy", "examples_per_sec", "macro F1", "balanced accuracy"),
    *("temperature", "expected calibration error"),
    *("weight_decay", "learning_rate", "gradient_norm", "loss_scale", "skipped_steps"),
)
_OF_RATE = ("schedule", "warmup_epochs", "epochs_per_decay")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonObjects:
    """The objects of a program, as `Config` takes them; None where there is none."""

    loss: Callable | None = None
    metrics: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    optimizer: type | None = None
    keras_schedule: Callable | None = None

    def check(self, values: Mapping[str, Any]) -> None:
        """Refuses to continue a run without the objects that its `values` name."""
        own = values["optimizer"].startswith(PYTHON) and values["optimizer"]
        for name, recorded in {**values, "optimizer": own}.items():
            if recorded and getattr(self, name, recorded) is None:
                argument = "learning_rate" if name == "keras_schedule" else name
                raise UsageError(
                    f"The run's {argument} is an object of a Python program: {recorded}"
                    ".\nOnly that program can continue it, with cifar10.train(Config("
                    f"resume=..., {argument}=...))."
                )


def take_objects(given: dict[str, Any]) -> PythonObjects:
    """Replaces the objects among a program's arguments by what is recorded of them.

    Raises:
        UsageError: An object cannot be used, or contradicts another argument.
    """
    own: dict[str, Any] = {"metrics": _named(given.pop("metrics", ()))}
    if hasattr(given.get("optimizer"), "get_config"):
        own["optimizer"] = type(given["optimizer"])
        _refuse(given, ("learning_rate", "optimizer_arguments"), "the optimizer")
        given |= _settings_of_optimizer(given["optimizer"])
    if hasattr(given.get("learning_rate"), "get_config"):
        own["keras_schedule"] = given["learning_rate"]
        _refuse(given, _OF_RATE, "the learning rate")
        record = _record(given["learning_rate"])
        first = [*record["config"].get("values", ()), 0.0][0]
        first = record["config"].get("initial_learning_rate", first)
        given |= {"keras_schedule": record, "learning_rate": first}
        given |= {"schedule": "staircase", "warmup_epochs": 0.0}
    if given.get("loss") is not None:
        own["loss"] = given["loss"]
        given["loss"] = _record_of_loss(given["loss"])
    return PythonObjects(**own)


def _settings_of_optimizer(optimizer: Any) -> dict[str, Any]:
    kind, arguments = type(optimizer).__name__, _record(optimizer)["config"]
    is_keras = type(optimizer).__module__.partition(".")[0] == "keras"
    if is_keras and kind.lower() not in ("sgd", *KERAS_NAMES):
        raise UsageError(
            f"optimizer: Keras's {kind} is none of those that the towers can train "
            f"with: sgd, {', '.join(KERAS_NAMES)}."
        )
    rate = arguments.pop("learning_rate")
    if isinstance(rate, Mapping):
        import keras

        try:
            rate = keras.optimizers.schedules.deserialize(rate)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"optimizer: its learning rate: {reason(error)}"
            ) from error
    values = {"optimizer": PYTHON + kind, "optimizer_arguments": arguments}
    return {**values, "learning_rate": rate, "momentum": 0.0}


def _record_of_loss(loss: Any) -> str | dict[str, Any]:
    if not callable(loss) or isinstance(loss, type):
        raise UsageError(
            f"loss {loss!r}: it is neither a function from (labels, logits) to the "
            "loss of each image nor a keras.losses.Loss."
        )
    if not hasattr(loss, "get_config"):
        return name_of_function(loss)
    record = _record(loss)
    config = record["config"]
    if config.get("from_logits") is False:
        raise UsageError(
            f"loss: {record['class_name']} expects probabilities, but models return "
            "logits. Give it from_logits=True."
        )
    if config.get("reduction") == "sum" or config.get("ignore_class") is not None:
        raise UsageError(
            f"loss: {record['class_name']} is no mean over all images with {config}, so"
            " towers would not add up to one. Leave out reduction and ignore_class."
        )
    return record


def _record(given: Any) -> dict[str, Any]:
    """Returns the class and configuration of an object, without its numbered name."""
    config = {name: v for name, v in given.get_config().items() if name != "name"}
    return {"class_name": type(given).__name__, "config": config}


def _refuse(given: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    if beside := [name for name in names if name in given]:
        raise UsageError(
            f"Config: {what} is an object, which decides {beside[0]}. Leave that out."
        )


def _named(metrics: Any) -> dict[str, Callable]:
    if not isinstance(metrics, Mapping):
        metrics = {getattr(one, "__name__", f"{one}"): one for one in metrics}
    for name, metric in metrics.items():
        if not callable(metric) or hasattr(metric, "get_config"):
            raise UsageError(
                f"metrics: {name} is no function from (labels, logits) to a value for "
                "each image. A metric object of\nKeras counts in variables, and towers "
                "write none; give its function, such as\n"
                "keras.metrics.sparse_top_k_categorical_accuracy."
            )
        is_name = f"{name}".replace("_", "a").replace(" ", "a").isalnum()
        if not is_name or name in _TAKEN:
            raise UsageError(
                f"metrics: {name} is {'taken' if is_name else 'no name'}. Give a dict "
                "of functions by other names, of letters, digits, _ and spaces."
            )
    return dict(metrics)
