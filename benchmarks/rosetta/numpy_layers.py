"""Layers by hand, and the slopes of what goes into them."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from benchmarks.rosetta.task import Values


def convolve(net: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Computes [batch, height, width, out] with a 3 x 3 kernel and zeros around."""
    padded = np.pad(net, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = sliding_window_view(padded, (3, 3), (1, 2))  # [..., in, 3, 3]
    return np.tensordot(windows, kernel.transpose(2, 0, 1, 3), 3)


def convolve_back(
    net: np.ndarray, kernel: np.ndarray, slope: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the slopes of a convolution's input and kernel."""
    padded = np.pad(net, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = sliding_window_view(padded, (3, 3), (1, 2))
    of_kernel = np.tensordot(windows, slope, ((0, 1, 2), (0, 1, 2)))
    turned = kernel[::-1, ::-1].transpose(0, 1, 3, 2)
    return convolve(slope, turned), of_kernel.transpose(1, 2, 0, 3)


def unpool(net: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """Gives the slope of each 2 x 2 maximum to the first value that reaches it."""
    batch, height, width, channels = net.shape
    blocks = net.reshape(batch, height // 2, 2, width // 2, 2, channels)
    blocks = blocks.transpose(0, 1, 3, 5, 2, 4).reshape(*slope.shape, 4)
    given = np.zeros_like(blocks)
    np.put_along_axis(given, blocks.argmax(-1)[..., None], slope[..., None], -1)
    given = given.reshape(*slope.shape, 2, 2).transpose(0, 1, 4, 2, 5, 3)
    return given.reshape(net.shape)


def sigmoid(net: np.ndarray) -> np.ndarray:
    """Computes the logistic function."""
    return 1.0 / (1.0 + np.exp(-net))


def clearance(values: Values, images: np.ndarray) -> float:
    """Returns how close the closest decision is in the convolutional network's layers.

    That is the least distance of a value from zero before a ReLU, or of the largest
    value in a pool from the next, over the layer's standard deviation.
    """
    net, least = images.astype(np.float64), np.inf
    for number in (1, 2, 3, 4):
        net = convolve(net, values[f"conv{number}/kernel"].astype(np.float64))
        net += values[f"conv{number}/bias"]
        scale = net.std()
        least = min(least, np.abs(net).min() / scale)
        net = np.maximum(net, 0.0)
        if number in (2, 4):
            batch, height, width, channels = net.shape
            blocks = net.reshape(batch, height // 2, 2, width // 2, 2, channels)
            blocks = blocks.transpose(0, 1, 3, 5, 2, 4).reshape(-1, 4)
            second, first = np.partition(blocks, (2, 3), axis=1)[:, 2:].T
            least = min(least, (first - second)[first > 0].min() / scale)
            net = blocks.max(1).reshape(batch, height // 2, width // 2, channels)
    hidden = net.reshape(batch, -1) @ values["dense1/kernel"] + values["dense1/bias"]
    return float(min(least, np.abs(hidden).min() / hidden.std()))
