"""`python -m cifar10 plan`: estimates a step's memory with and without sections."""

import argparse
import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cifar10.config import data_flag, fields, flags
from cifar10.config.config import Config
from cifar10.errors import say
from cifar10.models.registry import check_name
from cifar10.process import entry_point

if TYPE_CHECKING:
    from cifar10.sections.planning import SectionPlan
    from cifar10.training.assembly import Training

HELP = "estimate the memory of a training step, with and without sections"
DESCRIPTION = """Estimates the memory of a training step with and without sections.

    python -m cifar10 plan --model resnet --batch_size 4096 --num_gpus 4

Traces the step without computing it. On CPUs the estimate is within 25 % of the
memory used; on GPUs, kernels take more. Without a GPU, "a tower's step" is what a
GPU would need besides the variables. Prints which --sections fit into
--memory_limit, or into 85 % of the free memory, and the largest batch that does.
Exit code 1: the batch requested does not fit.
"""

# Training images of CIFAR, whose files a plan does not read.
_EXAMPLES = 50_000


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    parser.usage = "%(prog)s [FLAGS]"  # All flags would make it too long.
    flags.add_flags(parser, fields.ALL, only=fields.PLANNED)
    requested = Config(**flags.parse(parser, words))
    check_name(requested.network.model)
    entry_point.import_tensorflow()
    from cifar10.sections.planning import memory_limit

    training = _assemble(requested)
    placement, planner = training.placement, training.planner
    plans = [*planner.all()]
    limit = memory_limit(requested.memory.memory_limit, placement, planner.bytes_so_far)
    _print(training, plans)
    fitting = [plan for plan in plans if plan.total_bytes <= limit]
    room = f"into {_megabytes(limit)}" if math.isfinite(limit) else "here"
    if not fitting:
        least = _megabytes(min(plan.total_bytes for plan in plans))
        print(f"No plan fits {room}: the smallest takes {least}.")
    elif cuts := fitting[0].cuts:
        print(f"{1 + len(cuts)} sections fit {room}: --sections={','.join(cuts)}")
    else:
        print(f"A step fits {room} without sections (--sections 1).")
    if math.isfinite(limit):
        _print_largest_batch(training, limit, 1 + len(plans[-1].cuts))
    return 0 if fitting else 1


def _assemble(requested: Config) -> "Training":
    """Assembles a training run without sections, on black images instead of CIFAR's."""
    import numpy as np

    from cifar10.input import cifar, records
    from cifar10.input.pictures.arrays import array_dataset
    from cifar10.training.assembly import assemble

    say(f"Building the model {requested.network.model} ...")
    data, dataset = requested.dataset.data, None
    if data in data_flag.NAMES:
        known = cifar.FORMATS["cifar100" if data == "cifar100" else "cifar10"]
        black = np.zeros((_EXAMPLES, *records.IMAGE_SHAPE), np.uint8)
        labels = np.arange(_EXAMPLES) % len(known.class_names)
        found: dict[str, np.ndarray] = {"x_train": black, "y_train": labels}
        dataset = array_dataset(found, "no file", data, None)
        dataset = dataclasses.replace(dataset, class_names=known.class_names)
    # No run's settings or weights, and no trial of XLA, which would compute steps.
    changed = {"fresh": True, "xla": bool(requested.speed.xla), "memory_limit": None}
    of_weights = {"pretrained_rate": 1.0, "warmup_epochs": 0.0}
    planned = requested.with_values(**changed, **of_weights, sections="1")
    return assemble(planned, dataset)


def _print(training: "Training", plans: Sequence["SectionPlan"]) -> None:
    network, planner = training.config.network, training.planner
    parameters = f"{planner.state.model.count_params():,} parameters"
    print(f"{network.model}, {parameters}, {network.precision}")
    print(f"Towers: {training.placement.description}")
    print(f"Variables, averages and optimizer: {_megabytes(planner.variable_bytes)}\n")
    where = "on each GPU" if training.placement.on_gpus else "in all"
    print(f"sections  a tower's step  {where:>11}  cut before")
    for plan in plans:
        row = f"{1 + len(plan.cuts):>8}  {_megabytes(plan.tower_bytes):>14}  "
        row += f"{_megabytes(plan.total_bytes):>11}  {', '.join(plan.cuts)}"
        print(textwrap.fill(row, 80, subsequent_indent=" " * 39).rstrip())
    print()


def _print_largest_batch(training: "Training", limit: float, sections: int) -> None:
    """Prints the flags of the largest batch that fits, whole and in `sections`."""
    config, found = training.config, {0: ""}
    most = len(training.images) // (config.machine.towers * config.batch.accumulate)
    for count, cut in ((1, ""), (sections, f" --sections {sections}")):
        if (size := training.planner.largest_batch(count, limit, most)) > max(found):
            found[size] = f"--batch_size {size}{cut}"
    _, *lines = found.values()
    title = "The largest batch that fits beside the program itself, by this estimate:"
    nothing = ["No batch fits, not even one image."]
    print(*([title, *lines] if lines else nothing), sep="\n  ")


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
