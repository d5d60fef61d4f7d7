"""Draws heat maps over pictures to show where a model looks, by HiResCAM.

HiResCAM (Draelos and Carin 2020, https://arxiv.org/abs/2011.08891) multiplies the last
convolution's activations by their gradients for a class's logit, sums over channels,
and replaces negative sums by 0. Grad-CAM (https://arxiv.org/abs/1610.02391) first
averages gradients over positions, which misleads before dense layers (`dev/LOG.md`).
"""

import numpy as np
import tensorflow as tf
from PIL import Image

from cifar10.input.distortions import prepare
from cifar10.model import inference
from cifar10.trained_model import TrainedModel

_CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative", "Conv2DBackpropInput")
_SIDE = 128  # Smaller pictures are enlarged, since their pixels would hide the heat.
_STRONGEST = 0.7  # Opacity where the heat is 1, so that the picture shows through.


def heat_maps(
    trained: TrainedModel, images: np.ndarray, classes: np.ndarray
) -> np.ndarray | None:
    """Computes how strongly each pixel supports a class.

    Takes images, uint8 [images, height, width, channels], and a class for each. Returns
    heat maps, float32 [images, height, width], whose highest value is 1, or 0 if no
    pixel supports the class. Returns None if no convolution's output exceeds 1 x 1.
    """
    distortion, shape = trained.run.config.images.distortions, trained.picture_shape

    @tf.function(autograph=False)
    def compute(images: tf.Tensor, classes: tf.Tensor) -> tf.Tensor | None:
        values = trained.trainable, trained.non_trainable
        prepared = prepare(images, distortion)
        logits, *_ = inference(trained.model, *values, prepared, training=False)
        if (products := _products(tf.gather(logits, classes, batch_dims=1))) is None:
            return None
        heat = tf.nn.relu(tf.reduce_sum(products, -1, keepdims=True))
        heat = tf.image.resize(heat, prepared.shape[1:3])
        heat = tf.math.divide_no_nan(heat, tf.reduce_max(heat, [1, 2], keepdims=True))
        # Zero-pads the border that a cropping model does not see.
        return tf.image.resize_with_crop_or_pad(heat, *shape[:2])[..., 0]

    maps = compute(images, classes)
    return None if maps is None else maps.numpy()


def _products(chosen: tf.Tensor) -> tf.Tensor | None:
    """Returns activations times the gradients of `chosen` with respect to them.

    The activations are those of the last convolution, after any normalization, sum and
    nonlinearity: the last tensor that still has the convolution's height and width.
    """
    every = [one for node in chosen.graph.get_operations() for one in node.outputs]
    tensors = [one for one in every if one.shape.rank == 4 and one.dtype.is_floating]
    convolved = [one for one in tensors if one.op.type in _CONVOLUTIONS]
    sides = [one.shape[1:3] for one in convolved if one.shape[1:3] != [1, 1]]
    for features in reversed(tensors):
        if sides and features.shape[1:3] == sides[-1]:
            (slopes,) = tf.gradients(chosen, features)
            if slopes is not None:  # None if `chosen` does not depend on the features.
                return tf.cast(features, tf.float32) * tf.cast(slopes, tf.float32)
    return None


def draw(picture: np.ndarray, heat: np.ndarray) -> bytes:
    """Returns a PNG of a uint8 picture under a heat map, from red (0) to yellow (1)."""
    times = max(1, _SIDE // max(heat.shape))
    large = picture.repeat(times, axis=0).repeat(times, axis=1)
    sized = Image.fromarray(heat).resize(large.shape[1::-1], Image.Resampling.BILINEAR)
    strength = np.asarray(sized)[..., None]
    colour = 255 * np.concatenate([strength**0, strength, 0 * strength], axis=-1)
    mixed = large + _STRONGEST * strength * (colour - large)
    return tf.io.encode_png(mixed.astype(np.uint8)).numpy()
