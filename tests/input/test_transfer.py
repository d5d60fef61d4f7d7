"""One file from servers that cut, lie, stumble and fall silent."""

import pytest

from cifar10.input import download
from sites import ARCHIVE, CONTENT, refused_url, serving


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "PAUSE", 0.01)


@pytest.fixture
def part(tmp_path):
    return tmp_path / "images.tar.gz.part"


def receive(url, part):
    download.receive(url, part, ARCHIVE.size, ARCHIVE.md5)
    assert part.read_bytes() == CONTENT


def fails(url, part):
    """Returns the message of a transfer that fails."""
    with pytest.raises(download.SourceError) as caught:
        receive(url, part)
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
    assert len(site.asked) == len(CONTENT) // 50_000 + 1 > download.ATTEMPTS


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("attributes", "asked"),
    [
        ({"claim": len(CONTENT) + 1000}, 1),
        ({"content": CONTENT + bytes(1000), "claim": "none"}, 1),
        ({"raw": OK, "delay": 0.6}, 5),
    ],
    ids=["more", "longer", "silent"],
)
def test_wrong_and_silent_servers_are_given_up(part, attributes, asked, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    with serving(**attributes) as site:
        assert fails(site.url, part)
    assert site.asked == [None] * asked
    assert not part.exists() or not part.stat().st_size


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
    with serving(statuses=[503, 503]) as site:
        receive(site.url, part)


def test_a_server_that_is_down_is_not_waited_for(part, monkeypatch):
    monkeypatch.setattr(download.time, "sleep", None)
    assert "refused" in fails(refused_url(), part)
    assert fails("http://[", part)
    assert not part.exists()


@pytest.mark.parametrize("size", [b"-5", b"\xff"])
def test_a_chunk_of_an_impossible_size_is_no_file(part, size):
    part.write_bytes(CONTENT[:1000])
    head = b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(raw=head + size + b"\r\n" + bytes(500)) as site:
        fails(site.url, part)
