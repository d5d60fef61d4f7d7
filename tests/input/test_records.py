"""Records on disk to pixels and labels, and files that are wrong."""

import dataclasses
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input import cifar, records

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
            content[:, label] = random.randint(0, len(file_format.class_names), count)
            written[name] = content.astype(np.uint8)
            (directory / name).write_bytes(written[name].tobytes())
    return written


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_every_pixel_and_label_is_read(tmp_path, name):
    file_format = TINY[name]
    written = write_tiny(tmp_path, file_format)
    for split in ("train", "test"):
        images, labels = records.read_split(tmp_path, file_format, split)
        content = np.concatenate([written[file] for file in file_format.files(split)])
        assert images.shape == (len(content), 32, 32, 3)
        assert (images.dtype, labels.dtype) == (np.uint8, np.int32)
        # The fine label of CIFAR-100 is the second byte of a record.
        assert labels.tolist() == content[:, file_format.label_bytes - 1].tolist()
        planes = content[:, file_format.label_bytes :].reshape(-1, 3, 32, 32)
        for channel in range(3):
            np.testing.assert_array_equal(images[..., channel], planes[:, channel])


def refused(directory, part):
    """Checks that reading the files of a folder, and looking at them, is refused."""
    with pytest.raises(UsageError, match=part):
        records.check_files(directory, TINY10)
    with pytest.raises(UsageError, match=part):
        records.read_split(directory, TINY10, "train")


def test_missing_files_and_files_of_the_wrong_size_are_named(tmp_path):
    write_tiny(tmp_path, TINY10)
    records.check_files(tmp_path, TINY10)
    path = tmp_path / "data_batch_4.bin"
    whole = path.read_bytes()
    for size in (0, 2 * 3073, 4 * 3073):
        path.write_bytes((2 * whole)[:size])
        refused(tmp_path, str(path))
    path.unlink()
    refused(tmp_path, path.name)


def test_files_on_a_faulty_disk_are_named(tmp_path, monkeypatch):
    write_tiny(tmp_path, TINY10)
    broken = tmp_path / "data_batch_2.bin"
    read, is_file = np.fromfile, Path.is_file

    def failing(works):
        def fail(path, *given):
            if path == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return works(path, *given)

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(np, "fromfile", failing(read))
        with pytest.raises(UsageError, match=f"{broken} cannot be read.*: Input"):
            records.read_split(tmp_path, TINY10, "train")
    monkeypatch.setattr(Path, "is_file", failing(is_file))
    refused(tmp_path, f"{tmp_path} cannot be read.*: Input")


def test_a_label_out_of_range_is_named(tmp_path):
    write_tiny(tmp_path, TINY["cifar100"])
    content = bytearray((tmp_path / "train.bin").read_bytes())
    content[2 * 3074 + 1] = 100
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UsageError, match="record 2: the label is 100"):
        records.read_split(tmp_path, TINY["cifar100"], "train")


def test_only_the_real_cifar10_passes_for_it(real_data_dir, capsys):
    dataset = cifar.find("cifar10", str(real_data_dir), None)
    images, labels = dataset.read("train")
    assert cifar.fingerprinted(dataset, images, labels).fingerprint
    assert not capsys.readouterr().err
    labels[7] ^= 1
    cifar.fingerprinted(dataset, images, labels)
    assert "not the official images" in capsys.readouterr().err


def test_the_real_cifar10_has_its_published_sizes_and_means(real_data_dir):
    directory = real_data_dir
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
