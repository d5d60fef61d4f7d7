"""What `python -m cifar10 plan` says: the memory of a step, and which sections fit."""

import json
import math
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from cifar10.config.config import Config, ResolvedConfig
from cifar10.errors import say
from cifar10.evaluation.metrics import LINES
from cifar10.process import invocation
from cifar10.sections import assembly as sections
from cifar10.sections.planner import Plan, Planner
from cifar10.tools.plan import largest_batch, step as steps
from cifar10.towers import devices


def report(requested: Config, *, as_json: bool = False) -> tuple[str, bool]:
    """Returns the memory plan of a step as text, and whether something fits."""
    step = steps.build(requested, say)
    config, planner = step.config, step.planner
    limit = sections.memory_limit(config, step.placement, planner)
    plans = _plans(config, planner)
    fitting = [plan for plan in plans if planner.total_bytes(plan) <= limit]
    if as_json:
        return json.dumps(_as_json(step, plans, fitting, limit)), bool(fitting)
    summary = (
        f"{config.network.model}, {step.state.model.count_params():,} parameters, "
        f"{config.network.precision}, {config.batch.batch_size:,} images a batch"
    )
    towers = LINES.fill(f"Towers: {step.placement.description}")
    table = _table(planner, plans, step.placement)
    advice = LINES.fill(_advice(planner, plans, fitting, limit))
    lines = [summary, towers, "", *_fixed(planner), "", *table, "", advice]
    return "\n".join(lines), bool(fitting)


def report_largest_batch(
    requested: Config, given: Mapping[str, Any], *, as_json: bool = False
) -> tuple[str, bool]:
    """Returns the largest batch that fits as text, and whether there is one.

    `given` are the flags of the training.
    """
    found = largest_batch.find(requested, say)
    size = found.batch_size
    # A training takes a limit only for --sections auto.
    kept = {name: value for name, value in given.items() if name != "memory_limit"}
    words = [
        f"--{name}={value}" for name, value in {**kept, "batch_size": size}.items()
    ]
    command = f"{invocation.command('train')} {shlex.join(words)}" if size else None
    if as_json:
        values = {**vars(found), "failures": {**found.failures}, "next": command}
        return json.dumps(values), bool(size)
    room = f"{_megabytes(found.estimated_bytes)} of {_megabytes(found.limit)}"
    lines = [f"--batch_size {at}: {why}" for at, why in found.failures.items()]
    if not size and not found.failures:
        lines.append(f"A single image takes {room}: no batch fits. Try --sections.")
    if size:
        source = "a step of it has run" if found.is_verified else "by the estimate"
        lines.append(f"--batch_size {size} fits, {source}: about {room}.")
        if size >= found.most:
            lines.append("The training set has no more images.")
        lines.append(f"Next: {command}")
    return "\n".join(lines), bool(size)


def _plans(config: ResolvedConfig, planner: Planner) -> list[Plan]:
    requested = None if config.memory.sections == "auto" else config.memory.sections
    chosen = planner.choose(requested, lambda: math.inf)
    if len(chosen.sections) > 1:
        return [planner.plain, chosen]
    return [planner.plain] if config.memory.sections == "1" else list(planner.all())


def _as_json(
    step: steps.Step, plans: list[Plan], fitting: list[Plan], limit: float
) -> dict[str, Any]:
    planner = step.planner
    return {
        "model": step.config.network.model,
        "parameters": step.state.model.count_params(),
        "precision": step.config.network.precision,
        "batch_size": step.config.batch.batch_size,
        "towers": step.placement.description,
        "limit": limit if math.isfinite(limit) else None,
        "variables": planner.variable_bytes(),
        "gradients": planner.gradient_bytes(),
        "plans": [
            {
                "sections": len(plan.sections),
                "cuts": list(plan.cuts),
                "activations": list(plan.activations),
                "tower_bytes": plan.tower_bytes,
                "total_bytes": planner.total_bytes(plan),
                "recomputed": plan.recomputed,
                "fits": plan in fitting,
            }
            for plan in plans
        ],
    }


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
