"""Preparing pictures: interrupted, repeated, at the same time, after changes."""

import errno
import hashlib
import json
import os
import shutil
import signal
import threading
import time

import pytest

import runs
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

# So many pictures that there are three shards to train on and one to test on.
NAMES = numbered(30, "cat", "dog")
COUNT = len(NAMES)

# A process that prepares, slowly enough to be killed at any moment of it.
SLOW = """
import sys, time
from pathlib import Path
from cifar10.input.pictures import decoding, folder, preparation, shards
preparation.BATCH = preparation.PIECE = 4
shards.SHARD_BYTES = 20 * 8 * 8 * 3
fast = decoding.decode
def decode(*arguments, **options):
    time.sleep(0.03)
    return fast(*arguments, **options)
decoding.decode = decode
folder.find(Path(sys.argv[1]), image_size=8, validation_fraction=0.3,
            max_bad_images=0.1, cache=Path(sys.argv[2]))
"""


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def pictures(tmp_path):
    return write(tmp_path / "pictures", *NAMES)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Makes several files of records, and many batches, of few pictures."""
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


@pytest.fixture
def expected(pictures, tmp_path):
    """The data set and its files, prepared elsewhere without interruption."""
    return prepared(pictures, tmp_path / "other"), files_in(tmp_path / "other")


def started(pictures, cache):
    return runs.started("-c", SLOW, pictures, cache)


def kept_in(cache):
    """Returns how many pictures a killed preparation has left."""
    paths = []
    for path in cache.glob("pictures/*/*.json"):
        try:
            paths += json.loads(path.read_bytes())["keys"][0]
        except FileNotFoundError:  # A piece, whose shard is complete by now.
            continue
    return len(set(paths))


def test_two_kills_change_nothing_and_cost_little(pictures, cache, tmp_path):
    write(pictures, *numbered(60, "cat", "dog"))
    (pictures / "cat/7.png").write_bytes(b"broken")
    kept = 0
    for wanted in (12, 60):
        with started(pictures, cache) as process:
            while kept_in(cache) < wanted and process.poll() is None:
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -signal.SIGKILL, "it had time to finish"
        assert kept_in(cache) >= max(kept, wanted), "it went on where the last one was"
        kept = kept_in(cache)
    dataset = prepared(pictures, cache)
    assert dataset.fingerprint == prepared(pictures, tmp_path / "other").fingerprint
    assert files_in(cache) == files_in(tmp_path / "other")
    assert len(everything(dataset)[0]) == 119


def interrupted(pictures, cache, undisturbed, after):
    """Prepares until a picture is decoded before which so many are."""
    order = [p for part in ("train", "test") for p in undisturbed.prepared.paths(part)]
    real = decoding.decode

    def failing(content, name, *arguments, **options):
        if name == order[after]:
            raise KeyboardInterrupt
        return real(content, name, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "decode", failing)
        with pytest.raises(KeyboardInterrupt):
            prepared(pictures, cache)
    return kept_in(cache)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def to_pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def to_zeros(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        *[(flip, kind) for kind in (".json", ".bin", ".piece")],
        (to_pipe, ".bin"),
        (to_zeros, ".json"),
        (halve, ".bin"),
    ],
)
def test_lost_or_damaged_files_are_decoded_again(
    pictures, cache, expected, decoded, damage, kind
):
    kept = interrupted(pictures, cache, expected[0], 56)
    assert kept == 42 + 12
    files = sorted(home_in(cache).glob(f"*{kind}"))
    damage(files[len(files) // 2])
    (home_in(cache) / ".new-0123456789abcdef").write_bytes(b"of a killed process")
    decoded.clear()
    dataset = prepared(pictures, cache)
    if (damage, kind) == (flip, ".bin"):  # Only who reads it can know.
        with pytest.raises(UsageError, match="damaged"):
            everything(dataset)
        dataset = prepared(pictures, cache)
    assert COUNT - kept <= len(decoded) <= COUNT - kept + 20
    assert len(everything(dataset)[0]) == COUNT
    assert files_in(cache) == expected[1]


def with_value(name, value):
    def change(content):
        return json.dumps({**json.loads(content), name: value}).encode()

    return change


WRONG = [
    lambda content: b"null",
    lambda content: b"[" * 100_000,
    with_value("keys", [[1], [1], [1]]),
    with_value("bad", {"500": "why"}),
    with_value("unreadable", [2]),
    with_value("format", 2),
    with_value("sha256", "../../x"),
]


def test_wrong_descriptions_are_prepared_anew(pictures, cache, decoded):
    before = prepared(pictures, cache)
    expected = files_in(cache)
    for wrong in WRONG:
        path = max(home_in(cache).glob("*.json"), key=lambda path: path.stat().st_size)
        # Labels are not kept there, so nobody can exchange them.
        assert not {"labels", "classes"} & json.loads(path.read_bytes()).keys()
        content = wrong(path.read_bytes())
        path.write_bytes(content)
        # A name that agrees with the content does not make it right.
        name = f"{hashlib.sha256(content).hexdigest()}.json"
        (home_in(cache) / name).write_bytes(content)
        decoded.clear()
        assert prepared(pictures, cache).fingerprint == before.fingerprint
        assert len(decoded) <= 21
        assert files_in(cache) == expected


# ---- files of others in the cache


@pytest.fixture
def others(tmp_path):
    """A folder of somebody else's."""
    folder = tmp_path / "others"
    for name in ("pictures/a.txt", "photos/b/c.txt", "d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


def contents_of(folder):
    return {str(p): p.is_file() and p.read_bytes() for p in folder.rglob("*")}


@pytest.mark.parametrize("level", [0, 1])
def test_a_link_in_the_cache_is_refused_and_nothing_behind_it_changes(
    pictures, cache, others, level
):
    prepared(pictures, cache)
    place = (cache / "pictures", home_in(cache))[level]
    shutil.rmtree(place)
    place.symlink_to(others)
    before = contents_of(others)
    with pytest.raises(UsageError, match=f"{place}.*link"):
        prepared(pictures, cache)
    assert contents_of(others) == before
    cache.rename(others.parent / "elsewhere")
    cache.symlink_to(others.parent / "elsewhere")  # The cache may itself be one.
    (others.parent / "elsewhere" / place.relative_to(cache)).unlink()
    prepared(pictures, cache)


def test_only_own_files_are_removed_or_written(pictures, cache, others):
    """Links in place of each file, and own names of other things."""
    prepared(pictures, cache)
    home = home_in(cache)
    for number, path in enumerate(sorted(home.iterdir())):
        if path.suffix and number % 2:
            path.unlink()
            path.symlink_to(others / "d.txt")
        elif path.suffix:
            os.link(path, others / path.name)
    for name in ("f" * 64 + ".json", "e" * 64 + ".bin", ".new-" + "0" * 16):
        (home / name).symlink_to(others)
    mine = [home / ("d" * 64 + ".bin") / "mine.txt"]
    mine += [home / name for name in ("notes.txt", "train-00000.bin", "manifest.json")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    before = contents_of(others)
    write(pictures, "dog/new.png")
    assert len(everything(prepared(pictures, cache))[0]) == COUNT + 1
    assert contents_of(others) == before
    assert all(path.read_bytes() == b"mine" for path in mine)


def test_only_a_file_is_taken_for_the_lock(pictures, cache):
    prepared(pictures, cache)
    to_pipe(home_in(cache) / ".lock")
    write(pictures, "dog/new.png")
    with pytest.raises(UsageError, match=r"\.lock"):
        prepared(pictures, cache)


def test_a_cache_that_others_own_or_may_write_to_is_not_used(
    pictures, cache, monkeypatch
):
    prepared(pictures, cache)
    made = [cache / "pictures", home_in(cache), *home_in(cache).glob("*.*")]
    assert not [p for p in made if p.name != ".lock" and p.stat().st_mode & 0o077]
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
            prepared(pictures, cache)
    home_in(cache).chmod(0o777)
    with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
        prepared(pictures, cache)


# ---- changes


def test_only_changed_pictures_are_decoded_again(pictures, cache, decoded):
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


def test_damaged_records_are_named_and_not_copied(pictures, cache, decoded):
    """They have the right size, as records after a failing disk have."""
    dataset = prepared(pictures, cache)
    expected = everything(dataset)[0]
    file = home_in(cache) / dataset.prepared.shards["train"][1].file
    flip(file)
    with pytest.raises(UsageError, match=file.name):
        dataset.read("train")
    dataset.read("test")
    decoded.clear()
    flip(home_in(cache) / dataset.prepared.shards["train"][2].file)
    # It moves the shards after the first picture, so all are made anew.
    write(pictures, "cat/0 first.png")
    images, _ = everything(prepared(pictures, cache))
    assert 22 <= len(decoded) <= 22 + 1 + 1
    assert all((images[name] == expected[name]).all() for name in expected)


def test_two_at_once_do_the_work_once(pictures, cache, capsys, decoded):
    with started(pictures, cache) as process:
        while not kept_in(cache):
            assert process.poll() is None
            time.sleep(0.001)
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(prepared(pictures, cache)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert process.wait() == 0
    assert "Waiting" in capsys.readouterr().err
    assert decoded == []
    assert len({dataset.fingerprint for dataset in found}) == 1
    assert len(everything(found[0])[0]) == COUNT


def test_a_full_disk_is_said_and_the_prepared_pictures_are_kept(
    pictures, cache, decoded, monkeypatch
):
    keep, written = caches.NewFile.keep, []

    def failing(self, name, **options):
        written.append(name)
        if len(written) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        keep(self, name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(caches.NewFile, "keep", failing)
        with pytest.raises(UsageError, match="full"):
            prepared(pictures, cache)
    assert not [*home_in(cache).glob(".new-*")]
    kept = kept_in(cache)
    assert kept >= 20
    decoded.clear()
    assert len(everything(prepared(pictures, cache))[0]) == COUNT
    assert len(decoded) == COUNT - kept
