"""One step that trains a model whole, in sections, or with tf.recompute_grad."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals import common
from cifar10.config.config import Config
from cifar10.process import entry_point

_FEW = 8
_STATUS = Path("/proc/self/status")


def start(**options: Any) -> Sectioned:
    """Builds the step; the options are the arguments of `Sectioned`."""
    entry_point.import_tensorflow()
    return Sectioned(**options)


class Sectioned:
    """A run of one tower, ready to step.

    Args:
        model: As `--model`.
        sections: How many sections.
        recomputed: Whether `tf.recompute_grad` computes all but the last of them again,
            within one function.
        precision: As `--precision`.
        images: floating [count, height, width, channels], some batches in a row.
        labels: int32 [count].
        batch_size: Images of a batch.
        warm: Whether memory is counted from after a step with a few images, which
            leaves out the program, and not from before the first step.
    """

    def __init__(
        self,
        *,
        model: str,
        sections: int,
        recomputed: bool,
        precision: str,
        images: np.ndarray,
        labels: np.ndarray,
        batch_size: int,
        warm: bool,
    ) -> None:
        import tensorflow as tf

        from cifar10.model import inference, loss
        from cifar10.towers.towers import Tower, TowerBuilder
        from cifar10.training import assembly

        config = Config(
            model=model,
            precision=precision,
            num_gpus=1,
            batch_size=batch_size,
            sections="1" if recomputed else str(sections),
            distortions="none",
        )
        dataset = common.black_images(images.shape[1:], batch_size)
        training = assembly.assemble(config, dataset)
        self._device = training.placement.devices[0]
        self.precision = training.config.network.precision
        plan = training.planner.into(sections)
        # The variables are there before the start.
        self._planned = plan.total_bytes - training.planner.variable_bytes
        self._builder = training.towers
        if recomputed:
            infer = functools.partial(_infer_recomputed, inference, plan.starts)
            self._builder = TowerBuilder(
                training.towers.state,
                training.placement.devices,
                tower=Tower(infer, loss),
                update=assembly.build_update(training.config, batch_size),
            )
        self._batches = [
            (images[place : place + batch_size], labels[place : place + batch_size])
            for place in range(0, len(images) - batch_size + 1, batch_size)
        ]
        self._steps = 0
        if warm:
            few = images[:_FEW], labels[:_FEW]
            self._builder.step([tuple(map(tf.identity, few))]).tower_losses.numpy()
        self._before = _reset_peak(self._device)

    def plan(self) -> int:
        """Returns the planned bytes."""
        return self._planned

    def step(self) -> dict[str, float]:
        """Runs one step.

        Returns:
            Its `seconds` and its `loss`, and the `peak`: the most bytes that steps have
            taken so far, above those before them.
        """
        import tensorflow as tf

        batch = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        with tf.device(self._device):
            images, labels = map(tf.identity, batch)
        began = time.perf_counter()
        result = self._builder.step([(images, labels)])
        last = float(result.metrics["total_loss"])
        seconds = time.perf_counter() - began
        common.insist_on_finite(last)
        peak = _peak(self._device) - self._before
        return {"seconds": seconds, "loss": last, "peak": peak}


def _infer_recomputed(
    infer: Any,
    starts: Sequence[int],
    model: Any,
    trainable: list,
    non_trainable: list,
    inputs: Any,
    *,
    training: bool,
) -> tuple:
    """Infers by TensorFlow's own way to less memory: `tf.recompute_grad`.

    It is right only for models without dropout: `tf.recompute_grad` takes floating
    arguments, and so the states of random generators are read anew.
    """
    import tensorflow as tf

    from cifar10.sections.cutting import cut

    def compute(section: Any, structure: list, *arguments: tf.Tensor) -> tuple:
        variables, start, taken = tf.nest.pack_sequence_as(structure, arguments)
        outputs, statistics, penalties = infer(
            section, variables, start, taken, training=training
        )
        pairs = zip(start, statistics, strict=False)
        kept = [old if new is None else new for old, new in pairs]
        return outputs, kept, penalties

    values = {id(model.inputs[0]): inputs}
    penalties: list[tf.Tensor] = []
    sections = cut(model, starts)
    for section in sections:
        taken = [values[id(tensor)] for tensor in section.input_tensors]
        structure = [trainable, non_trainable, taken]
        computed = functools.partial(compute, section, structure)
        if section is not sections[-1]:
            computed = tf.recompute_grad(computed)
        outputs, non_trainable, own = computed(*tf.nest.flatten(structure))
        values |= zip(map(id, section.output_tensors), outputs, strict=True)
        penalties += own
    return outputs[0], [*non_trainable, *[None] * len(trainable)], penalties


def _reset_peak(device: str) -> int:
    """Forgets earlier peaks; returns the bytes that are taken now."""
    if device.startswith("/gpu"):
        import tensorflow as tf

        tf.config.experimental.reset_memory_stats(device[1:].upper())
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak(device)


def _peak(device: str) -> int:
    if device.startswith("/gpu"):
        import tensorflow as tf

        return tf.config.experimental.get_memory_info(device[1:].upper())["peak"]
    kilobytes = re.search(r"VmHWM:\s+(\d+)", _STATUS.read_text(encoding="ascii"))
    return int(kilobytes[1]) * 1024
