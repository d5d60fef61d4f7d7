"""A folder of pictures as a data set: which files, classes and parts it has."""

import errno
import inspect
import os
import shutil
import sys

import numpy as np
import pytest

from cifar10 import files
from cifar10.errors import UsageError
from cifar10.input.datasets import fitted
from cifar10.input.pictures import shards
from cifar10.input.pictures.listing import list_folder, split_of
from cifar10.input.regrouping import divided
from cifar10.process import entry_point
from recorded_runs import recorded
from small_folders import (
    SIZE,
    everything,
    files_in,
    find,
    numbered,
    packed,
    pixels,
    write,
)

NAMES = [*numbered(12, "cat", "dog"), "dog/puppies/old/1.png"]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def pictures(tmp_path):
    return write(tmp_path / "pictures", *NAMES)


def test_the_files_become_images_with_the_labels_of_their_folders(pictures, cache):
    dataset = find(pictures, cache)
    assert dataset.class_names == ("cat", "dog")
    assert (dataset.name, dataset.directory) == ("folder", pictures)
    assert (dataset.classes, dataset.image_shape) == (2, (SIZE, SIZE, 3))
    assert dataset.is_real, "a report would take it for the stand-in"
    images, tests = everything(dataset)
    assert sorted(images) == sorted(NAMES)
    assert 0 < len(tests) < len(NAMES)
    for number, name in enumerate(NAMES):
        np.testing.assert_array_equal(images[name], pixels(number))
    for split in ("train", "test"):
        _, labels = dataset.read(split)
        assert labels.dtype == np.int32
        expected = [int(p.startswith("dog")) for p in dataset.paths[split]]
        assert labels.tolist() == expected


# ---- parts


def test_existing_parts_of_a_folder_are_kept(tmp_path, cache):
    names = numbered(3, "train/a", "train/b")
    names += numbered(
        1, *(f"{part}/{n}" for part in ("test", "val", "more") for n in "ab")
    )
    dataset = find(write(tmp_path / "set", *names), cache)
    assert everything(dataset)[1] == {"test/a/0.png", "test/b/0.png"}
    assert dataset.class_names == ("a", "b")
    assert dataset.paths["val"] == ["val/a/0.png", "val/b/0.png"]
    assert dataset.notes == ["left out: 1 folder: more/"]


def test_an_unreadable_folder_is_refused(pictures, cache, monkeypatch):
    scan = os.scandir

    def refusing(path):
        if path == forbidden:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for forbidden in (pictures, pictures / "cat", pictures / "dog/puppies"):
        assert f"{forbidden} cannot be read" in refused(pictures, cache)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path, cache):
    (tmp_path / "set.npz").touch()
    said = refused(tmp_path / "set.npz", cache, validation_fraction=0.1)
    assert "set.npz cannot be read: Not a directory. Give a folder of pictures." in said


def test_train_is_a_class_without_a_test_part(tmp_path, cache):
    directory = write(tmp_path / "a", *numbered(9, "bus", "train"))
    assert find(directory, cache).class_names == ("bus", "train")
    directory = write(tmp_path / "b", *numbered(9, "Train/a", "Train/b", "TEST/a"))
    assert find(directory, cache).class_names == ("a", "b")


@pytest.mark.parametrize(
    ("train", "other"),
    [
        ("train", "valid"),
        ("training", "validation"),
        ("Training", "Test"),
        ("training_set", "test_set"),
        ("train-images", "dev images"),
        ("01 TRAIN", "02 Eval"),
        ("train2017", "val2017"),
        ("Final_Training", "Final_Test"),
        ("trainval", "test"),
    ],
)
def test_usual_names_of_parts_are_read(tmp_path, cache, train, other):
    names = numbered(3, *(f"{part}/{n}" for part in (train, other) for n in "ab"))
    dataset = find(write(tmp_path / "set", *names), cache)
    assert (dataset.class_names, dataset.splits) == (("a", "b"), ("train", "test"))
    assert dataset.paths["test"] == [
        f"{other}/{n}/{i}.png" for n in "ab" for i in "012"
    ]
    (note,) = dataset.notes
    assert f"{other}/ as test" in note
    more = write(tmp_path / "set", *numbered(1, "Val Set/a", "Val Set/b"))
    if split_of(other) == "test":
        assert find(more, cache).splits == ("train", "val", "test")
    else:
        assert "the same split" in refused(more, cache)


@pytest.mark.parametrize("name", ["trains", "attest", "test tube", "validity", "2017"])
def test_other_folder_names_are_classes(name):
    assert split_of(name) is None


def test_a_picture_beside_the_classes_hides_no_parts(tmp_path, cache):
    each = numbered(2, *(f"{p}/{n}" for p in ("train", "valid") for n in "ab"))
    names = [*each, "train/overview.png", "valid/overview.png"]
    dataset = find(write(tmp_path / "set", *names), cache)
    assert (dataset.class_names, dataset.splits) == (("a", "b"), ("train", "test"))


def test_a_single_train_folder_is_divided(tmp_path, cache):
    directory = write(tmp_path / "set", *numbered(9, "Train/a", "Train/b"))
    (directory / "labels").mkdir()
    (directory / "labels/a.xml").touch()
    dataset = find(directory, cache)
    assert (dataset.class_names, dataset.splits) == (("a", "b"), ("train", "test"))
    assert len(dataset.paths["test"]) == 6


def test_both_forms_of_an_accent_are_one_class(tmp_path, cache):
    one, other = "caf\xe9", "cafe\u0301"
    names = numbered(3, f"train/{one}", "train/dog", f"test/{other}", "test/dog")
    dataset = find(write(tmp_path / "a", *names), cache)
    assert dataset.class_names == (one, "dog")
    names = [*numbered(3, one, "dog"), f"{other}/9.png"]
    both = find(write(tmp_path / "b", *names), cache, validation_fraction=0.1)
    assert both.class_names == (one, "dog")
    assert everything(both)[0].keys() == set(names)
    described = {"image_shape": [SIZE, SIZE, 3], "class_names": [other, "dog"]}
    fitted(both, recorded(data="folder", **described), "it")


@pytest.mark.parametrize(
    "name", ["@eaDir", "#recycle", "__MACOSX", "$RECYCLE.BIN", ".ipynb_checkpoints"]
)
def test_system_folders_and_files_are_ignored(pictures, cache, name):
    write(pictures, f"{name}/1.png", f"cat/{name}/1.png", f"dog/puppies/{name}/a/1.png")
    for file in ("._1.png", "Thumbs.db", ".DS_Store", "desktop.ini", "Icon\r"):
        (pictures / "cat" / file).touch()
    dataset = find(pictures, cache)
    assert everything(dataset)[0].keys() == set(NAMES)
    assert (dataset.class_names, dataset.notes) == (("cat", "dog"), [])


def test_the_division_depends_only_on_the_names_of_pictures():
    names = [f"cat/{number}.jpg" for number in range(20_000)]
    parts, _ = divided(names, [0] * len(names), ["cat"], {"test": 0.1})
    assert np.count_nonzero(parts == "test") == 2_000
    # Frozen: another machine, another version, the same splits.
    few = [f"cat/{number}.jpg" for number in range(40)]
    parts, _ = divided(few, [0] * len(few), ["cat"], {"test": 0.1})
    assert np.flatnonzero(parts == "test").tolist() == [13, 30, 36, 38]
    # An accent may be written in two ways, and a name have bytes that are no UTF-8.
    one, other = (
        divided([f"{e}/{n}" for n in range(50)], [0] * 50, ["cat"], {"test": 0.1})
        for e in ("\xe9", "e\u0301")
    )
    assert one[0].tolist() == other[0].tolist()
    assert one[1] == other[1]
    assert (
        divided([os.fsdecode(b"cat/\xff.png")], [0], ["cat"], {"test": 0.1})[0]
        == "train"
    )


def test_each_class_is_divided_separately(tmp_path, cache):
    """A tenth of ten pictures is one, and so it is of four; one remains to train on."""
    names = numbered(10, *(f"class{n}" for n in range(10)))
    names += [*numbered(4, "few"), "one/1.png"]
    directory = write(tmp_path / "set", *names)
    dataset = find(directory, cache, validation_fraction=0.1)
    assert np.bincount(dataset.read("test")[1], minlength=12).tolist() == [1] * 11 + [0]
    assert np.bincount(dataset.read("train")[1]).tolist() == [9] * 10 + [3, 1]


def test_a_run_of_an_older_version_keeps_its_fingerprint(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(shards, "HASHED_BYTES", 4 * SIZE * SIZE * 3)
    parts = ("train/cat", "train/dog", "test/cat", "test/dog")
    directory = write(tmp_path / "parts", *numbered(7, *parts))
    (directory / "train/cat/3.png").write_bytes(b"broken")
    found = find(directory, cache, max_bad_images=0.5)
    older = "28c830e15c35dfcc8190f666c073dbaf4d8113b934b89ded1809ef22531f2dd9"
    assert found.fingerprint == older


def test_the_fingerprint_covers_pixels_labels_and_classes(tmp_path, cache):
    """With the same files in the same order, so that only the one thing differs."""
    parts = [("train", "a"), ("train", "b"), ("test", "a"), ("test", "b")]
    names = numbered(4, *map("/".join, parts))
    directory = write(tmp_path / "1", *names)
    first = find(directory, cache).fingerprint
    os.utime(directory / "train/a/3.png", (1, 1))
    assert find(directory, cache).fingerprint == first
    (directory / "train/a/3.png").write_bytes(packed(pixels(99)))
    assert find(directory, cache).fingerprint != first
    other = write(tmp_path / "2", *names)
    for part in ("train", "test"):  # The last of `a` becomes the first of `b`.
        (other / part / "a/3.png").rename(other / part / "b/0 first.png")
        (other / part / "b/0.png").rename(other / part / "b/0 second.png")
    assert find(other, cache).fingerprint != first
    renamed = write(tmp_path / "3", *names)
    for part in ("train", "test"):
        (renamed / part / "b").rename(renamed / part / "c")
    assert find(renamed, cache).fingerprint != first


# ---- bad input


def test_files_other_than_pictures_are_reported(pictures, cache):
    (pictures / "empty").mkdir()
    (pictures / "broken").symlink_to("nowhere")
    for name in ("1.png", ".hidden", "cat/README", "cat/a.pdf", "cat/b.txt"):
        (pictures / name).touch()
    (note,) = find(pictures, cache).notes
    assert "1.png, broken, cat/README, cat/a.pdf, cat/b.txt and 1 more" in note
    for count in ("2 without an extension", "1 .png", "1 .pdf", "1 .txt", "1 folder"):
        assert count in note


def test_an_empty_folder_of_a_split_is_reported(tmp_path, cache):
    names = numbered(5, "train/a", "train/b", "test/a", "test/b")
    directory = write(tmp_path / "set", *names)
    (directory / "train/c").mkdir()
    assert find(directory, cache).notes == ["left out: 1 folder: train/c/"]


def refused(directory, cache, **values):
    with pytest.raises(UsageError) as caught:
        find(directory, cache, **values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["1.png", "2.png"], "subfolder"),
        (["train/cat/1.png", "test/cat/1.png"], "in 1 class."),
        (numbered(2, "data/cat", "data/dog"), "set/data."),
        (["train/1.png", "test/1.png"], "no class folders"),
        (numbered(2, "train/a", "train/b", "valid"), "valid/ holds no class folders"),
        (numbered(2, "train/a", "train/b", "val/a", "Validation/b"), "the same split"),
        (numbered(2, "train/a", "train/b", "unlabeled"), "looks like a split"),
        (numbered(2, "seg_train/a", "seg_train/b", "seg_test/a", "more"), "not look"),
        (numbered(2, "one/0", "one/1", "two/0", "two/1"), "but hold 0, 1"),
        ([*numbered(3, "images"), *numbered(3, "annotations/trimaps")], "not look"),
        (numbered(2, "cat", "bell\x07"), "control"),
        (numbered(2, "cat", "two\nlines"), "control"),
        (["cat/1.png", "dog/1.png", f"dog/{os.fsdecode(bytes([255]))}.png"], "UTF-8"),
        (numbered(2, "train/a", "train/b", "test/a", "test/c"), "of test/: c"),
    ],
)
def test_unusable_folders_are_refused(tmp_path, cache, names, said):
    (tmp_path / "set").mkdir()
    assert said in refused(write(tmp_path / "set", *names), cache)
    assert not cache.exists()


def test_a_folder_with_only_a_test_part_can_be_scored_but_not_trained_on(
    tmp_path, cache
):
    names = numbered(5, "test/a", "test/b")
    found = find(write(tmp_path / "set", *names), cache, val_fraction=0.2)
    assert (found.class_names, found.splits) == (("a", "b"), ("test",))
    assert len(found.read("test")[1]) == 10
    with pytest.raises(UsageError, match="no train: it can be scored"):
        found.read("train")
    for name in ("valid", "Dev Set"):
        other = write(tmp_path / name, *numbered(2, f"{name}/a", f"{name}/b"))
        assert find(other, cache).splits == ("test",)


def test_pictures_to_score_may_cover_a_single_class_of_the_run(tmp_path, cache):
    run = recorded(class_names=["a", "b", "fold1", "fold2"], val_fraction=0.0)
    whole = {"run": run, "validation_fraction": 1.0}
    for number, names in enumerate(
        (
            numbered(2, "b"),
            numbered(2, "test/b"),
            numbered(1, "train/a", "test/b"),
            [*numbered(2, "train/b"), "valid/1.png"],
            numbered(1, "fold1", "fold2"),
        )
    ):
        found = find(write(tmp_path / str(number), *names), cache, **whole)
        assert (found.splits, len(found.read("test")[1])) == (("test",), 2)
        assert found.class_names == ("a", "b", "fold1", "fold2")
    other = write(tmp_path / "other", *numbered(2, "c"))
    assert find(other, cache, **whole).class_names == ("c",)  # Which `eval` refuses.
    above = write(tmp_path / "above", *numbered(2, "data/a", "data/b"))
    assert "above/data." in refused(above, cache, **whole)
    one = write(tmp_path / "train", *numbered(4, "b"))
    said = refused(one, cache, run=run)
    assert "in 1 class." in said
    assert "--eval_data all" in said


def test_subfolders_of_a_divided_class_get_a_note(tmp_path, cache):
    names = numbered(4, *(f"{name}/{name}{n}" for name in "ab" for n in (1, 2)))
    (note,) = find(write(tmp_path / "plain", *names), cache).notes
    assert "a1" in note
    parts = [f"{part}/{name}" for part in ("train", "test") for name in names]
    assert find(write(tmp_path / "parts", *parts), cache).notes == []
    images = numbered(4, "a/images", "b/images")
    assert find(write(tmp_path / "images", *images), cache).notes == []


def test_any_name_is_read_and_printed_harmlessly(tmp_path, cache, capsys):
    odd = ["two words", "Ünï çødé 猫", "柴犬\u3000子犬", "a\u200d\u202eb", "a'b\"c$d"]
    directory = write(tmp_path / "set", *numbered(3, *odd))
    for name in odd:
        (directory / name / f"{odd[2]}{odd[3]}.png").write_bytes(b"broken")
    dataset = find(directory, cache, max_bad_images=0.3)
    assert len(everything(dataset)[0]) == 15
    assert set(dataset.class_names) == set(odd)
    print(entry_point._Output(sys.stdout, lossy=True).write(" ".join(dataset.left_out)))
    shown = capsys.readouterr().out
    assert "\u202e" not in shown
    assert odd[2] in shown


def test_pictures_nested_beyond_the_recursion_limit_are_found(pictures):
    deep = f"cat{'/d' * 100}/1.png"
    write(pictures, deep)
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(len(inspect.stack()) + 50)
        found = list_folder(pictures)
    finally:
        sys.setrecursionlimit(before)
    assert deep in {name for name, _, _ in found.files}


# ---- links


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("cat/up", ".."),
        ("cat/out", "../.."),
        ("cat/dogs", "../dog"),
        ("wolf", "dog/puppies"),
    ],
)
def test_a_link_never_changes_the_class_of_a_picture(pictures, cache, link, target):
    """Within `cat`, a link to the folder above would make every dog a cat."""
    (pictures / link).symlink_to(target)
    dataset = find(pictures, cache)
    assert dataset.class_names == ("cat", "dog")
    assert everything(dataset)[0].keys() == set(NAMES)
    (note,) = [note for note in dataset.notes if link in note]
    assert "1 link to a folder" in note


def test_links_to_folders_are_named_if_too_few_classes_remain(tmp_path, cache):
    folder = write(tmp_path / "set", *numbered(1, "cat"))
    (tmp_path / "dogs").mkdir()
    (folder / "dog").symlink_to(tmp_path / "dogs")
    (folder / "loop").symlink_to("loop")
    said = refused(folder, cache)
    assert "1 link to a folder, 1 without an extension: dog" in said


def test_a_link_to_a_picture_elsewhere_is_followed(pictures, cache, tmp_path):
    (tmp_path / "picture").write_bytes(packed(pixels(77)))
    (pictures / "cat/link.png").symlink_to(tmp_path / "picture")
    images, _ = everything(find(pictures, cache))
    assert images.keys() == {*NAMES, "cat/link.png"}
    np.testing.assert_array_equal(images["cat/link.png"], pixels(77))


def test_the_whole_data_set_may_be_a_link(pictures, cache, tmp_path):
    (tmp_path / "link").symlink_to(pictures)
    dataset = find(tmp_path / "link", cache)
    assert everything(dataset)[0].keys() == {*NAMES}
    assert not [note for note in dataset.notes if "link" in note]


@pytest.mark.parametrize("part", ["train", "test", "val"])
def test_a_part_may_be_a_link(tmp_path, cache, part):
    """Such as to another disk; dropped, it would be replaced by training pictures."""
    names = numbered(
        3, *(f"{part}/{n}" for part in ("train", "test", "val") for n in "ab")
    )
    expected = everything(find(write(tmp_path / "set", *names), cache))
    (tmp_path / "set" / part).rename(tmp_path / "elsewhere")
    (tmp_path / "set" / part).symlink_to(tmp_path / "elsewhere")
    found = everything(find(tmp_path / "set", cache))
    assert found[0].keys() == expected[0].keys()
    assert found[1] == expected[1] != set()
    shutil.rmtree(tmp_path / "elsewhere")
    assert f"{part} is a link, but not to a folder" in refused(tmp_path / "set", cache)


def test_the_advice_for_a_lone_part_works(tmp_path, cache):
    folder = write(tmp_path / "set", *numbered(4, "cat", "dog", "test"))
    assert "put those beside it into train/" in refused(folder, cache)
    for number, name in enumerate(["cat", "cat", "dog", "dog"]):
        (folder / "test" / name).mkdir(exist_ok=True)
        (folder / f"test/{number}.png").rename(folder / f"test/{name}/{number}.png")
    assert "put those into train/" in refused(folder, cache)
    (folder / "train").mkdir()
    for name in ("cat", "dog"):
        (folder / name).rename(folder / "train" / name)
    tests = everything(find(folder, cache))[1]
    assert tests == {
        "test/cat/0.png",
        "test/cat/1.png",
        "test/dog/2.png",
        "test/dog/3.png",
    }


def test_one_folder_is_not_two_parts(tmp_path, cache):
    """Its training pictures would be scored."""
    folder = write(tmp_path / "set", *numbered(3, "train/a", "train/b"))
    (folder / "test").symlink_to(folder / "train")
    assert "Merge them" in refused(folder, cache)


def test_files_and_links_beside_the_parts_are_reported(tmp_path, cache):
    names = numbered(1, "train/a", "train/b", "test/a", "test/b")
    folder = write(tmp_path / "set", *names, "loose.png")
    (folder / "labels.csv").write_text("1,2\n")
    (folder / "more").symlink_to(folder / "test")
    (note,) = find(folder, cache).notes
    for name in ("labels.csv", "loose.png", "more (link)"):
        assert name in note


def test_classes_that_look_the_same_are_reported(tmp_path, cache):
    names = ("cat", "Cat", "dog ", "polar bear", "polar_bear", "dog\u200b", "-1", "1")
    folder = write(tmp_path / "set", *numbered(2, *names))
    (note,) = find(folder, cache).notes
    for name in ("Cat", "cat", "dog ", "dog\u200b", "polar bear"):
        assert repr(name) in note
    assert "and 1 more" in note
    assert "1'" not in note


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (map(str, range(12)), "0, 1, 10 and 9 more"),
        (("8", "9", "10"), "10, 8, 9"),
        (map(str, range(10)), None),
        ((f"{number:02}" for number in range(12)), None),
        (("1", "10", "9a"), None),
        (("-1", "10", "9"), None),
    ],
)
def test_numbered_classes_in_the_order_of_text_are_reported(tmp_path, names, order):
    names = [*names]
    folder = write(tmp_path / "set", *numbered(2, *names))
    said = " ".join(list_folder(folder).notes)
    assert ("order of their names as text" in said) is bool(order)
    assert f"as text: {order}. For that of" in said or not order
    assert "as text" not in " ".join(list_folder(folder, names).notes), "of a run"


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("Cat", "cat", "differ from 'Cat': rename one"),
        ("polar bear", "polar_bear", "differ from 'polar bear': rename one"),
        ("cats", "cat", "move them away"),
    ],
)
def test_a_class_under_another_spelling_in_a_split_is_to_be_renamed(
    tmp_path, cache, ours, theirs, said
):
    names = numbered(2, f"train/{ours}", "train/dog", f"test/{theirs}", "test/dog")
    why = refused(write(tmp_path / "set", *names), cache)
    assert f"lacks classes of test/: {theirs}. " in why
    assert said in why
    assert ("rename one" in why) is ("rename one" in said)


def test_a_class_of_a_run_may_be_called_like_a_part(tmp_path):
    folder = write(tmp_path / "set", *numbered(2, "cat", "dog", "test"))
    assert list_folder(folder, ["cat", "dog", "test"]).classes == ["cat", "dog", "test"]


# ---- bad pictures


def test_bad_pictures_are_named_and_counted_and_left_out(pictures, cache):
    bad = {
        "cat/broken.png": packed(pixels(1))[:60],
        "cat/empty.jpg": b"",
        "dog/a.heic": b"\0\0\0\x18ftypheic" + bytes(100),
    }
    for name, content in bad.items():
        (pictures / name).write_bytes(content)
    message = refused(pictures, cache, max_bad_images=0.1)
    for part in ("--max_bad_images", "3 of 28", *bad, "empty", "JPEG"):
        assert part in message
    dataset = find(pictures, cache, max_bad_images=0.2)
    assert sorted(everything(dataset)[0]) == sorted(NAMES)
    assert dataset.left_out.keys() == bad.keys()
    (note,) = dataset.notes
    assert "left out: 3 pictures" in note
    assert all(name in note for name in bad)
    for name in [*bad][1:]:
        (pictures / name).unlink()
    assert "1 picture" in find(pictures, cache, max_bad_images=0.2).notes[0]
    (pictures / next(iter(bad))).unlink()
    assert not find(pictures, cache).left_out


def test_unreadable_pictures_are_refused_until_they_can_be_read(pictures, cache):
    (pictures / "cat/gone.png").symlink_to("nowhere")
    os.mkfifo(pictures / "dog/pipe.png")
    assert "gone.png cannot be read" in refused(pictures, cache, max_bad_images=0.5)
    (pictures / "cat/nowhere").write_bytes(packed(pixels(5)))
    assert "pipe.png cannot be read" in refused(pictures, cache, max_bad_images=0.5)
    (pictures / "dog/pipe.png").unlink()
    assert everything(find(pictures, cache))[0].keys() == {*NAMES, "cat/gone.png"}


def test_a_file_is_read_again_after_an_error_of_the_disk(pictures, cache, monkeypatch):
    opened = files.opened

    def failing(path, *arguments, **options):
        if path == pictures / "cat/3.png":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "opened", failing)
        assert "cat/3.png cannot be read" in refused(pictures, cache)
    assert everything(find(pictures, cache))[0].keys() == {*NAMES}


def test_a_class_without_usable_pictures_is_refused(tmp_path, cache):
    names = numbered(40, "train/cat", "train/dog", "test/cat", "test/dog", "test/bird")
    directory = write(tmp_path / "set", *names)
    (directory / "train/bird").mkdir()
    (directory / "train/bird/1.ppm").write_bytes(b"P6 1 1 255 abc")
    for most in (0.1, 1.0):
        assert "train/bird/1.ppm is neither" in refused(
            directory, cache, max_bad_images=most
        )
    (directory / "train/bird/1.ppm").rename(directory / "train/bird/1.notes")
    assert "lacks classes of test/: bird" in refused(directory, cache)
    (directory / "train/bird/1.notes").write_bytes(packed(pixels(1)))
    assert "no picture's extension" in refused(directory, cache)


def test_a_part_without_pictures_is_refused(tmp_path, cache):
    directory = write(tmp_path / "set", *numbered(3, "a", "b"))
    assert "test split" in refused(directory, cache, validation_fraction=0.0)
    for path in directory.rglob("*.png"):
        path.write_bytes(b"broken")
    assert "train split" in refused(directory, cache, max_bad_images=1.0)


def test_a_second_start_decodes_nothing_and_needs_no_lock(pictures, cache, monkeypatch):
    first = find(pictures, cache)
    before = files_in(cache)
    monkeypatch.setattr("cifar10.input.pictures.decoding.decode", None)
    monkeypatch.setattr("fcntl.flock", None)
    again = find(pictures, cache)
    assert again.fingerprint == first.fingerprint
    assert everything(again)[0].keys() == {*NAMES}
    assert files_in(cache) == before
