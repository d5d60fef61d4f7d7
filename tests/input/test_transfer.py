"""One file from servers that cut, lie, stumble and fall silent."""

import dataclasses
import re
import socket
import sys

import pytest

from cifar10.input import transfer
from cifar10.input.transfer import Patience
from sites import ARCHIVE, CONTENT, QUICK, refused_url, serving


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def part(tmp_path):
    return tmp_path / "images.tar.gz.part"


def receive(url, part, patience=QUICK):
    transfer.receive(url, part, ARCHIVE.size, ARCHIVE.md5, patience)
    assert part.read_bytes() == CONTENT


def fails(url, part, patience=QUICK):
    """Returns the message of a transfer that fails."""
    with pytest.raises(transfer.SourceError) as caught:
        receive(url, part, patience)
    return str(caught.value)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_cut_once(part, ranges):
    with serving(cuts=[150_000], ranges=ranges) as site:
        receive(site.url, part)
    # A server that ignores the request for a range sends everything again.
    assert site.asked == [None, "bytes=150000-"]


def test_many_cuts_are_no_matter_while_there_is_progress(part):
    with serving(cut_always=50_000) as site:
        receive(site.url, part)
    assert len(site.asked) == len(CONTENT) // 50_000 + 1 > QUICK.attempts


def test_a_connection_always_cut_at_the_same_place(part):
    with serving(cut_always=150_000, ranges=False) as site:
        message = fails(site.url, part)
    assert len(site.asked) == 1 + QUICK.attempts - 1
    assert f"ended after 150000 of {len(CONTENT)} bytes, 3 times in a row" in message
    # What did come is kept for the next run.
    assert part.read_bytes() == CONTENT[:150_000]


@pytest.mark.parametrize("change", [-1000, 1000])
def test_a_wrong_content_length_is_noticed_before_the_bytes(part, change):
    with serving(claim=len(CONTENT) + change) as site:
        message = fails(site.url, part)
    assert f"{len(CONTENT) + change} bytes instead of {len(CONTENT)}" in message
    assert transfer.length(part) == 0
    assert len(site.asked) == 1


@pytest.mark.parametrize("claim", [None, "none"])
def test_another_file(part, claim):
    with serving(content=CONTENT + bytes(1000), claim=claim) as site:
        message = fails(site.url, part)
    assert "instead of" in message or "serves more than" in message
    assert not part.exists()


def test_a_content_length_that_the_body_does_not_reach(part):
    short = CONTENT[:100_000]
    with serving(content=short, claim=len(CONTENT), ranges=False) as site:
        assert "3 times in a row" in fails(site.url, part)


def test_corrupt_bytes_and_a_cut_do_not_go_on_for_ever(part):
    corrupt = bytes(1) + CONTENT[1:]
    with serving(content=corrupt, cuts=[200_000] * 9) as site:
        fails(site.url, part)
    assert len(site.asked) < 9


@pytest.mark.parametrize("size", [1000, len(CONTENT), len(CONTENT) + 1])
def test_rubbish_of_an_earlier_run(part, size):
    part.write_bytes(bytes(size))
    with serving() as site:
        receive(site.url, part)
    assert site.asked == (["bytes=1000-", None] if size == 1000 else [None])


def test_a_part_that_is_already_complete(part):
    part.write_bytes(CONTENT)
    receive(refused_url(), part)


def test_a_server_that_cannot_satisfy_the_range(part):
    part.write_bytes(CONTENT[:1000])
    with serving(statuses=[416]) as site:
        receive(site.url, part)
    assert site.asked == ["bytes=1000-", None]


def test_a_server_in_trouble_is_asked_again(part):
    with serving(statuses=[503, 503]) as site:
        receive(site.url, part)


def test_nobody_listens(part, monkeypatch):
    waits = []
    monkeypatch.setattr(transfer.time, "sleep", waits.append)
    assert "Connection refused" in fails(refused_url(), part)
    assert waits == []


@pytest.mark.parametrize("url", ["http://[", "http://a b/", "http://", "file:///none"])
def test_a_url_that_leads_nowhere(part, url):
    assert fails(url, part)
    assert not part.exists()


def test_a_server_that_vanishes_on_the_way_is_asked_again(part, monkeypatch):
    connect, outages = socket.create_connection, [False, True]

    def sometimes(*arguments):
        if outages and outages.pop(0):
            raise socket.gaierror("Name or service not known")
        return connect(*arguments)

    monkeypatch.setattr(socket, "create_connection", sometimes)
    with serving(cuts=[150_000]) as site:
        receive(site.url, part)
    assert not outages


def test_a_server_that_falls_silent(part):
    hasty = Patience(timeout=0.2, attempts=2, pause=0.01)
    with serving(piece=1000, delay=0.6) as site:
        assert "timed out, 2 times in a row" in fails(site.url, part, hasty)


DRIPPED = r"it sent \d+ bytes of the file in 0 s, 3 times in a row"
DRIPPING = dataclasses.replace(QUICK, window=0.2)


def test_a_server_that_drips_is_given_up(part):
    with serving(piece=1, delay=0.01) as site:
        message = fails(site.url, part, DRIPPING)
    assert len(site.asked) == QUICK.attempts
    assert re.fullmatch(DRIPPED, message)
    # What came is kept, and each attempt went on from there.
    got = part.read_bytes()
    assert 0 < len(got) < 200
    assert got == CONTENT[: len(got)]
    assert site.asked[-1] not in (None, site.asked[1])


@pytest.mark.parametrize(
    ("before", "dripped"),
    [
        (b"", b"HTTP/1.1 200 " + b"O" * 500),
        (b"HTTP/1.1 200 OK\r\n", b"X-Long: " + b"a" * 500),
        (b"HTTP/1.1 200 OK\r\n", b"Content-Length: " + b"9" * 500),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0" * 500),
    ],
    ids=["status", "header", "length", "chunk size"],
)
def test_a_server_that_drips_before_the_file_is_given_up(part, before, dripped):
    """Each byte begins a socket's timeout anew."""
    patience = dataclasses.replace(DRIPPING, attempts=2)
    with serving(raw=before + dripped, drips=True, delay=0.01) as site:
        message = fails(site.url, part, patience)
    assert message == "it sent 0 bytes of the file in 0 s, 2 times in a row"
    assert site.asked == [None, None]
    assert transfer.length(part) == 0


def test_a_pause_within_the_window_is_no_dripping(part):
    patience = dataclasses.replace(QUICK, attempts=1, window=0.2)
    with serving(piece=100_000, delay=0.15) as site:
        receive(site.url, part, patience)
    assert site.asked == [None]


@pytest.mark.parametrize("size", [b"-5", b"-1", b"1.5", b"\xff"])
def test_a_chunk_of_an_impossible_size(part, size):
    part.write_bytes(CONTENT[:1000])
    head = b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(raw=head + size + b"\r\n" + bytes(500)) as site:
        assert "3 times in a row" in fails(site.url, part)
    # Nothing of it is taken for the file's.
    assert part.read_bytes() == CONTENT[:1000]


def test_progress_in_a_log_and_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(transfer, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(transfer, "TERMINAL_SECONDS", 0.0)
    with serving() as site:
        receive(site.url, tmp_path / "log.part")
        lines = capsys.readouterr().err.splitlines()
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        receive(site.url, tmp_path / "terminal.part")
    assert len(lines) > 1
    assert all("MB/s" in line and line.endswith("s left") for line in lines)
    shown = capsys.readouterr().err
    assert shown.count("\r") > 1
    assert shown.endswith("\r\n")
