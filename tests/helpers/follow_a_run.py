"""Follows a run in a process of its own, for `test_live.py`.

Writes to a file, for each set of weights that it took, the logits of the first test
images, and prints one JSON object about it.
"""

import json
import sys
import time

from cifar10.config import cli

IMAGES = 500


def main(train_dir, data_dir, last_step, written):
    cli.import_tensorflow()
    import numpy as np

    from cifar10.follower import Follower
    from cifar10.input import datasets

    images, labels = datasets.find("cifar10", data_dir).read("test")
    logits = {}
    with Follower(train_dir).start(interval=0.05) as follower:
        while last_step not in logits:
            time.sleep(0.02)
            step = follower.weights_step
            if step is None or str(step) in logits:
                continue
            answer = follower.predict(images[:IMAGES])
            logits[str(answer.step)] = answer.logits
            hits = answer.logits.argmax(axis=1) == labels[:IMAGES]
            found = {"step": answer.step, "correct": int(hits.sum())}
            print(json.dumps({**found, "refused": follower.refused}), flush=True)
    np.savez(written, **logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
