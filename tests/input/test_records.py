"""Records on disk to pixels and labels, and every way in which a file can be wrong."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input import records

TINY = {
    base.name: dataclasses.replace(
        base, train_records_per_file=3, test_records_per_file=2
    )
    for base in (records.CIFAR10, records.CIFAR100)
}
TINY10 = TINY["cifar10"]


def write_tiny(directory, file_format):
    """Writes files of random records; returns the content of each, [count, bytes]."""
    random = np.random.RandomState(7)
    written = {}
    for split in ("train", "test"):
        for name in file_format.files(split):
            count = file_format.files(split)[name]
            content = random.randint(0, 256, (count, file_format.record_bytes))
            label = file_format.label_bytes - 1
            content[:, label] = random.randint(0, file_format.classes, count)
            written[name] = content.astype(np.uint8)
            (directory / name).write_bytes(written[name].tobytes())
    return written


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_pixel_and_label(tmp_path, name, split):
    file_format = TINY[name]
    written = write_tiny(tmp_path, file_format)
    images, labels = records.read_split(tmp_path, file_format, split)
    content = np.concatenate([written[file] for file in file_format.files(split)])
    assert images.shape == (len(content), 32, 32, 3)
    assert images.dtype == np.uint8
    assert images.flags.c_contiguous
    assert labels.dtype == np.int32
    # The fine label of CIFAR-100 is the second byte of a record.
    assert labels.tolist() == content[:, file_format.label_bytes - 1].tolist()
    for record, image in zip(content, images, strict=True):
        pixels = record[file_format.label_bytes :]
        for channel in range(3):
            plane = pixels[channel * 1024 : (channel + 1) * 1024]
            assert image[:, :, channel].reshape(-1).tolist() == plane.tolist()


def test_a_pixel_counted_out_by_hand(tmp_path):
    write_tiny(tmp_path, TINY10)
    path = tmp_path / "data_batch_2.bin"
    content = bytearray(path.read_bytes())
    # Record 1, green (the second plane), row 5, column 9.
    content[1 * 3073 + 1 + 1024 + 5 * 32 + 9] = 201
    path.write_bytes(content)
    images, _ = records.read_split(tmp_path, TINY10, "train")
    assert images[3 + 1, 5, 9, 1] == 201


DAMAGES = {
    "empty": (lambda _: b"", ["has 0 records and 0 bytes", "has 3 records"]),
    "cut": (
        lambda content: content[:-100],
        ["has 2 records and 2973 bytes", "has 3 records of 3073 bytes"],
    ),
    "one too few": (
        lambda content: content[:-3073],
        ["has 2 records and 0 bytes", "has 3 records"],
    ),
    "one too many": (
        lambda content: content + content[:3073],
        ["has 4 records and 0 bytes", "has 3 records"],
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
@pytest.mark.parametrize(
    "look",
    [
        lambda directory: records.check_files(directory, TINY10),
        lambda directory: records.read_split(directory, TINY10, "train"),
    ],
    ids=["check_files", "read_split"],
)
def test_a_file_of_the_wrong_size(tmp_path, case, look):
    change, parts = DAMAGES[case]
    write_tiny(tmp_path, TINY10)
    path = tmp_path / "data_batch_4.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError) as caught:
        look(tmp_path)
    for part in [str(path), "--data_dir", *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "file", "label", "offset"),
    [
        ("cifar10", "data_batch_3.bin", 10, 2 * 3073),
        ("cifar100", "train.bin", 100, 2 * 3074 + 1),
    ],
)
def test_a_label_out_of_range(tmp_path, name, file, label, offset):
    write_tiny(tmp_path, TINY[name])
    content = bytearray((tmp_path / file).read_bytes())
    content[offset] = label
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        records.read_split(tmp_path, TINY[name], "train")
    place = f"{tmp_path / file}, record 2, byte {offset}: the label is {label}"
    assert place in str(caught.value)


def test_missing_files_are_named(tmp_path):
    write_tiny(tmp_path, TINY10)
    records.check_files(tmp_path, TINY10)
    for name in ("data_batch_5.bin", "test_batch.bin"):
        (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=r"lacks data_batch_5\.bin, test_batch\.bin"):
        records.check_files(tmp_path, TINY10)
    with pytest.raises(UsageError, match=r"lacks data_batch_5\.bin\."):
        records.read_split(tmp_path, TINY10, "train")


def test_a_file_without_permission(tmp_path):
    write_tiny(tmp_path, TINY10)
    path = tmp_path / "test_batch.bin"
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user (root?) may read everything")
    with pytest.raises(
        UsageError, match=r"test_batch\.bin cannot be read or written: Permission"
    ):
        records.read_split(tmp_path, TINY10, "test")


def test_class_names(tmp_path):
    assert records.class_names(tmp_path, TINY10)[9] == "truck"
    hundred = records.class_names(tmp_path, records.CIFAR100)
    assert hundred == tuple(f"class {label}" for label in range(100))
    # The official file ends in an empty line.
    given = tuple("abcdefghij")
    (tmp_path / "batches.meta.txt").write_text("\n".join(given) + "\n\n")
    assert records.class_names(tmp_path, TINY10) == given
    (tmp_path / "batches.meta.txt").write_text("a\nb\n")
    with pytest.raises(UsageError, match=r"has 2 class names instead of 10"):
        records.class_names(tmp_path, TINY10)
    (tmp_path / "batches.meta.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="has 1 class names"):
        records.class_names(tmp_path, TINY10)


@pytest.mark.skipif(
    "CIFAR10_DATA_DIR" not in os.environ,
    reason="set CIFAR10_DATA_DIR to the folder of CIFAR-10's .bin files",
)
def test_the_real_cifar10():
    directory = Path(os.environ["CIFAR10_DATA_DIR"])
    if (directory / records.CIFAR10.folder).exists():
        directory /= records.CIFAR10.folder
    images, labels = records.read_split(directory, records.CIFAR10, "train")
    assert images.shape == (50_000, 32, 32, 3)
    assert np.bincount(labels).tolist() == [5_000] * 10
    # The means are known from many papers and programs.
    means = [images[..., channel].mean() / 255 for channel in range(3)]
    np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=5e-5)
    images, labels = records.read_split(directory, records.CIFAR10, "test")
    assert images.shape == (10_000, 32, 32, 3)
    assert np.bincount(labels).tolist() == [1_000] * 10
