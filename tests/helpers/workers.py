"""Helpers: the processes of one run, as several machines would start them."""

import contextlib
import json
import os
import socket
import time

import keras
import tensorflow as tf

import runs
from cifar10.distributed import cluster

SCRIPT = runs.ROOT / "train_multi_gpu.py"
# A model whose steps take as many seconds as this variable says, if it is set.
PAUSED, PAUSE = "workers:paused", "SECONDS_OF_A_STEP"


class Pause(keras.layers.Layer):
    """Waits before it passes its inputs on."""

    def call(self, inputs):
        waited = tf.py_function(
            lambda: time.sleep(float(os.environ.get(PAUSE, "0"))), [], []
        )
        with tf.control_dependencies([waited]):
            return tf.identity(inputs)


def paused(image_shape, classes):
    """Returns a model of one layer, which waits before it computes."""
    flat = keras.layers.Flatten()
    dense = keras.layers.Dense(classes, kernel_regularizer="l2")
    return keras.Sequential([keras.Input(image_shape), Pause(), flat, dense])


def of_its_worker(image_shape, classes):
    """Returns a model that computes something else on the second worker."""
    index = json.loads(os.environ[cluster.TF_CONFIG])["task"]["index"]
    hidden = keras.layers.Dense(4, ("relu", "tanh")[index])
    layers = [keras.layers.Flatten(), hidden, keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


@contextlib.contextmanager
def started(count, **values):
    """Starts a run's workers, each with TF_CONFIG; they end with the block."""
    with contextlib.ExitStack() as stack:
        # All are open at once, so that every worker gets a different port.
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    words = [SCRIPT, "--deterministic", *runs.flags(**values)]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                runs.started(
                    *words, env={cluster.TF_CONFIG: cluster.tf_config(addresses, index)}
                )
            )
            for index in range(count)
        ]


def train(count, **values):
    """Trains in so many processes to the end; returns what the chief has printed."""
    with started(count, **values) as processes:
        ends = [process.communicate() for process in processes]
        codes = [process.returncode for process in processes]
    assert codes == [0] * count, ends
    (chief, _), *others = ends
    assert not [output for output, _ in others if "Done." in output]
    return chief
