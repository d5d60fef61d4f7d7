"""Labels that a run contradicts, from its outcomes to the corrected data."""

import csv
import io
import json
import re

import numpy as np
import pytest

import runs
from cifar10.tools import label_issues
from cifar10.tools.label_issues import find_issues

WRONG = {5: "class 1", 30: "class 0"}


def test_the_mean_of_the_checkpoints_decides_and_the_least_probable_comes_first():
    labels = np.array([0, 0, 0, 1] + [2] * 96)
    right = [[0.02, 0.02, 0.96]] * 96
    # The newest has learned the first two labels by heart.
    early = [[0.1, 0.8, 0.1], [0.03, 0.07, 0.9], [0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]
    late = [[0.5, 0.3, 0.2], [0.5, 0.1, 0.4], [0.9, 0.05, 0.05], [0.3, 0.6, 0.1]]
    logits = [np.log(some + right) for some in (early, late)]
    places, instead, own = find_issues(logits, labels)
    assert places.tolist() == [1, 0]
    assert instead[places].tolist() == [2, 1]
    np.testing.assert_allclose(own[places], [0.265, 0.3])


@pytest.fixture(scope="module")
def shades(tmp_path_factory):
    """Dark and bright images, two of which have the other label, and a run on them."""
    folder = tmp_path_factory.mktemp("shades")
    labels = np.arange(40) % 2
    random = np.random.default_rng(0)
    images = (
        random.integers(0, 100, (40, 24, 24, 3)) + 155 * labels[:, None, None, None]
    )
    images = images.astype(np.uint8)
    given = labels.copy()
    given[[*WRONG]] ^= 1
    np.savez(
        folder / "shades.npz",
        x_train=images,
        y_train=given,
        x_test=images,
        y_test=labels,
    )
    flags = {"data": folder / "shades.npz", "model": runs.SMALL, "batch_size": 20}
    flags |= {"train_dir": folder / "run", "max_steps": 30, "learning_rate": 0.01}
    flags |= {"checkpoint_steps": 15, "distortions": "none"}
    done = runs.call("train.py", *runs.flags(**flags))
    assert done.returncode == 0, done.stderr
    return folder, flags


def call(folder, *words, data="shades.npz"):
    words = (folder / data, "--train_dir", folder / "run", *words)
    return runs.call("cifar10/__main__.py", "data", *words)


def test_wrong_labels_are_listed_shown_and_corrected(shades):
    folder, flags = shades
    file = folder / "run" / "corrections.csv"
    found = json.loads(call(folder, "--json").stdout)
    assert found["labels"].keys() == {"issues", "caution", "corrections"}
    rows = [*csv.DictReader(io.StringIO(file.read_text()))]
    assert {row["picture"]: row["class"] for row in rows} == {
        f"train picture {place}": name for place, name in WRONG.items()
    }
    page = (folder / "run" / "corrections.html").read_text()
    assert len(re.findall("<img", page)) == 2
    flags = {**flags, "train_dir": folder / "corrected", "corrections": file}
    done = runs.call("train.py", *runs.flags(**flags))
    assert "leaves out 0 and moves 2" in " ".join(done.stdout.split())
    # The user's changes are not overwritten.
    file.write_text(f"{file.read_text()}train picture 0,\n")
    again = call(folder)
    assert again.returncode == 2
    assert str(file) in again.stderr
    assert "train picture 0" in file.read_text()
    file.unlink()


def test_all_saved_checkpoints_count_equally(shades):
    """The last has learned labels by heart, which earlier ones have not."""
    folder, _ = shades
    saved = folder / "run" / "checkpoints"
    found = []
    for hidden in (None, "step-00000015", "step-00000030"):
        aside = (saved / hidden).rename(folder / hidden) if hidden else None
        issues = json.loads(call(folder, "--json").stdout)["labels"]["issues"]
        found.append({one["picture"]: float(one["probability"]) for one in issues})
        (folder / "run" / "corrections.csv").unlink()
        if aside:
            aside.rename(saved / hidden)
    both, last, early = found
    picture = next(iter(both))
    assert abs(last[picture] - early[picture]) > 0.005
    mean = (last[picture] + early[picture]) / 2
    assert both[picture] == pytest.approx(mean, abs=2e-4)


def test_a_second_list_names_the_wrong_labels_of_the_data_again(shades):
    """It takes the place of the first, and has no label that the first broke."""
    folder, flags = shades
    first = folder / "first.csv"
    mended = [f"train picture {place},{name}," for place, name in WRONG.items()]
    lines = ["picture,class,label", *mended, "train picture 7,class 0,class 1"]
    first.write_text("\n".join(lines))
    flags = {**flags, "train_dir": folder / "second", "corrections": first}
    assert runs.call("train.py", *runs.flags(**flags)).returncode == 0
    words = (folder / "shades.npz", "--train_dir", folder / "second", "--json")
    found = json.loads(runs.call("cifar10/__main__.py", "data", *words).stdout)
    named = {issue["picture"]: issue["class"] for issue in found["labels"]["issues"]}
    assert named == {f"train picture {place}": name for place, name in WRONG.items()}
    second = folder / "second" / "corrections.csv"
    flags = {**flags, "train_dir": folder / "third", "corrections": second}
    done = runs.call("train.py", *runs.flags(**flags))
    assert "leaves out 0 and moves 2" in " ".join(done.stdout.split()), done.stderr


def test_the_labels_of_a_weak_run_are_in_the_order_of_their_probability():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(4), 200)
    places, _, own = find_issues([np.log(probabilities)], np.arange(200) % 4)
    assert len(places) > 10
    assert (np.diff(own[places]) >= 0).all()


def test_a_weak_run_lists_a_twentieth(shades, monkeypatch):
    folder, _ = shades
    monkeypatch.setattr(label_issues, "_SHARE", 0.025)
    said = " ".join(call(folder).stdout.split())
    file = folder / "run" / "corrections.csv"
    assert "Most suspicious labels: 1. Many may be right" in said
    assert len([*csv.DictReader(io.StringIO(file.read_text()))]) == 1
    file.unlink()
    monkeypatch.undo()
    assert "Most suspicious labels: 2." in call(folder).stdout, (
        "a twentieth of the pictures"
    )
    file.unlink()


def test_the_list_of_a_poorly_trained_run_carries_a_warning(shades, monkeypatch):
    """With the numbers that show it, on the page and in the terminal."""
    folder, _ = shades
    file = folder / "run" / "corrections.csv"
    assert "right on 95% of these pictures." in call(folder).stdout
    file.unlink()
    monkeypatch.setattr(label_issues, "_SHARE", 1.0)
    contradicted = np.arange(12), np.ones(40, int), np.zeros(40)
    monkeypatch.setattr(label_issues, "find_issues", lambda *_: contradicted)
    monkeypatch.setattr(label_issues, "_STRONG", 0.99)
    said = call(folder).stdout
    page = file.with_suffix(".html").read_text()
    file.unlink()
    for text in (said, page):
        assert "below about 99% only the first are mostly wrong" in text
        assert "It lists" not in text, "six of its twenty"
    contradicted = np.arange(0, 40, 2), np.ones(40, int), np.zeros(40)
    assert "It lists 19 of the 20 of class class 0" in call(folder).stdout
    file.unlink()


def test_a_run_is_as_right_as_its_newest_checkpoint(shades):
    """The first one, of step 3, has learned next to nothing."""
    folder, flags = shades
    flags = {**flags, "train_dir": folder / "early", "max_steps": 15}
    done = runs.call("train.py", *runs.flags(**{**flags, "checkpoint_steps": 3}))
    assert done.returncode == 0, done.stderr
    words = (folder / "shades.npz", "--train_dir", folder / "early")
    said = " ".join(runs.call("cifar10/__main__.py", "data", *words).stdout.split())
    (right,) = re.findall(r"the run is right on (\d+)% of these pictures", said)
    assert int(right) > 80


def test_the_untrained_model_of_step_0_has_no_opinion(shades):
    """A run with --on_nan rollback saves it."""
    folder, flags = shades
    run = folder / "rollback"
    flags = {**flags, "train_dir": run, "on_nan": "rollback"}
    assert runs.call("train.py", *runs.flags(**flags)).returncode == 0
    words = ("data", folder / "shades.npz", "--train_dir", run, "--json")
    untrained, *trained = sorted((run / "checkpoints").iterdir())
    assert untrained.name == "step-00000000"
    aside, found = folder / "aside", []
    aside.mkdir()
    for hidden in ([], [untrained]):
        moved = [path.rename(aside / path.name) for path in hidden]
        done = runs.call("cifar10/__main__.py", *words)
        found.append(json.loads(done.stdout)["labels"]["issues"])
        (run / "corrections.csv").unlink()
    assert found[0] == found[1] != []
    for path in trained:
        path.rename(aside / path.name)
    moved[0].rename(untrained)
    done = runs.call("cifar10/__main__.py", *words)
    assert done.returncode == 2
    assert "no checkpoint after step 0" in done.stderr


def test_other_data_and_runs_without_checkpoints_are_refused(shades):
    folder, _ = shades
    x, y = np.zeros((9, 24, 24, 3), np.uint8), np.arange(9) % 3
    other = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(folder / "other.npz", **other)
    assert call(folder, data="other.npz").returncode == 2
    saved = folder / "run" / "checkpoints"
    aside = saved.rename(folder / "checkpoints")
    done = call(folder)
    aside.rename(saved)
    assert done.returncode == 2
    assert not (folder / "run" / "corrections.csv").exists()


def test_text_on_the_page_is_escaped(shades, monkeypatch):
    folder, _ = shades
    from cifar10.input import regrouping

    monkeypatch.setattr(regrouping, "names_of", lambda *_: ["<script>&"] * 40)
    assert call(folder).returncode == 0
    page = (folder / "run" / "corrections.html").read_text()
    (folder / "run" / "corrections.csv").unlink()
    assert "&lt;script&gt;&amp;" in page
    assert "<script" not in page
