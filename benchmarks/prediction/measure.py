"""What can be measured here: a tower's step, and averages and copies in memory."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from benchmarks.prediction import model as prediction
from benchmarks.prediction.checks import Check, Memory
from cifar10 import model as models
from cifar10.input.pipeline import image_shape
from cifar10.towers import towers, train_state

TOWERS = (1, 2, 4, 8)

_IMAGE_SHAPE = image_shape("tutorial", (32, 32, 3))
_CLASSES = 10
_UNTIMED_CALLS = 3
# On a GPU the clock is read once in so many steps, since it has to wait for the device.
_STEPS_IN_A_WINDOW = 5
# Beyond the caches of most processors, so that the memory itself is measured.
_PROBE_BYTES = 64_000_000
_PROBE_PASSES = 3  # Two reads and a write.


def prepare() -> str:
    """Splits the CPU into logical devices; it has to run before all else does.

    Returns:
        The device of a tower: the first GPU if there is one, else the CPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    cpu = tf.config.list_physical_devices("CPU")[0]
    # TensorFlow may have started already; then `memory` takes what devices there are.
    with contextlib.suppress(RuntimeError):
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * max(TOWERS)
        )
    return "/gpu:0" if gpus else "/cpu:0"


def device_name(device: str) -> str:
    """Returns what a person calls a device."""
    if device.startswith("/cpu"):
        return "CPU"
    gpu = tf.config.list_physical_devices("GPU")[0]
    return tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")


def build(name: str) -> keras.Model:
    """Builds a model for distorted CIFAR-10 images, as training does."""
    return models.build(name, _IMAGE_SHAPE, _CLASSES)


def gradient_bytes(model: keras.Model) -> int:
    """Returns the bytes of a tower's gradients, which are those of the variables."""
    return sum(
        variable.value.shape.num_elements() * tf.as_dtype(variable.dtype).size
        for variable in model.trainable_variables
    )


def step_seconds(
    model: keras.Model, device: str, batch_size: int, repeats: int
) -> list[float]:
    """Times the forward and backward pass of one tower, its variables beside it.

    Args:
        model: A model made by `build`.
        device: Where the tower runs.
        batch_size: Images in a step.
        repeats: Timed windows.

    Returns:
        Seconds a step, by window.
    """
    with tf.device(device):
        trainable, non_trainable = (
            [tf.identity(variable.value) for variable in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        images = tf.random.stateless_normal((batch_size, *_IMAGE_SHAPE), (0, 0))
        labels = tf.random.stateless_uniform(
            (batch_size,), (0, 1), maxval=_CLASSES, dtype=tf.int32
        )

    @tf.function(autograph=False)
    def gradients() -> list[tf.Tensor]:
        with tf.device(device), tf.GradientTape() as tape:
            tape.watch(trainable)
            logits, _, penalties = models.inference(
                model, trainable, non_trainable, images, training=True
            )
            loss = models.loss(logits, labels, penalties)["total_loss"]
        found = tape.gradient(loss, trainable)
        return [gradient for gradient in found if gradient is not None]

    def window() -> None:
        for _ in range(_STEPS_IN_A_WINDOW):
            gradients()
        # A GPU computes behind the program's back.
        tf.test.experimental.sync_devices()

    times = _take_turns([window], repeats)[0]
    return [seconds / _STEPS_IN_A_WINDOW for seconds in times]


def memory(model: keras.Model, repeats: int) -> Memory:
    """Times averages of N gradients and N copies of the variables on the CPU.

    Logical devices of one CPU share its memory, so that a tower which reads the
    variables moves nothing; the copies here are real ones, made on each device. The
    measurements take turns, so that a busy machine treats them alike.

    Args:
        model: A model made by `build`.
        repeats: Timed calls of each.
    """
    available = len(tf.config.list_logical_devices("CPU"))
    numbers = [number for number in TOWERS if number <= available]
    calls = [_probe(), _reading(model)]
    calls += [_averaging(model, number) for number in numbers]
    calls += [_copying(model, number) for number in numbers]
    probe, reading, *others = _take_turns(calls, repeats)

    bandwidth = _PROBE_PASSES * _PROBE_BYTES / min(probe)
    call_seconds = min(reading)
    size = gradient_bytes(model)
    predictions = [
        (
            "nothing to average: 1 gradient"
            if number == 1
            else f"average of {number} gradients",
            prediction.memory_average_seconds(number, size, bandwidth),
        )
        for number in numbers
    ] + [
        (
            f"{number} {'copy' if number == 1 else 'copies'} of the variables",
            prediction.memory_copies_seconds(number, size, bandwidth),
        )
        for number in numbers
    ]
    checks = [
        Check(
            what,
            call_seconds + seconds,
            min(times),
            statistics.median(times),
        )
        for (what, seconds), times in zip(predictions, others, strict=True)
    ]
    return Memory(bandwidth, call_seconds, repeats, checks)


def _take_turns(
    calls: Sequence[Callable[[], object]], repeats: int
) -> list[list[float]]:
    """Returns the seconds that each call takes, one after the other, by call."""
    for call in calls:
        for _ in range(_UNTIMED_CALLS):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for own, call in zip(times, calls, strict=True):
            began = time.perf_counter()
            call()
            own.append(time.perf_counter() - began)
    return times


def _probe() -> Callable[[], object]:
    """Returns a call that adds two tensors too large for the caches."""
    shape = [_PROBE_BYTES // tf.float32.size]
    with tf.device(train_state.UPDATE_DEVICE):
        one, other = tf.ones(shape), tf.ones(shape)
        add = tf.function(lambda one, other: one + other, autograph=False)
    return lambda: add(one, other)


def _reading(model: keras.Model) -> Callable[[], object]:
    """Returns a call that reads the variables without a copy."""

    @tf.function(autograph=False)
    def read() -> None:
        with tf.device(train_state.UPDATE_DEVICE):
            tf.group(*[tf.identity(v.value) for v in model.trainable_variables])

    return read


def _averaging(model: keras.Model, number: int) -> Callable[[], object]:
    """Returns a call that averages so many towers' gradients, as our step does."""
    names = [variable.path for variable in model.trainable_variables]
    with tf.device(train_state.UPDATE_DEVICE):
        tower_gradients = [
            [tf.ones_like(variable.value) for variable in model.trainable_variables]
            for _ in range(number)
        ]

    @tf.function(autograph=False)
    def average(tower_gradients: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        with tf.device(train_state.UPDATE_DEVICE):
            return towers.average_gradients(tower_gradients, names)

    return lambda: average(tower_gradients)


def _copying(model: keras.Model, number: int) -> Callable[[], object]:
    """Returns a call that copies the variables on so many logical devices."""

    @tf.function(autograph=False)
    def copy() -> None:
        copies = []
        for device in range(number):
            with tf.device(f"/cpu:{device}"):
                copies += [
                    tf.raw_ops.DeepCopy(x=variable.value)
                    for variable in model.trainable_variables
                ]
        tf.group(*copies)

    return copy
