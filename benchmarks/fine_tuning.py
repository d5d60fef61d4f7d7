"""Fine-tunes on few images, and compares with a training from random values on them.

    python -m benchmarks.fine_tuning --data_dir ~/.cache/cifar10 --folder runs/tuning

A network is trained on five classes of CIFAR-10 (airplane to deer). Then it is
fine-tuned on a few images of the other five, and so is one that begins at random, by
the same recipe and with three times its steps. With `--data cifar100` the first data
set is CIFAR-100, and the second CIFAR-10 with all its classes. Each is scored on all
test images of its classes. The seed of a row also chooses its images, the same ones in
all rows.

What is in `--folder` already is not trained again. For a quick look, whose accuracy
says nothing: --seeds 1 --pretraining_steps 20 --steps 40
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import flags as shared, machine
from cifar10.errors import UsageError
from cifar10.input import datasets
from cifar10.process import entry_point

# Of CIFAR-10's ten, for the first training; the others are for the second.
FIRST_CLASSES = 5
MODEL = ("--model", "resnet")
PRETRAINING = (
    *("--recipe", "resnet", "--schedule", "one_cycle", "--warmup_epochs", "0"),
    *("--checkpoint_steps", "500"),
)
AT_RANDOM = "pretrained_rate = 1.0"
# A row: what it is called, how many times the steps, and its flags.
PRETRAINED = "{pretrained}"
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "at random": (1, ()),
    "at random, three times the steps": (3, ()),
    "fine-tuned": (1, ("--initial_weights", PRETRAINED)),
    "fine-tuned, the head alone": (
        1,
        ("--initial_weights", PRETRAINED, "--freeze", "all-but-head"),
    ),
}


def write_sets(
    folder: Path, data_dir: str | None, first: int, images: int, seeds: int
) -> None:
    """Writes the `first` classes whole, and few images of the others for each seed."""
    found = datasets.find("cifar10", data_dir, None)
    splits = {split: found.read(split) for split in ("train", "test")}

    def save(name: str, first: int, last: int, chosen: np.ndarray | None) -> None:
        arrays = {}
        for split, (pictures, labels) in splits.items():
            of_classes = np.flatnonzero((labels >= first) & (labels < last))
            if split == "train" and chosen is not None:
                of_classes = of_classes[np.isin(of_classes, chosen)]
            arrays[f"x_{split}"] = pictures[of_classes]
            arrays[f"y_{split}"] = labels[of_classes] - first
        np.savez(folder / name, **arrays)

    if first:
        save("first.npz", 0, first, None)
    _, labels = splits["train"]
    for seed in range(seeds):
        order = np.random.default_rng(seed)
        kinds = range(first, found.classes)
        chosen = [
            order.choice(np.flatnonzero(labels == kind), images // len(kinds), False)
            for kind in kinds
        ]
        save(f"few_{seed}.npz", first, found.classes, np.concatenate(chosen))


def recipe_at_random(folder: Path) -> Path:
    """Writes the recipe of fine-tuning for a training in which all is new."""
    path = machine.ROOT / "cifar10/config/recipes/finetune.toml"
    lines = [
        AT_RANDOM if line.startswith("pretrained_rate") else line
        for line in path.read_text().splitlines()
    ]
    written = folder / "at_random.toml"
    written.write_text("\n".join(lines) + "\n")
    return written


def train(run: Path, *words: str) -> tuple[float, str]:
    """Trains and scores a run; returns its accuracy, and what it began with."""
    scores, output = run / "eval/metrics.jsonl", run / "output.txt"
    if not scores.exists():
        done = call("train", "--train_dir", str(run), *words)
        output.write_text(done)
        call("eval", "--run_once", "--train_dir", str(run))
    score = json.loads(scores.read_text().splitlines()[-1])["precision @ 1"]
    said = " ".join(output.read_text().split())
    begins = said.partition("Begins: ")[2].partition(" New run in")[0]
    return score, begins


def call(command: str, *words: str) -> str:
    """Runs a command of the package to its end, and returns what it prints."""
    done = subprocess.run(  # noqa: S603 - the package's own.
        [sys.executable, "-m", "cifar10", command, *words],
        cwd=machine.ROOT,
        env={**os.environ, "PYTHONPATH": str(machine.ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UsageError(f"{command} {' '.join(words)}\nfailed; see above.")
    return done.stdout


def table(scores: dict[str, list[float]]) -> str:
    """Returns the rows as Markdown: mean and deviation over the seeds."""
    lines = ["| | mean | deviation | seeds |", "| --- | --- | --- | --- |"]
    for name, values in scores.items():
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        each = ", ".join(f"{100 * value:.1f}" for value in values)
        mean = statistics.mean(values)
        lines.append(f"| {name} | {mean:.1%} | {deviation:.1%} | {each} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("cifar10", "cifar100"), default="cifar10")
    parser.add_argument("--data_dir", help="of CIFAR-10, as of a training")
    parser.add_argument("--folder", type=Path, required=True, help="for all runs")
    parser.add_argument("--images", type=int, default=1000, help="to fine-tune on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--depth", type=int, default=5, help="of the residual network")
    parser.add_argument("--pretraining_steps", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(arguments)
    shared.check_at_least_one(options, "images", "seeds", "pretraining_steps", "steps")
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    classes = FIRST_CLASSES if options.data == "cifar10" else 0
    write_sets(folder, options.data_dir, classes, options.images, options.seeds)
    model = (*MODEL, "--depth", str(options.depth), "--num_gpus", "1")
    first = str(folder / "first.npz") if classes else options.data
    steps = ("--max_steps", str(options.pretraining_steps), "--data", first)
    pretrained = folder / "pretrained"
    score, _ = train(pretrained, *model, *PRETRAINING, *steps)
    about = machine.describe()
    print(f"{about['processor']}, {about['cores']} cores, {about['versions']}")
    print(f"The first network: {score:.1%} on the test images of its data set.")
    recipe = recipe_at_random(folder)
    scores: dict[str, list[float]] = {name: [] for name in ROWS}
    for seed in range(options.seeds):
        for number, (name, (times, words)) in enumerate(ROWS.items()):
            flags = [word.format(pretrained=pretrained) for word in words]
            score, begins = train(
                folder / f"row_{number}_seed_{seed}",
                *model,
                *("--data", str(folder / f"few_{seed}.npz"), "--seed", str(seed)),
                *("--max_steps", str(times * options.steps)),
                *("--checkpoint_steps", str(times * options.steps)),
                *("--recipe", "finetune" if words else str(recipe)),
                *flags,
            )
            scores[name].append(score)
            print(f"{name}, seed {seed}: {score:.1%}. {begins}", flush=True)
    print(table(scores))


if __name__ == "__main__":
    entry_point.run_program(main)
