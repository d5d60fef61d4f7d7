"""Archives: from which URL, by how many processes, and unpacked whole or not at all."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cifar10.errors import UsageError
from cifar10.input import download, transfer
from sites import (
    ARCHIVE,
    CONTENT,
    PAYLOAD,
    QUICK,
    archive_of,
    packed,
    refused_url,
    serving,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


def fetch(directory, *urls, archive=ARCHIVE):
    return download.fetch(archive, directory, urls, QUICK)


def assert_good(directory):
    target = directory / "images-bin"
    assert (target / "a.bin").read_bytes() == PAYLOAD
    assert (target / "b.bin").read_bytes() == b"b"
    names = {path.name for path in directory.iterdir()}
    assert names == {"images-bin", "images.tar.gz", ".images.tar.gz.lock"}


def fails(directory, *urls, archive=ARCHIVE):
    """Returns the message of a download that fails and publishes nothing."""
    with pytest.raises(UsageError) as caught:
        fetch(directory, *urls, archive=archive)
    assert not (directory / "images-bin").exists()
    assert not (directory / "images.tar.gz").exists()
    return str(caught.value)


def test_a_good_server(tmp_path):
    with serving() as site:
        assert fetch(tmp_path / "new" / "data", site.url) == (
            tmp_path / "new" / "data" / "images-bin"
        )
        # The second call finds the work done.
        fetch(tmp_path / "new" / "data", site.url)
    assert site.asked == [None]
    assert_good(tmp_path / "new" / "data")


def test_the_published_url_and_a_folder_url(tmp_path):
    with serving() as site:
        own = dataclasses.replace(ARCHIVE, url=site.url)
        download.fetch(own, tmp_path / "1")
        fetch(tmp_path / "2", site.url.removesuffix("images.tar.gz"))
    assert_good(tmp_path / "1")
    assert_good(tmp_path / "2")


def test_a_file_url(tmp_path):
    source = tmp_path / "source.tar.gz"
    source.write_bytes(CONTENT)
    fetch(tmp_path / "data", source.as_uri())
    assert_good(tmp_path / "data")


def test_corrupt_bytes_are_not_kept(tmp_path):
    corrupt = bytes(1) + CONTENT[1:]
    with serving(content=corrupt) as bad, serving() as good:
        message = fails(tmp_path, bad.url)
        assert not (tmp_path / "images.tar.gz.part").exists()
        # And the next URL starts afresh.
        fetch(tmp_path, bad.url, good.url)
    assert f"does not have the MD5 {ARCHIVE.md5}" in message
    assert good.asked == [None]
    assert_good(tmp_path)


def test_not_found_then_a_mirror(tmp_path):
    with serving(statuses=[404] * 9) as missing, serving() as mirror:
        assert "HTTP 404" in fails(tmp_path, missing.url)
        assert len(missing.asked) == 1
        fetch(tmp_path, missing.url, refused_url(), mirror.url)
    assert_good(tmp_path)


def test_a_scheduler_tries_again_what_a_server_may_still_give(tmp_path):
    """A missing archive is the user's to correct; a server that is down is not."""
    with serving(statuses=[404] * 9) as missing:
        for code, *urls in (
            (75, refused_url()),
            (75, missing.url, refused_url()),
            (2, missing.url),
        ):
            with pytest.raises(UsageError) as caught:
                fetch(tmp_path, *urls)
            assert caught.value.exit_code == code


@pytest.mark.parametrize("name", ["../outside.bin", "images-bin/../../outside.bin"])
def test_an_archive_that_reaches_outside(tmp_path, name):
    content = packed({"images-bin/a.bin": b"a", name: b"evil"})
    source = tmp_path / "evil.tar.gz"
    source.write_bytes(content)
    with pytest.raises(UsageError, match=r"cannot be unpacked: .*outside"):
        fetch(tmp_path / "data", source.as_uri(), archive=archive_of(content))
    assert not list(tmp_path.rglob("outside.bin"))
    assert not (tmp_path / "data" / "images-bin").exists()


def test_an_archive_of_the_users_own(tmp_path):
    source = tmp_path / "images.tar.gz"
    source.write_bytes(CONTENT)
    assert fetch(tmp_path) == tmp_path / "images-bin"
    assert_good(tmp_path)


@pytest.mark.parametrize("content", [CONTENT[:-1], bytes(1) + CONTENT[1:]])
def test_a_wrong_archive_of_the_users_own_is_left_alone(tmp_path, content):
    source = tmp_path / "images.tar.gz"
    source.write_bytes(content)
    with pytest.raises(UsageError, match="is not the published images"):
        fetch(tmp_path)
    assert source.read_bytes() == content
    assert not (tmp_path / "images-bin").exists()


def test_a_right_archive_that_is_no_tar(tmp_path):
    source = tmp_path / "images.tar.gz"
    source.write_bytes(b"not a tar file")
    with pytest.raises(UsageError, match="cannot be unpacked"):
        fetch(tmp_path, archive=archive_of(b"not a tar file"))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file.* cannot be read or written"):
        fetch(tmp_path / "file" / "data", refused_url())


def test_urls_of_the_flag():
    parsed = download.parse_urls(" https://a/x.tar.gz, http://b/ ,,file:///c ")
    assert parsed == ("https://a/x.tar.gz", "http://b/", "file:///c")
    assert download.parse_urls(None) == download.parse_urls("") == ()
    for wrong in ("ftp://a/b", "/a/b", "a.example/b"):
        with pytest.raises(UsageError, match=f"--data_url {wrong} cannot"):
            download.parse_urls(f"http://good/,{wrong}")


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
    download.fetch(download.Archive(**archive), Path(directory), [url])
except UsageError as error:
    sys.exit(str(error))
"""


def start(directory, url, trouble=""):
    """Starts a download in a process of its own."""
    arguments = [dataclasses.asdict(ARCHIVE), str(directory), url, trouble]
    command = [sys.executable, "-c", PROGRAM, json.dumps(arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def test_two_processes_at_once(tmp_path):
    with serving(delay=0.02) as site:
        processes = [start(tmp_path, site.url) for _ in range(2)]
        errors = [process.communicate(timeout=20)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert len(site.asked) == 1
    assert "Waiting for another process" in "".join(errors)
    assert_good(tmp_path)


def test_a_killed_download_is_continued(tmp_path):
    part = tmp_path / "images.tar.gz.part"
    with serving(delay=0.05) as site:
        process = start(tmp_path, site.url)
        deadline = time.monotonic() + 20
        while transfer.length(part) < 100_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
        kept = transfer.length(part)
        assert 100_000 <= kept < len(CONTENT)
        assert not (tmp_path / "images-bin").exists()
        site.delay = 0.0
        fetch(tmp_path, site.url)
    assert site.asked == [None, f"bytes={kept}-"]
    assert_good(tmp_path)


def test_killed_while_unpacking(tmp_path):
    with serving() as site:
        process = start(tmp_path, site.url, "killed")
        process.communicate(timeout=20)
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "images-bin").exists()
        assert (tmp_path / ".images-bin.unpacking").exists()
        fetch(tmp_path, site.url)
    # The verified archive was there, so nothing is downloaded again.
    assert site.asked == [None]
    assert_good(tmp_path)


def test_a_full_disk(tmp_path):
    with serving() as site:
        process = start(tmp_path, site.url, "full")
        message = process.communicate(timeout=20)[1]
        assert process.returncode == 1
        assert "Free some space" in message
        assert "Traceback" not in message
        assert not (tmp_path / "images-bin").exists()
        fetch(tmp_path, site.url)
    assert_good(tmp_path)


def test_what_a_server_says_commands_no_terminal(tmp_path):
    def answer():
        connection, _ = server.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall(b"HTTP/1.1 404 \x1b]0;owned\x07\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(UsageError) as error:
            fetch(tmp_path, url)
    assert r"HTTP 404 \x1b]0;owned\x07)" in str(error.value)
