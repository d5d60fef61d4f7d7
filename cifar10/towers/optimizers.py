"""The optimizers: what `--optimizer` and a recipe may say, and how one is built.

    optimizer = "adamw"
    learning_rate = 0.001

    [optimizer_arguments]   # Under Keras's names.
    weight_decay = 0.05
    beta_2 = 0.99

Weight decay is Keras's: each update first takes `weight_decay` times the learning rate
off the variables (https://arxiv.org/abs/1711.05101). As is usual, biases, and scales
and offsets of normalization, are left out; Keras alone would let them decay too.

Only Keras knows which arguments its optimizers have, so it is asked when one is built.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cifar10.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import keras

_SGD, _MUON = "sgd", "muon"
# Classes of `keras.optimizers`, in lower case; `sgd` is Keras's as well. Not Ftrl: it
# computes every variable anew from the current rate, so that all of them shrink to
# nothing as the rate falls. Nor ScheduleFreeAdamW: the values to evaluate are not those
# that it trains, and no checkpoint would hold them.
KERAS_NAMES = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw"),
    *("lamb", "lion", "nadam", "rmsprop"),
)
NAMES = (_SGD, _MUON, *KERAS_NAMES)
# Those with an argument `momentum`, which --momentum sets.
WITH_MOMENTUM = (_SGD, _MUON, "rmsprop")
# Arguments of Keras's optimizers that a flag decides, as all of training needs them.
_FLAGS = {
    "name": "--optimizer",
    "learning_rate": "--learning_rate",
    "momentum": "--momentum",
    "global_clipnorm": "--clip_norm",
    "use_ema": "--moving_average_decay",
    "ema_momentum": "--moving_average_decay",
    "ema_overwrite_frequency": "--moving_average_decay",
    "gradient_accumulation_steps": "--accumulate",
    "loss_scale_factor": "--precision float16",
}
_LARGEST_NUMBER = 1e30  # float32 holds it.
# Filters and matrices have more; biases, scales and offsets are vectors.
_LEAST_DIMENSIONS_TO_DECAY = 2


def check_optimizer(
    name: str | type,
    learning_rate: float,
    momentum: float,
    arguments: Mapping[str, Any] | None,
) -> None:
    """Refuses an unknown optimizer, and arguments that it does not take.

    Args:
        name: A name in lower case, or a program's own class.
        learning_rate: The highest learning rate.
        momentum: The momentum; 0 for none.
        arguments: The recipe's table `optimizer_arguments`.

    Raises:
        UsageError: The message names the optimizers, or the arguments of this one.
    """
    if not isinstance(name, type) and name not in NAMES:
        raise UsageError(
            f"--optimizer {name}: there is no such optimizer."
            f"{did_you_mean(name, NAMES)} It is one of {', '.join(NAMES)}."
        )
    if momentum and name not in WITH_MOMENTUM:
        raise UsageError(
            f"--momentum {momentum}: {name} takes no momentum, only "
            f"{', '.join(WITH_MOMENTUM)} do.\nGive --momentum 0, and other arguments "
            "in the table [optimizer_arguments] of a recipe."
        )
    if name == _MUON and not learning_rate:
        raise UsageError(
            "--learning_rate 0: with --optimizer muon it has to be above 0; "
            "airbench's is 0.24."
        )
    for argument, value in (arguments or {}).items():
        _check_value(name, argument, value)


def _check_value(optimizer: str | type, argument: str, value: Any) -> None:
    what = f"optimizer_arguments: {argument} = {value!a}"
    is_own = isinstance(optimizer, type)
    if argument in _FLAGS and not (is_own and argument == "momentum"):
        raise UsageError(f"{what}: {_FLAGS[argument]} decides it. Take it out.")
    if optimizer == _MUON:
        raise UsageError(
            f"{what}: muon has no arguments but --momentum; its constants are "
            "airbench's. Take it out."
        )
    if is_own:
        return
    if not isinstance(value, int | float) or not abs(value) <= _LARGEST_NUMBER:
        raise UsageError(
            f"{what}: it has to be a finite number of at most {_LARGEST_NUMBER:g}, or "
            "true or false."
        )


def computes_much(name: str | type) -> bool:
    """Returns whether an update takes long on a CPU: Muon takes 0.1 s for airbench."""
    return name == _MUON


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
) -> "keras.optimizers.Optimizer":
    """Builds an optimizer, but not yet its variables.

    Args:
        name: One of `NAMES`, or a class.
        learning_rate: Rate until another one is assigned.
        momentum: Passed on to an optimizer that takes one.
        arguments: Further arguments of the optimizer's class; Muon takes none.
        variables: What the optimizer is going to update. Vectors and scalars do not
            decay.
        trained_parts: As `Architecture.trained_parts`; only Muon uses it.
        scale_loss: Whether to scale the loss, by a factor that adapts, and to skip
            updates that overflow, as float16 requires.
        scale_updates: Whether each variable's update has a factor, for `slow_down`.

    Raises:
        UsageError: The optimizer has no such argument, or refuses its value.
    """
    import keras

    from cifar10.towers import optimizer_classes

    # Keras takes no integers, which are floats in a recipe.
    given: dict[str, Any] = {"learning_rate": float(learning_rate)}
    if name in WITH_MOMENTUM:
        given["momentum"] = float(momentum)
    given |= arguments or {}
    if name == _MUON:
        kind: type[keras.optimizers.Optimizer] = optimizer_classes.Muon
        given["trained_parts"] = trained_parts
    elif name == _SGD:
        kind = optimizer_classes.SGD
    else:
        of_keras = {key.lower(): kind for key, kind in vars(keras.optimizers).items()}
        kind = name if isinstance(name, type) else of_keras[name]
    if scale_updates:
        kind = type(kind.__name__, (optimizer_classes.ScaledUpdates, kind), {})
    try:
        optimizer = kind(**given)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"optimizer_arguments: {kind.__name__} refuses them.\n{error}"
        ) from error
    optimizer.exclude_from_weight_decay(
        [v for v in variables if len(v.shape) < _LEAST_DIMENSIONS_TO_DECAY]
    )
    return optimizer_classes.LossScaleOptimizer(optimizer) if scale_loss else optimizer


def slow_down(
    optimizer: "keras.optimizers.Optimizer",
    variables: Collection["keras.Variable"],
    factor: float,
) -> None:
    """Multiplies all updates of some variables by a factor from now on.

    The optimizer comes from `build_optimizer` with `scale_updates`, and Keras has built
    its variables.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    factors = optimizer.factors.numpy()
    for variable in variables:
        factors[optimizer.places[variable.value.ref()]] = factor
    optimizer.factors.assign(factors)
