"""Checks a training run before the import of TensorFlow, which takes seconds.

If the run cannot be resumed, or is already over, the message names the commands to use
instead.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cifar10.config import fields, layout, options, run_config
from cifar10.config.config import Config
from cifar10.errors import StoppedError, UsageError
from cifar10.models.registry import check_name
from cifar10.process import invocation
from cifar10.process.signals import StopSignals
from cifar10.run_directory import checkpoints, early_stopping, restoring, starting
from cifar10.run_directory.early_stopping import EarlyStopping
from cifar10.run_directory.lock import RunLock
from cifar10.training.initial_weights import check_initial_weights, check_source

# The machine and the data decide these values if the flags do not.
_LATER = ("data", "global_batch_size", "precision")
# These settings decide where a run ends.
_END = (*fields.LENGTHS, "stop_after_no_gain", "best_by", "corrections")
_DATA = "data_fingerprint"


@contextlib.contextmanager
def locked_run(config: Config, stop: StopSignals) -> Iterator[RunLock]:
    """Locks the run's directory against other runs, and checks the configuration.

    Yields the lock for `train`, which checks the configuration again when devices, data
    and model are known.

    Raises:
        StoppedError: The run has already ended, for example at --max_steps or because
            its score no longer improved.
    """
    check_name(config.network.model)
    check_initial_weights(
        config.fine_tuning, config.network.model, config.images.distortions
    )
    path, fresh = layout.locate_run(config.run.train_dir), config.run.fresh
    with RunLock(path) as lock:
        stop.clean_up = lock.release
        known = _determined(config)
        recorded = check_run(path, known, fresh=fresh)
        has_checkpoint = not fresh and checkpoints.steps(path / layout.CHECKPOINTS)
        if config.fine_tuning.initial_weights and not has_checkpoint:
            check_source(config.fine_tuning)
        # With a new end, `train` goes on, at least to write that end to config.json.
        values = config.values
        end = [name for name in _END if values[name] != fields.OPEN_STEPS]
        if recorded and not fresh and all(recorded.get(n) == values[n] for n in end):
            _refuse_if_over(config, path, recorded)
        yield lock


def check_run(
    path: Path, determining: Mapping[str, Any], *, fresh: bool
) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory; None if there is no run.

    Refuses a run whose settings differ from those in `determining`. With `fresh`, does
    not compare them, because a new run will replace the old one. Writes nothing.
    """
    recorded = starting.find_run(path)
    if recorded is not None and not fresh:
        found = starting.find_differences(path, recorded, determining)
        if found:
            raise UsageError(_explained(path, found, recorded))
    return recorded


def nothing_to_do(config: Config, step: int, record: EarlyStopping) -> str:
    """Returns a message that a run has ended at `step`, with commands to run next."""
    train_dir = layout.locate_run(config.run.train_dir)
    values = config.values
    name = next(name for name in reversed(fields.LENGTHS) if values[name])
    end = f"{invocation.option_name(name)} is {values[name]}"
    best = early_stopping.outcome(config, step, record)
    lines = [f"Nothing to do: the run is at step {step}, and {end}.", best]
    if step < config.run.max_steps and record.should_stop(
        config.checkpoints.stop_after_no_gain
    ):
        lines[0] = "Nothing to do."
    elif config.update.schedule_ends:  # The rate depends on the end.
        schedule = f"{invocation.option_name('schedule')} {config.update.schedule}"
        weights = invocation.as_given(initial_weights=str(train_dir))
        lines.append(
            f"  train longer:  {schedule} has ended; start a run in another directory\n"
            f"                 with {weights}"
        )
    elif longer := invocation.to_resume(train_dir, values, max_steps=2 * step):
        lines.append(f"  train longer:  {longer}")
    fresh, resume = invocation.as_given(fresh=True), invocation.option_name("resume")
    lines.append(f"  start over:    the same command with {fresh}, without {resume}")
    what, how = early_stopping.what_next(train_dir, config, step, record)
    lines.append(f"  {what:14} {how}")
    return "\n".join(filter(None, lines))


def _determined(config: Config) -> dict[str, Any]:
    """Returns the settings that determine the result and are known from flags alone."""
    values, before = config.values, options.defaults(fields.ALL)
    batch = config.batch
    if batch.num_gpus and not batch.global_batch_size:
        images = batch.batch_size * batch.num_gpus * batch.accumulate
        values["global_batch_size"] = images
    return {
        name: values[name]
        for name in options.result_determining(fields.ALL, values)
        if values[name] != fields.OPEN_STEPS  # Not known before the data.
        if values[name] != before[name] or name not in _LATER
    }


def _refuse_if_over(config: Config, path: Path, recorded: dict[str, Any]) -> None:
    directory = path / layout.CHECKPOINTS
    reached = max(checkpoints.steps(directory), default=0) >= recorded["max_steps"]
    if reached or config.checkpoints.stop_after_no_gain or config.run.max_hours:
        newest, _ = restoring.restore_newest(directory, lambda _: None, recorded)
        if newest and early_stopping.why_ended(recorded, newest.manifest):
            record = EarlyStopping.from_manifest(newest.manifest, recorded)
            raise StoppedError(nothing_to_do(config, newest.step, record), 0)


def _explained(
    path: Path, differences: dict[str, tuple[Any, Any]], recorded: Mapping[str, Any]
) -> str:
    """Returns a message on how given options differ from the run's, and what to do."""
    lines = [f"{path} holds a run with another configuration:"]
    ends = f"; --schedule {recorded.get('schedule')} fixes this length"
    notes = dict.fromkeys(fields.LENGTHS, ends)
    same = recorded.keys() - differences.keys()
    if "batch_size" in differences and "global_batch_size" in same:
        batches = recorded["global_batch_size"] // differences["batch_size"][0]
        towers, times = map(invocation.option_name, ("num_gpus", "accumulate"))
        notes["batch_size"] = (
            "; batch norm or dropout depends on the images\n    of a batch, so the "
            f"towers ({towers}) times {times} have to stay {batches}"
        )
    lines += [
        f"    {name}: {there} there, {now} now{notes.get(name, '')}"
        for name, (there, now) in differences.items()
        if name != _DATA
    ]
    if _DATA in differences:
        file = recorded.get("corrections")
        labels = f"labels, which {file} corrects," if file else "labels"
        lines.append(f"    data: images or {labels} have changed since the run began")
    lines.append("Resume that run or start another, with one of these:")
    # --resume would refuse a run of another version, or changed images.
    with contextlib.suppress(UsageError):
        run_config.read_run_config(path)
        if given := invocation.in_memory(recorded["model"], recorded.get("data", "")):
            call = f"cifar10.Config(resume={str(path)!r}, {given})"
            lines.append(f"    {call}    in Python, continues it as it is")
        elif _DATA not in differences:
            given = invocation.as_given(resume=str(path))
            lines.append(f"    {given}    alone, resumes that run as it is")
    given = invocation.as_given(train_dir=str(starting.unused_sibling(path)))
    lines.append(f"    {given}    without resume, trains in another directory")
    given = invocation.as_given(fresh=True)
    lines.append(f"    {given}    without resume, moves that run aside and starts over")
    return "\n".join(lines)
