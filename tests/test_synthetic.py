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
        "3875f9302bc09b674ef11db5e355a133bfb397712bfd6c60c929e2b62751db1d"
    ),
    "data_batch_2.bin": (
        "493c50b51294db7db416f12e6fd122e8abad56e44de1ca1b9e89ad5d8332c995"
    ),
    "data_batch_3.bin": (
        "4c69e2c60dcdd4c13845fcec85e5d134458cae90bf7007f5566f65096cb64f6a"
    ),
    "data_batch_4.bin": (
        "ce2b9e162947e7574f8dbaba4cf1b2e931814e798bf612f743c2ed4984fbb129"
    ),
    "data_batch_5.bin": (
        "4c14d000cc5b1093158ee4530ba2500ec682237f4efe4478abb68ecd87d1574b"
    ),
    "test_batch.bin": (
        "1d3885d7a6220886197db118a9e49c96464795805bf9edc8ac40fef2f8080f24"
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
