"""Trains the same two networks in today's frameworks, side by side.

    python -m benchmarks.rosetta --epochs 10 --data_dir ~/cifar10 --imdb_dir ~/imdb

Every row is a process of its own, and all take turns epoch by epoch. Before anything
is timed, each one's loss, gradients, rule of update and dropout are compared with a
reference; who does not agree is not ranked. --quick does that for all that is
installed, with a few steps of noise, in minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import flags as shared, machine
from benchmarks.rosetta import data, plots, results as reports
from benchmarks.rosetta.participant import Data
from benchmarks.rosetta.rows import EXTRA, FEWEST_EPOCHS, ROWS, Result
from benchmarks.rosetta.turns import compare
from cifar10.errors import UsageError, reason
from cifar10.process import entry_point

_PACKAGES = (*machine.PACKAGES, "jax", "jaxlib", "flax", "optax")


class _HelpFormatter(
    argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
    """Keeps the lines of a description and shows the flags' defaults."""


def _parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rosetta",
        description=__doc__,
        formatter_class=_HelpFormatter,
    )
    add = parser.add_argument
    add("--network", choices=("cnn", "gru", "both"), default="both", help="which")
    add("--epochs", type=int, default=10, help="epochs of a run of the CNN")
    add("--gru_epochs", type=int, default=3, help="epochs of a run of the GRU")
    add("--runs", type=int, default=1, help="full runs of each row")
    add("--steps", type=int, default=0, help="steps an epoch at most; 0: all")
    add("--only", nargs="+", default=[], metavar="NAME", help="rows, by parts of names")
    add("--quick", action="store_true", help="check all, and a few steps of noise")
    add("--threads", type=int, default=machine.cores(), help="of each row")
    add("--data_dir", help="folder of CIFAR-10; else CIFAR10_DATA_DIR")
    add("--imdb_dir", help="folder of aclImdb or its archive; else IMDB_DATA_DIR")
    add(
        "--output_dir",
        type=Path,
        default=Path("build/rosetta"),
        help="for results.json, results.md, time.png and accuracy.png",
    )
    flags = parser.parse_args()
    shared.check_at_least_one(flags, "epochs", "gru_epochs", "runs", "threads")
    if flags.steps < 0:
        raise UsageError(f"--steps {flags.steps}: it is 0, for all, or more.")
    if flags.threads > machine.cores():
        raise UsageError(
            f"--threads {flags.threads}: there are {machine.cores()} cores."
        )
    if flags.quick:
        for name in ("epochs", "gru_epochs", "steps", "data_dir", "imdb_dir"):
            if getattr(flags, name) != parser.get_default(name):
                raise UsageError(f"--quick and --{name}: leave one of them out.")
        flags.epochs = flags.gru_epochs = FEWEST_EPOCHS
    return flags


def _prepare(network: str, folder: Path, flags: argparse.Namespace) -> Data:
    """Returns the data of a network, written into a new folder."""
    own = folder / network
    own.mkdir()
    if flags.quick:
        return data.noise(own, network)
    if network == "cnn":
        return data.cifar(own, flags.data_dir, flags.steps)
    return data.reviews(own, flags.imdb_dir, flags.steps)


def _save(found: Sequence[Result], about: dict, folder: Path) -> None:
    """Writes the results so far."""
    for name, text in (
        ("results.json", reports.as_json(found, about)),
        ("results.md", reports.markdown(found, about) + "\n"),
    ):
        # At one go: a full disk leaves what was there.
        part = folder / f"{name}.part"
        with _sentence(folder, "--output_dir"):
            part.write_text(text, "utf-8")
            part.replace(folder / name)


@contextlib.contextmanager
def _sentence(folder: Path, way_on: str) -> Iterator[None]:
    """Makes an error of the disk one that names the way on.

    Raises:
        UsageError: A file or folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {reason(error)}. Make room, or name another "
            f"folder with {way_on}."
        ) from error


def main() -> None:
    """Runs the comparison, prints its tables and writes its files."""
    flags = _parse_flags()
    rows = shared.select(ROWS, flags.only, lambda row: row.name)
    networks = ("cnn", "gru") if flags.network == "both" else (flags.network,)
    epochs = {"cnn": flags.epochs, "gru": flags.gru_epochs}
    with _sentence(flags.output_dir, "--output_dir"):
        flags.output_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=flags.output_dir).close()
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="rosetta-") as folder:
        with _sentence(Path(folder), "the environment variable TMPDIR"):
            prepared = {name: _prepare(name, Path(folder), flags) for name in networks}
        about = {
            **machine.describe(),
            "versions": machine.versions(_PACKAGES),
            "threads": flags.threads,
            "data": {name: one.description for name, one in prepared.items()},
            "examples": {
                name: one.steps * one.batch_size for name, one in prepared.items()
            },
            "epochs": epochs,
        }
        for network in networks:
            done = list(found)
            found += compare(
                rows,
                network,
                prepared[network],
                epochs=epochs[network],
                runs=flags.runs,
                threads=flags.threads,
                save=lambda so_far, done=done: _save(
                    [*done, *so_far], about, flags.output_dir
                ),
            )
    _save(found, about, flags.output_dir)
    print(reports.markdown(found, about))
    if importlib.util.find_spec("matplotlib") is None:
        print(f"No plots: pip install -e .[{EXTRA}]", file=sys.stderr)
    else:
        folder = flags.output_dir
        with _sentence(folder, "--output_dir"):
            plots.draw(found, folder / "time.png", folder / "accuracy.png")


if __name__ == "__main__":
    entry_point.run_program(main)
