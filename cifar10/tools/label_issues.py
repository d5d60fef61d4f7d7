"""Training pictures whose labels a run contradicts: a CSV to edit, a page to look at.

They are found by the probability of their labels, the mean of all checkpoints that are
kept: the last model may know its pictures by heart, but earlier ones do not.
"""

import base64
import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image

from cifar10.config import layout
from cifar10.evaluation import eval_command
from cifar10.evaluation.scored_set import ScoredSet
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import corrections, datasets
from cifar10.input.dataset_base import Dataset
from cifar10.process import files
from cifar10.run_directory import checkpoints
from cifar10.towers import devices

# A weak run contradicts far more right labels than wrong ones; nine of ten well-known
# data sets have less than 6 % of wrong labels (arXiv:2103.14749).
_SHARE = 0.05
_MOST = 2500  # A page of more opens slowly.
_SIDE = 128  # Of a picture on the page, at most.


def list_issues(dataset: Dataset, run: Path, trust_model: str | None) -> dict[str, Any]:
    """Writes which labels a run contradicts to its directory, as CSV and as HTML.

    If `dataset` is that of the run, labels are compared as the run's corrections have
    them; the CSV repeats the corrections, and so takes their place. `trust_model` is as
    in `RunOptions`.

    Returns:
        JSON values: the `agreement` of the newest checkpoint with all labels, how many
        are `contradicted`, the `issues` that are listed of these, most suspicious
        first, and the path of the `corrections`.

    Raises:
        UsageError: The run has other images or classes, or cannot be written to.
    """
    import jinja2

    trained = TrainedModel(run, trust_model=trust_model)
    datasets.check_same_kind(dataset, trained.settings, "The data")
    classes, settings = dataset.class_names, trained.settings
    file, earlier = settings.get("corrections"), []
    if file and settings["data_dir"] == str(dataset.directory):
        dataset, earlier = corrections.corrected(dataset, file), corrections.read(file)
    device = devices.place_evaluation("auto")
    part = eval_command.Options(eval_data="train_eval")
    scored = ScoredSet(trained.model, settings, dataset, run, part)
    images, labels = dataset.read("train")
    logits = []
    saved = checkpoints.steps(run / layout.CHECKPOINTS)
    for step in saved or [trained.restore()]:  # Which says why there is none.
        trained.restore(step)
        logits.append(scored.score(trained.trainable, device).outcomes.logits)
    places, instead, own = find_issues(logits, labels)
    contradicted = len(places)
    places = places[: min(_MOST, int(_SHARE * len(labels)))]
    pictures = corrections.names_of(dataset, "train", len(labels))
    issues = [
        {
            "picture": pictures[place],
            "class": classes[instead[place]],
            "label": classes[labels[place]],
            "probability": f"{own[place]:.4f}",  # Of the label.
        }
        for place in places.tolist()
    ]
    template = Path(__file__).with_name("corrections.html").read_text()
    coded = [*map(_coded, images[places])]
    page = jinja2.Template(template, autoescape=True)
    path = run / layout.CORRECTIONS
    shown = page.render(run=run.name, file=path.name, issues=issues, coded=coded)
    table = _table(issues, earlier)
    for text, where in ((shown, path.with_suffix(".html")), (table, path)):
        files.write_output(where, "--train_dir", text.encode(errors="surrogateescape"))
    agreement = float(np.mean(logits[-1].argmax(axis=1) == labels))
    return {
        "agreement": agreement,
        "contradicted": contradicted,
        "issues": issues,
        "corrections": str(path),
    }


def find_issues(
    logits: Sequence[np.ndarray], labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finds labels that models contradict, from each model's logits for all images.

    Returns:
        The indices of the images, int64, most suspicious first; and for all images the
        class predicted in place of the label, and the label's mean probability.
    """
    of_labels = np.arange(len(labels)), labels
    each = [tf.nn.softmax(of_one).numpy() for of_one in logits]
    own = np.mean([one[of_labels] for one in each], axis=0)
    # Only predictions count: of the list with all probabilities fewer labels are wrong.
    highest = [np.where(one < one.max(axis=1, keepdims=True), 0, one) for one in each]
    sure = np.mean(highest, axis=0)
    sure[of_labels] = 0
    places = np.flatnonzero(sure.max(axis=1) > own)
    places = places[np.argsort(own[places], kind="stable")]
    return places, sure.argmax(axis=1), own


def _table(
    issues: Sequence[dict[str, str]], earlier: Sequence[tuple[str, str, str]]
) -> str:
    """Returns the CSV of the issues, and of earlier corrections of other pictures."""
    before = {path: rest for path, *rest in earlier}
    rows: list[tuple[str, ...]] = [("picture", "class", "label", "probability")]
    for issue in issues:
        # The label is that of the data, which an earlier file may have corrected.
        _, label = before.pop(issue["picture"], ("", issue["label"]))
        rows.append((issue["picture"], issue["class"], label, issue["probability"]))
    rows += [(path, *rest) for path, rest in before.items()]
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows)
    return table.getvalue()


def _coded(image: np.ndarray) -> str:
    """Returns a picture as the address that a page embeds."""
    file, picture = io.BytesIO(), Image.fromarray(image)
    picture.thumbnail((_SIDE, _SIDE))
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
