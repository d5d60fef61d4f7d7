"""The prediction's limits, its flags, and that what it measures is what it says."""

import json
import math
import sys

import pytest
import tensorflow as tf

from benchmarks import scaling
from benchmarks.prediction import hardware, model, plot, report, scenarios
from benchmarks.prediction.checks import Check, published_checks
from benchmarks.prediction.hardware import LINKS, Hardware
from benchmarks.prediction.scenarios import CPU, NCCL, SCENARIOS, Scenario
from benchmarks.prediction.workloads import GIVEN, REFERENCES, Workload

BYTES = 4e6
RING = {
    "gpus_per_machine": 8,
    "link_bandwidth": 100e9,
    "link_latency": 3e-6,
    "network_bandwidth": 10e9,
    "network_latency": 10e-6,
}
HOST = {
    "gpus_per_machine": 8,
    "host_link_bandwidth": 25e9,
    "host_link_latency": 5e-6,
    "memory_bandwidth": 100e9,
    "network_bandwidth": 10e9,
    "network_latency": 10e-6,
}
INFINITE_RING = {
    **RING,
    "link_bandwidth": math.inf,
    "link_latency": 0.0,
    "network_bandwidth": math.inf,
    "network_latency": 0.0,
}
INFINITE_HOST = {
    **HOST,
    "host_link_bandwidth": math.inf,
    "host_link_latency": 0.0,
    "memory_bandwidth": math.inf,
    "network_bandwidth": math.inf,
    "network_latency": 0.0,
}
MACHINES = Hardware(
    8,
    LINKS["pcie4"],
    LINKS["nvlink3"],
    LINKS["ethernet100"],
    hardware.HOST_MEMORY_BANDWIDTH,
)
WORKLOAD = Workload("small", 4_000_000, 128, 1e-3, GIVEN, "a test")


def test_one_gpu_is_compute_only():
    assert model.ring_all_reduce_seconds(1, BYTES, **RING) == 0
    assert model.cpu_averaging_seconds(1, BYTES, **HOST) == 0
    assert model.images_per_second(1, 128, 0.5, 0.0) == 256


@pytest.mark.parametrize("gpus", [1, 2, 7, 8, 9, 64])
def test_without_limits_of_links_scaling_is_linear(gpus):
    for seconds in (
        model.ring_all_reduce_seconds(gpus, BYTES, **INFINITE_RING),
        model.cpu_averaging_seconds(gpus, BYTES, **INFINITE_HOST),
    ):
        assert seconds == 0
        assert model.images_per_second(gpus, 128, 0.5, seconds) == gpus * 256
        assert model.efficiency(0.5, seconds) == 1


def test_ring_by_hand():
    """Four GPUs of one machine: 6 steps of a quarter of the gradients."""
    seconds = model.ring_all_reduce_seconds(4, BYTES, **RING)

    assert seconds == pytest.approx(6 * (1e6 / 100e9) + 6 * 3e-6)


def test_averaging_on_the_cpu_by_hand():
    """Two GPUs: sends at 25 GB/s each, 5 passes over the gradients, copies back."""
    seconds = model.cpu_averaging_seconds(2, BYTES, **HOST)

    send = 5e-6 + 4e6 / 25e9
    assert seconds == pytest.approx(2 * send + 5 * 4e6 / 100e9)


def test_sends_share_the_memory_of_the_host():
    """Eight GPUs could send 200 GB/s, the host takes 100."""
    seconds = model.cpu_averaging_seconds(8, BYTES, **HOST)

    send = 5e-6 + 8 * 4e6 / 100e9
    assert seconds == pytest.approx(2 * send + 11 * 4e6 / 100e9)


def test_averaging_on_the_cpu_saturates_and_the_ring_does_not():
    host = {**HOST, "gpus_per_machine": 10_000, "host_link_latency": 0.0}
    ring = {**RING, "gpus_per_machine": 10_000, "link_latency": 0.0}
    compute, batch_size = 1e-3, 128

    def on_cpu(gpus):
        averaging = model.cpu_averaging_seconds(gpus, BYTES, **host)
        return model.images_per_second(gpus, batch_size, compute, averaging)

    def in_ring(gpus):
        averaging = model.ring_all_reduce_seconds(gpus, BYTES, **ring)
        return model.images_per_second(gpus, batch_size, compute, averaging)

    # Every GPU costs the memory three passes over its gradients: in, sum, back.
    limit = batch_size * 100e9 / (3 * BYTES)
    assert on_cpu(10_000) == pytest.approx(limit, rel=0.01)
    assert on_cpu(10_000) < 1.01 * on_cpu(5_000)
    # The ring's time approaches two passes over a link, however long the ring.
    assert in_ring(10_000) == pytest.approx(
        10_000 * batch_size / (compute + 2 * BYTES / 100e9), rel=0.01
    )
    assert in_ring(10_000) == pytest.approx(2 * in_ring(5_000), rel=0.01)


def test_several_machines_are_bounded_by_the_network():
    inside = model.ring_all_reduce_seconds(8, BYTES, **RING)
    across = model.ring_all_reduce_seconds(16, BYTES, **RING)
    faster_inside = model.ring_all_reduce_seconds(
        16, BYTES, **{**RING, "link_bandwidth": math.inf}
    )

    assert across == pytest.approx(30 / 16 * 4e6 / 10e9 + 28 * 3e-6 + 2 * 10e-6)
    assert across == faster_inside > inside
    assert model.cpu_averaging_seconds(16, BYTES, **HOST) == pytest.approx(
        model.cpu_averaging_seconds(8, BYTES, **HOST) + 4e6 / 10e9 + 2 * 10e-6
    )


def test_machines_with_one_gpu_each_know_no_link_but_the_network():
    alone = {**RING, "gpus_per_machine": 1, "link_bandwidth": 1.0, "link_latency": 1.0}

    seconds = model.ring_all_reduce_seconds(4, BYTES, **alone)

    assert seconds == pytest.approx(1.5 * 4e6 / 10e9 + 6 * 10e-6)


@pytest.mark.parametrize(
    ("gpus", "per_machine", "machines"), [(1, 8, 1), (8, 8, 1), (9, 8, 2), (64, 8, 8)]
)
def test_machines_needed(gpus, per_machine, machines):
    assert model.machines(gpus, per_machine) == machines


def test_memory_in_passes():
    assert model.memory_average_seconds(1, 10, 5) == 0
    assert model.memory_average_seconds(4, 10, 5) == 14
    assert model.memory_copies_seconds(4, 10, 5) == 16


def test_least_compute_time_keeps_what_it_says():
    least = model.least_compute_seconds(0.2, 0.9)

    assert least == pytest.approx(1.8)
    assert model.efficiency(least, 0.2) == pytest.approx(0.9)


def test_one_box_has_no_network_and_small_sites_are_one_box():
    slow = Hardware(
        8,
        MACHINES.host_link,
        MACHINES.within,
        hardware.parse_link("--network", "0.001:1000"),
        MACHINES.memory_bandwidth,
    )
    for method in (CPU, NCCL):
        box = scenarios.predict(WORKLOAD, Scenario(method, one_box=True), slow)
        site = scenarios.predict(WORKLOAD, Scenario(method, one_box=False), slow)

        assert [point.gpus for point in box] == [1, 2, 4, 8, 16, 32, 64]
        assert box[:4] == site[:4]
        assert box[4].images_per_second > 100 * site[4].images_per_second


def test_most_gpus_stops_at_the_first_that_does_not_keep_it():
    points = scenarios.predict(WORKLOAD, Scenario(CPU, one_box=True), MACHINES)
    kept = [point.efficiency for point in points]

    assert kept == sorted(kept, reverse=True)
    assert scenarios.most_gpus(points, kept[2]) == points[2].gpus
    assert scenarios.most_gpus(points, 1.0) == 1


def test_prediction_is_near_what_was_published():
    """Not above: the measured rates also pay for the input."""
    checks = published_checks()

    assert len(checks) == 2
    assert all(-0.15 < check.deviation < 0 for check in checks)


def test_deviation_is_of_the_prediction():
    assert Check("it", 2.0, 3.0, 4.0).deviation == 0.5


def test_report_says_what_is_measured_and_what_is_predicted():
    content = [WORKLOAD, *REFERENCES], MACHINES, None, published_checks(), {"date": "x"}
    text = report.markdown(*content)
    figures = json.loads(json.dumps(report.as_json(*content)))

    assert "none was measured on several GPUs" in text
    assert "given by --step_ms: a test" in text
    assert "Nothing was measured here" in text
    for workload in REFERENCES:
        assert f"## {workload.name}\n\nPredicted images/s" in text
        assert f"{workload.kind}: {workload.source}" in text
    assert len(figures["predicted"]) == (1 + len(REFERENCES)) * len(SCENARIOS) * 7
    one = next(row for row in figures["predicted"] if row["gpus"] == 8)
    assert f"| 8 | {one['images_per_second']:,.0f} (" in text


def test_program_measures_and_writes(monkeypatch, tmp_path, capsys):
    """The whole program, on the logical devices of the tests."""
    tf.config.list_logical_devices()  # TensorFlow starts, with the tests' four CPUs.
    figures = tmp_path / "x.json"
    flags = ["--batch_size", "2", "--repeats", "1", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags])

    scaling.main()

    text = capsys.readouterr().out
    written = json.loads(figures.read_text())
    own = written["workloads"][0]
    assert own["gradient_bytes"] == 4 * 1_068_298
    assert own["kind"] == "measured here"
    assert own["compute_seconds"] > 0
    assert [check["what"] for check in written["memory_measured_here"]["checks"]] == [
        "nothing to average: 1 gradient",
        "average of 2 gradients",
        "average of 4 gradients",
        "1 copy of the variables",
        "2 copies of the variables",
        "4 copies of the variables",
    ]
    assert "| average of 4 gradients | " in text


def test_plot_has_a_panel_for_each_model(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    titles = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.set_title",
        lambda axes, text, **style: titles.append((text, len(axes.lines))),
    )

    plot.draw([WORKLOAD, *REFERENCES], MACHINES, tmp_path / "x.png")

    assert titles[0] == ("small\n1.00 ms a step (given by --step_ms)", 5)
    assert len(titles) == 1 + len(REFERENCES)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
