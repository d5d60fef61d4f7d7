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


def test_words_are_what_is_left_without_punctuation_and_capitals():
    words = imdb.split("A film,a 'Film'!<br /><br />\tIt's 10/10")
    assert words == ["a", "film", "a", "'film'", "br", "br", "it's", "10", "10"]


def test_numbers_fall_with_frequency_and_ties_go_to_the_first():
    index = imdb.number_words(iter([["b", "a", "c"], ["a", "c", "d"]]))
    assert index == {"a": 1, "c": 2, "b": 3, "d": 4}


def test_reviews_begin_with_1_and_rare_words_are_2_and_unheard_ones_left_out():
    index = {"the": 1, "film": 2, "rare": 7}
    assert imdb.encode(["the", "unheard", "film", "rare"], index, words=10) == [
        1,
        4,
        5,
        2,
    ]


def test_short_reviews_are_filled_in_front_and_long_ones_lose_their_beginning():
    assert imdb.pad([1, 5, 6], 5) == [0, 0, 1, 5, 6]
    assert imdb.pad([1, 5, 6, 7, 8, 9], 5) == [5, 6, 7, 8, 9]


def test_padding_is_that_of_keras():
    keras = pytest.importorskip("keras")
    reviews = [[1, 5, 6], list(range(1, 300)), []]
    expected = keras.utils.pad_sequences(reviews, 150)
    assert [imdb.pad(review) for review in reviews] == expected.tolist()


def test_archive_and_folder_are_the_same(folder):
    unpacked = imdb.read(imdb.find(str(folder)), 1)
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


def test_environment_names_the_place(folder):
    environ = {imdb.DIRECTORY_VARIABLE: str(folder)}
    assert imdb.find(None, environ) == folder / "aclImdb"


def test_without_reviews_the_ways_on_are_named(tmp_path):
    with pytest.raises(UsageError, match="--imdb_dir or IMDB_DATA_DIR"):
        imdb.find(None, {})
    with pytest.raises(UsageError, match="neither a folder aclImdb nor an archive"):
        imdb.find(str(tmp_path))


def test_missing_reviews_are_an_error(folder):
    with pytest.raises(UsageError, match=r"train/neg has 1 reviews.*has 12500"):
        imdb.read(imdb.find(str(folder)))


def damaged(whole, how):
    if how == "cut":
        return whole[: len(whole) // 2]
    if how == "flipped":
        middle = len(whole) // 2
        return whole[:middle] + bytes(255 - one for one in whole[middle:])
    return b"no archive"


@pytest.mark.parametrize("how", ["cut", "flipped", "foreign"])
@pytest.mark.parametrize("compression", ["gz", "xz"])
def test_a_damaged_archive_is_an_error(folder, compression, how):
    archive = folder / f"aclImdb.tar.{compression}"
    with tarfile.open(archive, f"w:{compression}") as packed:
        packed.add(folder / "aclImdb", "aclImdb")
    shutil.rmtree(folder / "aclImdb")
    archive.write_bytes(damaged(archive.read_bytes(), how))
    with pytest.raises(UsageError, match="another copy with --imdb_dir"):
        imdb.read(imdb.find(str(folder)), 1)


@pytest.mark.slow
def test_real_reviews_are_numbered_as_in_keras(real_data_dir):
    if not list(real_data_dir.glob("aclImdb*")):
        pytest.skip("no reviews beside the real CIFAR-10")
    path = imdb.find(str(real_data_dir))
    training = [text for part, _, _, text in imdb._texts(path) if part == "train"]
    words = [imdb.split(text) for text in training]
    index = imdb.number_words(iter(words))
    # As in Keras's own index of 88,584 words.
    first = "the and a of to is br in it i this that was as for with movie but film on"
    assert list(index)[:20] == first.split()
    assert abs(len(index) - 88_584) < 10
    [known] = [
        one for one in words if one[:5] == ["this", "film", "was", "just", "brilliant"]
    ]
    begins = imdb.encode(known, index, imdb.WORDS)[:5]
    assert begins == [1, 14, 22, 16, 43]
