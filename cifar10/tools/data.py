"""`python -m cifar10 data`: prepares a data set and shows its contents."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10.config import fields, flags, layout, run_config
from cifar10.config.config import Config
from cifar10.config.data_flag import KINDS
from cifar10.config.options import Checked, defaults, names
from cifar10.errors import UsageError, counted, printable
from cifar10.process import entry_point, files, invocation
from cifar10.run_directory import restoring

if TYPE_CHECKING:
    from cifar10.input.dataset_base import Dataset

HELP = "prepare a data set of your pictures, and show its contents"
DESCRIPTION = """Prepares a data set as a training run would, and shows its contents.

    python -m cifar10 data photos
    python -m cifar10 data photos --image_size 128 --contact_sheet photos.png

Prints how many pictures each class has in each split, which pictures were left
out and why, and which are equal or nearly equal: a held-out picture that is
also trained on makes scores too good, and a picture in two classes cannot be
learned. Prints the command to train on the pictures, with --max_bad_images if
too many are bad. A training run with the same flags reuses the prepared
pictures. --contact_sheet draws some pictures of each class. --train_dir writes
the training pictures whose labels a run contradicts to corrections.csv and
corrections.html in the run's directory. Exit code 0: shown; 2: a mistake that
you can fix.
"""

# Flags that decide how a run splits its data.
_DIVISION = ("image_size", "validation_fraction", "val_fraction")
_PREPARATION = {*_DIVISION, "max_bad_images", "data_dir"}

_CLASSES = 30  # Of more classes, only those with the fewest pictures are printed.
_SHOWN = 5  # Most pictures, or groups of equal pictures, to print.
_MARGIN = 10  # Width of the titles of the lines.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """How to show a data set.

    Attributes:
        contact_sheet: PNG file for some pictures of each class (default: none)
        json: print the contents as JSON
        train_dir: directory of a run, to list the labels that the run contradicts
        trust_model: module:function of a model whose code you trust, if you did not
            train the run (default: none)
    """

    contact_sheet: str | None = None
    json: bool = False
    train_dir: str | None = None
    trust_model: str | None = None


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with its command-line arguments; returns its exit code."""
    what = "data set, as in --data of train: a folder, an .npz file, cifar10, ..."
    parser.add_argument("data", metavar="PATH", help=what)
    flags.add_flags(parser, Options)
    flags.add_flags(parser, fields.ALL, leave_out=names(fields.ALL) - _PREPARATION)
    given = flags.parse(parser, words)
    options = Options(**{name: given.pop(name) for name in names(Options) & {*given}})
    if options.train_dir:
        given = {**_division_of(options.train_dir, options.trust_model), **given}
    _show(given, options)
    return 0


def _division_of(train_dir: str, trust_model: str | None) -> dict[str, Any]:
    """Checks that a run is usable, and returns the flags that determined its splits."""
    invocation.require_packages("report", "jinja2")
    restoring.check_usable(train_dir, None, trust_model)
    run = layout.locate_run(train_dir)
    if os.path.lexists(file := run / layout.CORRECTIONS):
        raise UsageError(f"{file} exists and may contain your changes. Rename it.")
    settings = run_config.read_run_config(run)
    recorded = {name: settings[name] for name in _DIVISION if name in settings}
    return dict(recorded.items() - defaults(fields.ALL).items())


def _show(given: Mapping[str, Any], options: Options) -> None:
    """Prepares the data set that the flags select, and prints its contents.

    On request, writes a contact sheet and lists labels that a run's model contradicts.
    """
    from cifar10.input import datasets
    from cifar10.tools import data_contents

    config, flag = Config(**given), "--contact_sheet"
    sheet = options.contact_sheet and layout.absolute_path(options.contact_sheet)
    if sheet:
        files.check_replaceable(sheet, flag, "contact sheet", data_contents.SHEET_MARK)
    # Any number of bad pictures is accepted, since they are listed.
    settings = {**config.values, "max_bad_images": 1.0}
    dataset = datasets.find_for(settings, say_notes=False)
    if not options.json:
        print(f"{'Data:':{_MARGIN}}{dataset.description}", flush=True)
    parts = {part: dataset.read(part) for part in dataset.parts}
    if sheet:
        titles = dataset.description, dataset.class_names
        files.write_output(
            sheet, flag, data_contents.draw_sheet(*titles, *parts["train"])
        )
    found = data_contents.look_at(dataset, parts)
    if options.train_dir:
        entry_point.import_tensorflow()
        from cifar10.tools.label_issues import list_issues

        run = layout.locate_run(options.train_dir)
        found["labels"] = list_issues(dataset, run, options.trust_model)
        given = {**given, "corrections": found["labels"]["corrections"]}
    bad, good = len(found["left_out"]), sum(len(labels) for _, labels in parts.values())
    share = math.ceil(100 * bad / (bad + good)) / 100
    if share > config.dataset.max_bad_images:
        given = {**given, "max_bad_images": share}
    command = _training(given, dataset, len(parts["train"][1]))
    found |= {"contact_sheet": sheet and str(sheet), "next": command}
    print(json.dumps(found) if options.json else "\n".join(_lines(found)))


def _training(given: Mapping[str, Any], dataset: Dataset, count: int) -> str:
    """Returns the command that trains on a data set of `count` training images.

    The command's --train_dir is a new directory.
    """
    name = dataset.name
    if name in KINDS and dataset.directory:
        name = dataset.directory.stem or name
    run = Path("runs", name)
    if run.exists():
        run = files.unused(run.with_name(f"{run.name}."))
    words = [f"--{name}={value}" for name, value in given.items() if name != "data"]
    words = ["--data", given["data"], *words, f"--train_dir={run}"]
    if count < defaults(fields.ALL)["batch_size"]:  # A batch holds no image twice.
        words.append(f"--batch_size={1 << (count.bit_length() - 1)}")
    words += ["--max_steps=300", "--eval_steps=100"]
    return f"{invocation.command('train')} {shlex.join(words)}"


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    edited = ["after you have edited that list:"] if "labels" in found else []
    sections = {
        "Classes": _on_classes(found["classes"]),
        "Left out": _on_left_out(found["left_out"]),
        "Notes": found["notes"],
        "The same": _on_duplicates(**found["duplicates"]),
        "Labels": _on_labels(**found["labels"]) if "labels" in found else [],
        "Sheet": [found["contact_sheet"] or "--contact_sheet FILE.png draws pictures"],
        "Next": [*edited, found["next"]],
    }
    for title, lines in sections.items():
        for number, line in enumerate(lines):
            margin = "" if number else f"{title}:"
            yield f"{margin:{_MARGIN}}{printable(line)}"


def _on_classes(classes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    shown = classes
    if len(classes) > _CLASSES:
        yield f"the {_CLASSES} with the fewest pictures:"
        shown = sorted(classes, key=lambda one: one["train"])[:_CLASSES]
    parts = [part for part in classes[0] if part != "name"]
    yield " ".join(f"{part:>9}" for part in parts)
    for one in shown:
        yield f"{' '.join(f'{one[part]:>9,}' for part in parts)}  {one['name']}"
    total = " ".join(f"{sum(one[part] for one in classes):>9,}" for part in parts)
    yield f"{total}  in all, of {len(classes):,} classes"


def _on_left_out(left_out: Mapping[str, str]) -> Iterator[str]:
    yield counted(len(left_out), "picture") if left_out else "no picture"
    yield from list(left_out.values())[:_SHOWN]
    if len(left_out) > _SHOWN:
        yield f"and {len(left_out) - _SHOWN:,} more"


def _on_duplicates(
    groups: Sequence[Sequence[str]],
    repeated: int,
    in_both_parts: int,
    in_several_classes: int,
    nearly: Sequence[Sequence[str]],
) -> Iterator[str]:
    held_out = "held-out picture is", "held-out pictures are"
    if nearly:
        some = counted(len(nearly), "held-out picture")
        yield f"{some} may be nearly the same as a training picture; look at them:"
        yield from (" ~ ".join(pair) for pair in nearly[:_SHOWN])
    if not groups:
        yield "no two pictures are equal pixel for pixel"
        return
    repeating = counted(repeated, "picture repeats", "pictures repeat")
    yield f"{repeating} another picture pixel for pixel, once prepared"
    if in_both_parts:
        some = counted(in_both_parts, *held_out)
        yield f"{some} trained on too: scores are too good"
    if in_several_classes:
        several = counted(in_several_classes, "picture is", "pictures are")
        yield f"{several} in several classes: no model can learn them"
    for group in groups[:_SHOWN]:
        more = f" and {len(group) - _SHOWN:,} more" if group[_SHOWN:] else ""
        yield " = ".join(group[:_SHOWN]) + more
    if groups[_SHOWN:]:
        yield f"and {len(groups) - _SHOWN:,} more"


def _on_labels(
    agreement: float, contradicted: int, issues: Sequence[Any], corrections: str
) -> Iterator[str]:
    yield f"the run agrees with {agreement:.1%} of the training pictures' labels"
    yield from ("{picture}: {label}, or {class}?".format(**i) for i in issues[:_SHOWN])
    yield f"it contradicts {contradicted:,} labels; listed: {len(issues):,}"
    if contradicted > len(issues):
        yield "(at most 5 % of all labels, or 2,500), many of which may be right:"
    yield f"look at {Path(corrections).with_suffix('.html')},"
    yield f"and edit {corrections}"
