"""The table of what surrounds a model: optimizers, schedules, losses, metrics, and what
its layers are made of: initializers, constraints, regularizers.

Each public name of the modules of Keras is in it. An optimizer without a row of its own
is the row of its object, `Config(optimizer=keras.optimizers.Adam(...))`.
"""

import dataclasses
import functools

import keras
import tensorflow as tf
from keras import (
    layers as L,  # noqa: N812
    ops,
)

from conformance import plain
from conformance.rows import RATE, Row, exists

K = keras.optimizers
# Keras itself has no float64 there.
IN_FLOAT32 = {"precision": "float32", "tolerance": 1e-4}


def small(image_shape, classes):
    """A model of two dense layers, so that biases and kernels are updated."""
    image = keras.Input(image_shape)
    net = L.Flatten()(L.AveragePooling2D(4)(image))
    net = L.Dense(5, activation="tanh")(net)
    return keras.Model(image, L.Dense(classes)(net))


def _row(name, given=dict, optimizer=None, build=small, **options):
    optimizer = optimizer or (lambda: K.SGD(RATE))
    return Row(name=name, build=build, given=given, optimizer=optimizer, **options)


# ---- optimizers


def _without_biases(make):
    """Returns an optimizer of Keras that spares biases, as the package's do."""

    def spared():
        optimizer = make()
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return optimizer

    return spared


OPTIMIZERS = {
    "Adadelta": lambda: K.Adadelta(1.0, rho=0.9),
    "Adafactor": lambda: K.Adafactor(0.05, relative_step=False),
    "Adagrad": lambda: K.Adagrad(0.1, initial_accumulator_value=0.2),
    "Adam": lambda: K.Adam(0.02, beta_1=0.8, amsgrad=True),
    "Adamax": lambda: K.Adamax(0.02),
    "AdamW": lambda: K.AdamW(0.02, weight_decay=0.1),
    "Lamb": lambda: K.Lamb(0.02),
    "Lion": lambda: K.Lion(0.01, weight_decay=0.2),
    "Ftrl": lambda: K.Ftrl(0.1),
    "Muon": lambda: K.Muon(0.02),
    "Nadam": lambda: K.Nadam(0.02),
    "RMSprop": lambda: K.RMSprop(0.01, momentum=0.9, centered=True),
    "SGD": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
}
OPTIMIZERS_REFUSED = {
    "ScheduleFreeAdamW": (lambda: K.ScheduleFreeAdamW(0.1), "ScheduleFreeAdamW"),
    "LossScaleOptimizer": (lambda: K.LossScaleOptimizer(K.SGD(0.1)), "float16"),
    "MultiOptimizer": (
        lambda: K.MultiOptimizer(K.OptimizerMap(K.SGD(0.1))),
        "MultiOptimizer",
    ),
}
NO_OPTIMIZERS = {
    "Optimizer": "the base class; a row has a subclass",
    "OptimizerMap": "an argument of MultiOptimizer",
}


class Signed(K.Optimizer):
    """An optimizer that Keras does not have."""

    def update_step(self, gradient, variable, learning_rate):
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * ops.sign(gradient))


def by_name(name, optimizer, **given):
    return _row(
        f"{name} by its name, {given or 'without arguments'}",
        lambda: {"optimizer": name, **given},
        optimizer,
    )


def _decayed(image_shape, classes):
    image = keras.Input(image_shape)
    net = L.LayerNormalization()(L.Flatten()(L.AveragePooling2D(4)(image)))
    return keras.Model(image, L.Dense(classes)(net))


def optimizer_rows():
    for name, make in OPTIMIZERS.items():
        decays = name in ("AdamW", "Lion", "Muon")
        yield _row(
            name,
            lambda make=make: _of_object(make()),
            _without_biases(make) if decays else make,
            **(IN_FLOAT32 if name == "Muon" else {}),
        )
    for name, (make, said) in OPTIMIZERS_REFUSED.items():
        yield _row(name, lambda make=make: _of_object(make()), refused=said)
    yield _row("own optimizer", lambda: _of_object(Signed(0.01)), lambda: Signed(0.01))
    for name in ("adagrad", "adam", "adamax", "lamb", "nadam"):
        kind = {key.lower(): kind for key, kind in vars(K).items()}[name]
        yield by_name(name, lambda kind=kind: kind(0.05), learning_rate=0.05)
    yield by_name("sgd", lambda: K.SGD(0.1, momentum=0.9), momentum=0.9)
    yield by_name(
        "adamw",
        _without_biases(lambda: K.AdamW(0.05, weight_decay=0.2, beta_2=0.9)),
        learning_rate=0.05,
        optimizer_arguments={"weight_decay": 0.2, "beta_2": 0.9},
    )
    for name in ("clipnorm", "clipvalue", "global_clipnorm"):
        yield _row(
            f"{name} of an object",
            lambda name=name: _of_object(K.SGD(0.1, **{name: 0.05})),
            lambda name=name: K.SGD(0.1, **{name: 0.05}),
            refused="--clip_norm" if name == "global_clipnorm" else None,
        )
    yield _row(
        "clip_norm",
        lambda: {"clip_norm": 0.2},
        lambda: K.SGD(RATE, global_clipnorm=0.2),
    )
    yield _row("averages", lambda: {"moving_average_decay": 0.15})
    yield _row(
        "averages of an object",
        lambda: _of_object(K.SGD(0.1, use_ema=True)),
        refused="moving_average_decay",
    )
    yield _row(
        "accumulation of an object",
        lambda: _of_object(K.SGD(0.1, gradient_accumulation_steps=2)),
        refused="--accumulate",
    )
    yield _row("accumulate", lambda: {"accumulate": 2, "batch_size": 2})
    yield _row(
        "weight decay beside normalization",
        lambda: _of_object(K.AdamW(0.05, weight_decay=0.5)),
        lambda: _excluding(K.AdamW(0.05, weight_decay=0.5), ["bias", "gamma", "beta"]),
        build=_decayed,
    )
    yield _row(
        "exclude_from_weight_decay",
        lambda: _of_object(
            _excluding(K.AdamW(0.05, weight_decay=0.5), ["dense", "bias"])
        ),
        lambda: _excluding(K.AdamW(0.05, weight_decay=0.5), ["dense", "bias"]),
    )


def _excluding(optimizer, names):
    optimizer.exclude_from_weight_decay(var_names=names)
    return optimizer


def _of_object(optimizer):
    return {"optimizer": optimizer, "learning_rate": None, "momentum": None}


# ---- schedules

S = keras.optimizers.schedules
SCHEDULES = {
    "CosineDecay": lambda: S.CosineDecay(0.1, 2, alpha=0.1, warmup_steps=1),
    "CosineDecayRestarts": lambda: S.CosineDecayRestarts(0.2, 2),
    "ExponentialDecay": lambda: S.ExponentialDecay(0.2, 2, 0.5, staircase=True),
    "InverseTimeDecay": lambda: S.InverseTimeDecay(0.2, 1, 0.5),
    "PiecewiseConstantDecay": lambda: S.PiecewiseConstantDecay([0, 1], [0.2, 0.1, 0.3]),
    "PolynomialDecay": lambda: S.PolynomialDecay(0.2, 4, power=2.0),
}
NO_SCHEDULES = {"LearningRateSchedule": "the base class; a row has a subclass"}


class Alternating(S.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 / (1.0 + ops.cast(step, "float32"))

    def get_config(self):
        return {}


def schedule_rows():
    for name, make in {**SCHEDULES, "own schedule": Alternating}.items():
        plainly = lambda make=make: K.SGD(make(), momentum=0.5)  # noqa: E731
        yield _row(
            name, lambda make=make: {"learning_rate": make(), "momentum": 0.5}, plainly
        )
        yield _row(
            f"{name} in an optimizer",
            lambda plainly=plainly: _of_object(plainly()),
            plainly,
        )


# ---- losses

_C = keras.losses
_SPARSE = {"from_logits": True, "dtype": "float64"}
LOSSES = {
    "BinaryCrossentropy": [{**_SPARSE}, {**_SPARSE, "label_smoothing": 0.1}],
    "BinaryFocalCrossentropy": [
        {**_SPARSE, "apply_class_balancing": True, "alpha": 0.3, "gamma": 1.5}
    ],
    "CategoricalCrossentropy": [{**_SPARSE}, {**_SPARSE, "label_smoothing": 0.2}],
    "CategoricalFocalCrossentropy": [{**_SPARSE, "alpha": 0.3, "gamma": 1.5}],
    "SparseCategoricalFocalCrossentropy": [{**_SPARSE, "alpha": 0.3, "gamma": 1.5}],
    "CategoricalHinge": [{"dtype": "float64"}],
    "CosineSimilarity": [{"dtype": "float64"}],
    "Hinge": [{"dtype": "float64"}],
    "Huber": [{"dtype": "float64", "delta": 0.5}],
    "LogCosh": [{"dtype": "float64"}],
    "MeanAbsoluteError": [{"dtype": "float64"}],
    "MeanAbsolutePercentageError": [{"dtype": "float64"}],
    "MeanSquaredError": [{"dtype": "float64"}],
    "MeanSquaredLogarithmicError": [{"dtype": "float64"}],
    "SparseCategoricalCrossentropy": [{**_SPARSE}, {**_SPARSE, "reduction": None}],
    "SquaredHinge": [{"dtype": "float64"}],
}
LOSSES_REFUSED = {
    "Circle": "one value per image",
    "CTC": "probabilities",
    "CategoricalGeneralizedCrossEntropy": "probabilities",
    "Dice": "probabilities",
    "KLDivergence": "probabilities",
    "Poisson": "probabilities",
    "Tversky": "probabilities",
}
LOSSES = {name: given for name, given in LOSSES.items() if exists(name, _C)}
NO_LOSSES = {"Loss": "the base class"}
LOSSES_FROM_PROBABILITIES = (
    *("BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy"),
    *("CategoricalFocalCrossentropy", "SparseCategoricalCrossentropy"),
    "SparseCategoricalFocalCrossentropy",
)


def plain_loss(loss):
    """Returns what `compile(loss=loss)` computes, from the labels that it wants."""
    is_sparse = type(loss).__name__.startswith("Sparse")

    def compute(labels, logits):
        labels = labels if is_sparse else tf.one_hot(labels, plain.CLASSES)
        return tf.reduce_mean(loss(labels, logits))

    return compute


def focal(labels, logits):
    entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return entropies * tf.square(1.0 - tf.exp(-entropies))


def loss_rows():
    for name, choices in LOSSES.items():
        for number, arguments in enumerate(choices):
            make = functools.partial(getattr(_C, name), **arguments)
            yield _row(
                f"{name} {number}" if number else name,
                lambda make=make: {"loss": make()},
                loss=plain_loss(make()),
            )
    for name, said in LOSSES_REFUSED.items():
        make = functools.partial(getattr(_C, name), dtype="float64")
        yield _row(name, lambda make=make: {"loss": make()}, refused=said)
    for name in LOSSES_FROM_PROBABILITIES:
        if not exists(name, _C):
            continue
        make = getattr(_C, name)
        yield _row(
            f"{name} of probabilities",
            lambda make=make: {"loss": make()},
            refused="from_logits=True",
        )
    yield _row(
        "a sum over the batch",
        lambda: {"loss": _C.CategoricalCrossentropy(from_logits=True, reduction="sum")},
        refused="one value per image",
    )
    yield _row("own loss", lambda: {"loss": focal}, loss=_mean_of(focal))
    yield _row(
        "own loss, a mean",
        lambda: {"loss": _mean_of(focal)},
        loss=_mean_of(focal),
    )
    yield _row(
        "label smoothing",
        lambda: {"label_smoothing": 0.2},
        loss=plain_loss(
            _C.CategoricalCrossentropy(
                from_logits=True, label_smoothing=0.2, dtype="float64"
            )
        ),
    )
    yield _row(
        "class weights",
        lambda: {"class_weights": [1.0, 2.0, 0.5, 0.0]},
        loss=_mean_of(_weighted),
    )


def _mean_of(loss):
    return lambda labels, logits: tf.reduce_mean(loss(labels, logits))


def _weighted(labels, logits):
    entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return entropies * tf.gather(tf.constant([1.0, 2.0, 0.5, 0.0], tf.float64), labels)


# ---- metrics

_M = keras.metrics
METRICS = {
    "sparse_categorical_accuracy": _M.sparse_categorical_accuracy,
    "sparse_top_k_categorical_accuracy": functools.partial(
        _M.sparse_top_k_categorical_accuracy, k=2
    ),
    "sparse_categorical_crossentropy": functools.partial(
        _M.sparse_categorical_crossentropy, from_logits=True
    ),
}
# They take labels of other shapes than whole numbers, or compare images.
METRICS_REFUSED = {
    name: functools.partial(one, from_logits=True) if "entropy" in name else one
    for name, one in vars(_M).items()
    if not isinstance(one, type) and not name.startswith(("_", "sparse"))
    if callable(one) and name not in ("deserialize", "get", "serialize")
}


def metric_rows():
    for name, metric in METRICS.items():
        yield _row(
            f"metric {name}",
            lambda metric=metric: {"metrics": {"it": metric}},
            metrics={"it": metric},
            **(IN_FLOAT32 if "top_k" in name else {}),
        )
    for name, metric in METRICS_REFUSED.items():
        said = "probabilities|whole numbers|it failed on labels"
        yield _row(
            f"metric {name}",
            lambda metric=metric: {"metrics": {"it": metric}},
            refused=said,
        )
    for name, kind in vars(_M).items():
        if isinstance(kind, type) and name not in NO_METRICS:
            yield _row(
                f"metric {name}",
                lambda kind=kind: {"metrics": {"it": _made(kind)}},
                refused="functions that keep no state",
            )


NO_METRICS = {"Metric": "the base class", "MeanMetricWrapper": "takes a function"}
_ARGUMENTS = {
    "IoU": {"num_classes": 4, "target_class_ids": [0]},
    "BinaryIoU": {},
    "MeanIoU": {"num_classes": 4},
    "OneHotIoU": {"num_classes": 4, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 4},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}


def _made(kind):
    return kind(**_ARGUMENTS.get(kind.__name__, {}))


# ---- what layers are made of

_I = keras.initializers
INITIALIZERS = {
    "Constant": lambda: _I.Constant(0.1),
    "GlorotNormal": _I.GlorotNormal,
    "GlorotUniform": lambda: _I.GlorotUniform(seed=1),
    "HeNormal": _I.HeNormal,
    "HeUniform": _I.HeUniform,
    "Identity": lambda: _I.Identity(0.5),
    "LecunNormal": _I.LecunNormal,
    "LecunUniform": _I.LecunUniform,
    "Ones": _I.Ones,
    "Orthogonal": _I.Orthogonal,
    "RandomNormal": _I.RandomNormal,
    "RandomUniform": _I.RandomUniform,
    "TruncatedNormal": _I.TruncatedNormal,
    "VarianceScaling": lambda: _I.VarianceScaling(2.0, "fan_out"),
    "Zeros": _I.Zeros,
}
NO_INITIALIZERS = {"Initializer": "the base class", "STFT": "of STFTSpectrogram alone"}
_T = keras.constraints
CONSTRAINTS = {
    "MaxNorm": lambda: _T.MaxNorm(0.5),
    "MinMaxNorm": lambda: _T.MinMaxNorm(0.2, 0.4, 0.5),
    "NonNeg": _T.NonNeg,
    "UnitNorm": _T.UnitNorm,
}
NO_CONSTRAINTS = {"Constraint": "the base class"}
_R = keras.regularizers
REGULARIZERS = {
    "L1": lambda: _R.L1(0.02),
    "L1L2": lambda: _R.L1L2(0.02, 0.03),
    "L2": lambda: _R.L2(0.02),
    "OrthogonalRegularizer": lambda: _R.OrthogonalRegularizer(0.02),
}
NO_REGULARIZERS = {"Regularizer": "the base class"}


def _with(argument, make):
    def build(image_shape, classes):
        image = keras.Input(image_shape)
        net = L.Flatten()(L.AveragePooling2D(4)(image))
        net = L.Dense(6, activation="tanh", **{argument: make()})(net)
        return keras.Model(image, L.Dense(classes, **{argument: make()})(net))

    return build


def part_rows():
    for argument, table in (
        ("kernel_initializer", INITIALIZERS),
        ("kernel_constraint", CONSTRAINTS),
        ("kernel_regularizer", REGULARIZERS),
    ):
        for name, make in table.items():
            orthogonal = IN_FLOAT32 if name == "OrthogonalRegularizer" else {}
            yield _row(f"{argument} {name}", build=_with(argument, make), **orthogonal)


QUICK = ("AdamW", "accumulate", "Dice")
DIFFERS = {}


def rows():
    found = []
    for of_kind in (optimizer_rows, schedule_rows, loss_rows, metric_rows, part_rows):
        found += of_kind()
    return [
        dataclasses.replace(row, quick=row.name in QUICK, differs=DIFFERS.get(row.name))
        for row in found
    ]


# Tables that have each public name of a module.
COMPLETE = (
    (K, OPTIMIZERS, OPTIMIZERS_REFUSED, NO_OPTIMIZERS),
    (S, SCHEDULES, NO_SCHEDULES),
    (_C, LOSSES, LOSSES_REFUSED, NO_LOSSES),
    (_I, INITIALIZERS, NO_INITIALIZERS),
    (_T, CONSTRAINTS, NO_CONSTRAINTS),
    (_R, REGULARIZERS, NO_REGULARIZERS),
)
