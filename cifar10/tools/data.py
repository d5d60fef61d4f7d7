"""`python -m cifar10 data`: prepares a data set and shows its contents."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cifar10.config import data_flag, fields, flags, layout, run_options
from cifar10.config.config import Config
from cifar10.config.options import defaults
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, counted, first_few
from cifar10.process import entry_point, invocation

HELP = "prepare a data set of your pictures, and show its contents"
DESCRIPTION = """Prepares a data set as a training run would, and shows its contents.

    python -m cifar10 data photos
    python -m cifar10 data photos --train_dir runs/photos

Prints how many pictures each class has in each split, how many were left out, and
which are equal or nearly equal: held-out pictures that are also trained on make
scores optimistic, and a picture in two classes cannot be learned. --train_dir
writes the training pictures whose labels a run contradicts to corrections.csv and
.html in the run's directory. Exit code 0: shown; 2: a mistake that you can fix.
"""

_SHOWN = 5  # Most pictures, or groups of equal pictures, to print.


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    what = "data set, as in --data of train: a folder, a file, cifar10, ..."
    parser.add_argument("data", metavar="PATH", help=what)
    what = "directory of a run, to list the labels that the run contradicts"
    parser.add_argument("--train_dir", metavar="S", help=what)
    what = "print the contents as JSON"
    parser.add_argument("--json", action="store_true", help=what)
    flags.add_flags(parser, run_options.RunOptions, only={"trust_model"})
    flags.add_flags(parser, fields.ALL, only={*data_flag.OF_DIVISION, "data_dir"})
    given = flags.parse(parser, words)
    as_json, train_dir = given.pop("json"), given.pop("train_dir")
    trust_model = given.pop("trust_model", None)
    if train_dir is not None:
        given = {**_division_of(train_dir), **given}
    elif trust_model:
        raise UsageError(f"--trust_model {trust_model} needs --train_dir.")
    found = _look_at(given, train_dir, trust_model)
    print(json.dumps(found) if as_json else "\n".join(_lines(found)))
    return 0


def _division_of(train_dir: str) -> dict[str, Any]:
    """Returns the flags that determined a run's splits."""
    invocation.require_packages("report", "jinja2")
    run = layout.absolute_path(train_dir)
    if os.path.lexists(file := run / layout.CORRECTIONS):
        raise UsageError(f"{file} exists and may contain your changes. Rename it.")
    values = RecordedRun.read(run).values
    recorded = {name: values[name] for name in data_flag.OF_DIVISION}
    return dict(recorded.items() - defaults(fields.ALL).items())


def _look_at(
    given: Mapping[str, Any], train_dir: str | None, trust_model: str | None
) -> dict[str, Any]:
    """Prepares the data set that the flags select; returns what to print about it."""
    import numpy as np

    from cifar10.input import datasets, regrouping
    from cifar10.tools.duplicates import find_duplicates

    # Any number of bad pictures is accepted, since they are listed.
    config = Config(**given).with_values(max_bad_images=1.0)
    run = layout.absolute_path(train_dir or "")
    divided = RecordedRun.read(run) if train_dir else None
    dataset = datasets.find_for(config.dataset, run=divided, say_notes=False)
    splits = {split: dataset.read(split) for split in dataset.splits}
    classes: list[dict[str, Any]] = [{"name": name} for name in dataset.class_names]
    pictures: list[str] = []
    for split, (_, labels) in splits.items():
        counts = np.bincount(labels, minlength=dataset.classes)
        for one, count in zip(classes, counts.tolist(), strict=True):
            one[split] = count
        pictures += regrouping.names_of(dataset, split, len(labels))
    found: dict[str, Any] = {
        "description": dataset.description,
        "classes": classes,
        "left_out": dataset.left_out,
        "notes": [*dataset.notes],
        "duplicates": find_duplicates(splits, pictures),
    }
    if train_dir is not None:
        entry_point.import_tensorflow()
        from cifar10.tools.label_issues import list_issues

        found["labels"] = list_issues(dataset, run, trust_model)
    return found


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"Data: {found['description']}"
    splits = [split for split in found["classes"][0] if split != "name"]
    yield " ".join(f"{split:>9}" for split in splits)
    for one in found["classes"]:
        counts = " ".join(f"{one[split]:>9,}" for split in splits)
        yield f"{counts}  {one['name']}"
    totals = (sum(one[split] for one in found["classes"]) for split in splits)
    yield f"{' '.join(f'{total:>9,}' for total in totals)}  in all"
    yield from (f"Note: {note}" for note in found["notes"])
    yield from _on_duplicates(found["duplicates"])
    if labels := found.get("labels"):
        issues, corrections = labels["issues"], labels["corrections"]
        yield f"Most suspicious labels: {len(issues):,}. {labels['caution']}"
        yield from _few(["{picture}: {label}, or {class}?".format(**i) for i in issues])
        yield f"    look at {Path(corrections).with_suffix('.html')}"
        yield f"    edit {corrections}, and train with it as --corrections"


def _few(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"    {line}" for line in lines[:_SHOWN])
    if len(lines) > _SHOWN:
        yield f"    and {len(lines) - _SHOWN:,} more, which --json shows"


def _on_duplicates(found: Mapping[str, Any]) -> Iterator[str]:
    groups, nearly = found["groups"], found["nearly"]
    yield f"Equal pixel for pixel: {counted(len(groups), 'group')} of pictures"
    yield from _few([first_few(group, _SHOWN) for group in groups])
    if count := found["in_both_parts"]:
        some = counted(count, "held-out picture")
        yield f"    {some} also trained on, so scores are optimistic"
    if count := found["in_several_classes"]:
        some = counted(count, "group")
        yield f"    {some} in several classes, which no model can learn"
    if nearly:
        some = counted(len(nearly), "held-out picture")
        yield f"Possibly near-duplicates of training pictures: {some}"
        yield from _few([" ~ ".join(pair) for pair in nearly])
