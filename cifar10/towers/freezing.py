"""What is not trained in a stage: which variables, and how their layers compute."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from cifar10.config.stages import ALL_BUT_HEAD, is_frozen
from cifar10.models import layer_tree


def frozen(
    model: keras.Model, variables: Sequence[keras.Variable], names: Sequence[str]
) -> list[bool]:
    """Returns which variables of a model are frozen by names as in `Stage.frozen`."""
    of_head: set[int] = set()
    if ALL_BUT_HEAD in names:
        of_head = {id(variable) for variable in layer_tree.head(model).variables}
    return [
        is_frozen(variable.path, names)
        or (ALL_BUT_HEAD in names and id(variable) not in of_head)
        for variable in variables
    ]


@contextlib.contextmanager
def inference_of_frozen(model: keras.Model, names: Sequence[str]) -> Iterator[None]:
    """Makes batch normalization that is completely frozen compute as in evaluation.

    Keras does the same with `trainable = False`
    (https://keras.io/api/layers/normalization_layers/batch_normalization): the layer
    uses its moving statistics and does not change them. Setting that attribute would
    take the variables out of those that the optimizer and the checkpoints know.
    """
    found = [
        layer
        for layer in (layer_tree.layers(model) if names else ())
        if isinstance(layer, keras.layers.BatchNormalization)
        and all(frozen(model, layer.variables, names))
    ]
    for layer in found:
        in_inference = functools.partial(_call_in_inference, layer.call)
        layer.call = getattr(layer, "call_frozen", in_inference)
    try:
        yield
    finally:
        for layer in found:
            del layer.call


def _call_in_inference(call: Any, inputs: Any, **options: Any) -> Any:
    return call(inputs, **{**options, "training": False})
