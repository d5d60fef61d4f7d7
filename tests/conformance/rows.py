"""What a row of the tables is, and how it is compared with plain Keras.

A row is a model. The package trains it for three steps of eight images with sgd, on one
tower and on two, and then evaluates it; so does a plain Keras loop (`plain.py`), which
begins with the same values and sees the same batches. Losses, all variables and logits
have to be equal within 1e-9, in float64. The rules:

- A row is either equal or refused, with a sentence. A row that is neither is marked
  xfail, with the reason.
- Two towers equal Keras on the whole batch. Only where a layer's result for one image
  depends on other images of the batch or on random numbers (`by_tower`), two towers
  equal Keras on both halves, as `plain.step` has it: each half meets the same values,
  gradients and batch statistics are averaged, the first half advances counters and
  random generators, and the seeds of tower n are those of the model plus n times
  0x9E3779B1. With one tower such a row equals Keras on the whole batch.
- Where a layer has no float64, the bound is 1e-4, and 2e-2 in bfloat16 and float16.
- Evaluation is `model(images, training=False)`.
- Building and checking a model changes nothing: training begins with the values that
  the model's function makes, to the last bit.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.distributed.workers import Workers
from cifar10.errors import UsageError
from cifar10.model import inference
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES, build_model
from cifar10.towers.devices import Placement
from cifar10.training import assembly
from conformance import plain

RATE = 0.1
IMAGES = 1000  # Of the training set; sixteen are used.
# Keras 3.15, whose names the page on own models counts, lacks them.
NEW_IN_3_16 = ("Mosaic", "SparseCategoricalFocalCrossentropy", "TernaryDense")


def exists(name, module):
    """Returns whether this Keras has a name of the tables."""
    return name not in NEW_IN_3_16 or hasattr(module, name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A model, and what becomes of it."""

    name: str
    build: Callable[..., keras.Model]
    refused: str | None = None  # A pattern of the sentence.
    refused_for_two: str | None = None  # Of two towers alone.
    by_tower: bool = False
    unseeded: bool = False  # Whether a generator that Keras keeps elsewhere comes last.
    precision: str = "float64"
    tolerance: float = 1e-9
    quick: bool = False  # Whether it is part of the fast tests.
    compiled: bool = False  # Whether the plain loop is: compiling rounds otherwise.
    differs: str | None = None  # The reason of an xfail.
    given: Callable[[], Mapping[str, Any]] = dict  # Further arguments of `Config`.
    # The same for the plain loop.
    optimizer: Callable = lambda: keras.optimizers.SGD(RATE)
    loss: Callable = plain.cross_entropy
    metrics: Mapping[str, Callable] = dataclasses.field(default_factory=dict)


def params(rows):
    """Returns the rows for `pytest.mark.parametrize`."""
    found = []
    for row in rows:
        marks = [] if row.quick else [pytest.mark.slow]
        if row.differs:
            marks.append(pytest.mark.xfail(strict=True, reason=row.differs))
        found.append(pytest.param(row, id=row.name.replace(" ", "-"), marks=marks))
    return found


def check(row, devices, record_property):
    """Fails unless a row is equal, or refused as it says."""
    record_property("outcome", outcome(row))
    wanted = None
    for count in (1, 2):
        if refused := row.refused or (row.refused_for_two if count > 1 else None):
            with pytest.raises(UsageError) as caught:
                trained(row, devices[:count])
            assert re.search(refused, str(caught.value)), caught.value
            return
        if wanted is None or row.by_tower:
            wanted = expected(row, count)
        assert_equal(trained(row, devices[:count]), wanted, row.tolerance)
        if row.unseeded:
            return


def make_towers(row, devices):
    """Returns the towers of a row's model, as a run assembles them."""
    placement = Placement(tuple(devices), simulated=True, description="towers")
    given = {
        "model": row.build,
        "recipe": "tutorial",
        "precision": row.precision,
        "seed": plain.SEED,
        "optimizer": "sgd",
        "learning_rate": RATE,
        "momentum": 0.0,
        "moving_average_decay": plain.DECAY,
        "batch_size": 8 // len(devices),
        "distortions": "none",
        **row.given(),
    }
    if "accumulate" in given:
        given["batch_size"] //= given["accumulate"]
    requested = Config(**{k: v for k, v in given.items() if v is not None})
    config = assembly.resolve_config(requested, placement)
    name = config.network.model
    ARCHITECTURES[name] = Architecture(row.build)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "build_model", functools.partial(once_built, row.build))
        state = assembly.build_state(config, "/cpu:0", plain.SHAPE, plain.CLASSES)
    images = np.broadcast_to(np.uint8(0), (IMAGES, *plain.SHAPE))
    whole = config, placement, [state], None, Workers(), images
    towers, *_ = assembly.build_towers(
        *whole, classes=plain.CLASSES, class_weights=config.loss.class_weights
    )
    return towers


@functools.lru_cache(maxsize=4)
def checked(build, name, *shape, options, **given):
    """Returns a model, built and checked by the package, and the values it begins with.

    `build` is the function that `name` stands for; many functions have that name.
    """
    del build
    model = build_model(name, *shape, options=dict(options), **given)
    return model, values(model)


def once_built(build, *of, options, **given):
    """Returns what `build_model` would: one model for all trainings of a function."""
    model, begins = checked(build, *of, options=(*options.items(),), **given)
    for variable, (_, value) in zip(variables(model), begins, strict=True):
        variable.assign(value)
    return model


def trained(row, devices):
    """Returns what the package computes: losses, variables at both ends, logits."""
    towers = make_towers(row, devices)
    model, results = towers.state.model, []
    begins = values(model)
    for images, labels in plain.batches():
        parts = [
            (tf.constant(one, model.variable_dtype), tf.constant(two))
            for one, two in halves(images, labels, len(towers.devices))
        ]
        results.append(towers.step(parts).metrics)
    ends = values(model)
    if row.unseeded:
        begins, ends = begins[:-1], ends[:-1]
    groups = model.trainable_variables, model.non_trainable_variables
    of_values = [[variable.value for variable in group] for group in groups]
    images = tf.constant(plain.batches(4)[-1][0])
    logits, *_ = inference(model, *of_values, images, training=False)
    return {
        "losses": [float(result["total_loss"]) for result in results],
        "metrics": [
            [float(one[f"metrics/{n}"]) for n in row.metrics] for one in results
        ],
        "begins": begins,
        "ends": ends,
        "averages": [average.numpy() for average in towers.state.averages],
        "logits": logits,
    }


def expected(row, count):
    """Returns the same as plain Keras computes it."""
    model = plain.built(row.build, row.precision)
    optimizer, losses, metrics = row.optimizer(), [], []
    optimizer.build(model.trainable_variables)
    averages = [variable.numpy() for variable in model.trainable_variables]
    begins, compute = values(model), functools.partial(plain.gradients, model, row.loss)
    if row.compiled:
        compute = tf.function(compute, autograph=False)
    decay = row.given().get("moving_average_decay", plain.DECAY)
    for number, (images, labels) in enumerate(plain.batches()):
        metrics.append([])
        if row.metrics:  # Of the model before the update, in training mode.
            logits = model(tf.constant(images), training=True)
            found = [one(tf.constant(labels), logits) for one in row.metrics.values()]
            metrics[-1] = [float(np.mean(one)) for one in found]
        parts = halves(images, labels, count if row.by_tower else 1)
        losses.append(plain.step(model, optimizer, compute, parts))
        averages = plain.averaged(averages, model, decay, number)
    ends = values(model)
    logits = model(tf.constant(plain.batches(4)[-1][0]), training=False)
    found = {"losses": losses, "begins": begins, "ends": ends, "logits": logits}
    return {**found, "averages": averages, "metrics": metrics}


def halves(images, labels, count):
    return [*zip(np.split(images, count), np.split(labels, count), strict=True)]


def variables(model):
    """Returns all variables, trainable ones first."""
    return [*model.trainable_variables, *model.non_trainable_variables]


def values(model):
    """Returns copies of what they hold."""
    return [(one.path, np.array(one.numpy())) for one in variables(model)]


def assert_equal(found, wanted, tolerance):
    np.testing.assert_allclose(
        found["losses"], wanted["losses"], tolerance, tolerance, err_msg="losses"
    )
    for when, within in (("begins", 0.0), ("ends", tolerance)):
        for (name, ours), (_, theirs) in zip(found[when], wanted[when], strict=True):
            where = f"{when}: {name}"
            assert ours.dtype == theirs.dtype, where
            np.testing.assert_allclose(ours, theirs, within, within, err_msg=where)
    for what in ("logits", "metrics", "averages"):
        for pair in zip(found[what], wanted[what], strict=True):
            ours, theirs = map(np.asarray, pair)
            np.testing.assert_allclose(ours, theirs, tolerance, tolerance, err_msg=what)


def outcome(row):
    """Returns what becomes of a row, as its table says."""
    if row.differs:
        return "xfail"
    if row.refused:
        return "refused"
    return "refused for two" if row.refused_for_two else "equal"
