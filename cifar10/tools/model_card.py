"""Writes the model card of an export, a README.md that Hugging Face's hub shows.

The front matter follows https://huggingface.co/docs/hub/model-cards and is written as
JSON, which is valid YAML. The card contains no path of this machine.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cifar10.config import layout, run_config
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
_TRAINED_WITH = (
    *("optimizer", "optimizer_arguments", "learning_rate", "schedule", "clip_norm"),
    *("stages", "global_batch_size", "distortions", "augmentation", "label_smoothing"),
    *("loss", "precision", "seed", "keras_schedule", "versions"),
)
# How a program loads each format and calls it with a batch of images.
_CODE = {
    "savedmodel": """\
import tensorflow as tf
model = tf.saved_model.load(".").signatures["serving_default"]
(outputs,) = model(tf.constant(images)).values()""",
    "onnx": """\
import onnxruntime
model = onnxruntime.InferenceSession({file})
(outputs,) = model.run(None, {{"images": images}})""",
    "keras": """\
import keras
model = keras.saving.load_model({file})
outputs = model(images)""",
    "litert": """\
from ai_edge_litert.interpreter import Interpreter
model = Interpreter({file}).get_signature_runner()
(outputs,) = model(images=images).values()""",
}
_CHOSEN = """
The run had no validation split. If these images also decided which step is the best or
when training ended, the scores are slightly too good.
"""
_CARD = """\
---
license: unknown
library_name: {library}
pipeline_tag: image-classification
datasets: {datasets}
model-index: {index}
---

# {name}

This model classifies images. Its license is set to unknown: choose one above.

## Scores

The run's model was scored once on each of {count:,} test images. The 95 % confidence
interval (Wilson) of the precision @ 1 is {interval[0]:.4f} to {interval[1]:.4f}.
{chosen}

{scores}

## Load it

```python
{code}
```

The data set, how images are prepared, and the settings of the training run:

```json
{description}
```
"""


def build(
    run: Path, name: str, file_format: str, description: Mapping[str, Any]
) -> str:
    """Returns the model card of an export with this name, format and description.

    Raises:
        UsageError: The run has recorded no scores of the step on the test split.
    """
    settings, step = run_config.read_run_config(run), description["step"]
    kind = "" if description["use_averages"] else "_raw"
    log = run / f"{layout.EVALUATION_EVENTS}{kind}" / layout.METRICS
    entry = scores.comparable(logs.read_lines(log)).get(step)
    if not entry:
        how = invocation.to_score(str(run), step)
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
    training = {key: settings.get(key) for key in _TRAINED_WITH}
    return _CARD.format(
        library=_LIBRARIES.get(file_format, file_format),
        datasets=json.dumps([hub_name] if hub_name else []),
        index=json.dumps([{"name": name, "results": [result]}]),
        name=name,
        count=entry["num_examples"],
        chosen=_CHOSEN if scores.deciding_part(run) == "test" else "",
        interval=scores.interval(found["precision @ 1"], entry["num_examples"]),
        scores="\n".join(f"- {key}: {value:.4f}" for key, value in found.items()),
        code=_CODE[file_format].format(file=json.dumps(name)),
        description=json.dumps({**description, "training": training}, indent=2),
    )
