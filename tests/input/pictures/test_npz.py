"""An .npz file as a data set: what is read, and what is refused."""

import io
import re
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.input.pictures.arrays import find_npz
from cifar10.interface.data import as_dataset

RANDOM = np.random.default_rng(0)


def arrays(**others):
    return {
        "x_train": RANDOM.integers(0, 256, (6, 5, 4, 3), np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2], np.uint8),
        "x_test": RANDOM.integers(0, 256, (2, 5, 4, 3), np.uint8),
        "y_test": np.array([2, 0], np.int64),
        **others,
    }


def saved(path, **others):
    content = {k: v for k, v in arrays(**others).items() if v is not None}
    np.savez(path, **content)
    return path, content


def test_the_arrays_become_images_and_labels(tmp_path):
    path, content = saved(tmp_path / "set.npz")
    dataset = find_npz(path)
    assert (dataset.name, dataset.directory) == ("npz", path), "a run records them"
    assert (dataset.classes, dataset.image_shape) == (3, (5, 4, 3))
    assert dataset.class_names == ("class 0", "class 1", "class 2")
    for split in ("train", "test"):
        images, labels = dataset.read(split)
        np.testing.assert_array_equal(images, content[f"x_{split}"])
        np.testing.assert_array_equal(labels, content[f"y_{split}"])
        assert labels.dtype == np.int32


def test_grey_images_and_labels_in_a_column_are_accepted_as_from_keras(tmp_path):
    grey = RANDOM.integers(0, 256, (6, 5, 4), np.uint8)
    labels = np.array([[0], [1], [2], [0], [1], [2]])
    others = {"x_train": grey, "y_train": labels, "x_test": grey[:2, ..., None]}
    path, _ = saved(tmp_path / "set.npz", **others)
    dataset = find_npz(path)
    images, found = dataset.read("train")
    np.testing.assert_array_equal(images, np.stack([grey] * 3, axis=-1))
    np.testing.assert_array_equal(found, labels[:, 0])
    np.testing.assert_array_equal(dataset.read("test")[0], images[:2])
    in_memory = as_dataset((grey, labels))
    for one, other in zip(in_memory.read("train"), (images, found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_fingerprint_depends_only_on_the_images_and_labels(tmp_path):
    path, content = saved(tmp_path / "1.npz")
    first = find_npz(path).fingerprint
    others = dict.fromkeys(["extra", "x_mean", "y_test_names", "x_train_1"], 1)
    np.savez_compressed(tmp_path / "2.npz", **others, **content)
    assert find_npz(tmp_path / "2.npz").fingerprint == first
    for name in ("x_train", "y_test"):
        changed = content[name].copy()
        changed.flat[0] = (int(changed.flat[0]) + 1) % 2
        np.savez(tmp_path / "3.npz", **{**content, name: changed})
        assert find_npz(tmp_path / "3.npz").fingerprint != first


@pytest.mark.parametrize(("most", "is_noted"), [(0, 0), (1, 1), (16, 1), (17, 0)])
def test_images_that_are_almost_black_cause_a_note(tmp_path, most, is_noted):
    dark = np.zeros((6, 5, 4, 3), np.uint8)
    dark[3, 2, 1] = most
    path, _ = saved(tmp_path / "set.npz", x_train=dark)
    notes = " ".join(find_npz(path).notes)
    assert (f"at most {most} of 255" in notes) is bool(is_noted)


def test_each_split_that_is_almost_black_is_named_in_one_note(tmp_path):
    """Scores of images on another scale than the training's are those of chance."""
    tests = np.full((2, 5, 4, 3), 16, np.uint8)
    path, content = saved(tmp_path / "set.npz", x_test=tests)
    (note,) = find_npz(path).notes
    assert "pixels of x_test in" in note
    (note,) = as_dataset((tests // 16, content["y_test"]), "test").notes
    assert "pixels of x_test in arrays from Python are at most 1 of 255" in note
    trained = np.ones((6, 5, 4, 3), np.uint8)
    path, _ = saved(tmp_path / "set.npz", x_train=trained, x_test=tests)
    (note,) = find_npz(path).notes
    assert "pixels of x_train, x_test in" in note
    assert "at most 16 of 255" in note


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"y_test": None}, "y_test"),
        ({"y_train": None}, "x_train is in no pair x_train, y_train"),
        ({"y_val": np.zeros(2, int)}, "y_val is in no pair x_val, y_val"),
        (dict.fromkeys(["x_valid", "y_valid"], np.zeros(2, int)), "x_valid is in no"),
        ({"x_train": np.zeros((6, 5, 4, 4), np.uint8)}, r"\[6, 5, 4, 4\]"),
        ({"x_test": np.zeros((3, 5, 4, 3), np.uint8)}, "3 images"),
        ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "-1"),
        ({"x_train": np.zeros((6, 30), int)}, r"\[6, 30\]"),
        ({"y_train": np.eye(6)}, r"float64.*argmax"),
        ({"y_train": np.ones((6, 3))}, "several labels, or none, cannot be trained on"),
        ({"x_test": np.zeros((2, 5, 4, 3), np.uint16)}, r"x / 257 \(if 0 to 65535\)"),
        ({"y_train": np.array([object()] * 6)}, "Object arrays"),
        ({"y_train": np.full(6, 2), "y_test": np.full(2, 2)}, "are 2. Give"),
        ({"x_test": None, "y_test": None}, "x_test is not among"),
    ],
)
def test_unusable_arrays_are_refused(tmp_path, others, named):
    path, _ = saved(tmp_path / "set.npz", **others)
    with pytest.raises(UsageError, match=named):
        find_npz(path)


@pytest.mark.parametrize(
    "y",
    [
        np.array(["cat", "dog", "cat", "dog", "cat", "bird"]),
        np.array([0.0, 1.0, 2.0, 0.0, 1.0, 2.0]),
        np.array([[0.0], [1.0], [2.0], [0.0], [1.0], [2.0]]),
        np.eye(3)[[0, 1, 2, 0, 1, 2]],
    ],
)
def test_the_advice_for_other_labels_works(y):
    images = arrays()["x_train"]
    with pytest.raises(UsageError, match="such as") as refused:
        as_dataset((images, y))
    way = re.search(r"such as (.*?)( of one-hot labels)?\.$", str(refused.value))[1]
    converted = eval(way, {"np": np, "y": y, "y_train": y})  # noqa: S307
    _, labels = as_dataset((images, converted)).read("train")
    assert len({*labels.tolist()}) == 3


@pytest.mark.parametrize(
    "y",
    [
        np.tile([1, 0, 1], (6, 1)),
        np.eye(7)[:6, 1:],  # The first has none.
        np.full((6, 3), np.nan),
        np.full((6, 3), "cat"),
        np.zeros((6, 3, 1)),
    ],
)
def test_several_labels_for_an_image_are_not_to_be_made_one(y):
    with pytest.raises(UsageError, match="several labels") as refused:
        as_dataset((arrays()["x_train"], y))
    assert "argmax" not in str(refused.value)


def test_labels_of_two_splits_get_the_same_numbers():
    """Which `np.unique` of each split alone would not give."""
    x, y_train, y = arrays()["x_train"], np.array([*"cfcdfd"]), np.array([*"cfcfff"])
    with pytest.raises(UsageError, match="such as") as refused:
        as_dataset(((x, np.arange(6) % 3), (x, y)))
    way = re.search(r"such as (.*)\.$", str(refused.value))[1]
    assert [*eval(way, {"np": np, "y": y, "y_train": y_train})] == [0, 2, 0, 2, 2, 2]  # noqa: S307


def test_missing_labels_are_named():
    y = np.array([0, 1, np.nan, 1, 0, 1])
    with pytest.raises(UsageError, match="without the images whose label is NaN"):
        as_dataset((arrays()["x_train"], y))


@pytest.mark.parametrize("count", [1, 5, 7, 12])
def test_no_conversion_is_advised_for_labels_of_another_number(count):
    for y in (np.arange(count) % 3, np.eye(3)[np.arange(count) % 3]):
        with pytest.raises(UsageError, match=r"for each of 6 images\.$"):
            as_dataset((arrays()["x_train"], y))


def test_unused_arrays_of_a_file_are_named(tmp_path):
    path, _ = saved(tmp_path / "set.npz", class_names=np.array(["cat", "dog"]))
    (note,) = find_npz(path).notes
    assert "not used: class_names" in note


@pytest.mark.parametrize(
    ("labels", "lacking"),
    [([1, 2, 3], "label 0, of 4"), ([0, 2, 5], "1, 3, 4, of 6")],
)
def test_labels_without_images_are_reported(tmp_path, labels, lacking):
    path, _ = saved(
        tmp_path / "set.npz", y_train=np.array(labels * 2), y_test=np.array(labels[:2])
    )
    (note,) = find_npz(path).notes
    assert lacking in note
    assert "np.searchsorted(np.unique(y_train), y)" in note
    anew, tests = (
        np.searchsorted(np.unique(labels), y) for y in (labels * 2, labels[1:])
    )
    saved(path, y_train=anew, y_test=tests)
    assert not find_npz(path).notes, "the mend works"
    assert find_npz(path).read("test")[1].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("count", "shared", "colour", "is_noted"),
    [
        (8, 1, None, True),
        (200, 3, None, True),
        (200, 2, None, False),
        (8, 0, None, False),
        (8, 4, (0, 0, 0), False),
        (8, 4, (9, 0, 200), False),
    ],
)
@pytest.mark.parametrize("split", ["val", "test"])
def test_training_images_in_another_split_cause_a_note(
    tmp_path, split, count, shared, colour, is_noted
):
    x_train = arrays()["x_train"]
    if colour:
        x_train[:] = colour
    x = RANDOM.integers(0, 256, (count, 5, 4, 3), np.uint8)
    x[count - shared :] = x_train[:shared]
    y = np.arange(count) % 3
    path, _ = saved(
        tmp_path / "set.npz", x_train=x_train, **{f"x_{split}": x, f"y_{split}": y}
    )
    notes = " ".join(find_npz(path).notes)
    said = f"x_{split} in {path} shares {shared} of {count} images with x_train"
    assert (said in notes) is is_noted
    assert ("shares" in notes) is is_noted


@pytest.mark.parametrize("again", [True, False])
def test_a_stream_that_is_shuffled_anew_for_each_split_causes_a_note(again):
    x = RANDOM.integers(0, 256, (60, 5, 4, 3), np.uint8)
    stream = tf.data.Dataset.from_tensor_slices((x, np.arange(60) % 3))
    stream = stream.shuffle(60, seed=1, reshuffle_each_iteration=again)
    notes = " ".join(as_dataset((stream.take(40), stream.skip(40))).notes)
    assert ("reshuffle_each_iteration=False" in notes) is again


def test_a_file_with_only_a_test_part_can_be_scored(tmp_path):
    path, _ = saved(tmp_path / "set.npz", x_train=None, y_train=None)
    found = find_npz(path)
    assert (found.splits, len(found.read("test")[1])) == (("test",), 2)
    with pytest.raises(UsageError, match="no train images"):
        found.read("train")


def test_damaged_and_other_files_are_refused(tmp_path):
    path, _ = saved(tmp_path / "set.npz")
    whole = path.read_bytes()
    for content in (whole[:-500], whole[:300] + b"\xff" + whole[301:]):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="cannot be used"):
            find_npz(path)
    with pytest.raises(UsageError, match="cannot be used: No such file"):
        find_npz(tmp_path / "no.npz")


def archive(path, x_train=None):
    """Writes a file with these bytes in place of x_train."""
    with zipfile.ZipFile(path, "w") as file:
        for name, array in arrays().items():
            content = io.BytesIO()
            np.save(content, array)
            own = name == "x_train" and x_train is not None
            file.writestr(f"{name}.npy", x_train if own else content.getvalue())
    return path


@pytest.mark.parametrize(
    "shape", [f"({2**70}, 8, 8, 3)}}", "(True, 8, 8, 3)}", "(6, 8"]
)
def test_headers_of_impossible_arrays_are_refused(tmp_path, shape):
    """As of more pixels than there is memory, and one that is not closed."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}".encode()
    content = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header
    path = archive(tmp_path / "set.npz", content + bytes(1152))
    with pytest.raises(UsageError, match="cannot be used"):
        find_npz(path)


def test_an_invalid_or_shadowing_entry_is_not_read(tmp_path):
    path = archive(tmp_path / "set.npz", b"no array")
    with pytest.raises(UsageError, match="cannot be used"):
        find_npz(path)
    path = archive(tmp_path / "set.npz")
    expected = find_npz(path).fingerprint
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("x_train", b"larger than its entry with .npy tells")
    assert find_npz(path).fingerprint == expected


@pytest.mark.parametrize(("offset", "bits"), [(0, 1), (2, 99)])
def test_encrypted_and_unusually_packed_archives_are_refused(tmp_path, offset, bits):
    """The flags and the compression of each entry are in the file twice."""
    path = archive(tmp_path / "set.npz")
    content = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        for place in [m.start() for m in re.finditer(mark, content)]:
            content[place + flags + offset] |= bits
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be used"):
        find_npz(path)


def test_a_bomb_is_not_unpacked(tmp_path):
    """Its directory tells what it would be: more than any such file of pictures."""
    path = archive(tmp_path / "set.npz")
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\1\2")
    content[entry + 24 : entry + 28] = (10**9).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(UsageError, match="1,000,0"):
        find_npz(path)
