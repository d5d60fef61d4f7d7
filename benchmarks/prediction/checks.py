"""Predictions beside what was measured, here or by others."""

from __future__ import annotations

import dataclasses

from benchmarks.prediction import model
from benchmarks.prediction.hardware import LINKS
from benchmarks.prediction.workloads import REFERENCES


@dataclasses.dataclass(frozen=True)
class Check:
    """A prediction beside a measurement.

    Attributes:
        what: What was done.
        predicted: Seconds, or images a second if `is_rate`.
        measured: The same; of several times the least, which others who use the
            machine disturb least.
        median: The same, the median of them.
        is_rate: Whether the figures are images a second.
    """

    what: str
    predicted: float
    measured: float
    median: float
    is_rate: bool = False

    @property
    def deviation(self) -> float:
        """How far the measurement lies above the prediction, as a part of it."""
        return self.measured / self.predicted - 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """What averages and copies in this machine's memory took.

    Attributes:
        bandwidth: Bytes a second of the sum of two large tensors, at best.
        call_seconds: What a call takes that moves nothing, at least.
        repeats: How often everything was timed.
        checks: Averages and copies for numbers of towers.
    """

    bandwidth: float
    call_seconds: float
    repeats: int
    checks: list[Check]


def published_checks() -> list[Check]:
    """Predicts what others measured on 8 GPUs of one machine, from their 1 GPU."""
    gpus, link = 8, LINKS["nvlink3"]
    checks = []
    for workload in REFERENCES:
        if workload.on_eight_gpus is None:
            continue
        averaging = model.ring_all_reduce_seconds(
            gpus,
            workload.gradient_bytes,
            gpus_per_machine=gpus,
            link_bandwidth=link.bandwidth,
            link_latency=link.latency,
            network_bandwidth=link.bandwidth,
            network_latency=link.latency,
        )
        predicted = model.images_per_second(
            gpus, workload.batch_size, workload.compute_seconds, averaging
        )
        rate = workload.on_eight_gpus
        what = f"{workload.name}: {gpus} GPUs, NCCL over NVLink"
        checks.append(Check(what, predicted, rate, rate, is_rate=True))
    return checks
