"""The prediction as a picture."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.prediction.hardware import Hardware
from benchmarks.prediction.report import title
from benchmarks.prediction.scenarios import CPU, GPUS, SCENARIOS, predict
from benchmarks.prediction.workloads import Workload
from cifar10.errors import UsageError

_COLUMNS = 3
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_CPU_COLOUR, _NCCL_COLOUR = "#E69F00", "#0072B2"


def check(path: Path) -> None:
    """Finds out before the work whether the picture can be drawn.

    Raises:
        UsageError: matplotlib is not installed, or the name is not that of a PNG file.
    """
    if path.suffix.lower() != ".png":
        raise UsageError(
            f"--plot {path}: the plot is a PNG file, so its name has to end in .png."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"--plot {path}: matplotlib is not installed. Install it with pip install "
            "-e '.[peers]', or leave --plot out."
        )


def draw(workloads: Sequence[Workload], hardware: Hardware, path: Path) -> None:
    """Draws predicted throughput over the number of GPUs, a panel for each model.

    Args:
        workloads: Models to predict.
        hardware: Machines to predict for.
        path: The PNG file to write.
    """
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    rows = math.ceil(len(workloads) / _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 3.4 * rows + 0.6), layout="constrained")
    for place, workload in enumerate(workloads, start=1):
        axes = figure.add_subplot(rows, _COLUMNS, place)
        alone = workload.batch_size / workload.compute_seconds
        axes.plot(
            GPUS, [alone * gpus for gpus in GPUS], ":", color="0.5", label="linear"
        )
        for scenario in SCENARIOS:
            axes.plot(
                GPUS,
                [
                    point.images_per_second
                    for point in predict(workload, scenario, hardware)
                ],
                "o-" if scenario.one_box else "x--",
                color=_CPU_COLOUR if scenario.method == CPU else _NCCL_COLOUR,
                label=title(scenario, hardware),
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
        axes.set_xlabel("GPUs")
        axes.set_ylabel("images a second, predicted")
        axes.set_title(
            f"{workload.name}\n{1e3 * workload.compute_seconds:,.2f} ms a step "
            f"({workload.kind})",
            fontsize="medium",
        )
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120, format="png")
