"""Checks and builds the optimizer that `--optimizer` or a recipe selects.

    optimizer = "adamw"
    learning_rate = 0.001

    [optimizer_arguments]   # With Keras's argument names.
    weight_decay = 0.05
    beta_2 = 0.99

Weight decay is decoupled, as in Keras: each update first shrinks the variables by the
fraction `weight_decay` * learning rate (https://arxiv.org/abs/1711.05101). Unlike in
Keras, biases do not decay, nor do scales and offsets of normalization.

Arguments that Keras does not know are refused when `build_optimizer` is called.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cifar10.errors import UsageError

if TYPE_CHECKING:
    import keras

_MUON = "muon"
# Classes of `optimizer_classes.py` in lower case, and the help of the flag.
OWN = {_MUON: "as in airbench, with separate learning rates for biases and the head"}
# Classes of `keras.optimizers` in lower case, besides SGD. Ftrl is missing because it
# recomputes every variable from the current rate: as the rate falls, all variables
# vanish. ScheduleFreeAdamW is missing because it evaluates other values than it trains,
# and checkpoints would not hold them.
KERAS_NAMES = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw"),
    *("lamb", "lion", "nadam", "rmsprop"),
)
NAMES = dict.fromkeys(("sgd", *KERAS_NAMES), "") | OWN
# Optimizers with an argument `momentum`, which --momentum sets.
WITH_MOMENTUM = ("sgd", _MUON, "rmsprop")
# Arguments of Keras's optimizers that may only be set by flags.
_SET_BY_FLAGS = (
    *("name", "learning_rate", "momentum", "global_clipnorm"),
    *("use_ema", "ema_momentum", "ema_overwrite_frequency"),
    *("gradient_accumulation_steps", "loss_scale_factor"),
)
# Filters and matrices decay. Biases, scales and offsets do not. Most are vectors.
_NO_DECAY = r"(^|_)(bias|gamma|beta|scale)$"
# Among the arguments, a pattern of the names of further variables not to decay.
EXCLUDED = "exclude_from_weight_decay"


def check_optimizer(
    name: str | type, momentum: float, arguments: Mapping[str, Any] | None
) -> None:
    """Refuses a momentum or arguments that do not fit the optimizer."""
    is_own = isinstance(name, type)
    if momentum and name not in WITH_MOMENTUM:
        raise UsageError(
            f"--momentum {momentum}: only {', '.join(WITH_MOMENTUM)} take a momentum. "
            "Give --momentum 0; a recipe's [optimizer_arguments] has other arguments."
        )
    for argument, value in (arguments or {}).items():
        what = f"optimizer_arguments: {argument} = {value!a}"
        if argument in _SET_BY_FLAGS and not (is_own and argument == "momentum"):
            raise UsageError(
                f"{what}: only a flag sets this, such as --learning_rate, --momentum, "
                "--clip_norm, --moving_average_decay or --accumulate. Leave it out."
            )
        # Larger numbers are not finite in float32, or no float at all.
        if not is_own and not (isinstance(value, int | float) and abs(value) < 1e30):
            raise UsageError(f"{what}: give true, false or a number below 1e30.")


def build_optimizer(
    name: str | type,
    learning_rate: float,
    momentum: float,
    arguments: Mapping[str, Any] | None = None,
    *,
    variables: Sequence["keras.Variable"] = (),
    trained_parts: Mapping[str, float] | None = None,
    scale_loss: bool = False,
    scale_updates: bool = False,
) -> "keras.Optimizer":
    """Builds an optimizer, whose variables are created later.

    Args:
        name: One of `NAMES`, or a class.
        learning_rate: Initial rate. A new rate is assigned before each update.
        momentum: Ignored by optimizers that are not in `WITH_MOMENTUM`.
        arguments: Further arguments of the optimizer's class; Muon takes none.
        variables: The variables to be updated. Vectors and scalars among them do not
            decay, nor does what its name calls a bias, scale or offset.
        trained_parts: `Architecture.trained_parts`, which only Muon uses.
        scale_loss: Whether to scale the loss by an adaptive factor and skip updates
            that overflow, as float16 requires.
        scale_updates: Whether `slow_down` can scale the updates of single variables.
    """
    import keras

    from cifar10.towers import optimizer_classes

    # Keras refuses integers, which a recipe can contain.
    given: dict[str, Any] = {"learning_rate": float(learning_rate)}
    if name in WITH_MOMENTUM:
        given["momentum"] = float(momentum)
    given |= arguments or {}
    excluded = given.pop(EXCLUDED, None)
    if name == _MUON:
        given["trained_parts"] = trained_parts
    classes = {**vars(keras.optimizers), **vars(optimizer_classes)}
    of_names = {key.lower(): kind for key, kind in classes.items()}
    kind = name if isinstance(name, type) else of_names[name]
    if scale_updates:
        kind = type(kind.__name__, (optimizer_classes.ScaledUpdates, kind), {})
    try:
        optimizer = kind(**given)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"optimizer_arguments: {kind.__name__} refuses these arguments.\n{error}"
        ) from error
    kept = [v for v in variables if len(v.shape) < 2 or re.search(_NO_DECAY, v.name)]
    optimizer.exclude_from_weight_decay(kept, [excluded] if excluded else None)
    return keras.optimizers.LossScaleOptimizer(optimizer) if scale_loss else optimizer


def slow_down(
    optimizer: "keras.Optimizer", variables: Collection["keras.Variable"], factor: float
) -> None:
    """Multiplies all later updates of some variables by a factor.

    The optimizer is from `build_optimizer` with `scale_updates`; its variables exist.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    factors = optimizer.factors.numpy()
    for variable in variables:
        factors[optimizer.indices[variable.value.ref()]] = factor
    optimizer.factors.assign(factors)
