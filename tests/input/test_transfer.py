"""One file from servers that cut, lie, stumble and fall silent."""

import dataclasses
import socket
import time

import pytest

from cifar10.input import download
from sites import ARCHIVE, CONTENT, QUICK, refused_url, serving


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def part(tmp_path):
    return tmp_path / "images.tar.gz.part"


def receive(url, part, patience=QUICK):
    download.receive(url, part, ARCHIVE.size, ARCHIVE.md5, patience)
    assert part.read_bytes() == CONTENT


def fails(url, part, patience=QUICK):
    """Returns the message of a transfer that fails."""
    with pytest.raises(download.SourceError) as caught:
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


SHORT = dataclasses.replace(QUICK, timeout=0.2, attempts=2)
DRIPPING = dataclasses.replace(QUICK, attempts=2, window=0.2)
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("attributes", "patience", "asked"),
    [
        ({"claim": len(CONTENT) + 1000}, QUICK, 1),
        ({"content": CONTENT + bytes(1000), "claim": "none"}, QUICK, 1),
        ({"raw": OK, "delay": 0.6}, SHORT, 2),
    ],
    ids=["more", "longer", "silent"],
)
def test_wrong_and_silent_servers_are_given_up(part, attributes, patience, asked):
    with serving(**attributes) as site:
        assert fails(site.url, part, patience)
    assert site.asked == [None] * asked
    assert not part.exists() or not part.stat().st_size


def test_a_dripping_server_is_given_up(part):
    """Each byte begins a socket's timeout anew."""
    answer = OK + b"\r\n" + b"0" * 500
    with serving(raw=answer, drips=True, delay=0.01) as site:
        assert fails(site.url, part, DRIPPING)
    assert len(site.asked) == DRIPPING.attempts
    assert part.stat().st_size < 500, "it was heard to its end"


def test_corrupt_bytes_and_a_cut_do_not_go_on_for_ever(part):
    corrupt = bytes(1) + CONTENT[1:]
    with serving(content=corrupt, cuts=[200_000] * 9) as site:
        fails(site.url, part)
    assert len(site.asked) < 9


@pytest.mark.parametrize("size", [1000, len(CONTENT)])
def test_other_bytes_of_an_earlier_run_are_replaced(part, size):
    part.write_bytes(bytes(size))
    with serving() as site:
        receive(site.url, part)
    assert site.asked == (["bytes=1000-", None] if size == 1000 else [None])
    receive(refused_url(), part)  # It is complete.


def test_a_server_in_trouble_is_asked_again(part):
    part.write_bytes(CONTENT[:1000])
    with serving(statuses=[416]) as site:  # It cannot satisfy the range.
        receive(site.url, part)
    assert site.asked == ["bytes=1000-", None]
    part.unlink()
    with serving(statuses=[503, 503]) as site:
        receive(site.url, part)


def test_a_server_that_is_down_is_not_waited_for(part, monkeypatch):
    monkeypatch.setattr(download.time, "sleep", None)
    assert "refused" in fails(refused_url(), part)
    assert fails("http://[", part)
    assert not part.exists()


def test_a_pause_within_the_window_is_no_dripping(part):
    patience = dataclasses.replace(QUICK, attempts=1, window=0.2)
    with serving(piece=100_000, delay=0.15) as site:
        receive(site.url, part, patience)
    assert site.asked == [None]


def test_a_slow_connection_is_no_dripping(part, monkeypatch):
    """Each address of a site may take the timeout until another one answers."""
    connect, patience = (
        socket.create_connection,
        dataclasses.replace(DRIPPING, attempts=1),
    )

    def after_a_while(*arguments, **options):
        time.sleep(1.5 * patience.window)
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", after_a_while)
    with serving() as site:
        receive(site.url, part, patience)


@pytest.mark.parametrize("size", [b"-5", b"\xff"])
def test_a_chunk_of_an_impossible_size_is_no_file(part, size):
    part.write_bytes(CONTENT[:1000])
    head = b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(raw=head + size + b"\r\n" + bytes(500)) as site:
        fails(site.url, part)
