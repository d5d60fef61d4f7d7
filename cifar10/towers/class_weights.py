"""The recipe's `class_weights`: how much the images of each class weigh in the loss.

    class_weights = "balanced"    # All classes weigh the same, whatever their size.

    [class_weights]               # Or by class name; other classes have weight 1.
    cat = 2.0

Or give a list of numbers, one for each class, in order. Only ratios matter: weights are
scaled to a mean of 1 over the training images, so a learning rate remains suitable.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from cifar10.errors import UsageError, first_few, nfc

if TYPE_CHECKING:
    import numpy as np

BALANCED = "balanced"
_LEAST, _MOST = 1e-12, 1e12  # Others would overflow when they are scaled.
_WHERE = "class_weights of the recipe"

ClassWeights: TypeAlias = str | Mapping | Sequence


def check_class_weights(requested: ClassWeights | None) -> None:
    """Refuses invalid weights. `resolve_class_weights` checks class names."""
    if requested is None or requested == BALANCED:
        return
    is_table = isinstance(requested, Mapping)
    weights: Any = requested if is_table else dict(enumerate(requested))
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        is_valid = is_number and (weight == 0 or _LEAST <= weight <= _MOST)
        if not is_valid or isinstance(name, str) != is_table:
            raise UsageError(
                f"{_WHERE}: {name} = {weight!a}: give {BALANCED!r}, or a table of "
                "class names and numbers, or a list with a number for each class. Each "
                f"number has to be 0, or from {_LEAST:g} to {_MOST:g}."
            )


def resolve_class_weights(
    requested: ClassWeights | None, labels: "np.ndarray", class_names: Sequence[str]
) -> "np.ndarray | None":
    """Computes weights, if any, float64 [classes], of mean 1 over training `labels`."""
    import numpy as np

    if requested is None:
        return None
    counts = np.bincount(labels, minlength=len(class_names))
    if requested == BALANCED:
        weights = np.where(counts, 1.0 / np.maximum(counts, 1), 0.0)
    elif isinstance(requested, Mapping):
        class_names = [*map(nfc, class_names)]
        requested = {nfc(name): weight for name, weight in requested.items()}
        if unknown := [name for name in requested if name not in class_names]:
            raise UsageError(
                f"{_WHERE}: the data set has no class {unknown[0]!a}. The classes are "
                f"{first_few(class_names, 10)}."
            )
        weights = np.array([requested.get(name, 1.0) for name in class_names], float)
    else:
        weights = np.asarray(requested, np.float64)
        if len(weights) != len(class_names):
            why = f"{_WHERE}: {len(weights)} numbers for {len(class_names)} classes"
            raise UsageError(f"{why}. Give one per class.")
    if not (sum_over_images := np.sum(weights * counts)):
        why = f"{_WHERE}: all training images have weight 0"
        raise UsageError(f"{why}. Raise some class weight.")
    return weights * (len(labels) / sum_over_images)
