"""Local response normalization: TensorFlow's function, in both directions."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.layers import LocalResponseNormalization

TUTORIAL = {"depth_radius": 4, "bias": 1.0, "alpha": 0.001 / 9.0, "beta": 0.75}

# (constants, channels); the tutorial's hardly differ from the identity on small inputs,
# so others weigh the energy more.
CASES = {
    "tutorial": (TUTORIAL, 64),
    "strong": ({"depth_radius": 4, "bias": 1.0, "alpha": 0.5, "beta": 0.75}, 16),
    "square root": ({"depth_radius": 2, "bias": 2.0, "alpha": 0.3, "beta": 0.5}, 12),
    "other power": ({"depth_radius": 1, "bias": 0.5, "alpha": 1.0, "beta": 1.3}, 8),
    "few channels": ({"depth_radius": 3, "bias": 1.0, "alpha": 1.0, "beta": 0.75}, 3),
    "own channel": ({"depth_radius": 0, "bias": 1.0, "alpha": 1.0, "beta": 0.75}, 4),
}
each_case = pytest.mark.parametrize(
    ("constants", "channels"), CASES.values(), ids=CASES.keys()
)


def activations(channels, dtype=np.float32, side=3):
    """Values up to about 30, as after a convolution, some of them 0."""
    random = np.random.default_rng(channels)
    values = random.normal(scale=10.0, size=(2, side, side, channels))
    return tf.constant(np.maximum(values, -5.0) * (values > -8.0), dtype)


def relative_difference(actual, expected):
    return np.max(np.abs(actual - expected)) / np.max(np.abs(expected))


@each_case
def test_forward_is_tensorflows_function(constants, channels):
    inputs = activations(channels)
    actual = LocalResponseNormalization(**constants)(inputs)
    expected = tf.nn.local_response_normalization(inputs, **constants)
    assert actual.dtype == tf.float32
    assert relative_difference(actual.numpy(), expected.numpy()) < 1e-5


@each_case
def test_backward_is_tensorflows_function(constants, channels):
    inputs = activations(channels)
    upstream = tf.constant(
        np.random.default_rng(1).normal(size=inputs.shape), tf.float32
    )

    def gradient(function):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = function(inputs)
        return tape.gradient(outputs, inputs, output_gradients=upstream).numpy()

    actual = gradient(LocalResponseNormalization(**constants))
    expected = gradient(
        lambda x: tf.nn.local_response_normalization(x, **constants),
    )
    assert relative_difference(actual, expected) < 1e-5


@each_case
def test_float64_gradient_is_the_slope_of_the_function(constants, channels):
    layer = LocalResponseNormalization(**constants, dtype="float64")
    inputs = activations(min(channels, 12), np.float64, side=1)
    assert layer(inputs).dtype == tf.float64
    analytic, numeric = tf.test.compute_gradient(layer, [inputs], delta=1e-4)
    assert analytic[0].shape == (inputs.numpy().size,) * 2
    np.testing.assert_allclose(analytic[0], numeric[0], rtol=1e-6, atol=1e-8)


def test_works_in_a_function_of_unknown_batch_size():
    layer = LocalResponseNormalization(**TUTORIAL)

    @tf.function(input_signature=[tf.TensorSpec([None, 3, 3, 64])])
    def traced(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs)
        return outputs, tape.gradient(outputs, inputs)

    inputs = activations(64)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        expected = tf.nn.local_response_normalization(inputs, **TUTORIAL)
    outputs, gradient = traced(inputs)
    assert outputs.shape == inputs.shape
    np.testing.assert_allclose(outputs, expected, rtol=1e-5)
    np.testing.assert_allclose(
        gradient, tape.gradient(expected, inputs), rtol=1e-4, atol=1e-6
    )


def test_the_radius_may_exceed_the_channels():
    constants = {"depth_radius": 5, "bias": 1.0, "alpha": 1.0, "beta": 0.75}
    inputs = activations(3)
    np.testing.assert_allclose(
        LocalResponseNormalization(**constants)(inputs),
        tf.nn.local_response_normalization(inputs, **constants),
        rtol=1e-5,
    )


def test_config_restores_the_layer():
    constants = {"depth_radius": 3, "bias": 2.0, "alpha": 0.25, "beta": 0.6}
    layer = LocalResponseNormalization(**constants, name="norm7", dtype="float64")
    restored = LocalResponseNormalization.from_config(layer.get_config())
    assert restored.get_config() == layer.get_config()
    assert {name: getattr(restored, name) for name in constants} == constants
    assert (restored.name, restored.compute_dtype) == ("norm7", "float64")


def test_output_shape_is_the_inputs():
    shape = (None, 5, 6, 7)
    assert LocalResponseNormalization().compute_output_shape(shape) == shape
