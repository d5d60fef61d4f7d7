"""What was measured, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.rosetta import parity
from benchmarks.rosetta.rows import Result, ranked

_NO_FIGURE = "-"
_TITLES = {"cnn": "The convolutional network", "gru": "The recurrent network"}
_HEADER = (
    "rank",
    "framework",
    "seconds an epoch: mean ± standard deviation (epochs)",
    "examples/s",
    "times the fastest",
    "first two steps, compilation included, s",
    "test accuracy (runs)",
    "gradients differ by",
    "how",
)


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns the whole report, as it is printed and pasted.

    Args:
        results: One for each row and network.
        about: What `machine.describe` returns, with `threads` and, by network, `data`
            (descriptions), `examples` (in an epoch) and `epochs` (of a run).
    """
    versions = [f"{name} {number}" for name, number in about["versions"].items()]
    lines = [
        f"{about['date']}, commit {about['commit']}.",
        f"{about['processor']}, {about['cores']} cores; no row uses a GPU.",
        f"{about['threads']} threads for each row; float32.",
        f"Versions: {', '.join(versions)}.",
    ]
    parts = ["  \n".join(lines)]
    for network in dict.fromkeys(one.network for one in results):
        of_network = [one for one in results if one.network == network]
        parts += [
            f"### {_TITLES[network]}",
            _data(about, network),
            report.table(_HEADER, _lines(of_network, about["examples"][network])),
        ]
    least, most = parity.RISE_BOUNDS
    parts.append(
        "Before timing, each row's loss and logits of the first batch and its "
        "gradients (CNN: of noise without ties) were within "
        f"{parity.BOUND:g} of a reference in NumPy, what two steps change "
        f"within {parity.UPDATE_BOUND:g}, and what dropout adds to the loss was "
        f"{least} to {most} times the reference's; predictions repeated bit for bit. A "
        "row that does not agree is not ranked. The rows took turns, epoch by epoch."
    )
    return "\n\n".join(parts)


def as_json(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns everything, each epoch included; the arguments are as of `markdown`."""
    rows = [
        {
            "network": one.network,
            "name": one.row.name,
            "how": one.row.how,
            "images": one.row.images,
            "problem": one.problem or None,
            "warm_up_seconds": one.warm_up,
            "seconds_an_epoch": one.seconds,
            "standard_deviation": one.deviation,
            "accuracies": one.accuracies,
            "epochs": [dataclasses.asdict(epoch) for epoch in one.epochs],
            "agreement": one.agreement and dataclasses.asdict(one.agreement),
        }
        for one in results
    ]
    made = _without_infinity({**about, "rows": rows})
    return json.dumps(made, indent=2, allow_nan=False) + "\n"


def _without_infinity(value: Any) -> Any:
    """Returns the same with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: _without_infinity(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinity(one) for one in value]
    is_broken = isinstance(value, float) and not math.isfinite(value)
    return None if is_broken else value


def _data(about: dict[str, Any], network: str) -> str:
    return (
        f"{about['data'][network]}; {about['examples'][network]:,} examples an epoch, "
        f"{about['epochs'][network]} epochs a run."
    )


def _lines(results: Sequence[Result], examples: int) -> list[list[str]]:
    in_order = ranked(results)
    fastest = in_order[0].seconds if in_order else None
    return [
        _line(one, rank, examples, fastest)
        for rank, one in enumerate(in_order, start=1)
    ]


def _line(result: Result, rank: int, examples: int, fastest: float | None) -> list[str]:
    seconds = result.seconds
    is_ranked = seconds is not None and not result.problem
    return [
        str(rank) if is_ranked else _NO_FIGURE,
        result.row.name,
        _seconds(result),
        f"{examples / seconds:,.0f}" if seconds else _NO_FIGURE,
        f"{seconds / fastest:.2f}" if is_ranked and seconds and fastest else _NO_FIGURE,
        _NO_FIGURE if result.warm_up is None else f"{result.warm_up:.1f}",
        _accuracy(result.accuracies),
        f"{result.agreement.gradient[0]:.0e}" if result.agreement else _NO_FIGURE,
        result.problem or _how(result),
    ]


def _how(result: Result) -> str:
    row = result.row
    return f"{row.how}; {row.images}" if result.network == "cnn" else row.how


def _seconds(result: Result) -> str:
    if result.seconds is None:
        return _NO_FIGURE
    spread = "" if result.deviation is None else f" ± {result.deviation:.2f}"
    return f"{result.seconds:.2f}{spread} ({len(result.epochs)})"


def _accuracy(accuracies: Sequence[float]) -> str:
    if not accuracies:
        return _NO_FIGURE
    spread = (
        f" ± {100 * statistics.stdev(accuracies):.1f}" if len(accuracies) > 1 else ""
    )
    return f"{100 * statistics.mean(accuracies):.1f}{spread} % ({len(accuracies)})"
