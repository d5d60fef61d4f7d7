"""Starts the rows, checks that they agree and lets them take turns."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.child import Child, RivalError, noting_problems, tell
from benchmarks.rosetta import parity
from benchmarks.rosetta.data import untied_batches
from benchmarks.rosetta.participant import Data
from benchmarks.rosetta.rows import EXTRA, Epoch, Result, Row
from benchmarks.rosetta.task import TASKS, batches, initial_values

# An epoch of the slowest row on a slow machine.
_PATIENCE_SECONDS = 4 * 3600.0


def compare(
    rows: Sequence[Row],
    network: str,
    data: Data,
    *,
    epochs: int,
    runs: int,
    threads: int,
    save: Callable[[list[Result]], None],
    package: str = "benchmarks.rosetta",
) -> list[Result]:
    """Measures the rows on one network.

    Args:
        rows: What to measure.
        network: "cnn" or "gru".
        data: On what.
        epochs: Of each run.
        runs: From different initial values, with different orders of the batches.
        threads: For each row.
        save: Called with the results so far, after each row's epoch.
        package: Where the rows' modules are.

    Returns:
        One result for each row; those that could not be measured say why.
    """
    results = [Result(row, network) for row in rows]
    reference, given = _reference(network, data)
    with contextlib.ExitStack() as stack:
        children: list[tuple[Result, Child]] = []
        for result in results:
            with noting_problems(result):
                child = stack.enter_context(
                    _start(result.row, network, data, threads, package)
                )
                result.warm_up = child.ask("warm_up", given[0])
                found = child.ask("check", *given)
                task = TASKS[network]
                result.agreement = parity.compare(reference, found, task)
                result.problem = parity.complaint(result.agreement)
                children.append((result, child))
            tell(f"{network}, {result.row.name}: {result.problem or 'ready'}")
        for run in range(runs):
            _run(children, run, epochs, data, lambda: save(results))
    return results


def _run(
    children: Sequence[tuple[Result, Child]],
    run: int,
    epochs: int,
    data: Data,
    save: Callable[[], None],
) -> None:
    """Has all rows train from one set of initial values, in turn, epoch by epoch."""
    for result, child in children:
        if not result.problem:
            with noting_problems(result):
                child.ask("begin", initial_values(result.network, run))
    for epoch in range(epochs):
        for result, child in children:
            if result.problem:
                continue
            with noting_problems(result):
                seconds, loss = child.ask("train", epoch, run)
                if not np.isfinite(loss):
                    raise RivalError(f"the training diverged: its loss is {loss}")
                accuracy = child.ask("accuracy") if data.counts else None
                last = epoch + 1 == epochs
                result.epochs.append(Epoch(run, seconds, loss, accuracy, last))
            tell(
                f"{result.network}, {result.row.name}: "
                + (result.problem or f"epoch {epoch + 1} of {epochs}, {seconds:.1f} s")
            )
            save()


def _reference(network: str, data: Data) -> tuple[parity.Evidence, tuple]:
    """Has the model in NumPy show what it does, and returns from what."""
    module = importlib.import_module(f"benchmarks.rosetta.{network}_numpy")
    inputs = np.load(data.folder / "inputs.npy", mmap_mode="r")
    labels = np.load(data.folder / "labels.npy")
    made = batches(inputs, labels, epoch=0, batch_size=data.batch_size)
    real = list(itertools.islice(made, 2))
    values = initial_values(network)
    given = values, real[0], real if network == "gru" else untied_batches(values)
    return parity.collect(module.Model, TASKS[network], *given), given


def _start(row: Row, network: str, data: Data, threads: int, package: str) -> Child:
    options = {
        "module": f"{package}.{network}_{row.framework}",
        "task": TASKS[network],
        "data": data,
        "threads": threads,
        "options": row.options,
        "environment": row.environment,
    }
    module = "benchmarks.rosetta.participant"
    return Child(module, options, _PATIENCE_SECONDS, EXTRA)
