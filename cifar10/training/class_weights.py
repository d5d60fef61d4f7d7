"""The weights of the classes in the loss (`config/class_weights.py`)."""

from collections.abc import Mapping, Sequence

import numpy as np

from cifar10.config.class_weights import BALANCED, ClassWeights
from cifar10.errors import UsageError, did_you_mean


def of_training_set(
    requested: ClassWeights | None, labels: np.ndarray, class_names: Sequence[str]
) -> np.ndarray | None:
    """Returns the weight of each class, or None if none are requested.

    Args:
        requested: `Config.class_weights`.
        labels: int32 [count], of the training set.
        class_names: The name of each class.

    Returns:
        float64 [classes]. Their mean over the images of the training set is 1.

    Raises:
        UsageError: They are for other classes, or no image counts.
    """
    if requested is None:
        return None
    counts = np.bincount(labels, minlength=len(class_names))
    if requested == BALANCED:
        weights = np.where(counts, 1.0 / np.maximum(counts, 1), 0.0)
    elif isinstance(requested, Mapping):
        weights = _by_name(requested, class_names)
    else:
        weights = np.asarray(requested, np.float64)
        if len(weights) != len(class_names):
            raise UsageError(
                f"class_weights of the recipe: it has {len(weights)} numbers, and the "
                f"data set {len(class_names)} classes. Give one for each."
            )
    sum_over_images = np.sum(weights * counts)
    if not sum_over_images:
        raise UsageError(
            "class_weights of the recipe: they are 0 for all training images. Give one "
            "class at least a number above 0."
        )
    return weights * (len(labels) / sum_over_images)


def _by_name(requested: Mapping, class_names: Sequence[str]) -> np.ndarray:
    for name in requested:
        if name not in class_names:
            raise UsageError(
                f"class_weights of the recipe: there is no class {name!a}."
                f"{did_you_mean(name, class_names)} There are "
                f"{', '.join(class_names[:10])}"
                f"{' and others' if len(class_names) > 10 else ''}."
            )
    return np.array([requested.get(name, 1.0) for name in class_names], np.float64)
