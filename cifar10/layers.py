"""Layers that Keras lacks or computes more slowly, and weight decay."""

import contextvars
import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from cifar10 import hardware

# The slope for which x * sigmoid(slope * x) is closest to GELU.
GELU_SLOPE = 1.702
_FEW = 256  # With fewer inputs, `WideConv2D` joins columns.


class LocalResponseNormalization(keras.layers.Layer):
    """Divides each activation by a power of the energy of neighbouring channels.

    Computes y = x * s^-beta, as `tf.nn.local_response_normalization` does, where
    s = bias + alpha * (sum of x^2 over the channel's window), which has `depth_radius`
    channels on each side. The gradient has the closed form

        dx = dy * s^-beta - 2 * alpha * beta * x * window_sum(dy * y / s)

    The window sum is a product of the last dimension with a banded matrix of ones. The
    forward and the backward pass then run on the matrix units, in less than half the
    time of TensorFlow's kernels (`dev/LOG.md`).
    """

    def __init__(
        self,
        depth_radius: int = 5,
        bias: float = 1.0,
        alpha: float = 1.0,
        beta: float = 0.5,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.depth_radius, self.bias = depth_radius, bias
        self.alpha, self.beta = alpha, beta

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Normalizes activations, floating [batch, height, width, channels]."""
        channels = inputs.shape[-1]
        # bfloat16 would round all energies near 1 to 1, and be slower in TensorFlow.
        precise = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        reach = min(self.depth_radius, channels)
        band = tf.linalg.band_part(tf.ones([channels, channels], precise), reach, reach)
        # Folding the constants into these small matrices saves passes over the
        # activations. Each pass takes a percent of the tutorial's step.
        energies = self.alpha * band
        slopes = (2.0 * self.alpha * self.beta) * band
        bias = tf.fill([channels], tf.cast(self.bias, precise))

        @tf.custom_gradient
        def normalize(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            energy = tf.nn.bias_add(tf.matmul(tf.square(x), energies), bias)
            if self.beta == 0.75:  # The tutorial's: roots are faster than a power.
                root = tf.math.rsqrt(energy)
                power = root * tf.sqrt(root)
            else:
                power = tf.pow(energy, -self.beta)
            y = x * power

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                return upstream * power - x * tf.matmul(upstream * y / energy, slopes)

            return y, gradient

        flat = tf.cast(tf.reshape(inputs, [-1, channels]), precise)
        return tf.reshape(tf.cast(normalize(flat), inputs.dtype), tf.shape(inputs))


class WeightDecay(keras.regularizers.Regularizer):
    """Adds factor / 2 * sum(w^2) to the loss, as the tutorial does.

    This is one TensorFlow operation. Keras's L2 is two, a square and a sum, which
    together take ten times as long in every tower.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, variable: tf.Tensor) -> tf.Tensor:
        """Returns the penalty of a variable, a scalar of the variable's dtype."""
        return self.factor * tf.nn.l2_loss(variable)

    def get_config(self) -> dict:
        """Returns the constructor's arguments."""
        return {"factor": self.factor}


# Whether `QuickGelu` uses XLA outside of training too, which pays for one batch shape.
fuses_activations = contextvars.ContextVar("fuses_activations", default=False)


class QuickGelu(keras.layers.Layer):
    """Computes x * sigmoid(1.702 x), which is GELU to within 0.02.

    The approximation is due to Hendrycks and Gimpel (https://arxiv.org/abs/1606.08415).
    On CPUs, XLA compiles the forward pass of training and scoring to a single pass over
    memory, and likewise the backward pass. A step of airbench in bfloat16 then takes
    three quarters of the time (dev/LOG.md). On GPUs that was slower, so XLA fuses the
    operations only as part of a larger program.
    """

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Returns the activations, in the dtype and shape of `inputs`."""
        compute, gradient = _gelu, _gelu_gradient
        # Exported models have to run without XLA.
        on_gpu = tf.config.get_visible_devices("GPU")
        if (training or fuses_activations.get()) and not on_gpu:
            compute = tf.function(compute, autograph=False, jit_compile=True)
            gradient = tf.function(gradient, autograph=False, jit_compile=True)

        @tf.custom_gradient
        def activate(x: tf.Tensor) -> tuple[tf.Tensor, object]:
            return compute(x), functools.partial(gradient, x)

        return activate(inputs)


def _gate(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns 1.702 x and its sigmoid, in the dtype in which to compute GELU."""
    # On CPUs a sigmoid is three times as fast in float32 as in bfloat16.
    on_gpu = tf.config.get_visible_devices("GPU")
    is_precise = x.dtype == tf.float64 or (on_gpu and x.dtype != tf.float16)
    precise = x if is_precise else tf.cast(x, tf.float32)  # Keeps 1.702 x finite.
    scaled = GELU_SLOPE * precise
    return scaled, tf.sigmoid(scaled)


def _gelu(x: tf.Tensor) -> tf.Tensor:
    _, gate = _gate(x)
    return tf.cast(tf.cast(x, gate.dtype) * gate, x.dtype)


def _gelu_gradient(x: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    scaled, gate = _gate(x)
    slope = gate + tf.raw_ops.SigmoidGrad(y=gate, dy=scaled)
    return tf.cast(tf.cast(upstream, gate.dtype) * slope, x.dtype)


class FusedBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization of images by TensorFlow's fused operation.

    In bfloat16, the fused operation is several times as fast as Keras's layer, which
    makes several passes in float32. The results are the same, except that the moving
    variance has Bessel's correction, as in PyTorch.
    """

    def call(
        self,
        inputs: tf.Tensor,
        training: bool | None = None,
        mask: tf.Tensor | None = None,  # noqa: ARG002 - part of Keras's signature.
    ) -> tf.Tensor:
        """Normalizes activations, floating [batch, height, width, channels]."""
        # The operation has no float64 kernel.
        if (training and not self.trainable) or self.variable_dtype == "float64":
            return super().call(inputs, training=training)
        shape = [inputs.shape[-1]]
        statistics = self.moving_mean, self.moving_variance
        outputs, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            inputs,
            tf.cast(self.gamma, tf.float32) if self.scale else tf.ones(shape),
            tf.cast(self.beta, tf.float32) if self.center else tf.zeros(shape),
            *([tf.cast(one, tf.float32) for one in statistics] if not training else ()),
            epsilon=self.epsilon,
            is_training=bool(training),
        )
        if training:
            for moving, new in zip(statistics, (mean, variance), strict=True):
                kept = tf.cast(moving, tf.float32) * self.momentum
                moving.assign(kept + (1.0 - self.momentum) * new)
        return outputs

    def call_frozen(self, inputs: tf.Tensor, **_: object) -> tf.Tensor:
        """Normalizes by the moving statistics, as Keras's layer does.

        The fused operation's gradient with given statistics varies on GPUs.
        """
        return super().call(inputs, training=False)


class WideConv2D(keras.layers.Conv2D):
    """A 3 x 3 convolution of many channels, trained faster on CPUs.

    Computes the same as `keras.layers.Conv2D` with stride 1, padding and no bias. On
    CPUs, oneDNN takes two to four times as long for the filters' gradient as for the
    forward pass, although both need equally many operations. This layer computes the
    gradient by matrix products, in 0.4 to 0.95 of oneDNN's time with 256 outputs. With
    fewer, or in float32 with AVX-512, it would be slower (`dev/LOG.md`). `kwargs` may
    hold `kernel_initializer`, `name` and `dtype` of `keras.layers.Conv2D`.
    """

    def __init__(self, filters: int, **kwargs: object) -> None:
        if unknown := kwargs.keys() - {"kernel_initializer", "name", "dtype"}:
            raise TypeError(f"WideConv2D takes no {', '.join(sorted(unknown))}.")
        super().__init__(filters, 3, padding="same", use_bias=False, **kwargs)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Convolves activations, floating [batch, height, width, channels]."""
        if not self._is_faster_by_products(inputs):
            return super().call(inputs)

        @tf.custom_gradient
        def convolve(x: tf.Tensor, filters: tf.Tensor) -> tuple[tf.Tensor, object]:
            def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                dx = tf.nn.conv2d_transpose(upstream, filters, tf.shape(x), 1, "SAME")
                return dx, _filter_gradient(x, upstream)

            return tf.nn.conv2d(x, filters, 1, "SAME"), gradient

        return convolve(inputs, tf.convert_to_tensor(self.kernel, inputs.dtype))

    def _is_faster_by_products(self, inputs: tf.Tensor) -> bool:
        if tf.config.get_visible_devices("GPU"):
            return False
        features = hardware.processor_features()
        has_many = inputs.shape[-1] >= _FEW
        if inputs.dtype == tf.bfloat16:
            # With AMX, oneDNN is fast for few inputs, and products are unmeasured.
            return has_many or "amx_bf16" not in features
        is_avx2 = "avx2" in features and "avx512f" not in features
        uses_onednn = hardware.uses_onednn(by_default=False)
        return inputs.dtype == tf.float32 and has_many and is_avx2 and uses_onednn


def _filter_gradient(inputs: tf.Tensor, upstream: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of 3 x 3 filters, as [3, 3, inputs, outputs].

    For each position in the filter, the products of each input pixel and the gradient
    of the output pixel to which it contributes there are summed over all images.
    """
    pixels = tf.transpose(inputs, [1, 2, 3, 0])
    gradients = tf.transpose(upstream, [1, 2, 0, 3])
    every, first, last = slice(None), slice(None, -1), slice(1, None)
    places = [(first, last), (every, every), (last, first)]
    columns = [(pixels[:, at], gradients[:, to]) for at, to in places]
    if inputs.shape[-1] < _FEW:  # One product for a row of the filter is faster then.
        padded = tf.pad(pixels, [[0, 0], [1, 1], [0, 0], [0, 0]])
        joined = [padded[:, at : at + pixels.shape[1]] for at in range(3)]
        columns = [(tf.concat(joined, 2), gradients)]
    sums = [
        tf.reduce_sum(tf.cast(tf.matmul(seen[at], slopes[to]), tf.float32), [0, 1])
        for at, to in places
        for seen, slopes in columns
    ]
    shape = [3, 3, inputs.shape[-1], upstream.shape[-1]]
    return tf.reshape(tf.cast(tf.stack(sums), inputs.dtype), shape)


def is_max_pooling(layer: keras.Layer) -> bool:
    """Returns whether a layer computes Keras's max pooling and nothing more."""
    kinds = keras.layers.MaxPooling1D, keras.layers.MaxPooling2D
    return isinstance(layer, kinds) and type(layer).call is kinds[0].call


def pooling_for_xla(layer: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that pools like a layer, with a gradient for XLA.

    XLA turns TensorFlow's gradient into a select-and-scatter, which is slow on GPUs,
    but fuses the comparisons below, which would be slow as single operations. As in
    TensorFlow, the first pixel of a window that equals the maximum gets the gradient.
    Where windows overlap, sums are at least in float32, and in another order.
    """

    @tf.custom_gradient
    def pool(x: tf.Tensor) -> tuple[tf.Tensor, object]:
        y = type(layer).call(layer, x)
        return y, functools.partial(_unpooled, layer, x, y)

    return pool


def _unpooled(layer: Any, x: tf.Tensor, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    precise = tf.float64 if x.dtype == tf.float64 else tf.float32
    pixels, largest, upstream = (tf.cast(one, precise) for one in (x, y, dy))
    padding, chosen = [[0, 0]] * x.shape.rank, [[slice(None)]] * x.shape.rank
    first = 2 if layer.data_format == "channels_first" else 1
    moves = zip(layer.pool_size, layer.strides, strict=True)
    for axis, (size, stride) in enumerate(moves, first):
        reach = (y.shape[axis] - 1) * stride + 1
        beyond = max(reach + size - 1 - x.shape[axis], 0)
        padding[axis] = [beyond // 2, beyond - beyond // 2]
        chosen[axis] = [slice(at, at + reach, stride) for at in range(size)]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(pixels)
        padded = tf.pad(pixels, padding, constant_values=precise.min)
        # For each place in a window, that pixel of all windows.
        places = [padded[list(one)] for one in itertools.product(*chosen)]
    taken, shares = tf.zeros_like(y, tf.bool), []
    for place in places:
        shares.append(tf.where((place == largest) & ~taken, upstream, 0.0))
        taken |= place == largest
    return tf.cast(tape.gradient(places, pixels, shares), x.dtype)


def logits_layer(classes: int, **options: object) -> keras.Layer:
    """Returns a dense layer that keeps full precision in mixed-precision training."""
    dtype = keras.config.dtype_policy().variable_dtype
    return keras.layers.Dense(classes, dtype=dtype, **options)


class NewSection(keras.layers.Identity):
    """Returns its input, and marks the beginning of a new section of the model.

    Write `net = NewSection()(net)` in the graph of the trained model itself. In a
    nested model, the layer has no effect. `sections/cutting.py` explains sections.
    """

    def __init__(self, **kwargs: object) -> None:
        super().__init__(autocast=False, **kwargs)
