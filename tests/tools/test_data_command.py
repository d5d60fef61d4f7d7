"""`python -m cifar10 data`: what it finds in pictures, and what it draws of them."""

import json
import shlex

import numpy as np
import pytest
from PIL import Image

import runs
import small_sets
from cifar10.input import records
from cifar10.tools.data import contact_sheet, findings, showing
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
    assert rows[0] == ["train", "test"]
    assert rows[1:3] == [["4", "2", "cat"], ["3", "2", "dog"]]
    assert rows[3][:2] == ["7", "4"]
    assert section(text, "Left out") == ["no picture"]
    assert section(text, "The same") == ["no two pictures"]


def test_of_many_classes_it_prints_the_largest_and_the_smallest():
    classes = [{"name": f"class {n}", "train": n, "test": 1} for n in range(1, 1_001)]
    lines = list(showing._on_classes(classes))
    assert len(lines) < 30
    assert [line.split() for line in lines[1:3]] == [
        ["1,000", "1", "class", "1000"],
        ["999", "1", "class", "999"],
    ]
    assert [line.split()[0] for line in lines[-3:-1]] == ["2", "1"]
    assert any("980 classes" in line for line in lines)
    assert lines[-1].split()[:2] == ["500,500", "1,000"]


def test_it_says_how_uneven_the_classes_are(tmp_path):
    names = numbered(8, "train/cat"), numbered(2, "train/dog", "test/cat", "test/dog")
    photos = write(tmp_path / "photos", *names[0], *names[1], size=12)
    first, second = section(shown(photos, "--image_size", 8), "Notes")
    assert first == "the largest class has 4.0 times as many as the smallest"
    assert second.startswith('class_weights = "balanced"')
    (photos / "train/cat/0.png").unlink()
    assert not found(photos, "--image_size", 8)["notes"]


def test_it_tells_how_large_the_files_pictures_are(tmp_path):
    sizes = [(7, 90), (20, 30), (30, 30), (40, 31), (200, 100)]
    for number, (width, height) in enumerate(sizes):
        for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
            path = tmp_path / "photos" / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed(Image.new("RGB", (width, height)), "JPEG"))
    text = shown(tmp_path / "photos", "--image_size", 25)
    assert section(text, "Sizes") == [
        "7 x 90 the smallest, 30 x 30 the median, 200 x 100 the largest",
        "8 have a side below 25 and are enlarged",
    ]


def test_it_names_what_is_left_out_and_why(photos):
    (photos / "train/cat/0.png").write_bytes(b"no picture")
    (photos / "train/dog/1.png").write_bytes(b"")
    (photos / "train/dog/readme.txt").write_bytes(b"text")
    words = (photos, "--image_size", 8, "--max_bad_images", 0.5)
    first, *reasons = section(shown(*words), "Left out")
    assert first == "2 pictures"
    assert "train/cat/0.png is neither a PNG" in reasons[0]
    assert "train/dog/1.png is empty" in reasons[1]
    assert section(shown(*words), "Notes") == [
        "1 file that is no picture is left out (1 txt)"
    ]
    assert set(found(*words)["left_out"]) == {"train/cat/0.png", "train/dog/1.png"}
    done = call(photos, "--image_size", 8)
    assert done.returncode == 2
    assert "--max_bad_images 0.01" in done.stderr


def test_it_finds_the_same_picture_in_both_parts_and_in_two_classes(photos):
    same = packed(pixels(100, 12))
    for name in ("train/cat/0.png", "test/cat/1.png", "test/cat/0.png"):
        (photos / name).write_bytes(same)
    # Other bytes of the same pixels.
    again = packed(pixels(101, 12), compress_level=0)
    (photos / "train/cat/1.png").write_bytes(packed(pixels(101, 12)))
    (photos / "train/dog/2.png").write_bytes(again)
    duplicates = found(photos, "--image_size", 8)["duplicates"]
    assert duplicates == {
        "groups": [
            ["train/cat/0.png", "test/cat/0.png", "test/cat/1.png"],
            ["train/cat/1.png", "train/dog/2.png"],
        ],
        "repeated": 3,
        "in_both_parts": 2,
        "in_several_classes": 1,
    }
    lines = section(shown(photos, "--image_size", 8), "The same")
    assert lines[0].startswith("3 pictures repeat")
    assert lines[1].startswith("2 test pictures are trained on")
    assert lines[2].startswith("1 is in several classes")
    assert lines[3] == "train/cat/0.png = test/cat/0.png = test/cat/1.png"


def test_the_same_pictures_only_within_the_test_part_are_in_no_two_parts():
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (9, 4, 4, 3), np.uint8)
    test = images[[6, 7, 6]]
    labels = np.zeros(9, np.int32)
    parts = {
        "train": findings.Part(images[:6], labels[:6], list("abcdef")),
        "test": findings.Part(test, labels[:3], list("xyz")),
    }
    duplicates = findings.duplicates(parts)
    assert duplicates.groups == [["x", "z"]]
    assert (duplicates.repeated, duplicates.in_both_parts) == (1, 0)


def test_images_that_are_not_in_memory_are_read_in_parts(monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 3), np.uint8)
    images[49] = images[3]
    on_disk = small_sets.OnDisk(images)
    monkeypatch.setattr(findings, "_READ_BYTES", 7 * images[0].nbytes)
    labels = np.zeros(50, np.int32)
    nothing = findings.Part(images[:0], labels[:0], [])
    names = [str(number) for number in range(50)]
    parts = {"train": findings.Part(on_disk, labels, names), "test": nothing}
    assert findings.duplicates(parts).groups == [["3", "49"]]
    assert (on_disk.count() == 1).all()
    assert len(on_disk.chosen) == 8


def test_the_sheet_shows_pictures_of_each_class(photos, tmp_path):
    sheet = tmp_path / "sheet.png"
    shown(photos, "--image_size", 8, "--contact_sheet", sheet)
    with Image.open(sheet) as drawn:
        drawn.load()
        assert drawn.width < 1_000
        first = np.asarray(drawn)[20 + 20 :][:64, 4 : 4 + 64]
    # Cat 0 of 12 x 12 as 8 x 8, each pixel of which is a square of 8 x 8.
    squares = first.reshape(8, 8, 8, 8, 3)
    assert (squares == squares[:, :1, :, :1]).all()
    assert squares.std() > 10


@pytest.mark.slow
def test_the_sheet_of_many_classes_is_bounded():
    classes = 1_000
    labels = np.repeat(np.arange(classes, dtype=np.int32), 2)
    images = np.zeros((len(labels), 8, 8, 3), np.uint8)
    names = [f"a class with a very long name {n} " * 9 for n in range(classes)]
    drawn = contact_sheet.draw("many", images, labels, names)
    assert drawn.width < 1_000
    assert drawn.height < 10_000
    few = contact_sheet.draw("few", images[:2], labels[:2], names[:1])
    assert few.height < 200


def test_the_sheet_is_in_the_cache_and_drawn_anew(photos, cache):
    sheet = found(photos, "--image_size", 8)["contact_sheet"]
    assert sheet.startswith(str(cache))
    assert not [*(cache.parent / "data").iterdir()]
    assert found(photos, "--image_size", 8)["contact_sheet"] == sheet
    with Image.open(sheet) as drawn:
        assert drawn.format == "PNG"


def test_another_file_is_not_overwritten_by_the_sheet(photos, tmp_path):
    holiday = tmp_path / "holiday.png"
    holiday.write_bytes(packed(pixels(0)))
    done = call(photos, "--contact_sheet", holiday)
    assert done.returncode == 2
    assert "is not a contact sheet" in done.stderr
    assert holiday.read_bytes() == packed(pixels(0))
    done = call(photos, "--contact_sheet", tmp_path / "nowhere" / "sheet.png")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr


def test_the_training_that_it_names_takes_the_same_pictures(
    photos, tmp_path, monkeypatch
):
    words = (photos, "--image_size", 32, "--max_bad_images", 0.2)
    before = found(*words)
    python, *command = shlex.split(before["next"])
    assert python == "python"
    monkeypatch.chdir(tmp_path)
    done = runs.call(*command, *runs.flags(max_steps=1, batch_size=2))
    assert done.returncode == 0, done.stderr
    train_dir = tmp_path / "runs" / "my photos"
    settings = json.loads((train_dir / "config.json").read_text())
    assert settings["data_fingerprint"] == before["fingerprint"]
    # The next one does not go into a run of other flags.
    anew = shlex.split(found(photos)["next"])
    assert "--train_dir=runs/my photos.1" in anew
    # All that is there fits into a step of that many images.
    size = next(word for word in anew if word.startswith("--batch_size="))
    assert 0 < int(size.partition("=")[2]) <= sum(c["train"] for c in before["classes"])


def test_it_shows_arrays_and_cifar_as_well(tmp_path, monkeypatch):
    images = np.stack([pixels(n) for n in range(6)])
    labels = np.arange(6) % 2
    np.savez(
        tmp_path / "arrays.npz",
        x_train=images,
        y_train=labels,
        x_test=images[1:3],
        y_test=labels[1:3],
    )
    arrays = found(tmp_path / "arrays.npz")
    assert arrays["duplicates"]["groups"] == [
        ["train picture 1", "test picture 0"],
        ["train picture 2", "test picture 1"],
    ]
    assert [one["train"] for one in arrays["classes"]] == [3, 3]
    monkeypatch.setitem(showing.datasets.cifar.FORMATS, "cifar10", SMALL)
    monkeypatch.setattr(records, "CIFAR10", SMALL)
    small_sets.write_files(tmp_path / "binary", "cifar10")
    cifar = found("cifar10", "--data_dir", tmp_path / "binary")
    assert cifar["classes"][3] == {"name": "cat", "train": 10, "test": 2}
    assert cifar["duplicates"]["in_both_parts"] == 2
    assert f"--data_dir={tmp_path / 'binary'}" in shlex.split(cifar["next"])


SMALL = small_sets.SMALL["cifar10"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no such data set"),
        (["cifar10", "--image_size", "64"], "have 32 x 32"),
        (["synthetic", "--contact_sheet", ""], "it is empty"),
    ],
)
def test_mistakes_end_in_a_sentence(words, said):
    done = call(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
