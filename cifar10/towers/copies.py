"""What travels between the devices of towers and that of the variables.

Each tensor that is copied between a GPU and the host takes a start of its own, which
for the variables of a small model lasts longer than the copy. So variables travel to a
GPU, and its results travel back, as one flat tensor for each dtype.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from cifar10.models.layer_tree import GENERATOR_STATE

Gradient: TypeAlias = "tf.Tensor | None"
Tensors: TypeAlias = "list[tf.Tensor]"

# Separates the towers' dropout masks. Odd, so that the first 2^32 towers all differ.
_TOWER_SEED_STRIDE = 0x9E3779B1
# TensorFlow splits a tensor into parts of its own memory if they begin and end at
# multiples of so many bytes; otherwise it copies them.
_ALIGNED_BYTES = 64


class Flat:
    """A structure of tensors, in which those of a floating dtype are joined to one.

    The constructor joins them on the current device, and `unpacked` splits them there.
    Every bit is kept. Integers stay apart: some of TensorFlow's kernels for GPUs want
    them in the host's memory.
    """

    def __init__(self, values: Any) -> None:
        self._values = values
        self._places: dict[tf.DType, list[int]] = {}
        leaves = tf.nest.flatten(values)
        for place, leaf in enumerate(leaves):
            if leaf is not None and leaf.dtype.is_floating:
                self._places.setdefault(leaf.dtype, []).append(place)
        self.joined: dict[tf.DType, tf.Tensor] = {}
        for dtype, places in self._places.items():
            parts = []
            for leaf in [leaves[place] for place in places]:
                parts.append(tf.reshape(leaf, [-1]))
                if filling := _filling(leaf):
                    parts.append(tf.zeros([filling], dtype))
            self.joined[dtype] = tf.concat(parts, 0)

    def unpacked(self, joined: Mapping[tf.DType, tf.Tensor] | None = None) -> Any:
        """Returns the structure, or one with other values that are `joined` alike."""
        leaves = tf.nest.flatten(self._values)
        for dtype, places in self._places.items():
            old = [leaves[place] for place in places]
            sizes = [leaf.shape.num_elements() + _filling(leaf) for leaf in old]
            parts = tf.split((joined or self.joined)[dtype], sizes)
            for place, leaf, part in zip(places, old, parts, strict=True):
                whole = part[: leaf.shape.num_elements()]
                leaves[place] = tf.reshape(whole, leaf.shape)
        return tf.nest.pack_sequence_as(self._values, leaves)


def _filling(tensor: tf.Tensor) -> int:
    return -tensor.shape.num_elements() % (_ALIGNED_BYTES // tensor.dtype.size)


def read_variables(model: keras.Model) -> tuple[Tensors, Tensors]:
    """Reads the trainable and the non-trainable variables to the current device."""
    trainable, others = model.trainable_variables, model.non_trainable_variables
    return (
        [tf.identity(variable.value) for variable in trainable],
        [tf.identity(variable.value) for variable in others],
    )


def for_tower(model: keras.Model, non_trainable: Tensors, number: int) -> Tensors:
    """Makes the states of random generators differ from tower to tower."""
    offset = (number * _TOWER_SEED_STRIDE) % 2**32
    pairs = zip(model.non_trainable_variables, non_trainable, strict=True)
    return [
        value + tf.constant([offset, 0], value.dtype)
        if number and variable.name == GENERATOR_STATE
        else value
        for variable, value in pairs
    ]


def flat_means(devices: Sequence[str], results: Sequence[Any], home: str) -> tuple:
    """Averages towers' results on `home`, to which they travel flat.

    Returns gradients, statistics, metrics and the towers' losses. Means are taken of
    what is joined: in which order TensorFlow adds tensors up depends on which of them
    lie in memory of their own, and so do their last bits.
    """
    sums, towers = [], []
    for device, gradients in sum_on_devices(devices, results).items():
        with tf.device(device):
            sums.append(Flat(gradients))
    for device, result in zip(devices, results, strict=True):
        with tf.device(device):
            towers.append(Flat((result.statistics, result.metrics)))
    with tf.device(home):
        means = [
            flats[0].unpacked(
                {
                    dtype: mean([one.joined[dtype] for one in flats], len(results))
                    for dtype in flats[0].joined
                }
            )
            for flats in (sums, towers)
        ]
        losses = tf.stack([one.unpacked()[1]["total_loss"] for one in towers])
    return means[0], *means[1], losses


def sum_on_devices(
    devices: Sequence[str], results: Sequence[Any]
) -> dict[str, list[Gradient]]:
    """Returns the sum of the gradients of each device's towers, computed there."""
    sums: dict[str, list[Gradient]] = {}
    for device, result in zip(devices, results, strict=True):
        with tf.device(device):
            more = result.gradients
            pairs = zip(sums[device], more, strict=True) if device in sums else None
            sums[device] = [_sum(pair) for pair in pairs] if pairs else more
    return sums


def mean(values: Sequence[Gradient], count: int | None = None) -> Gradient:
    """Adds up values, and divides by `count`, by default by how many there are."""
    count = count or len(values)
    summed = _sum(values)
    return summed if summed is None or count == 1 else tf.divide(summed, count)


def _sum(values: Sequence[Gradient]) -> Gradient:
    """Adds up values; returns None if all are None."""
    if all(value is None for value in values):
        return None
    # On a CPU, sums of sums are otherwise joined where the inner one is no output.
    if any("CPU" in one.device for one in values if one is not None):
        values = [v if v is None else tf.ensure_shape(v, v.shape) for v in values]
    return values[0] if len(values) == 1 else tf.add_n(values)
