"""The prediction in Markdown and JSON; every figure says whether it was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.prediction import model
from benchmarks.prediction.checks import Check, Memory
from benchmarks.prediction.hardware import Hardware
from benchmarks.prediction.scenarios import (
    CPU,
    SCENARIOS,
    Scenario,
    averaging_seconds,
    most_gpus,
    predict,
)
from benchmarks.prediction.workloads import Workload

# Below this, another GPU is mostly wasted on waiting: the figure of the verdicts.
KEPT = 0.9
_GPUS_IN_A_BOX, _GPUS_ON_MACHINES = 8, 32
_MEGA, _GIGA, _MILLI, _MICRO = 1e6, 1e9, 1e-3, 1e-6


def markdown(
    workloads: Sequence[Workload],
    hardware: Hardware,
    memory: Memory | None,
    published: Sequence[Check],
    about: dict[str, str],
) -> str:
    """Returns the whole report.

    Args:
        workloads: Models to predict.
        hardware: Machines to predict for.
        memory: What was measured in this machine's memory; None if nothing was.
        published: Predictions beside what others measured.
        about: Where and with what this was made, by name.
    """
    parts = [
        "# Predicted scaling",
        "; ".join(f"{name}: {value}" for name, value in about.items()),
        (
            "A step is the compute time of one tower and then the averaging of all "
            "gradients; input, update and overlap of the two are not predicted. Every "
            "throughput below is predicted, none was measured on several GPUs."
        ),
        "## What goes in",
        _inputs(workloads),
        _links(hardware),
    ]
    for workload in workloads:
        parts += [f"## {workload.name}", _table(workload, hardware)]
    parts += ["## When it scales", _verdicts(workloads, hardware)]
    parts += ["## Checked against what can be measured", _checks(memory, published)]
    return "\n\n".join(parts)


def as_json(
    workloads: Sequence[Workload],
    hardware: Hardware,
    memory: Memory | None,
    published: Sequence[Check],
    about: dict[str, str],
) -> dict[str, Any]:
    """Returns the same as `markdown` in SI units: seconds, bytes, bytes a second."""
    return {
        "about": about,
        "hardware": dataclasses.asdict(hardware),
        "workloads": [dataclasses.asdict(workload) for workload in workloads],
        "predicted": [
            {
                "workload": workload.name,
                "method": scenario.method,
                "one_box": scenario.one_box,
                **dataclasses.asdict(point),
            }
            for workload in workloads
            for scenario in SCENARIOS
            for point in predict(workload, scenario, hardware)
        ],
        "memory_measured_here": memory
        and {
            "bandwidth": memory.bandwidth,
            "call_seconds": memory.call_seconds,
            "repeats": memory.repeats,
            "checks": [_with_deviation(check) for check in memory.checks],
        },
        "published": [_with_deviation(check) for check in published],
    }


def title(scenario: Scenario, hardware: Hardware) -> str:
    """Returns what a column or a line of the plot is called."""
    site = (
        "one box"
        if scenario.one_box
        else f"{hardware.gpus_per_machine} to a machine, {hardware.network.name}"
    )
    link = hardware.host_link if scenario.method == CPU else hardware.within
    return f"{scenario.method} ({link.name}), {site}"


def _with_deviation(check: Check) -> dict[str, Any]:
    return {**dataclasses.asdict(check), "deviation": check.deviation}


def _inputs(workloads: Sequence[Workload]) -> str:
    lines = [
        (
            "| model | gradients | images a step and GPU | compute a step | which is | "
            "operations per byte of gradients |"
        ),
        "| --- | ---: | ---: | ---: | --- | ---: |",
    ]
    for one in workloads:
        megabytes = one.gradient_bytes / _MEGA
        intensity = (
            f"{one.operations / one.gradient_bytes:,.0f}" if one.operations else ""
        )
        lines.append(
            f"| {one.name} | {megabytes:,.1f} MB | {one.batch_size:,} | "
            f"{one.compute_seconds / _MILLI:,.2f} ms | {one.kind}: {one.source} | "
            f"{intensity} |"
        )
    return "\n".join(lines)


def _links(hardware: Hardware) -> str:
    lines = [
        "| link | | one way | latency | source |",
        "| --- | --- | --- | --- | --- |",
    ]
    for place, link in (
        ("GPU to host", hardware.host_link),
        ("GPU to GPU", hardware.within),
        ("machine to machine", hardware.network),
    ):
        lines.append(
            f"| {place} | {link.name} | {link.bandwidth / _GIGA:,.1f} GB/s | "
            f"{link.latency / _MICRO:,.1f} us | {link.source} |"
        )
    memory = hardware.memory_bandwidth / _GIGA
    lines.append(f"| host's memory | | {memory:,.1f} GB/s | | see --memory_gb_s |")
    return "\n".join(lines)


def _table(workload: Workload, hardware: Hardware) -> str:
    """Returns a row for each number of GPUs, a column for each scenario."""
    titles = [title(scenario, hardware) for scenario in SCENARIOS]
    columns = [predict(workload, scenario, hardware) for scenario in SCENARIOS]
    lines = [
        "Predicted images/s, and the part of linear scaling that is kept:",
        "",
        f"| GPUs | {' | '.join(titles)} |",
        "| ---: |" + " ---: |" * len(titles),
    ]
    for row in zip(*columns, strict=True):
        cells = [
            f"{point.images_per_second:,.0f} ({point.efficiency:.0%})" for point in row
        ]
        lines.append(f"| {row[0].gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdicts(workloads: Sequence[Workload], hardware: Hardware) -> str:
    """Says how far each model scales, and what compute time would be enough."""
    titles = [title(scenario, hardware) for scenario in SCENARIOS]
    lines = [
        (
            f"Predicted: up to how many GPUs {KEPT:.0%} of linear scaling is kept; and "
            "the least that a GPU has to compute in a step to keep it on "
            f"{_GPUS_IN_A_BOX} GPUs of one box, or on {_GPUS_ON_MACHINES} of several "
            "machines. A model whose step computes for less does not scale there."
        ),
        "",
        f"| model (compute a step) | {' | '.join(titles)} |",
        "| --- |" + " ---: |" * len(titles),
    ]
    for workload in workloads:
        cells = []
        for scenario in SCENARIOS:
            most = most_gpus(predict(workload, scenario, hardware), KEPT)
            gpus = _GPUS_IN_A_BOX if scenario.one_box else _GPUS_ON_MACHINES
            least = model.least_compute_seconds(
                averaging_seconds(scenario, hardware, gpus, workload.gradient_bytes),
                KEPT,
            )
            unit = "GPU" if most == 1 else "GPUs"
            cells.append(f"{most} {unit}; {least / _MILLI:,.1f} ms")
        compute = f"{workload.compute_seconds / _MILLI:,.1f} ms"
        lines.append(f"| {workload.name} ({compute}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def _checks(memory: Memory | None, published: Sequence[Check]) -> str:
    lines = [
        "| what | predicted | measured, least (median) | deviation |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [_check(check) for check in (memory.checks if memory else [])]
    lines += [_check(check) for check in published]
    if memory is None:
        said = "Nothing was measured here, because of --repeats 0."
    else:
        said = (
            "Times were measured here, on logical devices of this CPU. They are "
            f"predicted from two other measurements: {memory.bandwidth / _GIGA:,.1f} "
            "GB/s, at which two large tensors are added, and "
            f"{memory.call_seconds / _MILLI:,.2f} ms for a call that moves nothing; of "
            f"{memory.repeats} times each, the least counts. What fits into the "
            "processor's caches is faster than its memory, and a sum of many tensors "
            "slower than one of two."
        )
    return (
        f"{said} Rates are published ones; the prediction leaves out the input, which "
        "they include.\n\n" + "\n".join(lines)
    )


def _check(check: Check) -> str:
    if check.is_rate:
        predicted, measured = f"{check.predicted:,.0f}", f"{check.measured:,.0f}"
        figures = f"{predicted} images/s | {measured} images/s, published"
    else:
        predicted, measured, median = (
            f"{seconds / _MILLI:,.2f}"
            for seconds in (check.predicted, check.measured, check.median)
        )
        figures = f"{predicted} ms | {measured} ({median}) ms"
    return f"| {check.what} | {figures} | {check.deviation:+.0%} |"
