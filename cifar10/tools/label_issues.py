"""Lists training pictures whose labels a run contradicts, in a CSV and an HTML file.

A label is judged by its mean probability over all saved checkpoints. The last
checkpoint may have memorized the pictures, but earlier ones have not.
"""

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from cifar10 import files
from cifar10.config import layout
from cifar10.errors import UsageError
from cifar10.evaluation.eval_options import Options
from cifar10.evaluation.scored_set import ScoredSet
from cifar10.input import datasets, regrouping
from cifar10.input.dataset_base import Dataset
from cifar10.run_directory import checkpoints
from cifar10.towers import devices
from cifar10.trained_model import TrainedModel

# Lists at most this fraction of the labels. A weak run contradicts many right labels,
# and nine of ten well-known data sets have less than 6 % wrong ones (arXiv:2103.14749).
_SHARE = 0.05
_STRONG = 0.7  # A run that is right on fewer pictures contradicts many right labels.
_MOST = 2500  # A page with more pictures opens slowly.
_COLUMNS = ("picture", "class", "label", "probability")


def list_issues(dataset: Dataset, run: Path, trust_model: str | None) -> dict[str, Any]:
    """Lists labels that a run contradicts, in a CSV and an HTML file in its directory.

    Returns JSON values: `issues`, the contradicted labels, most suspicious first;
    `caution`, how far to trust the list; `corrections`, the CSV's path. Raises a
    `UsageError` if the run has other images or classes, or cannot be written to.
    """
    trained = TrainedModel(run, trust_model=trust_model)
    datasets.fitted(dataset, trained.run, "The data")
    device = devices.place_evaluation("auto")
    of_train = Options(eval_data="train_eval")
    scored = ScoredSet(trained.model, trained.run.config, dataset, of_train)
    images, labels = dataset.read("train")
    logits = []
    # At step 0, which `--on_nan rollback` saves, the model knows nothing.
    saved = [step for step in checkpoints.steps(run / layout.CHECKPOINTS) if step]
    if not saved:
        raise UsageError(f"{run} has no checkpoint after step 0 yet. Train it first.")
    for step in saved:
        trained.restore(step)
        logits.append(scored.score(trained.trainable, device).outcomes.logits)
    indices, instead, own = find_issues(logits, labels)
    indices = indices[: min(_MOST, int(_SHARE * len(labels)))]
    pictures = regrouping.names_of(dataset, "train", len(labels))
    classes = dataset.class_names
    issues = [
        {
            "picture": pictures[index],
            "class": classes[instead[index]],
            "label": classes[labels[index]],
            "probability": f"{own[index]:.4f}",  # The label's.
        }
        for index in indices.tolist()
    ]
    path = run / layout.CORRECTIONS
    right = float(np.mean(logits[-1].argmax(axis=1) == labels))
    both = labels[indices], labels
    listed, of_class = (np.bincount(some, minlength=len(classes)) for some in both)
    caution = f"Many may be right: the run is right on {right:.0%} of these pictures"
    if right < _STRONG:
        caution += f", and below about {_STRONG:.0%} only the first are mostly wrong"
    for index in np.flatnonzero(listed > of_class / 2):
        caution += f". It lists {listed[index]} of the {of_class[index]} of class "
        caution += f"{classes[index]}, which the run may simply not have learned"
    _write(path, issues, images[indices], caution)
    return {"issues": issues, "caution": f"{caution}.", "corrections": str(path)}


def _write(
    path: Path, issues: Sequence[Mapping[str, str]], images: np.ndarray, caution: str
) -> None:
    """Writes issues as a CSV file, and a page of their images beside it."""
    import jinja2

    text = Path(__file__).with_name("corrections.html").read_text()
    coded = [base64.b64encode(tf.io.encode_png(one).numpy()).decode() for one in images]
    names = {"run": path.parent.name, "file": path.name}
    template = jinja2.Template(text, autoescape=True)
    page = template.render(names, issues=issues, coded=coded, caution=caution)
    table = io.StringIO()
    writer = csv.DictWriter(table, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(issues)
    for text, where in ((page, path.with_suffix(".html")), (table.getvalue(), path)):
        files.write_output(where, "--train_dir", text.encode(errors="surrogateescape"))


def find_issues(
    logits: Sequence[np.ndarray], labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds labels that models contradict, from each model's logits for all images.

    Returns the indices of the contradicted labels, int64, most suspicious first; for
    each image, the likeliest other class, and its label's mean probability.
    """
    of_labels = np.arange(len(labels)), labels
    each = [tf.nn.softmax(of_one).numpy() for of_one in logits]
    own = np.mean([one[of_labels] for one in each], axis=0)
    # Only the predicted class counts; else more of the listed labels would be right.
    highest = [np.where(one < one.max(axis=1, keepdims=True), 0, one) for one in each]
    sure = np.mean(highest, axis=0)
    sure[of_labels] = 0
    indices = np.flatnonzero(sure.max(axis=1) > own)
    indices = indices[np.argsort(own[indices], kind="stable")]
    return indices, sure.argmax(axis=1), own
