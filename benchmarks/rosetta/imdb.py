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
import itertools
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cifar10.errors import UsageError

DIRECTORY_VARIABLE = "IMDB_DATA_DIR"
WORDS = 30_000
LENGTH = 150
REVIEWS_PER_FOLDER = 12_500

_BEGIN, _UNKNOWN, _SHIFT = 1, 2, 3
# The labels of neg and pos are 0 and 1.
_FOLDERS = ("train/neg", "train/pos", "test/neg", "test/pos")
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


class Imdb(NamedTuple):
    """Both sets; inputs are int32 [count, LENGTH], labels int32 [count]."""

    inputs: np.ndarray
    labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    description: str


def find(directory: str | None) -> Path:
    """Finds the folder `aclImdb` or its archive.

    Args:
        directory: The folder, the archive, or a folder that holds one of them. Without
            it the environment variable IMDB_DATA_DIR.

    Raises:
        UsageError: Neither is there.
    """
    name = directory or os.environ.get(DIRECTORY_VARIABLE)
    if name:
        path = Path(name).expanduser()
        inside = [path / "aclImdb", *sorted(path.glob("aclImdb*.tar*"))]
        for candidate in (path, *inside):
            if candidate.is_file() or (candidate / "train" / "pos").is_dir():
                return candidate
    raise UsageError(
        f"{name}: there are no IMDB reviews. Name the folder of aclImdb or of its "
        "archive (https://ai.stanford.edu/~amaas/data/sentiment) with --imdb_dir or "
        f"{DIRECTORY_VARIABLE}, or leave the recurrent network out: --network cnn."
    )


def read(path: Path, reviews_per_folder: int = REVIEWS_PER_FOLDER) -> Imdb:
    """Reads, numbers and cuts all labelled reviews.

    Args:
        path: As `find` returns it.
        reviews_per_folder: How many there have to be of each sentiment in each set.

    Raises:
        UsageError: Reviews are missing or unreadable.
    """
    texts: dict[str, dict[str, str]] = {folder: {} for folder in _FOLDERS}
    try:
        for folder, name, text in _texts(path):
            texts[folder][name] = text
    except _UNREADABLE as error:
        raise UsageError(
            f"{path} cannot be read: {error}. Fetch it again, or name another copy "
            "with --imdb_dir."
        ) from error
    words = {}
    for folder, found in texts.items():
        if len(found) != reviews_per_folder:
            raise UsageError(
                f"{path}: {folder} has {len(found)} reviews; the original has "
                f"{reviews_per_folder}. Unpack it again, or name another copy with "
                "--imdb_dir."
            )
        words[folder] = [split(text) for _, text in sorted(found.items())]
    index = number_words(words["train/neg"] + words["train/pos"])
    labels = np.repeat(np.arange(2, dtype=np.int32), reviews_per_folder)
    inputs, test_inputs = (
        np.array(
            [
                encode(text, index)
                for kind in ("neg", "pos")
                for text in words[f"{part}/{kind}"]
            ],
            np.int32,
        )
        for part in ("train", "test")
    )
    described = f"IMDB reviews in {path}, {len(index):,} words"
    return Imdb(inputs, labels, test_inputs, labels, described)


def split(text: str) -> list[str]:
    """Returns the words of a text."""
    return text.lower().translate(_BLANKS).split()


def number_words(texts: Iterable[list[str]]) -> dict[str, int]:
    """Numbers words by falling frequency, from 1."""
    counts = collections.Counter(itertools.chain.from_iterable(texts))
    return {word: rank for rank, (word, _) in enumerate(counts.most_common(), start=1)}


def encode(
    text: list[str],
    index: Mapping[str, int],
    words: int = WORDS,
    length: int = LENGTH,
) -> list[int]:
    """Returns the last numbers of a review, with zeros before them if it is short."""
    numbers = [index[word] + _SHIFT for word in text if word in index]
    review = [_BEGIN, *(one if one < words else _UNKNOWN for one in numbers)]
    return [0] * (length - len(review)) + review[-length:]


def _texts(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yields folder, name and text of each labelled review."""
    if path.is_dir():
        for folder in _FOLDERS:
            for file in (path / folder).glob("*.txt"):
                yield folder, file.name, file.read_text(encoding="utf-8")
        return
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name)
            folder = "/".join(name.parent.parts[-2:])
            if folder in _FOLDERS and name.suffix == ".txt" and member.isfile():
                content = archive.extractfile(member)
                if content:
                    yield folder, name.name, content.read().decode("utf-8")
