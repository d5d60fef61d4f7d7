"""`python -m cifar10 predict`: files in, names of classes out."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cifar10 import model as models
from cifar10.errors import UsageError
from cifar10.input import synthetic
from cifar10.run_directory import scores
from cifar10.tools.predict import predicting, top_k as ranking
from small_pictures import with_profiles
from small_runs import IMAGES, MODELS, describe, evaluated, save

ROOT = Path(__file__).parents[2]
NAMES = "abcdefghij"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, build in MODELS.items():
        monkeypatch.setitem(models.REGISTRY, name, build)


@pytest.fixture
def run_dir(tmp_path):
    """A run with a checkpoint of step 10, which is to end at step 30."""
    describe(tmp_path / "run", max_steps=30)
    save(tmp_path / "run", 10)
    return tmp_path / "run"


@pytest.fixture
def folder(tmp_path):
    """Seven images of the data set's size, named in their order."""
    (tmp_path / "images").mkdir()
    for number, image in enumerate(IMAGES):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
    return tmp_path / "images"


def predict(run_dir, *images, **options):
    names = [str(image) for image in images]
    return predicting.run(predicting.Options(names, str(run_dir), **options))


def probabilities(logits):
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(axis=1, keepdims=True)


def test_files_of_a_folder_get_what_an_evaluation_computes(run_dir, folder, capsys):
    assert predict(run_dir, folder, json=True, top_k=10) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["image"] for one in said] == [f"{folder}/{n}.png" for n in range(7)]
    assert {one["step"] for one in said} == {10}
    expected = probabilities(evaluated(run_dir, 10))
    for one, row in zip(said, expected, strict=True):
        found = {each["class"]: each["probability"] for each in one["predictions"]}
        ranked = list(found.values())
        assert ranked == sorted(ranked, reverse=True)
        np.testing.assert_allclose([found[name] for name in NAMES], row, rtol=1e-12)


def test_the_checkpoint_that_was_asked_for_predicts(run_dir, folder, capsys):
    save(run_dir, 20)
    (run_dir / "eval").mkdir()
    scores.append(run_dir / "eval", 10, {"precision @ 1": 0.5}, 100)
    for step in ("10", "best"):
        assert predict(run_dir, folder, json=True, top_k=10, step=step) == 0
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert {one["step"] for one in said} == {10}
    with pytest.raises(UsageError, match="--follow --step best"):
        predict(run_dir, folder, step="best", follow=True)


def test_every_kind_of_file_that_a_training_reads_is_predicted(
    run_dir, tmp_path, capsys
):
    kinds = tmp_path / "kinds"
    kinds.mkdir()
    for form in ("PNG", "WEBP", "BMP", "GIF", "JPEG"):
        Image.fromarray(IMAGES[0]).save(kinds / f"it.{form.lower()}", form)
    code = predict(run_dir, kinds)
    written = capsys.readouterr()
    assert (code, written.err) == (0, "")
    assert sum("it." in line for line in written.out.splitlines()) == 5


def test_a_model_of_figures_says_that_it_knows_no_photographs(tmp_path, folder, capsys):
    for names in (synthetic.CLASS_NAMES, NAMES):
        run = tmp_path / names[0]
        describe(run, class_names=list(names))
        save(run, 10)
        assert predict(run, folder / "0.png") == 0
        said = capsys.readouterr().err
        assert ("SYNTHETIC" in said) == (names is synthetic.CLASS_NAMES)


def test_what_is_no_image_is_named_and_skipped(run_dir, folder, capsys):
    (folder / "3.png").write_bytes((folder / "3.png").read_bytes()[:500])
    (folder / "notes.txt").write_text("no image")
    assert predict(run_dir, folder, folder / "none.png", top_k=2) == 1
    written = capsys.readouterr()
    lines = written.out.splitlines()
    assert lines[0] == "step 10:"
    assert [line.split(":")[0][-5:] for line in lines[1:]] == [
        f"{number}.png" for number in (0, 1, 2, 4, 5, 6)
    ]
    assert all(line.count(" %") == 2 for line in lines[1:])
    skipped = written.err.splitlines()
    assert len(skipped) == 3
    assert "3.png is damaged" in skipped[0]
    assert "notes.txt is neither a PNG nor a JPEG" in skipped[1]
    assert "none.png cannot be read" in skipped[2]


def test_what_takes_long_to_decode_is_skipped(run_dir, folder, capsys, monkeypatch):
    monkeypatch.setattr(predicting, "_DECODING_SECONDS", 0.2)
    (folder / "0.png").write_bytes(with_profiles(1000))
    assert predict(run_dir, folder / "0.png", folder / "1.png") == 1
    written = capsys.readouterr()
    assert "Skipped: " in written.err
    assert "0.png takes more than 0.3 s to decode" in written.err
    assert "1.png: " in written.out


def test_where_no_process_can_be_started_that_is_said(
    run_dir, folder, tmp_path, monkeypatch
):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    why = "No process can be started to decode images: No such file or directory"
    with pytest.raises(UsageError, match=why):
        predict(run_dir, folder / "0.png")


def test_following_predicts_at_each_new_checkpoint_to_the_end(
    run_dir, folder, capsys, monkeypatch
):
    def damaged():
        (save(run_dir, 25) / "state.index").write_bytes(b"")

    def save_new(step):
        return lambda: save(run_dir, step)

    waits = iter([lambda: None, save_new(20), damaged, save_new(30)])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(waits)())
    assert predict(run_dir, folder / "0.png", follow=True) == 0
    written = capsys.readouterr()
    steps = [line for line in written.out.splitlines() if line.startswith("step")]
    assert steps == ["step 10:", "step 20:", "step 30:"]
    assert written.err.count("step 25 is refused") == 1
    assert "The training has finished at step 30." in written.err


def test_following_goes_on_with_the_run_that_takes_the_place_of_the_first(
    run_dir, folder, capsys, monkeypatch
):
    def begin_anew():
        describe(run_dir, max_steps=10)
        save(run_dir, 10)

    def move_aside():
        run_dir.rename(run_dir.with_name("run.1"))

    waits = iter([move_aside, lambda: describe(run_dir, max_steps=5), begin_anew])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(waits)())
    assert predict(run_dir, folder / "0.png", follow=True) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("step")] == ["step 10:"] * 2


def test_following_waits_for_a_training_that_has_not_begun(
    tmp_path, folder, capsys, monkeypatch
):
    def begin():
        describe(tmp_path / "late", max_steps=10)
        save(tmp_path / "late", 10)

    monkeypatch.setattr(time, "sleep", lambda seconds: begin())
    assert predict(tmp_path / "late", folder / "0.png", follow=True) == 0
    written = capsys.readouterr()
    assert "step 10:" in written.out
    assert "late does not exist; no training has begun there.\nLooking" in written.err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"top_k": 0}, "top_k 0"),
        ({"top_k": 11}, "top_k 11: .* at most 10"),
        ({"interval_secs": 0.0}, "--interval_secs 0"),
        ({"interval_secs": float("nan")}, "--interval_secs nan"),
    ],
)
def test_options_that_make_no_sense_are_named(run_dir, folder, options, why):
    with pytest.raises(UsageError, match=why):
        predict(run_dir, folder, **options)


def test_by_default_three_classes_are_named_or_all_of_fewer(run_dir, folder, capsys):
    assert predict(run_dir, folder / "0.png", json=True) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert len(json.loads(line)["predictions"]) == 3
    assert ranking.checked(None, classes=2) == 2


def test_directories_that_cannot_be_predicted_from_are_named(run_dir, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    describe(tmp_path / "new")
    describe(tmp_path / "changed", parameters=3)
    save(tmp_path / "changed", 10)
    describe(tmp_path / "other")
    save(tmp_path / "other", 10, model="wider")
    for name, why in [
        ("none", "none does not exist"),
        ("empty", "holds no run"),
        ("new", "no checkpoint"),
        ("changed", "had 3 when it was trained"),
        ("other", "belongs to another"),
    ]:
        with pytest.raises(UsageError, match=why):
            predict(tmp_path / name, folder)
    with pytest.raises(UsageError, match="no files in"):
        predict(run_dir, tmp_path / "empty")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    with pytest.raises(UsageError, match="not finite"):
        ranking.top_k(np.array([[0.0, bad]]), ("a", "b"), 1)


def test_the_likeliest_classes_come_first_however_large_the_logits_are():
    logits = np.array([[0.0, 1000.0, 999.0], [1.0, 1.0, 1.0]], np.float32)
    first, second = ranking.top_k(logits, ("a", "b", "c"), 2)
    assert [found["class"] for found in first] == ["b", "c"]
    assert first[0]["probability"] == pytest.approx(1 / (1 + np.exp(-1)))
    third = pytest.approx(1 / 3)
    assert second == [{"class": name, "probability": third} for name in "ab"]


@pytest.mark.slow
def test_the_command_reads_a_list_and_its_exit_code_tells_of_skipped_files(
    tmp_path, folder
):
    model = [
        "import keras",
        "def small(image_shape, classes):",
        "    inputs, flatten = keras.Input(image_shape), keras.layers.Flatten()",
        "    return keras.Sequential([inputs, flatten, keras.layers.Dense(classes)])",
    ]
    (tmp_path / "my_models.py").write_text("\n".join(model))
    described = tmp_path / "run"
    describe(described, model="my_models:small", parameters=17290)
    sys.path.insert(0, str(tmp_path))
    try:
        save(described, 10, model="my_models:small")
    finally:
        sys.path.remove(str(tmp_path))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cifar10", "predict", "-"),
            *("--train_dir", described, "--trust_model", "my_models:small"),
        ],
        input=f"{folder}/0.png\n{tmp_path}/my_models.py\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"step 10:\n{folder}/0.png: ")
    assert done.stderr == (
        "Starting TensorFlow ...\n"
        f"Skipped: {tmp_path}/my_models.py is neither a PNG nor a JPEG nor a "
        "WebP nor a BMP nor a GIF nor a TIFF image.\n"
    )
