"""Checks whether a run can start or continue in its directory, and has steps left.

`locked_run` makes its checks before the import of TensorFlow, which takes seconds.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from cifar10 import files
from cifar10.config import data_flag, fields, layout
from cifar10.config.config import Config, ResolvedConfig, flags_of
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, counted
from cifar10.models.registry import PYTHON, check_name
from cifar10.process import invocation
from cifar10.process.signals import StopSignals
from cifar10.run_directory import checkpoints, early_stopping, starting
from cifar10.run_directory.early_stopping import EarlyStopping
from cifar10.run_directory.lock import RunLock
from cifar10.training import initial_weights


@contextlib.contextmanager
def locked_run(config: Config, stop: StopSignals) -> Iterator[RunLock]:
    """Locks the run's directory against other runs; checks model and initial weights.

    Yields the lock for `train`, which checks what depends on devices, data and model.
    """
    check_name(config.network.model)
    initial_weights.check_initial_weights(config)
    path = layout.absolute_path(config.run.train_dir)
    with RunLock(path) as lock:
        stop.clean_up = lock.release
        resumes = not config.run.fresh and checkpoints.steps(path / layout.CHECKPOINTS)
        source = config.fine_tuning.initial_weights
        if source and source != initial_weights.IMAGENET and not resumes:
            initial_weights.locate_source(source)
        yield lock


def check_run(
    wanted: RecordedRun, determining: Mapping[str, Any], *, fresh: bool
) -> RecordedRun | None:
    """Returns the run in the directory of `wanted`; None if there is no run.

    Refuses a run whose settings differ from those in `determining`, and a pruned run
    that would train longer; with `fresh`, refuses neither. Writes nothing.
    """
    if (run := starting.find_run(wanted.directory)) is not None and not fresh:
        was, now = run.values, wanted.values
        is_longer = any((now[name] or 0) > (was[name] or 0) for name in fields.LENGTHS)
        is_longer |= now["stop_after_no_gain"] != was["stop_after_no_gain"]
        if is_longer and (run.directory / layout.PRUNED).exists():
            weights = invocation.as_flags(initial_weights=run.directory)
            raise UsageError(
                f"{run.directory / layout.PRUNED} says that --prune has left only the "
                "best checkpoint, from which training cannot continue. Begin a new run "
                f"with its weights: {weights} and another --train_dir."
            )
        if found := starting.find_differences(run, determining):
            raise UsageError(_explained(found, run, wanted))
        run.check_logits(wanted.facts.model_logits)
    return run


def nothing_to_do(config: ResolvedConfig, step: int, record: EarlyStopping) -> str:
    """Returns a message that a run has ended at `step`, with commands to run next."""
    train_dir = layout.absolute_path(config.run.train_dir)
    limits = vars(config.run)
    name = next(name for name in reversed(fields.LENGTHS) if limits[name])
    if (pruned := train_dir / layout.PRUNED).exists():
        return f"Nothing to do: the run has finished; {pruned} says that it was pruned."
    lines = [
        f"Nothing to do: the run is at step {step}, and --{name} is {limits[name]}.",
        early_stopping.outcome(config, step, record),
    ]
    patience = config.checkpoints.stop_after_no_gain
    if step < config.run.max_steps and record.should_stop(patience):
        lines[0] = "Nothing to do."
    elif config.update.schedule_ends:  # The rate depends on the end.
        weights = invocation.as_flags(initial_weights=str(train_dir))
        lines.append(f"  train longer:  in another directory, with {weights}")
    elif longer := invocation.to_train(
        config.machine.workers, resume=train_dir, max_steps=2 * step
    ):
        lines.append(f"  train longer:  {longer}")
    named = config.network.model, config.dataset.data
    lines.append(f"  score it:      {invocation.to_score(train_dir, *named)}")
    return "\n".join(filter(None, lines))


def _explained(
    differences: Mapping[str, tuple], run: RecordedRun, wanted: RecordedRun
) -> str:
    """Returns how wanted settings differ, with commands that work when followed."""
    path, data = run.directory, run.config.dataset
    values, now = run.values, wanted.values
    lines = [f"{path} holds a run with another configuration:"]
    lines += [
        f"    {name}: {there} there, {here} now"
        for name, (there, here) in differences.items()
        if name != starting.FINGERPRINT
    ]
    if {*differences} <= {"batch_size", "global_batch_size"}:
        size, whole = values["batch_size"], values["global_batch_size"]
        towers = max(n for n in range(1, now["towers"] + 1) if whole // size % n == 0)
        batch = {"batch_size": size, "accumulate": whole // size // towers}
        how = f"{invocation.as_flags(**batch)} on {counted(towers, 'tower')}"
        lines.append(f"    {how} keeps the run's values")
    of_data = "data", "data_dir", "corrections", *data_flag.OF_DIVISION
    others = [name for name in of_data if values[name] != now[name]]
    if not os.path.exists(data.data_dir or ""):  # noqa: PTH110
        others = [name for name in others if name != "data_dir"]
    if has_changed := starting.FINGERPRINT in differences and not others:
        file = data.corrections
        labels = f"labels, which {file} corrects," if file else "labels"
        what = f"images, their order or {labels} have changed since the run began"
        lines += [f"    data: {what}", "That run cannot continue with changed data."]
    elif starting.FINGERPRINT in differences and (name := others[0]) not in differences:
        lines.append(f"    {name}: {values[name]} there, {now[name]} now")
    resume = invocation.as_flags(resume=path)
    own_rate = {"learning_rate": PYTHON} if values["keras_schedule"] else {}
    if given := invocation.in_memory(**values | own_rate):
        resume = f"cifar10.Config(resume={str(path)!r}, {given})"
    if not has_changed:
        lines.append(f"Give only {resume} to resume that run as it is.")
    if not any(word.startswith("--resume") for word in sys.argv):
        lines.append("Give --fresh to move that run aside and start over.")
    unused = files.unused(path.with_name(f"{path.name}."))
    other = invocation.as_flags(train_dir=unused)
    lines.append(f"Give {other}, or another name, for a separate run.")
    if checkpoints.steps(path / layout.CHECKPOINTS) and "model" not in differences:
        flags: dict[str, Any] = {"initial_weights": path, "train_dir": unused}
        how = invocation.as_flags(**flags)
        try:
            flags = flags_of(wanted, run) | flags
            command = invocation.to_train(wanted.config.machine.workers, **flags)
            how = f"with:\n    {command or how}"
        except UsageError as error:  # The recipe's file is gone.
            how = f"with {how}, once its recipe can be used:\n{error}"
        lines.append(f"Begin a new run from its weights {how}")
    return "\n".join(lines)
