"""`python -m cifar10 plan`: estimates a step's memory with and without sections."""

import argparse
import dataclasses
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cifar10.config import data_flag, fields, flags
from cifar10.config.config import Config
from cifar10.config.options import names
from cifar10.errors import say
from cifar10.models.registry import check_name
from cifar10.process import entry_point

if TYPE_CHECKING:
    from cifar10.training.assembly import Training

HELP = "estimate the memory of a training step, and in how many sections it fits"
DESCRIPTION = """Estimates the memory of a training step with and without sections.

    python -m cifar10 plan --model resnet --batch_size 4096 --num_gpus 4

Traces the step without computing it, and needs neither that memory nor data. On
CPUs the estimate is within 25 % of what a step takes. On GPUs, kernels take
more memory than that. Without a GPU, the column "a tower's step" is the memory
that a GPU would need in addition to the variables. Prints which --sections fit
into --memory_limit, or into 85 % of the free memory. Exit code 1: none fit.
"""

# The flags that determine the memory of a training step.
_FLAGS = {
    *("recipe", "num_gpus", "split_gpu", "batch_size", "global_batch_size"),
    *("accumulate", "model", "depth", "width", "precision", "data", "image_size"),
    *("distortions", "optimizer", "momentum", "clip_norm", "sections", "memory_limit"),
    "variable_device",
}
# Training images of CIFAR, whose files a plan does not read.
_EXAMPLES = 50_000


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    parser.usage = "%(prog)s [FLAGS]"  # All flags would make it too long.
    text = "print the plan as JSON, with sizes in bytes"
    parser.add_argument("--json", action="store_true", help=text)
    flags.add_flags(parser, fields.ALL, leave_out=names(fields.ALL) - _FLAGS)
    given = flags.parse(parser, words)
    as_json = given.pop("json")
    config = Config(**given)
    check_name(config.network.model)
    entry_point.import_tensorflow()
    found = plan_step(config)
    print(json.dumps(found) if as_json else _text(found))
    return 0 if found["fits"] else 1


def plan_step(requested: Config) -> dict[str, Any]:
    """Plans the memory of a step with and without sections; returns JSON values."""
    from cifar10.sections.planning import memory_limit

    training = _assemble(requested)
    config, placement, planner = training.config, training.placement, training.planner
    sections = requested.memory.sections
    limit = memory_limit(requested.memory.memory_limit, placement, planner.bytes_so_far)
    plans = [planner.choose(None if sections == "auto" else sections)]
    if plans[0].cuts:
        plans.insert(0, planner.plain)
    elif sections != "1":
        plans = [*planner.all()]
    return {
        "model": config.network.model,
        "parameters": planner.state.model.count_params(),
        "precision": config.network.precision,
        "batch_size": config.batch.batch_size,
        "towers": placement.description,
        "on_gpus": placement.on_gpus,
        "limit": limit if math.isfinite(limit) else None,
        "variables": planner.variable_bytes,
        "gradients": planner.gradient_bytes,
        "plans": [{**vars(one), "fits": one.total_bytes <= limit} for one in plans],
        "fits": any(one.total_bytes <= limit for one in plans),
    }


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
    return assemble(requested.replace(sections="1", memory_limit=None), dataset)


def _text(found: Mapping[str, Any]) -> str:
    where = "on each GPU" if found["on_gpus"] else "in all"
    lines = [
        f"{found['model']}, {found['parameters']:,} parameters, {found['precision']}",
        f"Batch size: {found['batch_size']:,}",
        f"Towers: {found['towers']}",
        f"Variables, averages and optimizer: {_megabytes(found['variables'])}",
        f"Gradients in each tower's step: {_megabytes(found['gradients'])}",
        f"\nsections  a tower's step  {where:>11}  cut before",
    ]
    for plan in found["plans"]:
        row = f"{1 + len(plan['cuts']):>8}  {_megabytes(plan['tower_bytes']):>14}  "
        row += f"{_megabytes(plan['total_bytes']):>11}  {', '.join(plan['cuts'])}"
        lines.append(textwrap.fill(row, 80, subsequent_indent=" " * 39).rstrip())
    room = f"into {_megabytes(found['limit'])}" if found["limit"] else "here"
    fitting = [plan["cuts"] for plan in found["plans"] if plan["fits"]]
    if not fitting:
        least = _megabytes(min(plan["total_bytes"] for plan in found["plans"]))
        advice = f"No plan fits {room}: the smallest takes {least}.\nGive a smaller "
        advice += "--batch_size, with --accumulate to make up for it."
    elif not fitting[0]:
        advice = f"A step fits {room} without sections (--sections 1)."
    else:
        cuts = ",".join(fitting[0])
        advice = f"{1 + len(fitting[0])} sections fit {room}: --sections={cuts}"
    return "\n".join([*lines, "", advice])


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
