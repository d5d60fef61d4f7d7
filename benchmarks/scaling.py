"""Predicts how many images a second 1 to 64 GPUs train, and checks the prediction.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --step_ms 1 --within nvlink4 --plot scaling.png

It measures what one tower computes in a step (on a GPU if there is one), takes the size
of the gradients from the model and the speed of links from flags, and predicts the
throughput with gradients averaged on the CPU and with NCCL, in one box and over several
machines. Published models stand beside it for contrast. Averages and copies in this
machine's memory are measured to check the prediction. About a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

from benchmarks import flags as shared, machine
from benchmarks.prediction import plot, report
from benchmarks.prediction.checks import Memory, published_checks
from benchmarks.prediction.hardware import (
    HOST_MEMORY_BANDWIDTH,
    LINKS,
    Hardware,
    parse_link,
)
from benchmarks.prediction.workloads import (
    GIVEN,
    MEASURED,
    REFERENCES,
    TUTORIAL_OPERATIONS_PER_IMAGE,
    Workload,
)
from cifar10.config import cli
from cifar10.errors import UsageError, reason

_GIGA, _MILLI = 1e9, 1e-3


def parse_flags() -> argparse.Namespace:
    """Reads and checks the flags.

    Raises:
        UsageError: A value is out of its range.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    link = f"one of {', '.join(LINKS)}, or GB/S:MICROSECONDS one way"
    add = parser.add_argument
    add("--model", default="tutorial", help="as for training (default: %(default)s)")
    add("--batch_size", type=int, default=128, help="images per GPU (default: 128)")
    add("--step_ms", type=float, help="compute time of a step, instead of measuring it")
    add("--gpus_per_machine", type=int, default=8, help="default: %(default)s")
    add("--host_link", default="pcie4", help=f"GPU to host: {link} (default: pcie4)")
    add("--within", default="nvlink3", help="GPU to GPU (default: %(default)s)")
    add("--network", default="ethernet100", help="machines (default: %(default)s)")
    add(
        "--memory_gb_s",
        type=float,
        default=HOST_MEMORY_BANDWIDTH / _GIGA,
        help="what a host's memory reads and writes (default: %(default)s)",
    )
    add("--repeats", type=int, default=15, help="timed windows (default: 15); 0: none")
    add("--plot", type=Path, help="also draw a PNG file; needs matplotlib")
    add("--json", type=Path, help="also write the figures to this file")
    flags = parser.parse_args()
    for name, example in (("batch_size", 128), ("gpus_per_machine", 8)):
        if getattr(flags, name) < 1:
            raise UsageError(
                f"--{name} {getattr(flags, name)}: it has to be at least 1; "
                f"try {example}."
            )
    for name, example in (("step_ms", 1), ("memory_gb_s", 150)):
        value = getattr(flags, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(
                f"--{name} {value:g}: it has to be finite and above 0; try {example}."
            )
    if flags.repeats < 0:
        raise UsageError(f"--repeats {flags.repeats}: it has to be 0 or more; try 15.")
    if not flags.repeats and flags.step_ms is None:
        raise UsageError(
            "--repeats 0: then nothing is measured, and the compute time of a step "
            "has to be given; try --step_ms 1 with it."
        )
    shared.check_files(flags)
    if flags.plot:
        plot.check(flags.plot)
    return flags


def measure(flags: argparse.Namespace) -> tuple[Workload, Memory | None]:
    """Measures the model of the flags, and averages and copies in memory."""
    cli.import_tensorflow()
    from benchmarks.prediction import measure as measuring

    device = measuring.prepare()
    model = measuring.build(flags.model)
    kind, source = GIVEN, "nothing was measured"
    name = f"{flags.model}, {model.count_params():,} parameters"
    if flags.step_ms is None:
        windows = measuring.step_seconds(model, device, flags.batch_size, flags.repeats)
        seconds = statistics.median(windows)
        kind = MEASURED
        source = (
            f"{measuring.device_name(device)}, median of {flags.repeats} windows "
            f"({min(windows) / _MILLI:,.2f} to {max(windows) / _MILLI:,.2f} ms)"
        )
        if device.startswith("/cpu"):
            source += ", as slow as a CPU; a GPU's step is faster and scales worse"
    else:
        seconds = flags.step_ms * _MILLI
    workload = Workload(
        name,
        measuring.gradient_bytes(model),
        flags.batch_size,
        seconds,
        kind,
        source,
        TUTORIAL_OPERATIONS_PER_IMAGE * flags.batch_size
        if flags.model == "tutorial"
        else None,
    )
    memory = measuring.memory(model, flags.repeats) if flags.repeats else None
    return workload, memory


def environment() -> dict[str, str]:
    """Returns when and with what the figures were made."""
    found = machine.describe()
    return {
        "date": str(found["date"]),
        "commit": str(found["commit"]),
        "processor": f"{found['processor']}, {found['cores']} cores",
        "TensorFlow": machine.versions()["tensorflow"],
    }


def main() -> None:
    """Predicts, checks and prints."""
    flags = parse_flags()
    hardware = Hardware(
        flags.gpus_per_machine,
        parse_link("--host_link", flags.host_link),
        parse_link("--within", flags.within),
        parse_link("--network", flags.network),
        flags.memory_gb_s * _GIGA,
    )
    workload, memory = measure(flags)
    workloads = [workload, *REFERENCES]
    content = workloads, hardware, memory, published_checks(), environment()
    print(report.markdown(*content))
    try:
        if flags.json:
            text = json.dumps(report.as_json(*content), indent=2)
            flags.json.write_text(text + "\n", encoding="utf-8")
        if flags.plot:
            plot.draw(workloads, hardware, flags.plot)
    except OSError as error:
        raise UsageError(
            f"The figures cannot be written to a file: {reason(error)}. Name another "
            "with --json or --plot."
        ) from error


if __name__ == "__main__":
    cli.run(main)
