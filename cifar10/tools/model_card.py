"""The model card of an export, which Hugging Face's hub shows: a folder's README.md.

The front matter is https://huggingface.co/docs/hub/model-cards; JSON is YAML too. No
path of this machine goes into it.
"""

import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import layout
from cifar10.config.options import is_a
from cifar10.errors import UsageError
from cifar10.process import invocation
from cifar10.run_directory import logs, scores

NAME = "README.md"
_HUB_NAMES = {"cifar10": "uoft-cs/cifar10", "cifar100": "uoft-cs/cifar100"}
_DATA = {
    "folder": "pictures in folders",
    "npz": "pictures in an .npz file",
    "synthetic": "the generated stand-in for CIFAR-10, which are no photographs",
}
# The hub's names of metrics, by ours; the parts have an interval.
_METRICS = {
    "precision @ 1": "accuracy",
    "precision @ 5": "top_5_accuracy",
    "macro F1": "f1",
    "balanced accuracy": "balanced_accuracy",
    "cross_entropy": "cross_entropy",
}
_PARTS = ("precision @ 1", "precision @ 5")
_TRAINED_WITH = (
    *("recipe", "optimizer", "learning_rate", "schedule", "global_batch_size"),
    *("max_steps", "distortions", "label_smoothing", "loss", "precision", "seed"),
)
_CARD = """\
---
{front}---

# {name}

An image classifier: {model}, {parameters:,} parameters, after step {step:,};
{variables} variables. Its license is yours to choose; above, `license` says unknown.

## Data

{data}, {shape}. Classes, in the order of the {output}: {classes}.

## Scores

Of the run's model, each image scored once. The interval, of 95 %, is Wilson's.

| part, images | metric | value | interval |
| --- | --- | ---: | --- |
{rows}

The export was checked {check}.

## Load it

```python
{code}
```

`images` are {dtype} {given}, `outputs` the {output}. They are prepared so:

```json
{preparation}
```

## Training

{trained}

## Versions

{versions}
"""
# Of each format: its library, and how a program imports, loads and calls it.
_FORMATS = {
    "savedmodel": (
        *("tensorflow", "import tensorflow as tf"),
        'tf.saved_model.load(".").signatures["serving_default"]',
        'model(tf.constant(images))["{output}"]',
    ),
    "onnx": (
        *("onnx", "import onnxruntime", "onnxruntime.InferenceSession({file})"),
        'model.run(None, {{"images": images}})[0]',
    ),
    "keras": (
        *("keras", "import keras", "keras.saving.load_model({file})", "model(images)"),
    ),
    "litert": (
        *("tflite", "from ai_edge_litert.interpreter import Interpreter"),
        "Interpreter({file}).get_signature_runner()",
        'model(images=images)["{output}"]',
    ),
}


def read_scores(run: Path, step: int, *, use_averages: bool) -> dict[str, Any]:
    """Returns the recorded scores of a step, by the part of the data; test comes first.

    Raises:
        UsageError: The step has none.
    """
    found = {}
    for part in ("test", "val"):
        folder = layout.evaluation_events(part) + ("" if use_averages else "_raw")
        entries = logs.read_lines(run / folder / layout.METRICS)
        if entry := scores.comparable(entries).get(step):
            found[part] = entry
    if not found:
        words = f"--run_once --step {step} --train_dir {run}"
        words += "" if use_averages else " --no-use_averages"
        raise UsageError(
            f"--model_card: step {step} has no score to put on the card. Score it "
            f"first:\n  {invocation.command('eval')} {words}"
        )
    return found


def build(
    name: str,
    file_format: str,
    settings: Mapping[str, Any],
    description: Mapping[str, Any],
    scored: Mapping[str, Mapping[str, Any]],
    check: str,
) -> str:
    """Returns the text of a model card.

    Args:
        name: That of the export's file or folder.
        file_format: As in `--format`.
        settings: The content of the run's `config.json`.
        description: That of the export.
        scored: As `read_scores` returns it.
        check: How the export was compared with the run's model.
    """
    data, output = settings["data"], description["output"]["name"]
    library, *code = _FORMATS[file_format]
    hub_name = _HUB_NAMES.get(data)
    results, rows = [], []
    for part, entry in scored.items():
        known: dict[str, Any] = {key: entry.get(key) for key in _METRICS}
        found = {
            key: v for key, v in known.items() if is_a(v, float) and math.isfinite(v)
        }
        results.append(
            {
                "task": {"type": "image-classification"},
                "dataset": {"type": hub_name or data, "name": data, "split": part},
                "metrics": [
                    {"type": _METRICS[key], "name": key, "value": value}
                    for key, value in found.items()
                ],
            }
        )
        count = entry["num_examples"]
        for key, value in found.items():
            between = ""
            if key in _PARTS:
                between = "{:.4f} to {:.4f}".format(*scores.interval(value, count))
            rows.append(f"| {part}, {count:,} | {key} | {value:.4f} | {between} |")
    front: dict[str, Any] = {
        "license": "unknown",
        "library_name": library,
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", library, settings["model"]],
        "metrics": ["accuracy", "f1"],
        "model-index": [{"name": name, "results": results}],
    }
    if hub_name:
        front["datasets"] = [hub_name]
    trained = {key: settings.get(key) for key in _TRAINED_WITH}
    trained["recipe"] = Path(f"{trained['recipe']}").stem  # It may be a path.
    return _CARD.format(
        front="".join(f"{key}: {json.dumps(value)}\n" for key, value in front.items()),
        name=name,
        model=f"`{settings['model']}`",
        parameters=settings["parameters"],
        step=description["step"],
        variables="averaged" if description["use_averages"] else "last",
        data=_DATA.get(data, f"`{data}`"),
        shape=" x ".join(map(str, description["picture_shape"])),
        output=output,
        classes=html.escape(", ".join(description["class_names"]), quote=False),
        rows="\n".join(rows),
        check=" ".join(check.split()),
        code="{}\n\nmodel = {}\noutputs = {}".format(*code).format(
            file=json.dumps(name), output=output
        ),
        dtype=description["input"]["dtype"],
        given=description["input"]["shape"],
        preparation=json.dumps(description["preparation"], indent=2),
        trained=_listed(trained),
        versions=_listed(settings.get("versions", {})),
    )


def _listed(values: Mapping[str, Any]) -> str:
    lines = (f"- {key}: {value}" for key, value in values.items() if value)
    return html.escape("\n".join(lines), quote=False)
