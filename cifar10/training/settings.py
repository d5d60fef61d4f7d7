"""What a run is: the content of its `config.json`, and its first lines."""

import contextlib
import dataclasses
import platform
import textwrap
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cifar10.config import augmentation, flags
from cifar10.config.config import Config, ResolvedConfig
from cifar10.config.options import Scope, names
from cifar10.errors import UsageError
from cifar10.input.datasets import Dataset
from cifar10.process import invocation
from cifar10.towers import precision
from cifar10.towers.devices import Placement
from cifar10.towers.train_state import TrainState


def collect(
    config: ResolvedConfig,
    placement: Placement,
    dataset: Dataset,
    states: Sequence[TrainState],
) -> dict[str, Any]:
    """Returns the content of `config.json`: the run, and what ran it."""
    return {
        **dataclasses.asdict(config),
        "data": dataset.name,
        "data_dir": dataset.directory and str(dataset.directory.absolute()),
        "data_is_real": dataset.is_real,
        "data_description": dataset.description,
        # Only of pictures that this package has divided into parts.
        "data_division": getattr(dataset, "division", None),
        "data_fingerprint": dataset.fingerprint,
        "image_shape": list(dataset.image_shape),
        "classes": dataset.classes,
        "class_names": list(dataset.class_names),
        "parameters": states[0].model.count_params(),
        "devices": placement.description,
        "on_gpus": placement.on_gpus,
        "variables_on": ", ".join(state.device for state in states),
        "simulated": placement.simulated,
        "versions": {
            "cifar10": invocation.version(),
            "python": platform.python_version(),
            **{
                name: metadata.version(name)
                for name in ("tensorflow", "keras", "numpy")
            },
        },
    }


def alike(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of `config.json` in which all workers have to agree."""
    differing = names(ResolvedConfig, scope=Scope.WORKER)
    differing |= {"data_description", "devices"}
    return {key: value for key, value in settings.items() if key not in differing}


def first_lines(settings: dict[str, Any], examples: int) -> str:
    """Returns the first lines of a training, from the content of `config.json`."""
    global_batch_size = settings["global_batch_size"]
    epochs = settings["max_steps"] * global_batch_size / examples
    workers = settings["workers"]
    batches = settings["accumulate"]
    accumulated = f" x {batches} before an update" if batches > 1 else ""
    is_weighted = settings.get("class_weights")
    of_loss = "Loss:   weighted by class\n" if is_weighted else ""
    on_each = f", on each of {workers} workers" if workers > 1 else ""
    home = f"; variables on {settings['variables_on']}" if settings["on_gpus"] else ""
    return wrap(
        f"Towers: {settings['devices']}{on_each}{home}\n"
        f"Data:   {examples:,} training images of {settings['data_description']}\n"
        f"Model:  {settings['model']}, {settings['parameters']:,} parameters, "
        f"{settings['precision']}\n"
        f"{_of_recipe(settings)}{of_loss}"
        f"Batch:  {settings['batch_size']} images per tower and step x "
        f"{settings['towers']}{accumulated} = {global_batch_size} globally\n"
        f"Length: {settings['max_steps']:,} steps, which are {epochs:,.1f} epochs of "
        f"{examples / global_batch_size:,.1f} steps"
    )


def _of_recipe(settings: dict[str, Any]) -> str:
    """Returns a line on the recipe, which the user may not have chosen: what it sets.

    That is what determines the result, no other line tells, and the flags leave as is.
    """
    recipe = settings["recipe"]
    if recipe == "tutorial":
        return ""
    values: dict[str, Any] = {}
    with contextlib.suppress(UsageError):  # A file may be gone when its run resumes.
        values = flags.read_recipe(recipe)
    told = {"model", "max_steps", "batch_size", "global_batch_size"}
    shown = names(Config, scope=Scope.RESULT, in_flags=True) - told
    sets = [
        f"{name} {value}"
        for name, value in values.items()
        if name in shown and settings.get(name) == value != getattr(Config, name)
    ]
    effect = f", which sets {', '.join(sets)}" if sets else ""
    how = "flags" if invocation.takes_flags() else "arguments"
    return f"Recipe: {recipe}{effect}; {how} override it\n"


def wrap(text: str) -> str:
    """Breaks lines at 80 columns between words, so a long path stays in one piece."""
    wrapper = textwrap.TextWrapper(
        80, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def last_lines(train_dir: Path, model: str, data: str, step: int | None) -> str:
    """Returns the last lines of a training: what to do next.

    `step` is that of the checkpoint to score; None for the newest one.
    """
    shown = train_dir
    with contextlib.suppress(OSError, ValueError):  # Shorter, for the terminal.
        shown = train_dir.relative_to(Path.cwd())
    watch = textwrap.indent(invocation.to_watch(str(shown)), " " * 13).lstrip()
    return (
        f"Done. The run is in {train_dir}\n"
        f"  score it:  {invocation.to_score(str(shown), model, data, step)}\n"
        f"  watch it:  {watch}"
    )


def resolve(
    config: Config, placement: Placement, *, workers: int = 1
) -> ResolvedConfig:
    """Resolves what depends on the machine: precision, towers, batch sizes."""
    towers = len(placement.devices) * workers
    batches = towers * config.accumulate
    images = config.global_batch_size or config.batch_size * batches
    if images % batches:
        below = images - images % batches
        divisible = f"{below} or {below + batches}" if below else f"{batches}"
        raise UsageError(
            f"--global_batch_size {images} does not divide into {batches} batches "
            f"(towers times --accumulate). Give {divisible}."
        )
    augmentation.check_batch(config.augmentation, images // batches)
    return ResolvedConfig(
        **{
            **vars(config),
            "precision": precision.resolve(
                config.precision,
                placement.devices,
                deterministic=config.deterministic,
            ),
            "batch_size": images // batches,
            "global_batch_size": images,
            "towers": towers,
            "workers": workers,
        }
    )


def check_epoch(config: ResolvedConfig, examples_per_epoch: int) -> None:
    """Refuses a configuration that does not fit the size of the training set."""
    if config.global_batch_size > examples_per_epoch:
        batches = config.towers * config.accumulate
        raise UsageError(
            f"--batch_size {config.batch_size}: the global batch of "
            f"{config.global_batch_size:,} images is larger than the training set of "
            f"{examples_per_epoch:,}. At most --batch_size "
            f"{examples_per_epoch // batches} fits."
        )
    epochs = config.max_steps * config.global_batch_size / examples_per_epoch
    # The staircase may rise beyond --max_steps, which may be raised later.
    if config.schedule_ends and config.warmup_epochs >= epochs:
        raise UsageError(
            f"--warmup_epochs {config.warmup_epochs}: --max_steps {config.max_steps} "
            f"are {epochs:.2f} epochs, and with --schedule {config.schedule} the "
            f"learning rate is zero then. Recipe {config.recipe} has its own values of "
            "the three. Give more --max_steps, or fewer --warmup_epochs."
        )
