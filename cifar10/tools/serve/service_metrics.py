"""What a service says about itself, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

# Seconds; an image takes milliseconds, a queue makes seconds of them.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_HELP = {
    "weights_step": "Step of the weights that answer.",
    "age_seconds": "Since the training had these weights.",
    "swap_seconds": "What it took to put these weights in place.",
    "swaps_total": "How often weights were put in place.",
    "refused_total": "Checkpoints that were refused.",
    "waiting": "Requests that are at work or wait for it.",
}


class ServiceMetrics:
    """Counts answers, and tells what a copy of a model is doing.

    Args:
        now: Returns the numbers of the moment by the names in `_HELP`, None for those
            that there are not; names that end in `_total` only ever grow.
    """

    def __init__(self, now: Callable[[], dict[str, float | None]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(now))
        self._answers = Counter(
            "cifar10_answers",
            "Answers to requests for a prediction.",
            ["status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "cifar10_answer_seconds",
            "From a request's headers to its answer.",
            buckets=_BUCKETS,
            registry=self._registry,
        )

    def count(self, status: int, seconds: float) -> None:
        """Counts an answer.

        Args:
            status: Its HTTP status.
            seconds: What it took.
        """
        self._answers.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """Returns all of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    """The numbers of the moment."""

    def __init__(self, now: Callable[[], dict[str, float | None]]) -> None:
        self._now = now

    def collect(self) -> Iterable[Metric]:
        for name, value in self._now().items():
            if value is None:
                continue
            grows = name.endswith("_total")
            family = CounterMetricFamily if grows else GaugeMetricFamily
            yield family(f"cifar10_{name}", _HELP[name], value=value)
