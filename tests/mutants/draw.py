"""Draws faults at random: how many of what nobody chose do the fast tests notice?

    python tests/mutants/run.py --draw 100 --seed 1
    python tests/mutants/run.py --draw 100 --seed 1 --only 7 31    two of the same

A file is drawn by its lines, files that matter most twice; then one of the kinds of
faults that it has room for (`operators.py`), then a place. Each is tried as those of
mutants.toml are, by tests that run the line (`covering.py`): those of the same room
first and short ones before long ones, up to `_SECONDS`. Survivors are listed with the
tests that passed over them. One that changes nothing for a user belongs in
equivalents.toml, with the reason, and is counted out.

Kept tools do not fit. mutmut 3 runs tests in the process that it forks, and a started
TensorFlow does not survive that; it leaves alone what is outside of functions.
cosmic-ray starts Python anew for each fault, and writes into the tree itself.
"""

import ast
import collections
import difflib
import json
import math
import random
import re
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import covering
import operators

_PACKAGE = covering.ROOT / "cifar10"
# What is read first, what a run must not lose, what it learns from, how it is scored.
_TWICE = (
    *("training/loop.py", "towers/towers.py", "towers/update.py", "model.py"),
    *("run_directory/", "input/", "evaluation/", "training/progress.py"),
)
_SECONDS = 300.0  # Of tests for a fault, by what they took when covering was recorded.
# Seconds after which they are ended. A test that hangs fails before, by its own limit.
_LIMIT = 900
_PROCESSES = 3  # Each of 1 GB.
_FEW = 6  # Tests that are tried first, as importing all takes seconds.


class Drawn(NamedTuple):
    """A fault that was drawn."""

    number: int
    file: str  # Below cifar10/.
    edit: operators.Edit
    line: int
    change: str  # The lines that differ, without indentation.

    def __str__(self):
        head = f"{self.number}: cifar10/{self.file}:{self.line}: {self.edit.operator}"
        return f"{head}\n{self.change}"

    @property
    def room(self):
        return self.file.partition("/")[0].removesuffix(".py")

    def faulty(self, text):
        """Returns the file's text with the fault."""
        return self.edit.of(text)


def draw(count, seed):
    """Returns different faults, the same for a seed as long as the package is."""
    numbers = random.Random(seed)
    paths = sorted(_PACKAGE.rglob("*.py"))
    texts = {str(path.relative_to(_PACKAGE)): path.read_text() for path in paths}
    weights = [
        text.count("\n") * (2 if file.startswith(_TWICE) else 1)
        for file, text in texts.items()
    ]
    edits, drawn = {}, {}
    while len(drawn) < count:
        (file,) = numbers.choices([*texts], weights)
        text = texts[file]
        if file not in edits:
            edits[file] = collections.defaultdict(list)
            for edit in operators.Finder(text).edits():
                edits[file][edit.operator].append(edit)
        if not edits[file]:
            continue
        edit = numbers.choice(edits[file][numbers.choice(sorted(edits[file]))])
        line = text.encode()[: edit.begin].count(b"\n") + 1
        if (file, edit) not in drawn:
            change = _change(text, edit.of(text))
            drawn[file, edit] = Drawn(len(drawn), file, edit, line, change)
    return [*drawn.values()]


def _change(before, after):
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)][2:]
    return "\n".join(f"{one[0]} {one[1:].strip()}" for one in lines if one[0] in "-+")


def tests_of(fault, covered):
    """Returns which tests to run, the most telling first, and how many could be.

    A line that no test runs in its own process may be run in another, by a test that
    runs other lines of the file, or by one of the same room.
    """
    of_file, seconds = covered["lines"].get(fault.file, {}), covered["seconds"]
    in_room = f"tests/{fault.room}/"
    names = set()
    for file, line in _lines_that_use(fault):
        names |= set(covered["lines"].get(file, {}).get(str(line), ()))
    if not names:
        names = {name for tests in of_file.values() for name in tests}
        names |= {name for name in seconds if name.startswith(in_room)}
    chosen, left = [], _SECONDS
    for name in sorted(
        filter(_exists, names),
        key=lambda one: (not one.startswith(in_room), seconds[one]),
    ):
        if not chosen or seconds[name] <= left:
            chosen.append(name)
            left -= seconds[name]
    return chosen, len(names)


def _lines_that_use(fault):
    """Yields the lines whose tests may notice a fault, as pairs of file and line.

    A default and a value of a class or a module are computed at an import, by whichever
    test comes first. A default is used by its function, others by lines that name them.
    """
    tree = ast.parse((_PACKAGE / fault.file).read_text())
    around = [one for one in ast.walk(tree) if _surrounds(one, fault.line)]
    functions = [one for one in around if isinstance(one, ast.FunctionDef)]
    if functions and fault.line < (body := functions[-1].body)[0].lineno:
        lines = range(body[0].lineno, body[-1].end_lineno + 1)
        yield from ((fault.file, line) for line in lines)
    elif not functions and (named := _targets(around)):
        pattern = re.compile(rf"\b({'|'.join(named)})\b")
        for path in _PACKAGE.rglob("*.py"):
            for number, text in enumerate(path.read_text().splitlines(), 1):
                place = str(path.relative_to(_PACKAGE)), number
                if place != (fault.file, fault.line) and pattern.search(text):
                    yield place
    else:
        yield fault.file, fault.line


def _surrounds(node, line):
    return getattr(node, "lineno", math.inf) <= line <= getattr(node, "end_lineno", 0)


def _targets(nodes):
    """Returns the names that the assignments among nodes give a value."""
    assigned = [one for one in nodes if isinstance(one, ast.Assign | ast.AnnAssign)]
    of_each = [ast.walk(target) for one in assigned for target in _left(one)]
    return {one.id for within in of_each for one in within if isinstance(one, ast.Name)}


def _left(node):
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _exists(name):
    file, _, function = name.partition("::")
    path = covering.ROOT / file
    return path.exists() and f"def {function.rpartition('::')[2]}(" in path.read_text()


def _try_out(run_apart, covered, fault):
    """Returns what noticed a fault, empty if nothing did, and the tests that ran."""
    names, most = tests_of(fault, covered)
    began = time.monotonic()
    ended = output = ""
    for some in (names[:_FEW], names[_FEW:]):
        if some and not ended:
            ended, output = run_apart(fault, some, _LIMIT)
    said = [one[1:].strip() for one in output.splitlines() if one.startswith("E ")]
    noticed = ended and f"{ended} {' '.join(said)}"[:100]
    seconds = time.monotonic() - began
    print(f"{seconds:5.1f} s  {fault}\n         {noticed or 'SURVIVED'}", flush=True)
    return noticed, f"{len(names)} of {most}: {' '.join(names)}"


def main(count, seed, only, run_apart):
    """Tries out drawn faults and reports; returns the exit code."""
    began = time.monotonic()
    if not covering.KEPT.exists():
        print("First all fast tests are run, to see which lines each runs.", flush=True)
        subprocess.run([sys.executable, covering.__file__], check=True)
    covered = json.loads(covering.KEPT.read_text())
    rows = tomllib.loads(Path(__file__).with_name("equivalents.toml").read_text())
    known = {(file, change.strip()) for file, change, _ in rows["faults"]}
    drawn = [one for one in draw(count, seed) if not only or one.number in only]
    faults = [one for one in drawn if (one.file, one.change) not in known]
    with ThreadPoolExecutor(_PROCESSES) as pool:
        ended = [*pool.map(lambda one: _try_out(run_apart, covered, one), faults)]
    pairs = zip(faults, ended, strict=True)
    survived = {one: tests for one, (noticed, tests) in pairs if not noticed}
    for fault, tests in survived.items():
        print(f"\nSURVIVED {fault}\npassed: {tests}")
    put = collections.Counter(one.room for one in faults)
    left = collections.Counter(one.room for one in survived)
    print("\nNoticed, by room:")
    for room, number in sorted(put.items()):
        print(f"  {room:<16}{number - left[room]:3} of {number:3}")
    print(
        f"{len(faults) - len(survived)} of {len(faults)} faults of seed {seed} noticed "
        f"by fast tests, {len(drawn) - len(faults)} more are equivalent; "
        f"{(time.monotonic() - began) / 60:.1f} minutes."
    )
    return 0
