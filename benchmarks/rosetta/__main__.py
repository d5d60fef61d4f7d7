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
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.rosetta import data, parity
from benchmarks.rosetta.participant import Data
from benchmarks.rosetta.task import TASKS
from benchmarks.runner import Child, Result, Row, measure_in_turn, select_rows
from cifar10.errors import UsageError, reason
from cifar10.process import entry_point

# An epoch of the slowest row on a slow machine.
_PATIENCE_SECONDS = 4 * 3600.0
_QUICK_EPOCHS = 3
_TITLES = {"cnn": "The convolutional network", "gru": "The recurrent network"}

# jaxlib 0.10 hands convolutions to a library that takes twice as long to train this
# network on a CPU as XLA's own (dev/LOG.md, 2026-11-21). How to leave it out of
# them: https://github.com/jax-ml/jax/issues/37465
_XLA_FLAGS = {
    "XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type=-individual_convolution"
}
_ON_TENSORFLOW = {"KERAS_BACKEND": "tensorflow"}
_ON_JAX = {"KERAS_BACKEND": "jax", **_XLA_FLAGS}
# By name: the end of its modules' names, how it is compiled, arguments of its `Model`,
# and variables that are set before it is imported.
FRAMEWORKS: dict[str, tuple[str, str, dict[str, Any], dict[str, str]]] = {
    "ours, 1 tower": ("towers", "tf.function", {"towers": 1}, _ON_TENSORFLOW),
    "ours, 2 towers": ("towers", "tf.function", {"towers": 2}, _ON_TENSORFLOW),
    "TensorFlow": ("tensorflow", "tf.function", {}, {}),
    "Keras on TensorFlow": ("keras", "fit, tf.function", {}, _ON_TENSORFLOW),
    "Keras on JAX": ("keras", "fit, jax.jit", {}, _ON_JAX),
    "Keras on PyTorch": ("keras", "fit, eager", {}, {"KERAS_BACKEND": "torch"}),
    "PyTorch": ("pytorch", "eager, fused optimizer", {}, {}),
    "JAX, Flax NNX, Optax": ("jax", "nnx.jit", {}, _XLA_FLAGS),
}


def make_row(
    name: str, network: str, package: str = "benchmarks.rosetta", **others: Any
) -> Row:
    """Returns the row of a framework with a network.

    Args:
        name: One of `FRAMEWORKS`.
        network: "cnn" or "gru".
        package: Where the framework's modules are.
        **others: Further arguments of `participant.start`.
    """
    framework, how, options, environment = FRAMEWORKS[name]
    if network == "cnn":
        own = ", XLA's own convolutions" if "XLA_FLAGS" in environment else ""
        how = f"{how}; channels last{own}"
    arguments = {
        "module": f"{package}.{network}_{framework}",
        "task": TASKS[network],
        "options": options,
        "environment": environment,
        **others,
    }
    module = "benchmarks.rosetta.participant"
    return Row(name, module, arguments, {"network": network, "how": how})


def compare(
    rows: Sequence[Row],
    reference: Row,
    *,
    epochs: int,
    runs: int,
) -> list[Result]:
    """Measures the rows on one network.

    Args:
        rows: The rows of this network.
        reference: The row that the others are compared with.
        epochs: Of each run.
        runs: From different initial values, with different orders of the batches.
    """
    with contextlib.closing(Child(reference.module, reference.options)) as child:
        expected = child.ask("check")

    def prepare(result: Result, child: Child) -> None:
        result.facts["warm_up_seconds"] = child.ask("warm_up")
        found = child.ask("check")
        result.checks = parity.compare(expected, found, reference.options["task"])

    def measure(result: Result, child: Child, number: int) -> dict[str, Any]:
        del result
        run, epoch = divmod(number, epochs)
        seconds, loss = child.ask("train", epoch, run)
        figures = {"seconds": seconds, "loss": loss, "accuracy": child.ask("accuracy")}
        return {"run": run, "ends_run": epoch + 1 == epochs, **figures}

    return measure_in_turn(
        rows,
        runs * epochs,
        prepare=prepare,
        measure=measure,
        patience=_PATIENCE_SECONDS,
    )


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns the whole report, as it is printed and pasted.

    Args:
        results: One for each row and network.
        about: What `machine.describe` returns, with `threads` and, by network, `data`
            (descriptions), `examples` (in an epoch) and `epochs` (of a run).
    """
    threads = f"{about['threads']} threads for each row; float32; no row uses a GPU."
    parts = [report.describe_conditions(about, threads)]
    header = ["rank", "framework", "seconds an epoch: mean ± deviation (epochs)"]
    header += ["examples/s", "times the fastest"]
    header += ["first two steps, compilation included, s", "test accuracy (runs)"]
    header += ["gradients differ by", "how"]
    for network in dict.fromkeys(one.row.details["network"] for one in results):
        examples = about["examples"][network]
        conditions = (
            f"{about['data'][network]}; {examples:,} examples an epoch, "
            f"{about['epochs'][network]} epochs a run."
        )
        # Nothing is ranked that is not the same network or did not get to its end.
        in_order = sorted(
            (one for one in results if one.row.details["network"] == network),
            key=lambda one: (
                statistics.mean(one.figures("seconds"))
                if one.is_measured
                else float("inf")
            ),
        )
        lines = [
            _line(one, rank, examples, in_order[0])
            for rank, one in enumerate(in_order, start=1)
        ]
        table = report.table(header, lines)
        parts += [f"### {_TITLES[network]}", conditions, table]
    parts.append(
        "A row that does not agree is not ranked. The rows took turns, epoch by epoch. "
        + report.describe_agreement(results)
    )
    return "\n\n".join(parts)


def _line(result: Result, rank: int, examples: int, fastest: Result) -> list[str]:
    gradients = [one.value for one in result.checks if one.what == parity.GRADIENT]
    middle = [report.NO_FIGURE] * 4
    if result.is_measured:
        seconds, least = (
            statistics.mean(one.figures("seconds")) for one in (result, fastest)
        )
        middle = [
            report.mean_and_deviation(result.figures("seconds"), 2),
            f"{examples / seconds:,.0f}",
            f"{seconds / least:.2f}",
            f"{result.facts['warm_up_seconds']:.1f}",
        ]
    accuracies = [100 * one["accuracy"] for one in result.rounds if one["ends_run"]]
    return [
        str(rank) if result.is_measured else report.NO_FIGURE,
        result.row.name,
        *middle,
        report.mean_and_deviation(accuracies, 1, " %")
        if accuracies
        else report.NO_FIGURE,
        report.optional(next(iter(gradients), None), ".0e"),
        result.problem or result.row.details["how"],
    ]


def _parse_flags() -> argparse.Namespace:
    parser = report.build_parser("rosetta", __doc__)
    add = parser.add_argument
    add("--network", choices=("cnn", "gru", "both"), default="both", help="which")
    add("--epochs", type=int, default=10, help="epochs of a run of the CNN")
    add("--gru_epochs", type=int, default=3, help="epochs of a run of the GRU")
    add("--runs", type=int, default=1, help="full runs of each row")
    add("--steps", type=int, default=0, help="steps an epoch at most; 0: all")
    add("--quick", action="store_true", help="check all, and a few steps of noise")
    add("--threads", type=int, default=machine.cores(), help="of each row")
    add("--imdb_dir", help="folder of aclImdb or its archive; else IMDB_DATA_DIR")
    flags = parser.parse_args()
    report.check_at_least(1, flags, "epochs", "gru_epochs", "runs", "threads")
    report.check_at_least(0, flags, "steps")
    if flags.threads > machine.cores():
        raise UsageError(
            f"--threads {flags.threads}: there are {machine.cores()} cores."
        )
    if flags.quick:
        for name in ("epochs", "gru_epochs", "steps", "data_dir", "imdb_dir"):
            if getattr(flags, name) != parser.get_default(name):
                raise UsageError(f"--quick and --{name}: leave one of them out.")
        flags.epochs = flags.gru_epochs = _QUICK_EPOCHS
    return flags


def _prepare(network: str, name: str, flags: argparse.Namespace) -> Data:
    """Returns the data of a network, written into a folder of its own.

    Raises:
        UsageError: There is no room for it.
    """
    folder = Path(name, network)
    try:
        folder.mkdir()
        if flags.quick:
            return data.noise(folder, network)
        if network == "cnn":
            return data.cifar(folder, flags.data_dir, flags.steps)
        return data.reviews(folder, flags.imdb_dir, flags.steps)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {reason(error)}. Make room, or name "
            "another folder with the environment variable TMPDIR."
        ) from error


def main() -> None:
    """Runs the comparison and prints its tables."""
    flags = _parse_flags()
    networks = ("cnn", "gru") if flags.network == "both" else (flags.network,)
    every = [make_row(name, network) for network in networks for name in FRAMEWORKS]
    rows = select_rows(every, flags.only)
    epochs = {"cnn": flags.epochs, "gru": flags.gru_epochs}
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="rosetta-") as name:
        prepared = {network: _prepare(network, name, flags) for network in networks}
        about = {
            **machine.describe(),
            "threads": flags.threads,
            "data": {name: one.description for name, one in prepared.items()},
            "examples": {
                name: one.steps * one.batch_size for name, one in prepared.items()
            },
            "epochs": epochs,
        }

        for network, own in prepared.items():
            of_network = [one for one in rows if one.details["network"] == network]
            reference = make_row("TensorFlow", network)
            for row in (*of_network, reference):
                row.options.update(data=own, threads=flags.threads)
            results += compare(
                of_network,
                reference,
                epochs=epochs[network],
                runs=flags.runs,
            )
    print(markdown(results, about))


if __name__ == "__main__":
    entry_point.run_program(main)
