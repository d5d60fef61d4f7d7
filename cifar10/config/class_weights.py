"""`class_weights` of a recipe: how much the images of each class count in the loss.

    class_weights = "balanced"    # All classes count the same, however many images.

    [class_weights]               # Or by name; 1 for those that are not named.
    cat = 2.0

A list has a number for each class, in their order. Only ratios matter: the weights are
scaled so that their mean over the training set is 1, and the learning rate stays right.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from cifar10.config.options import is_number
from cifar10.errors import UsageError

BALANCED = "balanced"
_LEAST, _MOST = 1e-12, 1e12  # Of those above 0, so that all ratios are finite numbers.

ClassWeights: TypeAlias = str | Mapping | Sequence


def check(class_weights: ClassWeights | None) -> None:
    """Refuses invalid weights; only the data set knows which classes there are."""
    if class_weights is None or class_weights == BALANCED:
        return
    if isinstance(class_weights, str):
        raise UsageError(
            f"class_weights of the recipe: {class_weights!a}: it is {BALANCED!r}, a "
            "table of numbers by class, or a list of them."
        )
    names: Sequence[Any] = range(len(class_weights))
    values: Sequence[Any] = [*class_weights]
    if isinstance(class_weights, Mapping):
        names, values = [*class_weights], [*class_weights.values()]
        if numbers := [name for name in names if not isinstance(name, str)]:
            raise UsageError(
                f"class_weights: {numbers[0]!r} is not the name of a class. Name the "
                "classes, or give a list with a number for each in their order."
            )
    for name, value in zip(names, values, strict=True):
        if not is_number(value) or not (value == 0 or _LEAST <= value <= _MOST):
            raise UsageError(
                f"class_weights of the recipe: {name} = {value!a}: it has to be a "
                f"number, 0 or from {_LEAST:g} to {_MOST:g}."
            )
