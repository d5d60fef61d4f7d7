"""Preparing pictures: interrupted, repeated, at the same time, after changes."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cifar10.errors import UsageError
from cifar10.input.pictures import cache as caches, decoding, preparation, shards
from small_folders import (
    everything,
    files_in,
    find,
    home_in,
    numbered,
    packed,
    pixels,
    write,
)

NAMES = numbered(250, "cat", "dog")
COUNT, FEW = len(NAMES), 60
ROOT = Path(__file__).parents[2]

# A process that prepares, slowly enough to be killed at any moment of it.
SLOW = """
import sys, time
from pathlib import Path
from cifar10.input.pictures import decoding, folder, preparation, shards
preparation.BATCH = preparation.PIECE = 4
shards.SHARD_BYTES = 20 * 8 * 8 * 3
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


@pytest.fixture
def few(tmp_path):
    """So many pictures that there are three shards to train on and one to test on."""
    return write(tmp_path / "few", *numbered(FEW // 2, "cat", "dog"))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Several files of records, and many batches, of few pictures."""
    monkeypatch.setattr(preparation, "BATCH", 4)
    monkeypatch.setattr(preparation, "PIECE", 4)
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


def described_in(cache):
    """Returns the descriptions in the one folder of prepared pictures, if any."""
    found = [json.loads(path.read_bytes()) for path in cache.glob("pictures/*/*.json")]
    return [one for one in found if not one["is_piece"]]


def kept_in(cache):
    """Returns how many pictures a killed preparation has left."""
    paths = []
    for path in cache.glob("pictures/*/*.json"):
        try:
            paths += json.loads(path.read_bytes())["keys"][0]
        except FileNotFoundError:  # A piece, whose shard is complete by now.
            continue
    return len(set(paths))


def test_five_kills_change_nothing_and_cost_little(pictures, cache, tmp_path):
    undisturbed = prepared(pictures, tmp_path / "other")
    chance = random.Random(5)
    kept, kills = 0, 0
    while kills < 5:
        process = started(pictures, cache)
        wanted = kept + 4 * chance.randrange(2, 9)
        while kept_in(cache) < wanted and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it had time to finish"
        assert kept_in(cache) >= wanted, "it went on where the last one was"
        kept = kept_in(cache)
        kills += 1
    dataset = prepared(pictures, cache)
    assert files_in(cache) == files_in(tmp_path / "other")
    assert dataset.fingerprint == undisturbed.fingerprint
    assert len(described_in(cache)) > 10, "there are several shards of each part"
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
        # One thread, which decodes one batch after another.
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        patch.setattr(preparation, "_MORE_THREADS", 0)
        with pytest.raises(KeyboardInterrupt):
            prepared(pictures, cache)
    return kept_in(cache)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def in_place_of(make):
    """Puts something else where a file was."""

    def replace(path):
        path.unlink()
        make(path)

    return replace


DAMAGES = {
    "flipped bit": flipped,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "more": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "lost": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "pipe": in_place_of(os.mkfifo),
    "endless": in_place_of(lambda path: path.symlink_to("/dev/zero")),
    "socket": in_place_of(lambda path: os.mknod(path, 0o140600)),
    "link to nothing": in_place_of(lambda path: path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("kind", [".json", ".bin", ".piece"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_lost_or_damaged_is_decoded_again(
    few, cache, tmp_path, decoded, damage, kind
):
    kept = interrupted(few, cache, decoded, 56)
    assert kept == 42 + 12
    files = sorted(home_in(cache).glob(f"*{kind}"))
    DAMAGES[damage](files[len(files) // 2])
    (home_in(cache) / ".new-0123456789abcdef").write_bytes(b"of a killed process")
    decoded.clear()
    dataset = prepared(few, cache)
    if (damage, kind) == ("flipped bit", ".bin"):  # Only who reads it can know.
        with pytest.raises(UsageError, match="was damaged"):
            everything(dataset)
        dataset = prepared(few, cache)
    assert FEW - kept <= len(decoded) <= FEW - kept + 20
    assert len(everything(dataset)[0]) == FEW
    prepared(few, tmp_path / "other")
    assert files_in(cache) == files_in(tmp_path / "other")


def with_value(name, value):
    def change(content):
        return json.dumps({**json.loads(content), name: value}).encode()

    return change


WRONG = {
    "no JSON": lambda content: content[:-1],
    "nothing": lambda content: b"{}",
    "a list": lambda content: b"[]",
    "a number": lambda content: b"3",
    "null": lambda content: b"null",
    "no UTF-8": lambda content: b"\xff\xfe",
    "deep": lambda content: b"[" * 100_000,
    "no keys": with_value("keys", []),
    "keys are a number": with_value("keys", 3),
    "two columns": with_value("keys", [["a"], [1]]),
    "columns of different lengths": with_value("keys", [["a"], [1, 2], [1]]),
    "a path is a number": with_value("keys", [[1], [1], [1]]),
    "a size is a text": with_value("keys", [["a"], ["1"], [1]]),
    "bad is a list": with_value("bad", [1]),
    "bad is elsewhere": with_value("bad", {"500": "why"}),
    "bad is no place": with_value("bad", {"x": "why"}),
    "a reason is null": with_value("bad", {"3": None}),
    "unreadable and not bad": with_value("unreadable", [2]),
    "unreadable is a text": with_value("unreadable", "abc"),
    "another format": with_value("format", 2),
    "a path as SHA-256": with_value("sha256", "../../x"),
    "a number as SHA-256": with_value("sha256", 5),
    "a piece": with_value("is_piece", True),
    "neither": with_value("is_piece", None),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_describes_no_shard_is_prepared_anew(few, cache, decoded, wrong):
    before = prepared(few, cache)
    expected = files_in(cache)
    path = max(home_in(cache).glob("*.json"), key=lambda path: path.stat().st_size)
    content = WRONG[wrong](path.read_bytes())
    path.write_bytes(content)
    # A name that agrees with the content does not make it right.
    name = f"{hashlib.sha256(content).hexdigest()}.json"
    (home_in(cache) / name).write_bytes(content)
    decoded.clear()
    after = prepared(few, cache)
    assert (after.fingerprint, len(decoded) <= 21) == (before.fingerprint, True)
    assert files_in(cache) == expected


def test_labels_are_those_of_the_folders_whatever_the_cache_says(few, cache):
    """Labels are not kept there, so nobody can exchange them."""
    before = prepared(few, cache)
    for path in home_in(cache).glob("*.json"):
        assert not {"label", "labels", "classes"} & json.loads(path.read_bytes()).keys()
    (few / "cat").rename(few / "x")
    (few / "dog").rename(few / "cat")
    (few / "x").rename(few / "dog")
    after = prepared(few, cache)
    assert after.fingerprint != before.fingerprint


# ---- What others have put there


@pytest.fixture
def others(tmp_path):
    """A folder of somebody else's, and its content."""
    folder = tmp_path / "others"
    for name in ("pictures/a.txt", "photos/b/c.txt", "d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def contents_of(folder):
    return {str(p): p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize("level", [0, 1])
def test_a_link_in_the_cache_is_refused_and_nothing_behind_it_changes(
    few, cache, others, level
):
    prepared(few, cache)
    place = (cache / "pictures", home_in(cache))[level]
    shutil.rmtree(place)
    place.symlink_to(others)
    before = contents_of(others)
    with pytest.raises(UsageError, match=f"{place}.*it is a link or a file"):
        prepared(few, cache)
    assert contents_of(others) == before


def test_a_cache_may_itself_be_a_link(pictures, cache, tmp_path):
    (tmp_path / "scratch").mkdir()
    cache.symlink_to(tmp_path / "scratch")
    prepared(pictures, cache)
    assert (tmp_path / "scratch/pictures").is_dir()


def test_only_what_was_made_here_is_removed_or_written(few, cache, others):
    """Links in place of each file, and names that are ours but are no files."""
    prepared(few, cache)
    home = home_in(cache)
    for number, path in enumerate(sorted(home.iterdir())):
        if path.suffix and number % 2:
            path.unlink()
            path.symlink_to(others / "d.txt")
        elif path.suffix:
            os.link(path, others / path.name)
    for name in ("f" * 64 + ".json", "e" * 64 + ".bin", ".new-" + "0" * 16):
        (home / name).symlink_to(others)
    folder = home / ("d" * 64 + ".bin")
    folder.mkdir()
    (folder / "mine.txt").write_bytes(b"mine")
    for name in ("notes.txt", "train-00000.bin", "journal", "manifest.json"):
        (home / name).write_bytes(b"mine")
    before = contents_of(others)
    write(few, "dog/new.png")
    assert len(everything(prepared(few, cache))[0]) == FEW + 1
    assert contents_of(others) == before
    assert (folder / "mine.txt").read_bytes() == b"mine"
    for name in ("notes.txt", "train-00000.bin", "journal", "manifest.json"):
        assert (home / name).read_bytes() == b"mine"
    assert (home / ("e" * 64 + ".bin")).is_symlink()


@pytest.mark.parametrize("damage", ["pipe", "endless", "socket"])
def test_a_lock_that_is_no_file_is_refused(few, cache, damage):
    prepared(few, cache)
    DAMAGES[damage](home_in(cache) / ".lock")
    write(few, "dog/new.png")
    with pytest.raises(UsageError, match=r"\.lock cannot be read or written: "):
        prepared(few, cache)


def test_a_cache_of_another_user_is_not_used(few, cache, monkeypatch):
    prepared(few, cache)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match=r"another user.\n.*XDG_CACHE_HOME"):
        prepared(few, cache)


def test_a_cache_that_others_may_write_to_is_not_used(few, cache):
    prepared(few, cache)
    home_in(cache).chmod(0o777)
    with pytest.raises(UsageError, match=r"may write to it.\n.*XDG_CACHE_HOME"):
        prepared(few, cache)


def test_what_is_prepared_is_nobody_elses_to_read(few, cache):
    prepared(few, cache)
    made = [cache / "pictures", home_in(cache), *home_in(cache).glob("*.*")]
    assert not [p for p in made if p.name != ".lock" and p.stat().st_mode & 0o077]


def test_a_folder_that_is_exchanged_meanwhile_is_not_written_to(
    few, cache, others, monkeypatch
):
    """Whoever may write above the cache may rename it, and put a link there."""
    opened = caches.Folder.locked
    before = contents_of(others)

    def exchanged(self):
        (cache / "pictures").rename(cache / "moved")
        (cache / "pictures").symlink_to(others)
        (others / self.path.name).mkdir()
        return opened(self)

    monkeypatch.setattr(caches.Folder, "locked", exchanged)
    with pytest.raises(UsageError, match="it is a link or a file"):
        prepared(few, cache).read("train")
    (home,) = (cache / "moved").iterdir()
    (others / home.name).rmdir()
    assert contents_of(others) == before
    assert len([*home.glob("*.bin")]) == 4


# ---- Changes


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
    records, others = (
        {name for name in files_in(place) if name.endswith(".bin")}
        for place in (cache, tmp_path / "other")
    )
    assert records == others, "nothing is left of what was"


def test_a_change_in_the_middle_keeps_what_is_prepared(
    pictures, cache, tmp_path, decoded
):
    kept = interrupted(pictures, cache, decoded, 100)
    write(pictures, "cat/0 first.png")
    decoded.clear()
    prepared(pictures, cache)
    assert len(decoded) <= COUNT - kept + 2
    prepared(pictures, tmp_path / "other")
    assert files_in(cache) == files_in(tmp_path / "other")


def test_damaged_records_are_not_copied(pictures, cache, decoded):
    """They have the right size, as records after a failing disk have."""
    dataset = prepared(pictures, cache)
    damaged = home_in(cache) / dataset.prepared.shards["train"][2].file
    flipped(damaged)
    # It moves the shards after the first picture, so all are made anew.
    write(pictures, "cat/0 first.png")
    decoded.clear()
    images, _ = everything(prepared(pictures, cache))
    assert 20 <= len(decoded) <= 20 + 1 + 1
    assert len(images) == COUNT


def test_a_damaged_file_is_named_and_prepared_anew(pictures, cache, decoded):
    dataset = prepared(pictures, cache)
    expected = everything(dataset)[0]
    file = home_in(cache) / dataset.prepared.shards["train"][1].file
    flipped(file)
    with pytest.raises(UsageError, match=rf"{file.name} was damaged"):
        dataset.read("train")
    dataset.read("test")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        dataset.read("train")
    decoded.clear()
    images, _ = everything(prepared(pictures, cache))
    assert len(decoded) == 20
    assert all((images[name] == expected[name]).all() for name in expected)


def test_two_at_once_do_the_work_once(pictures, cache, capsys, decoded):
    process = started(pictures, cache)
    while not kept_in(cache):
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
    keep = caches.NewFile.keep
    written = []

    def failing(self, name, **options):
        written.append(name)
        if len(written) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        keep(self, name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(caches.NewFile, "keep", failing)
        with pytest.raises(UsageError, match=r"disk .* is full.\nWhat is prepared is"):
            prepared(pictures, cache)
    assert not [*home_in(cache).glob(".new-*")]
    kept = kept_in(cache)
    assert kept >= 60
    decoded.clear()
    assert len(everything(prepared(pictures, cache))[0]) == COUNT - 1
    assert len(decoded) == COUNT - kept


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_disk_that_takes_no_bytes_is_noticed(pictures, cache, monkeypatch):
    began = caches.NewFile.__init__

    def full(self, folder):
        began(self, folder)
        self._file.close()
        self._file = open("/dev/full", "wb")  # noqa: PTH123, SIM115

    monkeypatch.setattr(caches.NewFile, "__init__", full)
    with pytest.raises(UsageError, match=r"The disk of .* is full"):
        prepared(pictures, cache)


def test_where_nothing_may_be_written_is_a_sentence(pictures, cache):
    cache.mkdir()
    (cache / "pictures").write_text("")
    with pytest.raises(UsageError, match="it is a link or a file where a folder is"):
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
