"""Lists the layers of a model, including nested layers, and their variables."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cifar10.errors import UsageError

if TYPE_CHECKING:
    import keras

GENERATOR_STATE = "seed_generator_state"  # Keras's name for a generator's state.
# The name of the generator for random numbers that are drawn without one in a layer.
UNSEEDED = "unseeded"
_MODEL_ITSELF = -1  # In place of a layer's index.


def written_variables(model: "keras.Layer") -> "list[keras.Variable]":
    """Returns the variables that a call may assign, the trainable ones last."""
    return [*model.non_trainable_variables, *model.trainable_variables]


def unseeded(model: "keras.Layer") -> "keras.Variable | None":
    """Returns the state of random numbers drawn without a generator in a layer."""
    path = f"{UNSEEDED}/{GENERATOR_STATE}"
    return next((v for v in model.non_trainable_variables if v.path == path), None)


def layers(model: "keras.Layer") -> "list[keras.Layer]":
    """Returns all layers of a model, each followed by the layers nested in it."""
    return [one for layer in _inner(model) for one in (layer, *layers(layer))]


@contextlib.contextmanager
def replaced_calls(functions: "Mapping[keras.Layer, Callable]") -> Iterator[None]:
    """Replaces `call` of some layers in the block."""
    for layer, function in functions.items():
        layer.call = function
    try:
        yield
    finally:
        for layer in functions:
            del layer.call


def mark_head(model: "keras.Model", read: "Sequence[keras.Variable]") -> None:
    """Marks the head: the layer whose trainable variables a call `read` last.

    A wrapper counts as one with the layer in it. The model itself can be the head.
    """
    import keras

    found = layers(model)
    trainable = {id(variable) for variable in model.trainable_variables}
    if (last := next((v for v in reversed(read) if id(v) in trainable), None)) is None:
        return
    holding = [n for n, one in enumerate(found) if id(last) in map(id, one.variables)]
    head = holding.pop() if holding else _MODEL_ITSELF
    for index in reversed(holding):
        outer = found[index]
        if isinstance(outer, keras.layers.Wrapper) and outer.layer is found[head]:
            head = index
    model.head_index = head  # A number, because Keras would track a layer.


def head(model: "keras.Model") -> "list[keras.Variable]":
    """Returns the variables of the trained layer that was called last."""
    if (index := getattr(model, "head_index", None)) is None:
        raise UsageError(f"{model.name} has no layer with trainable variables.")
    found = layers(model)
    if index != _MODEL_ITSELF:
        return found[index].variables
    held = {id(variable) for layer in found for variable in layer.variables}
    return [variable for variable in model.variables if id(variable) not in held]


def by_name(model: "keras.Layer") -> "dict[str, list[keras.Variable]]":
    """Maps the names of layers to the floating-point variables of each layer.

    The name of a nested layer is OUTER/INNER. Keras numbers unnamed layers per process.
    Here they are numbered per model, as in Keras's weight files. `Normalization` layers
    are left out: they compute with constants, made when the model was built.
    """
    import keras

    named: dict[str, list[keras.Variable]] = {}
    counts: Counter[str] = Counter()
    for layer in _inner(model):
        kind = _snake_case(type(layer).__name__)
        number, name = counts[kind], layer.name
        counts[kind] += 1
        has_sides = isinstance(model, keras.layers.Bidirectional)
        side = f"{name.partition('_')[0]}_" if has_sides else ""  # forward_, backward_
        if same_but_number(name, f"{side}{kind}"):
            name = f"{kind}_{number}" if number and not side else f"{side}{kind}"
        of_others = {id(v) for one in _inner(layer) for v in one.variables}
        floats = [v for v in layer.variables if "float" in v.dtype]
        own = [v for v in floats if id(v) not in of_others]
        if own and not isinstance(layer, keras.layers.Normalization):
            named[name] = own
        within = by_name(layer)
        named |= {f"{name}/{inner}": variables for inner, variables in within.items()}
    return named


def paths(model: "keras.Model") -> dict[int, str]:
    """Maps the ids of floating-point variables to LAYER/VARIABLE, as in `by_name`."""
    found = {id(variable): variable.name for variable in model.trainable_variables}
    for layer, variables in by_name(model).items():
        found |= {id(variable): f"{layer}/{variable.name}" for variable in variables}
    return found


def same_but_number(name: str, other: str) -> bool:
    """Returns whether two names are equal apart from a number at their end."""
    return re.sub(r"_\d+$", "", name) == re.sub(r"_\d+$", "", other)


def is_graph(model: "keras.Model") -> bool:
    """Returns whether a model is sequential or functional, and not a subclass."""
    import keras

    image = keras.Input([1])
    # A subclass may compute something other than its graph of layers.
    return type(model) in (keras.Sequential, type(keras.Model(image, image)))


def _inner(layer: "keras.Layer") -> "list[keras.Layer]":
    import keras

    if isinstance(layer, keras.Sequential) or hasattr(layer, "input_layers"):
        return layer.layers
    # Keras has no public way to list the layers of subclasses.
    return layer._flatten_layers(include_self=False, recursive=False)  # noqa: SLF001


def _snake_case(name: str) -> str:
    """Converts the name of a class to a layer's default name, as Keras does."""
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
