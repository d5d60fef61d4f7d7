"""Optimizers that Keras lacks, computed by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.towers import optimizer_classes


def variable(values, name):
    return keras.Variable(np.asarray(values, np.float32), name=name)


@pytest.mark.parametrize("shape", [(36, 8), (8, 36)])
def test_orthogonalized_keeps_directions_and_evens_their_lengths(shape):
    random = np.random.default_rng(0)
    left, _, right = np.linalg.svd(random.normal(size=shape), full_matrices=False)
    lengths = np.linspace(1.0, 2.0, len(right))
    matrix = (left * lengths) @ right
    result = optimizer_classes.orthogonalized(tf.constant(matrix, tf.float32)).numpy()
    within = left.T @ result @ right.T
    assert np.abs(within - np.diag(np.diag(within))).max() < 1e-5
    assert np.diag(within).min() > 0.5
    assert np.diag(within).max() < 1.5


def test_a_filter_keeps_its_norm_and_steps_along_the_momentum():
    random = np.random.default_rng(1)
    kernel = variable(random.normal(size=(3, 3, 4, 8)), "kernel")
    start = kernel.numpy()
    optimizer = optimizer_classes.Muon(0.24, 0.6)
    optimizer.build([kernel])
    gradients = [random.normal(size=kernel.shape).astype(np.float32) for _ in range(2)]
    momentum = np.zeros(kernel.shape, np.float32)
    expected = start
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient)], [kernel])
        momentum = 0.6 * momentum + gradient
        direction = (gradient + 0.6 * momentum).reshape(-1, 8)
        update = optimizer_classes.orthogonalized(tf.constant(direction)).numpy()
        expected = expected * (8**0.5 / np.linalg.norm(expected))
        expected = expected - 0.24 * update.reshape(kernel.shape)
    np.testing.assert_allclose(kernel.numpy(), expected, atol=1e-5)


def test_biases_and_the_head_match_two_updates_by_hand():
    """Nesterov's momentum 0.85, and decay 0.004, of losses summed over 2000 images."""
    given = {"bias": ([0.5, -1.0], 0.053), "head": ([[2.0], [-3.0]], 0.67)}
    variables = [variable(values, name) for name, (values, _) in given.items()]
    optimizer = optimizer_classes.Muon(0.24, 0.6)
    optimizer.build(variables)
    gradients = [[0.01, 0.02], [[-0.003], [0.004]]], [[-0.02, 0.01], [[0.001], [0.002]]]
    for number in range(2):
        # At half the filters' highest rate.
        optimizer.learning_rate = 0.12
        optimizer.apply([tf.constant(one) for one in gradients[number]])
    for place, (start, rate) in enumerate(given.values()):
        expected, momentum = np.array(start), 0.0
        for of_step in gradients:
            summed = 2000 * np.array(of_step[place]) + 0.004 / rate * expected
            momentum = 0.85 * momentum + summed
            expected = expected - 0.5 * rate * (summed + 0.85 * momentum)
        np.testing.assert_allclose(variables[place].numpy(), expected, rtol=1e-5)


def test_the_whitening_bias_stands_still_after_its_part_of_the_run():
    bias = variable([1.0], "whitening_bias")
    optimizer = optimizer_classes.Muon(0.24, 0.6, {bias.path: 0.375})
    optimizer.build([bias])
    for part, moves in ((0.0, True), (0.3, True), (0.375, False), (0.9, False)):
        optimizer.learning_rate = 0.24 * (1 - part)
        before = bias.numpy()
        optimizer.apply([tf.constant([1e-4])])
        assert (bias.numpy() != before).any() == moves, part


@pytest.mark.parametrize("rate", [0.0, 0.24])
def test_zeros_stay_finite_as_filters_and_as_the_rate(rate):
    """As at the end of a residual branch, and where nothing is to be trained."""
    variables = [variable(np.zeros((3, 3, 4, 8)), "kernel"), variable([1.0], "bias")]
    optimizer = optimizer_classes.Muon(rate, 0.6)
    gradients = [tf.ones(one.shape) for one in variables]
    optimizer.apply(gradients, variables)
    assert all(np.isfinite(one.numpy()).all() for one in variables)
    assert all(one.numpy().any() for one in variables) == bool(rate)
