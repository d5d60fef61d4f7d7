"""The stand-in: the same bytes everywhere, learnable, but not by a linear model."""

import hashlib

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input import datasets, records, synthetic

SHA256 = {
    "batches.meta.txt": (
        "8d5ac7e98906609a8e39fee9655f9e183677be7378fad267d7918a8878054bb5"
    ),
    "data_batch_1.bin": (
        "d51175f59bf88ad708acdbed4d23efec81520caa6563ac253dede120803a28d4"
    ),
    "data_batch_2.bin": (
        "0ee9c06bc2c48c713e224d821675db17d3a31b35fd55c6c4881fcda78ef4d920"
    ),
    "data_batch_3.bin": (
        "c849a8d2c8658f9ea2a2b154b80cf9b46f5371225344e6f14eec30aa88cc8994"
    ),
    "data_batch_4.bin": (
        "ae0b3481cc69cef91594e39a28f1484bfa587ddee0602769831f213167ad122d"
    ),
    "data_batch_5.bin": (
        "469e948840c790b000f8a62c63044325b6817571806d1a7660c66ff5eced23c7"
    ),
    "test_batch.bin": (
        "436019a2d4baf5a12aaf68c5c58468851a2255e272134ce8c2ffb3796aad16e9"
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The stand-in, generated once."""
    path = tmp_path_factory.mktemp("data") / "below" / synthetic.FOLDER
    synthetic.generate(path)
    return path


def test_the_bytes_never_change(directory):
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
    }
    assert found == SHA256


def test_it_is_in_the_format_of_cifar10(directory):
    records.check_files(directory, datasets.SYNTHETIC)
    for split, count in (("train", 10_000), ("test", 2_000)):
        images, labels = records.read_split(directory, datasets.SYNTHETIC, split)
        assert images.shape == (count, 32, 32, 3)
        assert np.bincount(labels).tolist() == [count // 10] * 10
    assert records.class_names(directory, datasets.SYNTHETIC) == synthetic.CLASS_NAMES


def test_only_the_finished_folder_is_left(directory):
    assert [path.name for path in directory.parent.iterdir()] == [synthetic.FOLDER]
    # Others on the machine may read it, as far as the user's umask lets them.
    (directory.parent / "plain").mkdir()
    plain = directory.parent / "plain"
    assert directory.stat().st_mode == plain.stat().st_mode
    plain.rmdir()


def test_a_second_generation_keeps_the_first(directory):
    before = directory.stat().st_ino
    synthetic.generate(directory)
    assert directory.stat().st_ino == before
    assert [path.name for path in directory.parent.iterdir()] == [synthetic.FOLDER]


def test_an_unwritable_place(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be read or written"):
        synthetic.generate(tmp_path / "file" / synthetic.FOLDER)


@pytest.mark.slow
def test_a_linear_model_stays_under_60_percent(directory):
    def features(split):
        images, labels = records.read_split(directory, datasets.SYNTHETIC, split)
        return images.reshape(len(images), -1).astype(np.float32) / 127.5 - 1, labels

    images, labels = features("train")
    weights = np.zeros((images.shape[1], 10), np.float32)
    random = np.random.RandomState(0)
    # Softmax regression by gradient descent; this rate and length did best of those
    # tried, about 23 % of the test images, where chance is 10 %.
    for _ in range(400):
        rows = random.randint(0, len(images), 256)
        logits = images[rows] @ weights
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = odds / odds.sum(axis=1, keepdims=True)
        error[np.arange(256), labels[rows]] -= 1
        weights -= 0.02 / 256 * images[rows].T @ error
    test_images, test_labels = features("test")
    accuracy = np.mean((test_images @ weights).argmax(axis=1) == test_labels)
    assert 0.1 < accuracy < 0.6
