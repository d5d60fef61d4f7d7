"""Queries a model during its training, in one program and without a disk.

    python examples/05_follow.py [STEPS]

The training copies its weights every few steps to a `Follower`, which another thread
queries all the time: it never waits, and every answer comes from one step's weights.
"""

import sys
import threading

from cifar10 import Config, Follower, train
from cifar10.input import datasets


class Live:
    """A hook that keeps a copy of the model."""

    def __init__(self):
        self.copy = None

    def on_start(self, run):
        copy = Follower.attach(run.state, run.settings, every=10)
        copy.after_step(run.step)
        self.copy = copy  # From here on it answers.

    def on_step(self, step):
        self.copy.after_step(step)


def ask(live, images, labels, is_over):
    """Scores the copy; prints a line for each set of weights that it had."""
    last, ended = None, False
    while not ended:
        ended = is_over.wait(0.02)  # And once more after the last step.
        if live.copy is None:
            continue
        step, logits, _ = live.copy.predict(images)
        right = (logits.argmax(axis=1) == labels).mean()
        if step != last:
            print(f"weights of step {step}: {right:.1%} right")
        last = step


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 1_000
    images, labels = (part[:100] for part in datasets.find("auto").read("test"))
    live, is_over = Live(), threading.Event()
    asking = threading.Thread(target=ask, args=(live, images, labels, is_over))
    asking.start()
    try:
        train(Config(max_steps=steps, train_dir="runs/followed"), hooks=[live])
    finally:
        is_over.set()
        asking.join()


if __name__ == "__main__":
    main()
