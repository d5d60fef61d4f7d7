"""Estimates the gradient noise scale: the batch up to which more images save steps.

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

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from cifar10.towers.copies import Packed, Tensors, widened
from cifar10.towers.update import TrainState

SQUARE = "tower_gradient_square"  # A tower's; NaN in steps that do not compute it.
NAME = "gradient_noise_scale"

# Steps between two computations of SQUARE. It and the wait for all gradients of all
# towers cost 2 to 3 % of a small step; of one tower, every other time, not 0.5 %.
_PERIOD = 2
_LEAST_STEPS, _MEMORY = 100, 1000


def with_square(
    state: TrainState,
    devices: Sequence[str],
    results: Sequence[Any],
    towers: int,
    *,
    is_first: bool,
    xla: bool,
    flat: bool,
) -> list[Any]:
    """Adds SQUARE, of the first of all `towers`, to the metrics, which are averaged.

    All replicas compute it, since programs that differ may round differently. With XLA,
    every step has it. On a CPU, it is computed before gradients are summed: otherwise
    TensorFlow could not reuse their memory for the sum, and would add, and so round, in
    another order. On a GPU, it reads `flat` vectors, which are made in any case.
    """
    is_due = (state.global_step.read_value() + 1) % _PERIOD == 0
    device, gradients = devices[0], results[0].gradients
    with tf.device(device):
        read = [one for one in gradients if one is not None]
        sizes: dict[tf.DType, list[int]] = {}
        if flat:
            for one in read:
                sizes.setdefault(one.dtype, []).append(one.shape.num_elements())
            read = [*Packed(read, device).joined.values()]
        compute = functools.partial(_square, factor=towers, sizes=sizes)
        square = compute(read) if xla else _if(is_due, compute, read)
        if not flat:
            with tf.control_dependencies([square]):
                gradients = [g if g is None else tf.identity(g) for g in gradients]
        scale = state.optimizer.scale_loss(1.0)
        if tf.is_tensor(scale):  # Only with float16.
            square /= tf.cast(scale, square.dtype) ** 2
        if not is_first:  # Steps are never negative, which XLA does not know.
            never = state.global_step.read_value() < 0
            square = tf.where(never, square, tf.zeros_like(square))
    first = results[0]._replace(gradients=gradients)
    measured: list[Any] = []
    for device, one in zip(devices, [first, *results[1:]], strict=True):
        with tf.device(device):
            of_tower = tf.zeros([], square.dtype) if measured else square
        measured.append(one._replace(metrics=one.metrics | {SQUARE: of_tower}))
    return measured


def _square(
    gradients: Sequence[tf.Tensor], factor: float, sizes: Mapping[tf.DType, list[int]]
) -> tf.Tensor:
    """Returns `factor` times the gradients' square, rounded alike if they are flat."""
    if sizes:
        gradients = [p for one in gradients for p in tf.split(one, sizes[one.dtype])]
    return 2 * factor * tf.add_n([*map(tf.nn.l2_loss, widened(gradients))])


def _if(condition: tf.Tensor, compute: Callable, gradients: Tensors) -> tf.Tensor:
    """Returns `compute(gradients)` or NaN; unlike `tf.cond`, awaits all gradients."""
    then = tf.function(compute, autograph=False).get_concrete_function(gradients)
    dtype = then.outputs[0].dtype

    @tf.function(autograph=False)
    def unknown(gradients: Tensors) -> tf.Tensor:
        del gradients
        return tf.constant(math.nan, dtype)

    (square,) = tf.raw_ops.If(
        cond=condition,
        input=gradients,
        Tout=[dtype],
        output_shapes=[[]],
        then_branch=then,
        else_branch=unknown.get_concrete_function(gradients),
    )
    return square


def observe(
    averages: dict[str, float], square: float | None, norm: float, towers: int
) -> None:
    """Updates the moving averages of the mean gradient's square and of S / (N B).

    `square` is SQUARE, None with one tower, and `norm` that of the mean gradient.
    """
    if square is None:
        averages.clear()
    if square is None or not norm:  # The norm is 0 after an overflow in float16.
        return
    mean = norm * norm
    for name, new in (("mean", mean), ("noise", (square - mean) / (towers - 1))):
        if not math.isfinite(new * new):
            continue
        # A manifest may come from a stranger, with any of these numbers or none.
        count = max(0.0, averages.get(f"{name}: count", 0.0)) + 1.0
        averages[f"{name}: count"] = count
        steps = averages.get("mean: count", count)
        # Later values weigh more; both averages are of the same steps.
        weight = max(4.0 / (count + 3.0), steps / count / _MEMORY)
        for key, value in ((name, new), (f"{name}: square", new * new)):
            old = averages.get(key, 0.0)
            averages[key] = old + min(1.0, weight) * (value - old)
        variance = averages[f"{name}: square"] - averages[name] * averages[name]
        # While `weight` falls, the squares of all weights sum to 4/7 of it.
        averages[f"{name}: error"] = math.sqrt(max(0.0, variance * weight * 4 / 7))


def estimate(averages: dict[str, float]) -> tuple[float, bool]:
    """Returns the noise scale in global batches, or NaN; and if it is a lower bound."""
    known = collections.defaultdict[str, float](float, averages)
    noise, signal = known["noise"], known["mean"] - known["noise"]
    if known["mean: count"] < _LEAST_STEPS or noise <= 0:
        return math.nan, False
    error = math.hypot(known["mean: error"], known["noise: error"])
    if is_bound := signal < 3 * error:
        signal += 2 * error
    return (noise / signal if signal > 0 else math.nan), is_bound


def in_words(averages: dict[str, float], images: int) -> str:
    """Says whether global batches above `images` save steps; empty if unknown."""
    scale, is_bound = estimate(averages)
    if not math.isfinite(scale):
        return ""
    about, saved = "at least" if is_bound else "about", 50 * scale / (scale + 1)
    return (
        f"Gradient noise scale: {about} {float(f'{scale * images:.2g}'):,.0f} images. "
        f"Twice the global batch of {images:,}, as with twice the GPUs, would save "
        f"{about} {saved:.0f} % of the steps, with a suitable learning rate; 50 % is "
        "the maximum. A batch far above the noise scale saves few steps."
    )
