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


def fetch(directory, url=None, archive=ARCHIVE, source=None):
    return download.fetch(archive, directory, url, source)


def assert_good(directory):
    target = directory / "images-bin"
    assert (target / "a.bin").read_bytes() == PAYLOAD
    assert (target / "b.bin").read_bytes() == b"b"
    names = {path.name for path in directory.iterdir()}
    assert names == {"images-bin", ".images.tar.gz.lock"}


def fails(directory, url):
    """Returns the error of a download that fails and leaves nothing."""
    with pytest.raises(UsageError) as caught:
        fetch(directory, url)
    assert [path.name for path in directory.iterdir()] == [".images.tar.gz.lock"]
    return caught.value


def test_published_urls_folders_and_files_are_taken_and_asked_once(
    tmp_path, monkeypatch
):
    source = tmp_path / "source.tar.gz"
    source.write_bytes(CONTENT)
    with serving() as site:
        of_folder = site.url.removesuffix("images.tar.gz")
        monkeypatch.setattr(download, "URL", of_folder)
        fetch(tmp_path / "1")
        for _ in range(2):
            fetch(tmp_path / "new" / "2", of_folder)
    assert site.asked == 2
    fetch(tmp_path / "3", source.as_uri())
    for name in ("1", "new/2", "3"):
        assert_good(tmp_path / name)


@pytest.mark.parametrize(
    "attributes",
    [{"content": bytes(1) + CONTENT[1:]}, {"cut": 150_000}],
    ids=["corrupt", "cut"],
)
def test_corrupt_bytes_are_not_kept(tmp_path, attributes):
    with serving(**attributes) as bad, serving() as good:
        assert ARCHIVE.md5 in str(fails(tmp_path, bad.url))
        fetch(tmp_path, good.url)
    assert_good(tmp_path)


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        ({"status": 404}, 2),
        ({"status": 503}, 75),
        ({"raw": OK, "delay": 0.6}, 75),
        ({"raw": CHUNKED + b"-5\r\n" + bytes(500)}, 2),
        ({"raw": CHUNKED + b"\xff\r\n" + bytes(500)}, 2),
    ],
    ids=["missing", "down", "silent", "negative", "no number"],
)
def test_a_scheduler_tries_again_where_a_server_is_down(
    tmp_path, attributes, code, monkeypatch
):
    """A missing archive is the user's to correct; a server that is down is not."""
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with serving(**attributes) as site:
        assert fails(tmp_path, site.url).exit_code == code
    assert site.asked == 1


def test_urls_that_lead_nowhere_are_refused(tmp_path):
    for url, code in (
        (refused_url(), 75),
        ("http://[", 2),
        ("images.tar.gz", 2),
        ("nfs://server/images.tar.gz", 2),
    ):
        error = fails(tmp_path, url)
        assert error.exit_code == code
        assert url in str(error)


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
    source, home = tmp_path / "images.tar.gz", tmp_path / "home"
    for content in (CONTENT[:-1], bytes(1) + CONTENT[1:]):
        source.write_bytes(content)
        with pytest.raises(UsageError, match=source.name):
            fetch(home, source=source)
        assert source.read_bytes() == content
        assert not (home / "images-bin").exists()
    source.write_bytes(CONTENT)
    assert fetch(home, source=source) == home / "images-bin"
    assert_good(home)
    assert source.read_bytes() == CONTENT


PROGRAM = """
import json, os, resource, signal, sys, tarfile
from pathlib import Path
from cifar10.input import download, records
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
    download.fetch(records.Format(**archive), Path(directory), url)
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
    assert site.asked == 1
    assert "Waiting" in capsys.readouterr().err
    assert_good(tmp_path)


def test_a_download_and_an_unpacking_that_were_killed_are_repeated(tmp_path):
    part = tmp_path / ".images-bin.unpacking" / "images.tar.gz"
    with serving(delay=0.05) as site:
        with start(tmp_path, site.url) as process:
            while not part.exists() or part.stat().st_size < 100_000:
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        site.delay = 0.0
        with start(tmp_path, site.url, "killed") as process:
            assert process.wait(timeout=60) == -signal.SIGKILL
        assert part.exists()
        assert not (tmp_path / "images-bin").exists()
        fetch(tmp_path, site.url)
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
        message = str(fails(tmp_path, site.url))
    assert r"404: \x1b]0;owned\x07" in message
