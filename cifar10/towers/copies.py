"""Copies values between the towers' devices and the device of the variables.

Each copy of a tensor between a GPU and the host has to be started, which for the
variables of a small model takes longer than the copy itself. So variables travel to a
GPU, and results travel back, packed into one flat tensor for each floating dtype.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.models.layer_tree import GENERATOR_STATE

Gradient: TypeAlias = "tf.Tensor | None"
OptionalTensor: TypeAlias = "tf.Tensor | None"
Tensors: TypeAlias = "list[tf.Tensor]"


class Packed:
    """A structure of tensors, with all tensors of a floating dtype joined into one.

    The constructor joins them on a device, and `unpacked` splits them on the current
    one. Integers stay apart: some kernels for GPUs want them in the host's memory.
    """

    def __init__(self, values: Any, device: str) -> None:
        self._values = values
        self._indices: dict[tf.DType, list[int]] = {}
        leaves = tf.nest.flatten(values)
        for index, leaf in enumerate(leaves):
            if leaf is not None and leaf.dtype.is_floating:
                self._indices.setdefault(leaf.dtype, []).append(index)
        self.joined: dict[tf.DType, tf.Tensor] = {}
        with tf.device(device):
            for dtype, indices in self._indices.items():
                parts = [leaves[index] for index in indices]
                if any(part.shape.rank for part in parts):
                    joined = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
                else:
                    joined = tf.stack(parts)  # Scalars need no reshaping.
                self.joined[dtype] = joined

    def unpacked(self, others: Sequence["Packed"] = (), count: int = 1) -> Any:
        """Returns the structure; with `others`, the sum of all divided by `count`."""
        leaves = tf.nest.flatten(self._values)
        # Joined tensors are added, not their parts: the order in which TensorFlow adds
        # tensors, and so a sum's last bits, depends on which tensors own their memory.
        for dtype, indices in self._indices.items():
            joined = mean([one.joined[dtype] for one in (self, *others)], count)
            shapes = [leaves[index].shape for index in indices]
            if any(shape.rank for shape in shapes):
                parts = tf.split(joined, [shape.num_elements() for shape in shapes])
                parts = [*map(tf.reshape, parts, shapes)]
            else:
                parts = tf.unstack(joined)
            for index, part in zip(indices, parts, strict=True):
                leaves[index] = part
        return tf.nest.pack_sequence_as(self._values, leaves)


def read_variables(model: keras.Model) -> list[Tensors]:
    """Reads the trainable and the non-trainable variables to the current device."""
    groups = model.trainable_variables, model.non_trainable_variables
    return [[tf.identity(variable.value) for variable in group] for group in groups]


def for_tower(model: keras.Model, non_trainable: Tensors, number: int) -> Tensors:
    """Makes the states of random generators differ from tower to tower."""
    # The factor is odd, so that the first 2^32 towers all differ.
    values, offset = [*non_trainable], (number * 0x9E3779B1) % 2**32
    for index, variable in enumerate(model.non_trainable_variables):
        if number and variable.name == GENERATOR_STATE:
            values[index] += tf.constant([offset, 0], values[index].dtype)
    return values


def packed_means(devices: Sequence[str], results: Sequence[Any], home: str) -> tuple:
    """Averages towers' results on `home`, where they arrive packed.

    Returns gradients, statistics, metrics and the towers' losses.
    """
    sums = [Packed(part, on) for on, part in sum_on_devices(devices, results).items()]
    others = ((one.statistics, one.metrics) for one in results)
    towers = [Packed(*one) for one in zip(others, devices, strict=True)]
    with tf.device(home):
        gradients = sums[0].unpacked(sums[1:], len(results))
        statistics, metrics = towers[0].unpacked(towers[1:], len(results))
        losses = tf.stack([one.unpacked()[1]["total_loss"] for one in towers])
    return gradients, statistics, metrics, losses


def sum_on_devices(
    devices: Sequence[str], results: Sequence[Any]
) -> dict[str, list[Gradient]]:
    """Returns the sum of the gradients of each device's towers, computed there."""
    sums: dict[str, list[Gradient]] = {}
    for device, result in zip(devices, results, strict=True):
        with tf.device(device):
            more = result.gradients
            pairs = zip(sums[device], more, strict=True) if device in sums else None
            sums[device] = [mean(pair, 1) for pair in pairs] if pairs else more
    return sums


def widened(gradients: Iterable[Gradient]) -> Tensors:
    """Casts all but None to the widest dtype; in float16, 256 squared overflows."""
    present = [one for one in gradients if one is not None]
    widest = max([tf.float32, *(one.dtype for one in present)], key=lambda d: d.size)
    return [tf.cast(one, widest) for one in present]


def mean(values: Sequence[Gradient], count: int | None = None) -> Gradient:
    """Divides the sum of values by `count` or their number; None if all are None."""
    if all(value is None for value in values):
        return None
    count = count or len(values)
    summed = values[0] if len(values) == 1 else tf.add_n(values)
    return summed if count == 1 else tf.divide(summed, count)
