"""Queries a model during its training, in one program.

    python examples/05_follow.py [STEPS]

A `Follower` loads each checkpoint of the run, and another thread queries it all the
time. Queries never wait, and every answer comes from the weights of one step.
"""

import sys
import threading

from cifar10 import Config, Follower, train
from cifar10.input import datasets

TRAIN_DIR = "runs/followed"


class Live:
    """Loads each checkpoint when it is complete."""

    def __init__(self, follower):
        self.follower = follower

    def on_checkpoint(self, step, path):
        self.follower.look()


def ask(follower, images, labels, is_over):
    """Scores the copy; prints a line for each set of weights."""
    last, ended = None, False
    while not ended:
        ended = is_over.wait(0.02)  # Then once more, after the last step.
        if follower.weights_step is None:
            continue
        step, logits, _ = follower.predict(images)
        right = (logits.argmax(axis=1) == labels).mean()
        if step != last:
            print(f"weights of step {step}: {right:.1%} right")
        last = step


def main():
    steps = int(sys.argv[1]) if sys.argv[1:] else 200
    images, labels = (part[:100] for part in datasets.find("auto").read("test"))
    follower, is_over = Follower(TRAIN_DIR), threading.Event()
    asking = threading.Thread(target=ask, args=(follower, images, labels, is_over))
    asking.start()
    try:
        config = Config(max_steps=steps, checkpoint_steps=10, train_dir=TRAIN_DIR)
        train(config, hooks=[Live(follower)])
    finally:
        is_over.set()
        asking.join()


if __name__ == "__main__":
    main()
