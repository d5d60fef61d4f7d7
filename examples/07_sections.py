"""PartialFlow's sanity check: in three sections a network learns the same as whole.

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
    """A hook that notes memory before the first step, and times after each."""

    def on_start(self, run):
        Path("/proc/self/clear_refs").write_text("5")  # Linux forgets earlier peaks.
        self.before, self.times = peak(), []

    def on_step(self, step):
        self.times.append(time.perf_counter())


def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def trained(sections, steps):
    """Returns the losses, and the median seconds and most MB that steps took."""
    images, labels = datasets.find("auto").read("train")
    images = images[:, 2:30, 2:30].sum(axis=3, dtype=np.uint16) // 3
    flags = {"recipe": "tutorial", "distortions": "none", "precision": "float32"}
    flags |= {"batch_size": 250, "optimizer": "adam", "learning_rate": 1e-4}
    # 16, 32 and 64 filters in 3, 3 and 5 residual blocks with batch norm.
    flags |= {"model": "resnet", "sections": sections, "max_steps": steps}
    noted, data = Steps(), (images.astype(np.uint8), labels)
    with tempfile.TemporaryDirectory() as train_dir:
        config = Config(data=data, log_frequency=1, train_dir=train_dir, **flags)
        history = train(config, hooks=[noted]).history.values()
    losses = np.array([metrics["total_loss"] for metrics in history])
    return losses, np.array([np.median(np.diff(noted.times)), peak() - noted.before])


def main():
    from matplotlib.figure import Figure

    steps = int(sys.argv[1]) if sys.argv[1:] else 500
    axes = Figure().subplots()
    results = []
    for name, line in {"1": "-", "3": ":"}.items():
        with multiprocessing.get_context("spawn").Pool(1) as process:
            losses, costs = process.apply(trained, (name, steps))
        label = f"sections={name}: {costs[0]:.3f} s and {costs[1]:.0f} MB a step"
        axes.plot(losses, line, label=label)
        results.append((losses, costs))
    (whole, costs), (cut, costs_cut) = results
    more = costs_cut / costs - 1
    print(f"largest difference of the losses: {abs(cut - whole).max():.2g}")
    print(f"{more[0]:+.1%} time, {more[1]:+.1%} memory; both curves: sections.png")
    axes.set(xlabel="step", ylabel="loss", ylim=(0, 4))
    axes.legend()
    axes.figure.savefig("sections.png")


if __name__ == "__main__":
    main()
