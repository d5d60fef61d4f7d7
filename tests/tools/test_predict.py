"""`python -m cifar10 predict`: files in, names of classes out."""

import json
import time

import numpy as np
import pytest

import runs
from cifar10.errors import UsageError
from cifar10.input import synthetic
from cifar10.tools import classification, predict as command
from small_folders import packed
from small_pictures import with_profiles
from small_runs import IMAGES, describe, evaluated, save

NAMES = "abcdefghij"
pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seven images of the data set's size, named in their order."""
    folder = tmp_path_factory.mktemp("images")
    forms = ("PNG", "WEBP", "BMP", "PNG", "PNG", "PNG", "PNG")
    for number, (image, form) in enumerate(zip(IMAGES, forms, strict=True)):
        content = packed(image, form, lossless=True)
        (folder / f"{number}.{form.lower()}").write_bytes(content)
    return folder


def predict(run_dir, *images, **options):
    names = [str(path) for image in images for path in inside(image)]
    return command.predict_files(
        command.Options(names, train_dir=str(run_dir), **options)
    )


def inside(path):
    return sorted(path.iterdir()) if path.is_dir() else [path]


def steps(said):
    return [line for line in said.splitlines() if line.startswith("step")]


def test_files_get_the_answers_of_an_evaluation(small_run, folder, capsys):
    assert predict(small_run, folder, json=True, top_k=10) == 0
    written = capsys.readouterr()
    assert not written.err
    said = [json.loads(line) for line in written.out.splitlines()]
    assert [one["image"] for one in said] == sorted(map(str, folder.iterdir()))
    assert {one["step"] for one in said} == {20}
    powers = np.exp(evaluated(small_run, 20).astype(np.float64))
    for one, row in zip(said, powers / powers.sum(axis=1, keepdims=True), strict=True):
        found = {each["class"]: each["probability"] for each in one["predictions"]}
        assert [*found.values()] == sorted(found.values(), reverse=True)
        np.testing.assert_allclose([found[name] for name in NAMES], row, rtol=1e-12)


def test_predict_takes_a_whole_folder_without_system_files(small_run, tmp_path, capsys):
    for name in ("a/1.png", "a/b/2.png", "@eaDir/1.png/3.png", "__MACOSX/._1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(packed(IMAGES[0]))
    options = command.Options([str(tmp_path)], train_dir=str(small_run), json=True)
    assert command.predict_files(options) == 0
    said = map(json.loads, capsys.readouterr().out.splitlines())
    found = [one["image"] for one in said]
    assert found == [str(tmp_path / "a/1.png"), str(tmp_path / "a/b/2.png")]
    (tmp_path / "text").mkdir()
    (tmp_path / "text/1.txt").touch()
    options = command.Options([str(tmp_path / "text")], train_dir=str(small_run))
    with pytest.raises(UsageError, match=r"no pictures, but 1 \.txt: 1"):
        command.predict_files(options)


def test_other_files_of_a_folder_are_counted_and_named(small_run, tmp_path, capsys):
    for name in (f"{'é' * 100}.png", "photo", "a.jpg_large", "b.jpg.1"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(packed(IMAGES[0]))
    twice = [tmp_path / "in", *(tmp_path / "in").glob("*.png")]
    options = command.Options([*map(str, twice)], train_dir=str(small_run), json=True)
    assert command.predict_files(options) == 0
    written = capsys.readouterr()
    assert written.out.count("\n") == 1
    for said in ("1 .jpg_large", "1 .1", "1 without an extension", "photo"):
        assert said in written.err


def test_the_requested_checkpoint_predicts(small_run, folder, capsys):
    for step in ("10", "best"):
        assert predict(small_run, folder / "0.png", step=step) == 0
        said = capsys.readouterr().out
        assert steps(said) == ["step 10:"]
        assert said.count(" %") == 3
    with pytest.raises(UsageError, match="--follow"):
        predict(small_run, folder, step="best", follow=True)


def test_unreadable_and_costly_images_are_named_and_skipped(
    small_run, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(command, "_DECODING_SECONDS", 0.2)
    damaged, notes, costly = (tmp_path / n for n in ("a.png", "notes.txt", "c.png"))
    damaged.write_bytes((folder / "0.png").read_bytes()[:500])
    notes.write_text("no image")
    costly.write_bytes(with_profiles(1000))
    good = (folder / "0.png", folder / "4.png")
    assert predict(small_run, tmp_path, tmp_path / "none.png", *good) == 1
    written = capsys.readouterr()
    lines = written.out.splitlines()[1:]
    assert [line.partition(": ")[0] for line in lines] == [*map(str, good)]
    skipped = written.err.splitlines()
    reasons = (("a.png", "damaged"), ("c.png", "decode"), ("notes.txt", "PNG"))
    for line, (name, why) in zip(skipped, (*reasons, ("none.png", "")), strict=True):
        assert name in line
        assert why in line


def test_following_predicts_at_each_new_checkpoint_to_the_end(
    tmp_path, folder, capsys, monkeypatch
):
    run = tmp_path / "run"

    def begin():
        describe(run, max_steps=30, class_names=list(synthetic.CLASS_NAMES))
        save(run, 10)

    def damage():
        (save(run, 25) / "state.index").write_bytes(b"")

    events = iter([begin, lambda: save(run, 20), damage, lambda: save(run, 30)])
    monkeypatch.setattr(time, "sleep", lambda _: next(events)())
    assert predict(run, folder / "0.png", follow=True) == 0
    written = capsys.readouterr()
    assert steps(written.out) == ["step 10:", "step 20:", "step 30:"]
    assert "holds no run" in written.err
    assert written.err.count("step 25") == 1
    assert "SYNTHETIC" in written.err


def test_wrong_options_and_directories_are_refused(small_run, folder, tmp_path):
    for options, why in (
        ({"top_k": 0}, "--top_k"),
        ({"interval_secs": float("nan")}, "--interval_secs"),
        ({"interval_secs": 9.0}, "--interval_secs 9 needs --follow"),
    ):
        with pytest.raises(UsageError, match=why):
            predict(small_run, folder, **options)
    for names in ([""], [str(folder), ""]):
        with pytest.raises(UsageError, match="IMAGE: the value is empty"):
            command.Options(names, train_dir=str(small_run))
    (tmp_path / "empty").mkdir()
    describe(tmp_path / "other")
    save(tmp_path / "other", 10, model="wider")
    for name, why in (
        ("none", "holds no run"),
        ("empty", "no run"),
        ("other", "another model"),
    ):
        with pytest.raises(UsageError, match=why):
            predict(tmp_path / name, folder)


def test_the_likeliest_classes_come_first_even_with_large_logits():
    logits = np.array([[0.0, 1000.0, 999.0], [1.0, 1.0, 1.0]], np.float32)
    first, second = classification.likeliest_classes(logits, ("a", "b", "c"), 2)
    assert [found["class"] for found in first] == ["b", "c"]
    assert first[0]["probability"] == pytest.approx(1 / (1 + np.exp(-1)))
    third = pytest.approx(1 / 3)
    assert second == [{"class": name, "probability": third} for name in "ab"]
    assert len(classification.likeliest_classes(logits, ("a", "b", "c"), 4)[0]) == 3
    for bad in (np.nan, np.inf):
        with pytest.raises(UsageError, match="finite"):
            classification.likeliest_classes(np.array([[0.0, bad]]), ("a", "b"), 1)


def test_the_exit_code_reports_skipped_files(tmp_path, folder):
    describe(tmp_path / "run", model=runs.SMALL)
    save(tmp_path / "run", 10, model=runs.SMALL)
    image, text = folder / "0.png", tmp_path / "a.txt"
    text.touch()
    words = runs.flags(train_dir=tmp_path / "run", trust_model=runs.SMALL)
    done = runs.call("cifar10/__main__.py", "predict", text, image, image, *words)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(f"step 10:\n{image}: ")
    assert done.stdout.count(str(image)) == 1
    assert str(text) in done.stderr
    done = runs.call("cifar10/__main__.py", "predict", folder, *words)
    assert (done.returncode, done.stdout.count("\n")) == (0, 8), "all of the folder"
