"""Counts the arithmetic of a recipe: convolutions and matrix products, by stage.

    python -m benchmarks.arithmetic --recipe fast

A multiplication and an addition are two operations, as PyTorch's `FlopCounterMode` and
TensorFlow's profiler count. What a trace holds is counted as far as its gradients and
statistics need it; nothing is computed, and neither data nor a GPU is needed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cifar10.process import entry_point

if TYPE_CHECKING:
    import tensorflow as tf

    from cifar10.config.config import ResolvedConfig
    from cifar10.towers.stages import Stage

_IMAGES = 2  # Of a trace; operations of an image are the same in any batch.


class Work(NamedTuple):
    """The arithmetic of one stage."""

    stage: Stage
    steps: int
    per_image: float  # Operations of the towers.
    per_update: float  # Operations that an update takes, whatever the batch.


def count(recipe: str, **values: Any) -> tuple[ResolvedConfig, list[Work]]:
    """Counts the operations of a recipe's stages; `values` override the recipe's."""
    import tensorflow as tf

    from cifar10.config.config import Config
    from cifar10.input import distortions, records
    from cifar10.towers import devices
    from cifar10.training import assembly

    placement = devices.Placement(("/cpu:0",), simulated=False, description="")
    # In float64, filter gradients are always convolutions, which `_of` counts.
    given = {"precision": "float64", **values, "recipe": recipe}
    config = assembly.resolve_config(Config(**given), placement)
    shape = records.IMAGE_SHAPE
    classes = len(records.CIFAR10.class_names)
    state = assembly.build_state(config, "/cpu:0", shape, classes)
    tower = assembly.build_tower(config.loss)
    height, width, channels = distortions.image_shape(config.images.distortions, shape)
    found, begin = [], 0
    for stage in config.all_stages:
        tower.frozen = stage.frozen
        sides = [stage.image_size] * 2 if stage.image_size else [height, width]

        @tf.function(autograph=False)
        def compute(images: tf.Tensor, labels: tf.Tensor) -> list:
            result = tower(state, 0, images, labels)
            return [result.gradients, result.statistics]

        traced = compute.get_concrete_function(
            tf.TensorSpec([_IMAGES, *sides, channels]),
            tf.TensorSpec([_IMAGES], tf.int32),
        )
        gradients = [
            None if g is None else tf.TensorSpec(g.shape, g.dtype)
            for g in traced.structured_outputs[0]
        ]

        @tf.function(autograph=False)
        def update(gradients: list) -> None:
            pairs = zip(gradients, state.model.trainable_variables, strict=True)
            present = [(g, v) for g, v in pairs if g is not None]
            state.optimizer.apply(*map(list, zip(*present, strict=True)))

        written = update.get_concrete_function(gradients).graph
        found.append(
            Work(
                stage,
                stage.end - begin,
                operations(traced.outputs) / _IMAGES,
                sum(map(_of, written.get_operations())),
            )
        )
        begin = stage.end
    return config, found


def operations(needed: Iterable[tf.Tensor]) -> int:
    """Returns how many operations some tensors of a graph take."""
    waiting = [tensor.op for tensor in needed]
    live: dict[str, tf.Operation] = {}
    while waiting:
        op = waiting.pop()
        if op.name not in live:
            live[op.name] = op
            waiting += [tensor.op for tensor in op.inputs] + op.control_inputs
    return sum(map(_of, live.values()))


def _of(op: tf.Operation) -> int:
    """Returns the operations of one node: two for each product that it adds up."""
    shapes = [tensor.shape for tensor in op.inputs]
    if op.type == "Conv2D":
        return 2 * op.outputs[0].shape.num_elements() * math.prod(shapes[1][:3])
    if op.type == "Conv2DBackpropInput":
        return 2 * shapes[2].num_elements() * math.prod(shapes[1][:3])
    if op.type == "Conv2DBackpropFilter":
        return 2 * shapes[2].num_elements() * math.prod(op.outputs[0].shape[:3])
    if op.type == "MatMul":
        inner = shapes[0][0 if op.get_attr("transpose_a") else 1]
        return 2 * op.outputs[0].shape.num_elements() * inner
    return 0


def table(config: ResolvedConfig, works: list[Work]) -> str:
    """Returns a line for each stage, and one for the whole run."""
    lines = ["steps  size  MFLOP an image  MFLOP an update  frozen"]
    total = 0.0
    for work in works:
        total += work.steps * (
            config.global_batch_size * work.per_image + work.per_update
        )
        size = work.stage.image_size or "all"
        lines.append(
            f"{work.steps:>5}  {size:>4}  {work.per_image / 1e6:>14,.1f}  "
            f"{work.per_update / 1e6:>15,.0f}  {', '.join(work.stage.frozen)}"
        )
    images = config.run.max_steps * config.global_batch_size
    return "\n".join(lines) + (
        f"\n{config.run.recipe}: {total / 1e15:.4f} PFLOP for {images:,} images, "
        f"{total / images / 1e6:,.1f} MFLOP an image with the updates"
    )


def main() -> None:
    """Counts what the command line names, and prints it."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--recipe", default="fast", help="name or file of a recipe")
    parser.add_argument("--model", default=argparse.SUPPRESS, help="instead of its own")
    arguments = parser.parse_args()
    entry_point.import_tensorflow()
    given: Mapping[str, Any] = vars(arguments)
    print(table(*count(**given)))


if __name__ == "__main__":
    entry_point.run_program(main)
