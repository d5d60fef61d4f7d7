"""`python -m cifar10 plan`: the memory of a step, and which sections or batch fit."""

import argparse
import bisect
import dataclasses
import functools
import json
import math
import multiprocessing
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cifar10.config import data_flag, fields, flags
from cifar10.config.config import Config, ResolvedConfig
from cifar10.config.options import Checked, names
from cifar10.errors import UsageError, say
from cifar10.models.registry import check_name
from cifar10.process import entry_point, invocation

if TYPE_CHECKING:
    from cifar10.sections.planning import Planner
    from cifar10.towers.devices import Placement

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
that fits there, and on GPUs tries a step of it in a process of its own.
"""

# The flags of a training on which the memory of a step depends.
_FLAGS = {
    *("recipe", "num_gpus", "split_gpu", "batch_size", "global_batch_size"),
    *("accumulate", "model", "depth", "width", "precision", "data", "image_size"),
    *("distortions", "optimizer", "momentum", "clip_norm", "sections", "memory_limit"),
    "variable_device",
}
# Of CIFAR, whose data a plan does not read.
_EXAMPLES = 50_000
# After a step that failed on a GPU, the next one has this part of its batch.
_SMALLER = 0.9
_MOST_TRIES = 8
# A step that is compiled for a new GPU takes minutes.
_SECONDS = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """What to plan.

    Attributes:
        find_batch: find the largest --batch_size that fits; on GPUs a step of it is
            tried
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
    if options.find_batch:
        _check_search(config, given)
    entry_point.import_tensorflow()
    if options.find_batch:
        found = find_largest_batch(config, given)
        text = _largest_batch_text(found)
    else:
        found = plan_sections(config)
        text = _sections_text(found)
    print(json.dumps(found) if options.json else text)
    return 0 if found["fits"] else 1


def plan_sections(requested: Config) -> dict[str, Any]:
    """Returns what a step takes in sections, and which of them fit; sizes in bytes."""
    from cifar10.sections.planning import memory_limit

    config, placement, planner_of = _prepare(requested)
    planner = planner_of(config.batch.batch_size)
    limit = memory_limit(config.memory.memory_limit, placement, planner)
    asked = config.memory.sections
    plans = [planner.choose(None if asked == "auto" else asked)]
    if plans[0].places:
        plans.insert(0, planner.plain)
    elif asked != "1":
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


def _sections_text(found: Mapping[str, Any]) -> str:
    where = "on each GPU" if found["on_gpus"] else "in all"
    lines = [
        "{model}, {parameters:,} parameters, {precision}, {batch_size:,} images",
        "Towers: {towers}",
        f"Variables, averages and optimizer: {_megabytes(found['variables'])}",
        f"Gradients in each tower's step: {_megabytes(found['gradients'])}",
        f"\nsections  a tower's step  {where:>11}  cut before",
    ]
    lines = [line.format_map(found) for line in lines]
    for plan in found["plans"]:
        row = f"{1 + len(plan['cuts']):>8}  {_megabytes(plan['tower_bytes']):>14}  "
        row += f"{_megabytes(plan['total_bytes']):>11}  {', '.join(plan['cuts'])}"
        lines.append(textwrap.fill(row, 80, subsequent_indent=" " * 39).rstrip())
    room = f"Into {_megabytes(found['limit'])}" if found["limit"] else "Here"
    fitting = [plan["cuts"] for plan in found["plans"] if plan["fits"]]
    if not fitting:
        least = _megabytes(min(plan["total_bytes"] for plan in found["plans"]))
        advice = f"{room} none of these fits; the least is {least}. Give a smaller "
        advice += "--batch_size, and --accumulate to make up for it."
    elif not fitting[0]:
        advice = f"{room} a step fits as it is, with --sections 1."
    else:
        names = ",".join(fitting[0])
        advice = f"{room} fit {1 + len(fitting[0])} sections: --sections={names}"
    return "\n".join([*lines, "", textwrap.fill(advice, 76)])


def _prepare(
    requested: Config,
) -> tuple[ResolvedConfig, "Placement", Callable[[int], "Planner"]]:
    """Builds the model; the last result plans a step from its batch size."""
    import tensorflow as tf

    from cifar10.input import cifar, datasets, pipeline, records
    from cifar10.sections.planning import Planner
    from cifar10.towers import devices, optimizers
    from cifar10.training import assembly

    say(f"Building the model {requested.network.model} ...")
    placement = devices.place_towers(
        requested.batch.num_gpus, requested.batch.split_gpu
    )
    config = assembly.resolve_config(requested, placement)
    home = devices.variable_device(
        config.speed.variable_device,
        placement,
        computes_much=optimizers.computes_much(config.update.optimizer),
    )
    if config.dataset.data in data_flag.NAMES:  # Known without having them.
        known = cifar.FORMATS.get(config.dataset.data, records.CIFAR10)
        shape, classes = records.IMAGE_SHAPE, known.classes
    else:
        dataset = datasets.find_for(config.values)
        shape, classes = dataset.image_shape, dataset.classes
    state = assembly.build_state(config, home, shape, classes)
    shape = pipeline.image_shape(config.images.distortions, shape)
    tower = assembly.build_tower(config.loss, xla=config.speed.xla)

    def planner_of(batch_size: int) -> Planner:
        say(f"Tracing a step of {batch_size:,} images ...")
        images = tf.TensorSpec([batch_size, *shape])
        return Planner(state, tower, placement.devices, images, config.batch.accumulate)

    return config, placement, planner_of


def _check_search(config: Config, given: Mapping[str, Any]) -> None:
    """Refuses flags of the training that contradict `--find_batch`."""
    for name in {"batch_size", "global_batch_size"} & {*given}:
        raise UsageError(
            f"--{name} {given[name]}: --find_batch finds it. Leave out one of the two."
        )
    if config.memory.sections == "auto":
        raise UsageError(
            "--sections auto: the more sections, the larger the batch that fits. "
            "Give --find_batch their number."
        )


def find_largest_batch(requested: Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """Finds the largest batch of a tower that fits, and on GPUs tries a step of it.

    `given` are the flags of the training. Sizes in the result are in bytes.
    """
    from cifar10.input import datasets
    from cifar10.sections.planning import memory_limit

    requested = requested.replace(batch_size=1, global_batch_size=None)
    config, placement, planner_of = _prepare(requested)
    limit = memory_limit(config.memory.memory_limit, placement, planner_of(1))
    if math.isinf(limit):
        raise UsageError(
            "--find_batch: how much memory is free cannot be found out here. Give "
            "--memory_limit."
        )
    images = _EXAMPLES
    if config.dataset.data not in data_flag.NAMES:
        images = len(datasets.find_for(config.values).read("train")[0])
    most = max(1, images // config.global_batch_size)

    @functools.cache
    def bytes_of(size: int) -> int:
        return planner_of(size).choose(config.memory.sections).total_bytes

    size = bisect.bisect_right(range(1, most + 1), limit, key=bytes_of)
    failed: list[int] = []
    while size and placement.on_gpus:
        if is_possible(requested.replace(batch_size=size)):
            break
        failed.append(size)
        size = int(_SMALLER * size) if len(failed) < _MOST_TRIES else 0
    # A training takes a limit only for --sections auto.
    kept = {name: value for name, value in given.items() if name != "memory_limit"}
    kept["batch_size"] = size
    words = shlex.join(f"--{name}={value}" for name, value in kept.items())
    return {
        "batch_size": size,
        "estimated_bytes": bytes_of(max(1, size)),
        "limit": limit,
        "most": most,
        "failed": failed,
        "on_gpus": placement.on_gpus,
        "next": f"{invocation.command('train')} {words}" if size else None,
        "fits": bool(size),
    }


def _largest_batch_text(found: Mapping[str, Any]) -> str:
    room = f"{_megabytes(found['estimated_bytes'])} of {_megabytes(found['limit'])}"
    lines = [f"--batch_size {size}: its step failed." for size in found["failed"]]
    if found["fits"]:
        source = "a step of it has run" if found["on_gpus"] else "by the estimate"
        lines.append(
            f"--batch_size {found['batch_size']} fits, {source}: about {room}."
        )
        if found["batch_size"] >= found["most"]:
            lines.append("The training set has no more images.")
        lines.append(f"Next: {found['next']}")
    elif not lines:
        lines.append(f"A single image takes {room}: no batch fits. Try --sections.")
    return "\n".join(lines)


def is_possible(config: Config, run: Callable[[Mapping], None] | None = None) -> bool:
    """Returns whether two steps run in a process of their own, which may die of it."""
    say(f"Trying a step with --batch_size {config.batch.batch_size} ...")
    process = multiprocessing.get_context("spawn").Process(
        target=run or run_two_steps, args=(config.values,)
    )
    process.start()
    process.join(_SECONDS)
    if process.is_alive():
        say(f"No answer within {_SECONDS:g} s.")
        process.kill()
        process.join()
    return process.exitcode == 0


def run_two_steps(values: Mapping[str, Any]) -> None:
    """Runs two steps of a training, of which the first chooses how to compute."""
    import tensorflow as tf

    from cifar10.training.assembly import assemble

    training = assemble(Config.from_values(values))
    try:
        with training.open_batches(0, 0) as batches:
            for _ in range(2):
                training.towers.step(batches.get()).tower_losses.numpy()
    except tf.errors.ResourceExhaustedError as error:
        sys.exit(error.message.splitlines()[0])


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
