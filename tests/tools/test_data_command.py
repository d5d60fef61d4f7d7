"""`python -m cifar10 data`: what it finds in pictures."""

import json

import numpy as np
import pytest
from PIL import Image

import runs
import small_sets
from cifar10.config.config import Config
from cifar10.input import cifar, datasets, records
from cifar10.tools.duplicates import find_duplicates
from small_folders import numbered, packed, pixels, write

NAMES = [
    *numbered(4, "train/cat", "train/dog"),
    *numbered(2, "test/cat", "test/dog"),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, beside a data directory."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("CIFAR10_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path):
    return write(tmp_path / "my photos", *NAMES, size=12)


def call(*words):
    return runs.call("cifar10/__main__.py", "data", *words)


def shown(*words):
    """Returns what the command prints, which has to succeed."""
    done = call(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(*words):
    return json.loads(shown(*words, "--json"))


def test_the_pictures_of_each_class_are_counted(photos):
    (photos / "train/dog/3.png").unlink()
    text = shown(photos, "--image_size", 8)
    assert "11 pictures of 2 classes at 8 x 8" in text
    rows = [line.split() for line in text.splitlines()]
    at = rows.index(["train", "test"])
    assert rows[at + 1 : at + 4] == [
        ["4", "2", "cat"],
        ["3", "2", "dog"],
        ["7", "4", "in", "all"],
    ]


def test_notes_are_reported_once_and_by_a_run_too(photos, capsys):
    (photos / "train/empty").mkdir()
    done = call(photos, "--image_size", 8)
    assert (done.stdout + done.stderr).count("left out: 1 folder: train/empty/") == 1
    datasets.find_for(Config(data=str(photos), image_size=8).dataset)
    assert "1 folder: train/empty/" in capsys.readouterr().err


def test_left_out_pictures_are_named(photos):
    (photos / "train/cat/0.png").write_bytes(b"no picture")
    (photos / "train/dog/1.png").write_bytes(b"")
    all_of_it = found(photos, "--image_size", 8)
    assert set(all_of_it["left_out"]) == {"train/cat/0.png", "train/dog/1.png"}
    text = shown(photos, "--image_size", 8)
    assert "left out: 2 pictures" in text
    assert f"    {all_of_it['left_out']['train/dog/1.png']}" in text.splitlines()


def test_duplicates_across_parts_and_classes_are_found(photos):
    same = packed(pixels(100, 12))
    for name in ("train/cat/0.png", "test/cat/1.png", "test/cat/0.png"):
        (photos / name).write_bytes(same)
    # Other bytes of the same pixels.
    again = packed(pixels(101, 12), compress_level=0)
    (photos / "train/cat/1.png").write_bytes(packed(pixels(101, 12)))
    (photos / "train/dog/2.png").write_bytes(again)
    duplicates = found(photos, "--image_size", 8)["duplicates"]
    text = shown(photos, "--image_size", 8)
    assert "Equal pixel for pixel: 2 groups" in text
    assert "2 held-out pictures also trained on" in text
    assert "1 group in several classes" in text
    first = ["train/cat/0.png", "test/cat/0.png", "test/cat/1.png"]
    assert duplicates.pop("groups") == [first, ["train/cat/1.png", "train/dog/2.png"]]
    assert duplicates.pop("nearly") == []
    assert [*duplicates.values()] == [2, 1]


def test_the_first_of_many_duplicates_are_shown_and_the_rest_counted(tmp_path):
    pairs = [(f"train/cat/{n}.png", f"test/cat/{n}.png") for n in range(7)]
    folder = write(tmp_path / "pairs", *sum(pairs, ()), "train/dog/0.png", size=12)
    for first, second in pairs:
        (folder / second).write_bytes((folder / first).read_bytes())
    lines = shown(folder, "--image_size", 8).splitlines()
    at = lines.index("Equal pixel for pixel: 7 groups of pictures")
    groups = [f"    {first}, {second}" for first, second in pairs[:5]]
    assert lines[at + 1 : at + 6] == groups
    assert lines[at + 6].startswith("    and 2 more")
    assert lines[at + 7].startswith("    7 held-out pictures")
    assert len(found(folder, "--image_size", 8)["duplicates"]["groups"]) == 7


def test_duplicates_of_images_on_disk_are_found():
    """Those only within the test part are in no two parts."""
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 3), np.uint8)
    labels = np.zeros(9, np.int32)
    on_disk = small_sets.OnDisk(images[:6])
    on_disk.nbytes = 2**40
    parts = {"train": (on_disk, labels[:6]), "test": (images[[6, 7, 6]], labels[:3])}
    duplicates = find_duplicates(parts, "abcdefxyz")
    assert duplicates.pop("groups") == [["x", "z"]]
    assert (duplicates["in_both_parts"], duplicates["in_several_classes"]) == (0, 0)
    assert (on_disk.count()[:6] >= 1).all()
    assert all(len(images[:6][some]) <= 1 for some in on_disk.chosen), "not in parts"


def test_a_test_picture_nearly_equal_to_a_training_picture_is_found(tmp_path):
    """Saved again with losses, brighter, and a little cropped; not another picture."""
    random, folder = np.random.default_rng(0), tmp_path / "scenes"
    for part, count in (("train", 30), ("test", 6)):
        for number in range(count):
            (folder / part / "cat").mkdir(parents=True, exist_ok=True)
            blurred = Image.fromarray(random.integers(0, 200, (6, 6, 3), np.uint8))
            scene = blurred.resize((64, 64), Image.Resampling.BICUBIC)
            scene.save(folder / part / "cat" / f"{number}.png")
    for part in ("train", "test"):
        write(folder, *numbered(1, f"{part}/dog"), size=64)
    write(folder, "test/dog/0.png", "test/dog/1.png", size=64)
    with Image.open(folder / "train/cat/3.png") as scene:
        brighter = scene.point(lambda value: value + 40)
        brighter.save(folder / "test/cat/0.jpg", quality=60)
        scene.crop((1, 1, 64, 64)).save(folder / "test/dog/2.png")
        scene.save(folder / "test/cat/6.png")
    duplicates = found(folder)["duplicates"]
    nearly = [
        ["train/cat/3.png", f"test/{name}"] for name in ("cat/0.jpg", "dog/2.png")
    ]
    assert duplicates["nearly"] == nearly
    assert ["train/cat/3.png", "test/cat/6.png"] in duplicates["groups"]
    nearly_the_same = "Possibly near-duplicates of training pictures: "
    assert f"{nearly_the_same}2 held-out pictures" in shown(folder)


def test_arrays_and_cifar_are_shown_as_well(tmp_path, monkeypatch):
    images, labels = np.stack([pixels(n) for n in range(6)]), np.arange(6) % 2
    written = {"x_train": images, "y_train": labels}
    written |= {"x_test": images[1:3], "y_test": labels[1:3]}
    np.savez(tmp_path / "arrays.npz", **written)
    arrays = found(tmp_path / "arrays.npz")
    first = ["train picture 1", "test picture 0"]
    assert arrays["duplicates"]["groups"][0] == first
    small = small_sets.SMALL["cifar10"]
    monkeypatch.setitem(cifar.FORMATS, "cifar10", small)
    monkeypatch.setattr(records, "CIFAR10", small)
    small_sets.write_files(tmp_path / "binary", "cifar10")
    of_cifar = found("cifar10", "--data_dir", tmp_path / "binary")
    assert of_cifar["classes"][3] == {"name": "cat", "train": 10, "test": 2}
    assert of_cifar["duplicates"]["in_both_parts"] == 2


def test_mistakes_are_refused():
    for first, *more in (
        ("nowhere",),
        ("cifar10", "--image_size", "64"),
        ("--trust_model", "my_models:small", "cifar10"),
    ):
        done = call(first, *more)
        assert done.returncode == 2
        assert first in done.stderr
