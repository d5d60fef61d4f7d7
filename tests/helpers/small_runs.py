"""Helpers: runs of a small model, whose checkpoints hold random numbers."""

import json

import keras
import numpy as np
import tensorflow as tf

from cifar10.config import config
from cifar10.evaluation.scored_set import Scorer, evaluation_batches
from cifar10.models.registry import build_model
from cifar10.run_directory import checkpoints
from cifar10.trained_model import TrainedModel

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 32, 32, 3), np.uint8)


def small(image_shape, classes, *, units=5):
    """A model with batch statistics and a random generator."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(3, 5, strides=4, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(classes),
        ]
    )


def deeper(image_shape, classes):
    """The same with a layer more, whose other variables fit the first's."""
    model = small(image_shape, classes)
    model.add(keras.layers.Dense(classes))
    return model


def wider(image_shape, classes):
    return small(image_shape, classes, units=6)


MODELS = {build.__name__: build for build in (small, deeper, wider)}


def describe(directory, **changes):
    """Writes the `config.json` of a run."""
    settings = {
        **config.Config().values,
        "model": "small",
        "precision": "float32",
        "data": "synthetic",
        "data_dir": ".",
        "simulated": False,
        "global_batch_size": 128,
        "class_names": list("abcdefghij"),
        **changes,
    }
    if "parameters" not in settings:
        shape = (32, 32, 3) if settings["distortions"] == "flip_translate" else None
        model = build_model(settings["model"], shape or (24, 24, 3), 10)
        settings["parameters"] = model.count_params()
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(settings))


def save(
    run_dir,
    step,
    *,
    model="small",
    precision="float32",
    shape=(24, 24, 3),
    **facts,
):
    """Writes a checkpoint whose values are random numbers of their own."""
    made = build_model(model, shape, 10, precision=precision, seed=step)
    random = np.random.default_rng(step)
    for variable in made.variables:
        if "seed" not in variable.path:
            variable.assign(random.uniform(0.1, 0.5, variable.shape))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(made.trainable_variables)
    return checkpoints.save(
        run_dir / "checkpoints",
        {
            "model": made,
            "optimizer": optimizer,
            "averages": [
                tf.Variable(random.normal(size=one.shape).astype(one.dtype) * 0.3)
                for one in made.trainable_variables
            ],
            "non_trainable": [one.value for one in made.non_trainable_variables],
            "global_step": tf.Variable(step, dtype=tf.int64),
        },
        step=step,
        facts={"seed": 0, "global_batch_size": 128, **facts},
    )


def evaluated(run_dir, step, *, images=IMAGES, use_averages=True):
    """Returns the logits that an evaluation scores, for images in one batch."""
    trained = TrainedModel(run_dir, use_averages=use_averages)
    trained.load(checkpoints.verify(run_dir / "checkpoints", step))
    scorer = Scorer(trained.model)
    labels = np.zeros(len(images), np.int32)
    kind = trained.run.config.images.distortions
    batches = evaluation_batches(images, labels, len(images), kind)
    ((images, _, _),) = batches
    values = [tf.convert_to_tensor(value) for value in trained.trainable]
    logits, _ = tf.function(scorer._logits)(values, images)
    return logits.numpy()
