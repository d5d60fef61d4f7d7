"""`python -m cifar10 whatif`: trains steps of a run again with a change."""

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cifar10 import files
from cifar10.config import layout
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, counted, first_few
from cifar10.tools.replay import open_run, window

if TYPE_CHECKING:
    import numpy as np

    from cifar10.training.what_if import Outcome, WhatIf

HELP = "train steps of a run again without some pictures, or at another rate"
DESCRIPTION = """Trains steps of a run again with a change, and compares.

    python -m cifar10 whatif RUN --steps 1001:1100 --corrections wrong.csv
    python -m cifar10 whatif RUN --steps 401:600 --until 1000 --learning_rate 0.05

Recomputes the steps unchanged first, so that later differences are the change's.
The next picture of its class replaces one left out; others keep places and random
draws. A RUN from --out is recomputed. Exit code 1: a recomputed step differs.
"""
_SETTINGS = ("learning_rate", "clip_norm", "moving_average_decay")
_EACH = "like --corrections, but list the effect of each picture on the validation loss"


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    add = parser.add_argument
    add("--steps", help="FIRST:LAST, the steps to change, such as 1001:1100")
    add("--until", type=int, help="the last step to compute (default: LAST)")
    add("--corrections", metavar="FILE", help="CSV as `data` writes it: picture,class")
    add("--without_class", metavar="CLASS", help="leave out all pictures of a class")
    for name in _SETTINGS:
        add(f"--{name}", type=float, metavar="NUMBER", help="value in these steps")
    add("--each", metavar="FILE", help=_EACH)
    add("--windows", type=int, default=1, help="number of windows for --each")
    add("--out", metavar="DIR", help="new folder of a run for eval, predict and export")
    what_if, given = open_run(parser, words, what_if=True)
    made = RecordedRun.read(layout.absolute_path(given["run"]))
    _refuse_unused(given, made)
    if made.facts.what_if:
        return _check(what_if, made)
    if given["steps"] is None:
        raise UsageError("--steps FIRST:LAST says which steps to change. Add it.")
    first, last = window(what_if, given["steps"])
    labels, settings, change = _changes(what_if, given)
    if given["each"]:
        return _rank(what_if, range(first, last + 1), given["windows"], labels)
    most = what_if.recorded.config.run.max_steps
    until = last if given["until"] is None else given["until"]
    if not last <= until <= most:
        raise UsageError(f"--until {until}: give a step from {last} to {most}.")
    if (out := given["out"]) is not None:
        files.check_new(out := layout.absolute_path(out), "--out")
        if not what_if.recorded.is_own:
            raise UsageError(f"--out: {what_if.run} is not yours. Give your own run.")
    if not _is_same(what_if, first, last, until):
        return 1
    outcome = what_if.change(labels, settings)
    how = f"what if in steps {first} to {last} {change}"
    _print(what_if, outcome, how)
    if out:
        changed = (labels != what_if.training.labels).nonzero()[0]
        record = {
            "run": str(what_if.run),
            "config": files.sha256(what_if.run / layout.CONFIG),
            "steps": f"{first}:{last}:{until}",
            "towers": f"{what_if.training.config.machine.towers}",
            "change": how,
            "labels": json.dumps({int(at): int(labels[at]) for at in changed}),
            "settings": json.dumps(settings),
        }
        what_if.save(out, record, outcome)
        print(f"The changed run is in {out}")
    return 0


def _refuse_unused(given: dict[str, Any], made: RecordedRun) -> None:
    what = "a changed run" if made.facts.what_if else "--each" if given["each"] else ""
    names = ["until", "corrections", "without_class", "out", *_SETTINGS] if what else []
    names += ["steps", "each"] if made.facts.what_if else []
    if found := [name for name in names if given[name] is not None]:
        raise UsageError(f"{what} and --{found[0]} cannot be combined. Omit one.")
    if given["windows"] != 1 and not given["each"]:
        raise UsageError("--windows needs --each.")


def _check(what_if: "WhatIf", made: RecordedRun) -> int:
    """Computes again a run that this command wrote; returns the exit code."""
    record, labels = made.facts.what_if, what_if.training.labels.copy()
    if files.sha256(what_if.run / layout.CONFIG) != record["config"]:
        raise UsageError(f"{what_if.run} is no longer the run that was changed.")
    for at, label in json.loads(record["labels"]).items():
        labels[int(at)] = label
    if not _is_same(what_if, *map(int, record["steps"].split(":"))):
        return 1
    what_if.change(labels, json.loads(record["settings"]))
    differs, far, bound, *_ = what_if.compare_saved(made.directory)
    print(
        f"{made.directory} {'differs from' if differs else 'is'} {what_if.run}, "
        f"{record['change']}: at most {far:.2g} apart; rounding explains {bound:g}."
    )
    return int(differs)


def _changes(
    what_if: "WhatIf", given: dict[str, Any]
) -> "tuple[np.ndarray, dict[str, float], str]":
    """Returns the changed labels, -1 to leave out, and settings, and both in words."""
    from cifar10.input import regrouping

    training = what_if.training
    labels, classes = training.labels.copy(), training.dataset.class_names
    settings = {name: given[name] for name in _SETTINGS if given[name] is not None}
    flag = "each" if given["each"] else "corrections"
    if name := given[flag]:
        labels = regrouping.corrected_labels(training.dataset, name, f"--{flag}")
    if name := given["without_class"]:
        if name not in classes:
            of = first_few(classes, 20)
            raise UsageError(f"--without_class {name}: the classes are {of}.")
        labels[training.labels == classes.index(name)] = -1
    if (labels < 0).all() and not given["each"]:
        raise UsageError("No picture would be left. Leave out fewer.")
    if not settings and (labels == training.labels).all():
        raise UsageError("Nothing changes. Give --corrections or --learning_rate.")
    if "learning_rate" in settings and what_if.recorded.config.update.keras_schedule:
        raise UsageError("--learning_rate: this run's own schedule sets the rates.")
    training.config.with_values(**settings)  # Refuses unsuitable values.
    said = [*regrouping.in_words(what_if.names, training.labels, labels)]
    said += [f"with {name} {value:g}" for name, value in settings.items()]
    return labels, settings, " and ".join(said)


def _is_same(what_if: "WhatIf", first: int, last: int, until: int) -> bool:
    """Recomputes the steps unchanged, and says whether they are the run's."""
    differs, far, bound, step, place = what_if.control(first, last, until)
    how = f"within {far:.2g}; rounding explains {bound:g}" if bound else "bit for bit"
    said = f"steps {first:,} to {until:,} equal the run's, {how}."
    if differs:
        said = f"step {step:,} differs by {far:.2g} ({place}): a change proves nothing."
    print(f"Control: {said}", flush=True)
    return not differs


def _print(what_if: "WhatIf", outcome: "Outcome", how: str) -> None:
    """Prints how far weights, scores and predictions are from the run's."""
    from cifar10.towers.rounding import relative_difference

    print(f"{how[0].upper()}{how[1:]}?")
    for step, weights in outcome.weights.items():
        far = relative_difference(weights, what_if.unchanged.weights[step])
        print(f"  step {step:,}: the weights are {far:.2g} apart")
    before, after = what_if.unchanged.result, outcome.result
    dataset = what_if.training.dataset
    print(f"On the {dataset.validation_split} images, unchanged and changed:")
    for name, value in before.scalars.items():
        print(f"  {name:28}{value:10.4f}{after.scalars[name]:10.4f}")
    differ = before.outcomes.predictions != after.outcomes.predictions
    print(f"  {differ.sum():,} of {len(differ):,} predictions differ")
    right = [result.sums.confusion.diagonal() for result in (before, after)]
    for name, one, two in zip(dataset.class_names, *right, strict=True):
        if one != two:
            print(f"  correct in class {name}: {one:,}, changed {two:,}")


def _rank(what_if: "WhatIf", steps: range, windows: int, labels: "np.ndarray") -> int:
    """Prints pictures by the effect of changing each alone; returns the exit code."""
    first, length, most = steps[0], len(steps), what_if.recorded.config.run.max_steps
    if not 1 <= windows <= (possible := (most - first + 1) // length):
        raise UsageError(f"--windows {windows}: give 1 to {possible}.")
    unchanged = what_if.training.labels
    suspects = (labels != unchanged).nonzero()[0].tolist()
    found: dict[int, list[float]] = {one: [] for one in suspects}
    begins = range(first, first + windows * length, length)
    for begin in begins:
        what_if.check_recorded(begin, begin + length - 1)
    for begin in begins:
        end = begin + length - 1
        if not _is_same(what_if, begin, end, end):
            return 1
        for one in [one for one in suspects if one in what_if.drawn]:
            alone = unchanged.copy()
            alone[one] = labels[one]
            results = what_if.unchanged.result, what_if.change(alone, {}).result
            before, after = [result.scalars["cross_entropy"] for result in results]
            found[one].append(after - before)
    print("Rise of the validation loss for each changed picture, mean +- deviation:")
    seen = [(statistics.mean(of), one, of) for one, of in found.items() if of]
    for mean, one, values in sorted(seen):
        spread = f"{statistics.stdev(values):.2g}" if len(values) > 1 else "?"
        seen_in = counted(len(values), "window")
        print(f"  {mean:+.3g} +- {spread} in {seen_in}: {what_if.names[one]}")
    if unseen := len(suspects) - len(seen):
        print(f"  In no batch of these steps: {counted(unseen, 'picture')}")
    return 0
