"""A folder of pictures through the whole program: as the binary files, and exactly."""

import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

import runs
from cifar10 import evaluate
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.input import cifar, datasets, records
from cifar10.input.regrouping import divided
from cifar10.tools.report_run import read_runs
from cifar10.training import train as training
from small_folders import numbered, packed, write

# A space, an umlaut, and what HTML would take for a tag.
CLASSES = ("Käse & Brot", "a cat", "<b>")


def picture(label, random):
    """Returns a picture whose class can be told by its colour."""
    colour = np.eye(3)[label % 3] * 120
    noise = random.integers(0, 120, (32, 40, 3))
    return (noise + colour).astype(np.uint8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of pictures of 40 x 32 pixels with training and test parts."""
    directory = tmp_path_factory.mktemp("own") / "my photos"
    random = np.random.default_rng(0)
    for part, count in (("train", 16), ("test", 6)):
        for label, name in enumerate(CLASSES):
            folder = directory / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                content = packed(picture(label, random))
                (folder / f"{number}.png").write_bytes(content)
    return directory


OPTIONS = {
    "model": runs.SMALL,
    "image_size": 32,
    "global_batch_size": 16,
    "max_steps": 40,
    "checkpoint_steps": 4,
    "learning_rate": 0.01,
    "precision": "float64",
}


def trained(train_dir, photos, **options):
    """Trains; returns the last checkpoint's values."""
    options = {"data": "folder", "deterministic": True, **OPTIONS, **options}
    given = {"data_dir": str(photos), "train_dir": str(train_dir), **options}
    config = Config(recipe="tutorial", **given)
    assert training.train(config) == config.run.max_steps
    return runs.variables(runs.checkpoint(train_dir, config.run.max_steps))


# ---- the same as CIFAR's files


def test_png_files_train_bit_for_bit_as_the_binary_files(tmp_path, monkeypatch):
    """A folder's pictures are listed by class and name, and so are the records."""
    small = dataclasses.replace(
        records.CIFAR10, train_records_per_file=8, test_records_per_file=20
    )
    monkeypatch.setitem(cifar.FORMATS, "cifar10", small)
    (tmp_path / "binary").mkdir()
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        count = sum(small.files(part).values())
        images = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
        labels = (np.arange(count) * 10 // count).astype(np.uint8)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            name = f"{part}/{small.class_names[label]}/{number:02}.png"
            (tmp_path / "png" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "png" / name).write_bytes(packed(image))
        planes = images.transpose(0, 3, 1, 2).reshape(count, -1)
        rows, first = np.column_stack([labels, planes]), 0
        for name, number in small.files(part).items():
            (tmp_path / "binary" / name).write_bytes(rows[first:][:number].tobytes())
            first += number
    options = {"precision": "auto", "max_steps": 2}
    on_png = trained(tmp_path / "1", tmp_path / "png", **options)
    options |= {"data": "cifar10", "image_size": None}
    runs.assert_equal(on_png, trained(tmp_path / "2", tmp_path / "binary", **options))


# ---- exactly the same, however it is trained


@pytest.fixture(scope="module")
def one(tmp_path_factory, photos):
    """What one tower in one process has learned."""
    return trained(tmp_path_factory.mktemp("one") / "run", photos)


def test_two_towers_equal_one_tower(tmp_path, photos, one):
    two = trained(tmp_path / "two", photos, num_gpus=2)
    assert runs.largest_difference(two, one) < 1e-8


def words(train_dir, photos, **values):
    """Returns the command line of what `trained` trains."""
    values = {"data": photos, "train_dir": train_dir, **OPTIONS, **values}
    script = runs.ROOT / "train_multi_gpu.py"
    return [script, "--deterministic", *runs.flags(recipe="tutorial", **values)]


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(tmp_path, photos, one):
    command = words(tmp_path / "run", photos)
    with runs.started(*command) as process:
        runs.read_until(process.stdout, "step 10,")
        process.kill()
    assert not runs.checkpoint(tmp_path / "run", 40).exists()
    done = runs.call(*command)
    assert "Resuming" in done.stdout, done.stderr
    runs.assert_equal(runs.variables(runs.checkpoint(tmp_path / "run", 40)), one)


def test_a_run_continues_only_with_the_same_pictures(tmp_path, photos):
    copy, run = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(photos, copy)
    trained(run, copy, max_steps=1)
    # The same pixels in a new file are the same pictures.
    changed = copy / "train" / CLASSES[0] / "3.png"
    before = changed.read_bytes()
    with Image.open(io.BytesIO(before)) as image:
        changed.write_bytes(packed(np.asarray(image), compress_level=0))
    trained(run, copy, max_steps=2)
    changed.write_bytes(packed(picture(0, np.random.default_rng(1))))
    with pytest.raises(UsageError, match="or labels have changed"):
        trained(run, copy, max_steps=3)


def score(train_dir, data_dir, *words):
    """Scores a run on a folder's test part; returns the process and its scores."""
    flags = runs.flags(train_dir=train_dir, data_dir=data_dir)
    done = runs.call("eval.py", "--run_once", "--json", *flags, *words)
    return done, json.loads(done.stdout) if done.returncode == 0 else {}


def test_a_run_keeps_its_original_division_into_parts(tmp_path):
    """Pictures that are added later are scored by the same limits."""
    names = numbered(20, "cat", "dog", "wolf")
    photos = write(tmp_path / "photos", *names)
    run = tmp_path / "run"
    trained(run, photos, max_steps=1)
    added = [f"cat/new {number}.png" for number in range(40)]
    write(photos, *added)
    recorded = RecordedRun.read(run)
    parts, _ = divided(added, [0] * 40, ["cat"], {"test": 0.1}, recorded)
    more = np.flatnonzero(parts == "test")
    assert more.size
    done, scores = score(run, photos)
    assert scores["num_examples"] == 6 + len(more), done.stderr
    again = evaluate(run, data=str(photos), model=runs.SMALL)
    assert again["cross_entropy"] == pytest.approx(scores["cross_entropy"])
    with pytest.raises(UsageError, match="or labels have changed"):
        trained(run, photos, max_steps=3)


def test_changed_pictures_at_the_same_path_give_no_scores_of_the_run(photos, tmp_path):
    """They would displace its scores, and so its best checkpoint."""
    run, own = tmp_path / "run", tmp_path / "photos"
    shutil.copytree(photos, own)
    trained(run, own, precision="float32", max_steps=1, eval_steps=1)
    before = runs.logged(run / "eval")
    shutil.copy(own / "test/a cat/0.png", own / "test/a cat/new.png")
    done, _ = score(run, own)
    assert "have changed" in done.stderr
    assert "eval_on_photos" in done.stderr
    assert runs.logged(run / "eval") == before
    assert runs.logged(run / "eval_on_photos")[0]["num_examples"] == 19


def test_a_part_of_pictures_sorted_by_class_is_named(photos, tmp_path):
    run = tmp_path / "run"
    trained(run, photos, precision="float32", max_steps=1)
    note = "the images are sorted by class, so the scores are of 1 of 3 classes"
    done, scores = score(run, photos, "--num_examples", 6)
    assert note in " ".join(done.stderr.split())
    assert scores["num_examples"] == 6
    for words in ((), ("--num_examples", 18), ("--num_examples", 13)):
        assert "sorted" not in score(run, photos, *words)[0].stderr


@pytest.mark.parametrize(
    ("before", "now", "seen"),
    [
        ({}, {}, ""),
        ({}, {"val_fraction": 0.2}, "val"),
        ({}, {"validation_fraction": 0.3}, "test"),
        ({}, {"validation_fraction": 0.3, "val_fraction": 0.2}, "test and val"),
        ({"val_fraction": 0.2}, {"validation_fraction": 0.3, "val_fraction": 0}, ""),
        ({"validation_fraction": 0.4}, {"val_fraction": 0.2}, ""),
        # Of 16 pictures of a class 6 were held out, then 2 and 5 are.
        ({"validation_fraction": 0.4}, {"val_fraction": 0.3}, "val"),
    ],
)
def test_held_out_pictures_seen_by_the_initial_weights_are_reported(
    photos, tmp_path, capsys, before, now, seen
):
    """By the names that are held out, and that the weights' run had as `train`."""
    flat, options = tmp_path / "flat", {"precision": "float32", "max_steps": 1}
    shutil.copytree(photos / "train", flat)
    usual = {"validation_fraction": 0.1, "val_fraction": 0.0}
    first = trained(tmp_path / "first", flat, **options, **{**usual, **before})
    capsys.readouterr()
    given = {**usual, **now, "initial_weights": str(tmp_path / "first")}
    trained(tmp_path / "second", flat, **options, **given)
    said = " ".join(capsys.readouterr().out.split())
    assert (f"trained on images that are {seen} here" in said) == bool(seen)
    runs_ = [RecordedRun.read(tmp_path / name) for name in ("first", "second")]
    was, is_ = [datasets.find_again(one).paths for one in runs_]
    both = [part for part in ("test", "val") if {*is_.get(part, ())} & {*was["train"]}]
    assert " and ".join(both) == seen, first


def test_a_program_scores_a_whole_folder_without_parts(photos, tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    trained(run, photos, precision="float32", max_steps=1)
    shutil.copytree(photos / "test", other)
    whole = evaluate(run, data=str(other))
    assert "all its pictures are scored" in capsys.readouterr().err
    assert whole["cross_entropy"] == evaluate(run)["cross_entropy"]
    shutil.copytree(photos / "train", other / "train")
    shutil.copytree(photos / "test", other / "test")
    for name in CLASSES:
        shutil.rmtree(other / name)
    (other / "test/a cat/0.png").unlink()
    part = evaluate(run, data=str(other))
    assert part["cross_entropy"] != whole["cross_entropy"], "its test part"


def test_a_moved_folder_is_scored_on_the_same_pictures(photos, tmp_path, capsys):
    """All of its pictures would include those that were trained on."""
    run, flat = tmp_path / "run", tmp_path / "flat"
    shutil.copytree(photos / "train", flat)
    trained(run, flat, precision="float32", max_steps=1)
    expected = evaluate(run)["cross_entropy"]
    moved = flat.rename(tmp_path / "moved")
    assert evaluate(run, data=str(moved))["cross_entropy"] == expected
    write(moved, "a cat/another.png")
    for data, is_other in ((moved, False), (photos / "test", True)):
        capsys.readouterr()
        evaluate(run, data=str(data))
        said = capsys.readouterr().err
        assert ("all its pictures are scored" in said) == is_other
        assert "sampled" not in said, "no training pictures are scored"


def test_a_moved_and_corrected_folder_is_still_the_runs(photos, tmp_path):
    run, flat, listed = tmp_path / "run", tmp_path / "flat", tmp_path / "listed.csv"
    shutil.copytree(photos / "train", flat)
    found = datasets.find_for(Config(data="folder", data_dir=str(flat)).dataset)
    name = found.paths["train"][0]
    listed.write_text(f"picture,class\n{name},\n")
    trained(run, flat, precision="float32", max_steps=1, corrections=str(listed))
    expected = evaluate(run)["cross_entropy"]
    moved = flat.rename(tmp_path / "moved")
    assert evaluate(run, data=str(moved))["cross_entropy"] == expected
    done, scores = score(run, moved)
    assert scores["cross_entropy"] == pytest.approx(expected)
    assert "not the run's" not in done.stderr
    flat = moved.rename(flat)
    (flat / name).unlink()  # As the list leaves it out, nothing changes.
    done = runs.call("eval.py", "--run_once", "--train_dir", run)
    assert done.returncode == 0, done.stderr
    assert f"{name} is not a training picture" in " ".join(done.stderr.split())


def test_a_program_scores_the_pictures_of_a_single_class(photos, tmp_path, capsys):
    run, cats = tmp_path / "run", tmp_path / "cats"
    trained(run, photos, precision="float32", max_steps=1)
    shutil.copytree(photos / "test/a cat", cats / "a cat")
    assert np.isfinite(evaluate(run, data=str(cats))["cross_entropy"])
    (cats / "a cat/damaged.png").write_bytes(b"damaged")
    capsys.readouterr()
    assert np.isfinite(evaluate(run, data=str(cats))["cross_entropy"])
    assert "left out: 1 picture" in capsys.readouterr().err
    for part in ("train", "test"):  # These are splits, of which none is left out.
        shutil.copytree(photos / "test/a cat", tmp_path / "split" / part / "a cat")
    with pytest.raises(UsageError, match="has pictures in 1 class"):
        evaluate(run, data=str(tmp_path / "split"))


def test_more_pictures_continue_in_a_new_run(tmp_path):
    """All its layers begin there, and what it held out is not trained on."""
    photos = write(tmp_path / "photos", *numbered(30, "cat", "dog"), size=32)
    first = ("--train_dir", tmp_path / "run", "--val_fraction", "0.2", "--data", photos)
    small = ("--batch_size", "8", "--image_size", "32", "--max_steps", "1")
    runs.call("train.py", *first, *small)
    run = RecordedRun.read(tmp_path / "run")
    then = datasets.find_for(run.config.dataset)
    added = [f"cat/new {number}.png" for number in range(30)]
    write(photos, *added, *numbered(30, "bird"), size=32)  # A new class comes first.
    refused = runs.call("train.py", "--resume", tmp_path / "run")
    assert refused.returncode == 2
    assert "Give only" not in refused.stderr, "that can never work"
    advised = refused.stderr.strip().splitlines()[-1].split()
    assert advised[1] == str(runs.ROOT / "train.py")
    done = runs.call("train.py", *advised[2:])
    assert done.returncode == 0, done.stderr
    assert "New layers: softmax_linear." in done.stdout, done.stdout
    later = RecordedRun.read(tmp_path / "run.1")
    now = datasets.find_for(later.config.dataset, run=run)
    for part in ("val", "test"):
        assert {*then.paths[part]} <= {*now.paths[part]}
        assert any("bird" in path for path in now.paths[part])
    again = ("--data", photos, "--initial_weights", tmp_path / "run", "--batch_size", 8)
    again += ("--max_steps", 4, "--train_dir", tmp_path / "tuned")
    refused = runs.call("train.py", *again, "--warmup_epochs", 2)
    assert "--warmup_epochs 2" in refused.stderr
    done = runs.call("train.py", *again)
    assert "New layers: softmax_linear." in done.stdout, "of the run's own distortions"
    assert "is shortened" in done.stderr
    assert runs.call("train.py", *again).returncode == 0, "the same command resumes"
    older = ("--warmup_epochs", 0.3, "--fresh")  # Of 0.38, as before it was shortened.
    recipe = tmp_path / "older.toml"
    recipe.write_text('warmup_epochs = 0.3\nschedule = "cosine"\n')
    assert runs.call("train.py", *again, "--recipe", recipe, *older).returncode == 0
    done = runs.call("train.py", *again, "--recipe", recipe)
    assert (done.returncode, "shortened" in done.stderr) == (0, False), done.stderr
    done = runs.call("train.py", *again, "--distortions", "none", "--fresh")
    assert done.returncode == 0, done.stderr
    assert "(on images of 24 x 24, not 32 x 32)" in " ".join(done.stdout.split())


def test_scores_name_the_classes_and_other_classes_are_refused(photos, tmp_path):
    trained(tmp_path / "run", photos, precision="float32", max_steps=1)
    _, scores = score(tmp_path / "run", photos)
    assert [row["class"] for row in scores["per_class"]] == sorted(CLASSES)
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    for part in ("train", "test"):
        (other / part / "a cat").rename(other / part / "a dog")
    done, _ = score(tmp_path / "run", other)
    assert done.returncode == 2
    assert "a dog" in done.stderr


def test_scores_on_other_pictures_are_kept_apart_from_the_run(photos, tmp_path):
    run = tmp_path / "run"
    trained(run, photos, precision="float32", max_steps=1)
    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(photos, copy)
    shutil.copytree(photos, other)
    (other / "test" / "a cat" / "0.png").unlink()
    done, scores = score(run, other)
    assert scores["num_examples"] == 17
    assert "not the run's data" in done.stderr
    assert not (run / "eval").exists()
    assert runs.logged(run / "eval_on_other")[0]["num_examples"] == 17
    done, scores = score(run, other, "--eval_data", "all")
    counts = {row["class"]: row["images"] for row in scores["per_class"]}
    assert counts == {CLASSES[0]: 22, "a cat": 21, "<b>": 22}
    for part, is_new in (("train", False), ("test", True)):
        plain = shutil.copytree(photos / part, tmp_path / f"plain {part}")
        done, _ = score(run, plain)
        assert ("--eval_data all" in done.stderr) == is_new
        shutil.rmtree(plain / "<b>")  # It lacks a class.
        done, scores = score(run, plain, "--eval_data", "all")
        assert done.returncode == 0, done.stderr
        seen = "32 of 48 sampled training images of the run are among these"
        assert (seen in " ".join(done.stderr.split())) != is_new
        counts = {row["class"]: row["images"] for row in scores["per_class"]}
        count = 6 if is_new else 16
        assert counts == {CLASSES[0]: count, "a cat": count, "<b>": 0}
    for where in ((), ("--data_dir", photos)):
        words = ("--train_dir", run, "--run_once", "--eval_data", "all", *where)
        done = runs.call("eval.py", *words)
        assert done.returncode == 2
        assert "training pictures" in done.stderr
        assert "have changed" not in done.stderr
    for part in ("", "train", "train/a cat"):  # Its own, by another path.
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(photos / part)
        words = ("--train_dir", run, "--run_once", "--eval_data", "all")
        done = runs.call("eval.py", *words, "--data_dir", tmp_path / "link")
        assert done.returncode == 2, part
    done, scores = score(run, photos / "test", "--eval_data", "all")
    assert scores["num_examples"] == 18
    done, _ = score(run, copy)  # The same pictures, moved.
    assert "not the run's" not in done.stderr
    assert [line["num_examples"] for line in runs.logged(run / "eval")] == [18]
    page = runs.call("cifar10/__main__.py", "report", run, "--data_dir", other)
    assert page.returncode == 0, page.stderr
    text = (run / "report.html").read_text()
    assert "Of 18 test images each" in text
    assert '<i class="name">test/a cat/1.png</i>' in text
    assert "test/a cat/0.png" not in text
    # As many pictures as the run's, one of which is another.
    shutil.copy(other / "test/a cat/1.png", other / "test/a cat/0.png")
    (shown,) = read_runs([run])
    shown.scored = before = [{**shown.scored[0], "step": 0}]
    shown.score("/cpu:0", None, None, str(other))
    assert shown.tested["num_examples"] == 18
    assert shown.scored == before, "the curve is of the run's own pictures"
