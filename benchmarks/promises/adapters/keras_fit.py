"""Keras `fit`; `python keras_fit.py [mirrored] JOB.json`."""

import sys
from pathlib import Path

import keras
import tensorflow as tf

from benchmarks.promises.adapters import keras_network, protocol
from benchmarks.promises.trainers import keras_fit

MIRRORED = "mirrored" in sys.argv


def build(job: protocol.Job) -> keras.Model:
    """Returns the compiled network."""
    (x, y), rate = job.arrays()[0], job.learning_rate
    if not job.constant:
        rate = keras.optimizers.schedules.CosineDecay(rate, job.steps * job.accumulate)
    with keras_fit.strategy(job.workers, job.seed).scope():
        network = keras_network.build(x.shape[1:], int(y.max()) + 1)
        return keras_fit.compiled(network, rate, job.momentum, job.accumulate)


def train(job: protocol.Job) -> tuple:
    """Trains, or continues."""
    model = build(job)
    batch_size, batches = job.batch_size // job.accumulate, job.steps * job.accumulate
    best = keras_fit.train(
        model, *job.arrays(), job.folder, batch_size, batches, job.reached
    )
    return model.get_weights(), model.optimizer.iterations.numpy(), best


def evaluate(job: protocol.Job) -> tuple:
    """Scores the trained weights."""
    (_, scored), model = job.arrays(), build(job)
    model.load_weights(Path(job.folder, "last.weights.h5"))
    return model.evaluate(*scored, job.batch_size)


protocol.serve(
    train,
    evaluate,
    name=f"Keras fit{', MirroredStrategy' if MIRRORED else ''}",
    version=f"{keras.__version__} on TensorFlow {tf.__version__}",
    checkpoint="backup/latest.weights.h5",
    documents="https://keras.io/api/callbacks/backup_and_restore/",
    workers=2 if MIRRORED else 1,
    lacks={} if MIRRORED else {"workers": "fit alone has one"},
)
