"""Times training steps side by side with the tutorial's own graph, in one run.

    python -m benchmarks.throughput --data_dir ~/.cache/cifar10

Real data with its distortions, float32, everything included but logging. The rivals
take turns, so that a machine whose speed drifts treats them alike; before each timed
window come steps that are not timed, so that no one lives on batches prepared in the
other's turn. Quote the ratios, not the absolute figures.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from cifar10 import cli

# Images per step, shared by all towers, as in the tutorial.
GLOBAL_BATCH_SIZE = 128
_UNTIMED_STEPS = 10


def towers_stepper(
    images, labels, towers: int, stack: contextlib.ExitStack
) -> Callable[[], object]:
    """Returns one step of our towers, input included."""
    import keras

    from cifar10 import distortions, input as input_queues, model as models, schedule
    from cifar10.towers import TowerBuilder, TrainState

    side = distortions.CROP_SIZE
    model = models.build("tutorial", (side, side, 3), 10)
    builder = TowerBuilder(
        TrainState(model, keras.optimizers.SGD(0.1)),
        [f"/cpu:{number}" for number in range(towers)],
        inference=models.inference,
        loss=models.loss,
        learning_rate=schedule.StaircaseDecay(0.1, 350, len(images)),
        average_decay=lambda step: schedule.average_decay(0.9999, step),
    )
    batches = input_queues.training_batches(
        images,
        labels,
        batch_size=GLOBAL_BATCH_SIZE // towers,
        towers=towers,
        distortion="tutorial",
        seed=0,
        start_step=0,
    )
    queues = stack.enter_context(input_queues.PrefetchQueues(batches, builder.devices))
    return lambda: float(builder.step(queues.get()).metrics["total_loss"])


def input_rate(images, labels, seconds: float = 5.0) -> float:
    """Returns how many images a second the input prepares when nobody trains."""
    from cifar10 import input as input_queues

    batches = input_queues.training_batches(
        images,
        labels,
        batch_size=GLOBAL_BATCH_SIZE,
        towers=1,
        distortion="tutorial",
        seed=0,
        start_step=0,
    )
    with input_queues.PrefetchQueues(batches, ["/cpu:0"]) as queues:
        for _ in range(_UNTIMED_STEPS):
            queues.get()
        began = time.perf_counter()
        taken = 0
        while time.perf_counter() - began < seconds:
            queues.get()
            taken += GLOBAL_BATCH_SIZE
        return taken / (time.perf_counter() - began)


def take_turns(
    steppers: dict[str, Callable[[], object]], repeats: int, steps: int
) -> dict[str, list[float]]:
    """Times the steppers in turn.

    Args:
        steppers: One training step by name.
        repeats: Timed windows of each.
        steps: Steps in a window.

    Returns:
        Examples a second of each window, by name.
    """
    rates: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(repeats):
        for name, step in steppers.items():
            for _ in range(_UNTIMED_STEPS):
                step()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            elapsed = time.perf_counter() - began
            rates[name].append(steps * GLOBAL_BATCH_SIZE / elapsed)
    return rates


def table(rates: dict[str, list[float]], peer: str) -> str:
    """Returns a Markdown table of medians and of ratios to a peer, window by window."""
    lines = [
        f"| what | examples/sec, median (least to most) | times {peer} |",
        "| --- | --- | --- |",
    ]
    for name, values in rates.items():
        ratio = statistics.median(
            own / other for own, other in zip(values, rates[peer], strict=True)
        )
        lines.append(
            f"| {name} | {statistics.median(values):,.0f} "
            f"({min(values):,.0f} to {max(values):,.0f}) | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs the comparison and prints its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data_dir", help="folder of the real CIFAR-10")
    parser.add_argument("--repeats", type=int, default=9, help="timed windows of each")
    parser.add_argument("--steps", type=int, default=30, help="steps in a window")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    flags = parser.parse_args()
    cli.import_tensorflow(verbose=False)
    import tensorflow as tf

    from benchmarks.tutorial_graph import TutorialGraph
    from cifar10 import datasets, devices

    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    devices.place_towers(4)
    dataset = datasets.find("cifar10", flags.data_dir, None)
    images, labels = dataset.read("train")
    alone = statistics.median(input_rate(images, labels) for _ in range(3))
    print(f"The input alone, through its prefetch queue: {alone:,.0f} images/s\n")
    with contextlib.ExitStack() as stack:
        tutorial = stack.enter_context(
            TutorialGraph(dataset.directory, GLOBAL_BATCH_SIZE)
        )
        steppers: dict[str, Callable[[], object]] = {
            "the tutorial's graph": tutorial.step
        }
        for towers in (1, 2, 4):
            name = f"{towers} x {GLOBAL_BATCH_SIZE // towers}"
            steppers[name] = towers_stepper(images, labels, towers, stack)
        rates = take_turns(steppers, flags.repeats, flags.steps)
    print(table(rates, "the tutorial's graph"))
    print()
    print(table({name: rates[name] for name in list(rates)[1:]}, "1 x 128"))
    if flags.json:
        flags.json.write_text(json.dumps(rates, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
