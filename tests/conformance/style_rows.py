"""The table of styles: how a program can write, share, freeze and nest a model."""
# ruff: noqa: ARG001, ARG002 (calls have the arguments that Keras gives)
# ruff: noqa: PLW0108 (a layer is made when a model is, not when the table is read)

import keras
import numpy as np
import tensorflow as tf
from keras import (
    layers as L,  # noqa: N812
    ops,
)

from conformance.rows import Row


def _head(image, net, classes):
    return keras.Model(image, L.Dense(classes)(L.Flatten()(net)))


def around(middle):
    """Returns a functional model with something between its first and last layer."""

    def build(image_shape, classes):
        image = keras.Input(image_shape)
        return _head(image, middle(L.Dense(3)(image)), classes)

    return build


def layer(call, make=lambda self: None, **options):
    """Returns the model around a layer of one's own; `make` creates what it holds."""

    class Own(keras.Layer):
        def __init__(self):
            super().__init__(**options)
            make(self)

        def call(self, inputs, training=None):
            return call(self, inputs, training)

        def compute_output_shape(self, shape):
            return shape

    return around(lambda net: Own()(net))


def subclass(make, call, base=keras.Model):
    """Returns a subclassed model; `make` creates its layers."""

    class Own(base):
        def __init__(self, classes):
            super().__init__()
            self.flat = L.Flatten()
            make(self)
            self.last = L.Dense(classes)

        def build(self, shape):
            self.built = True

        def call(self, images, training=None):
            return self.last(self.flat(call(self, images, training)))

    def build(image_shape, classes):
        with_variables = Own(classes)
        with_variables(np.zeros((2, *image_shape), np.float32))
        return with_variables

    return build


def sequential(image_shape, classes):
    layers = [L.Conv2D(2, 3), L.BatchNormalization(), L.Flatten(), L.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


def not_built(image_shape, classes):
    del image_shape
    return keras.Sequential([L.Conv2D(2, 3), L.Flatten(), L.Dense(classes)])


def nested(image_shape, classes):
    inner = sequential(image_shape, 6)
    image = keras.Input(image_shape)
    outer = keras.Model(image, L.Dense(5)(inner(image)))
    return keras.Sequential([outer, L.Dropout(0.2, seed=1), L.Dense(classes)])


def functional_subclass(image_shape, classes):
    class Own(keras.Model):
        pass

    image = keras.Input(image_shape)
    return Own(image, L.Dense(classes)(L.Flatten()(image)))


def siamese(net):
    tower = keras.Sequential([L.Dense(4), L.BatchNormalization(momentum=0.5)])
    return L.Concatenate()([tower(net), tower(net * 2.0)])


def frozen(make):
    def middle(net):
        one = make()
        one.trainable = False
        return one(net)

    return around(middle)


def _inner():
    return keras.Sequential([L.Dense(3), L.BatchNormalization(momentum=0.5)])


def frozen_later(image_shape, classes):
    model = sequential(image_shape, classes)
    model.layers[0].trainable = False
    return model


def with_lora(image_shape, classes):
    model = around(lambda net: L.Dense(3, name="adapted")(net))(image_shape, classes)
    model.get_layer("adapted").enable_lora(2)
    return model


def quantized(image_shape, classes):
    model = around(lambda net: L.Dense(3, name="adapted")(net))(image_shape, classes)
    model.get_layer("adapted").quantize("int8")
    return model


def of_policy_map(net):
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float64")
    policies["adapted"] = keras.DTypePolicy("float32")
    return L.Dense(3, name="other", dtype=policies)(
        L.Dense(3, name="adapted", dtype=policies)(net)
    )


def _float(name):
    def make(self):
        self.state = self.add_weight(
            shape=(3,), initializer="zeros", trainable=False, name=name
        )

    return make


def _counter(self):
    self.count = self.add_weight(
        shape=(), initializer="zeros", dtype="int32", trainable=False, name="count"
    )


def counted(self, inputs, training):
    self.count.assign_add(1)
    return inputs * ops.cast(self.count, inputs.dtype)


def averaged(self, inputs, training):
    if training:
        self.state.assign(0.5 * self.state + 0.5 * ops.mean(inputs, (0, 1, 2)))
    return inputs - self.state


def summed_over_calls(self, inputs, training):
    self.state.assign_add(ops.ones((3,), self.state.dtype))
    return inputs + self.state


def _kernel(self):
    self.kernel = self.add_weight(shape=(3, 3), name="kernel")


def renormalized(self, inputs, training):
    if training:
        self.kernel.assign(self.kernel / ops.norm(self.kernel))
    return ops.matmul(inputs, self.kernel)


def _teacher(self):
    self.student, self.teacher = L.Dense(3), L.Dense(3, trainable=False)
    self.student.build((None, 8, 8, 3))
    self.teacher.build((None, 8, 8, 3))


def of_teacher(self, inputs, training):
    if training:
        for slow, fast in zip(
            self.teacher.variables, self.student.variables, strict=True
        ):
            slow.assign(0.9 * slow + 0.1 * fast)
    taught = self.student(inputs)
    self.add_loss(ops.mean((taught - self.teacher(inputs)) ** 2))
    return taught


def _generator(self):
    self.generator = keras.random.SeedGenerator(7)


def noisy(self, inputs, training):
    if not training:
        return inputs
    return inputs + keras.random.normal((3,), dtype=inputs.dtype, seed=self.generator)


def unseeded_noise(self, inputs, training):
    return (
        inputs + keras.random.normal((3,), dtype=inputs.dtype) if training else inputs
    )


def tensorflow_noise(self, inputs, training):
    return inputs + tf.random.normal((3,), dtype=inputs.dtype) if training else inputs


def _tf_variable(self):
    self.own = tf.Variable(0.0, trainable=False, dtype=tf.float64)


def counted_in_tensorflow(self, inputs, training):
    self.own.assign_add(1.0)
    return inputs + self.own


def _metric(self):
    self.seen = keras.metrics.Mean()


def measured(self, inputs, training):
    self.seen.update_state(ops.mean(inputs))
    return inputs


def _unused(self):
    self.add_weight(shape=(2,), name="unused")


def _penalty(value):
    def call(self, inputs, training):
        self.add_loss(value(self, inputs))
        return inputs

    return call


def compiled(self, inputs, training):
    return tf.function(self.dense)(inputs)


def rematerialized(self, inputs, training):
    return keras.remat(self.dense)(inputs)


def checkpointed(net):
    return keras.layers.Lambda(lambda values: keras.remat(ops.tanh)(values))(net)


def two_calls(net):
    dropout = L.Dropout(0.4, seed=3)
    return dropout(net) + dropout(net)


def shared_generator(net):
    generator = keras.random.SeedGenerator(3)

    class Noisy(keras.Layer):
        def __init__(self):
            super().__init__()
            self.generator = generator

        def call(self, inputs, training=None):
            return noisy(self, inputs, training)

    return Noisy()(Noisy()(net))


def stateful(net):
    return L.GRU(3, stateful=True)(L.Reshape((16, 12))(net))


def in_list(self):
    self.blocks = [L.Dense(3), [L.BatchNormalization(momentum=0.5), L.Dense(3)]]


def through_list(self, images, training):
    first, (second, third) = self.blocks
    return third(second(first(images), training=training))


def in_dict(self):
    self.blocks = {"b": L.Dense(3), "a": (L.Dense(2), L.Dense(1))}


def through_dict(self, images, training):
    first, second = self.blocks["a"]
    return second(first(self.blocks["b"](images)))


def ensemble(image_shape, classes):
    image = keras.Input(image_shape)
    nets = [L.Dense(classes)(L.Flatten()(image)) for _ in range(3)]
    return keras.Model(image, L.Average()(nets))


def of_softmaxes(image_shape, classes):
    image = keras.Input(image_shape)
    nets = [
        L.Dense(classes, activation="softmax")(L.Flatten()(image)) for _ in range(2)
    ]
    return keras.Model(image, L.Average()(nets))


def ending(activation):
    def build(image_shape, classes):
        image = keras.Input(image_shape)
        net = L.Dense(classes, activation=activation)(L.Flatten()(image))
        return keras.Model(image, net)

    return build


def of_outputs(wrap):
    def build(image_shape, classes):
        image = keras.Input(image_shape)
        return keras.Model(image, wrap(L.Dense(classes)(L.Flatten()(image))))

    return build


def overriding(**methods):
    def build(image_shape, classes):
        image = keras.Input(image_shape)
        own = type("Own", (keras.Model,), methods)
        return own(image, L.Dense(classes)(L.Flatten()(image)))

    return build


def all_frozen(image_shape, classes):
    model = sequential(image_shape, classes)
    model.trainable = False
    return model


def _head_dtype(image_shape, classes):
    image = keras.Input(image_shape)
    net = L.Dense(3)(L.Flatten()(image))
    return keras.Model(image, L.Dense(classes, dtype="float32")(net))


def _dense(self):
    self.dense = L.Dense(3)


_REGULAR = {"kernel_regularizer": "l2", "bias_regularizer": "l1"}
EQUAL = {
    "sequential": sequential,
    "sequential, not built": not_built,
    "functional": around(lambda net: L.ReLU()(net)),
    "functional subclass": functional_subclass,
    "nested": nested,
    "shared, with batch norm": around(siamese),
    "layer called twice": around(two_calls),
    "random generator shared": around(shared_generator),
    "subclass": subclass(_dense, lambda self, x, training: self.dense(x)),
    "layers in lists": subclass(in_list, through_list),
    "layers in dicts": subclass(in_dict, through_dict),
    "branches": ensemble,
    "ops between layers": around(lambda net: ops.tanh(net) * 2.0),
    "own layer": layer(lambda self, x, training: self.dense(x), _dense),
    "variable without gradient": layer(lambda self, x, training: x, _unused),
    "own batch statistics": layer(averaged, _float("mean")),
    "state that adds up": layer(summed_over_calls, _float("sum")),
    "counter of calls": layer(counted, _counter),
    "assigned kernel": layer(renormalized, _kernel),
    "moving teacher": layer(of_teacher, _teacher),
    "own random generator": layer(noisy, _generator),
    "unseeded noise": layer(unseeded_noise),
    "metric in a layer": layer(measured, _metric),
    "add_loss, mean": layer(_penalty(lambda self, x: ops.mean(x**2))),
    "add_loss, of a variable": layer(
        _penalty(lambda self, x: 0.1 * ops.sum(self.kernel**2)), _kernel
    ),
    "activity regularizer": around(
        lambda net: L.Dense(3, activity_regularizer="l2")(net)
    ),
    "regularizers": around(lambda net: L.Dense(3, **_REGULAR)(net)),
    "constraint": around(lambda net: L.Dense(3, kernel_constraint="unit_norm")(net)),
    "frozen layer": frozen(lambda: L.Dense(3)),
    "frozen batch norm": frozen(lambda: L.BatchNormalization(momentum=0.5)),
    "frozen nested model": frozen(_inner),
    "frozen after it was built": frozen_later,
    "frozen, regularized": frozen(lambda: L.Dense(3, **_REGULAR)),
    "lora": with_lora,
    "quantized": quantized,
    "float32 head": _head_dtype,
    "policy map": around(of_policy_map),
    "mixed bfloat16 layer": around(lambda net: L.Dense(3, dtype="mixed_bfloat16")(net)),
    "mixed float16 layer": around(lambda net: L.Dense(3, dtype="mixed_float16")(net)),
    "condition": around(
        lambda net: L.Lambda(
            lambda x: ops.cond(ops.mean(x) > 0, lambda: x, lambda: 2.0 * x)
        )(net)
    ),
    "rematerialization of operations": around(checkpointed),
    "stop_gradient": around(lambda net: net + ops.stop_gradient(net)),
    "synchronized batch norm": around(
        lambda net: L.BatchNormalization(momentum=0.5, synchronized=True)(net)
    ),
    "add_loss, value per image": layer(
        _penalty(lambda self, x: ops.mean(x**2, (1, 2, 3)))
    ),
    "add_loss, sum": layer(_penalty(lambda self, x: 0.01 * ops.sum(x**2))),
}
REFUSED = {
    "softmax at the end": (ending("softmax"), "logits"),
    "sigmoid at the end": (ending("sigmoid"), "logits"),
    "softmaxes averaged": (of_softmaxes, "logits"),
    "a dict of logits": (of_outputs(lambda net: {"logits": net}), "logits"),
    "two outputs": (of_outputs(lambda net: [net, net]), "logits"),
    "one class too many": (
        lambda shape, classes: sequential(shape, classes + 1),
        "logits",
    ),
    "no model": (lambda shape, classes: L.Dense(classes), "keras.Model"),
    "nothing to train": (all_frozen, "no trainable variables"),
    "train_step": (overriding(train_step=lambda self, data: {}), "train_step"),
    "compute_loss": (overriding(compute_loss=lambda self, **_: 0.0), "compute_loss"),
    "compute_metrics": (
        overriding(compute_metrics=lambda self, *_: {}),
        "compute_metrics",
    ),
    "make_train_function": (
        overriding(make_train_function=lambda self, **_: None),
        "make_train_function",
    ),
    "variable of TensorFlow": (
        layer(counted_in_tensorflow, _tf_variable),
        "tf.Variable",
    ),
    "noise of TensorFlow, deterministic": (layer(tensorflow_noise), "--deterministic"),
    "RNN that keeps its state": (around(stateful), "batch size must be static"),
    "layer within tf.function": (layer(compiled, _dense), "tf.function|reads"),
    "rematerialization of a layer": (layer(rematerialized, _dense), "remat|reads"),
    "failing function": (lambda shape, classes: 1 / 0, "ZeroDivisionError"),
}
# What a layer makes of an image depends on the others of its batch, or on chance.
BY_TOWER = (
    *("sequential", "nested", "shared, with batch norm", "layer called twice"),
    *("random generator shared", "layers in lists", "own batch statistics"),
    *("own random generator", "unseeded noise", "frozen after it was built"),
    *("condition", "metric in a layer"),
)
TOLERANCES = {
    **dict.fromkeys(("float32 head", "policy map", "quantized", "lora"), 1e-4),
    **dict.fromkeys(("mixed bfloat16 layer", "mixed float16 layer"), 2e-2),
}
QUICK = (
    *("layers in lists", "assigned kernel", "frozen batch norm", "train_step"),
    *("softmaxes averaged",),
)
REFUSED_FOR_TWO = {
    "synchronized batch norm": "synchronized",
    "add_loss, value per image": "add_loss",
    "add_loss, sum": "add_loss",
}
DIFFERS = {}


def rows():
    refused = {name: pattern for name, (_, pattern) in REFUSED.items()}
    builds = EQUAL | {name: build for name, (build, _) in REFUSED.items()}
    return [
        Row(
            name=name,
            build=build,
            refused=refused.get(name),
            by_tower=name in BY_TOWER,
            tolerance=TOLERANCES.get(name, 1e-9),
            quick=name in QUICK,
            refused_for_two=REFUSED_FOR_TWO.get(name),
            unseeded="unseeded" in name,
            differs=DIFFERS.get(name),
            given=lambda name=name: {"deterministic": "deterministic" in name},
        )
        for name, build in builds.items()
    ]
