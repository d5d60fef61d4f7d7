"""`class_weights` of a recipe: how much the images of each class count in the loss.

    class_weights = "balanced"    # All classes count the same, however many images.

    [class_weights]               # Or by name; 1 for those that are not named.
    cat = 2.0

A list has a number for each class, in the data set's order. Only ratios matter: the
weights are scaled to a mean of 1 over the training set, so the learning rate stays
right.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from cifar10.errors import UsageError, did_you_mean, first_few

if TYPE_CHECKING:
    import numpy as np

BALANCED = "balanced"
_LEAST, _MOST = 1e-12, 1e12  # Of those above 0, so that all ratios are finite numbers.
_SHOWN_NAMES = 10
_WHERE = "class_weights of the recipe"

ClassWeights: TypeAlias = str | Mapping | Sequence


def check_class_weights(requested: ClassWeights | None) -> None:
    """Refuses invalid weights; only the data set knows which classes there are."""
    if requested is None or requested == BALANCED:
        return
    is_table = isinstance(requested, Mapping)
    weights: Any = requested if is_table else dict(enumerate(requested))
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        is_valid = is_number and (weight == 0 or _LEAST <= weight <= _MOST)
        if not is_valid or isinstance(name, str) != is_table:
            raise UsageError(
                f"{_WHERE}: {name} = {weight!a}: give {BALANCED!r}, a table of numbers "
                "by the names of classes, or a list with a number for each class. A "
                f"number is 0, or from {_LEAST:g} to {_MOST:g}."
            )


def resolve_class_weights(
    requested: ClassWeights | None, labels: "np.ndarray", class_names: Sequence[str]
) -> "np.ndarray | None":
    """Returns the weight of each class, or None if none are requested.

    Args:
        requested: As `config.loss.class_weights`.
        labels: int32 [count], of the training set.
        class_names: The name of each class.

    Returns:
        float64 [classes]. Their mean over the images of the training set is 1.

    Raises:
        UsageError: The weights are for other classes, or no image counts.
    """
    import numpy as np

    if requested is None:
        return None
    counts = np.bincount(labels, minlength=len(class_names))
    if requested == BALANCED:
        weights = np.where(counts, 1.0 / np.maximum(counts, 1), 0.0)
    elif isinstance(requested, Mapping):
        if unknown := [name for name in requested if name not in class_names]:
            raise UsageError(
                f"{_WHERE}: there is no class {unknown[0]!a}."
                f"{did_you_mean(unknown[0], class_names)} The classes are "
                f"{first_few(class_names, _SHOWN_NAMES)}."
            )
        weights = np.array([requested.get(name, 1.0) for name in class_names], float)
    else:
        weights = np.asarray(requested, np.float64)
        if len(weights) != len(class_names):
            raise UsageError(
                f"{_WHERE}: it has {len(weights)} numbers, and the "
                f"data set {len(class_names)} classes. Give one for each."
            )
    sum_over_images = np.sum(weights * counts)
    if not sum_over_images:
        raise UsageError(
            f"{_WHERE}: they are 0 for all training images. Give at least one class a "
            "number above 0."
        )
    return weights * (len(labels) / sum_over_images)
