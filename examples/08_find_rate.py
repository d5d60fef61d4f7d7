"""Suggests a learning rate, by a short run with a rising rate.

    python examples/08_find_rate.py [STEPS] [HIGHEST]

This is Smith's range test (https://arxiv.org/abs/1506.01186). A hook reads the rate and
the loss; it cannot set the rate, so a warm-up as long as the run raises it evenly from
zero to HIGHEST. Put the flags of your own run into FLAGS.
"""

import sys
import tempfile

from cifar10 import Config, train
from cifar10.input import datasets

FLAGS = {"recipe": "tutorial", "optimizer": "sgd", "batch_size": 128}


class ExplodedError(Exception):
    """Ends the training, because higher rates are not worth trying."""


class RangeTest:
    """Records the average loss at each rate, until a loss explodes."""

    def __init__(self):
        self.losses = {}

    def on_log(self, step, metrics):
        self.losses[metrics["learning_rate"]] = metrics["cross_entropy/average"]
        if not metrics["cross_entropy"] <= 4 * min(
            self.losses.values()
        ):  # Also true of NaN.
            raise ExplodedError


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 500
    highest = float(sys.argv[2]) if sys.argv[2:] else 1.0
    images, labels = datasets.find("auto").read("train")
    flags = {**FLAGS, "data": (images, labels), "learning_rate": highest}
    # The schedule itself is constant, and the hook notices an explosion.
    flags |= {"schedule": "staircase", "epochs_per_decay": 1e6, "on_nan": "skip"}
    flags["warmup_epochs"] = steps * FLAGS["batch_size"] / len(images)
    test, end = RangeTest(), "did not explode"
    with tempfile.TemporaryDirectory() as folder:
        flags |= {"max_steps": steps, "log_frequency": 5, "train_dir": folder}
        try:
            train(Config(**flags), hooks=[test])
        except ExplodedError:
            end = "exploded"
    lowest = min(test.losses, key=test.losses.get)
    print("\nThat run was a test; its directory is removed.")
    print(f"The loss {end} up to a rate of {max(test.losses):.2g}.", end=" ")
    first, least = test.losses[min(test.losses)], test.losses[lowest]
    print(f"Its moving average, first {first:.3g}, was {least:.3g} at {lowest:.2g}.")
    if least > 0.9 * first:
        print("That is hardly less, and may be noise: take more STEPS.")
    print(f"Try a third of that: --learning_rate {lowest / 3:.2g}")


if __name__ == "__main__":
    main()
