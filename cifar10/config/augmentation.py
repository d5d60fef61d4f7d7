"""A recipe's `[augmentation]` table: changes to images in addition to `--distortions`.

    [augmentation]
    random_erasing = {probability = 0.25}
    cutout = {side = 12}
    mixup = {alpha = 0.2, probability = 0.5}
    cutmix = {alpha = 1.0, probability = 0.5}

Every entry is optional, and so is every value in an entry: `cutmix = {}` uses the
defaults below. `input/augmentation.py` implements the augmentations.
"""

from collections.abc import Mapping
from typing import Any

from cifar10.config.options import Option, Range
from cifar10.errors import UsageError


def _number(default: float, least: float, most: float) -> Option:
    """Declares an option: a number of the type of `default`, from `least` to `most`."""
    limits = (Range(least, most),)
    return Option(type=type(default), default=default, limits=limits, in_flags=False)


_PROBABILITY = _number(1.0, 0.0, 1.0)
# Smaller alphas draw almost only mixing weights of 0 or 1, and larger ones of 0.5.
_ALPHAS = (0.01, 100.0)

PARTS = {
    # The paper's value for CIFAR-10 (https://arxiv.org/abs/1708.04896, section 5.1).
    "random_erasing": {"probability": _number(0.5, 0.0, 1.0)},
    # In pixels of a 32 x 32 image, as in airbench96. The paper has 16, and squares that
    # the edge may cut off (https://arxiv.org/abs/1708.04552, section 4.1).
    "cutout": {"side": _number(12, 1, 31)},
    # The paper's alpha for ImageNet (https://arxiv.org/abs/1710.09412, section 3.1).
    "mixup": {"alpha": _number(0.2, *_ALPHAS), "probability": _PROBABILITY},
    # The paper's alpha. Its probability is 0.5 for CIFAR-10 and 1 for ImageNet
    # (https://arxiv.org/abs/1905.04899, section 4.1).
    "cutmix": {"alpha": _number(1.0, *_ALPHAS), "probability": _PROBABILITY},
}
MIXING = ("mixup", "cutmix")
_WHERE = "augmentation of the recipe"


def resolve(declared: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Returns the declared augmentations with all their values; refuses invalid ones.

    An image gets `mixup` or `cutmix`, so their probabilities may total at most 1.
    """
    parts = {}
    for name, given in (declared or {}).items():
        if name not in PARTS or not isinstance(given, Mapping):
            raise UsageError(
                f"{_WHERE}: {name} = {given!a} is not valid. Possible entries are "
                f"{', '.join(PARTS)}. Each is a table, for example cutmix = {{}}."
            )
        known = PARTS[name]
        for key, value in given.items():
            if key not in known:
                why = f"{_WHERE}: {name} has no {key}"
                raise UsageError(f"{why}. Give {' or '.join(known)}.")
            known[key].check(value, f"{_WHERE}: {name}.{key}")
        parts[name] = {**{key: one.default for key, one in known.items()}, **given}
    mixed = sum(parts[name]["probability"] for name in MIXING if name in parts)
    if mixed > 1.0:
        why = f"{_WHERE}: mixup and cutmix probabilities total {mixed:g}"
        raise UsageError(f"{why}. Give at most 1.")
    return parts


def mixes(declared: Mapping[str, Any] | None) -> bool:
    """Returns whether images are mixed, which makes a label a mix of two classes."""
    return any(name in (declared or {}) for name in MIXING)


def check_batch(declared: Mapping[str, Any] | None, batch_size: int) -> None:
    """Refuses an odd batch size if images are mixed, because mixing takes pairs."""
    if mixes(declared) and batch_size % 2:
        why = f"--batch_size {batch_size}: mixup and cutmix mix pairs"
        raise UsageError(f"{why}. Give an even one.")
