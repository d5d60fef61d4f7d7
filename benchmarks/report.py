"""What was measured, as Markdown tables and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import parity
from benchmarks.rows import BATCH_SIZE, KERAS, OURS, PYTORCH, REAL, TUTORIAL, Result

_NO_FIGURE = "-"
_BREAK = "  \n"  # Of a line, in Markdown.
_CONDITIONS = (
    "Constant input is one batch in memory, which reads and distorts nothing. Keras "
    "(jit_compile=False) and PyTorch (channels last) keep no moving averages, the "
    "others do. Everyone may use all cores; the two processes of "
    "DistributedDataParallel share them."
)
_LEAST_DIFFERENCE = 1e-7  # Float32's own; equal numbers do not mean equal arithmetic.


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns the whole report.

    Args:
        results: One for each row, in the order of the table.
        about: What `machine.describe` returns, with `repeats`, `steps` and `data`.
    """
    training = [result for result in results if result.row.is_training]
    alone = [result for result in results if not result.row.is_training]
    parts = [_about(about)]
    if training:
        parts += [_training_table(training), _CONDITIONS, _agreement(training)]
        parts.append(_scaling_table(training))
    if alone:
        parts.append(_input_table(alone))
    return "\n\n".join(part for part in parts if part)


def as_json(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Returns everything that was measured, window by window."""
    rows = [
        {
            "name": result.row.name,
            "input": result.row.input,
            "precision_asked_for": result.row.precision,
            "precision": result.precision,
            "images_per_step": result.row.images_per_step,
            "images_per_second": result.rates,
            "median": statistics.median(result.rates) if result.rates else None,
            "problem": result.problem or None,
            "loss_difference": result.agreement and result.agreement.loss,
            "gradient_difference": result.agreement and result.agreement.gradient,
        }
        for result in results
    ]
    return json.dumps({**about, "rows": rows}, indent=2) + "\n"


def ratio(result: Result, peer: Result | None) -> float | None:
    """Returns the median over the windows of a result's rate over a peer's.

    Both windows of a pair are of one turn, so that a drift of the machine cancels out.
    None where one of them was not measured.
    """
    if not peer or not peer.is_measured or not result.is_measured:
        return None
    pairs = zip(result.rates, peer.rates, strict=True)
    return statistics.median(own / other for own, other in pairs)


def where(about: dict[str, Any]) -> str:
    """Returns on what was measured, from what `machine.describe` returns."""
    instructions = ", ".join(about["bfloat16"])
    bfloat16 = f"native ({instructions})" if instructions else "emulated"
    gpus = ", ".join(about["accelerators"]) or "no GPU"
    versions = [f"{name} {number}" for name, number in about["versions"].items()]
    lines = [
        f"{about['date']}, commit {about['commit']}.",
        f"{about['processor']}, {about['cores']} cores, bfloat16 {bfloat16}; {gpus}.",
        f"Versions: {', '.join(versions)}.",
    ]
    return _BREAK.join(lines)


def _about(about: dict[str, Any]) -> str:
    lines = [where(about)]
    lines += [f"{kind.title()} input: {what}." for kind, what in about["data"].items()]
    lines.append(
        f"Windows: {about['repeats']} of each rival, in turn, of as many images as "
        f"{about['steps']} steps of {BATCH_SIZE}."
    )
    return _BREAK.join(lines)


def _training_table(results: Sequence[Result]) -> str:
    tutorial = _first(results, TUTORIAL)
    keras = _first(results, KERAS)
    torch = max(
        (one for one in results if one.row.family == PYTORCH and one.is_measured),
        key=lambda one: statistics.median(one.rates),
        default=None,
    )
    header = ["what", "input", "precision", "images/s: median (least to most)"]
    header += [
        "times the tutorial's graph",
        "times Keras fit",
        "times PyTorch's best",
    ]
    peers = (tutorial, keras, torch)
    return table(
        header,
        (
            [
                *_names(result),
                _rate(result),
                *(_times(ratio(result, peer)) for peer in peers),
            ]
            for result in results
        ),
    )


def _scaling_table(results: Sequence[Result]) -> str:
    """Compares our rows of one precision with one tower on real input."""
    bases = {
        one.row.precision: one
        for one in results
        if one.row.family == OURS
        and one.row.options["towers"] == 1
        and one.row.input == REAL
        and one.is_measured
    }
    compared = [
        one
        for one in results
        if one.row.family == OURS
        and one.is_measured
        and one.row.precision in bases
        and one not in bases.values()
    ]
    if not compared:
        return ""
    return table(
        ["what", "input", "precision", "times ours, 1 x 128, real"],
        (
            [*_names(one), _times(ratio(one, bases[one.row.precision]))]
            for one in compared
        ),
    )


def _input_table(results: Sequence[Result]) -> str:
    rows = ([result.row.name, result.row.input, _rate(result)] for result in results)
    return table(["what", "input", "images/s: median (least to most)"], rows)


def _agreement(results: Sequence[Result]) -> str:
    """Says how far the rows that were timed are from our float32 tower."""
    sentences = []
    for precision in dict.fromkeys(one.precision for one in results if one.is_measured):
        found = [
            one.agreement
            for one in results
            if one.is_measured and one.precision == precision and one.agreement
        ]
        if found:
            loss_bound, gradient_bound = parity.bounds(precision)
            loss = max(_LEAST_DIFFERENCE, *(one.loss for one in found))
            gradient = max(one.gradient for one in found)
            sentences.append(
                f"{precision}: loss within {loss:.1g} (bound {loss_bound:g}), every "
                f"gradient within {gradient:.1g} (bound {gradient_bound:g})."
            )
    if not sentences:
        return ""
    return (
        "Relative differences from our float32 tower on one batch and the same initial "
        "values, before timing: " + " ".join(sentences)
    )


def _names(result: Result) -> list[str]:
    asked = result.row.precision
    used = result.precision or asked
    shown = asked if used == asked else f"{asked}: {used}"
    return [result.row.name, result.row.input, shown]


def _rate(result: Result) -> str:
    """Returns the median and the range, or why there is none."""
    if not result.is_measured:
        return result.problem or "not measured"
    rates = result.rates
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def _times(value: float | None) -> str:
    return _NO_FIGURE if value is None else f"{value:.2f}"


def _first(results: Iterable[Result], family: str) -> Result | None:
    return next((one for one in results if one.row.family == family), None)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
