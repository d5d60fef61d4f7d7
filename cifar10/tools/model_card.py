"""Writes the model card of an export, a README.md that Hugging Face's hub shows.

The front matter follows https://huggingface.co/docs/hub/model-cards and is written as
JSON, which is valid YAML. The card contains no path of this machine.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import fields, layout, run_config
from cifar10.config.options import is_a
from cifar10.errors import UsageError
from cifar10.process import invocation
from cifar10.run_directory import logs, scores

NAME = "README.md"
# The hub's names of data sets, formats and metrics, by this package's names.
_DATA = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
_LIBRARIES = {"savedmodel": "tensorflow", "litert": "tflite"}
_METRICS = {
    "precision @ 1": "accuracy",
    "precision @ 5": "top_5_accuracy",
    "macro F1": "f1",
    "balanced accuracy": "balanced_accuracy",
}


def build(
    run: Path, name: str, file_format: str, description: Mapping[str, Any]
) -> str:
    """Returns the model card of an export with this name, format and description.

    Raises:
        UsageError: The run has recorded no scores of the step on the test split.
    """
    import jinja2

    settings, step = run_config.read_run_config(run), description["step"]
    kind = "" if description["use_averages"] else "_raw"
    log = run / f"{layout.EVALUATION_EVENTS}{kind}" / layout.METRICS
    entry = scores.comparable(logs.read_lines(log)).get(step)
    if not entry:
        how = invocation.to_score(str(run), settings, step)
        raise UsageError(
            f"--model_card: step {step} has no scores for the card. Score the step "
            f"first:\n  {how}{' --no-use_averages' if kind else ''}"
        )
    found = {key: entry[key] for key in _METRICS if is_a(entry.get(key), float)}
    data, hub_name = settings["data"], _DATA.get(settings["data"])
    result = {
        "task": {"type": "image-classification"},
        "dataset": {"type": hub_name or data, "name": data, "split": "test"},
        "metrics": [{"type": _METRICS[key], "value": found[key]} for key in found],
    }
    names = {*fields.result_determining(settings), "versions"} - {"initial_weights"}
    training = {name: settings.get(name) for name in sorted(names)}
    template = Path(__file__).with_suffix(".md").read_text()
    return jinja2.Template(template, trim_blocks=True).render(
        library=_LIBRARIES.get(file_format, file_format),
        datasets=[hub_name] if hub_name else [],
        index=[{"name": name, "results": [result]}],
        name=name,
        count=entry["num_examples"],
        interval=scores.interval(found["precision @ 1"], entry["num_examples"]),
        decided_by_test=scores.deciding_part(run) == "test",
        scores=found,
        format=file_format,
        file=json.dumps(name),
        description=json.dumps({**description, "training": training}, indent=2),
    )
