"""`python -m cifar10 data`: what it finds in pictures, and what it draws of them."""

import json
import shlex

import numpy as np
import pytest
from PIL import Image

import runs
import small_sets
from cifar10.config.config import Config
from cifar10.input import cifar, datasets, records
from cifar10.tools import data_contents
from cifar10.tools.data_contents import find_duplicates
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


def section(text, title):
    """Returns the lines below a title, and beside it."""
    lines = text.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{title}:"))
    rest = [lines[start].partition(":")[2]]
    for line in lines[start + 1 :]:
        if not line.startswith("  "):
            break
        rest.append(line)
    return [line.strip() for line in rest]


def test_it_counts_the_pictures_of_each_class(photos):
    (photos / "train/dog/3.png").unlink()
    text = shown(photos, "--image_size", 8)
    assert "11 pictures of 2 classes at 8 x 8" in text
    rows = [line.split() for line in section(text, "Classes")]
    assert rows[1:3] == [["4", "2", "cat"], ["3", "2", "dog"]]


def test_it_tells_notes_once_and_a_training_tells_them_too(photos, capsys):
    (photos / "train/empty").mkdir()
    done = call(photos, "--image_size", 8)
    assert (done.stdout + done.stderr).count("1 folder has no pictures") == 1
    settings = Config(data=str(photos), image_size=8).values
    datasets.find_for(settings)
    assert "1 folder has no pictures" in capsys.readouterr().err


def test_it_names_pictures_that_are_left_out(photos):
    (photos / "train/cat/0.png").write_bytes(b"no picture")
    (photos / "train/dog/1.png").write_bytes(b"")
    all_of_it = found(photos, "--image_size", 8)
    assert set(all_of_it["left_out"]) == {"train/cat/0.png", "train/dog/1.png"}
    # A training would refuse so many, 2 of 12.
    assert "--max_bad_images=0.17" in all_of_it["next"]
    words = (photos, "--image_size", 8, "--max_bad_images", 0.2)
    assert "--max_bad_images=0.2" in found(*words)["next"]


def test_it_finds_the_same_picture_in_both_parts_and_in_two_classes(photos):
    same = packed(pixels(100, 12))
    for name in ("train/cat/0.png", "test/cat/1.png", "test/cat/0.png"):
        (photos / name).write_bytes(same)
    # Other bytes of the same pixels.
    again = packed(pixels(101, 12), compress_level=0)
    (photos / "train/cat/1.png").write_bytes(packed(pixels(101, 12)))
    (photos / "train/dog/2.png").write_bytes(again)
    duplicates = found(photos, "--image_size", 8)["duplicates"]
    first = ["train/cat/0.png", "test/cat/0.png", "test/cat/1.png"]
    assert duplicates.pop("groups") == [first, ["train/cat/1.png", "train/dog/2.png"]]
    assert duplicates.pop("nearly") == []
    assert [*duplicates.values()] == [3, 2, 1]


def test_duplicates_of_images_that_are_not_in_memory_are_found():
    """Those only within the test part are in no two parts."""
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 3), np.uint8)
    labels = np.zeros(9, np.int32)
    on_disk = small_sets.OnDisk(images[:6])
    on_disk.nbytes = 2**40
    parts = {"train": (on_disk, labels[:6]), "test": (images[[6, 7, 6]], labels[:3])}
    duplicates = find_duplicates(parts, "abcdefxyz")
    assert duplicates.pop("groups") == [["x", "z"]]
    assert [*duplicates.values()][:3] == [1, 0, 0]
    assert (on_disk.count()[:6] >= 1).all()
    assert all(len(images[:6][some]) <= 1 for some in on_disk.chosen), "not in parts"


def test_a_test_picture_that_is_nearly_trained_on_is_found(tmp_path):
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
    assert "2 held-out pictures may be nearly" in section(shown(folder), "The same")[0]


def test_sheet_shows_pictures_of_each_class(photos, tmp_path, cache):
    sheet = tmp_path / "sheet.png"
    shown(photos, "--image_size", 8, "--contact_sheet", sheet)
    with Image.open(sheet) as drawn:
        drawn.load()
        first = np.asarray(drawn)[20 + 20 :][:64, 4 : 4 + 64]
    # Cat 0 of 12 x 12 as 8 x 8, each pixel of which is a square of 8 x 8.
    squares = first.reshape(8, 8, 8, 8, 3)
    assert (squares == squares[:, :1, :, :1]).all()
    assert squares.std() > 10
    # Without a place none is drawn.
    found(photos, "--image_size", 8)
    assert not [*cache.rglob("*.png"), *(cache.parent / "data").iterdir()]


@pytest.mark.parametrize("has_font", [True, False])
def test_names_on_the_sheet_are_no_boxes(has_font, monkeypatch):
    if not has_font:
        monkeypatch.setattr(data_contents, "_find_font", lambda: None)

    def drawn(name):
        images, labels = np.stack([pixels(0), pixels(1)]), np.arange(2)
        return data_contents.draw_sheet("", [name, "cat"], images, labels)

    assert drawn("B\xe4r") != drawn("B\xf6r")
    assert (drawn("B\xe4r") == drawn("Bar")) == (not has_font)


def test_another_file_is_not_overwritten_by_the_sheet(photos, tmp_path):
    holiday = tmp_path / "holiday.png"
    holiday.write_bytes(packed(pixels(0)))
    done = call(photos, "--contact_sheet", holiday)
    assert done.returncode == 2
    assert str(holiday) in done.stderr
    assert holiday.read_bytes() == packed(pixels(0))


def test_training_that_it_names_takes_the_same_pictures(photos, tmp_path, monkeypatch):
    words = (photos, "--image_size", 32, "--max_bad_images", 0.2)
    before = found(*words)
    python, module, package, *command = shlex.split(before["next"])
    assert (python, module, package) == ("python", "-m", "cifar10")
    monkeypatch.chdir(tmp_path)
    short = {"max_steps": 1, "eval_steps": 1, "batch_size": 2, "model": runs.SMALL}
    done = runs.call("cifar10/__main__.py", *command, *runs.flags(**short))
    assert done.returncode == 0, done.stderr
    train_dir = tmp_path / "runs" / "my photos"
    settings = json.loads((train_dir / "config.json").read_text())
    assert settings["data_fingerprint"] == before["fingerprint"]
    # The next one does not go into a run of other flags.
    anew = shlex.split(found(photos)["next"])
    assert "--train_dir=runs/my photos.1" in anew


def test_it_shows_arrays_and_cifar_as_well(tmp_path, monkeypatch):
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
    assert f"--data_dir={tmp_path / 'binary'}" in shlex.split(of_cifar["next"])


def test_mistakes_are_refused():
    for first, *more in (("nowhere",), ("cifar10", "--image_size", "64")):
        done = call(first, *more)
        assert done.returncode == 2
        assert first in done.stderr
