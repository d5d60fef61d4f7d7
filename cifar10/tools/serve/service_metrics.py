"""The service's metrics for Prometheus."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_HELP = {
    "weights_step": "Training step of the weights in use.",
    "age_seconds": "Seconds since the training had these weights.",
    "swap_seconds": "Seconds that the last change of weights took.",
    "swaps_total": "Changes of weights.",
    "refused_total": "Refused checkpoints.",
    "waiting": "Requests that are being predicted or wait for it.",
}


class ServiceMetrics(Collector):
    """Counters of the answers, and the state of the served model.

    `state` returns the current values by the names in `_HELP`, or None if unknown.
    """

    def __init__(self, state: Callable[[], dict[str, float | None]]) -> None:
        self._state = state
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.answers = Counter(
            "cifar10_answers",
            "Answers to prediction requests.",
            ["status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "cifar10_answer_seconds",
            "Seconds from a request's headers to its answer.",
            registry=self.registry,
        )

    def collect(self) -> Iterable[Metric]:
        """Yields the state of the served model."""
        for name, value in self._state().items():
            if value is not None:
                is_counter = name.endswith("_total")
                family = CounterMetricFamily if is_counter else GaugeMetricFamily
                yield family(f"cifar10_{name}", _HELP[name], value=value)
