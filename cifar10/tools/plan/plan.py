"""What `python -m cifar10 plan` says: the memory of a step, and which sections fit."""

import functools
import math
import sys
import textwrap

from cifar10.config.config import Config, ResolvedConfig
from cifar10.config.data_flag import NAMES
from cifar10.input import cifar, datasets, pipeline, records
from cifar10.scoring.metrics import LINES
from cifar10.sections import assembly as sections
from cifar10.sections.planner import Plan, Planner
from cifar10.towers import devices
from cifar10.training import assembly, settings

# The schedule does not change how much memory an update takes.
_EXAMPLES = 50_000


def report(requested: Config) -> tuple[str, bool]:
    """Returns the memory plan of a step as text, and whether something fits."""
    announce = functools.partial(print, file=sys.stderr, flush=True)
    announce(f"Building the model {requested.model} ...")
    placement = devices.place_towers(requested.num_gpus, requested.split_gpu)
    config = settings.resolve(requested, placement)
    home = devices.variable_device(config.variable_device, placement, config.optimizer)
    shape, classes = _data(config)
    state = assembly.build_state(config, home, shape, classes)
    update = assembly.build_update(config, _EXAMPLES)
    planner = sections.build_planner(
        config,
        placement,
        state,
        assembly.build_tower(config),
        update,
        pipeline.image_shape(config.distortions, shape),
    )
    planner.announce = announce
    limit = sections.memory_limit(config, placement, planner)
    plans = _plans(config, planner)
    fitting = [plan for plan in plans if planner.total_bytes(plan) <= limit]
    summary = (
        f"{config.model}, {state.model.count_params():,} parameters, "
        f"{config.precision}, {config.batch_size:,} images a batch"
    )
    towers = LINES.fill(f"Towers: {placement.description}")
    table = _table(planner, plans, placement)
    advice = LINES.fill(_advice(planner, plans, fitting, limit))
    lines = [summary, towers, "", *_fixed(planner), "", *table, "", advice]
    return "\n".join(lines), bool(fitting)


def _data(config: ResolvedConfig) -> tuple[tuple[int, int, int], int]:
    """Returns the shape of the images and the number of classes."""
    if config.data in NAMES:  # Known without having them.
        known = cifar.FORMATS.get(config.data, records.CIFAR10)
        return records.IMAGE_SHAPE, known.classes
    dataset = datasets.find_for(vars(config))
    return dataset.image_shape, dataset.classes


def _plans(config: ResolvedConfig, planner: Planner) -> list[Plan]:
    requested = None if config.sections == "auto" else config.sections
    chosen = planner.choose(requested, lambda: math.inf)
    if len(chosen.sections) > 1:
        return [planner.plain, chosen]
    return [planner.plain] if config.sections == "1" else list(planner.all())


def _fixed(planner: Planner) -> list[str]:
    sizes = planner.variable_bytes()
    rows = [
        ("variables", sizes["model"], "once"),
        ("moving averages", sizes["averages"], "once"),
        ("optimizer", sizes["optimizer"], "once"),
        ("gradients", planner.gradient_bytes(), "in each tower's step"),
    ]
    return [f"{name:<18}{_megabytes(size):>12}  {note}" for name, size, note in rows]


def _table(
    planner: Planner, plans: list[Plan], placement: devices.Placement
) -> list[str]:
    total = "on each GPU" if placement.on_gpus else "in all"
    head = f"sections  a tower's step  {total:>11}  recomputed  "
    lines = [f"{head}activations of each, MB"]
    for plan in plans:
        kept = " + ".join(f"{size / 1e6:,.0f}" for size in plan.activations)
        row = (
            f"{len(plan.sections):>8}  {_megabytes(plan.tower_bytes):>14}  "
            f"{_megabytes(planner.total_bytes(plan)):>11}  {plan.recomputed:>10.0%}  "
            f"{kept or 'not known'}"
        )
        lines.append(textwrap.fill(row, 80, subsequent_indent=" " * len(head)))
    return lines


def _advice(
    planner: Planner, plans: list[Plan], fitting: list[Plan], limit: float
) -> str:
    room = f"Into {_megabytes(limit)}" if math.isfinite(limit) else "Here"
    why = f" {planner.obstacle}" if planner.obstacle and len(plans) == 1 else ""
    if not fitting:
        least = min(map(planner.total_bytes, plans))
        return (
            f"{room} none of these fits; the least is {_megabytes(least)}. Give a "
            f"smaller --batch_size, and --accumulate to make up for it.{why}"
        )
    if len(fitting[0].sections) == 1:
        return f"{room} a step fits as it is, with --sections 1.{why}"
    names = fitting[0].cuts
    return f"{room} fit {len(names) + 1} sections: --sections={','.join(names)}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
