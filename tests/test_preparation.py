"""Preparing pictures: interrupted, repeated, at the same time, after changes."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from small_folders import everything, files_in, find, numbered, packed, pixels, write

from cifar10.errors import UsageError
from cifar10.input.pictures import decoding, journal, shards

NAMES = numbered(250, "cat", "dog")
COUNT = len(NAMES)
ROOT = Path(__file__).parent.parent

# A process that prepares, slowly enough to be killed at any moment of it.
SLOW = """
import sys, time
from pathlib import Path
from cifar10.input.pictures import decoding, folder, journal, shards
journal.BATCH, shards.SHARD_BYTES = 4, 20 * 8 * 8 * 3
fast = decoding.decode
def decode(*arguments, **options):
    time.sleep(0.002)
    return fast(*arguments, **options)
decoding.decode = decode
print("ready", flush=True)
folder.find(Path(sys.argv[1]), image_size=8, validation_fraction=0.3,
            max_bad_images=0.1, cache=Path(sys.argv[2]))
"""


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def pictures(tmp_path):
    directory = write(tmp_path / "pictures", *NAMES)
    (directory / "cat/7.png").write_bytes(b"broken")
    return directory


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Several files of records, and many batches, of few pictures."""
    monkeypatch.setattr(journal, "BATCH", 4)
    monkeypatch.setattr(shards, "SHARD_BYTES", 20 * 8 * 8 * 3)


@pytest.fixture
def decoded(monkeypatch):
    """The names of the pictures that are decoded."""
    names = []
    decode = decoding.decode

    def noting(content, name, *arguments, **options):
        names.append(name)
        return decode(content, name, *arguments, **options)

    monkeypatch.setattr(decoding, "decode", noting)
    return names


def prepared(pictures, cache):
    return find(pictures, cache, max_bad_images=0.1)


def started(pictures, cache):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(pictures), str(cache)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    process.stdout.readline()
    return process


def lines_in(cache):
    """Returns how many batches the journal of an unfinished folder has."""
    found = [*cache.glob("pictures/*/*/journal")]
    return found[0].read_bytes().count(b"\n") if found else 0


def test_five_kills_change_nothing_and_cost_little(pictures, cache, tmp_path):
    undisturbed = prepared(pictures, tmp_path / "other")
    chance = random.Random(5)
    kept, kills = 0, 0
    while kills < 5:
        process = started(pictures, cache)
        wanted = kept + chance.randrange(2, 9)
        while lines_in(cache) < wanted and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it had time to finish"
        assert not [*cache.glob("pictures/*/*/manifest.json")]
        assert lines_in(cache) >= wanted, "it went on where the last one was"
        kept = lines_in(cache)
        kills += 1
    dataset = prepared(pictures, cache)
    assert files_in(cache) == files_in(tmp_path / "other")
    assert dataset.fingerprint == undisturbed.fingerprint
    assert len(files_in(cache)) > 10, "there are several files of each part"
    images, _ = everything(dataset)
    assert len(images) == COUNT - 1


def interrupted(pictures, cache, decoded, after):
    """Prepares until so many pictures are decoded, and returns how many were kept."""
    real = decoding.decode

    def failing(*arguments, **options):
        if len(decoded) >= after:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "decode", failing)
        with pytest.raises(KeyboardInterrupt):
            prepared(pictures, cache)
    return lines_in(cache)


@pytest.mark.parametrize("damage", ["torn line", "flipped bit", "cut", "lost", "more"])
def test_what_was_lost_or_damaged_is_decoded_again(
    pictures, cache, tmp_path, decoded, damage
):
    assert interrupted(pictures, cache, decoded, 100) >= 10
    (log,) = cache.glob("pictures/*/*/journal")
    second = log.parent / "train-00001.bin"
    if damage == "torn line":
        log.write_bytes(log.read_bytes()[:-30])
    elif damage == "flipped bit":
        content = bytearray(second.read_bytes())
        content[1000] ^= 1
        second.write_bytes(content)
    elif damage == "cut":
        os.truncate(second, 700)
    elif damage == "lost":
        second.unlink()
    else:
        last = max(log.parent.glob("train-*.bin"))
        last.write_bytes(last.read_bytes() + b"more" * shards.SHARD_BYTES)
        (log.parent / "train-00099.bin").write_bytes(b"more")
    decoded.clear()
    kept = interrupted(pictures, cache, decoded, 100)
    again = len(decoded)
    decoded.clear()
    prepared(pictures, cache)
    assert len(decoded) < COUNT - 60, "what was kept before and after the damage"
    assert len(decoded) <= COUNT - (kept - 1) * journal.BATCH, (
        "every line written after the damage is believed"
    )
    assert len(decoded) + again > COUNT - 101
    prepared(pictures, tmp_path / "other")
    assert files_in(cache) == files_in(tmp_path / "other")


def test_only_what_has_changed_is_decoded_again(pictures, cache, tmp_path, decoded):
    prepared(pictures, cache)
    assert len(decoded) == COUNT
    decoded.clear()
    (pictures / "cat/3.png").write_bytes(packed(pixels(999)))
    (pictures / "dog/5.png").unlink()
    write(pictures, "dog/new.png")
    os.utime(pictures / "cat/9.png", (5, 5))
    dataset = prepared(pictures, cache)
    assert sorted(decoded) == ["cat/3.png", "cat/9.png", "dog/new.png"]
    images, _ = everything(dataset)
    assert (images["cat/3.png"] == pixels(999)).all()
    assert "dog/5.png" not in images
    prepared(pictures, tmp_path / "other")
    assert files_in(cache) == files_in(tmp_path / "other")
    assert len([*cache.glob("pictures/*/*/")]) == 1, "the earlier folder is gone"


def test_a_change_in_the_middle_keeps_what_is_prepared(
    pictures, cache, tmp_path, decoded
):
    kept = interrupted(pictures, cache, decoded, 100)
    write(pictures, "cat/0 first.png")
    decoded.clear()
    prepared(pictures, cache)
    assert len(decoded) <= COUNT - 4 * kept + 2
    prepared(pictures, tmp_path / "other")
    assert files_in(cache) == files_in(tmp_path / "other")


def test_damaged_records_are_not_copied(pictures, cache, decoded):
    prepared(pictures, cache)
    (manifest,) = cache.glob("pictures/*/*/manifest.json")
    os.truncate(manifest.parent / "train-00002.bin", 500)
    write(pictures, "dog/new.png")
    decoded.clear()
    images, _ = everything(prepared(pictures, cache))
    assert len(decoded) == 20 + 1
    assert len(images) == COUNT


def test_a_damaged_file_is_an_error_that_names_it(pictures, cache):
    dataset = prepared(pictures, cache)
    (manifest,) = cache.glob("pictures/*/*/manifest.json")
    file = manifest.parent / "train-00001.bin"
    content = file.read_bytes()
    file.write_bytes(content[:50] + b"?" + content[51:])
    with pytest.raises(UsageError, match=r"train-00001\.bin is damaged"):
        dataset.read("train")
    dataset.read("test")
    file.write_bytes(content[:-1])
    with pytest.raises(UsageError, match=r"train-00001\.bin is damaged"):
        dataset.read("train")
    file.unlink()
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        dataset.read("train")


def test_two_at_once_do_the_work_once(pictures, cache, capsys, decoded):
    process = started(pictures, cache)
    while not lines_in(cache):
        assert process.poll() is None
        time.sleep(0.001)
    dataset = prepared(pictures, cache)
    process.communicate()
    assert process.returncode == 0
    assert (
        "Waiting for another process to prepare the pictures" in capsys.readouterr().err
    )
    assert decoded == []
    assert len(everything(dataset)[0]) == COUNT - 1


def test_threads_of_one_process_do_not_collide(pictures, cache, decoded):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(prepared(pictures, cache)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({dataset.fingerprint for dataset in found}) == 1
    assert len(decoded) == COUNT


def test_a_full_disk_is_a_sentence_and_what_is_done_is_kept(
    pictures, cache, decoded, monkeypatch
):
    append = journal.Writer.append
    written = []

    def failing(self, batch, **options):
        written.append(batch)
        if len(written) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(self, batch, **options)

    with monkeypatch.context() as patch:
        patch.setattr(journal.Writer, "append", failing)
        with pytest.raises(UsageError, match=r"disk .* is full.\nWhat is prepared is"):
            prepared(pictures, cache)
    decoded.clear()
    assert len(everything(prepared(pictures, cache))[0]) == COUNT - 1
    assert len(decoded) == COUNT - 20 * 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_disk_that_takes_no_bytes_is_noticed(pictures, cache, monkeypatch):
    def full(self, *_):
        self._file = self._file or open("/dev/full", "wb")  # noqa: PTH123, SIM115
        return self._file

    monkeypatch.setattr(journal.Writer, "_open", full)
    with pytest.raises(UsageError, match=r"The disk of .* is full"):
        prepared(pictures, cache)


def test_where_nothing_may_be_written_is_a_sentence(pictures, cache):
    cache.mkdir()
    (cache / "pictures").write_text("")
    with pytest.raises(UsageError, match="cannot be read or written"):
        prepared(pictures, cache)


def test_without_a_terminal_a_line_now_and_then_says_how_far_it_is(
    pictures, cache, monkeypatch, capsys
):
    monkeypatch.setattr("cifar10.input.pictures.preparation._LOG_SECONDS", 0.0)
    prepared(pictures, cache)
    progress, _, left_out = capsys.readouterr().err.rpartition(" s left\n")
    lines = progress.splitlines()
    assert lines[-1].startswith("Prepared 500 of 500 pictures, ")
    assert all("/s, " in line for line in lines)
    assert "pictures in" in left_out
    assert "are left out:\n    " in left_out
    prepared(pictures, cache)
    assert capsys.readouterr().err == ""
