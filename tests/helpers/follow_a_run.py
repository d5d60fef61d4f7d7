"""Follows a run in a process of its own, for `test_live.py`.

Writes to a file, for each set of weights that it took, the logits of the first test
images, and prints one JSON object about it.
"""

import json
import sys
import time

from cifar10.config import cli

BATCH, BATCHES = 500, 4


def main(train_dir, data_dir, last_step, written):
    cli.import_tensorflow()
    import numpy as np

    from cifar10.follower import Follower
    from cifar10.input import datasets

    images, labels = datasets.find("cifar10", data_dir).read("test")
    parts = [slice(n * BATCH, (n + 1) * BATCH) for n in range(BATCHES)]
    logits = {}
    with Follower(train_dir).start(interval=0.1) as follower:
        while (follower.weights_step or 0) < int(last_step):
            time.sleep(0.02)
            step = follower.weights_step
            if step is None or str(step) in logits:
                continue
            age, seconds = follower.age_seconds, follower.swap_seconds
            answers = [follower.predict(images[part]) for part in parts]
            if len({answer.step for answer in answers}) > 1:
                continue  # Another came in between; it is asked next.
            step = answers[0].step
            logits[str(step)] = np.concatenate([one.logits for one in answers])
            hits = logits[str(step)].argmax(axis=1) == labels[: BATCH * BATCHES]
            print(
                json.dumps(
                    {
                        "step": step,
                        "correct": int(hits.sum()),
                        "age_seconds": age,
                        "swap_seconds": seconds,
                        "refused": follower.refused,
                    }
                ),
                flush=True,
            )
    np.savez(written, **logits)


if __name__ == "__main__":
    main(*sys.argv[1:])
