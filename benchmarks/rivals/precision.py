"""What `--precision` means, until `cifar10` knows it: all that a merge has to replace.

`cifar10.precision.resolve` and `model.build(precision="bfloat16")` take over as soon as
they are there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import machine


def resolve(name: str, devices: Sequence[str]) -> str:
    """Returns the type that a choice of `--precision` means on these devices."""
    if importlib.util.find_spec("cifar10.precision"):
        from cifar10 import precision

        return precision.resolve(name, devices)
    if name != "auto":
        return name
    return "bfloat16" if machine.native_bfloat16() else "float32"


def build_model(precision: str) -> Any:
    """Builds the tutorial's network with arithmetic in a type."""
    from benchmarks.rivals import common
    from cifar10 import model as models

    known = importlib.util.find_spec("cifar10.precision")
    policy = precision if known or precision == "float32" else f"mixed_{precision}"
    return models.build(
        "tutorial", common.IMAGE_SHAPE, common.CLASSES, precision=policy
    )


def loss_function() -> Callable[..., dict]:
    """Returns `model.loss` with logits and penalties in float32."""
    import tensorflow as tf

    from cifar10 import model as models

    def loss(logits: Any, labels: Any, penalties: Sequence[Any]) -> dict:
        logits, *penalties = (tf.cast(one, tf.float32) for one in (logits, *penalties))
        return models.loss(logits, labels, penalties)

    return loss
