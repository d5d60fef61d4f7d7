"""The report: its numbers are those of the files and of eval.py."""

import base64
import contextlib
import dataclasses
import html.parser
import importlib.util
import io
import json
import math
import os
import re
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.config import origin
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.evaluation import evaluate as evaluation
from cifar10.input import cifar, datasets
from cifar10.run_directory import checkpoints, scores
from cifar10.scoring import metrics
from cifar10.tools.report import curves, page, reporter, run as run_files, scored
from cifar10.training import goodput, train as training
from runs import run as run_as_a_user

HOSTILE = '<script>alert("1")</script>&amp;'


def own(image_shape, classes):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(8, 5, strides=4, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(classes),
        ]
    )


class Page(html.parser.HTMLParser):
    """A page's elements, in order: tag, attributes, and all text within."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open, self.text = [], [], text
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(element)
        if tag not in ("meta", "img", "col", "path", "use"):
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "text": "", **dict(attrs)})

    def handle_endtag(self, tag):
        while self._open and self._open.pop()["tag"] != tag:
            pass

    def handle_data(self, data):
        for element in self._open:
            element["text"] += data

    def all(self, tag, **attributes):
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            element
            for element in self.elements
            if element["tag"] == tag
            and all(element.get(name) == value for name, value in wanted.items())
        ]

    def cards(self):
        """The large numbers, one per run."""
        big = [i for i, e in enumerate(self.elements) if e.get("class") == "big"]
        return [self.elements[index + 1] for index in big]

    def line(self, name):
        """The points of a curve, in the picture's coordinates."""
        _, _, rest = self.text.partition(f'<g id="{name}">')
        path = re.search(r'<path d="([^"]+)"', rest)[1]
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
        return np.array(numbers).reshape(-1, 2)


def train(train_dir, data_dir, learning_rate):
    config = Config(
        batch_size=16,
        max_steps=30,
        checkpoint_steps=10,
        learning_rate=learning_rate,
        train_dir=str(train_dir),
        model=f"{__name__}:own",
        data="synthetic",
        data_dir=str(data_dir),
        precision="float32",
    )
    training.train(config)
    return train_dir


def evaluated(run_dir):
    """What `eval.py --run_once --json` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        evaluation.run(evaluation.Options(str(run_dir), run_once=True, json=True))
    return json.loads(printed.getvalue())


def report(output, *run_dirs, **options):
    names = tuple(map(str, run_dirs))
    reporter.run(reporter.Options(names, str(output), **options))
    return Page(output.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory, stand_in_dir):
    """Two runs in folders of one name, and what eval.py found of each."""
    parent = tmp_path_factory.mktemp("reported")
    found = {}
    for number, rate in enumerate((0.1, 0.05)):
        run_dir = train(parent / f"group{number}" / "run", stand_in_dir, rate)
        found[run_dir] = evaluated(run_dir)
    return found


@pytest.fixture(scope="module")
def both(runs, tmp_path_factory):
    return report(tmp_path_factory.mktemp("page") / "both.html", *runs)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_are_those_of_eval(both, runs):
    assert [float(card["value"]) for card in both.cards()] == [
        found["precision @ 1"] for found in runs.values()
    ]
    values = [entry.get("value") for entry in both.all("data")]
    cells = iter(both.all("td"))
    for found in runs.values():
        assert str(found["cross_entropy"]) in values
        assert str(found["precision @ 5"]) in values
        assert str(found["balanced accuracy"]) in values
        counts = [
            int(next(cell for cell in cells if "--s" in cell.get("style", ""))["text"])
            for _ in range(100)
        ]
        assert np.array_equal(np.reshape(counts, (10, 10)), found["confusion"])
    shown = [
        f"{100 * found['precision @ 1']:.2f}\N{NO-BREAK SPACE}%"
        for found in runs.values()
    ]
    assert [card["text"] for card in both.cards()] == shown


def test_tables_and_curves_are_those_of_the_files(both, runs):
    for number, run_dir in enumerate(runs, 1):
        logged = lines(run_dir / "metrics.jsonl")
        assert len(logged) == 3
        for name, metric in (
            ("loss", "total_loss/average"),
            ("throughput", "examples_per_sec"),
            ("rate", "learning_rate"),
        ):
            points = both.line(f"{name}-{number}")
            steps = [line["step"] for line in logged]
            proportional(points[:, 0], steps)
            if name != "rate":
                proportional(points[:, 1], [line[metric] for line in logged])
        last = both.all("data", value=str(logged[-1]["total_loss"]))
        assert [entry["text"] for entry in last] == [f"{logged[-1]['total_loss']:.3f}"]
        (line,) = lines(run_dir / "eval" / "metrics.jsonl")
        for metric in ("precision @ 1", "precision @ 5", "macro F1", "cross_entropy"):
            assert both.all("data", value=str(line[metric]))
    # One scale for both: the second's rate is half of the first's.
    first, second = (both.line(f"rate-{number}")[0, 1] for number in (1, 2))
    zero = second + (second - first)
    assert zero == pytest.approx(bottom(both), abs=0.1)


def proportional(points, values):
    """Asserts that points are values on an axis: some scale, some zero."""
    scale, zero = np.polyfit(values, points, 1)
    np.testing.assert_allclose(np.polyval([scale, zero], values), points, atol=1e-3)
    assert abs(scale) > 0


def bottom(both):
    """Where the lowest horizontal line of the learning rate is, in the picture."""
    _, _, rest = both.text.partition('aria-label="Learning rate"')
    rest, _, _ = rest.partition("</svg>")
    found = re.findall(r'd="M [\d.]+ ([\d.]+)\s+L [\d.]+ ([\d.]+)\s*"', rest)
    return max(float(one) for one, other in found if one == other)


def test_the_hardest_images_are_those_of_the_largest_loss(both, runs, stand_in_dir):
    images, labels = datasets.find("synthetic", str(stand_in_dir)).read("test")
    prepared = images[:, 4:28, 4:28].astype(np.float64)
    prepared -= prepared.mean(axis=(1, 2, 3), keepdims=True)
    prepared /= prepared.std(axis=(1, 2, 3), keepdims=True)
    run_dir = next(iter(runs))
    reader = tf.train.load_checkpoint(
        str(run_dir / "checkpoints" / "step-00000030" / "state")
    )
    model = own((24, 24, 3), 10)
    for number, variable in enumerate(model.trainable_variables):
        name = f"averages/{number}/.ATTRIBUTES/VARIABLE_VALUE"
        variable.assign(reader.get_tensor(name))
    logits = model(prepared.astype(np.float32)).numpy().astype(np.float64)
    part = np.exp(logits - logits.max(axis=1, keepdims=True))
    part /= part.sum(axis=1, keepdims=True)
    losses = -np.log(part[np.arange(len(labels)), labels])
    hardest = np.argsort(-losses)[:24]

    shown = both.all("img")[:24]
    assert [entry["alt"] for entry in shown] == [f"test image {n}" for n in hardest]
    names = cifar.SYNTHETIC.default_names
    captions = [entry["text"] for entry in both.all("span") if "title" in entry]
    for number, entry, caption in zip(hardest, shown, captions[:24], strict=True):
        png = base64.b64decode(entry["src"].removeprefix("data:image/png;base64,"))
        np.testing.assert_array_equal(tf.io.decode_png(png), images[number])
        predicted = names[part[number].argmax()]
        sure = f"{100 * part[number].max():.0f}\N{NO-BREAK SPACE}%"
        assert caption == f"predicted {predicted}, {sure}"


def test_runs_are_told_apart_and_differences_are_marked(both, runs):
    headings = [entry["text"] for entry in both.all("h2")]
    assert headings[:2] == ["group0/run", "group1/run"]
    assert [str(run_dir) in both.text for run_dir in runs] == [True, True]
    (legend,) = both.all("ul", class_="legend")
    assert legend["text"].split() == ["group0/run", "group1/run"]
    marked = [entry["text"] for entry in both.all("tr", class_="differs")]
    assert marked == ["learning rate0.10.05"]
    plain = [entry["text"] for entry in both.all("tr") if "class" not in entry]
    assert "seed00" in plain
    assert f"tensorflow{tf.__version__}{tf.__version__}" in plain
    assert both.text.count("SYNTHETIC stand-in, which is NOT CIFAR-10") == 2


def test_the_page_needs_nothing_else(both):
    assert both.text.startswith("<!doctype html>")
    assert not both.all("script")
    assert not both.all("link")
    for entry in both.elements:
        for name, value in entry.items():
            if name == "src":
                assert value.startswith("data:image/png;base64,")
            if name.endswith("href"):
                assert value.startswith("#")
    outside = re.sub(r'xmlns(:xlink)?="[^"]+"', "", both.text)
    assert "http" not in outside
    assert not re.search(r"@import|url\((?!#)", outside)
    ids = [
        entry["id"] for entry in both.elements if "id" in entry and entry["tag"] == "g"
    ]
    assert len(ids) == len(set(ids))


def test_what_a_run_lacks_is_said(runs, tmp_path, capsys):
    run_dir = next(iter(runs))
    poor = shutil.copytree(run_dir, tmp_path / HOSTILE.replace("/", "|"))
    for name in ("eval", "train"):
        shutil.rmtree(poor / name)
    with (poor / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "total_lo')
    state = poor / "checkpoints" / "step-00000030" / "state.data-00000-of-00001"
    state.write_bytes(b"\0" + state.read_bytes()[1:])
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run_dir / "config.json", empty)
    older = tmp_path / "older"
    older.mkdir()
    shutil.copy(run_dir / "config.json", older)
    (older / "metrics.jsonl").write_text(
        '{"step": 5}\n{"step": 10, "learning_rate": NaN}\n[]\n{"step": 15}\n'
    )
    shown = report(tmp_path / "page.html", poor, empty, older)

    said = capsys.readouterr()
    assert "PASSING OVER the damaged checkpoint of step 30" in said.err
    # Only what was scored has a line.
    headline = (
        rf"{re.escape(poor.name)}, step 20: precision @ 1 = 0\.\d+ \(chance: 0\.100\)\n"
    )
    assert re.fullmatch(headline + r"Open .*\n", said.out)
    notes = [entry["text"] for entry in shown.all("ul", class_="notes")]
    assert f"1 of 4 lines of {poor.name}/metrics.jsonl cannot be read." in notes[0]
    assert "DAMAGED checkpoints, of step 30." in notes[0]
    assert "precision @ 1 at step 20: " in shown.text
    states = [entry["text"] for entry in shown.all("td", class_="bad")]
    assert states == ["damaged"]
    assert "The training has logged nothing yet" in notes[1]
    assert "There is no checkpoint yet." in notes[1]
    assert "1 of 4 lines of older/metrics.jsonl cannot be read." in notes[2]
    assert [entry["text"] for entry in shown.all("p", class_="absent")] == [
        *["There is no checkpoint yet."] * 2,
        *["eval.py has scored no checkpoint yet."] * 2,
    ]
    # Its name is a script, and stays a text.
    assert not shown.all("script")
    # Only the first one's log has times.
    assert len(shown.all("meter")) == len(goodput.PARTS)
    seconds = lines(run_dir / "metrics.jsonl")[-1]["seconds"]
    total = sum(seconds.values())
    bars = [float(meter["value"]) for meter in shown.all("meter")]
    assert bars == pytest.approx([seconds[part] / total for part in goodput.PARTS])
    assert shown.all("h2")[0]["text"] == poor.name
    assert shown.all("title")[0]["text"] == f"{poor.name}, empty, older: report"


def test_a_run_that_cannot_be_scored_is_still_reported(runs, tmp_path):
    gone = shutil.copytree(next(iter(runs)), tmp_path / "gone")
    settings = json.loads((gone / "config.json").read_text())
    (gone / "config.json").write_text(json.dumps(settings | {"model": "no:where"}))
    shown = report(tmp_path / "page.html", gone)
    assert "model is no:where, which is Python code" in shown.text
    # What eval.py said of it stands in its place.
    (card,) = shown.cards()
    (line,) = lines(gone / "eval" / "metrics.jsonl")
    assert float(card["value"]) == line["precision @ 1"]


def test_without_evaluation_nothing_is_built(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(scored, "TrainedModel", None)
    shown = report(tmp_path / "page.html", *runs, evaluate=False)
    assert not shown.all("img")
    assert shown.text.count("because of --no-evaluate") == 2


def test_only_the_last_word_on_a_step_counts_and_whole_sets_only(runs, tmp_path):
    copy = shutil.copytree(next(iter(runs)), tmp_path / "copy")
    with (copy / "eval" / "metrics.jsonl").open("w") as file:
        for step, precision, count in (
            (20, 0.5, 2000),
            (10, 0.25, 2000),
            (20, 0.75, 2000),
            (30, 0.99, 37),
        ):
            line = {"step": step, "precision @ 1": precision, "num_examples": count}
            file.write(json.dumps(line) + "\n")
    (run,) = run_files.read_all([copy])
    assert run.scored == [
        {"step": 10, "precision @ 1": 0.25, "num_examples": 2000},
        {"step": 20, "precision @ 1": 0.75, "num_examples": 2000},
    ]


def test_headline_best_table_and_curve_are_one_reading(runs, tmp_path):
    run_dir, found = next(iter(runs.items()))
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(settings | {"moving_average_decay": 0.0})
    )
    origin.remember((copy / "config.json").read_bytes())
    (copy / "eval" / "metrics.jsonl").unlink()
    for step, precision, count in ((10, 0.98, 500), (20, 0.99, 2000), (30, 0.97, 500)):
        scores.append(copy / "eval", step, {"precision @ 1": precision}, count)
    shown = report(tmp_path / "page.html", copy)

    assert [float(card["value"]) for card in shown.cards()] == [found["precision @ 1"]]
    assert re.search(
        r"of 2,000 test images of .*, the variables themselves<", shown.text
    )
    figures = dict(
        zip(figure_texts(shown, "dt"), figure_texts(shown, "dd"), strict=True)
    )
    assert figures["best, at step 20"] == "99.00\N{NO-BREAK SPACE}%"
    values = [entry["value"] for entry in shown.all("data")]
    assert (values.count("0.98"), values.count("0.97")) == (0, 0)
    (table,) = (e for e in shown.all("table") if "Of 2,000 images each" in e["text"])
    rows = [row.split() for row in table["text"].splitlines() if "%" in row]
    assert len(rows) == 2
    curve = shown.line("accuracy-1")
    proportional(curve[:, 1], [0.99, found["precision @ 1"]])
    assert "off the chart" not in shown.text, "a good score is no jump"


def test_the_step_that_was_asked_for_is_shown_and_the_best_is_the_earlier(
    runs, tmp_path
):
    copy = shutil.copytree(next(iter(runs)), tmp_path / "copy")
    (copy / "eval" / "metrics.jsonl").unlink()
    for step in (10, 20, 30):
        scores.append(copy / "eval", step, {"precision @ 1": 0.99}, 2000)
    shown = report(tmp_path / "page.html", copy, step="20")
    (card,) = shown.cards()
    assert float(card["value"]) < 0.99, "it is scored anew"
    assert "precision @ 1 at step 20: " in shown.text
    assert "Confusion matrix at step 20." in shown.text
    assert "best, at step 10" in figure_texts(shown, "dt")
    shown = report(tmp_path / "page.html", copy, step="15")
    assert "--step 15: " in shown.all("ul", class_="notes")[0]["text"]
    with pytest.raises(UsageError, match="--step best --no-evaluate"):
        report(tmp_path / "page.html", copy, step="best", evaluate=False)


def test_the_step_is_that_of_the_last_checkpoint_where_no_line_was_logged(
    runs, tmp_path
):
    copy = shutil.copytree(next(iter(runs)), tmp_path / "copy")
    logged = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(logged[:2]))
    shown = report(tmp_path / "page.html", copy, evaluate=False)
    names = figure_texts(shown, "dt")
    assert figure_texts(shown, "dd")[names.index("step")] == "30 of 30"
    assert "training loss, step 20" in names


def figure_texts(shown, tag):
    return [entry["text"] for entry in shown.all(tag)]


@pytest.mark.parametrize(
    ("jumps", "note"),
    [
        ({}, None),
        ({13: 45.0, 14: 30.0}, "off the chart: 45 at step 140"),
        ({0: 2000.0}, "off the chart: 2,000 at step 10"),
        ({5: math.inf, 6: math.nan}, None),
    ],
    ids=["calm", "jump", "high start", "not finite"],
)
def test_a_jump_does_not_flatten_the_loss(jumps, note):
    calm = 0.8 + 4 * np.exp(-np.arange(60) / 8)
    log = [
        {"step": 10 * number + 10, "total_loss": jumps.get(number, loss)}
        for number, loss in enumerate(calm)
    ]
    svg = curves.draw("loss", [log], ["total_loss"], "{x:g}", leave_out_jumps=True)
    assert ("off the chart" in svg) == (note is not None)
    assert note is None or note in svg
    # Where jumps have no part in it, it falls by most of the picture's height.
    points = Page(svg).line("loss-1")
    fall = points[-1, 1] - points[points[:, 0] > points[0, 0]][0, 1]
    assert fall > 100


def test_a_page_of_one_run_lies_in_its_directory(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copies = [
        shutil.copytree(run_dir, tmp_path / run_dir.parent.name) for run_dir in runs
    ]
    for names, place in ((copies[:1], copies[0]), (copies, tmp_path)):
        reporter.run(reporter.Options(tuple(map(str, names)), evaluate=False))
        written = capsys.readouterr()
        assert written.out == f"Open {place}/report.html\n"
        assert (place / "report.html").exists()
        assert max(map(len, written.err.splitlines())) <= 80


def test_text_from_elsewhere_is_escaped_and_many_classes_are_listed(runs):
    run_dir = next(iter(runs))
    (run,) = run_files.read_all([run_dir])
    settings = run.settings | {"data_description": HOSTILE, HOSTILE: HOSTILE}
    run = dataclasses.replace(run, settings=settings, notes=[HOSTILE])
    for classes in (10, 100):
        names = tuple(f"{HOSTILE}{number}" for number in range(classes))
        confusion = np.diag(np.full(classes, 5))
        confusion[3, 7] = 4
        sums = metrics.Sums(1.0, confusion[0], confusion)
        image = {
            "png": "",
            "height": 64,
            "width": 96,
            "number": 3,
            "true": names[0],
            "predicted": names[1],
            "confidence": 0.5,
            "cross_entropy": 2.0,
        }
        scores = scored.Scores(30, HOSTILE, names, sums, sums.scalars(0.0), [image])
        shown = Page(page.render([run], [scores], 0.0))
        assert not shown.all("script")
        assert HOSTILE not in shown.text
        assert any(names[1] in entry["text"] for entry in shown.all("span"))
        (drawn,) = shown.all("img")
        assert (drawn["width"], drawn["height"]) == ("96", "64")
        rows = [e["text"].split("\n") for e in shown.all("tr") if HOSTILE in e["text"]]
        if classes == 100:
            assert [f"{names[3]}{names[7]}4"] in rows


def test_what_no_run_of_ours_writes_is_survived(runs, tmp_path):
    run_dir = next(iter(runs))
    strange = tmp_path / os.fsdecode(b"not-utf-8-\xff")
    strange.mkdir()
    settings = json.loads((run_dir / "config.json").read_text())
    settings |= {
        "earlier_sessions": [{"devices": "elsewhere"}, {"devices": "there"}],
        "data_description": "\ud800",
        "learning_rate": 0.1,
    }
    (strange / "config.json").write_text(json.dumps(settings))
    entries = [{"step": n, "total_loss": 0.5, "learning_rate": 1} for n in range(3)]
    entries[1]["total_loss/average"] = 3.4e38
    entries[1]["total_loss"] = entries[2]["learning_rate"] = math.inf
    entries[0]["total_loss"] = 3.4e38
    entries.append({"step": "4", "total_loss": 0.5})
    (strange / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)))
    other = tmp_path / "other"
    other.mkdir()
    settings |= {"learning_rate": 0.1000001}
    (other / "config.json").write_text(json.dumps(settings))
    (other / "eval").mkdir()
    (other / "eval" / "metrics.jsonl").write_text('{"step": 5}\n')

    shown = report(tmp_path / "page.html", strange, other, evaluate=False)
    assert r"not-utf-8-\udcff" in shown.text
    assert "earlier sessions ran on: elsewhere; there." in shown.text
    assert r"1 of 4 lines of not-utf-8-\udcff/metrics.jsonl" in shown.text
    assert shown.all("data", value="2"), "the last step with a number"
    marked = [entry["text"] for entry in shown.all("tr", class_="differs")]
    assert marked == ["learning rate0.10.1000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [strange.name, "other", "page.html"]
    )


@pytest.mark.parametrize("value", [10**400, 1e308, -1e308])
@pytest.mark.parametrize("name", ["step", "total_loss", "examples_per_sec"])
def test_numbers_that_no_chart_can_show_are_left_out(tmp_path, name, value):
    lines = [{"step": 1, "total_loss": 2, "examples_per_sec": 3}] * 2
    lines[1] = {**lines[1], name: int(value)}
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    notes = []
    logged = run_files._lines(tmp_path / "metrics.jsonl", notes)
    assert logged[0] == lines[0]
    assert len(notes) == len(lines) - len(logged) == (name == "step")
    assert all(value not in line.values() for line in logged)
    names = ["total_loss", "examples_per_sec"]
    assert curves.draw("c", [logged], names, "{x:g}", leave_out_jumps=True)


def test_very_many_lines_make_a_small_page_with_exact_numbers(runs, tmp_path):
    shutil.copy(next(iter(runs)) / "config.json", tmp_path)
    rates = np.random.default_rng(0).normal(1000, 10, 30_001)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, rate in enumerate(rates):
            line = {"step": step, "examples_per_sec": rate, "other": "x" * 20}
            file.write(json.dumps(line | {"total_loss": 1 / (step + 1)}) + "\n")
    (run,) = run_files.read_all([tmp_path])
    assert len(run.logged) == 30_001
    assert run.rate == np.median(rates)
    assert run.logged[-1] == {
        "step": 30_000,
        "examples_per_sec": rates[-1],
        "total_loss": 1 / 30_001,
    }
    assert len(page.render([run], [None], 0.0)) < 300_000


def test_the_mark_of_a_kept_checkpoint_does_not_make_it_younger(runs, tmp_path):
    kept = shutil.copytree(next(iter(runs)), tmp_path / "kept")
    folder = kept / "checkpoints" / "step-00000010"
    os.utime(folder / checkpoints.MANIFEST, (1e9, 1e9))
    (folder / "keep").touch()
    (run,) = run_files.read_all([kept])
    assert run.saved[0].written == 1e9
    (folder / checkpoints.MANIFEST).unlink()
    for path in folder.iterdir():
        os.utime(path, (1.1e9, 1.1e9))
    (run,) = run_files.read_all([kept])
    assert (run.saved[0].step, run.saved[0].written) == (10, 1.1e9)


def test_many_runs_have_names_and_lines_of_their_own(runs):
    many = [
        dataclasses.replace(
            run_files.read_all([run_dir])[0], number=number, name=str(number)
        )
        for number, run_dir in enumerate(list(runs) * 5, 1)
    ]
    text = page.render(many, [None] * 10, 0.0)
    styles = [
        re.search(rf'<g id="rate-{n}">.*?style="([^"]+)"', text, re.DOTALL)[1]
        for n in range(1, 11)
    ]
    assert len(set(styles)) == 10


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["run"], ["run"]),
        (["one", "two"], ["one", "two"]),
        (["a/run", "b/run", "b/two"], ["a/run", "b/run", "b/two"]),
        (["run", "run/inner"], ["run", "run/inner"]),
    ],
)
def test_names_are_relative_to_the_common_folder(runs, tmp_path, paths, names):
    for path in paths:
        (tmp_path / path).mkdir(parents=True)
        shutil.copy(next(iter(runs)) / "config.json", tmp_path / path)
    found = run_files.read_all([tmp_path / path for path in paths])
    assert [run.name for run in found] == names


def test_bad_input_is_a_sentence(runs, tmp_path, monkeypatch):
    run_dir = next(iter(runs))
    output = tmp_path / "page.html"

    def refused(match, *run_dirs, output=output):
        with pytest.raises(UsageError, match=match):
            report(output, *run_dirs, evaluate=False)

    refused("holds no run: there is no config.json", run_dir, tmp_path)
    refused("does not exist; no training", tmp_path / "nowhere")
    refused(
        "cannot be written: No such file", run_dir, output=tmp_path / "no" / "page.html"
    )
    refused("cannot be written: Is a directory", run_dir, output=tmp_path)
    assert not output.exists()
    config = shutil.copy(run_dir / "config.json", tmp_path / "other.json")
    refused(
        "exists already and is not a report", run_dir, output=tmp_path / "other.json"
    )
    assert (run_dir / "config.json").read_bytes() == run_files.Path(config).read_bytes()
    first = report(output, run_dir, run_dir, evaluate=False)
    assert len(first.all("article")) == 1, "one run is one run"
    report(output, run_dir, evaluate=False)
    monkeypatch.setattr(importlib.util, "find_spec", {"jinja2": 1}.get)
    refused(r"(?s)needs matplotlib, which cannot be imported.*'\.\[report\]'", run_dir)


def test_a_checkpoint_of_another_model_is_no_reason_to_fail(runs, tmp_path):
    foreign = shutil.copytree(next(iter(runs)), tmp_path / "foreign")
    variable = {"model": tf.Variable(1.0)}
    settings = json.loads((foreign / "config.json").read_text())
    facts = {name: settings[name] for name in ("seed", "global_batch_size")}
    checkpoints.save(foreign / "checkpoints", variable, step=40, facts=facts)
    shown = report(tmp_path / "page.html", foreign)
    assert "step-00000040 does not fit the model" in shown.text


@pytest.mark.slow
def test_a_real_run_in_processes_of_a_user(tmp_path, real_data_dir):
    def python(*words):
        done = run_as_a_user(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run = tmp_path / "run"
    where = ("--train_dir", run, "--data_dir", real_data_dir)
    python("train_multi_gpu.py", "--num_gpus", 2, "--max_steps", 60, *where)
    found = json.loads(python("eval.py", "--run_once", "--json", "--train_dir", run))
    output = tmp_path / "report.html"
    python("-m", "cifar10", "report", run, "--output", output)
    shown = Page(output.read_text())
    values = [entry.get("value") for entry in shown.all("data")]
    for metric in ("precision @ 1", "precision @ 5", "macro F1", "cross_entropy"):
        assert str(found[metric]) in values
    assert f"{found['correct']:,} of 10,000 test images of CIFAR-10" in shown.text
    cells = [entry for entry in shown.all("td") if "--s" in entry.get("style", "")]
    counts = np.reshape([int(cell["text"]) for cell in cells], (10, 10))
    assert np.array_equal(counts, found["confusion"])


def test_runs_are_named_by_position_or_by_train_dir():
    assert reporter.Options(("a",), train_dir="b").directories == ["a", "b"]
    assert reporter.Options(train_dir="b").directories == ["b"]
    assert reporter.Options().directories == ["runs/cifar10_train"]
