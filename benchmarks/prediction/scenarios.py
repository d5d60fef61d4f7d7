"""Which averaging on which machines is predicted, for which numbers of GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from benchmarks.prediction import model
from benchmarks.prediction.hardware import Hardware
from benchmarks.prediction.workloads import Workload

GPUS = (1, 2, 4, 8, 16, 32, 64)
CPU, NCCL = "averaging on the CPU", "NCCL all-reduce"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One way to average on one kind of site.

    Attributes:
        method: `CPU` or `NCCL`.
        one_box: Whether all GPUs are in one machine, however many there are.
    """

    method: str
    one_box: bool


SCENARIOS = (
    Scenario(CPU, one_box=True),
    Scenario(NCCL, one_box=True),
    Scenario(CPU, one_box=False),
    Scenario(NCCL, one_box=False),
)


@dataclasses.dataclass(frozen=True)
class Point:
    """What is predicted for one number of GPUs.

    Attributes:
        gpus: Number of GPUs.
        averaging_seconds: What the averaging of a step takes.
        images_per_second: Throughput of all GPUs.
        efficiency: Part of linear scaling that is kept.
    """

    gpus: int
    averaging_seconds: float
    images_per_second: float
    efficiency: float


def averaging_seconds(
    scenario: Scenario, hardware: Hardware, gpus: int, gradient_bytes: float
) -> float:
    """Predicts what the averaging of one step takes, in seconds."""
    gpus_per_machine = gpus if scenario.one_box else hardware.gpus_per_machine
    if scenario.method == NCCL:
        return model.ring_all_reduce_seconds(
            gpus,
            gradient_bytes,
            gpus_per_machine=gpus_per_machine,
            link_bandwidth=hardware.within.bandwidth,
            link_latency=hardware.within.latency,
            network_bandwidth=hardware.network.bandwidth,
            network_latency=hardware.network.latency,
        )
    return model.cpu_averaging_seconds(
        gpus,
        gradient_bytes,
        gpus_per_machine=gpus_per_machine,
        host_link_bandwidth=hardware.host_link.bandwidth,
        host_link_latency=hardware.host_link.latency,
        memory_bandwidth=hardware.memory_bandwidth,
        network_bandwidth=hardware.network.bandwidth,
        network_latency=hardware.network.latency,
    )


def predict(
    workload: Workload,
    scenario: Scenario,
    hardware: Hardware,
    numbers: Sequence[int] = GPUS,
) -> list[Point]:
    """Predicts the throughput for several numbers of GPUs."""
    points = []
    for gpus in numbers:
        seconds = averaging_seconds(scenario, hardware, gpus, workload.gradient_bytes)
        points.append(
            Point(
                gpus,
                seconds,
                model.images_per_second(
                    gpus, workload.batch_size, workload.compute_seconds, seconds
                ),
                model.efficiency(workload.compute_seconds, seconds),
            )
        )
    return points


def most_gpus(points: Sequence[Point], kept: float) -> int:
    """Returns up to which number of GPUs a part of linear scaling is kept."""
    most = points[0].gpus
    for point in points:
        if point.efficiency < kept:
            break
        most = point.gpus
    return most
