"""Preparing pictures: interrupted, repeated, at the same time, after changes."""

import errno
import json
import os
import shutil
import signal
import threading
import time

import pytest

import runs
from cifar10 import files
from cifar10.errors import UsageError
from cifar10.input.pictures import cache as caches, decoding, shards
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

NAMES = numbered(30, "cat", "dog")
COUNT = len(NAMES)
SHARD = 16  # Pictures; so there are four shards.

# A process that prepares, slowly enough to be killed at any moment of it.
SLOW = f"""
import sys, time
from pathlib import Path
from cifar10.input.pictures import dataset, decoding, shards
shards.SHARD_PICTURES = {SHARD}
fast = decoding.decode
def decode(*arguments, **options):
    time.sleep(0.03)
    return fast(*arguments, **options)
decoding.decode = decode
how = dict(image_size=8, validation_fraction=0.3, max_bad_images=0.1)
dataset.find_folder(Path(sys.argv[1]), Path(sys.argv[2]), **how)
"""


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def pictures(tmp_path):
    return write(tmp_path / "pictures", *NAMES)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Makes several shards, and many batches, of few pictures."""
    monkeypatch.setattr(shards, "SHARD_PICTURES", SHARD)


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


def shards_in(cache):
    """Returns the complete shards, whether the manifest has them or not yet."""
    return [*cache.glob("pictures/*/*.bin")]


def test_two_kills_change_nothing_and_cost_a_shard(pictures, cache, decoded, tmp_path):
    (pictures / "cat/7.png").write_bytes(b"broken")
    for kept in (1, 3):
        with started(pictures, cache) as process:
            while len(shards_in(cache)) < kept and process.poll() is None:
                time.sleep(0.001)
            process.kill()
        assert process.returncode == -signal.SIGKILL, "it had time to finish"
    dataset = prepared(pictures, cache)
    # Of the third shard, the manifest may not have known.
    assert len(decoded) <= COUNT - 2 * SHARD, "it went on where the last one was"
    assert dataset.fingerprint == prepared(pictures, tmp_path / "other").fingerprint
    assert files_in(cache) == files_in(tmp_path / "other")
    assert len(everything(dataset)[0]) == COUNT - 1


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


DAMAGES = [flip, to_pipe, to_zeros, halve, os.unlink]


def test_pictures_lost_between_preparation_and_reading_are_explained(pictures, cache):
    dataset = prepared(pictures, cache)
    for path in home_in(cache).glob("*.bin"):
        path.unlink()
    with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
        everything(dataset)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["manifest.json", "*.bin"])
def test_lost_or_damaged_files_are_prepared_again(
    pictures, cache, expected, decoded, damage, kind
):
    prepared(pictures, cache)
    damage(max(home_in(cache).glob(kind)))
    of_a_killed_process = home_in(cache) / f".{'0' * 64}.bin-1234"
    of_a_killed_process.write_bytes(b"half")
    decoded.clear()
    dataset = prepared(pictures, cache)
    assert 0 < len(decoded) <= (COUNT if kind == "manifest.json" else SHARD)
    assert dataset.fingerprint == expected[0].fingerprint
    assert len(everything(dataset)[0]) == COUNT
    assert files_in(cache) == expected[1]


def test_a_damaged_manifest_is_replaced_even_if_it_is_valid_json(
    pictures, cache, expected, decoded
):
    """A whole picture would be left out."""
    prepared(pictures, cache)
    manifest = home_in(cache) / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content.replace(b"{}", b'{"cat/0.png": "why"}', 1))
    assert manifest.read_bytes() != content
    decoded.clear()
    assert prepared(pictures, cache).fingerprint == expected[0].fingerprint
    assert len(decoded) == COUNT


@pytest.mark.parametrize(
    "change",
    [
        lambda shards: None,
        lambda shards: {},
        lambda shards: [shards],
        lambda shards: [*shards],
        lambda shards: {file: [sha256] for file, (sha256, _) in shards.items()},
        lambda shards: {k: [v[0], ["why"]] for k, v in shards.items()},
    ],
)
def test_malformed_manifests_are_rebuilt(pictures, cache, expected, decoded, change):
    prepared(pictures, cache)
    path = home_in(cache) / "manifest.json"
    values = json.loads(path.read_bytes().partition(b"\n")[2])
    caches.save(path, change(values))
    decoded.clear()
    assert prepared(pictures, cache).fingerprint == expected[0].fingerprint
    assert decoded
    assert files_in(cache) == expected[1]


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


def test_only_files_of_the_cache_are_removed_or_written(pictures, cache, others):
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
    mine = [home / ("d" * 64 + ".bin") / "mine.txt", home / "notes.txt"]
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


def test_a_cache_of_another_owner_or_open_to_others_is_not_used(
    pictures, cache, monkeypatch
):
    prepared(pictures, cache)
    for folder in (cache / "pictures", home_in(cache)):
        assert not folder.stat().st_mode & 0o077
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
            prepared(pictures, cache)
    home_in(cache).chmod(0o777)
    with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
        prepared(pictures, cache)


# ---- changes


def test_a_shard_with_changed_pictures_is_decoded_again(pictures, cache, decoded):
    prepared(pictures, cache)
    assert len(decoded) == COUNT
    decoded.clear()
    (pictures / "dog/5.png").unlink()
    (pictures / "dog/6.png").write_bytes(packed(pixels(999)))
    write(pictures, "dog/new.png")
    dataset = prepared(pictures, cache)
    assert not [name for name in decoded if name.startswith("cat")][COUNT - 2 * SHARD :]
    assert "cat/0.png" not in decoded
    images, _ = everything(dataset)
    assert (images["dog/6.png"] == pixels(999)).all()
    assert len(images) == COUNT
    assert "dog/5.png" not in images
    assert len(shards_in(cache)) == 4, "what belongs to other pictures is gone"


def test_another_division_reuses_the_decoded_pictures(pictures, cache, decoded):
    """Two runs may have divided the same pictures in different ways."""
    one = prepared(pictures, cache)
    decoded.clear()
    other = find(pictures, cache, validation_fraction=0.5)
    assert other.fingerprint != one.fingerprint
    assert everything(other)[1] > everything(one)[1]
    assert prepared(pictures, cache).fingerprint == one.fingerprint
    assert decoded == []


def test_concurrent_preparations_decode_each_picture_once(
    pictures, cache, capsys, decoded
):
    with started(pictures, cache) as process:
        while not shards_in(cache):
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


def test_a_full_disk_is_reported_and_the_prepared_pictures_are_kept(
    pictures, cache, decoded, monkeypatch
):
    sync = files.sync

    def failing(path):
        if len(shards_in(cache)) == 2 and ".bin" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", failing)
        with pytest.raises(UsageError, match=r"[0-9a-f]{16}: No space left"):
            prepared(pictures, cache)
    assert not [*home_in(cache).glob(".*-*")]
    decoded.clear()
    assert len(everything(prepared(pictures, cache))[0]) == COUNT
    assert len(decoded) == COUNT - 2 * SHARD


def test_damaged_metadata_is_neither_reported_nor_a_reason_to_leave_out(
    cache, pictures
):
    """Pillow would warn without the name of the file; here a warning is an error."""
    damaged = packed(pixels(0), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x02\0\x12\x01")
    (pictures / "cat/0.png").write_bytes(damaged)
    assert not find(pictures, cache).left_out
