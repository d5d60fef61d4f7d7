"""What a training says of its best score: where it is, how to use it, why it ended."""

import contextlib
import shlex
import textwrap
from pathlib import Path

from cifar10.config import paths
from cifar10.config.config import Config
from cifar10.errors import DiskError
from cifar10.process import invocation
from cifar10.run_directory import checkpoints, claim, layout, scores
from cifar10.run_directory.gains import Gains


def outcome(config: Config, step: int, gains: Gains) -> str:
    """Returns the best score of a run, how to use it, and if that ended it, why.

    It is empty if there are no scores. Those of `eval.py` count too.
    """
    run = paths.locate_run(config.train_dir)
    found = _found(run, gains)
    if not found:
        return ""
    best = scores.ranked(found)[0]
    named = f"precision @ 1 = {found[best]:.3f} at step {best}"
    is_kept = _is_kept(run, best)
    if not is_kept:
        named += ". Its checkpoint was not kept"
        named += "" if config.keep_best else "; --keep_best 1 would have kept it"
    ended = step < config.max_steps and gains.have_ended(config.stop_after_no_gain)
    text = _why(config, step, gains, named) if ended else f"Best:   {named}"
    lines = [textwrap.fill(text, 80, break_on_hyphens=False)]
    if is_kept:
        lines.append(_use(config, str(run), best))
    if ended and (command := claim.resuming_command(run, vars(config))):
        more = f"--stop_after_no_gain {2 * gains.without_gain}"
        lines.append(f"  train longer:  {command} {more}")
    return "\n".join(lines)


def step_to_score(config: Config, step: int, gains: Gains) -> int | None:
    """Returns the step of the best checkpoint if it is kept and not the newest one."""
    run = paths.locate_run(config.train_dir)
    best = next(iter(scores.ranked(_found(run, gains))), step)
    return best if best != step and _is_kept(run, best) else None


def _found(run: Path, gains: Gains) -> dict[int, float]:
    """Returns all scores of a run that are known, by step."""
    found = {gains.step: gains.precision} if gains.images else {}
    with contextlib.suppress(DiskError):
        found |= scores.read(run / layout.EVALUATION_EVENTS)
    return found


def _is_kept(run: Path, step: int) -> bool:
    return step in checkpoints.steps(run / layout.CHECKPOINTS)


def _why(config: Config, step: int, gains: Gains, best: str) -> str:
    count = gains.without_gain
    last = f"last {count} evaluations were" if count > 1 else "last evaluation was"
    text = (
        f"Ended at step {step} by --stop_after_no_gain {config.stop_after_no_gain}: "
        f"the {last} not above the best, {best}."
    )
    if config.schedule_ends:
        text += (
            " The learning rate had not fallen to its end, which --schedule "
            f"{config.schedule} does at step {config.max_steps}."
        )
    return text


def _use(config: Config, run: str, step: int) -> str:
    """Returns the command that uses a checkpoint, and what it does."""
    if not invocation.takes_flags():
        score = invocation.to_score(run, config.model, config.data, step=step)
        return f"  score it:      {score}"
    where = f"--step {step} --train_dir {shlex.quote(run)}"
    return f"  export it:     {invocation.of('export')} --output best_model {where}"
