"""TensorBoard's event files and `metrics.jsonl`, and the summaries in them.

Both show one curve after a resume: lines and events beyond the checkpoint that a run
resumes from are dropped, because their steps run again.
"""

import collections
import contextlib
import errno
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api as hparams
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.util import tensor_util

from cifar10 import model as models
from cifar10.config import fields, layout, options
from cifar10.errors import DiskError, say
from cifar10.layers import QuickGelu
from cifar10.models.layer_tree import is_graph
from cifar10.run_directory.lock import DirectoryGuard
from cifar10.run_directory.logs import append_line, forget_later, writing
from cifar10.towers.graphs import traced
from cifar10.towers.towers import Batch, StepResult
from cifar10.training.hooks import Run, Summary
from cifar10.training.loop import Loop
from cifar10.training.results import is_finite
from cifar10.training.timing import Goodput

# Distorted images shown in TensorBoard: enough to see how they vary.
_SAMPLE_IMAGES = 8
# A fast GPU may take less time for a hundred steps than Python for one set of these.
_MOST_SHARE = 0.05
_BUCKETS = 30  # TensorBoard's own number.
# This many values show a tensor's distribution as well as all of them.
_MOST_VALUES = 2**16

_HISTOGRAM = histogram_metadata.create_summary_metadata(None, None)
_ACTIVATION_LAYERS = (keras.layers.Activation, keras.layers.ReLU, QuickGelu)


class TensorBoard:
    """The hook that writes the events of a training to TensorBoard's files."""

    waits_for = "the disk of the summaries"

    def __init__(self, train_dir: Path, goodput: Goodput) -> None:
        self._files = (train_dir / layout.TRAIN_EVENTS, train_dir / layout.METRICS)
        self._goodput = goodput
        self._summaries: TrainSummaries | None = None

    def on_start(self, run: Run) -> None:
        """Opens the files, and describes a new run in them."""
        if self._summaries:
            self._summaries.close()
        self._summaries = TrainSummaries(*self._files, run.step)
        if run.step == 0:
            # TensorBoard's HParams panel compares settings that change the result.
            names = options.result_determining(fields.RECORDED)
            self._summaries.describe(run.settings, names)

    def on_graph(self, graph: tf.Graph) -> None:
        """Writes the graph of a step."""
        self._opened.graph(graph)

    def on_summary(self, step: int, summary: Summary) -> None:
        """Writes histograms and images."""
        self._opened.histograms(step, summary.tensors)
        self._opened.weight_losses(step, summary.weight_losses)
        self._opened.activations(step, summary.activations)
        self._opened.images(step, summary.images)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one point of each curve."""
        seconds = self._goodput.seconds()
        self._opened.scalars(step, metrics, time=time.time(), seconds=seconds)

    def on_save(self, step: int) -> None:  # noqa: ARG002 - all that was written.
        """Flushes the curves to disk, so that none has a gap before a checkpoint."""
        self._opened.flush()

    def on_end(self, step: int, why: str) -> None:  # noqa: ARG002
        """Closes the files."""
        self._opened.close()

    @property
    def _opened(self) -> "TrainSummaries":
        if self._summaries is None:
            raise RuntimeError("on_start was not called")
        return self._summaries


class Summaries:
    """The hook that computes summaries, and notifies the other hooks of them.

    Summaries take at most 5 % of the time: some are left out if one every
    --summary_steps would take more. The step runs the same graph either way, on every
    worker.
    """

    waits_for = ""  # Its devices.

    def __init__(self, loop: Loop) -> None:
        training = loop.training
        self._loop = loop
        self._period = training.config.output.summary_steps
        self._model = training.towers.state.model
        # A sectioned tower has no room for the activations of the whole model.
        self._compute: Callable[[tf.Tensor], dict[str, np.ndarray]] = lambda _: {}
        if training.sections is None:
            self._compute = activations_of(self._model, training.towers.devices[0])
        self._budget = SummaryBudget(self._period)
        self._wanted = 0

    def wants_result(self, step: int) -> bool:
        """Returns whether a step has summaries."""
        is_wanted = step % self._period == 0 and self._budget.allows()
        self._wanted = step if is_wanted else 0
        return is_wanted

    def on_call(self, step: int, batches: Sequence[Batch]) -> None:
        """Computes activations from the variables as they are before the step."""
        if step == self._wanted:
            with self._budget.spending(step):
                self._images, _ = batches[0]
                self._activations = self._compute(self._images)

    def on_result(self, step: int, result: StepResult) -> None:
        """Notifies the hooks, unless something is not finite."""
        if step != self._wanted or not is_finite(result.metrics, result.tower_losses):
            return
        with self._budget.spending(step):
            variables = self._model.trainable_variables
            tensors = {f"variables/{v.path}": v.value for v in variables}
            tensors |= {f"gradients/{name}": g for name, g in result.gradients.items()}
            losses = {
                f"weight_loss/{v.path}": v.regularizer(v.value)
                for v in variables
                if v.regularizer
            }
            summary = Summary(self._images, self._activations, tensors, losses)
            self._loop.notify("on_summary", step, summary)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """Prints a note, once, if summaries are left out."""
        self._loop.say(self._budget.take_note())


class SummaryBudget:
    """Postpones sets of summaries where one every `period` steps is too many."""

    def __init__(self, period: int) -> None:
        self._began = time.perf_counter()
        self._costs: dict[int, float] = collections.defaultdict(float)  # By step.
        self._note = (
            f"NOTE: histograms and images every {period} steps would take more than "
            f"{_MOST_SHARE:.0%} of the time.\nThey are written less often."
        )
        self._has_postponed = False

    def allows(self) -> bool:
        """Returns whether another set, as costly as the newest, is within the share."""
        # Functions are traced in the first set, which counts as part of the start.
        costs = list(self._costs.values())[1:]
        elapsed = time.perf_counter() - self._began
        allowed = sum(costs + costs[-1:]) <= _MOST_SHARE * elapsed
        self._has_postponed |= not allowed
        return allowed

    @contextlib.contextmanager
    def spending(self, step: int) -> Iterator[None]:
        """Counts the block to the set of a step."""
        began = time.perf_counter()
        yield
        self._costs[step] += time.perf_counter() - began

    def take_note(self) -> str:
        """Returns a note at the first call after a set was postponed; else empty."""
        if not self._has_postponed:
            return ""
        note, self._note = self._note, ""
        return note


class TrainSummaries:
    """Writes the event files and `metrics.jsonl` of a training.

    Use it as a context manager. The run resumes from `resumed_step`, 0 for a new one.
    A failing disk causes a warning, and lines are lost until it works again.
    """

    def __init__(self, events: Path, metrics: Path, resumed_step: int) -> None:
        self._directory = metrics.parent
        self._guard = DirectoryGuard(metrics.parent)
        self._events = events
        self._metrics = metrics
        self._resumed_step: int | None = resumed_step  # None once the logs end there.
        self._failed = False
        with self._writing():
            self._open()

    def _open(self) -> None:
        if self._resumed_step is not None:
            forget_later(self._events, self._metrics, self._resumed_step)
            self._resumed_step = None
        self._writer = tf.summary.create_file_writer(str(self._events))

    def scalars(self, step: int, values: Mapping[str, float], **facts: Any) -> None:
        """Writes scalars to both files, and `facts` only to `metrics.jsonl`.

        JSON has only null for numbers that are not finite; event files leave them out.
        """
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": step, **facts, **dict.fromkeys(values), **finite}
        summary = summary_pb2.Summary()
        for name, value in finite.items():
            if abs(value) <= float(tf.float32.max):  # All that an event file can hold.
                summary.MergeFrom(scalar_pb(name, value))
        with self._at(step):
            if problem := self._guard.problem():
                raise OSError(errno.ESTALE, problem)
            append_line(self._metrics, line)
            _write(step, summary)

    def histograms(self, step: int, values: Mapping[str, tf.Tensor]) -> None:
        """Writes one histogram per named tensor, of evenly chosen values if large."""
        summary = summary_pb2.Summary()
        for name, value in values.items():
            summary.MergeFrom(_histogram_pb(name, sample(value).numpy()))
        with self._at(step):
            _write(step, summary)

    def weight_losses(self, step: int, values: Mapping[str, tf.Tensor]) -> None:
        """Writes the regularization loss of each variable."""
        summary = summary_pb2.Summary()
        for name, value in values.items():
            summary.MergeFrom(scalar_pb(name, float(value)))
        with self._at(step):
            _write(step, summary)

    def activations(self, step: int, samples: Mapping[str, np.ndarray]) -> None:
        """Writes the histogram and the sparsity (fraction of zeros) of each layer."""
        summary = summary_pb2.Summary()
        for name, values in samples.items():
            summary.MergeFrom(_histogram_pb(f"activations/{name}", values))
            summary.MergeFrom(scalar_pb(f"sparsity/{name}", np.mean(values == 0)))
        with self._at(step):
            _write(step, summary)

    def images(self, step: int, images: tf.Tensor) -> None:
        """Writes the first standardized images, each rescaled to the range 0 to 1."""
        images = tf.cast(images[:_SAMPLE_IMAGES], tf.float32)
        low = tf.reduce_min(images, axis=[1, 2, 3], keepdims=True)
        high = tf.reduce_max(images, axis=[1, 2, 3], keepdims=True)
        shown = tf.math.divide_no_nan(images - low, high - low)
        with self._at(step):
            tf.summary.image("distorted_images", shown, max_outputs=_SAMPLE_IMAGES)

    def graph(self, graph: tf.Graph) -> None:
        """Writes the graph of a training step."""
        with self._at(0):
            tf.summary.graph(graph)

    def describe(
        self, settings: Mapping[str, Any], hyperparameters: Sequence[str]
    ) -> None:
        """Writes the configuration, and the hyperparameters for the HParams panel."""
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
        with self._at(0):
            tf.summary.text("config", table)
            hparams.hparams(
                # The panel accepts neither None nor tables.
                {
                    k: settings[k]
                    for k in hyperparameters
                    if not isinstance(settings[k], list | dict | None)
                },
                trial_id=str(settings["train_dir"]),
            )

    def flush(self) -> None:
        """Waits until everything is in the files, and reopens those that failed."""
        self._retry()
        with self._writing():
            self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Flushes and closes the event file."""
        with self._writing():
            self._writer.close()

    def _retry(self) -> None:
        """Opens another event file if the last one failed: its end may be torn."""
        # A directory that has vanished is not created again.
        if not self._failed or self._guard.problem() or not self._directory.is_dir():
            return
        with contextlib.suppress(OSError, tf.errors.OpError):
            for path in self._events.glob("*"):
                if not path.stat().st_size:  # The last attempt could not write more.
                    path.unlink()
            self._open()
            self._failed = False
            say(f"The event files and logs in {self._directory} are written again.")

    @contextlib.contextmanager
    def _at(self, step: int) -> Iterator[None]:
        self._retry()
        with self._writing(), self._writer.as_default(step=step):
            yield

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns a failing disk into a warning."""
        try:
            with writing(self._directory):
                yield
        except DiskError as error:
            if not self._failed:
                loss = "The training continues; what it logs meanwhile is lost."
                say(f"{error.what} {loss}")
            self._failed = True
            self._writer = tf.summary.create_noop_writer()


def _histogram_pb(name: str, values: np.ndarray) -> summary_pb2.Summary:
    summary = summary_pb2.Summary()
    counted = tensor_util.make_tensor_proto(buckets(values))
    summary.value.add(tag=name, metadata=_HISTOGRAM, tensor=counted)
    return summary


def _write(step: int, summary: summary_pb2.Summary) -> None:
    """Writes summaries in one operation, where one for each would take longer."""
    tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step)


def sample(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's values, or an evenly spaced sample of a large one."""
    stride = math.ceil(tensor.shape.num_elements() / _MOST_VALUES)
    # A stride that shared a factor with the channels would always meet the same ones.
    while stride > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1
    return tf.reshape(tensor, [-1])[:: max(stride, 1)]


def buckets(values: np.ndarray) -> np.ndarray:
    """Counts the finite values: left edge, right edge and count of each bucket."""
    values = values.astype(np.float64)
    values = values[np.isfinite(values)]
    counts, edges = np.histogram(values, _BUCKETS)
    if values.size and values.min() == values.max():
        # Of a single value all counts are in the last bucket, which has no width.
        edges[:] = values[0]
        counts = np.sort(counts)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


def activations_of(
    model: keras.Model, device: str
) -> Callable[[tf.Tensor], dict[str, np.ndarray]]:
    """Returns a function from images, as the model takes them, to its activations.

    The function computes with the present variables and returns samples by layer. A
    training step of the first tower computes the same activations, dropout masks
    included; no variable changes.
    """
    computed = traceable(model, device)
    return lambda images: {
        name: sample(values).numpy() for name, values in computed(images).items()
    }


def traceable(
    model: keras.Model, device: str
) -> tf.types.experimental.PolymorphicFunction:
    """Returns the function that computes all activations by layer."""
    viewed = with_activations(model)

    def compute(images: tf.Tensor) -> dict[str, tf.Tensor]:
        if viewed is None:
            return {}
        view, names = viewed
        with tf.device(device):
            outputs, _, _ = models.inference(
                view,
                [tf.identity(v.value) for v in view.trainable_variables],
                [tf.identity(v.value) for v in view.non_trainable_variables],
                images,
                training=True,
            )
        return dict(zip(names, outputs[1:], strict=True))

    return traced(compute)


def with_activations(model: keras.Model) -> tuple[keras.Model, list[str]] | None:
    """Returns a view of a model that also returns its layers' activations.

    Its outputs are the logits and then those of the layers that have weights or are
    activations, whose names come with it; as in the tutorial, that of a convolution
    before max pooling and ReLU is shown after ReLU and before the pooling. A layer that
    another model had first is left out, since Keras gives its output there. None for a
    model that is not a graph of layers: Keras does not know its inner tensors.
    """
    if not is_graph(model):
        return None
    layers = [
        layer
        for layer in model.layers
        if not isinstance(layer, keras.Model)  # Its output belongs to its own inputs.
        and (layer.weights or isinstance(layer, _ACTIVATION_LAYERS))
    ]
    inputs = model.inputs if len(model.inputs) > 1 else model.inputs[0]
    if not _are_connected(inputs, layers):
        layers = [layer for layer in layers if _are_connected(inputs, [layer])]
    outputs = [model.outputs[0], *(_activated(layer, model) for layer in layers)]
    view = keras.Model(inputs, outputs)
    view.input_spec = model.input_spec  # The sizes of images that it takes.
    return view, [layer.name for layer in layers]


def _are_connected(inputs: Any, layers: Sequence[keras.layers.Layer]) -> bool:
    """Returns whether Keras finds a way from a model's inputs to layers' outputs."""
    try:
        keras.Model(inputs, [layer.output for layer in layers])
    except ValueError:
        return False
    return True


def _activated(layer: keras.layers.Layer, model: keras.Model) -> keras.KerasTensor:
    """Returns a layer's output, after ReLU where that comes next but for a pooling."""
    following = {id(layer.input): layer for layer in model.layers}
    pooling = following.get(id(layer.output))
    if isinstance(pooling, keras.layers.MaxPooling2D) and isinstance(
        following.get(id(pooling.output)), keras.layers.ReLU
    ):
        return keras.ops.relu(layer.output)  # The maximum of both orders is the same.
    return layer.output
