"""Estimates the gradient noise scale: up to which batch more images save steps.

After McCandlish et al., "An Empirical Model of Large-Batch Training", appendix A.1
(https://arxiv.org/abs/1812.06162). N towers compute gradients of B images each, and the
expected squares of norms are

    of a tower's gradient:  |G|^2 + S / B
    of the towers' mean:    |G|^2 + S / (N B)

G is the gradient of the loss over all images, and S the trace of the covariance of
single images' gradients. Penalties such as weight decay are the same in all towers, so
they cancel out in S; they belong to G, which is what an update follows. The noise scale
is S / |G|^2, in images. A single batch per step cannot tell the two apart.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from cifar10.towers.graphs import nan_unless

if TYPE_CHECKING:
    from cifar10.towers.update import TrainState

SQUARE = "tower_gradient_square"  # The metric of a step, NaN if not computed.
NAME = "gradient_noise_scale"

# Steps between two computations of SQUARE: each took 2 % of a step of 4 simulated
# towers with 32 images each. The norm of the mean is known in every step.
_PERIOD = 10
_LEAST_STEPS, _MEMORY = 100, 1000


def with_squares(
    state: "TrainState", devices: Sequence[str], results: Sequence[Any], *, xla: bool
) -> list[Any]:
    """Adds SQUARE to the metrics of towers, in some of the steps.

    No gradient is added to others before its norm is known. Otherwise TensorFlow could
    not reuse its memory for the sum, and would add, and so round, in another order.
    """
    is_due = (state.global_step.read_value() + 1) % _PERIOD == 0
    is_scaled = isinstance(state.optimizer, keras.optimizers.LossScaleOptimizer)
    scale = state.optimizer.scale_loss(1.0) if is_scaled else 1.0
    measured = []
    for device, one in zip(devices, results, strict=True):
        with tf.device(device):
            present = [each for each in one.gradients if each is not None]
            square = nan_unless(is_due, _square, present, xla=xla)
            with tf.control_dependencies([square]):
                gradients = [
                    None if each is None else tf.identity(each)
                    for each in one.gradients
                ]
            metrics = one.metrics | {SQUARE: square / tf.cast(scale, square.dtype) ** 2}
        measured.append(one._replace(gradients=gradients, metrics=metrics))
    return measured


def _square(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    widest = max((one.dtype for one in gradients), key=lambda dtype: dtype.size)
    return 2 * tf.add_n([tf.nn.l2_loss(tf.cast(one, widest)) for one in gradients])


def observe(
    averages: dict[str, float], square: float, norm: float, images: int, towers: int
) -> None:
    """Updates the moving averages of S and of the mean gradient's square with a step's.

    `square` is SQUARE, `norm` that of the mean gradient (0 after an overflow in
    float16), and `images` the number of images of all towers.
    """
    if not norm:
        return
    _average(averages, "mean", norm**2, _MEMORY)
    if math.isfinite(square):
        noise = (square - norm**2) * images / (towers - 1)
        _average(averages, "noise", noise, _MEMORY // _PERIOD)


def _average(averages: dict[str, float], name: str, value: float, memory: int) -> None:
    """Updates an average in which later values weigh more, and the mean square."""
    count = averages[f"{name}: count"] = averages.get(f"{name}: count", 0.0) + 1.0
    weight = max(4.0 / (count + 3.0), 1.0 / memory)
    for key, new in ((name, value), (f"{name}: square", value**2)):
        old = averages.get(key, 0.0)
        averages[key] = old + weight * (new - old)
    # The variance of such an average of independent values; of equal values 0.
    variance = averages[f"{name}: square"] - averages[name] ** 2
    averages[f"{name}: error"] = math.sqrt(max(0.0, variance) * weight * 4 / 7)


def estimate(averages: dict[str, float], images: int) -> tuple[float, bool]:
    """Returns the noise scale, and whether that is only a lower bound of it.

    Returns NaN if neither can be told yet. `images` are those of all towers.
    """
    noise = averages.get("noise", 0.0)
    if averages.get("mean: count", 0.0) < _LEAST_STEPS or noise <= 0:
        return math.nan, False
    signal = averages["mean"] - noise / images
    error = math.hypot(averages["mean: error"], averages["noise: error"] / images)
    if is_bound := signal < 3 * error:
        signal += 2 * error
    return (noise / signal if signal > 0 else math.nan), is_bound


def in_words(averages: dict[str, float], images: int) -> str:
    """Says whether more GPUs would save steps; empty if that cannot be told."""
    scale, is_bound = estimate(averages, images)
    if not math.isfinite(scale):
        return ""
    about, saved = "at least" if is_bound else "about", 50 * scale / (scale + images)
    return (
        f"Gradient noise scale: {about} {float(f'{scale:.2g}'):,.0f} images. Twice the "
        f"global batch of {images:,}, as of twice the GPUs, would save {about} "
        f"{saved:.0f} % of the steps, with a learning rate that suits it; 50 % is the "
        "most. A batch far above the noise scale saves few."
    )
