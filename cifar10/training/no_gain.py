"""The message about a run's best score, and why --stop_after_no_gain ended it."""

import shlex
import textwrap

from cifar10.config import paths, program
from cifar10.config.config import Config
from cifar10.run_directory import checkpoints, claim, layout
from cifar10.run_directory.gains import Gains


def outcome(config: Config, step: int, gains: Gains) -> str:
    """Returns the best score of a run, and if that ended it, why and what to do next.

    It is empty if the training has not scored itself.
    """
    if not gains.images:
        return ""
    best = f"precision @ 1 = {gains.precision:.3f} at step {gains.step}"
    if step >= config.max_steps or not gains.have_ended(config.stop_after_no_gain):
        return f"Best:   {best}"
    run = paths.locate_run(config.train_dir)
    is_kept = gains.step in checkpoints.steps(run / layout.CHECKPOINTS)
    count = gains.without_gain
    last = f"last {count} evaluations were" if count > 1 else "last evaluation was"
    text = (
        f"Ended at step {step} by --stop_after_no_gain {config.stop_after_no_gain}: "
        f"the {last} not above the best, {best}."
    )
    if not is_kept:
        text += " That checkpoint no longer exists; --keep_best 1 would have kept it."
    if config.schedule_ends:
        text += (
            " The learning rate had not fallen to its end, which --schedule "
            f"{config.schedule} does at step {config.max_steps}."
        )
    lines = [textwrap.fill(text, 80, break_on_hyphens=False)]
    if is_kept:
        where = f"--step {gains.step} --train_dir {shlex.quote(str(run))}"
        export = program.of("export")
        lines.append(f"  export it:     {export} --output best_model {where}")
    if command := claim.resuming_command(run, vars(config)):
        lines.append(f"  train longer:  {command} --stop_after_no_gain {2 * count}")
    return "\n".join(lines)
