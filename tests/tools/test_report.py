"""The report: its numbers are those of the files and of eval.py."""

import base64
import importlib.util
import json
import re
import shutil
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import tensorflow as tf

import runs as programs
import small_model
from cifar10 import Config, train
from cifar10.config import run_config
from cifar10.errors import UsageError
from cifar10.evaluation import metrics
from cifar10.input import datasets
from cifar10.run_directory import checkpoints, scores
from cifar10.tools import report as tool, report_curves, report_run
from cifar10.tools.report_run import Scores, read_runs
from recorded_runs import recorded

HOSTILE = '<script>alert("1")</script>&amp;'
PRECISION = "precision @ 1"


class Page:
    """A page, which is also XML once some of its tags are closed."""

    def __init__(self, text):
        self.text = text
        closed = re.sub(
            r"<(meta|img)\b([^>]*)>", r"<\1\2/>", text.removeprefix(tool.MARK)
        )
        self.root = ET.fromstring(closed)  # noqa: S314 - our own.

    def all(self, path):
        return self.root.findall(f".//{{*}}{path}")

    def texts(self, path):
        return ["".join(element.itertext()) for element in self.all(path)]

    def headlines(self):
        """The large numbers, one per run."""
        return [float(e.find("data").get("value")) for e in self.all("p[@class='big']")]

    def figures(self):
        return dict(zip(self.texts("dt"), self.texts("dd"), strict=True))

    def line(self, title, number=1):
        """The points of a run's curve in a chart, in the picture's coordinates."""
        (url,) = [
            image.get("src")
            for image in self.all("figure/{*}img")
            if image.get("alt") == title
        ]
        picture = base64.b64decode(url.removeprefix("data:image/svg+xml;base64,"))
        root = ET.fromstring(picture)  # noqa: S314 - our own.
        background = root.find(".//{*}g[@id='patch_1']/{*}path").get("style")
        assert "fill: none" in background, "the page may be dark"
        curve = root.findall(f".//{{*}}g[@id='curve-{number}']/{{*}}path")[0].get("d")
        return np.reshape([float(n) for n in re.findall(r"-?[\d.]+", curve)], (-1, 2))


def report(output, *run_dirs, **options):
    names = tuple(map(str, run_dirs))
    tool.write_report(tool.Options(names, output=str(output), **options))
    return Page(output.read_text())


def call(*words):
    done = programs.call(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def change(run_dir, **settings):
    """Changes settings of a run, which stays one of ours."""
    config = run_dir / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    run_config.mark_as_own(config.read_bytes())


def scored_as(run_dir, *lines):
    """Replaces what was scored by lines of a step, a precision and a count."""
    (run_dir / "eval" / "metrics.jsonl").unlink()
    for step, precision, count in lines:
        scores.append(run_dir / "eval", step, {PRECISION: precision}, count)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stand_in_dir):
    """Two runs in folders of the same name, and what eval.py found of each."""
    parent = tmp_path_factory.mktemp("reported")
    first, second = (parent / f"group{number}" / "run" for number in (0, 1))
    values = {"checkpoint_steps": 10, "batch_size": 16, "precision": "float32"}
    programs.train(first, stand_in_dir, max_steps=30, learning_rate=0.1, **values)
    values |= {"learning_rate": 0.05, "moving_average_decay": 0.0}
    programs.train(second, stand_in_dir, max_steps=20, **values)
    words = ("eval.py", "--run_once", "--json", "--train_dir")
    return {run_dir: json.loads(call(*words, run_dir)) for run_dir in (first, second)}


@pytest.fixture(scope="module")
def both(runs, tmp_path_factory):
    """The report on both, by the command."""
    output = tmp_path_factory.mktemp("page") / "both.html"
    call("cifar10/__main__.py", "report", *runs, "--output", output)
    return Page(output.read_text())


@pytest.fixture
def copy(runs, tmp_path):
    """A run that a test may change."""
    return shutil.copytree(next(iter(runs)), tmp_path / "copy")


def proportional(points, values):
    """Asserts that points are values on an axis: some scale, some zero."""
    scale, zero = np.polyfit(values, points, 1)
    np.testing.assert_allclose(np.polyval([scale, zero], values), points, atol=1e-3)
    assert abs(scale) > 0


def test_numbers_and_curves_come_from_the_files(both, runs):
    assert both.headlines() == [found[PRECISION] for found in runs.values()]
    assert "; averaged variables" in both.text
    values = [entry.get("value") for entry in both.all("data")]
    counts = both.texts("td[@style]")
    confusions = [found["confusion"] for found in runs.values()]
    np.testing.assert_array_equal(
        np.reshape(list(map(int, counts)), (2, 10, 10)), confusions
    )
    for number, (run_dir, found) in enumerate(runs.items(), 1):
        for metric in ("cross_entropy", "balanced accuracy", "macro F1"):
            assert str(found[metric]) in values
        logged = programs.logged(run_dir)
        assert str(logged[-1]["cross_entropy"]) in values, "as of the test images"
        points = both.line("Loss, moving average", number)
        proportional(points[:, 0], [line["step"] for line in logged])
        losses = [line["total_loss/average"] for line in logged]
        proportional(points[:, 1], losses)


def test_curves_are_readable_on_white_and_on_black_and_have_text():
    url = report_curves.draw(
        [[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]], "loss"
    )
    picture = base64.b64decode(url.rpartition(",")[2]).decode()
    assert ">step</text>" in picture
    assert "#000000" not in picture
    assert "#ffffff" not in picture


def test_the_hardest_images_have_the_largest_losses(both, runs, stand_in_dir):
    images, labels = datasets.find("synthetic", str(stand_in_dir)).read("test")
    prepared = images[:, 4:28, 4:28].astype(np.float64)
    prepared -= prepared.mean(axis=(1, 2, 3), keepdims=True)
    prepared /= prepared.std(axis=(1, 2, 3), keepdims=True)
    values = programs.variables(programs.checkpoint(next(iter(runs)), 30))
    model = small_model.two_layers((24, 24, 3), 10)
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(values[f"averages/{number}/.ATTRIBUTES/VARIABLE_VALUE"])
    logits = model(prepared.astype(np.float32)).numpy().astype(np.float64)
    part = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    losses = -np.log(part[np.arange(len(labels)), labels])
    hardest = np.argsort(-losses)[:24]

    images_shown = both.all("ul[@class='hardest']/{*}li/{*}img")
    shown, explained = images_shown[:48:2], images_shown[1:48:2]
    assert [entry.get("alt") for entry in shown] == [f"test image {n}" for n in hardest]
    png = base64.b64decode(shown[0].get("src").removeprefix("data:image/png;base64,"))
    np.testing.assert_array_equal(tf.io.decode_png(png), images[hardest[0]])
    assert len({entry.get("src") for entry in explained}) == 24


def test_a_heat_map_shows_why_the_class_was_predicted(copy, monkeypatch):
    """Not where the true one would be seen."""
    asked, heat_maps = [], report_run.heat_maps

    def noting(trained, images, classes):
        asked.extend(classes)
        return heat_maps(trained, images, classes)

    monkeypatch.setattr(report_run, "heat_maps", noting)
    (run,) = read_runs([copy])
    run.score("/cpu:0", None, None, None)
    hardest = run.scores.hardest
    names = [run.scores.class_names[number] for number in asked]
    assert names == [image["predicted"] for image in hardest]
    assert any(image["predicted"] != image["true"] for image in hardest)


def test_confidences_use_the_temperature_and_open_steps_show_no_number(copy, tmp_path):
    def confidences():
        shown = report(tmp_path / "page.html", copy)
        found = shown.all("ul[@class='hardest']/{*}li/{*}span/{*}data")
        return shown, [float(entry.get("value")) for entry in found]

    _, before = confidences()
    change(copy, max_steps=10**12, max_hours=0.5)
    (copy / "checkpoints/step-00000030/temperature.txt").write_text("3.0\n")
    shown, after = confidences()
    assert len(after) == 24
    assert all(0.1 < hot < cold for hot, cold in zip(after, before, strict=True))
    assert "1,000,000,000,000" not in shown.text
    main = shown.all("table[@class='settings']")[0]
    rows = {row[0].text: row[1].text for row in main.iterfind(".//{*}tr")}
    assert (rows["max hours"], rows["max steps"]) == ("0.5", "open")
    assert "max epochs" not in rows


def test_the_counts_of_images_stand_at_the_curve_before_calibration():
    names = "images", "confidence", "accuracy"
    before, after = (
        [dict(zip(names, one, strict=True)) for one in bins]
        for bins in ([(31, 0.6, 0.5), (47, 0.9, 0.7)], [(29, 0.5, 0.5), (53, 0.7, 0.7)])
    )
    url = report_curves.draw([before, after], "accuracy", over="confidence")
    picture = base64.b64decode(url.removeprefix("data:image/svg+xml;base64,")).decode()
    assert re.findall(r">\s*(\d\d)</text>", picture) == ["31", "47"]


def test_the_report_names_missing_parts_of_a_run(copy, tmp_path, capsys):
    poor = copy.rename(tmp_path / HOSTILE.replace("/", "|"))
    for name in ("eval", "train"):
        shutil.rmtree(poor / name)
    with (poor / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "total_lo')
    state = poor / "checkpoints" / "step-00000030" / "state.data-00000-of-00001"
    state.write_bytes(b"\0" + state.read_bytes()[1:])
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(poor / "config.json", empty)
    shown = report(tmp_path / "page.html", poor, empty)

    said = capsys.readouterr()
    assert "step 30" in said.err
    notes = shown.texts("ul[@class='notes']")
    assert "DAMAGED" in notes[0]
    assert "no checkpoint" in notes[1]
    assert shown.texts("td[@class='bad']") == ["damaged"]
    assert not shown.all("script")
    assert [one.step for one in read_runs([poor, empty])] == [30, 0]


def test_an_unscorable_run_is_still_reported(copy, tmp_path):
    change(copy, model="no:where")
    shown = report(tmp_path / "page.html", copy)
    assert "no:where" in shown.texts("ul[@class='notes']")[0]
    # What eval.py said of it stands in its place.
    assert shown.headlines() == [programs.logged(copy / "eval")[0][PRECISION]]


def test_headline_curve_and_table_agree_on_the_scores(runs, tmp_path):
    _, (without_averages, found) = runs.items()
    copy = shutil.copytree(without_averages, tmp_path / "copy")
    scored_as(copy, (5, 0.9, 37), (10, 0.5, 2000), (10, 0.99, 2000), (20, 0.8, 37))
    shown = report(tmp_path / "page.html", copy)
    assert shown.headlines() == [found[PRECISION]]
    assert "the variables themselves" in shown.text
    values = [entry.get("value") for entry in shown.all("data")]
    assert not {"0.9", "0.5", "0.8"} & set(values), "later, or of fewer images"
    proportional(shown.line("Precision @ 1 on test")[:, 1], [0.99, found[PRECISION]])


def test_all_checkpoints_are_shown_with_their_times(copy, tmp_path):
    folder = copy / "checkpoints"
    for step in (40, 50, 60, 70):
        shutil.copytree(folder / "step-00000010", folder / f"step-{step:08d}")
    manifest = checkpoints.read_manifest(folder, 10)
    (run,) = read_runs([copy])
    assert [saved["step"] for saved in run.saved] == [10, 20, 30, 40, 50, 60, 70]
    assert run.saved[0]["time"] == manifest["time"]
    sizes = (path.stat().st_size for path in folder.glob("*10/state*"))
    assert run.saved[0]["size"] == sum(sizes)
    # Of the last one no line was logged.
    figures = report(tmp_path / "page.html", copy).figures()
    assert figures["step"] == "70 of 30"
    assert "training cross entropy, step 30" in figures


def test_a_checkpoint_deleted_meanwhile_is_left_out(copy, monkeypatch):
    """By the training that a report is made of."""
    verify = checkpoints.verify

    def late(folder, step):
        if step == 10:
            shutil.rmtree(folder / "step-00000010")
        return verify(folder, step)

    monkeypatch.setattr(checkpoints, "verify", late)
    (run,) = read_runs([copy])
    assert [saved["step"] for saved in run.saved] == [20, 30]


def test_a_line_with_an_impossible_step_is_left_out(copy):
    (before,) = read_runs([copy])
    with (copy / "metrics.jsonl").open("a") as log:
        log.write(f'{{"step": {10**200}}}\n{{"step": {2**63}}}\n{{"step": -1}}\n')
    (run,) = read_runs([copy])
    assert (run.step, run.logged) == (before.step, before.logged)


def test_runs_of_several_seeds_get_mean_and_deviation(runs, copy, tmp_path):
    first, faster = runs
    assert not report(tmp_path / "page.html", first, faster).all(
        "table[@class='numbers seeds']"
    )
    change(copy, seed=1)
    for run, part in ((first, 0.5), (copy, 0.6), (faster, 0.7)):
        alone = shutil.copytree(run, tmp_path / f"alone{part}")
        shutil.rmtree(alone / "checkpoints")  # What was scored counts.
        scored_as(alone, (30, part, 2000))
    shutil.copytree(tmp_path / "alone0.5", tmp_path / "alone0.5.1")
    shown = report(tmp_path / "page.html", *sorted(tmp_path.glob("alone*")))
    (table,) = shown.all("table[@class='numbers seeds']")
    rows = [["".join(cell.itertext()) for cell in row] for row in table[1]]
    of_seeds, other = rows
    assert of_seeds[0] == "alone0.5, alone0.6, not alone0.5.1", "it is the same seed"
    assert of_seeds[1:4] == ["2", "55.00\u00a0%", "7.07\u00a0%"]
    assert other[1:3] == ["1", "70.00\u00a0%"], "one run has no deviation"


def test_a_diverged_run_says_so_and_its_numbers_stay_short(copy, tmp_path):
    with (copy / "metrics.jsonl").open("a") as log:
        losses = {"step": 31, "total_loss": 2e22, "cross_entropy": 1.6e22}
        log.write(json.dumps(losses) + "\n")
    assert "DIVERGED" not in report(tmp_path / "page.html", copy).text
    manifest = checkpoints.read_manifest(copy / "checkpoints", 30)
    manifest["loss_averages"] |= {"total_loss": 1e22, "lost steps": 1.0}
    manifest["sha256"] = checkpoints.digest_of(manifest)
    file = copy / "checkpoints/step-00000030" / checkpoints.MANIFEST
    file.write_text(json.dumps(manifest))
    shown = report(tmp_path / "page.html", copy)
    assert "DIVERGED" in shown.text
    assert shown.figures()["training cross entropy"] == "1.6e+22"


def test_every_named_run_is_shown_and_other_folders_are_left_out(runs, tmp_path):
    first, second = runs
    words = ("cifar10/__main__.py", "report", "--output", tmp_path / "page.html")
    done = programs.call(*words, "--train_dir", first, "--train_dir", second, tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path} holds no run" in done.stderr
    assert len(Page((tmp_path / "page.html").read_text()).all("article")) == 2


def test_text_from_elsewhere_is_escaped(runs):
    (run,) = read_runs([next(iter(runs))])
    hostile = {"data_description": HOSTILE, HOSTILE: HOSTILE}
    run.recorded = recorded(**{**run.recorded.entries, **hostile})
    run.notes = [HOSTILE]
    names = tuple(f"{HOSTILE}{number}" for number in range(10))
    bins = np.ones((3, 15))
    sums = metrics.Sums(1.0, np.full(10, 5), np.diag(np.full(10, 5)), bins)
    image = {
        "png": "",
        "looks_at": "",
        "name": HOSTILE,
        "confidence": 0.5,
    }
    image |= {"true": names[0], "predicted": names[1]}
    run.scores = Scores(HOSTILE, names, sums, [image])
    shown = Page(tool.render([run], 0.0))
    assert not shown.all("script")
    assert HOSTILE not in shown.text
    assert any(names[1] in text for text in shown.texts("span"))


def test_wrong_places_are_refused_and_other_files_kept(runs, tmp_path, monkeypatch):
    run_dir = next(iter(runs))
    output, other = tmp_path / "page.html", tmp_path / "other.html"
    shutil.copy(run_dir / "config.json", other)
    for match, *run_dirs, place in (
        ("holds no run", run_dir, tmp_path, output),
        ("nowhere", tmp_path / "nowhere", output),
        ("cannot be written", run_dir, tmp_path / "no" / "page.html"),
        ("already exists", run_dir, other),
        ("HTML", run_dir, tmp_path / "page.pdf"),
    ):
        with pytest.raises(UsageError, match=match):
            report(place, *run_dirs)
    assert not output.exists()
    assert other.read_bytes() == (run_dir / "config.json").read_bytes()
    for _ in range(2):  # A report may be replaced, and each run counts once.
        shown = report(output, run_dir, run_dir)
        assert len(shown.all("article")) == 1
    monkeypatch.setattr(importlib.util, "find_spec", {"jinja2": 1}.get)
    done = programs.call("cifar10/__main__.py", "report", run_dir)
    assert done.returncode == 2
    assert "matplotlib" in done.stderr
    assert "[report]" in done.stderr


def logit(labels, logits):
    """The logit of each image's own class."""
    return tf.gather(logits, labels, batch_dims=1)


@pytest.fixture(scope="module")
def of_program(tmp_path_factory):
    """A run on arrays that have a part val, with a metric of its own."""
    images = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), np.uint8)
    run = tmp_path_factory.mktemp("of_program") / "run"
    own = {"model": small_model.two_layers, "metrics": {"logit": logit}}
    own["data"] = tuple((images[:n], np.arange(n) % 2) for n in (40, 10, 16))
    options = {"max_steps": 4, "eval_steps": 2, "log_frequency": 1}
    train(Config(**own, **options, train_dir=run, batch_size=8, num_gpus=1))
    return run


def test_custom_metrics_are_shown(of_program, tmp_path):
    shown = report(tmp_path / "page.html", of_program)
    lines = programs.logged(of_program / "eval_val")
    texts = [f"{line['metrics/logit']:.4f}" for line in lines]
    assert {*texts} <= {*shown.texts("td")}
    assert len(shown.line("metrics/logit in evaluations")) == 2
    assert "metrics" not in shown.texts("th[@scope='row']")
    plain = shutil.copytree(of_program, tmp_path / "plain")
    for part in ("eval", "eval_val"):
        shutil.rmtree(plain / part)
    shown = report(tmp_path / "page.html", plain)
    assert len(shown.line("metrics/logit in training")) == 4


def test_the_headline_names_the_part_of_its_score(of_program, tmp_path):
    """A program's data cannot be scored here, but its training has scored them."""
    untested = shutil.copytree(of_program, tmp_path / "untested")
    shutil.rmtree(untested / "eval")
    for run, part, folder in (
        (of_program, "test", "eval"),
        (untested, "val", "eval_val"),
    ):
        shown = report(tmp_path / "page.html", run)
        assert shown.headlines() == [programs.logged(run / folder)[-1][PRECISION]]
        assert f"accuracy (precision @ 1) on {part} (" in shown.text
        assert f"{part} cross entropy" in shown.figures()
