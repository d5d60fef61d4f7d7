"""A folder of pictures as a data set: which files, classes and parts it has."""

import os
import re

import numpy as np
import pytest

from cifar10.config import regular_files
from cifar10.errors import UsageError
from cifar10.input.pictures import division, scanning, shards
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


def notes_of(directory, cache):
    return "\n".join(find(directory, cache).notes)


def test_the_files_become_images_with_the_labels_of_their_folders(pictures, cache):
    dataset = find(pictures, cache)
    assert dataset.class_names == ("cat", "dog")
    assert (dataset.name, dataset.directory) == ("folder", pictures)
    assert (dataset.classes, dataset.image_shape) == (2, (SIZE, SIZE, 3))
    assert re.search(r"25 pictures of 2 classes at 8 x 8", dataset.description)
    images, tests = everything(dataset)
    assert sorted(images) == sorted(NAMES)
    assert 0 < len(tests) < len(NAMES)
    for number, name in enumerate(NAMES):
        np.testing.assert_array_equal(images[name], pixels(number))
    for split in ("train", "test"):
        _, labels = dataset.read(split)
        assert labels.dtype == np.int32
        expected = [int(p.startswith("dog")) for p in dataset.prepared.paths(split)]
        assert labels.tolist() == expected


def test_every_ending_is_read_whatever_its_case_and_whatever_is_in_it(tmp_path, cache):
    colour = np.full((SIZE, SIZE, 3), (200, 90, 20), np.uint8)
    names = ["a.jpg", "b.JPEG", "c.png", "d.WebP", "e.bmp", "f.gif"]
    forms = ["JPEG", "PNG", "PNG", "WEBP", "BMP", "GIF"]
    for name in ("x", "y"):
        for file, form in zip(names, forms, strict=True):
            path = tmp_path / "set" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(packed(colour, form))
    images, _ = everything(find(tmp_path / "set", cache))
    assert len(images) == 12
    for image in images.values():
        assert np.abs(image.astype(int) - colour).max() <= 4


def test_the_parts_of_a_folder_that_has_them_are_kept(tmp_path, cache):
    for part in ("test", "val", "Validation"):
        names = [
            *numbered(3, "train/a", "train/b"),
            *numbered(1, f"{part}/a", f"{part}/b"),
        ]
        dataset = find(write(tmp_path / part, *names), cache)
        _, tests = everything(dataset)
        assert tests == {f"{part}/a/0.png", f"{part}/b/0.png"}
        assert dataset.class_names == ("a", "b")
        assert dataset.notes == ()


def test_a_folder_with_train_alone_is_split(tmp_path, cache):
    dataset = find(write(tmp_path / "set", *numbered(9, "train/a", "train/b")), cache)
    assert dataset.class_names == ("a", "b")
    assert 0 < len(everything(dataset)[1]) < 18


def test_of_two_test_parts_one_is_used_and_the_other_is_named(tmp_path, cache):
    parts = ("train", "val", "test", "extra")
    names = [f"{part}/{name}/1.png" for part in parts for name in "ab"]
    dataset = find(write(tmp_path / "set", *names), cache)
    assert everything(dataset)[1] == {"test/a/1.png", "test/b/1.png"}
    assert "val, extra beside train, test is not used" in dataset.notes[0]


def test_a_folder_train_beside_other_classes_is_a_class(tmp_path, cache):
    names = numbered(9, "bus", "train")
    dataset = find(write(tmp_path / "a", *names), cache)
    assert dataset.class_names == ("bus", "train")
    assert "train/ is taken for a class" in dataset.notes
    deeper = numbered(9, "bus/red", "train/fast", "train/slow")
    dataset = find(write(tmp_path / "b", *deeper), cache)
    assert dataset.class_names == ("bus", "train")


def test_which_pictures_are_to_test_on_depends_on_their_names_alone():
    names = [f"cat/{number}.jpg" for number in range(20_000)]
    (limit,) = division.limits([names], 0.1, None)
    tests = {name for name in names if division.hash_of(name) < limit}
    assert len(tests) == 2_000
    (more,) = division.limits([names], 0.2, None)
    assert tests < {name for name in names if division.hash_of(name) < more}
    # Frozen: another machine, another version, the same parts.
    few = [f"cat/{number}.jpg" for number in range(40)]
    (limit,) = division.limits([few], 0.1, None)
    assert [n for n, name in enumerate(few) if division.hash_of(name) < limit] == FIRST
    # One name in two ways to write its accent; and bytes that are no UTF-8.
    both = [[f"{e}/{n}" for n in range(50)] for e in ("\xe9", "e\u0301")]
    assert [*map(division.hash_of, both[0])] == [*map(division.hash_of, both[1])]
    assert division.hash_of(os.fsdecode(b"cat/\xff.png")) >= 0


FIRST = [13, 30, 36, 38]


def test_each_class_is_divided_by_itself(tmp_path, cache, capsys):
    """A tenth of ten pictures is one, and so it is of four; one remains to train on."""
    names = [*numbered(10, *(f"class{n}" for n in range(10)))]
    names += [*numbered(4, "few"), "one/1.png"]
    directory = write(tmp_path / "set", *names)
    dataset = find(directory, cache, validation_fraction=0.1)
    assert np.bincount(dataset.read("test")[1], minlength=12).tolist() == [1] * 11 + [0]
    assert np.bincount(dataset.read("train")[1]).tolist() == [9] * 10 + [3, 1]
    said = capsys.readouterr().err
    assert "WARNING: 12 of 12 classes have fewer than 5 test pictures" in said
    assert "class0 (1), class1 (1)" in said
    find(directory, cache, validation_fraction=0.1)
    assert capsys.readouterr().err == said, "at each start"


def test_enough_test_pictures_are_not_warned_of(tmp_path, cache, capsys):
    directory = write(tmp_path / "set", *numbered(10, "a", "b"))
    find(directory, cache, validation_fraction=0.5)
    assert "WARNING" not in capsys.readouterr().err
    # Of a class whose test pictures are damaged, few are left.
    limits = division.limits([numbered(10, "a")], 0.5, None)
    damaged = [n for n in numbered(10, "a") if division.hash_of(n) < limits[0]]
    (directory / damaged[0]).write_bytes(b"broken")
    find(directory, cache, validation_fraction=0.5, max_bad_images=0.5)
    assert "1 of 2 classes have fewer than 5 test pictures" in capsys.readouterr().err


def test_a_run_keeps_its_division_whatever_is_added(tmp_path, cache):
    directory = write(tmp_path / "set", *numbered(12, "cat", "dog"))
    first = find(directory, cache)
    images, before = everything(first)
    write(directory, *[f"cat/new {number}.png" for number in range(200)])
    found, after = everything(find(directory, cache, division=first.division))
    assert after & images.keys() == before
    assert len(after - before) > 20
    assert len(found) == 224


def test_a_run_of_an_older_version_keeps_its_parts(tmp_path, cache):
    """They were those whose hashes were below a fraction, whatever their class."""
    names = numbered(30, "cat", "dog", "wolf")
    dataset = find(write(tmp_path / "set", *names), cache, division="")
    expected = {name for name in names if division.hash_of(name) < 0.3 * 2**64}
    assert everything(dataset)[1] == expected
    again = find(tmp_path / "set", cache, division=dataset.division)
    assert again.fingerprint == dataset.fingerprint
    assert find(tmp_path / "set", cache).fingerprint != dataset.fingerprint


def test_the_fingerprint_is_of_pixels_labels_and_classes(tmp_path, cache):
    """With the same files in the same order, so that only the one thing differs."""
    parts = [("train", "a"), ("train", "b"), ("test", "a"), ("test", "b")]
    names = numbered(4, *map("/".join, parts))
    first = find(write(tmp_path / "1", *names), cache).fingerprint
    other = write(tmp_path / "2", *names)
    for part in ("train", "test"):  # The last of `a` becomes the first of `b`.
        (other / part / "a/3.png").rename(other / part / "b/.first.png")
        (other / part / "b/.first.png").rename(other / part / "b/0 first.png")
        (other / part / "b/0.png").rename(other / part / "b/0 second.png")
    assert find(other, cache).fingerprint != first
    renamed = write(tmp_path / "3", *names)
    for part in ("train", "test"):
        (renamed / part / "b").rename(renamed / part / "c")
    assert find(renamed, cache).fingerprint != first


# As the version before wrote it: such runs go on.
OF_AN_OLDER_VERSION = "28c830e15c35dfcc8190f666c073dbaf4d8113b934b89ded1809ef22531f2dd9"


def test_the_fingerprint_of_older_runs_is_still_theirs(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 4 * SIZE * SIZE * 3)
    parts = ("train/cat", "train/dog", "test/cat", "test/dog")
    directory = write(tmp_path / "set", *numbered(7, *parts))
    (directory / "train/cat/3.png").write_bytes(b"broken")
    found = find(directory, cache, max_bad_images=0.5)
    assert found.fingerprint == OF_AN_OLDER_VERSION


def test_added_files_move_few_others_between_the_parts(tmp_path, cache):
    names = numbered(200, "cat", "dog")
    directory = write(tmp_path / "set", *names)
    _, before = everything(find(directory, cache))
    write(directory, *[f"cat/new {number}.png" for number in range(20)])
    images, after = everything(find(directory, cache))
    assert len(before ^ after & set(names)) <= 5
    assert not {name for name in before ^ after & set(names) if "dog" in name}
    assert len(images) == len(names) + 20


def test_other_parts_of_the_same_pictures_stand_beside_one_another(pictures, cache):
    one = find(pictures, cache)
    other = find(pictures, cache, validation_fraction=0.6)
    assert one.fingerprint != other.fingerprint
    assert len(everything(one)[1]) < len(everything(other)[1])
    assert everything(one)[0].keys() == everything(other)[0].keys()


def test_the_fingerprint_is_that_of_what_is_seen_and_not_of_times(pictures, tmp_path):
    first = find(pictures, tmp_path / "1").fingerprint
    os.utime(pictures / "cat/3.png", (1, 1))
    assert find(pictures, tmp_path / "2").fingerprint == first
    (pictures / "cat/3.png").write_bytes(packed(pixels(99)))
    assert find(pictures, tmp_path / "3").fingerprint != first
    write(pictures, *NAMES)
    assert find(pictures, tmp_path / "4").fingerprint == first
    (pictures / "dog").rename(pictures / "wolf")
    assert find(pictures, tmp_path / "5").fingerprint != first


# Bad input.


def refused(directory, cache, **values):
    with pytest.raises(UsageError) as caught:
        find(directory, cache, **values)
    return str(caught.value)


def test_what_is_no_folder_of_classes_is_a_sentence(tmp_path, cache):
    assert "cannot be read: No such file" in refused(tmp_path / "none", cache)
    (tmp_path / "file").write_text("")
    assert "is a file where a folder is needed" in refused(tmp_path / "file", cache)
    (tmp_path / "empty").mkdir()
    assert "has no folders, but at least two" in refused(tmp_path / "empty", cache)
    write(tmp_path / "flat", "1.png", "2.png")
    assert "one subfolder for each class" in refused(tmp_path / "flat", cache)
    write(tmp_path / "one", "cat/1.png", "cat/2.png")
    assert "pictures only in cat, but at least two" in refused(tmp_path / "one", cache)
    (tmp_path / "two/a").mkdir(parents=True)
    (tmp_path / "two/b").mkdir()
    assert "2 folders and pictures in none" in refused(tmp_path / "two", cache)
    write(tmp_path / "train", "train/cat/1.png", "test/cat/1.png")
    assert "train has 1 folder and pictures only in cat" in refused(
        tmp_path / "train", cache
    )
    assert not cache.exists()


def test_a_file_where_the_folder_of_a_class_should_be_is_no_class(pictures, cache):
    (pictures / "bird").write_bytes(packed(pixels(1)))
    (pictures / "loose.png").write_bytes(packed(pixels(1)))
    assert find(pictures, cache).class_names == ("cat", "dog")
    assert "1 picture directly in" in notes_of(pictures, cache)


def test_a_file_where_the_cache_should_be_is_a_sentence(pictures, cache):
    cache.write_text("")
    assert "cannot be read or written" in refused(pictures, cache)


def test_classes_that_only_one_part_has(tmp_path, cache):
    names = numbered(2, "train/a", "train/b", "test/a", "test/c")
    message = refused(write(tmp_path / "1", *names), cache)
    assert "the test part has classes that train/ lacks: c." in message
    names = numbered(2, "train/a", "train/b", "train/c", "test/a")
    dataset = find(write(tmp_path / "2", *names), cache)
    assert dataset.class_names == ("a", "b", "c")
    assert "no test pictures of b, c" in dataset.notes


def test_any_name_is_read_and_printed_harmlessly(tmp_path, cache, capsys):
    odd = ["two words", "Ünï çødé 猫", "line\nbreak", "bell\x07\x1b[2J", "a'b\"c$d"]
    odd.append(os.fsdecode(b"no utf \xff"))
    directory = write(tmp_path / "set", *numbered(3, *odd))
    for name in odd:
        (directory / name / f"{odd[2]}{odd[3]}.png").write_bytes(b"broken")
    dataset = find(directory, cache, max_bad_images=0.3)
    assert len(everything(dataset)[0]) == 18
    shown = [*dataset.class_names, dataset.description, *dataset.bad.split("\n")]
    assert all(text.isprintable() for text in shown)
    assert len(set(dataset.class_names)) == len(odd)
    assert {"two words", "Ünï çødé 猫", "line\\nbreak"} < set(dataset.class_names)
    assert "\x1b" not in capsys.readouterr().err


def test_hidden_and_other_files_are_left_out_and_said(pictures, cache):
    write(pictures, "cat/.hidden.png", ".git/1.png", "dog/.thumbs/1.png", "none/.x.png")
    for name in ("cat/.DS_Store", "cat/notes.txt", "dog/more.txt", "dog/README"):
        (pictures / name).write_text("")
    dataset = find(pictures, cache)
    assert dataset.class_names == ("cat", "dog")
    assert len(everything(dataset)[0]) == len(NAMES)
    said = "\n".join(dataset.notes)
    assert re.search("5 hidden files or folders are left out", said)
    assert "3 files that are no pictures are left out (2 txt, 1 readme)" in said
    for name in ("cat/notes.txt", "dog/more.txt"):
        (pictures / name).unlink()
    assert "1 file that is no picture is left out (1 readme)" in notes_of(
        pictures, cache
    )
    assert "no pictures in none" in said


def test_pictures_of_kinds_that_are_not_read_are_not_lost_in_silence(pictures, cache):
    for name in ("cat/a.heic", "dog/b.jp2"):
        (pictures / name).write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    (pictures / "dog/b.jp2").write_bytes(b"\0\0\0\x0cjP  ")
    message = refused(pictures, cache)
    assert "2 of 27 pictures" in message
    assert "cat/a.heic is a HEIC or AVIF image" in message
    assert "heif-convert" in message
    assert "dog/b.jp2 is neither a PNG nor a JPEG" in message


def test_links_in_circles_come_to_an_end(pictures, cache):
    (pictures / "cat/around").symlink_to(pictures / "cat")
    (pictures / "dog/up").symlink_to(pictures)
    outside = write(pictures.parent, "outside/more.png") / "outside"
    (outside / "round").symlink_to(outside)
    (pictures / "cat/outside").symlink_to(outside)
    (pictures / "cat/itself").symlink_to("itself")
    (pictures / "dog/self.png").symlink_to("self.png")
    dataset = find(pictures, cache, max_bad_images=0.1)
    assert everything(dataset)[0].keys() == {*NAMES, "cat/outside/more.png"}
    assert "dog/self.png cannot be read: Too many levels" in dataset.bad


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("cat/up", ".."),
        ("cat/out", "../.."),
        ("cat/dogs", "../dog"),
        ("cat/round", "../cat/."),
        ("cat/to home", "/"),
        ("wolf", "dog/puppies"),
        ("everything", "."),
    ],
)
def test_a_link_gives_no_picture_another_class(pictures, cache, link, target):
    """Within `cat`, a link to the folder above would make every dog a cat."""
    (pictures / link).symlink_to(target)
    dataset = find(pictures, cache)
    assert dataset.class_names == ("cat", "dog")
    assert everything(dataset)[0].keys() == set(NAMES)
    said = f"{link} is a link back into the data set, and not followed"
    assert [note for note in dataset.notes if link in note] == [said]


def test_a_link_to_other_folders_is_followed_once(pictures, cache, tmp_path):
    elsewhere = write(tmp_path / "elsewhere", "a/1.png", "b/2.png")
    (elsewhere / "a/again").symlink_to(elsewhere)
    (elsewhere / "a/cats").symlink_to(pictures / "cat")
    (pictures / "dog/more").symlink_to(elsewhere)
    (pictures / "wolf").symlink_to(elsewhere / "b")
    dataset = find(pictures, cache)
    images, _ = everything(dataset)
    assert images.keys() == {
        *NAMES,
        "dog/more/a/1.png",
        "dog/more/b/2.png",
        "wolf/2.png",
    }
    assert "dog/more/a/again is a link to what is read already" in dataset.notes


def test_a_link_to_a_picture_is_that_picture(pictures, cache, tmp_path):
    (tmp_path / "elsewhere").write_bytes(packed(pixels(77)))
    (pictures / "cat/link.png").symlink_to(tmp_path / "elsewhere")
    images, _ = everything(find(pictures, cache))
    np.testing.assert_array_equal(images["cat/link.png"], pixels(77))


def test_what_cannot_be_read_is_bad_until_it_can(pictures, cache):
    (pictures / "cat/gone.png").symlink_to("nowhere")
    os.mkfifo(pictures / "dog/pipe.png")
    message = refused(pictures, cache)
    assert "2 of 27 pictures" in message
    assert "cat/gone.png cannot be read: No such file" in message
    assert "dog/pipe.png cannot be read: it is a pipe or a device" in message
    (pictures / "dog/pipe.png").unlink()
    (pictures / "cat/nowhere").write_bytes(packed(pixels(5)))
    assert len(everything(find(pictures, cache))[0]) == 26


def test_what_may_not_be_read_is_bad_until_it_may(pictures, cache, monkeypatch):
    def opened(path, *how, **options):
        if path == pictures / "cat/3.png":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *how, **options)

    real = regular_files.opened
    with monkeypatch.context() as patch:  # Root, who often runs tests, may read all.
        patch.setattr(regular_files, "opened", opened)
        patch.setattr(os, "access", lambda *_: False)
        message = refused(pictures, cache)
        assert "cat/3.png cannot be read: Permission denied" in message
        assert message == refused(pictures, cache)
    images, _ = everything(find(pictures, cache))
    assert "cat/3.png" in images
    assert len(images) == len(NAMES)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_folders_that_may_not_be_read_are_a_sentence(pictures, cache):
    (pictures / "dog/puppies").chmod(0)
    assert "dog/puppies cannot be read: Permission" in refused(pictures, cache)
    (pictures / "dog/puppies").chmod(0o755)


@pytest.mark.parametrize("twin", ["Cat", "CAT"])
def test_one_class_in_two_spellings_is_refused(pictures, cache, twin):
    write(pictures, f"{twin}/1.png")
    assert "which differ only in case" in refused(pictures, cache)


def test_one_class_with_its_accent_in_two_ways_is_refused(pictures, cache):
    write(pictures, "caf\xe9/1.png", "cafe\u0301/1.png")
    assert "how they are written" in refused(pictures, cache)


def test_a_folder_for_each_picture_is_refused(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(scanning, "MAX_CLASSES", 50)
    names = numbered(2, *map(str, range(51)))
    message = refused(write(tmp_path / "set", *names), cache)
    assert "has 51 folders; at most 50 are taken for classes" in message
    names = names[:100]
    assert find(write(tmp_path / "fits", *names), cache).classes == 50


@pytest.mark.slow
def test_a_hundred_thousand_folders_are_refused_before_they_are_read(tmp_path, cache):
    for number in range(100_000):
        (tmp_path / "set" / str(number)).mkdir(parents=number == 0)
    assert "has 100,000 folders; at most 25,000" in refused(tmp_path / "set", cache)


def test_bad_pictures_are_named_and_counted_and_left_out(pictures, cache):
    bad = {
        "cat/broken.png": packed(pixels(1))[:60],
        "cat/empty.jpg": b"",
        "cat/text.jpg": b"<html>not found</html>",
        "dog/huge.bmp": b"BM"
        + bytes(12)
        + b"\x28"
        + bytes(3)
        + 2 * b"\0\0\1\0"
        + b"\1\0\x18"
        + bytes(25),
    }
    for name, content in bad.items():
        (pictures / name).write_bytes(content)
    message = refused(pictures, cache, max_bad_images=0.1)
    assert "4 of 29 pictures" in message
    assert "more than --max_bad_images 0.1 allows" in message
    for line in (
        "cat/broken.png is damaged: ",
        "cat/empty.jpg is empty.",
        "cat/text.jpg is neither a PNG nor a JPEG",
        "dog/huge.bmp has 65,536 x 65,536 pixels; at most 50,000,000 are read.",
    ):
        assert line in message
    dataset = find(pictures, cache, max_bad_images=0.2)
    assert sorted(everything(dataset)[0]) == sorted(NAMES)
    assert "(4 bad ones left out)" in dataset.description
    assert "4 of 29 pictures" in dataset.bad
    for name in bad:
        (pictures / name).unlink()
    assert find(pictures, cache).bad == ""
    assert find(pictures, cache).fingerprint == dataset.fingerprint


def test_of_many_bad_pictures_the_first_are_named(pictures, cache):
    for number in range(20):
        (pictures / f"cat/bad {number:02}.png").write_bytes(b"")
    message = refused(pictures, cache)
    assert "bad 04.png" in message
    assert "bad 05.png" not in message
    assert "and 15 more." in message


def test_a_part_without_pictures_is_refused(tmp_path, cache):
    directory = write(tmp_path / "set", *numbered(3, "a", "b"))
    message = refused(directory, cache, validation_fraction=0.0)
    assert "is left for the test part. Add pictures, or raise --validation" in message
    for name in ("a", "b"):
        for path in (directory / name).iterdir():
            path.write_bytes(b"broken")
    message = refused(directory, cache, max_bad_images=1.0)
    assert "is left for the train part. Add pictures, or lower --validation" in message


def test_pictures_of_any_shape_are_prepared(pictures, cache):
    (pictures / "cat/dot.png").write_bytes(packed(np.full((1, 1, 3), 7, np.uint8)))
    (pictures / "cat/line.png").write_bytes(packed(np.full((1, 900, 3), 7, np.uint8)))
    images, _ = everything(find(pictures, cache))
    assert (images["cat/dot.png"] == 7).all()
    assert (images["cat/line.png"] == 7).all()


def test_a_second_start_decodes_nothing_and_needs_no_lock(pictures, cache, monkeypatch):
    first = find(pictures, cache)
    before = files_in(cache)
    monkeypatch.setattr("cifar10.input.pictures.decoding.decode", None)
    monkeypatch.setattr("fcntl.flock", None)
    second = find(pictures, cache)
    assert second == first
    assert files_in(cache) == before
