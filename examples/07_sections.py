"""PartialFlow's sanity check: a network in three sections learns what it learns whole.

    python examples/07_sections.py [STEPS]

As in Sanity-Check.ipynb of https://github.com/jakob-bauer/partialflow, 500 steps of 250
grey images of 28 x 28, with Adam; the images are those of CIFAR-10.
"""

import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from cifar10 import Config, train
from cifar10.input import datasets


class Steps:
    """Notes memory before the first step, and times after each."""

    def on_start(self, run):
        Path("/proc/self/clear_refs").write_text("5")  # Linux forgets earlier peaks.
        self.before, self.times = peak(), []

    def on_step(self, step):
        self.times.append(time.perf_counter())


def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def trained(sections, steps):
    """Returns losses by step, the median seconds of a step, and the peak in MB."""
    images, labels = datasets.find("auto").read("train")
    images = images[:, 2:30, 2:30].sum(axis=3, dtype=np.uint16) // 3
    flags = {"recipe": "tutorial", "distortions": "none", "precision": "float32"}
    flags |= {"batch_size": 250, "optimizer": "adam", "learning_rate": 1e-4}
    # 16, 32 and 64 filters in 3, 3 and 5 residual blocks with batch norm.
    flags |= {"model": "resnet", "sections": sections, "max_steps": steps}
    flags |= {"log_frequency": max(1, steps // 50)}
    noted, data = Steps(), (images.astype(np.uint8), labels)
    with tempfile.TemporaryDirectory() as train_dir:
        config = Config(data=data, train_dir=train_dir, **flags)
        history = train(config, hooks=[noted]).history
    losses = {step: metrics["total_loss"] for step, metrics in history.items()}
    return losses, np.median(np.diff(noted.times)), peak() - noted.before


def draw(curves, path):
    """Draws curves of losses, by label."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    axes = figure.subplots()
    for (label, losses), line in zip(curves.items(), "-:", strict=True):
        axes.plot(losses.keys(), losses.values(), line, label=label, linewidth=2)
    axes.set(xlabel="step", ylabel="loss", ylim=(0, 4))
    axes.legend()
    figure.savefig(path)


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 500
    results, curves = [], {}
    for sections, name in {"1": "whole", "3": "in three sections"}.items():
        print(f"Training {name} ...", flush=True)
        with multiprocessing.get_context("spawn").Pool(1) as process:
            losses, seconds, megabytes = process.apply(trained, (sections, steps))
        print(f"{name}: {seconds:.3f} s a step, which takes {megabytes:.0f} MB")
        curves[f"{name}: {megabytes:.0f} MB"] = losses
        results.append((np.array([*losses.values()]), seconds, megabytes))
    (whole, seconds, megabytes), (cut, seconds_cut, megabytes_cut) = results
    draw(curves, "sections.png")
    print(f"largest difference of the losses: {abs(cut - whole).max():.2g}")
    print(
        f"{seconds_cut / seconds - 1:+.1%} time, {megabytes_cut / megabytes - 1:+.1%} "
        "memory; both curves: sections.png"
    )


if __name__ == "__main__":
    main()
