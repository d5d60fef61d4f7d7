"""The IMDB reviews as numbers of words, from the original folders or their archive.

The words are numbered as `keras.datasets.imdb` does it: the most frequent one of the
training set is 1, and all numbers are then raised by 3, because 0 fills up, 1 begins a
review and 2 stands for a word whose number is too large. A word that is in no training
review is left out. Words are what is left between blanks when the text is in lower case
and without punctuation, as Keras's Tokenizer splits them. Of words that are equally
frequent the one that was read first comes first; the order of Keras's own file, made
from another order of the reviews, may differ there.
"""

from __future__ import annotations

import collections
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar10.errors import UsageError

DIRECTORY_VARIABLE = "IMDB_DATA_DIR"
FOLDER = "aclImdb"
WORDS = 30_000
LENGTH = 150
REVIEWS_PER_FOLDER = 12_500

_BEGIN, _UNKNOWN, _SHIFT = 1, 2, 3
# The sentiments are the labels 0 and 1.
_SENTIMENTS = ("neg", "pos")
_FOLDERS = [(part, kind) for part in ("train", "test") for kind in _SENTIMENTS]
_BLANKS = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n', " "))

# What reading a damaged or forbidden folder or archive raises.
_UNREADABLE = (
    OSError,
    EOFError,
    UnicodeDecodeError,
    tarfile.TarError,
    zlib.error,
    lzma.LZMAError,
)

Reviews = dict[tuple[str, str], dict[str, str]]


class Imdb(NamedTuple):
    """Both sets; inputs are int32 [count, LENGTH], labels int32 [count]."""

    inputs: np.ndarray
    labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    description: str


def find(directory: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Finds the folder `aclImdb` or its archive.

    Args:
        directory: The folder, the archive, or a folder that holds one of them. Without
            it the environment variable IMDB_DATA_DIR.
        environ: Environment variables.

    Raises:
        UsageError: Neither is there.
    """
    source = "--imdb_dir" if directory else DIRECTORY_VARIABLE
    name = directory or environ.get(DIRECTORY_VARIABLE)
    if not name:
        raise UsageError(
            "The recurrent network needs the IMDB reviews. Name the folder of aclImdb "
            "or of its archive (https://ai.stanford.edu/~amaas/data/sentiment) with "
            f"--imdb_dir or {DIRECTORY_VARIABLE}, or leave it out: --network cnn."
        )
    path = Path(name).expanduser()
    if path.is_file() or (path / "train" / "pos").is_dir():
        return path
    archives = sorted(path.glob(f"{FOLDER}*.tar*"))
    for candidate in (path / FOLDER, *archives):
        if candidate.exists():
            return candidate
    raise UsageError(
        f"{source} {name}: neither a folder {FOLDER} nor an archive {FOLDER}*.tar.gz "
        "is there. Name the folder that holds one of them."
    )


def read(path: Path, reviews_per_folder: int = REVIEWS_PER_FOLDER) -> Imdb:
    """Reads, numbers and cuts all labelled reviews.

    Args:
        path: What `find` returned.
        reviews_per_folder: How many there have to be of each sentiment in each set.

    Raises:
        UsageError: Reviews are missing or unreadable.
    """
    reviews: Reviews = {folder: {} for folder in _FOLDERS}
    try:
        for part, kind, name, text in _texts(path):
            reviews[part, kind][name] = text
    except _UNREADABLE as error:
        raise UsageError(
            f"{path} cannot be read: {error}. Fetch it again, or name another copy "
            "with --imdb_dir."
        ) from error
    for (part, kind), found in reviews.items():
        if len(found) != reviews_per_folder:
            raise UsageError(
                f"{path}: {part}/{kind} has {len(found)} reviews; the original has "
                f"{reviews_per_folder}. Unpack it again, or name another copy with "
                "--imdb_dir."
            )
    words = {
        folder: [split(text) for _, text in sorted(found.items())]
        for folder, found in reviews.items()
    }
    index = number_words(text for kind in _SENTIMENTS for text in words["train", kind])
    sets = [_as_arrays(words, part, index) for part in ("train", "test")]
    return Imdb(*sets[0], *sets[1], f"IMDB reviews in {path}, {len(index):,} words")


def split(text: str) -> list[str]:
    """Returns the words of a text."""
    return [word for word in text.lower().translate(_BLANKS).split(" ") if word]


def number_words(texts: Iterator[list[str]]) -> dict[str, int]:
    """Numbers words by falling frequency, from 1."""
    counts = collections.Counter(word for text in texts for word in text)
    return {word: rank for rank, (word, _) in enumerate(counts.most_common(), start=1)}


def encode(text: list[str], index: Mapping[str, int], words: int = WORDS) -> list[int]:
    """Returns the numbers of a review's words, with the beginning before them."""
    numbers = [index[word] + _SHIFT for word in text if word in index]
    return [_BEGIN, *(one if one < words else _UNKNOWN for one in numbers)]


def pad(review: list[int], length: int = LENGTH) -> list[int]:
    """Returns the last numbers of a review, zeros before them if it is short."""
    return [0] * (length - len(review)) + review[-length:]


def _as_arrays(
    words: Mapping[tuple[str, str], list[list[str]]], part: str, index: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = [], []
    for label, kind in enumerate(_SENTIMENTS):
        inputs += [pad(encode(text, index)) for text in words[part, kind]]
        labels += [label] * len(words[part, kind])
    return np.array(inputs, np.int32), np.array(labels, np.int32)


def _texts(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yields set, sentiment, name and text of each labelled review."""
    if path.is_dir():
        for part, kind in _FOLDERS:
            for file in (path / part / kind).glob("*.txt"):
                yield part, kind, file.name, file.read_text(encoding="utf-8")
        return
    with tarfile.open(path) as archive:
        for member in archive:
            *_, part, kind, name = ("", "", *Path(member.name).parts)
            if (part, kind) in _FOLDERS and name.endswith(".txt") and member.isfile():
                content = archive.extractfile(member)
                if content:
                    yield part, kind, name, content.read().decode("utf-8")
