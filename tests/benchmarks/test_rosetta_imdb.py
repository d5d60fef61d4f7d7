"""The IMDB reviews: words numbered as Keras does it, from folders or an archive."""

import shutil
import tarfile

import pytest

from benchmarks.rosetta import imdb
from cifar10.errors import UsageError

REVIEWS = {
    "train/pos/1_9.txt": "The film: the BEST film!<br /><br />Don't miss it.",
    "train/neg/1_2.txt": "The film is bad (the worst)",
    "test/pos/1_8.txt": "the unheard film",
    "test/neg/1_1.txt": " ".join(["bad"] * 200),
    "train/unsup/1_0.txt": "not labelled not labelled not labelled",
    "train/pos/urls.list": "no review",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in REVIEWS.items():
        path = tmp_path / "aclImdb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_reviews_are_numbered_and_padded_as_in_keras():
    words = imdb.split("A film,a 'Film'!<br /><br />\tIt's 10/10")
    assert words == ["a", "film", "a", "'film'", "br", "br", "it's", "10", "10"]
    index = imdb.number_words(iter([["b", "a", "c"], ["a", "c", "d"]]))
    assert index == {"a": 1, "c": 2, "b": 3, "d": 4}
    index = {"the": 1, "film": 2, "rare": 7}
    # They begin with 1; rare words are 2, unheard ones are left out.
    words = ["the", "unheard", "film", "rare"]
    assert imdb.encode(words, index, words=10, length=4) == [1, 4, 5, 2]
    # The last ones are kept, with zeros before them.
    assert imdb.encode(words, index, words=10, length=6) == [0, 0, 1, 4, 5, 2]
    assert imdb.encode(words, index, words=10, length=2) == [5, 2]


def test_archive_and_folder_are_the_same(folder, monkeypatch):
    monkeypatch.setenv(imdb.DIRECTORY_VARIABLE, str(folder))
    unpacked = imdb.read(imdb.find(None), 1)
    archive = folder / "aclImdb_v1.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder / "aclImdb", "aclImdb")
    for place in (archive, folder / "aclImdb"):
        again = imdb.read(imdb.find(str(place)), 1)
        for one, other in zip(unpacked[:4], again[:4], strict=True):
            assert one.tolist() == other.tolist()
    assert unpacked.inputs.shape == (2, 150)
    assert unpacked.labels.tolist() == unpacked.test_labels.tolist() == [0, 1]
    # "the" and "film" are the two most frequent words of the training set.
    assert unpacked.test_inputs[1].tolist()[-3:] == [1, 4, 5]


@pytest.mark.parametrize("damage", ["absent", "cut", "foreign"])
def test_missing_and_damaged_reviews_are_refused(folder, damage):
    place = folder / "aclImdb"
    archive = folder / "aclImdb.tar.xz"
    with tarfile.open(archive, "w:xz") as packed:
        packed.add(place, "aclImdb")
    shutil.rmtree(place)
    whole = archive.read_bytes()
    damaged = {"cut": whole[: len(whole) // 2], "foreign": b"no archive"}
    if damage == "absent":
        archive.unlink()
    else:
        archive.write_bytes(damaged[damage])
    with pytest.raises(UsageError, match=str(folder)):
        imdb.read(imdb.find(str(folder)))


@pytest.mark.slow
def test_real_reviews_are_numbered_as_in_keras(real_data_dir):
    if not list(real_data_dir.glob("aclImdb*")):
        pytest.skip("no reviews beside the real CIFAR-10")
    found = imdb.read(imdb.find(str(real_data_dir)))
    # So ends the first review of Keras's copy, but for two rare words.
    first = [113, 103, 32, 15, 16], [19, 178, 32]
    ends = [(one[-9:-4].tolist(), one[-3:].tolist()) for one in found.inputs]
    assert ends.count(first) == 1
