"""The layers of a model: those within it, the last one, their names and their graph."""

import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def layers(model: "keras.Layer") -> "list[keras.Layer]":
    """Returns the layers of a model, and the layers within them, in their order."""
    found: list[keras.Layer] = []
    for layer in _inner(model):
        found += [layer, *layers(layer)]
    return found


def head(model: "keras.Model") -> "keras.Layer":
    """Returns the last layer that has variables to train."""
    return [layer for layer in layers(model) if layer.trainable_variables][-1]


def by_name(model: "keras.Layer") -> "dict[str, list[keras.Variable]]":
    """Returns the floating variables of each layer that has any, by its name.

    A layer within another has the names of both. Keras makes up names from the class
    and a number, counted in the process; here they are counted in each model, as in
    the files that Keras writes. `Normalization` is left out: it computes with
    constants that were made from its variables when the model was built.
    """
    import keras

    named: dict[str, list[keras.Variable]] = {}
    counts: Counter[str] = Counter()
    for layer in _inner(model):
        kind = _snake_case(type(layer).__name__)
        number, name = counts[kind], layer.name
        counts[kind] += 1
        if same_but_number(name, kind):
            name = f"{kind}_{number}" if number else kind
        of_others = {id(v) for one in _inner(layer) for v in one.variables}
        own = [
            variable
            for variable in layer.variables
            if id(variable) not in of_others and "float" in variable.dtype
        ]
        if own and not isinstance(layer, keras.layers.Normalization):
            named[name] = own
        within = by_name(layer)
        named |= {f"{name}/{inner}": variables for inner, variables in within.items()}
    return named


def same_but_number(name: str, other: str) -> bool:
    """Returns whether two names differ only in a number at their end."""
    return re.sub(r"_\d+$", "", name) == re.sub(r"_\d+$", "", other)


def is_graph(model: "keras.Model") -> bool:
    """Returns whether Keras knows how a model's layers are connected."""
    import keras

    image = keras.Input([1])
    # A subclass may compute something other than its graph of layers.
    return type(model) in (keras.Sequential, type(keras.Model(image, image)))


def _inner(layer: "keras.Layer") -> "list[keras.Layer]":
    import keras

    if isinstance(layer, keras.Sequential) or hasattr(layer, "input_layers"):
        return layer.layers
    # For others there is no public way.
    return layer._flatten_layers(include_self=False, recursive=False)  # noqa: SLF001


def _snake_case(name: str) -> str:
    """Turns the name of a class into that of a layer, as Keras does."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
