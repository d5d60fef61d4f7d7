"""The stand-in: the same bytes everywhere, learnable, but not by a linear model."""

import hashlib

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input import cifar, records, synthetic

SHA256 = {
    "batches.meta.txt": (
        "8d5ac7e98906609a8e39fee9655f9e183677be7378fad267d7918a8878054bb5"
    ),
    "data_batch_1.bin": (
        "8725ca47fee7ab325693b00ccff8ce576d557313af3b7d224f155f013ffe98cb"
    ),
    "data_batch_2.bin": (
        "ffcf0d459b7f57ced70ffa98800f94c61274f702b7687ad988996c053b0a119c"
    ),
    "data_batch_3.bin": (
        "fc892fea95cd0d74a1aa1b027a0c5c813f5674804b339d3b4e4298a91515124e"
    ),
    "data_batch_4.bin": (
        "e1c1076fb0438f82f6e296929193b599f7e7e02bdbca39d78ddb05cae102c030"
    ),
    "data_batch_5.bin": (
        "03ca68c9b951d9b06aecf78cf06750884bc87c1c2c1ed73dd73239631ec34279"
    ),
    "test_batch.bin": (
        "177aea15c37916c858b07374fd9aa5c7ea2bfeea282a3bc4b4dde1cf1451bf00"
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
    records.check_files(directory, cifar.SYNTHETIC)
    for split, count in (("train", 10_000), ("test", 2_000)):
        images, labels = records.read_split(directory, cifar.SYNTHETIC, split)
        assert images.shape == (count, 32, 32, 3)
        assert np.bincount(labels).tolist() == [count // 10] * 10
    assert records.class_names(directory, cifar.SYNTHETIC) == synthetic.CLASS_NAMES


def test_only_the_finished_folder_is_left(directory):
    assert [path.name for path in directory.parent.iterdir()] == [synthetic.FOLDER]
    # Others on the machine may read it, as far as the user's umask lets them.
    (directory.parent / "plain").mkdir()
    plain = directory.parent / "plain"
    assert directory.stat().st_mode == plain.stat().st_mode
    plain.rmdir()


@pytest.mark.slow
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
        images, labels = records.read_split(directory, cifar.SYNTHETIC, split)
        return images.reshape(len(images), -1).astype(np.float32) / 127.5 - 1, labels

    images, labels = features("train")
    weights = np.zeros((images.shape[1], 10), np.float32)
    random = np.random.RandomState(0)
    # Softmax regression by gradient descent; this rate and length did best of those
    # tried, about 58 % of the test images, where chance is 10 %.
    for _ in range(1200):
        rows = random.randint(0, len(images), 256)
        logits = images[rows] @ weights
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = odds / odds.sum(axis=1, keepdims=True)
        error[np.arange(256), labels[rows]] -= 1
        weights -= 0.02 / 256 * images[rows].T @ error
    test_images, test_labels = features("test")
    accuracy = np.mean((test_images @ weights).argmax(axis=1) == test_labels)
    assert 0.1 < accuracy < 0.6
