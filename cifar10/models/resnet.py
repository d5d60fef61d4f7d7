"""A residual network of pre-activation blocks with batch norm, of any depth.

By default, this is the network on which PartialFlow was tested (Sanity-Check.ipynb in
https://github.com/jakob-bauer/partialflow): a 3 x 3 convolution of 16 filters, three
scales of 3, 3 and 5 blocks, global average pooling, and a linear head. Each scale but
the first halves height and width and doubles the filters. The initialization is He's
(https://arxiv.org/abs/1502.01852). The order of layers in a block follows
https://arxiv.org/abs/1603.05027.
"""

import keras
from keras import KerasTensor, layers

from cifar10.errors import UsageError
from cifar10.layers import FusedBatchNormalization, logits_layer

# Blocks per scale at PartialFlow's depth of 11.
_BLOCKS = (3, 3, 5)


def _convolution(filters: int, side: int, stride: int, name: str) -> keras.Layer:
    how = {"padding": "same", "use_bias": False, "kernel_initializer": "he_normal"}
    return layers.Conv2D(filters, side, stride, name=name, **how)


def _activated(net: KerasTensor, name: str) -> KerasTensor:
    net = FusedBatchNormalization(name=f"{name}_norm")(net)
    return layers.ReLU(name=f"{name}_relu")(net)


def _block(net: KerasTensor, filters: int, stride: int, name: str) -> KerasTensor:
    """Adds a residual block, whose shortcut is a projection if the shape changes."""
    residual = _activated(net, f"{name}_in")
    if stride > 1 or net.shape[-1] != filters:
        net = _convolution(filters, 1, stride, f"{name}_projection")(residual)
    residual = _convolution(filters, 3, stride, f"{name}_conv1")(residual)
    residual = _activated(residual, f"{name}_mid")
    residual = _convolution(filters, 3, 1, f"{name}_conv2")(residual)
    return layers.Add(name=f"{name}_sum")([residual, net])


def build(
    image_shape: tuple[int, int, int], classes: int, *, depth: int = 11, width: int = 16
) -> keras.Model:
    """Builds a network of `depth` residual blocks, at least one per scale."""
    if depth < len(_BLOCKS):
        least = f"at least {len(_BLOCKS)}, one block for each scale"
        raise UsageError(f"--depth {depth}: give {least}.")
    blocks = [max(1, depth * count // sum(_BLOCKS)) for count in _BLOCKS[:-1]]
    blocks.append(depth - sum(blocks))
    images = keras.Input(image_shape, name="images")
    net = _convolution(width, 3, 1, "conv1")(images)
    net = _activated(net, "conv1")
    for scale, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if scale and not block else 1
            net = _block(net, width * 2**scale, stride, f"scale{scale}_block{block}")
    net = layers.GlobalAveragePooling2D(name="pool")(net)
    logits = logits_layer(classes, name="softmax_linear")(net)
    return keras.Model(images, logits, name="resnet")
