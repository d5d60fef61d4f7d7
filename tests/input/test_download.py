"""Archives: received from which source, continued where, and unpacked whole or not."""

import dataclasses
import re
import signal
import tarfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

import runs
from cifar10.errors import UnavailableError, UsageError
from cifar10.input import download
from sites import (
    ARCHIVE,
    CONTENT,
    PAYLOAD,
    archive_of,
    packed,
    published,
    refused_url,
    serving,
)

LOCK, PART = ".cifar10.lock", ".images.tar.gz.part"
OTHER = bytes(1) + CONTENT[1:]  # As long, and no archive.


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """No proxy; only a small part of what is kept is asked for again."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "OVERLAP", 1_000)


def fetch(directory, url=None, archive=ARCHIVE):
    file_format, folder = download.fetch([archive], directory, url)
    assert file_format is archive
    return folder


def with_urls(*urls, name="images.tar.gz", content=CONTENT, folder="images-bin"):
    archive = published(name, content, *urls)
    return dataclasses.replace(ARCHIVE, archive=archive, folder=folder)


def assert_good(directory):
    target = directory / "images-bin"
    assert (target / "a.bin").read_bytes() == PAYLOAD
    assert (target / "b.bin").read_bytes() == b"b"
    assert {path.name for path in directory.iterdir()} == {"images-bin", LOCK}


def fails(directory, url=None, archive=ARCHIVE, kept=0):
    """Returns the error of a download that leaves no more than `kept` bytes."""
    with pytest.raises(UsageError) as caught:
        fetch(directory, url, archive)
    assert not (directory / archive.folder).exists()
    sizes = [path.stat().st_size for path in directory.glob(".*.part")]
    assert sum(sizes) == kept
    return caught.value


def test_published_urls_folders_and_files_are_taken_and_asked_once(tmp_path):
    source = tmp_path / "source.tar.gz"
    source.write_bytes(CONTENT)
    with serving() as site:
        fetch(tmp_path / "1", archive=with_urls(site.url))
        for _ in range(2):
            fetch(tmp_path / "new" / "2", site.url.removesuffix("images.tar.gz"))
    assert site.asked == 2
    fetch(tmp_path / "3", source.as_uri())
    for name in ("1", "new/2", "3"):
        assert_good(tmp_path / name)


# ---- Connections that end


def test_repeated_disconnections_do_not_restart_the_download(tmp_path, capsys):
    with serving(cut=50_000) as site:
        fetch(tmp_path, site.url)
    assert_good(tmp_path)
    # Each went on where the one before had ended, but for what was compared.
    assert site.starts == [max(0, 49_000 * n) for n in range(len(site.starts))]
    assert "sha256" not in capsys.readouterr().err


def test_a_lost_connection_and_a_wrong_archive_have_different_messages(tmp_path):
    with serving(cut=150_000, takes_ranges=False) as site:
        error = fails(tmp_path, site.url, kept=150_000)
    assert isinstance(error, UnavailableError)
    assert error.exit_code == 75
    assert "0.15 MB" in str(error)
    with serving() as site:  # At another address, which is why it may differ.
        fetch(tmp_path, site.url)
    assert site.starts == [149_000]
    assert_good(tmp_path)


def test_a_server_without_ranges_completes_a_partial_download(tmp_path):
    (tmp_path / PART).write_bytes(CONTENT[:150_000])
    with serving(takes_ranges=False) as site:
        fetch(tmp_path, site.url)
    assert_good(tmp_path)


@pytest.mark.parametrize(
    "part",
    [OTHER[:150_000], CONTENT[:140_000] + bytes(10_000), OTHER, CONTENT + b"more"],
    ids=["other archive", "zeros at the end", "whole, but wrong", "too long"],
)
def test_a_part_from_another_archive_starts_the_download_over(tmp_path, part):
    for takes_ranges in (True, False):
        folder = tmp_path / str(takes_ranges)
        folder.mkdir()
        (folder / PART).write_bytes(part)
        with serving(takes_ranges=takes_ranges) as site:
            fetch(folder, site.url)
        assert_good(folder)


def test_part_from_another_archive_is_noticed_by_its_end(tmp_path):
    """Not when all has been downloaded, which may take an hour."""
    (tmp_path / PART).write_bytes(OTHER[:1] + CONTENT[1:50_000] + bytes(10_000))
    with serving(delay=0.03) as site:
        fetch(tmp_path, site.url)
    assert site.starts == [59_000, 0]
    assert site.sent < 1.5 * len(CONTENT)


def test_a_complete_download_is_unpacked_without_a_server(tmp_path):
    (tmp_path / PART).write_bytes(CONTENT)
    fetch(tmp_path, refused_url())
    assert_good(tmp_path)


def test_a_stalled_download_ends_and_keeps_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode()
    with serving(raw=head + CONTENT[:10_000], delay=2.0) as site:
        error = fails(tmp_path, site.url, kept=10_000)
    assert error.exit_code == 75


def test_a_very_slow_download_counts_as_stalled(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "STALLED", 0.5)
    monkeypatch.setattr(download, "LEAST", 1e6)
    with (
        serving(piece=100, delay=0.05) as site,
        pytest.raises(UnavailableError, match="stalled"),
    ):
        fetch(tmp_path, site.url)


def test_the_connection_of_a_stalled_download_is_closed(tmp_path, monkeypatch):
    """While the next source is asked, for as long as that takes."""
    answers, get = [], urllib.request.OpenerDirector.open

    def noting(*given, **options):
        answers.append(get(*given, **options))
        return answers[-1]

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", noting)
    monkeypatch.setattr(download, "TIMEOUT", 0.3)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode()
    with serving(raw=head + CONTENT[:10_000], delay=2.0) as site:
        fails(tmp_path, site.url, kept=10_000)
    assert answers
    assert all(answer.closed for answer in answers)


def test_a_killed_download_and_unpacking_continue(tmp_path):
    part = tmp_path / PART
    with serving(delay=0.05) as site:
        with start(tmp_path, site.url) as process:
            while not part.exists() or part.stat().st_size < 100_000:
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        site.delay = 0.0
        with start(tmp_path, site.url, "killed") as process:
            assert process.wait(timeout=60) == -signal.SIGKILL
        assert site.starts[0] == 0 < site.starts[1]
        assert not (tmp_path / "images-bin").exists()
        fetch(tmp_path, site.url)
    assert site.asked == 2  # What had been whole was not asked for again.
    assert_good(tmp_path)


def test_the_first_byte_may_arrive_separately(tmp_path):
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode()
    with serving(raw=head + CONTENT[:1], rest=CONTENT[1:]) as site:
        fetch(tmp_path, site.url)
    assert_good(tmp_path)


def test_an_answer_with_the_wrong_range_is_refused_and_loses_no_bytes(tmp_path):
    (tmp_path / PART).write_bytes(CONTENT[:150_000])
    answer = (
        f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 7-{len(CONTENT) - 1}/"
        f"{len(CONTENT)}\r\nContent-Length: {len(CONTENT) - 7}\r\n\r\n"
    )
    with serving(raw=answer.encode() + CONTENT[7:]) as site:
        fails(tmp_path, site.url, kept=150_000)


# ---- Wrong content


@pytest.mark.parametrize(
    ("attributes", "word"),
    [
        ({"content": OTHER}, "images.tar.gz"),
        ({"content": CONTENT[:-1] + b"x"}, ARCHIVE.archive.sha256),
        ({"content": CONTENT + b"more"}, f"{len(CONTENT) + 4:,}"),
        ({"content": b"<html>Log in!</html>", "kind": "text/html"}, "text/html"),
    ],
    ids=["no archive", "other sha256", "longer", "page"],
)
def test_wrong_content_is_refused_and_not_kept(tmp_path, attributes, word):
    with serving(**attributes) as bad, serving() as good:
        error = fails(tmp_path, bad.url)
        assert word in str(error)
        assert error.exit_code == 2
        fetch(tmp_path, good.url)
    assert_good(tmp_path)


def test_a_page_does_not_spoil_the_downloaded_part(tmp_path):
    (tmp_path / PART).write_bytes(CONTENT[:150_000])
    with serving(content=b"<html>Log in!</html>", kind="text/html") as site:
        site.takes_ranges = False
        fails(tmp_path, site.url, kept=150_000)


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = CHUNKED + (b"186a0\r\n" + CONTENT[:100_000] + b"\r\n") * 9


@pytest.mark.parametrize(
    ("attributes", "code"),
    [
        ({"status": 404}, 2),
        ({"status": 503}, 75),
        ({"status": 429}, 75),
        ({"raw": OK, "delay": 0.6}, 75),
        ({"raw": CHUNKED + b"-5\r\n" + bytes(500)}, 2),
        ({"raw": CHUNKED + b"\xff\r\n" + bytes(500)}, 75),
    ],
    ids=["missing", "down", "busy", "silent", "negative", "no number"],
)
def test_exit_codes_tell_temporary_from_permanent_failures(
    tmp_path, attributes, code, monkeypatch
):
    """A missing archive is the user's to correct; a server that is down is not."""
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with serving(**attributes) as site:
        assert fails(tmp_path, site.url).exit_code == code
    assert site.asked == 1


def test_endless_answer_ends_at_the_published_size(tmp_path):
    with serving(raw=ENDLESS) as site, pytest.raises(UsageError, match="more than"):
        fetch(tmp_path, site.url)
    assert (tmp_path / PART).stat().st_size <= len(CONTENT)


def test_a_redirection_to_a_local_file_is_refused(tmp_path):
    source = tmp_path / "source.tar.gz"
    source.write_bytes(CONTENT)
    answer = f"HTTP/1.1 302 Found\r\nLocation: {source.as_uri()}\r\n\r\n".encode()
    with serving(raw=answer) as site:
        assert fails(tmp_path / "new", site.url).exit_code == 2


def test_unreachable_urls_are_refused(tmp_path):
    for url, code in (
        (refused_url(), 75),
        ("http://[", 2),
        ("images.tar.gz", 2),
        ("nfs://server/images.tar.gz", 2),
    ):
        error = fails(tmp_path, url)
        assert error.exit_code == code
        assert url in str(error)


def test_an_archive_escaping_its_folder_is_refused(tmp_path):
    evil = {"images-bin/../../outside.bin": b"evil"}
    content = packed({"images-bin/a.bin": b"a", **evil})
    source = tmp_path / "evil.tar.gz"
    source.write_bytes(content)
    with pytest.raises(UsageError, match="outside"):
        fetch(tmp_path / "data", source.as_uri(), archive=archive_of(content))
    assert not list(tmp_path.rglob("outside.bin"))
    assert not (tmp_path / "data" / "images-bin").exists()


def test_a_users_own_archive_is_unpacked_or_refused_and_kept(tmp_path):
    source, home = tmp_path / "images.tar.gz", tmp_path / "home"
    for content in (CONTENT[:-1], OTHER):
        source.write_bytes(content)
        with pytest.raises(UsageError, match=source.name):
            download.unpack(ARCHIVE, home, source)
        assert source.read_bytes() == content
        assert not (home / "images-bin").exists()
    source.write_bytes(CONTENT)
    assert download.unpack(ARCHIVE, home, source) == home / "images-bin"
    assert_good(home)
    assert source.read_bytes() == CONTENT


def test_a_servers_answer_cannot_control_the_terminal(tmp_path):
    answer = b"HTTP/1.1 404 \x1b]0;owned\x07\r\n\r\n"
    with serving(raw=answer) as site:
        message = str(fails(tmp_path, site.url))
    assert r"404: \x1b]0;owned\x07" in message


# ---- Several sources


@pytest.fixture
def slow(monkeypatch):
    """Attributes of a site that is slow, by a measure for which no test waits long."""
    monkeypatch.setattr(download, "TRIAL", 0.2)
    monkeypatch.setattr(download, "FAST", 5e6)
    return {"piece": 4_000, "delay": 0.05}


def test_a_corrupt_source_does_not_discard_kept_bytes(tmp_path):
    lie = CONTENT[:1000] + bytes(len(CONTENT) - 1000)
    for takes_ranges in (True, False):
        folder = tmp_path / str(takes_ranges)
        folder.mkdir()
        (folder / PART).write_bytes(CONTENT[:390_000])
        with (
            serving(content=lie, takes_ranges=takes_ranges) as liar,
            serving() as good,
        ):
            fetch(folder, archive=with_urls(liar.url, good.url))
        assert good.starts == [389_000]
        assert_good(folder)


def test_the_next_source_is_tried_after_an_unavailable_or_wrong_source(tmp_path):
    with (
        serving(status=503) as down,
        serving(content=OTHER) as wrong,
        serving() as good,
    ):
        sources = [refused_url(), down.url, wrong.url, good.url, refused_url()]
        fetch(tmp_path, archive=with_urls(*sources))
    assert_good(tmp_path)
    assert (down.asked, wrong.asked, good.asked) == (1, 1, 1)


def test_all_failures_are_reported_and_a_temporary_one_decides_the_exit_code(tmp_path):
    with serving(status=503) as down, serving(status=404) as missing:
        error = fails(tmp_path, archive=with_urls(down.url, missing.url))
        assert error.exit_code == 75
        assert down.url in str(error)
        assert missing.url in str(error)
        assert fails(tmp_path, archive=with_urls(missing.url)).exit_code == 2


def test_a_faster_source_continues_a_slow_download(tmp_path, slow):
    with serving(**slow) as first, serving() as second:
        fetch(tmp_path, archive=with_urls(first.url, second.url))
    assert_good(tmp_path)
    assert second.starts[0] > 0


@pytest.mark.parametrize(("piece", "asked"), [(400, (2, 1)), (12_000, (1, 1))])
def test_fastest_of_slow_sources_is_used(tmp_path, slow, piece, asked):
    with serving(**slow) as first, serving(**{**slow, "piece": piece}) as second:
        fetch(tmp_path, archive=with_urls(first.url, second.url))
    assert_good(tmp_path)
    assert (first.asked, second.asked) == asked


def test_another_version_of_the_data_set_is_accepted(tmp_path, slow):
    others = packed({"images-py/a": PAYLOAD})
    with serving(**slow) as first, serving(content=others) as second:
        wanted = with_urls(first.url)
        other = with_urls(
            second.url, name="images-py.tar.gz", content=others, folder="images-py"
        )
        found = download.fetch([wanted, other], tmp_path)
    assert found == (other, tmp_path / "images-py")
    assert (tmp_path / "images-py" / "a").read_bytes() == PAYLOAD


def test_a_given_place_holds_the_first_version_unless_its_name_says_otherwise(tmp_path):
    others = packed({"images-py/a": PAYLOAD})
    other = with_urls(name="images-py.tar.gz", content=others, folder="images-py")
    place = tmp_path / "place"
    place.mkdir()
    for name in ("images.tar.gz", "mirrored"):
        (place / name).write_bytes(CONTENT)
    (place / "images-py.tar.gz").write_bytes(others)
    for name, version in (
        ("", ARCHIVE),
        ("mirrored", ARCHIVE),
        ("images-py.tar.gz", other),
    ):
        folder = tmp_path / f"for {name}"
        found, _ = download.fetch([ARCHIVE, other], folder, f"{place.as_uri()}/{name}")
        assert found == version


def test_a_slow_download_reports_the_time_left_and_suggests_synthetic_data(
    tmp_path, slow, capsys, monkeypatch
):
    monkeypatch.setattr(download, "LONG", 1.0)
    monkeypatch.setattr(download, "FIRST_LINE", 0.3)
    with serving(**slow) as site:
        fetch(tmp_path, archive=with_urls(site.url))
    said = capsys.readouterr().err
    assert re.search(r"0\.\d+ of 0\.4 MB at \d+ kB/s, [\d.]+ seconds left", said)
    assert said.count("--data synthetic") == 1


# ---- Other processes, and the disk

PROGRAM = """
import ast, os, resource, signal, sys, tarfile
from pathlib import Path
from cifar10.input import download, records
from cifar10.errors import UsageError
archive, directory, url, trouble = ast.literal_eval(sys.argv[1])
if trouble == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
if trouble == "killed":
    def extractall(tar, path, filter):
        tar.extract(tar.next(), path, filter=filter)
        os.kill(os.getpid(), signal.SIGKILL)
    tarfile.TarFile.extractall = extractall
archive["archive"] = records.Archive(**archive["archive"])
try:
    download.fetch([records.Format(**archive)], Path(directory), url)
except UsageError as error:
    sys.exit(str(error))
"""


def start(directory, url, trouble=""):
    """Starts a download in a process of its own."""
    arguments = [dataclasses.asdict(ARCHIVE), str(directory), url, trouble]
    return runs.started("-c", PROGRAM, repr(arguments))


def test_two_concurrent_fetches_download_once(tmp_path, capsys):
    with serving(delay=0.01) as site, ThreadPoolExecutor(2) as threads:
        found = [threads.submit(fetch, tmp_path, site.url) for _ in range(2)]
        assert {each.result() for each in found} == {tmp_path / "images-bin"}
    assert site.asked == 1
    assert "Waiting" in capsys.readouterr().err
    assert_good(tmp_path)


def test_two_concurrent_unpackings_unpack_once(tmp_path, monkeypatch):
    source, home = tmp_path / "images.tar.gz", tmp_path / "home"
    source.write_bytes(CONTENT)
    opened, opens = [], tarfile.open

    def slow(*given):
        opened.append(given)
        time.sleep(0.2)
        return opens(*given)

    monkeypatch.setattr(tarfile, "open", slow)
    with ThreadPoolExecutor(2) as threads:
        given = [download.unpack] * 2, [ARCHIVE] * 2, [home] * 2, [source] * 2
        found = [*threads.map(lambda unpack, *where: unpack(*where), *given)]
    assert found == [home / "images-bin"] * 2
    assert len(opened) == 1
    assert_good(home)


def test_a_full_disk_is_reported_and_keeps_the_downloaded_part(tmp_path):
    with serving() as site:
        with start(tmp_path, site.url, "full") as process:
            message = process.communicate(timeout=60)[1]
        assert process.returncode == 1
        assert "space" in message
        assert "Traceback" not in message
        assert not (tmp_path / "images-bin").exists()
        fetch(tmp_path, site.url)
    assert site.starts[1] > 0
    assert_good(tmp_path)
