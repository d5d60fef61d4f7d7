"""`--optimizer`: the names of the optimizers, and a recipe's arguments for one.

    optimizer = "adamw"
    learning_rate = 0.001

    [optimizer_arguments]   # As Keras calls them.
    weight_decay = 0.05
    beta_2 = 0.99

Only Keras knows which arguments its optimizers have: `towers/keras_optimizers.py`
checks them when the model is built.
"""

from collections.abc import Mapping
from typing import Any

from cifar10.config.options import LARGEST_NUMBER, is_number
from cifar10.errors import UsageError, did_you_mean

# Of this package; `sgd` is Keras's as well.
_OURS = ("sgd", "muon")
# Of `keras.optimizers`, in lower case.
KERAS = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw"),
    *("lamb", "lion", "nadam", "rmsprop"),
)
NAMES = (*_OURS, *KERAS)
# Those of `keras.optimizers` that cannot work here, and why.
REFUSED = {
    "ftrl": "it computes every variable anew from the rate of the moment, so that all "
    "of them shrink to nothing as the rate falls. Give adagrad",
    "lossscaleoptimizer": "--precision float16 puts it around any other. Give that",
    "multioptimizer": "it consists of optimizers, which a recipe cannot give. Give one",
    "optimizer": "it is the class of all of them. Give one",
    "schedulefreeadamw": "it trains other values than those to evaluate, which no "
    "checkpoint would hold. Give adamw with --schedule cosine",
}
# Those with an argument `momentum`, which --momentum sets.
WITH_MOMENTUM = (*_OURS, "rmsprop")
# Arguments of Keras's optimizers that a flag decides, as all of training needs them.
_FLAGS = {
    "learning_rate": "--learning_rate",
    "momentum": "--momentum",
    "global_clipnorm": "--clip_norm",
    "use_ema": "--moving_average_decay",
    "ema_momentum": "--moving_average_decay",
    "ema_overwrite_frequency": "--moving_average_decay",
    "gradient_accumulation_steps": "--accumulate",
    "loss_scale_factor": "--precision float16",
}
# Arguments that a table cannot give, and one that changes nothing.
WITHHELD = (*_FLAGS, "name")


def check(name: str, momentum: float, arguments: Mapping[str, Any] | None) -> None:
    """Refuses an optimizer that does not exist, and arguments that it cannot take.

    `name` is in lower case.
    """
    if name in REFUSED:
        raise UsageError(f"--optimizer {name}: {REFUSED[name]}.")
    if name not in NAMES:
        raise UsageError(
            f"--optimizer {name}: there is no such optimizer."
            f"{did_you_mean(name, NAMES)} It is one of {', '.join(NAMES)}."
        )
    if momentum and name not in WITH_MOMENTUM:
        raise UsageError(
            f"--momentum {momentum}: {name} has no momentum, only "
            f"{', '.join(WITH_MOMENTUM)} have one.\nGive --momentum 0; its own "
            "arguments go into the table [optimizer_arguments] of a recipe."
        )
    for argument, value in (arguments or {}).items():
        _check_argument(name, argument, value)


def _check_argument(name: str, argument: str, value: Any) -> None:
    what = f"optimizer_arguments of the recipe: {argument} = {value!a}"
    if argument in _FLAGS:
        raise UsageError(f"{what}: {_FLAGS[argument]} decides it. Take it out.")
    if name == "muon":
        raise UsageError(
            f"{what}: muon has no arguments but --momentum; its constants are "
            "airbench's. Take it out."
        )
    if not isinstance(value, bool) and not is_number(value):
        raise UsageError(
            f"{what}: it has to be a finite number of at most {LARGEST_NUMBER:g}, or "
            "true or false."
        )
