"""Writes TensorBoard's event files and `metrics.jsonl`, and computes summaries.

When a run resumes from a checkpoint, lines and events of later steps are dropped,
because these steps run again. So each metric has one curve.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from cifar10.config import layout
from cifar10.layers import QuickGelu
from cifar10.model import inference
from cifar10.models.layer_tree import is_graph
from cifar10.run_directory.logs import LogWriter, append_line, forget_later
from cifar10.towers.copies import read_variables, widened
from cifar10.towers.graphs import Traced, traced
from cifar10.towers.towers import Batch
from cifar10.training.hooks import Run, Summary
from cifar10.training.loop import Loop
from cifar10.training.timing import Share, Timer

# The number of distorted images in TensorBoard: enough to see how they vary.
_SAMPLE_IMAGES = 8
# This many values show a tensor's distribution as well as all of them.
_MOST_VALUES = 2**16

_ACTIVATION_LAYERS = (keras.layers.Activation, keras.layers.ReLU, QuickGelu)


class TensorBoard:
    """Writes TensorBoard's event files and `metrics.jsonl`.

    If the disk fails, a warning is printed, and values are lost until it works again.
    """

    def __init__(self, train_dir: Path, timer: Timer) -> None:
        self._events = train_dir / layout.TRAIN_EVENTS
        self._log = train_dir / layout.METRICS
        self._timer = timer
        self._logs = LogWriter(train_dir)
        self._resumed_step: int | None = None  # None once later events are dropped.
        self._writer: tf.summary.SummaryWriter | None = None

    def on_start(self, run: Run) -> None:
        """Opens the files, and writes the configuration of a new run."""
        self.on_end(run.step, "")
        self._writer, self._resumed_step = None, run.step
        rows = [f"| {name} | {value} |" for name, value in run.settings.items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *rows])
        self._write(run.step, lambda: run.step or tf.summary.text("config", table))

    def on_graph(self, graph: tf.Graph) -> None:
        """Writes the TensorFlow graph of a step."""
        self._write(0, lambda: tf.summary.graph(graph))

    def on_summary(self, step: int, summary: Summary) -> None:
        """Writes images, histograms, and the sparsity (fraction of zeros) of layers."""
        histograms = {n: sample(value).numpy() for n, value in summary.tensors.items()}
        scalars = {name: float(loss) for name, loss in summary.weight_losses.items()}
        for name, values in summary.activations.items():
            histograms[f"activations/{name}"] = values
            scalars[f"sparsity/{name}"] = float(np.mean(values == 0))
        written = summary_pb2.Summary()
        for name, values in histograms.items():
            written.MergeFrom(histogram_pb(name, values[np.isfinite(values)]))
        for name, value in scalars.items():
            written.MergeFrom(scalar_pb(name, value))
        # Each standardized image is rescaled to the range 0 to 1.
        images = tf.cast(summary.images[:_SAMPLE_IMAGES], tf.float32)
        low = tf.reduce_min(images, axis=[1, 2, 3], keepdims=True)
        high = tf.reduce_max(images, axis=[1, 2, 3], keepdims=True)
        shown = tf.math.divide_no_nan(images - low, high - low)

        def write() -> None:
            # One operation writes all summaries, which is faster than one for each.
            tf.summary.experimental.write_raw_pb(written.SerializeToString(), step)
            tf.summary.image("distorted_images", shown, max_outputs=_SAMPLE_IMAGES)

        self._write(step, write)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics to the event file and to `metrics.jsonl`.

        Values that are not finite are null in `metrics.jsonl`; event files omit them.
        """
        times = {"time": time.time(), "seconds": self._timer.seconds()}
        line = {"step": step, **times, **metrics}
        written = summary_pb2.Summary()
        for name, value in metrics.items():
            if abs(value) <= float(tf.float32.max):  # Event files hold float32.
                written.MergeFrom(scalar_pb(name, value))

        def write() -> None:
            append_line(self._log, line)
            tf.summary.experimental.write_raw_pb(written.SerializeToString(), step)

        self._write(step, write)

    def on_end(self, step: int, why: str) -> None:  # noqa: ARG002
        """Closes the files."""
        if self._writer:
            self._write(step, self._writer.close)

    def _write(self, step: int, write: Callable[[], object]) -> None:
        """Calls `write` with the event file open, and then flushes this file."""

        def write_and_flush() -> None:
            with self._open().as_default(step):
                write()

        if not self._logs.attempt(write_and_flush):
            self._writer = None  # This file may be damaged: open another next.

    def _open(self) -> tf.summary.SummaryWriter:
        """Returns the open writer; the first call drops events to be repeated."""
        if self._writer is None:
            if self._resumed_step is not None:
                forget_later(self._events, self._log, self._resumed_step)
                self._resumed_step = None
            for path in self._events.glob("*"):
                if not path.stat().st_size:  # An earlier attempt wrote nothing.
                    path.unlink()
            self._writer = tf.summary.create_file_writer(str(self._events))
        return self._writer


class Summaries:
    """Computes summaries in a limited share of the time."""

    def __init__(self, loop: Loop) -> None:
        training = loop.training
        self._loop = loop
        self._period = training.config.output.summary_steps
        self._towers = training.towers
        # With sections, the activations of the whole model do not fit in memory.
        self._activations: Callable[[tf.Tensor], dict[str, tf.Tensor]] = lambda _: {}
        if training.sections is None:
            model, device = self._towers.state.model, self._towers.devices[0]
            self._activations = activations_of(model, device)
        self._share = Share()

    def on_step(self, step: int) -> None:
        """Computes the summaries of a step if they are due and cheap enough."""
        if step % self._period or not self._share.is_due():
            return
        part = "start" if self._share.is_first else "summaries"
        with self._loop.paused_for(part), self._share.taken():
            if summary := self._summarize(self._loop.newest_batches()):
                self._loop.hooks.notify("on_summary", step, summary)

    def _summarize(self, batches: Sequence[Batch]) -> Summary | None:
        """Computes the summaries; returns None if a gradient is not finite."""
        gradients = self._towers.gradients(batches)
        if not np.isfinite(tf.linalg.global_norm(widened(gradients.values()))):
            return None
        images, _ = batches[0]
        activations = {n: v.numpy() for n, v in self._activations(images).items()}
        variables = self._towers.state.model.trainable_variables
        tensors = {f"variables/{v.path}": v.value for v in variables}
        tensors |= {f"gradients/{name}": value for name, value in gradients.items()}
        penalized = [variable for variable in variables if variable.regularizer]
        losses = {f"weight_loss/{v.path}": v.regularizer(v.value) for v in penalized}
        return Summary(images, activations, tensors, losses)


def sample(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's values, or an evenly spaced sample of a large one."""
    stride = math.ceil(tensor.shape.num_elements() / _MOST_VALUES)
    # Odd, so as not to skip every other channel.
    return tf.reshape(tensor, [-1])[:: stride | 1]


def activations_of(model: keras.Model, device: str) -> Traced:
    """Returns a function that samples a model's activations for a batch of images.

    The function returns samples of each layer's output, by layer name. It computes the
    outputs as the first tower's training step does, including dropout masks, from the
    present values of the variables. No variable changes.
    """
    viewed = with_activations(model)

    def compute(images: tf.Tensor) -> dict[str, tf.Tensor]:
        if viewed is None:
            return {}
        view, names = viewed
        with tf.device(device):
            given = *read_variables(view), images
            outputs, _, _ = inference(view, *given, training=True)
            return dict(zip(names, map(sample, outputs[1:]), strict=True))

    return traced(compute)


def with_activations(model: keras.Model) -> tuple[keras.Model, list[str]] | None:
    """Makes a view of a model that also outputs the activations of its layers.

    The view outputs the logits, and then the output of each layer that has weights or
    is an activation; the returned names are those of these layers. If max pooling and
    then ReLU follow a layer, the view outputs ReLU of the layer's unpooled output.
    Returns None if `model` is no graph of layers, or if another model called one of the
    layers first, because Keras knows only the layer's output in the other model.
    """
    if not is_graph(model):
        return None
    layers = [
        layer
        for layer in model.layers
        if not isinstance(layer, keras.Model)  # Its output depends on its own inputs.
        and (layer.weights or isinstance(layer, _ACTIVATION_LAYERS))
    ]
    inputs = model.inputs if len(model.inputs) > 1 else model.inputs[0]
    outputs = [model.outputs[0], *(_activated(layer, model) for layer in layers)]
    try:
        view = keras.Model(inputs, outputs)
    except ValueError:
        return None
    view.input_spec = model.input_spec  # The image sizes that the model accepts.
    return view, [layer.name for layer in layers]


def _activated(layer: keras.layers.Layer, model: keras.Model) -> keras.KerasTensor:
    """Returns a layer's output, after ReLU if max pooling and then ReLU follow."""
    following = {id(layer.input): layer for layer in model.layers}
    pooling = following.get(id(layer.output))
    if isinstance(pooling, keras.layers.MaxPooling2D) and isinstance(
        following.get(id(pooling.output)), keras.layers.ReLU
    ):
        return keras.ops.relu(layer.output)  # Max pooling and ReLU commute.
    return layer.output
