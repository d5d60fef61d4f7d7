"""Histograms as TensorBoard shows them, for less than what its own code costs."""

import math

import numpy as np
import tensorflow as tf

_BUCKETS = 30  # TensorBoard's own number.
# This many values show a tensor's distribution as well as all of them.
_MOST_VALUES = 2**16


def sample(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor's values, evenly chosen if they are many, on its device."""
    stride = math.ceil(tensor.shape.num_elements() / _MOST_VALUES)
    # A stride that shared a factor with the channels would always meet the same ones.
    while stride > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1
    return tf.reshape(tensor, [-1])[:: max(stride, 1)]


def buckets(values: np.ndarray) -> np.ndarray:
    """Counts the finite values: left edge, right edge and count of each bucket."""
    values = values.astype(np.float64)
    values = values[np.isfinite(values)]
    counts, edges = np.histogram(values, _BUCKETS)
    if values.size and values.min() == values.max():
        # Of a single value all counts are in the last bucket, which has no width.
        edges[:] = values[0]
        counts = np.sort(counts)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)
