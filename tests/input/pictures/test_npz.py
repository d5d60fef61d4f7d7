"""An .npz file as a data set: what is read, and what is refused."""

import io
import zipfile

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input.pictures import npz
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


def saved(path, save=np.savez, **others):
    content = {k: v for k, v in arrays(**others).items() if v is not None}
    save(path, **content)
    return path, content


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_the_arrays_become_images_and_labels(tmp_path, save):
    path, content = saved(tmp_path / "set.npz", save)
    dataset = npz.find(path)
    assert (dataset.name, dataset.directory) == ("npz", path)
    assert (dataset.classes, dataset.image_shape) == (3, (5, 4, 3))
    assert dataset.class_names == ("class 0", "class 1", "class 2")
    assert "8 pictures of 3 classes at 4 x 5" in dataset.description
    for split in ("train", "test"):
        images, labels = dataset.read(split)
        np.testing.assert_array_equal(images, content[f"x_{split}"])
        np.testing.assert_array_equal(labels, content[f"y_{split}"])
        assert labels.dtype == np.int32


def test_grey_images_and_labels_in_a_column_are_those_of_keras(tmp_path):
    grey = RANDOM.integers(0, 256, (6, 5, 4), np.uint8)
    labels = np.array([[0], [1], [2], [0], [1], [2]])
    path, _ = saved(
        tmp_path / "set.npz", x_train=grey, y_train=labels, x_test=grey[:2, ..., None]
    )
    dataset = npz.find(path)
    images, found = dataset.read("train")
    np.testing.assert_array_equal(images, np.stack([grey] * 3, axis=-1))
    np.testing.assert_array_equal(found, labels[:, 0])
    np.testing.assert_array_equal(dataset.read("test")[0], images[:2])
    in_memory = as_dataset((grey, labels))
    for one, other in zip(in_memory.read("train"), (images, found), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_fingerprint_is_that_of_the_images_and_labels(tmp_path):
    path, content = saved(tmp_path / "1.npz")
    first = npz.find(path).fingerprint
    np.savez_compressed(tmp_path / "2.npz", extra=1, **content)
    assert npz.find(tmp_path / "2.npz").fingerprint == first
    for name in content:
        changed = content[name].copy()
        changed.flat[0] = (int(changed.flat[0]) + 1) % 2
        np.savez(tmp_path / "3.npz", **{**content, name: changed})
        assert npz.find(tmp_path / "3.npz").fingerprint != first


FLOATS = RANDOM.random((6, 5, 4, 3))


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"y_test": None}, "lacks y_test; it has x_train, y_train, x_test"),
        (
            {"x_train": FLOATS},
            r"float64 from 0\.\d+ to 0\.99\d* but pixels|float64 from",
        ),
        ({"x_train": (FLOATS * 255).astype(np.float32)}, r"float32 from .* to 25\d"),
        (
            {"x_train": np.zeros((6, 5, 4, 3), np.int64)},
            "int64 from 0 to 0, but pixels",
        ),
        ({"x_train": np.zeros((6, 5, 4, 4), np.uint8)}, r"the shape \[6, 5, 4, 4\]"),
        ({"x_train": np.zeros((6, 3, 5, 4), np.uint8)}, r"the shape \[6, 3, 5, 4\]"),
        ({"x_train": np.zeros((6, 0, 4, 3), np.uint8)}, r"the shape \[6, 0, 4, 3\]"),
        ({"x_train": np.zeros(6, np.uint8)}, r"the shape \[6\]"),
        ({"x_train": np.zeros((6, 6, 4, 3), np.uint8)}, "they have to be of one shape"),
        (
            {"x_test": np.zeros((3, 5, 4, 3), np.uint8)},
            "3 images in x_test and 2 labels",
        ),
        (
            {"x_test": np.zeros((0, 5, 4, 3), np.uint8), "y_test": np.zeros(0, int)},
            "0 images in x_test and 0 labels",
        ),
        ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "labels from -1 to 2"),
        ({"y_train": np.array([0, 1, 2, 0, 1, 10**6])}, "labels from 0 to 1000000"),
        ({"y_train": np.eye(6)}, r"float64 \[6, 6\], but labels are whole numbers"),
        ({"y_train": np.eye(6, dtype=int)}, r"int64 \[6, 6\], but labels are whole"),
        ({"y_test": np.array([3, 0])}, "labels that y_train lacks, such as 3"),
        (
            {"y_train": np.zeros(6, int), "y_test": np.zeros(2, int)},
            "All labels in .* are 0; two classes",
        ),
        ({"y_train": np.array(list("abcdef"))}, "but labels are whole numbers"),
        ({"y_train": np.array([object()] * 6)}, "no .npz file of plain arrays"),
    ],
)
def test_what_is_no_such_file_is_a_sentence(tmp_path, others, why):
    path, _ = saved(tmp_path / "set.npz", **others)
    with pytest.raises(UsageError, match=why):
        npz.find(path)


def test_files_that_are_none_are_sentences(tmp_path):
    path, content = saved(tmp_path / "set.npz")
    whole = path.read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:-500])
    (tmp_path / "flipped.npz").write_bytes(
        whole[:300] + bytes([whole[300] ^ 1]) + whole[301:]
    )
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "single.npy", content["x_train"])
    for name, why in [
        ("cut.npz", "is damaged or no .npz file"),
        ("flipped.npz", "is damaged or no .npz file"),
        ("empty.npz", "is damaged or no .npz file"),
        ("text.npz", "is damaged or no .npz file"),
        ("single.npy", "is a single array"),
        ("none.npz", "cannot be read: No such file"),
        ("", "cannot be read: Is a directory"),
    ]:
        with pytest.raises(UsageError, match=why):
            npz.find(tmp_path / name)


def archive(path, x_train, compression=zipfile.ZIP_STORED):
    """Writes a file with these bytes in place of x_train."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, array in arrays().items():
            content = io.BytesIO()
            np.save(content, array)
            file.writestr(f"{name}.npy", content.getvalue())
            if name == "x_train" and x_train is not None:
                file.writestr("x_train.npy", x_train)
    return path


HEADER = "{'descr': '|u1', 'fortran_order': False, 'shape': "


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "header",
    [
        f"{HEADER}({2**70}, 8, 8, 3)}}",
        f"{HEADER}(True, 8, 8, 3)}}",
        f"{HEADER}(6, 8",
        "(" * 5000,
        "no header",
        None,
    ],
    ids=["huge", "true", "unclosed", "nested", "text", "no array"],
)
def test_an_array_that_is_none_is_a_sentence(tmp_path, header):
    content = b"pixels"
    if header is not None:
        content = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little")
        content += header.encode() + bytes(1152)
    path = archive(tmp_path / "set.npz", content)
    with pytest.raises(UsageError, match="is damaged or no"):
        npz.find(path)


@pytest.mark.parametrize("kind", ["encrypted", "of an unknown kind", "lzma"])
def test_an_archive_that_cannot_be_unpacked_is_a_sentence(tmp_path, kind):
    unusual = zipfile.ZIP_LZMA if kind == "lzma" else zipfile.ZIP_STORED
    path = archive(tmp_path / "set.npz", None, unusual)
    content = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        place = content.find(mark)
        while place >= 0 and kind != "lzma":
            if kind == "encrypted":
                content[place + flags] |= 1
            else:  # Two bytes further is the method.
                content[place + flags + 2] = 99
            place = content.find(mark, place + 4)
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is damaged or no"):
        npz.find(path)


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "_MOST_BYTES", 10**6)
    black = np.zeros((6, 1000, 1000, 3), np.uint8)
    path, _ = saved(tmp_path / "set.npz", np.savez_compressed, x_train=black)
    with pytest.raises(UsageError, match=r"its [\d,]+ bytes would be 18,000,"):
        npz.find(path)
    monkeypatch.setattr(npz, "_MOST_BYTES", 10**9)
    with pytest.raises(UsageError, match="they have to be of one shape"):
        npz.find(path)
