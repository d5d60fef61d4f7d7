"""`python -m cifar10 plan`: the memory of a step, and which sections or batch fit."""

import argparse
import bisect
import dataclasses
import json
import math
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10.config import data_flag, fields, flags
from cifar10.config.config import Config
from cifar10.config.options import Checked, names
from cifar10.errors import UsageError, say
from cifar10.models.registry import check_name
from cifar10.process import entry_point, invocation

if TYPE_CHECKING:
    from cifar10.sections.planning import Planner
    from cifar10.training.assembly import Training

HELP = "say how much memory a step takes, and how many sections fit"
DESCRIPTION = """Says how much memory a step takes, plain and in sections.

    python -m cifar10 plan --model resnet --batch_size 4096 --num_gpus 4
    python -m cifar10 plan --model resnet --find_batch

Traces the step without computing it, so it needs neither its memory nor data.
On CPUs the figures are within 25 % of what a step takes; a GPU's kernels take
memory of their own, which is not known here. Without a GPU, what one tower's
step takes is what its GPU would have to hold beside the variables. It says
which --sections fit into --memory_limit, or into 85 % of what is free; exit
code 1 if none does. With --find_batch it says which --batch_size is the largest
that fits there by these figures.
"""

# The flags of a training on which the memory of a step depends.
_FLAGS = {
    *("recipe", "num_gpus", "split_gpu", "batch_size", "global_batch_size"),
    *("accumulate", "model", "depth", "width", "precision", "data", "image_size"),
    *("distortions", "optimizer", "momentum", "clip_norm", "sections", "memory_limit"),
    "variable_device",
}
# Of CIFAR, whose files a plan does not read.
_EXAMPLES = 50_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """What to plan.

    Attributes:
        find_batch: find the largest --batch_size that fits, by estimate
        json: print the plan as JSON, in bytes
    """

    find_batch: bool = False
    json: bool = False


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    parser.usage = "%(prog)s [FLAGS]"  # Their choices alone would fill it.
    flags.add_flags(parser, Options)
    flags.add_flags(parser, fields.ALL, leave_out=names(fields.ALL) - _FLAGS)
    given = flags.parse(parser, words)
    options = Options(**{name: given.pop(name) for name in names(Options) & {*given}})
    config = Config(**given)
    check_name(config.network.model)
    entry_point.import_tensorflow()
    found = plan_step(config, given, find_batch=options.find_batch)
    print(json.dumps(found) if options.json else _text(found))
    return 0 if found["fits"] else 1


def plan_step(
    requested: Config, given: Mapping[str, Any], *, find_batch: bool = False
) -> dict[str, Any]:
    """Returns the memory of a step, plain and in sections, and which of them fit.

    Args:
        requested: The configuration of the training.
        given: The flags of the training.
        find_batch: Whether to plan the largest batch that fits.

    Returns:
        The plan, with sizes in bytes. `most` is the largest batch that the data allows,
        `next` is the command that trains with the batch that was found.
    """
    from cifar10.sections.memory import memory_limit

    if find_batch:
        _check_search(requested, given)
    training = _assemble(requested)
    config, placement, planner = training.config, training.placement, training.planner
    size, sections = config.batch.batch_size, requested.memory.sections
    limit = memory_limit(requested.memory.memory_limit, placement, planner.bytes_so_far)
    found: dict[str, Any] = {}
    if find_batch:
        most = len(training.images) * size // config.global_batch_size
        size = _largest_batch(sections, planner, most, limit)
        planner = _with_batch(planner, max(1, size))
        # A training takes a limit only for --sections auto.
        flags = {**given, "batch_size": size}
        flags.pop("memory_limit", None)
        words = shlex.join(f"--{name}={value}" for name, value in flags.items())
        command = f"{invocation.command('train')} {words}" if size else None
        found = {"most": most, "next": command}
    plans = [planner.choose(None if sections == "auto" else sections)]
    if plans[0].cuts:
        plans.insert(0, planner.plain)
    elif sections != "1":
        plans = [*planner.all()]
    return found | {
        "model": config.network.model,
        "parameters": planner.state.model.count_params(),
        "precision": config.network.precision,
        "batch_size": size,  # 0 if no batch fits; the plans are of one image then.
        "towers": placement.description,
        "on_gpus": placement.on_gpus,
        "limit": limit if math.isfinite(limit) else None,
        "variables": planner.variable_bytes,
        "gradients": planner.gradient_bytes,
        "plans": [{**vars(one), "fits": one.total_bytes <= limit} for one in plans],
        "fits": size > 0 and any(one.total_bytes <= limit for one in plans),
    }


def _assemble(requested: Config) -> "Training":
    """Assembles a training without sections, on black images in place of CIFAR's."""
    import numpy as np

    from cifar10.input import cifar, records
    from cifar10.training.assembly import assemble

    class BlackImages(cifar.BinaryDataset):
        def read(self, split: str) -> tuple[np.ndarray, np.ndarray]:
            del split
            images = np.zeros((_EXAMPLES, *self.image_shape), np.uint8)
            return images, np.zeros(_EXAMPLES, np.int32)

    say(f"Building the model {requested.network.model} ...")
    data, dataset = requested.dataset.data, None
    if data in data_flag.NAMES:
        known = cifar.FORMATS["cifar100" if data == "cifar100" else "cifar10"]
        dataset = BlackImages(
            name=data,
            directory=Path(),
            image_shape=records.IMAGE_SHAPE,
            class_names=known.class_names,
            description="",
        )
    return assemble(requested.replace(sections="1", memory_limit=None), dataset)


def _with_batch(planner: "Planner", size: int) -> "Planner":
    import tensorflow as tf

    say(f"Tracing a step of {size:,} images ...")
    images = tf.TensorSpec([size, *planner.images.shape[1:]])
    return dataclasses.replace(planner, images=images)


def _largest_batch(
    sections: str | None, planner: "Planner", most: int, limit: float
) -> int:
    """Returns the largest batch of a tower that fits; 0 if none does."""
    if math.isinf(limit):
        raise UsageError(
            "--find_batch: the free memory of this device is unknown. Give "
            "--memory_limit."
        )

    def total_bytes(size: int) -> int:
        return _with_batch(planner, size).choose(sections).total_bytes

    return bisect.bisect_right(range(1, most + 1), limit, key=total_bytes)


def _check_search(config: Config, given: Mapping[str, Any]) -> None:
    """Refuses flags of the training that contradict `--find_batch`."""
    for name in {"batch_size", "global_batch_size"} & {*given}:
        raise UsageError(
            f"--{name} {given[name]}: --find_batch chooses it. Remove one of them."
        )
    if config.memory.sections == "auto":
        raise UsageError(
            "--sections auto: the more sections, the larger the batch that fits. "
            "Give --find_batch their number."
        )


def _text(found: Mapping[str, Any]) -> str:
    where = "on each GPU" if found["on_gpus"] else "in all"
    lines = [
        f"{found['model']}, {found['parameters']:,} parameters, {found['precision']}",
        f"Images of a batch: {found['batch_size'] or 1:,}",
        f"Towers: {found['towers']}",
        f"Variables, averages and optimizer: {_megabytes(found['variables'])}",
        f"Gradients in each tower's step: {_megabytes(found['gradients'])}",
        f"\nsections  a tower's step  {where:>11}  cut before",
    ]
    for plan in found["plans"]:
        row = f"{1 + len(plan['cuts']):>8}  {_megabytes(plan['tower_bytes']):>14}  "
        row += f"{_megabytes(plan['total_bytes']):>11}  {', '.join(plan['cuts'])}"
        lines.append(textwrap.fill(row, 80, subsequent_indent=" " * 39).rstrip())
    room = f"Into {_megabytes(found['limit'])}" if found["limit"] else "Here"
    fitting = [plan["cuts"] for plan in found["plans"] if plan["fits"]]
    if "next" in found and not found["fits"]:
        advice = f"{room} no batch fits. Try --sections."
    elif not fitting:
        least = _megabytes(min(plan["total_bytes"] for plan in found["plans"]))
        advice = f"{room} none of these fits; the least is {least}.\nGive a smaller "
        advice += "--batch_size, and --accumulate to make up for it."
    elif "next" in found:
        why = f"{room} no larger batch fits."
        if found["batch_size"] >= found["most"]:
            why = "The training set has no more images."
        advice = f"{why} Next:\n\n    {found['next']}"
    elif not fitting[0]:
        advice = f"{room} a step fits as it is, with --sections 1."
    else:
        cuts = ",".join(fitting[0])
        advice = f"{room} fit {1 + len(fitting[0])} sections: --sections={cuts}"
    return "\n".join([*lines, "", advice])


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
