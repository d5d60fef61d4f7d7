"""The package's layers: what TensorFlow's functions compute, in both directions."""

import contextvars
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10 import hardware
from cifar10.layers import (
    FusedBatchNormalization,
    LocalResponseNormalization,
    QuickGelu,
    WideConv2D,
    fuses_activations,
    is_max_pooling,
    pooling_for_xla,
)

# (constants, channels); the tutorial's hardly differ from the identity on small inputs,
# so others weigh the energy more.
TUTORIAL = {"depth_radius": 4, "bias": 1.0, "alpha": 0.001 / 9.0, "beta": 0.75}


def activations(channels):
    """Values up to about 30, as after a convolution, some of them 0."""
    random = np.random.default_rng(channels)
    values = random.normal(scale=10.0, size=(2, 3, 3, channels))
    return tf.constant(np.maximum(values, -5.0) * (values > -8.0), tf.float32)


def differentiated(function, *values, upstream=None):
    """Returns what a function computes, and the gradients of its arguments."""
    with tf.GradientTape() as tape:
        tape.watch(values)
        computed = function(*values)
    return [computed, *tape.gradient(computed, values, upstream)]


def assert_close(actual, expected, difference):
    """Compares results within a part of the largest number of each."""
    for result, truth in zip(actual, expected, strict=True):
        assert result.shape == truth.shape
        largest = np.abs(truth.numpy()).max()
        limit = difference * largest
        np.testing.assert_allclose(tf.cast(result, truth.dtype), truth, 0, limit)


@pytest.mark.parametrize(
    ("constants", "channels"),
    [
        (TUTORIAL, 64),
        ({"depth_radius": 1, "bias": 0.5, "alpha": 1.0, "beta": 1.3}, 8),
        ({"depth_radius": 5, "bias": 1.0, "alpha": 1.0, "beta": 0.75}, 3),
    ],
)
def test_response_normalization_equals_tensorflows_function(constants, channels):
    inputs = activations(channels)
    upstream = tf.constant(
        np.random.default_rng(1).normal(size=inputs.shape), tf.float32
    )

    def of_tensorflow(inputs):
        return tf.nn.local_response_normalization(inputs, **constants)

    layer = LocalResponseNormalization(**constants)
    found = differentiated(layer, inputs, upstream=upstream)
    assert found[0].dtype == tf.float32
    expected = differentiated(of_tensorflow, inputs, upstream=upstream)
    assert_close(found, expected, 1e-5)


def test_response_normalization_in_float64_rounds_as_float64():
    inputs = np.random.default_rng(0).normal(scale=10.0, size=(2, 3, 3, 8))
    energy = np.full_like(inputs, 2.0)
    for channel in range(8):
        near = inputs[..., max(0, channel - 2) : channel + 3]
        energy[..., channel] += 0.3 * np.square(near).sum(axis=-1)
    layer = LocalResponseNormalization(2, 2.0, 0.3, 0.5, dtype="float64")
    np.testing.assert_allclose(layer(inputs), inputs / np.sqrt(energy), 1e-13)


# ---- QuickGelu and FusedBatchNormalization


@pytest.mark.parametrize(
    ("dtype", "training"), [("bfloat16", True), ("float32", False)]
)
def test_quick_gelu_and_its_gradient_are_computed_correctly(dtype, training):
    check_quick_gelu(dtype, training, 0.01 if dtype == "bfloat16" else 1e-6)


def check_quick_gelu(dtype, training, difference):
    x = tf.cast(tf.linspace(-6.0, 6.0, 101), dtype)
    layer = QuickGelu(dtype=dtype)
    found = differentiated(lambda x: layer(x, training=training), x)
    assert found[0].dtype == dtype
    wide = tf.cast(x, tf.float64)
    expected = differentiated(lambda x: x * tf.sigmoid(1.702 * x), wide)
    assert_close(found, expected, difference)


def test_quick_gelu_on_a_gpu_computes_in_the_type_of_its_inputs(monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: ["a GPU"])
    check_quick_gelu("bfloat16", training=True, difference=0.02)
    check_quick_gelu("float32", training=True, difference=1e-6)
    large = differentiated(
        lambda x: QuickGelu(dtype=x.dtype)(x, training=True),
        tf.constant([49152.0], tf.float16),
    )
    assert [float(one[0]) for one in large] == [49152.0, 1.0], "1.702 x overflows"

    @tf.function(input_signature=[tf.TensorSpec([4], tf.bfloat16)])
    def gradient(x):
        return tf.gradients(QuickGelu(dtype=x.dtype)(x, training=True), x)

    graph = gradient.get_concrete_function().graph
    conversions = [op for op in graph.get_operations() if op.type == "Cast"]
    assert not conversions


@pytest.mark.parametrize("training", [True, False, None])
def test_only_training_and_scoring_need_xla_for_quick_gelu(training):
    def compiled():
        @tf.function(input_signature=[tf.TensorSpec([4])])
        def called(x):
            return QuickGelu()(x, training=training)

        graph = called.get_concrete_function().graph.as_graph_def()
        return [f for f in graph.library.function if f.attr["_XlaMustCompile"].b]

    context = contextvars.copy_context()
    context.run(fuses_activations.set, True)
    assert len(context.run(compiled)) == 1
    assert len(compiled()) == bool(training)


@pytest.mark.parametrize("training", [True, False])
def test_fused_batch_normalization_equals_kerass(training):
    random = np.random.default_rng(0)
    inputs = tf.constant(random.normal(3.0, 2.0, (8, 5, 5, 4)), tf.float32)
    layers = [
        kind(momentum=0.6, epsilon=1e-12)
        for kind in (FusedBatchNormalization, keras.layers.BatchNormalization)
    ]
    started = np.array([1.0, 2.0, 3.0, 4.0])
    results = []
    for layer in layers:
        layer.build(inputs.shape)
        scales = np.array([[1.0, 1.5, 0.5, -1.0], [0.5, -1.0, 0.0, 2.0]])
        layer.set_weights([*scales, started, started])
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, training=training)
            loss = tf.reduce_sum(outputs**3)
        values = [inputs, layer.gamma.value, layer.beta.value]
        results.append([outputs, layer.moving_mean, *tape.gradient(loss, values)])
    for fused, kerass in zip(*results, strict=True):
        np.testing.assert_allclose(fused, kerass, rtol=1e-4, atol=1e-3)
    if training:  # By Bessel's correction: 200 values a channel.
        variance = np.var(inputs, axis=(0, 1, 2)) * 200 / 199
        expected = 0.6 * started + 0.4 * variance
        np.testing.assert_allclose(layers[0].moving_variance, expected, rtol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64"])
def test_fused_batch_normalization_normalizes_in_other_types_too(policy):
    layer = FusedBatchNormalization(dtype=policy)
    inputs = tf.random.stateless_normal([4, 3, 3, 2], [0, 0], 5.0, 2.0, "float64")
    outputs = layer(inputs, training=True)
    assert outputs.dtype == layer.compute_dtype
    assert layer.moving_mean.dtype == layer.variable_dtype
    moments = tf.nn.moments(tf.cast(outputs, tf.float64), [0, 1, 2])
    np.testing.assert_allclose(moments, [[0.0, 0.0], [1.0, 1.0]], atol=0.02)
    # Keras's way to freeze a layer.
    layer.trainable = False
    before = layer.moving_mean.numpy()
    layer(inputs, training=True)
    np.testing.assert_array_equal(layer.moving_mean, before)


@pytest.mark.parametrize(
    ("side", "channels", "dtype", "bound"),
    [
        (1, 8, "bfloat16", 0.02),
        (7, 8, "bfloat16", 0.02),
        (1, 256, "bfloat16", 0.02),
        (5, 256, "bfloat16", 0.02),
        (5, 256, "float32", 1e-5),
    ],
)
def test_a_wide_convolution_and_its_gradients_agree_with_float64(
    side, channels, dtype, bound, monkeypatch
):
    """To the rounding of sums, at the edges too; in float32 as on an AVX2 processor."""
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.setattr(hardware, "processor_features", lambda: ["avx2"])
    random = np.random.default_rng(side)
    # Images of unequal sides: a row that is taken for a column shows.
    shape = (5, side, side + 1, channels)
    images = tf.constant(random.normal(size=shape), dtype)
    upstream = tf.constant(random.normal(size=(*shape[:-1], 16)), dtype)
    layer = WideConv2D(16, dtype="float32" if dtype == "float32" else "mixed_bfloat16")
    layer.build(shape)
    filters = tf.cast(layer.kernel.value, dtype)

    def wide(images, filters):
        with keras.StatelessScope([(layer.kernel, tf.cast(filters, tf.float32))]):
            return layer(images)

    def exact(images, filters):
        return tf.nn.conv2d(images, filters, 1, "SAME")

    compute = tf.function(differentiated)
    actual = compute(wide, images, filters, upstream=upstream)
    values = [tf.cast(value, tf.float64) for value in (images, filters, upstream)]
    expected = compute(exact, *values[:2], upstream=values[2])
    assert_close(actual, expected, bound)


# ---- max pooling for XLA


def pooled_twice(layer, shape, dtype):
    """Returns what TensorFlow computes, and what is for XLA, from few values: ties."""
    random = np.random.default_rng(0)
    images = tf.cast(np.round(4.0 * random.normal(size=shape)) / 4.0, dtype)
    upstream = tf.cast(random.normal(size=layer(images).shape), dtype)

    def compute(pool, images, upstream):
        return differentiated(pool, images, upstream=upstream)

    own = functools.partial(compute, pooling_for_xla(layer))
    own = tf.function(own, jit_compile=True, autograph=False)
    tf.random.set_seed(0)  # To ask for a program, TensorFlow draws a number.
    compiler = own.experimental_get_compiler_ir(images, upstream)
    text = compiler(stage="hlo", platform_name="CPU")
    assert " select-and-scatter(" not in text
    return compute(layer, images, upstream), own(images, upstream)


@pytest.mark.parametrize(
    ("options", "shape", "dtype"),
    [
        ({}, (2, 31, 7, 3), "float32"),  # The last row is in no window.
        ({}, (2, 31, 7, 3), "bfloat16"),
        ({}, (2, 31, 7, 3), "float16"),
        ({"padding": "same"}, (2, 7, 6, 3), "float32"),
        ({"strides": 3}, (2, 9, 11, 3), "float32"),
        ({"strides": 3, "padding": "same"}, (2, 9, 11, 3), "bfloat16"),
        ({"pool_size": (3, 1), "strides": (3, 2)}, (2, 9, 11, 3), "float32"),
    ],
)
def test_disjoint_pools_have_tensorflows_gradient(options, shape, dtype):
    """Bit for bit: of equal pixels, the first gets it."""
    options = {"pool_size": 2, **options}
    layer = keras.layers.MaxPooling2D(**options, dtype=dtype)
    expected, found = pooled_twice(layer, shape, dtype)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("layer", "shape", "options"),
    [
        (keras.layers.MaxPooling2D, (2, 12, 25, 3), {}),
        (keras.layers.MaxPooling2D, (2, 12, 25, 3), {"dtype": "bfloat16"}),
        (keras.layers.MaxPooling2D, (2, 12, 25, 3), {"padding": "valid"}),
        (keras.layers.MaxPooling2D, (2, 5, 4, 3), {"strides": 1}),
        (keras.layers.MaxPooling2D, (2, 1, 2, 3), {}),
        (keras.layers.MaxPooling2D, (2, 3, 9, 6), {"data_format": "channels_first"}),
        (keras.layers.MaxPooling1D, (2, 13, 3), {}),
    ],
)
def test_overlapping_pools_add_up_to_tensorflows_gradient(layer, shape, options):
    options = {"strides": 2, "padding": "same", "dtype": "float64", **options}
    expected, found = pooled_twice(layer(3, **options), shape, options["dtype"])
    np.testing.assert_array_equal(found[0], expected[0])
    assert_close(found, expected, 1e-15 if found[0].dtype == tf.float64 else 0.02)


class Doubled(keras.layers.MaxPooling2D):
    """A layer that computes more than its parent."""

    def call(self, inputs):
        return 2.0 * super().call(inputs)


def test_only_max_pooling_has_another_gradient():
    others = Doubled(), keras.layers.AveragePooling2D(2), keras.layers.MaxPooling3D()
    assert not any(map(is_max_pooling, others))
    assert is_max_pooling(keras.layers.MaxPooling2D())
