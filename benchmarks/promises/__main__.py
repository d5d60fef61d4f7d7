"""Runs the promises of this package on others too, as far as they are installed.

    python -m benchmarks.promises
    python -m benchmarks.promises --adapter "python my_adapter.py"

Each trainer is run as its own documents recommend, by an adapter
(benchmarks/promises/adapters), in processes of its own. The second command runs the
contract on your trainer. What is broken is tried twice.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, report
from benchmarks.promises.contract import PROMISES, Cell, Contract, NotInstalledError
from benchmarks.runner import show_progress
from cifar10.errors import UsageError
from cifar10.process import entry_point

_ADAPTERS = Path(__file__).parent / "adapters"
# By name: the adapter's file and its arguments.
TRAINERS: dict[str, tuple[str, ...]] = {
    "ours": ("ours.py",),
    "Keras fit": ("keras_fit.py",),
    "Keras fit, MirroredStrategy": ("keras_fit.py", "mirrored"),
    "PyTorch DistributedDataParallel": ("pytorch_ddp.py",),
    "Lightning": ("lightning_trainer.py",),
    "Lightning, saved within epochs": ("lightning_trainer.py", "within"),
    "Hugging Face Trainer": ("hugging_face.py",),
}


def command_of(name: str, python: str = sys.executable) -> list[str]:
    """Returns the command of an adapter of this package."""
    file, *words = TRAINERS[name]
    return [python, str(_ADAPTERS / file), *words]


def try_all(
    commands: dict[str, list[str]], promises: Sequence[str], folder: Path
) -> dict[str, dict[str, Cell] | str]:
    """Tries promises on trainers.

    Args:
        commands: Of the adapters, by name.
        promises: Names in `PROMISES`.
        folder: For everything that is written.

    Returns:
        By title: the cells by promise, or why there are none.
    """
    found: dict[str, dict[str, Cell] | str] = {}
    for number, (name, command) in enumerate(commands.items()):
        own = folder / str(number)
        own.mkdir()
        try:
            contract = Contract(command, own)
        except NotInstalledError as error:
            found[name] = f"not installed: {error}"
            show_progress(f"{name}: {found[name]}")
            continue
        trainer = contract.trainer
        cells: dict[str, Cell] = {}
        for promise in promises:
            cells[promise] = contract.check(promise)
            show_progress(f"{trainer.name}, {promise}: {cells[promise]}")
        title = f"[{trainer.name}]({trainer.documents}) {trainer.version}"
        found[f"{title}, {name}" if title in found else title] = cells
    return found


def markdown(found: dict[str, dict[str, Cell] | str]) -> str:
    """Returns the table, one line for each promise."""
    tried = {title: one for title, one in found.items() if not isinstance(one, str)}
    absent = [f"{title}: {one}" for title, one in found.items() if isinstance(one, str)]
    promises = next(iter(tried.values()), {})
    lines = []
    for promise in promises:
        cells = [one[promise] for one in tried.values()]
        marks = [f"{cell}{' (twice)' if cell.times > 1 else ''}" for cell in cells]
        lines.append([PROMISES[promise], *marks])
    return "\n\n".join([report.table(["promise", *tried], lines), *absent])


def _parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.promises",
        description=__doc__,
        formatter_class=report.HelpFormatter,
    )
    add = parser.add_argument
    add("--adapter", nargs="+", default=[], metavar="COMMAND", help="of your trainers")
    add("--only", nargs="+", default=[], metavar="NAME", help="parts of names")
    add("--promise", nargs="+", choices=PROMISES, default=list(PROMISES), help="which")
    add("--python", default=sys.executable, help="interpreter of the peers' packages")
    return parser.parse_args()


def main() -> None:
    """Tries the promises and prints the table."""
    flags = _parse_flags()
    try:
        commands = {one: shlex.split(one) for one in flags.adapter}
    except ValueError as error:
        raise UsageError(f"--adapter: {error}. Give a command.") from error
    if not all(commands.values()):
        raise UsageError("--adapter: a command is empty.")
    if flags.adapter and flags.only:
        raise UsageError("--only chooses trainers of the table. Omit it.")
    for part in [] if flags.adapter else flags.only or [""]:
        names = [name for name in TRAINERS if part.lower() in name.lower()]
        if not names:
            raise UsageError(f"--only {part!r}: no trainer of {', '.join(TRAINERS)}.")
        commands |= {name: command_of(name, flags.python) for name in names}
    with tempfile.TemporaryDirectory(prefix="promises-") as folder:
        found = try_all(commands, flags.promise, Path(folder))
    about = machine.describe()
    print(report.describe_conditions(about), "\n\n", markdown(found), sep="")
    for command, why in found.items():
        if flags.adapter and isinstance(why, str):
            raise UsageError(f"--adapter {command!r} describes no trainer ({why}).")


if __name__ == "__main__":
    entry_point.run_program(main)
