"""Sections: parts of a model that a tower computes one after another.

PartialFlow's idea (https://github.com/jakob-bauer/partialflow): of all activations only
the boundary tensors between sections are kept, and a section computes its own ones
again when its gradients are due. Here a model is cut; `cycle.py` orders the parts.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from cifar10 import model as models
from cifar10.errors import UsageError
from cifar10.sections import purity

_SHOWN_NAMES = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer or operation in a model's graph.

    Attributes:
        operation: The layer or operation.
        node: What Keras knows about the call.
    """

    operation: Any
    node: Any

    @property
    def takes(self) -> list[keras.KerasTensor]:
        """The tensors it is called with."""
        return self.node.input_tensors

    @property
    def gives(self) -> list[keras.KerasTensor]:
        """The tensors it returns."""
        return self.node.output_tensors


class Section(keras.layers.Layer):
    """Some calls of a model as a layer, which shares the model's variables.

    It takes a list of tensors and returns a list of tensors.

    Args:
        calls: The calls, in their order.
        takes: The tensors that come from earlier sections, or are the model's inputs.
        gives: The tensors that later sections take, or the model's output.
        counted: Ids of the variables whose weight decay an earlier section counts.
        twice: Whether it is computed once more for its gradients.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        takes: Sequence[keras.KerasTensor],
        gives: Sequence[keras.KerasTensor],
        counted: Collection[int] = (),
        *,
        twice: bool = False,
    ) -> None:
        super().__init__(autocast=False, name="section")
        self.twice = twice
        # Nobody asks for the gradients of a model's inputs, and they take time.
        self.from_sections = tuple(not _is_input(tensor) for tensor in takes)
        self.counted = frozenset(counted)
        self.calls = tuple(calls)
        self.takes = tuple(takes)
        self.gives = tuple(gives)
        self.parts = [
            call.operation
            for call in calls
            if isinstance(call.operation, keras.layers.Layer)
        ]
        self.built = True

    def call(
        self, inputs: list[tf.Tensor], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Makes the calls as the model does."""
        values = {
            # A model casts its inputs to the type that it declares for them.
            id(tensor): tf.cast(value, tensor.dtype) if _is_input(tensor) else value
            for tensor, value in zip(self.takes, inputs, strict=True)
        }
        for call in self.calls:
            self.make(call, values, training=training)
        return [values[id(tensor)] for tensor in self.gives]

    def make(
        self, call: Call, values: dict[int, tf.Tensor], *, training: bool | None
    ) -> None:
        """Makes one call.

        Args:
            call: The call.
            values: By the id of the model's tensors; what it returns is added.
            training: As in `call`.

        Raises:
            UsageError: It cannot be computed twice.
        """
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        args, kwargs = call.node.arguments.fill_in(values)
        if "training" in getattr(call.operation, "_call_context_args", ()):
            kwargs["training"] = training
        outputs = tf.nest.flatten(call.operation(*args, **kwargs))
        values |= zip(map(id, call.gives), outputs, strict=True)
        made = graph.get_operations()[before:]
        if self.twice and (kinds := purity.impure(graph, made)):
            raise UsageError(
                f"--sections: layer {call.operation.name} cannot be computed twice: "
                f"{', '.join(sorted(kinds))} in it would do something else the second "
                "time. Draw random numbers with keras.random and a SeedGenerator, keep "
                "state in variables of the layer, or leave it to the last section."
            )

    # Keras collects them anew each time, and a cycle asks often.
    @functools.cached_property
    def trainable_variables(self) -> list[keras.Variable]:
        """The variables that have gradients."""
        return super().trainable_variables

    @functools.cached_property
    def non_trainable_variables(self) -> list[keras.Variable]:
        """Batch statistics and the state of random generators."""
        return super().non_trainable_variables

    @property
    def losses(self) -> list[tf.Tensor]:
        """The penalties of its calls, and the weight decay that it counts."""
        penalties = super().losses
        decayed = [v for v in self.trainable_variables if v.regularizer is not None]
        # Keras puts the weight decay last, in the order of the variables.
        own, decay = penalties[: -len(decayed) or None], penalties[-len(decayed) :]
        if not decayed:
            return penalties
        return own + [
            penalty
            for penalty, variable in zip(decay, decayed, strict=True)
            if id(variable) not in self.counted
        ]


class WholeModel(Section):
    """A model as its only section, whether or not it is a graph of layers.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model) -> None:
        takes = model.inputs if models.is_graph(model) else [object()]
        super().__init__((), takes, ())
        self.parts = [model]

    def call(
        self, inputs: list[tf.Tensor], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Calls the model."""
        return [self.parts[0](*inputs, training=training)]


def calls_of(model: keras.Model) -> list[Call]:
    """Returns the calls of a model's layers, each after those whose results it takes.

    Raises:
        UsageError: The model is not a graph of layers with one output.
    """
    if not models.is_graph(model) or len(model.outputs) != 1:
        raise UsageError(
            f"--sections: the model is of class {type(model).__name__}, and only a "
            "graph of layers with one output can be cut: a keras.Sequential, or "
            "keras.Model(inputs, outputs)."
        )
    # In the order in which Keras makes them, so that layers with a state, called on
    # several branches, meet them in the same order. There is no public way to it.
    graph = getattr(model, "_functional", model)
    by_depth = graph._nodes_by_depth  # noqa: SLF001
    return [
        Call(node.operation, node)
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if not node.is_input
    ]


def crossing(
    model: keras.Model, before: Sequence[Call], after: Sequence[Call]
) -> list[keras.KerasTensor]:
    """Returns the tensors that a boundary between calls carries over, inputs left out.

    Args:
        model: The model.
        before: Calls before the boundary.
        after: All calls after it.
    """
    needed = {id(tensor) for call in after for tensor in call.takes}
    needed.update(map(id, model.outputs))
    return [tensor for call in before for tensor in call.gives if id(tensor) in needed]


def is_masked(tensor: keras.KerasTensor) -> bool:
    """Tells whether a tensor has a mask, which no section can hand to another."""
    return getattr(tensor, "_keras_mask", None) is not None


def _is_input(tensor: object) -> bool:
    if not isinstance(tensor, keras.KerasTensor):
        return True  # What stands for the input of a class of its own.
    operation = tensor._keras_history.operation  # noqa: SLF001 - as in `calls_of`.
    return isinstance(operation, keras.layers.InputLayer)


def cut(
    model: keras.Model, calls: Sequence[Call], places: Sequence[int]
) -> list[Section]:
    """Cuts a model into sections.

    Args:
        model: A graph of layers.
        calls: Its calls, as `calls_of` returns them.
        places: The calls at which sections begin, but the first one; ascending.

    Raises:
        UsageError: A mask would be lost.
    """
    bounds = [0, *places, len(calls)]
    found: list[Section] = []
    for place in places:
        if any(map(is_masked, crossing(model, calls[:place], calls[place:]))):
            raise UsageError(
                f"--sections: a mask goes past {calls[place].operation.name}, and no "
                "section can hand it to another. Cut before the layer that makes it or "
                "behind the last one that takes it."
            )
    for begin, end in itertools.pairwise(bounds):
        part = calls[begin:end]
        gives = crossing(model, part, calls[end:])
        known = {id(tensor): tensor for tensor in model.inputs}
        known |= {id(tensor): tensor for call in calls[:begin] for tensor in call.gives}
        taken = [tensor for call in part for tensor in call.takes]
        if end == len(calls):
            gives = model.outputs
        takes = {id(one): one for one in taken if id(one) in known}
        counted = {id(v) for section in found for v in section.trainable_variables}
        is_last = end == len(calls)
        found.append(
            Section(part, list(takes.values()), gives, counted, twice=not is_last)
        )
    return found


def places_before(calls: Sequence[Call], names: Sequence[str]) -> list[int]:
    """Finds where sections begin that are named by their first layers.

    Args:
        calls: The calls of a model.
        names: Names of layers, or what such names begin with up to `_` or `/`, as
            `scale1` of `scale1_block0_conv1`.

    Raises:
        UsageError: There is no such layer.
    """
    places = set()
    for name in names:
        known = [call.operation.name for call in calls]
        exact = [place for place, own in enumerate(known) if own == name]
        under = [
            place
            for place, own in enumerate(known)
            if own.startswith((f"{name}_", f"{name}/"))
        ]
        if not exact and not under:
            near = difflib.get_close_matches(name, known, n=_SHOWN_NAMES, cutoff=0.0)
            raise UsageError(
                f"--sections: the model has no layer {name}. The nearest names are "
                f"{', '.join(dict.fromkeys(near))}."
            )
        places.add((exact or under)[0])
    return sorted(places - {0})
