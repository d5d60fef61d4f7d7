"""Imports users' models and checks that they can be trained."""

import contextlib
import functools
import importlib
import inspect
import itertools
import os
import re
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from cifar10 import errors
from cifar10.errors import UsageError, reason, say
from cifar10.models import layer_tree

# Tracebacks leave out lines of these folders, since the mistake is in the user's code.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(str(module.__file__)), "")  # noqa: PTH118, PTH120
    for module in (errors, keras, os, tf)
)
# Methods of a model that `fit`, `evaluate` and `predict` call, but no tower.
_OF_FIT = (
    *("fit", "make_train_function", "train_step", "test_step", "predict_step"),
    *("compute_loss", "compute_metrics"),
)
# Operations that write variables, and those with a random state of their own.
_WRITING = r"Assign\w*Variable|Resource(Scatter|StridedSlice|Apply)|Rng"
_RANDOM = r"Random|(Parameterized)?TruncatedNormal|Multinomial"
_CUSTOM_GRADIENTS = inspect.getfile(tf.custom_gradient)
_HIDDEN = (
    "{} reads a variable within a tf.function, keras.remat or another custom gradient, "
    "which would miss a tower's value. Remove that wrapper: --xla compiles, --sections "
    "saves memory."
)
# A factor below the first bound, or an offset above the second in units of the images,
# is meant for pixels from 0 to 255: factors that scale 255 to 1 or 2 are smaller, and
# offsets that centre pixels are larger.
_OF_PIXELS, _OFFSET = 0.02, 10.0
_LIKE_PIXELS = 10.0  # A factor that scales standardized images back to pixels.
# Operations that pass on values of images, perhaps at other places.
_PASSING = (
    "Cast|Identity|StridedSlice|Pack|Unpack|Split.*|Concat.*|Reverse.*|Transpose|"
    "Resize.*|Pad.*|MirrorPad|Reshape|ExpandDims|Squeeze|SelectV2|"
    "ImageProjectiveTransformV3|EnsureShape"
)
_ANY = (-np.inf, np.inf)
_CLIPPING = (keras.layers.RandomBrightness, keras.layers.RandomContrast)
_BOUNDING = ("Relu", "Relu6", "Softplus", "Tanh")
_say_once = functools.cache(say)  # Each replica builds the model.
_RETURNED: weakref.WeakSet[keras.Model] = weakref.WeakSet()
_ROUNDING = 0.01  # In a sum of probabilities, in bfloat16.
SIZED = "(from --distortions and --image_size)"  # Follows a size of images.


@contextlib.contextmanager
def explained(subject: str, problem: str) -> Iterator[None]:
    """Turns an exception from a user's code into a `UsageError`."""
    try:
        yield
    except (UsageError, BrokenPipeError):
        raise
    except (Exception, SystemExit) as error:
        frames = [
            tuple(frame)  # Without column numbers, which would add a line to each.
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(("<", *_LIBRARIES))
        ]
        lines = [f"{type(error).__name__}: {reason(error)}\n"]
        lines += traceback.format_list(frames)
        if re.search(r"b?float16\b.*float32|float32.*b?float16\b", str(error)):
            problem += ". Give --precision float32, or cast to the dtype of the inputs"
        raise UsageError(f"{subject}: {problem}.\n{''.join(lines).rstrip()}") from error


def import_function(name: str) -> Callable[..., keras.Model]:
    """Imports the function that `--model module:function` names."""
    module_name, _, function_name = name.partition(":")
    with explained(f"--model {name}", f"{module_name} cannot be imported"):
        module = importlib.import_module(module_name)
    builder = getattr(module, function_name, None)
    if not callable(builder):
        file = getattr(module, "__file__", None) or module_name
        why = f"{file} has no function {function_name}"
        fix = "Define one that takes (image_shape, classes) and returns a Keras model"
        raise UsageError(f"--model {name}: {why}. {fix}.")
    return builder


class _Recorder(keras.StatelessScope):
    """Notes which variables a call reads and assigns. No variable changes."""

    def __init__(self) -> None:
        super().__init__(collect_losses=True)
        self.read: list[keras.Variable] = []
        self.assigned: list[keras.Variable] = []
        self.hidden: list[str] = []  # Layers whose values no tower could replace.

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns the value last assigned; None stands for the variable's own value."""
        self.read.append(variable)
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        if variable.trainable and _CUSTOM_GRADIENTS in files:
            self.hidden.append(variable.path.rpartition("/")[0])
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Keeps a value that a layer assigns to a variable."""
        self.assigned.append(update[0])
        super().add_update(update)


_Function: TypeAlias = tf.types.experimental.ConcreteFunction
_Trace = tuple[_Function, _Recorder]


def check(
    name: str,
    model: object,
    image_shape: tuple[int, int, int],
    classes: int,
    *,
    is_code: bool = False,
    deterministic: bool | None = None,
) -> None:
    """Checks a model by calling it, which also creates missing variables.

    If the model `is_code` of a user, also traces it in training mode and, unless
    `deterministic` is None, checks that towers can train it.
    """
    if not isinstance(model, keras.Model):
        returned = type(model).__name__
        problem = f"the function returned {returned}, but must return a keras.Model."
        raise UsageError(f"--model {name}: {problem}")
    given = name, model, image_shape, classes
    images = tf.zeros((2, *image_shape))
    problem = f"it failed on images of {image_shape} {SIZED}"
    with explained(f"--model {name}", problem), _Recorder() as call:
        _logits(images, name, model, classes, training=False)
    if is_code:
        trace = _, call = _trace(*given)
    if not model.trainable_variables:
        raise UsageError(f"--model {name}: the model has no trainable variables.")
    layer_tree.mark_head(model, call.read)
    _hold_generators(name, model, call.assigned)
    if is_code and deterministic is not None:
        check_training(*given, deterministic=deterministic, trace=trace)
        for note in _notes(model, trace[0]):
            _say_once(f"Note: --model {name}: {note}.")
        if model in _RETURNED:
            why = "the function returned a model that it returned before"
            raise UsageError(f"--model {name}: {why}. Let it build a new one.")
        _RETURNED.add(model)
        for variable in model.trainable_variables:
            value = hash(variable.numpy().tobytes())
            if getattr(variable, "returned", value) != value:  # To resume, it may be.
                why = "was trained since the function returned it in another model"
                fix = "Build its layer in the function, or set trainable = False"
                model.not_new = f"--model {name}: {variable.path} {why}. {fix}."
                break
            variable.returned = value  # Variables have no hash for a dictionary.


def _notes(model: keras.Model, traced: _Function) -> Iterator[str]:
    """Yields notes on parts of a model that a run ignores or that look wrong."""
    if model.compiled:
        yield "its compile() is not used. Give optimizer, loss and metrics to Config"
    but, fix = "but images have mean 0 and deviation 1", "or scale them back before"
    name, scale, offset, end = _prepared(traced.graph)
    if scale < _OF_PIXELS or abs(offset) > _OFFSET * scale:
        why = f"its {name} scales or moves pixels from 0 to 255"
        yield f"{why}, {but}. Leave it out, {fix}"
    for layer in layer_tree.layers(model) if scale < _LIKE_PIXELS else ():
        is_keras = type(layer).__module__.startswith("keras.")
        least, most = getattr(layer, "value_range", _ANY) if is_keras else _ANY
        is_narrow = least > offset - 2 * scale or most < offset + 2 * scale
        # What other layers computed before may have another range than the images.
        clips = isinstance(layer, _CLIPPING) and _unnumbered(layer.name)[0] in end
        if is_narrow and (least >= 0 or clips):
            why = f"its {type(layer).__name__} is for pixels from {least:g} to {most:g}"
            yield f"{why}, {but}. Give value_range=(-5, 5), {fix}"
            break  # One of RandAugment's layers is enough.
    if (kind := _last(traced).type) in _BOUNDING:
        fix = "Leave that out, unless your loss needs it"
        yield f"it ends in {kind.lower()}, which bounds the logits. {fix}"


def _prepared(graph: tf.Graph) -> tuple[str, float, float, list[str]]:
    """Returns how a model scales and moves images before any layer computes.

    Follows the images, the first input of `graph`, through operations with constants,
    averaged. Returns the last such operation's name, the factor, the offset, and the
    parts of the name of the operation that computes something else.
    """
    found = {graph.inputs[0].name: ("", 1.0, 0.0)}
    captured = {inner.name: outer for outer, inner in graph.captures}
    for op in graph.get_operations():
        known = [found[one.name] for one in op.inputs if one.name in found]
        if not known or op.type == "Shape":
            continue
        (name, scale, offset), constant = known[0], None
        others = [one for one in op.inputs if one.name not in found]
        if len(others) == 1 and others[0].dtype.is_floating:
            source = others[0]
            while source.op.type in ("Squeeze", "Reshape"):
                source = source.op.inputs[0]
            value = tf.get_static_value(captured.get(source.name, source))
            constant = None if value is None else float(np.mean(value, dtype=float))
        if op.type in ("Mul", "RealDiv") and constant:
            factor = constant if op.type == "Mul" else 1.0 / constant
            scale, offset = scale * abs(factor), offset * factor
        elif op.type in ("Sub", "AddV2", "BiasAdd") and constant is not None:
            offset += -constant if op.type == "Sub" else constant
        elif not re.fullmatch(_PASSING, op.type):
            break
        if constant is not None:
            name = "/".join(_unnumbered(op.name)[1:])
        found |= {one.name: (name, scale, offset) for one in op.outputs}
    return *[*found.values()][-1], _unnumbered(op.name)


def _unnumbered(name: str) -> list[str]:
    """Returns the parts of a name without the numbers that Keras and scopes add."""
    return re.sub(r"(_\d+)+(?=/|$)", "", name).split("/")


def _hold_generators(name: str, model: keras.Model, assigned: Sequence) -> None:
    """Gives a model a generator in place of those that none of its layers holds."""
    held = {id(variable) for variable in [*model.variables, *model.metrics_variables]}
    for variable in (one for one in assigned if id(one) not in held):
        if variable.name != layer_tree.GENERATOR_STATE:
            why = "which is in no layer and thus in no checkpoint"
            fix = "Make it an attribute of a layer"
            raise UsageError(f"--model {name} assigns {variable.path}, {why}. {fix}.")
        if layer_tree.unseeded(model) is None:
            generator = keras.random.SeedGenerator(0, name=layer_tree.UNSEEDED)
            generator.state.assign(variable.value)
            # A built model takes no new attributes.
            model._seed_generators.append(generator)  # noqa: SLF001


def check_training(
    name: str,
    model: keras.Model,
    image_shape: tuple[int, int, int],
    classes: int,
    *,
    deterministic: bool = False,
    trace: _Trace | None = None,
) -> None:
    """Checks that a training step computes what Keras would, from logits.

    Evaluation does not call this, because it also scores models that return
    probabilities. `trace` is the model's in training mode, if there is one.
    """
    traced, call = trace or _trace(name, model, image_shape, classes)
    images = tf.random.stateless_normal((2, *image_shape), (0, 0))
    with keras.StatelessScope():
        rows = tf.cast(model(images, training=False), tf.float32)
    for problem in itertools.chain(
        _problems_of_layers(model, call.read),
        _problems_of_graph(traced.graph, call.hidden, deterministic=deterministic),
        _problems_of_outputs(traced, rows),
    ):
        raise UsageError(f"--model {name}: {problem}")


def _problems_of_layers(model: keras.Model, read: Sequence) -> Iterator[str]:
    for method in _OF_FIT:
        known = getattr(keras.Model, method)
        if getattr(getattr(model, method), "__func__", None) is not known:
            fix = "Pass a loss to cifar10.Config, or use add_loss() in call()."
            yield f"its class overrides {method}(), which no tower calls. {fix}"
    for one in model.inputs if layer_tree.is_graph(model) else ():
        if "float" not in one.dtype:
            yield f"its input is {one.dtype}; images are floats. Leave out its dtype."
    for layer in (model, *layer_tree.layers(model)):
        if isinstance(layer.call, tf.types.experimental.PolymorphicFunction):
            yield _HIDDEN.format(layer.name)
        if type(layer) is keras.layers.AugMix:  # Sections would differentiate another.
            why = "its AugMix chooses operations in Python, once for each graph"
            yield f"{why}. Use RandAugment, which draws in each step."
    held = {id(variable) for variable in model.variables}
    for variable in read:
        if variable.trainable and id(variable) not in held:
            why = "which is in none of its layers and thus neither trained nor saved"
            fix = "Make its layer an attribute in __init__, or set trainable=False."
            yield f"it reads {variable.path}, {why}. {fix}"


def _problems_of_graph(
    graph: tf.Graph, hidden: Sequence[str], *, deterministic: bool
) -> Iterator[str]:
    yield from map(_HIDDEN.format, hidden)
    for op in graph.get_operations():
        takes_variables = any(tensor.dtype == tf.resource for tensor in op.inputs)
        if "PartitionedCall" in op.type and takes_variables:
            yield _HIDDEN.format(op.name)
    whole = graph.as_graph_def()
    inner = (function.node_def for function in whole.library.function)
    # The names of nodes begin with those of the layers.
    for node in itertools.chain(whole.node, *inner):
        if re.match(_WRITING, node.op):
            fix = "Use the layer's add_weight(trainable=False)."
            yield f"{node.name} changes a tf.Variable, as every tower would. {fix}"
        if deterministic and re.match(_RANDOM, node.op):
            fix = "Draw random numbers with keras.random, or leave out --deterministic."
            yield f"{node.name} has state that no checkpoint holds. {fix}"


def _problems_of_outputs(traced: _Function, rows: tf.Tensor) -> Iterator[str]:
    sums = tf.reduce_sum(rows, axis=1)
    is_one = tf.reduce_all(rows >= 0.0) & tf.reduce_all(tf.abs(sums - 1.0) < _ROUNDING)
    if is_one or _last(traced).type == "Sigmoid":
        kind = "softmax" if is_one else "sigmoid"
        fix = "Leave that out (keras.applications: classifier_activation=None)."
        yield f"it ends in a {kind}, but the loss takes logits. {fix}"


def _last(traced: _Function) -> tf.Operation:
    """Returns the last operation that computes the outputs."""
    op = traced.outputs[0].op
    while op.type in ("Identity", "Cast", "Reshape"):
        op = op.inputs[0].op
    return op


def _trace(name: str, model: keras.Model, shape: Sequence[int], classes: int) -> _Trace:
    """Traces a model as in a training step, for two images."""
    compute = tf.function(_logits, autograph=False)
    given = tf.TensorSpec((2, *shape)), name, model, classes
    failed = explained(f"--model {name}", f"training on {shape} images failed")
    with failed, _Recorder() as call:
        return compute.get_concrete_function(*given, training=True), call


def _logits(
    images: tf.Tensor, name: str, model: keras.Model, classes: int, *, training: bool
) -> tf.Tensor:
    """Returns a model's logits for two images, after checking their type and shape."""
    logits = model(images, training=training)
    returned, fits = type(logits).__name__, False
    if isinstance(logits, tf.Tensor):
        returned = f"{logits.dtype.name} {tuple(logits.shape)}"
        fits = logits.dtype.is_floating and logits.shape == (2, classes)
    if not fits:
        why = f"for 2 images it returned {returned}, but must return logits"
        what = f"one floating-point tensor of shape (2, {classes})"
        raise UsageError(f"--model {name}: {why}: {what}.")
    return logits
