"""The training graph of TensorFlow's CIFAR-10 tutorial, rebuilt as a peer to measure.

The structure and every figure follow `tutorials/image/cifar10` in tensorflow/models:
`cifar10_input.py`, `cifar10.py` and `cifar10_multi_gpu_train.py` with one GPU. It is a
graph of `tf.compat.v1` in a session of its own, with queues, queue runners and one
image at a time through the distortions. Checkpoints and summaries, which the tutorial
writes every 1,000 and every 100 steps, are left out, and so is its evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.rivals import common
from cifar10.input import datasets
from cifar10.process import entry_point

entry_point.import_tensorflow()

import tensorflow as tf  # noqa: E402 - its messages are silenced first.

v1 = tf.compat.v1

# The data set: https://www.cs.toronto.edu/~kriz/cifar.html
RECORD_SIDE = 32
CHANNELS = 3
LABEL_BYTES = 1
IMAGE_BYTES = CHANNELS * RECORD_SIDE * RECORD_SIDE
EXAMPLES_PER_EPOCH = 50_000

# The rest is the tutorial's, in the order of use.
IMAGE_SIDE = 24
BRIGHTNESS_DELTA = 63.0  # Of 255.
CONTRAST_RANGE = (0.2, 1.8)
INPUT_THREADS = 16
MIN_QUEUED_EXAMPLES = int(0.4 * EXAMPLES_PER_EPOCH)
PREFETCHED_BATCHES = 2  # For each tower.
WEIGHT_DECAY = 0.004
LEARNING_RATE_DECAY_FACTOR = 0.1
EPOCHS_PER_DECAY = 350
MOVING_AVERAGE_DECAY = 0.9999

# float32 [batch_size, 24, 24, 3], zero mean, unit variance; int32 [batch_size].
Batch = tuple[tf.Tensor, tf.Tensor]


def start(*, batch_size: int, dataset: datasets.Dataset) -> Tutorial:
    """Builds the graph, its queues included.

    Args:
        batch_size: Images in a step.
        dataset: One of which each file is a whole number of CIFAR-10's records.
    """
    v1.logging.set_verbosity(v1.logging.ERROR)
    return Tutorial(dataset.directory, batch_size)


class Tutorial:
    """The tutorial's graph in a session, with its input threads running.

    Call `close`: 21 threads stay alive until then. An error met by an input thread ends
    the running step with `tf.errors.OutOfRangeError`, and `close` raises the error
    itself.

    Args:
        data_directory: Folder with `data_batch_1.bin` to `data_batch_5.bin`.
        batch_size: Images in a step.
    """

    precision = "float32"

    def __init__(self, data_directory: Path, batch_size: int) -> None:
        self._resources = contextlib.ExitStack()
        with tf.Graph().as_default(), tf.device("/cpu:0"):
            files = [data_directory / f"data_batch_{n}.bin" for n in range(1, 6)]
            self._batch = _prefetched(_shuffled_batch(files, batch_size))
            self._build(batch_size)
            # Soft placement puts the tower on the host where there is no GPU.
            self._session = v1.Session(config=v1.ConfigProto(allow_soft_placement=True))
            self._resources.callback(self._session.close)
            self._session.run(v1.global_variables_initializer())
            coordinator = v1.train.Coordinator()
            threads = v1.train.start_queue_runners(self._session, coordinator)
        # Last in, first out: ask the threads to stop, wait for them, then the session.
        self._resources.callback(coordinator.join, threads)
        self._resources.callback(coordinator.request_stop)

    def check(
        self, values: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Returns the loss and the gradients that the graph's update applies."""
        kinds = {"weights": "kernel", "biases": "bias"}
        names = []  # Ours.
        for variable in self._variables:
            layer, _, kind = variable.op.name.partition("/")
            names.append(f"{layer}/{kinds[kind]}")
            # Feeding the initial value adds nothing to the graph.
            initial = variable.initializer.inputs[1]
            self._session.run(variable.initializer, {initial: values[names[-1]]})
        fed = dict(zip(self._batch, (images, labels), strict=True))
        with common.full_float32():
            loss, found = self._session.run([self._loss, self._gradients], fed)
        return float(loss), dict(zip(names, found, strict=True))

    def run(self, untimed: int, timed: int) -> float:
        """Trains; returns the seconds of the timed steps.

        The first step waits until 20,000 images are queued.
        """
        return common.seconds_of(self._step, untimed, timed)

    def close(self) -> None:
        """Stops the input threads and frees the session.

        Raises:
            tf.errors.OpError: What an input thread met, if one has failed.
        """
        self._resources.close()

    def _step(self) -> float:
        """Trains on one batch; returns its loss, with weight decay."""
        return self._session.run([self._train_op, self._loss])[1]

    def _build(self, batch_size: int) -> None:
        """Adds everything behind the input to the default graph."""
        images, labels = self._batch
        global_step = v1.train.create_global_step()
        learning_rate = v1.train.exponential_decay(
            common.LEARNING_RATE,
            global_step,
            int(EXAMPLES_PER_EPOCH / batch_size * EPOCHS_PER_DECAY),
            LEARNING_RATE_DECAY_FACTOR,
            staircase=True,
        )
        optimizer = v1.train.GradientDescentOptimizer(learning_rate)
        with tf.device("/gpu:0"), tf.name_scope("tower_0"):
            logits, weight_losses = _infer(images)
            cross_entropy = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(
                    labels=labels, logits=logits
                )
            )
            self._loss = tf.add_n([cross_entropy, *weight_losses])
            of_tower = optimizer.compute_gradients(self._loss)
        # The mean over towers, which the tutorial computes for one tower too.
        averaged = [
            (tf.reduce_mean(tf.stack([gradient]), 0), variable)
            for gradient, variable in of_tower
        ]
        self._gradients, self._variables = zip(*averaged, strict=True)
        apply_gradients = optimizer.apply_gradients(averaged, global_step)
        # Not ordered after the gradients, as in the multi-GPU script: an average may
        # see a variable before or after its update.
        averages = v1.train.ExponentialMovingAverage(MOVING_AVERAGE_DECAY, global_step)
        self._train_op = tf.group(
            apply_gradients, averages.apply(v1.trainable_variables())
        )


def _read_record(files: Sequence[Path]) -> Batch:
    """Returns the next record's image, uint8 [32, 32, 3], and label, int32 [1]."""
    names = v1.train.string_input_producer(list(map(str, files)))
    reader = v1.FixedLengthRecordReader(LABEL_BYTES + IMAGE_BYTES)
    record = tf.io.decode_raw(reader.read(names)[1], tf.uint8)
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


def _shuffled_batch(files: Sequence[Path], batch_size: int) -> Batch:
    """Returns batches drawn at random from a queue that 16 threads keep filled."""
    image, label = _read_record(files)
    images, labels = v1.train.shuffle_batch(
        [_distort(image), label],
        batch_size,
        capacity=MIN_QUEUED_EXAMPLES + 3 * batch_size,
        min_after_dequeue=MIN_QUEUED_EXAMPLES,
        num_threads=INPUT_THREADS,
    )
    return images, tf.reshape(labels, [batch_size])


def _prefetched(batch: Batch) -> Batch:
    """Returns the batch after a short queue, as `slim.prefetch_queue` once built it."""
    queue = tf.queue.FIFOQueue(
        PREFETCHED_BATCHES,
        dtypes=[tensor.dtype for tensor in batch],
        shapes=[tensor.shape for tensor in batch],
    )
    v1.train.add_queue_runner(v1.train.QueueRunner(queue, [queue.enqueue(batch)]))
    return tuple(queue.dequeue())


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


def _infer(images: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns logits of float32 [batch_size, 24, 24, 3] images, and weight decay."""
    weight_losses = []
    with v1.variable_scope("conv1"):
        net = _convolution(images, bias=0.0)
    net = _normalize(_pool(net))  # [batch_size, 12, 12, 64]
    with v1.variable_scope("conv2"):
        net = _convolution(net, bias=0.1)
    net = _pool(_normalize(net))  # [batch_size, 6, 6, 64]
    net = tf.reshape(net, [images.shape[0], -1])
    for name, units in (("local3", 384), ("local4", 192)):
        with v1.variable_scope(name):
            outputs, weights = _dense(net, units, deviation=0.04, bias=0.1)
            net = tf.nn.relu(outputs)
            weight_losses.append(WEIGHT_DECAY * tf.nn.l2_loss(weights))
    with v1.variable_scope("softmax_linear"):
        logits, _ = _dense(net, common.CLASSES, deviation=1 / 192.0, bias=0.0)
    return logits, weight_losses
