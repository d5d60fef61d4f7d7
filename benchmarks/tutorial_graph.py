"""The training graph of TensorFlow's CIFAR-10 tutorial, rebuilt as a peer to measure.

    python -m benchmarks.tutorial_graph --data_dir DIR --batch_size 128 --steps 200

prints the loss and the examples a second of one tower, input included;
`--constant_input` takes the input away. Two otherwise idle cores of an AMD EPYC with
AVX-512, TensorFlow 2.21.0, do about 1,450 examples/s with real and 1,550 to 1,600 with
constant input; a second busy process halves both. The first step waits some seconds
for the shuffling queue to fill. Nothing is written unless `--summary_dir` is given.

The structure and every figure follow `tutorials/image/cifar10` in tensorflow/models:
`cifar10_input.py`, `cifar10.py` and `cifar10_multi_gpu_train.py` with one GPU. It is a
graph of `tf.compat.v1` in a session of its own, with queues, queue runners and one
image at a time through the distortions, so it can run in a process that otherwise
executes eagerly. Checkpoints, which the tutorial writes every 1,000 steps, are left
out, and so is its evaluation.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if __name__ == "__main__":  # Before TensorFlow is loaded, or it has no effect.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

v1 = tf.compat.v1

# The data set: https://www.cs.toronto.edu/~kriz/cifar.html
RECORD_SIDE = 32
CHANNELS = 3
LABEL_BYTES = 1
IMAGE_BYTES = CHANNELS * RECORD_SIDE * RECORD_SIDE
RECORD_BYTES = LABEL_BYTES + IMAGE_BYTES
CLASSES = 10
EXAMPLES_PER_EPOCH = 50_000

# The rest is the tutorial's, in the order of use.
IMAGE_SIDE = 24
BRIGHTNESS_DELTA = 63.0  # Of 255.
CONTRAST_RANGE = (0.2, 1.8)
INPUT_THREADS = 16
MIN_QUEUED_EXAMPLES = int(0.4 * EXAMPLES_PER_EPOCH)
PREFETCHED_BATCHES = 2  # For each tower.
WEIGHT_DECAY = 0.004
INITIAL_LEARNING_RATE = 0.1
LEARNING_RATE_DECAY_FACTOR = 0.1
EPOCHS_PER_DECAY = 350
MOVING_AVERAGE_DECAY = 0.9999
SUMMARY_STEPS = 100

# Our own: what the command line excludes from its figure, and how it groups the rest.
WARM_UP_STEPS = 20
WINDOW_STEPS = 10


class _Batch(NamedTuple):
    images: tf.Tensor  # float32 [batch_size, 24, 24, 3], zero mean, unit variance
    labels: tf.Tensor  # int32 [batch_size], 0 to 9


class _Inference(NamedTuple):
    logits: tf.Tensor  # float32 [batch_size, 10]
    activations: dict[str, tf.Tensor]  # by layer name, for the summaries
    weight_losses: list[tf.Tensor]  # float32 [] each


def _data_files(directory: Path) -> list[str]:
    """Returns the five training files' names; raises where the reader would hang."""
    paths = [directory / f"data_batch_{number}.bin" for number in range(1, 6)]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"No file {path}: `data_directory` must be the folder with the five "
                "files data_batch_1.bin to data_batch_5.bin."
            )
        # The reader drops a file's incomplete record in silence, and the file names
        # come round for ever.
        size = path.stat().st_size
        if size == 0 or size % RECORD_BYTES:
            raise ValueError(
                f"{path} has {size} bytes, not a multiple of the {RECORD_BYTES} bytes "
                "of a record: download it again."
            )
    return [str(path) for path in paths]


def _read_record(filenames: Sequence[str]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the next record's image, uint8 [32, 32, 3], and label, int32 [1]."""
    reader = v1.FixedLengthRecordReader(RECORD_BYTES)
    _, value = reader.read(v1.train.string_input_producer(filenames))
    record = tf.io.decode_raw(value, tf.uint8)
    label = tf.cast(tf.slice(record, [0], [LABEL_BYTES]), tf.int32)
    planes = tf.reshape(
        tf.slice(record, [LABEL_BYTES], [IMAGE_BYTES]),
        [CHANNELS, RECORD_SIDE, RECORD_SIDE],
    )
    return tf.transpose(planes, [1, 2, 0]), label


def _distort(image: tf.Tensor) -> tf.Tensor:
    """Returns a random float32 [24, 24, 3] view of one uint8 [32, 32, 3] image."""
    view = tf.cast(image, tf.float32)
    view = tf.image.random_crop(view, [IMAGE_SIDE, IMAGE_SIDE, CHANNELS])
    view = tf.image.random_flip_left_right(view)
    view = tf.image.random_brightness(view, BRIGHTNESS_DELTA)
    view = tf.image.random_contrast(view, *CONTRAST_RANGE)
    return tf.image.per_image_standardization(view)


def _shuffled_batch(filenames: Sequence[str], batch_size: int) -> _Batch:
    """Returns batches drawn at random from a queue that 16 threads keep filled."""
    image, label = _read_record(filenames)
    images, labels = v1.train.shuffle_batch(
        [_distort(image), label],
        batch_size,
        capacity=MIN_QUEUED_EXAMPLES + 3 * batch_size,
        min_after_dequeue=MIN_QUEUED_EXAMPLES,
        num_threads=INPUT_THREADS,
    )
    return _Batch(images, tf.reshape(labels, [batch_size]))


def _prefetched(batch: _Batch) -> _Batch:
    """Returns the batch after a short queue, as `slim.prefetch_queue` once built it."""
    queue = tf.queue.FIFOQueue(
        PREFETCHED_BATCHES,
        dtypes=[tensor.dtype for tensor in batch],
        shapes=[tensor.shape for tensor in batch],
    )
    v1.train.add_queue_runner(v1.train.QueueRunner(queue, [queue.enqueue(batch)]))
    return _Batch(*queue.dequeue())


def _constant_batch(batch_size: int) -> _Batch:
    """Returns the same random images and labels at every step."""
    random = np.random.default_rng(0)
    shape = (batch_size, IMAGE_SIDE, IMAGE_SIDE, CHANNELS)
    images = random.standard_normal(shape, np.float32)
    labels = random.integers(CLASSES, size=batch_size, dtype=np.int32)
    return _Batch(tf.constant(images), tf.constant(labels))


def _variables(
    shape: Sequence[int], deviation: float, bias: float
) -> tuple[tf.Variable, tf.Variable]:
    """Returns a layer's weights and biases, which live on the host for all towers."""
    with tf.device("/cpu:0"):
        weights = v1.get_variable(
            "weights", shape, initializer=v1.truncated_normal_initializer(0, deviation)
        )
        biases = v1.get_variable(
            "biases", shape[-1:], initializer=v1.constant_initializer(bias)
        )
    return weights, biases


def _convolution(inputs: tf.Tensor, bias: float) -> tf.Tensor:
    shape = [5, 5, inputs.shape[-1], 64]
    weights, biases = _variables(shape, deviation=5e-2, bias=bias)
    outputs = tf.nn.conv2d(inputs, weights, strides=1, padding="SAME")
    return tf.nn.relu(tf.nn.bias_add(outputs, biases))


def _pool(inputs: tf.Tensor) -> tf.Tensor:
    return tf.nn.max_pool2d(inputs, ksize=3, strides=2, padding="SAME")


def _normalize(inputs: tf.Tensor) -> tf.Tensor:
    return tf.nn.lrn(inputs, depth_radius=4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)


def _dense(
    inputs: tf.Tensor, units: int, deviation: float, bias: float
) -> tuple[tf.Tensor, tf.Variable]:
    """Returns the layer's outputs, not rectified, and its weights."""
    weights, biases = _variables([inputs.shape[-1], units], deviation, bias)
    return tf.matmul(inputs, weights) + biases, weights


def _infer(images: tf.Tensor) -> _Inference:
    """Builds the network on float32 [batch_size, 24, 24, 3] images."""
    activations = {}
    weight_losses = []

    with v1.variable_scope("conv1"):
        net = activations["conv1"] = _convolution(images, bias=0.0)
    net = _normalize(_pool(net))  # [batch_size, 12, 12, 64]
    with v1.variable_scope("conv2"):
        net = activations["conv2"] = _convolution(net, bias=0.1)
    net = _pool(_normalize(net))  # [batch_size, 6, 6, 64]
    net = tf.reshape(net, [images.shape[0], -1])
    for name, units in (("local3", 384), ("local4", 192)):
        with v1.variable_scope(name):
            outputs, weights = _dense(net, units, deviation=0.04, bias=0.1)
            net = activations[name] = tf.nn.relu(outputs)
            weight_losses.append(WEIGHT_DECAY * tf.nn.l2_loss(weights))
    with v1.variable_scope("softmax_linear"):
        logits, _ = _dense(net, CLASSES, deviation=1 / 192.0, bias=0.0)
        activations["softmax_linear"] = logits
    return _Inference(logits, activations, weight_losses)


def _average(tower_gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the mean over towers; the tutorial computes it for one tower too."""
    return tf.reduce_mean(tf.stack(tower_gradients), 0)


class TutorialGraph:
    """The tutorial's graph in a session, with its input threads running.

    Use it as a context manager, or call `close`: 21 threads stay alive until then. An
    error met by an input thread ends the running `step` with
    `tf.errors.OutOfRangeError`, and `close` raises the error itself.

    Args:
        data_directory: Folder with `data_batch_1.bin` to `data_batch_5.bin`; not read
            if `constant_input`.
        batch_size: Images in a step.
        constant_input: Feed the same batch of noise at every step and build no input
            queues, to measure the training step alone.
        summary_dir: Folder for event files. If given, the tutorial's scalars and
            histograms are written every 100 steps, beginning with the first. As in
            the tutorial they come from a run of their own: another batch, forward
            and backward, without an update.

    Raises:
        FileNotFoundError: If a data file is missing.
        ValueError: If a data file does not consist of whole records.
    """

    def __init__(
        self,
        data_directory: Path,
        batch_size: int,
        constant_input: bool = False,
        summary_dir: str | None = None,
    ) -> None:
        self._steps_done = 0
        self._writer = None
        self._resources = contextlib.ExitStack()
        with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
            if constant_input:
                batch = _constant_batch(batch_size)
            else:
                files = _data_files(data_directory)
                batch = _prefetched(_shuffled_batch(files, batch_size))
            self._build(batch, with_summaries=summary_dir is not None)

            # Soft placement puts the tower on the host where there is no GPU.
            self._session = v1.Session(config=v1.ConfigProto(allow_soft_placement=True))
            self._resources.callback(self._session.close)
            self._session.run(v1.global_variables_initializer())
            if summary_dir is not None:
                self._writer = v1.summary.FileWriter(summary_dir, graph)
                self._resources.callback(self._writer.close)
            coordinator = v1.train.Coordinator()
            threads = []
            if not constant_input:
                threads = v1.train.start_queue_runners(self._session, coordinator)
        # Last in, first out: ask the threads to stop, wait for them, then the session.
        self._resources.callback(coordinator.join, threads)
        self._resources.callback(coordinator.request_stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the input threads and frees the session. May be called twice.

        Raises:
            tf.errors.OpError: What an input thread met, if one has failed.
        """
        self._resources.close()

    def step(self) -> float:
        """Trains on one batch; the first call waits until 20,000 images are queued.

        Returns:
            The loss before the update: cross entropy, mean over the batch, plus
            weight decay.

        Raises:
            FloatingPointError: If the loss is not finite.
            tf.errors.OutOfRangeError: If the input threads have ended.
        """
        _, loss = self._session.run([self._train_op, self._loss])
        if not math.isfinite(loss):
            raise FloatingPointError(f"The loss is {loss} at step {self._steps_done}.")
        if self._writer is not None and self._steps_done % SUMMARY_STEPS == 0:
            summary = self._session.run(self._summary_op)
            self._writer.add_summary(summary, self._steps_done)
        self._steps_done += 1
        return float(loss)

    def load(self, values: dict[str, np.ndarray]) -> None:
        """Sets the variables.

        Args:
            values: All of them by name, as in "conv1/weights".
        """
        for variable in self._variables:
            # Feeding the initial value adds nothing to the graph.
            initial = variable.initializer.inputs[1]
            value = values[variable.op.name]
            self._session.run(variable.initializer, {initial: value})

    def loss_and_gradients(
        self, images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Computes the loss on a given batch, and the gradients that an update applies.

        Args:
            images: float32 [batch_size, 24, 24, 3].
            labels: int32 [batch_size].

        Returns:
            The loss, as `step` returns it, and the gradients by their variables' names.
        """
        fed = {self._batch.images: images, self._batch.labels: labels}
        loss, gradients = self._session.run([self._loss, self._gradients], fed)
        names = [variable.op.name for variable in self._variables]
        return float(loss), dict(zip(names, gradients, strict=True))

    def _build(self, batch: _Batch, with_summaries: bool) -> None:
        """Adds everything behind the input to the default graph."""
        global_step = v1.train.create_global_step()
        learning_rate = v1.train.exponential_decay(
            INITIAL_LEARNING_RATE,
            global_step,
            int(EXAMPLES_PER_EPOCH / batch.labels.shape[0] * EPOCHS_PER_DECAY),
            LEARNING_RATE_DECAY_FACTOR,
            staircase=True,
        )
        optimizer = v1.train.GradientDescentOptimizer(learning_rate)

        with tf.device("/gpu:0"), tf.name_scope("tower_0"):
            inference = _infer(batch.images)
            cross_entropy = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels=batch.labels, logits=inference.logits
                )
            )
            loss = tf.add_n([cross_entropy, *inference.weight_losses])
            gradients_and_variables = optimizer.compute_gradients(loss)
        gradients_and_variables = [
            (_average([gradient]), variable)
            for gradient, variable in gradients_and_variables
        ]

        apply_gradients = optimizer.apply_gradients(
            gradients_and_variables, global_step
        )
        # Not ordered after the gradients, as in the multi-GPU script: an average may
        # see a variable before or after its update.
        averages = v1.train.ExponentialMovingAverage(MOVING_AVERAGE_DECAY, global_step)
        self._train_op = tf.group(
            apply_gradients, averages.apply(v1.trainable_variables())
        )
        self._batch = batch
        self._loss = loss
        self._gradients, self._variables = zip(*gradients_and_variables, strict=True)
        if with_summaries:
            scalars = {
                "cross_entropy": cross_entropy,
                "local3/weight_loss": inference.weight_losses[0],
                "local4/weight_loss": inference.weight_losses[1],
                "total_loss": loss,
                "learning_rate": learning_rate,
            }
            self._summary_op = _summarize(
                scalars, inference.activations, gradients_and_variables
            )


def _summarize(
    scalars: dict[str, tf.Tensor],
    activations: dict[str, tf.Tensor],
    gradients_and_variables: Sequence[tuple[tf.Tensor, Any]],
) -> tf.Tensor:
    """Returns one serialized summary, string [], of all that the tutorial records."""
    summaries = [v1.summary.scalar(name, value) for name, value in scalars.items()]
    for name, values in activations.items():
        summaries += [
            v1.summary.histogram(f"{name}/activations", values),
            v1.summary.scalar(f"{name}/sparsity", tf.math.zero_fraction(values)),
        ]
    for gradient, variable in gradients_and_variables:
        summaries += [
            v1.summary.histogram(f"{variable.op.name}/gradients", gradient),
            v1.summary.histogram(variable.op.name, variable),
        ]
    return v1.summary.merge(summaries)


def main() -> None:
    """Trains for some steps and prints the loss and the examples a second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data_dir", type=Path, required=True, help="folder with data_batch_*.bin"
    )
    parser.add_argument("--batch_size", type=int, default=128, help="images a step")
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help=f"steps to measure, after {WARM_UP_STEPS} of warm-up; at least "
        f"{WINDOW_STEPS}",
    )
    parser.add_argument(
        "--constant_input",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="leave the input pipeline out",
    )
    parser.add_argument("--summary_dir", help="folder for event files (default: none)")
    options = parser.parse_args()
    if options.steps < WINDOW_STEPS:
        parser.error(f"--steps {options.steps} is less than {WINDOW_STEPS}")
    v1.logging.set_verbosity(v1.logging.ERROR)  # Or every queue warns of its age.

    seconds = []  # by window
    with TutorialGraph(
        options.data_dir,
        options.batch_size,
        options.constant_input,
        options.summary_dir,
    ) as graph:
        started = time.perf_counter()
        print(f"step 0: loss {graph.step():.3f}")
        print(f"first step after {time.perf_counter() - started:.1f} s")
        for _ in range(WARM_UP_STEPS - 1):
            graph.step()
        for window in range(1, options.steps // WINDOW_STEPS + 1):
            # `step` returns a number, so the device is done when the clock is read.
            started = time.perf_counter()
            for _ in range(WINDOW_STEPS):
                loss = graph.step()
            seconds.append(time.perf_counter() - started)
            print(f"step {WARM_UP_STEPS + window * WINDOW_STEPS - 1}: loss {loss:.3f}")
    examples = WINDOW_STEPS * options.batch_size
    print(
        f"{examples / statistics.median(seconds):.0f} examples/s, median of "
        f"{len(seconds)} windows of {WINDOW_STEPS} steps "
        f"({examples / max(seconds):.0f} to {examples / min(seconds):.0f})"
    )
    # Summaries fall into one window in ten, which the median does not see.
    print(f"{examples / statistics.mean(seconds):.0f} examples/s over all windows")


if __name__ == "__main__":
    main()
