"""The prediction's limits, its flags, and that what it measures is what it says."""

import dataclasses
import json
import math
import sys

import pytest

import runs
from benchmarks import scaling
from benchmarks.prediction import hardware, model, plot, report, scenarios
from benchmarks.prediction.checks import published_checks
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
MACHINES = Hardware(
    8,
    LINKS["pcie4"],
    LINKS["nvlink3"],
    LINKS["ethernet100"],
    hardware.HOST_MEMORY_BANDWIDTH,
)
WORKLOAD = Workload("small", 4_000_000, 128, 1e-3, GIVEN, "a test")


def ring(gpus, **changes):
    return model.ring_all_reduce_seconds(gpus, BYTES, **{**RING, **changes})


def on_cpu(gpus, **changes):
    return model.cpu_averaging_seconds(gpus, BYTES, **{**HOST, **changes})


@pytest.mark.parametrize("gpus", [1, 2, 7, 9, 64])
def test_without_limits_of_links_scaling_is_linear(gpus):
    free = {
        name: 0.0 if "latency" in name else math.inf
        for name in {**RING, **HOST}
        if name != "gpus_per_machine"
    }
    for seconds in (
        ring(gpus, **{name: free[name] for name in free if name in RING}),
        on_cpu(gpus, **{name: free[name] for name in free if name in HOST}),
    ):
        assert seconds == 0
        assert model.images_per_second(gpus, 128, 0.5, seconds) == gpus * 256
        assert model.efficiency(0.5, seconds) == 1


def test_seconds_of_averaging_by_hand():
    assert ring(1) == on_cpu(1) == 0
    # Four GPUs of a machine: 6 steps of a quarter of the gradients.
    assert ring(4) == pytest.approx(6 * (1e6 / 100e9) + 6 * 3e-6)
    # Two GPUs: sends at 25 GB/s each, 5 passes over the gradients, copies back.
    send = 5e-6 + 4e6 / 25e9
    assert on_cpu(2) == pytest.approx(2 * send + 5 * 4e6 / 100e9)
    # Eight could send 200 GB/s, the host takes 100.
    send = 5e-6 + 8 * 4e6 / 100e9
    assert on_cpu(8) == pytest.approx(2 * send + 11 * 4e6 / 100e9)
    # The network bounds several machines, whatever is within them.
    expected = 30 / 16 * 4e6 / 10e9 + 28 * 3e-6 + 2 * 10e-6
    assert ring(16) == ring(16, link_bandwidth=math.inf) == pytest.approx(expected)
    assert on_cpu(16) == pytest.approx(on_cpu(8) + 4e6 / 10e9 + 2 * 10e-6)
    alone = ring(4, gpus_per_machine=1, link_bandwidth=1.0, link_latency=1.0)
    assert alone == pytest.approx(1.5 * 4e6 / 10e9 + 6 * 10e-6)


def test_prediction_stops_at_the_network_and_counts_those_that_scale():
    network = hardware.parse_link("--network", "0.001:1000")
    slow = dataclasses.replace(MACHINES, network=network)
    for method in (CPU, NCCL):
        box = scenarios.predict(WORKLOAD, Scenario(method, one_box=True), slow)
        site = scenarios.predict(WORKLOAD, Scenario(method, one_box=False), slow)
        assert [point.gpus for point in box] == [1, 2, 4, 8, 16, 32, 64]
        assert box[:4] == site[:4]
        assert box[4].images_per_second > 100 * site[4].images_per_second
    points = scenarios.predict(WORKLOAD, Scenario(CPU, one_box=True), MACHINES)
    kept = [point.efficiency for point in points]
    assert kept == sorted(kept, reverse=True)
    assert scenarios.most_gpus(points, kept[2]) == points[2].gpus
    assert scenarios.most_gpus(points, 1.0) == 1


def test_prediction_is_near_published_rates():
    """Not above: the measured rates also pay for the input."""
    checks = published_checks()
    assert len(checks) == 2
    assert all(-0.15 < check.deviation < 0 for check in checks)


def test_report_and_plot_have_every_model(tmp_path):
    workloads = [WORKLOAD, *REFERENCES]
    content = workloads, MACHINES, None, published_checks(), {"date": "x"}
    text = report.markdown(*content)
    figures = json.loads(json.dumps(report.as_json(*content)))
    for workload in REFERENCES:
        assert f"## {workload.name}\n" in text
        assert f"{workload.kind}: {workload.source}" in text
    assert len(figures["predicted"]) == len(workloads) * len(SCENARIOS) * 7
    one = next(row for row in figures["predicted"] if row["gpus"] == 8)
    assert f"| 8 | {one['images_per_second']:,.0f} (" in text
    pytest.importorskip("matplotlib")
    plot.draw(workloads, MACHINES, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("four_cpus")
def test_program_measures_and_writes(monkeypatch, tmp_path, capsys):
    """The whole program, on the logical devices of the tests."""
    figures = tmp_path / "x.json"
    flags = runs.flags(model=runs.SMALL, batch_size=2, repeats=1, json=figures)
    monkeypatch.setattr(sys, "argv", ["scaling.py", *flags])
    scaling.main()
    written = json.loads(figures.read_text())
    own = written["workloads"][0]
    assert own["gradient_bytes"] == 4 * (5 * 5 * 3 * 4 + 4 + 100 * 10 + 10)
    assert own["compute_seconds"] > 0
    checks = [check["what"] for check in written["memory_measured_here"]["checks"]]
    assert len(checks) == 6
    printed = capsys.readouterr().out
    assert all(f"| {check} | " in printed for check in checks)
