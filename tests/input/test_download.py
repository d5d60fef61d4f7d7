"""Archives: from which URL, by how many processes, and unpacked whole or not at all."""

import dataclasses
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import runs
from cifar10.errors import UsageError
from cifar10.input import download
from sites import (
    ARCHIVE,
    CONTENT,
    PAYLOAD,
    archive_of,
    packed,
    refused_url,
    serving,
)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "PAUSE", 0.01)


def fetch(directory, url=None, archive=ARCHIVE):
    return download.fetch(archive, directory, url)


def assert_good(directory):
    target = directory / "images-bin"
    assert (target / "a.bin").read_bytes() == PAYLOAD
    assert (target / "b.bin").read_bytes() == b"b"
    names = {path.name for path in directory.iterdir()}
    assert names == {"images-bin", "images.tar.gz", ".images.tar.gz.lock"}


def fails(directory, url):
    """Returns the message of a download that fails and publishes nothing."""
    with pytest.raises(UsageError) as caught:
        fetch(directory, url)
    assert not (directory / "images-bin").exists()
    assert not (directory / "images.tar.gz").exists()
    return str(caught.value)


def test_published_urls_folders_and_files_are_taken_and_asked_once(tmp_path):
    source = tmp_path / "source.tar.gz"
    source.write_bytes(CONTENT)
    with serving() as site:
        own = dataclasses.replace(ARCHIVE, url=site.url)
        download.fetch(own, tmp_path / "1")
        for _ in range(2):
            fetch(tmp_path / "new" / "2", site.url.removesuffix("images.tar.gz"))
    assert site.asked == [None, None]
    fetch(tmp_path / "3", source.as_uri())
    for name in ("1", "new/2", "3"):
        assert_good(tmp_path / name)


def test_corrupt_bytes_are_not_kept(tmp_path):
    corrupt = bytes(1) + CONTENT[1:]
    with serving(content=corrupt) as bad, serving() as good:
        assert ARCHIVE.md5 in fails(tmp_path, bad.url)
        assert not (tmp_path / "images.tar.gz.part").exists()
        # And another URL starts afresh.
        fetch(tmp_path, good.url)
    assert good.asked == [None]
    assert_good(tmp_path)


def test_a_scheduler_tries_again_where_a_server_is_down(tmp_path):
    """A missing archive is the user's to correct; a server that is down is not."""
    with serving(statuses=[404] * 9) as missing:
        for code, url in ((75, refused_url()), (2, missing.url)):
            with pytest.raises(UsageError) as caught:
                fetch(tmp_path, url)
            assert caught.value.exit_code == code
    assert len(missing.asked) == 1


def test_an_archive_that_reaches_outside_is_refused(tmp_path):
    evil = {"images-bin/../../outside.bin": b"evil"}
    content = packed({"images-bin/a.bin": b"a", **evil})
    source = tmp_path / "evil.tar.gz"
    source.write_bytes(content)
    with pytest.raises(UsageError, match="outside"):
        fetch(tmp_path / "data", source.as_uri(), archive=archive_of(content))
    assert not list(tmp_path.rglob("outside.bin"))
    assert not (tmp_path / "data" / "images-bin").exists()


def test_an_archive_of_the_users_own_is_unpacked_or_left_alone(tmp_path):
    source = tmp_path / "images.tar.gz"
    for content in (CONTENT[:-1], bytes(1) + CONTENT[1:]):
        source.write_bytes(content)
        with pytest.raises(UsageError, match=source.name):
            fetch(tmp_path)
        assert source.read_bytes() == content
        assert not (tmp_path / "images-bin").exists()
    source.write_bytes(CONTENT)
    assert fetch(tmp_path) == tmp_path / "images-bin"
    assert_good(tmp_path)


PROGRAM = """
import json, os, resource, signal, sys, tarfile
from pathlib import Path
from cifar10.input import download
from cifar10.errors import UsageError
archive, directory, url, trouble = json.loads(sys.argv[1])
if trouble == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
if trouble == "killed":
    def extractall(tar, path, filter):
        tar.extract(tar.next(), path, filter=filter)
        os.kill(os.getpid(), signal.SIGKILL)
    tarfile.TarFile.extractall = extractall
try:
    download.fetch(download.Archive(**archive), Path(directory), url)
except UsageError as error:
    sys.exit(str(error))
"""


def start(directory, url, trouble=""):
    """Starts a download in a process of its own."""
    arguments = [dataclasses.asdict(ARCHIVE), str(directory), url, trouble]
    return runs.started("-c", PROGRAM, json.dumps(arguments))


def test_two_at_once_download_once(tmp_path, capsys):
    with serving(delay=0.01) as site, ThreadPoolExecutor(2) as threads:
        found = [threads.submit(fetch, tmp_path, site.url) for _ in range(2)]
        assert {each.result() for each in found} == {tmp_path / "images-bin"}
    assert len(site.asked) == 1
    assert "Waiting" in capsys.readouterr().err
    assert_good(tmp_path)


def test_a_killed_download_is_continued(tmp_path):
    part = tmp_path / "images.tar.gz.part"
    with serving(delay=0.05) as site:
        with start(tmp_path, site.url) as process:
            while not part.exists() or part.stat().st_size < 100_000:
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        kept = part.stat().st_size
        assert 100_000 <= kept < len(CONTENT)
        assert not (tmp_path / "images-bin").exists()
        site.delay = 0.0
        fetch(tmp_path, site.url)
    assert site.asked == [None, f"bytes={kept}-"]
    assert_good(tmp_path)


def test_an_unpacking_that_was_killed_is_repeated(tmp_path):
    with serving() as site:
        with start(tmp_path, site.url, "killed") as process:
            assert process.wait(timeout=60) == -signal.SIGKILL
        assert not (tmp_path / "images-bin").exists()
        assert (tmp_path / ".images-bin.unpacking").exists()
        fetch(tmp_path, site.url)
    # The verified archive was there, so nothing is downloaded again.
    assert site.asked == [None]
    assert_good(tmp_path)


def test_a_full_disk_is_said_and_costs_nothing(tmp_path):
    with serving() as site:
        with start(tmp_path, site.url, "full") as process:
            message = process.communicate(timeout=60)[1]
        assert process.returncode == 1
        assert "space" in message
        assert "Traceback" not in message
        assert not (tmp_path / "images-bin").exists()
        fetch(tmp_path, site.url)
    assert_good(tmp_path)


def test_a_servers_answer_commands_no_terminal(tmp_path):
    answer = b"HTTP/1.1 404 \x1b]0;owned\x07\r\n\r\n"
    with serving(raw=answer) as site:
        message = fails(tmp_path, site.url)
    assert r"404 \x1b]0;owned\x07" in message
