"""What a run is: the content of its `config.json`, and its first lines."""

from __future__ import annotations

import dataclasses
import platform
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import keras

from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input.datasets import Dataset
from cifar10.towers.devices import Placement


def collect(
    config: Config,
    placement: Placement,
    dataset: Dataset,
    model: keras.Model,
) -> dict[str, Any]:
    """Returns the content of `config.json`: what was asked for and what came of it."""
    return {
        **dataclasses.asdict(config),
        "data": dataset.name,
        "data_dir": str(dataset.directory.absolute()),
        "data_is_real": dataset.is_real,
        "data_description": dataset.description,
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "parameters": model.count_params(),
        "towers": placement.towers,
        "devices": placement.description,
        "on_gpus": placement.on_gpus,
        "workers": placement.workers,
        "simulated": placement.simulated,
        "global_batch_size": config.batch_size * placement.batches,
        "versions": {
            "python": platform.python_version(),
            **{
                name: metadata.version(name)
                for name in ("tensorflow", "keras", "numpy")
            },
        },
    }


def first_lines(settings: dict[str, Any], examples: int) -> str:
    """Returns what a training says before it begins.

    Args:
        settings: As `collect` returns them.
        examples: Images in the training set.
    """
    global_batch_size = settings["global_batch_size"]
    epochs = settings["max_steps"] * global_batch_size / examples
    workers = settings["workers"]
    batches = settings["accumulate"]
    accumulated = f" x {batches} before an update" if batches > 1 else ""
    on_each = f", on each of {workers} workers" if workers > 1 else ""
    return (
        f"Towers: {settings['devices']}{on_each}\n"
        f"Data:   {settings['data_description']}, {examples:,} training images\n"
        f"Model:  {settings['model']}, {settings['parameters']:,} parameters, "
        f"{settings['precision']}\n"
        f"Batch:  {settings['batch_size']} images per tower and step x "
        f"{settings['towers']}{accumulated} = {global_batch_size} globally; "
        f"{examples / global_batch_size:.1f} steps an epoch, "
        f"{epochs:.1f} epochs in {settings['max_steps']:,} steps"
    )


def last_lines(train_dir: Path) -> str:
    """Returns what a training says at its end: what to do next."""
    name = shlex.quote(str(train_dir))
    return (
        f"Done. The run is in {train_dir}\n"
        f"  score it:  python eval.py --run_once --checkpoint_dir {name}\n"
        f"  watch it:  tensorboard --logdir {name}"
    )


def batch_size(config: Config, placement: Placement) -> int:
    """Returns the images of a batch.

    Raises:
        UsageError: --global_batch_size cannot be shared evenly.
    """
    whole, batches = config.global_batch_size, placement.batches
    if whole is None:
        return config.batch_size
    if whole % batches:
        near = [size for size in (whole - whole % batches,) if size]
        near.append(whole - whole % batches + batches)
        raise UsageError(
            f"--global_batch_size {whole} is not divisible by {_shares(placement)}; "
            f"{' or '.join(map(str, near))} is."
        )
    return whole // batches


def check_batch(config: Config, placement: Placement, examples_per_epoch: int) -> None:
    """Refuses a global batch that is larger than the training set."""
    if config.batch_size * placement.batches > examples_per_epoch:
        raise UsageError(
            f"--batch_size {config.batch_size}: times {_shares(placement)} this is "
            f"more than the {examples_per_epoch:,} training images. At most "
            f"{examples_per_epoch // placement.batches} fit."
        )


def _shares(placement: Placement) -> str:
    shares = f"{placement.towers} towers"
    if placement.accumulate > 1:
        shares += f" x {placement.accumulate} batches (--accumulate)"
    return shares


def check_warmup(config: Config, placement: Placement, examples_per_epoch: int) -> None:
    """Refuses a learning rate that falls to zero before it has risen.

    The staircase's may go on rising beyond --max_steps, which may be raised later.
    """
    seen = config.max_steps * config.batch_size * placement.batches
    epochs = seen / examples_per_epoch
    if config.schedule == "linear" and config.warmup_epochs >= epochs:
        raise UsageError(
            f"--warmup_epochs {config.warmup_epochs}: --max_steps {config.max_steps} "
            f"are {epochs:.2f} epochs, and with --schedule linear the learning rate is "
            "zero then. Warm up for less, or train for longer."
        )
