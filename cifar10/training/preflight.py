"""What a training refuses before TensorFlow starts, which takes seconds."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cifar10.config import initial_weights_flag, options, paths
from cifar10.config.config import Config
from cifar10.errors import StoppedError
from cifar10.models import names
from cifar10.process import invocation
from cifar10.process.signals import StopSignals
from cifar10.run_directory import checkpoints, claim, gains, layout, restoring
from cifar10.training import no_gain

# What the machine and the data decide if the flags do not.
_LATER = ("data", "global_batch_size", "precision")
_END = ("max_steps", "stop_after_no_gain")  # What decides where a run ends.


@contextlib.contextmanager
def claimed(config: Config, stop: StopSignals) -> Iterator[contextlib.ExitStack]:
    """Keeps other trainings out of the run's directory, and refuses what it can.

    The training compares everything once more when it knows devices, data and model.
    Yields what it takes as `held`.

    Raises:
        StoppedError: The run has reached --max_steps already, or ended because its
            score no longer rose.
    """
    names.check(config.model)
    initial_weights_flag.check_use(config.initial_weights, config.pretrained_rate)
    path, fresh = paths.locate_run(config.train_dir), config.fresh
    with claim.hold(path) as held:
        stop.clean_up = held.close
        known = _determined(config)
        earlier = claim.check(path, known, [*known], fresh=fresh)
        has_checkpoint = not fresh and checkpoints.steps(path / layout.CHECKPOINTS)
        if config.initial_weights and not has_checkpoint:
            initial_weights_flag.check_place(config.initial_weights)
        # With another end, config.json has to be written again.
        if (
            earlier
            and not fresh
            and all(earlier.get(name) == getattr(config, name) for name in _END)
        ):
            _check_due(config, path, earlier)
        yield held


def _determined(config: Config) -> dict[str, Any]:
    """Returns what determines the result, as far as the flags alone decide it."""
    values = dataclasses.asdict(config)
    if config.num_gpus and not config.global_batch_size:
        images = config.batch_size * config.num_gpus * config.accumulate
        values["global_batch_size"] = images
    return {
        name: values[name]
        for name in options.result_determining(Config, values)
        if values[name] != getattr(Config, name) or name not in _LATER
    }


def _check_due(config: Config, path: Path, earlier: dict[str, Any]) -> None:
    directory = path / layout.CHECKPOINTS
    reached = max(checkpoints.steps(directory), default=0) >= config.max_steps
    if reached or config.stop_after_no_gain:
        newest, _ = restoring.restore_newest(directory, lambda _: None, earlier)
        found = gains.of(newest.manifest) if newest else gains.Gains()
        ended = found.have_ended(config.stop_after_no_gain)
        if newest and (ended or newest.step >= config.max_steps):
            raise StoppedError(nothing_to_do(config, newest.step, found), 0)


def nothing_to_do(config: Config, step: int, found: gains.Gains) -> str:
    """Returns a message about a run that has ended at a step: what to do next."""
    train_dir = paths.locate_run(config.train_dir)
    steps = f"step {step}, and {invocation.option('max_steps')} is {config.max_steps}"
    best = no_gain.outcome(config, step, found)
    lines = [f"Nothing to do: the run is at {steps}.", best]
    longer = claim.resuming_command(train_dir, vars(config), max_steps=2 * step)
    if step < config.max_steps:
        lines[0] = "Nothing to do."
    elif longer and not config.schedule_ends:  # It would have fallen otherwise.
        lines.append(f"  train longer:  {longer}")
    if longer and (anew := claim.starting_over()):
        lines.append(f"  start over:    {anew}")
    score = invocation.to_score(str(train_dir), config.model, config.data)
    lines.append(f"  score it:      {score}")
    return "\n".join(filter(None, lines))
