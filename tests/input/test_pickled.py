"""Pickled batches are read without being executed; anything else is refused."""

import pickle

import numpy as np
import pytest

from cifar10.errors import UsageError
from cifar10.input import pickled
from small_sets import python2_pickle

PIXELS = np.random.RandomState(0).randint(0, 256, (3, 3072)).astype(np.uint8)
LABELS = {"coarse_labels": [1, 2, 3], "fine_labels": [40, 50, 99]}
GOOD = python2_pickle(LABELS, PIXELS)


def read(tmp_path, content, keys=("coarse_labels", "fine_labels"), count=3):
    (tmp_path / "train").write_bytes(content)
    return pickled.read_records(tmp_path / "train", keys, count)


def test_the_sample_pickle_is_from_python_2():
    batch = pickle.loads(GOOD, encoding="latin1")  # noqa: S301 - its own.
    np.testing.assert_array_equal(batch["data"], PIXELS)
    assert batch["fine_labels"] == LABELS["fine_labels"]


def test_records_have_the_bytes_of_a_binary_file(tmp_path):
    records = read(tmp_path, GOOD)
    expected = b"".join(
        bytes([coarse, fine]) + row.tobytes()
        for coarse, fine, row in zip(*LABELS.values(), PIXELS, strict=True)
    )
    assert records.tobytes() == expected


def test_array_by_columns_is_read_by_rows(tmp_path):
    content = python2_pickle(LABELS, PIXELS, by_columns=True)
    np.testing.assert_array_equal(read(tmp_path, content)[:, 2:], PIXELS)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", [str, str.encode])
def test_a_batch_repickled_by_python_3_is_read(tmp_path, protocol, kind):
    batch = {kind(key): value for key, value in LABELS.items()}
    batch |= {kind("data"): PIXELS, kind("filenames"): [kind("leptodactylus.png")] * 3}
    content = pickle.dumps(batch, protocol=protocol)
    assert read(tmp_path, content).tobytes() == read(tmp_path, GOOD).tobytes()


@pytest.mark.parametrize("protocol", range(6))
def test_only_images_colour_by_colour_are_read(tmp_path, protocol):
    """An image of [32, 32, 3] has as many bytes, and would be garbled."""
    count = len(PIXELS)
    for shape, is_read in (
        ((count, 3, 32, 32), True),
        ((count, 32, 32, 3), False),
        ((3072, count), False),
    ):
        batch = {**LABELS, "data": PIXELS.reshape(shape)}
        content = pickle.dumps(batch, protocol=protocol)
        if is_read:
            assert read(tmp_path, content).tobytes() == read(tmp_path, GOOD).tobytes()
        else:
            with pytest.raises(UsageError, match="colour by colour"):
                read(tmp_path, content)


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


HARMFUL = {
    "another function": lambda mark: pickle.dumps(Harmful(mark), protocol=2),
    "by name": lambda mark: b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "old": lambda mark: b"(S'touch %s'\nios\nsystem\n." % str(mark).encode(),
    "behind a batch": lambda mark: GOOD[:-1] + b"cos\nsystem\n.",
    "extension": lambda mark: b"\x80\x02\x82\x01.",
    "endless": lambda mark: b"\x80\x02" + b"}" * 100_000 + b".",
    "nested keys": lambda mark: b"})" + b"\x85" * 50_000 + b"K\x01s.",
    "doubling": lambda mark: b"\x80\x02]" + b"(h\x00h\x00e" * 20 + b".",
    "huge memo": lambda mark: b"\x80\x02}r\xff\xff\xff\xff.",
    "huge memo by digits": lambda mark: b"}p4294967295\n.",
    "state of a stand-in": lambda mark: (
        b"cnumpy\ndtype\n}X\x04\x00\x00\x00nameK\x01sb."
    ),
    "call of the array's type": lambda mark: b"cnumpy\nndarray\n(K\x09tR.",
    "other array": lambda mark: pickle.dumps({"data": PIXELS * 1.0, **LABELS}),
    "object": lambda mark: pickle.dumps({"data": np.array([None]), **LABELS}),
    "no dictionary": lambda mark: pickle.dumps([1, 2]),
    "persistent": lambda mark: b"Pname\n.",
}


@pytest.mark.parametrize("kind", HARMFUL)
def test_pickles_other_than_batches_are_refused_and_not_executed(tmp_path, kind):
    mark = tmp_path / "mark"
    with pytest.raises(UsageError, match="train"):
        read(tmp_path, HARMFUL[kind](mark))
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        GOOD[:-10],
        GOOD[:5000],
        python2_pickle(LABELS, PIXELS[:2]),
        python2_pickle(LABELS, PIXELS[:, 1:]),
        python2_pickle({"fine_labels": [1, 2, 3]}, PIXELS),
        python2_pickle({**LABELS, "fine_labels": [1, 2, 300]}, PIXELS),
        python2_pickle({**LABELS, "fine_labels": [1, 2]}, PIXELS),
        pickle.dumps({"data": PIXELS, **LABELS, "fine_labels": [1.5, 2, 3]}),
        pickle.dumps({"data": PIXELS, **LABELS, "fine_labels": [-1, 2, 3]}),
        pickle.dumps({"data": PIXELS.tobytes(), **LABELS}),
    ],
)
def test_damaged_batches_are_refused(tmp_path, content):
    with pytest.raises(UsageError, match="train"):
        read(tmp_path, content)
