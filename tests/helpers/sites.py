"""Helpers: servers on this machine, good, bad, slow and lying, and what they serve."""

import contextlib
import dataclasses
import hashlib
import http.server
import io
import socket
import tarfile
import threading
import time

import numpy as np

from cifar10.input import records

# Random bytes, which gzip cannot make smaller.
PAYLOAD = np.random.RandomState(1).bytes(400_000)


def packed(members):
    """Returns a .tar.gz with the given contents by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


CONTENT = packed({"images-bin/a.bin": PAYLOAD, "images-bin/b.bin": b"b"})


def archive_of(content):
    """Returns the format of a data set whose archive has this content."""
    return dataclasses.replace(
        records.CIFAR10,
        archive=published("images.tar.gz", content),
        folder="images-bin",
    )


def published(name, content, *urls):
    """Returns what is published about an archive with this content."""
    sha256 = hashlib.sha256(content).hexdigest()
    return records.Archive(name, len(content), sha256, urls)


ARCHIVE = archive_of(CONTENT)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the server's attributes say."""

    def do_GET(self):
        site = self.server
        site.asked += 1
        if site.status != 200:
            self.send_error(site.status)
            return
        if site.raw:
            self.wfile.write(site.raw)
            time.sleep(site.delay or 0.1)
            self.wfile.write(site.rest)
            return
        start = 0
        if site.takes_ranges and "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            end, size = len(site.content) - 1, len(site.content)
            self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        else:
            self.send_response(200)
        site.starts.append(start)
        self.send_header("Content-Type", site.kind)
        self.send_header("Content-Length", len(site.content) - start)
        self.end_headers()
        end = None if site.cut is None else start + site.cut
        body = site.content[start:end]
        for place in range(0, len(body), site.piece):
            self.wfile.write(body[place : place + site.piece])
            site.sent += site.piece
            time.sleep(site.delay)

    def log_message(self, *_):
        """Keeps quiet."""


class Site(http.server.ThreadingHTTPServer):
    """A server on this machine and what is wrong with it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.status = 200
        self.kind = "application/x-gzip"
        self.takes_ranges = True
        self.starts = []  # The first byte of each answer.
        self.cut = None  # Bytes after which a connection ends.
        self.delay = 0.0  # Seconds after each piece of so many bytes.
        self.piece = 16384
        self.raw = b""  # The whole answer, status and headers included,
        self.rest = b""  # but for what follows a moment later.
        self.asked = 0  # Requests.
        self.sent = 0  # Bytes, but for the last piece of an answer.
        self.url = f"http://127.0.0.1:{self.server_port}/images.tar.gz"

    def handle_error(self, *_):
        """A client that hangs up is part of the tests."""


@contextlib.contextmanager
def serving(**attributes):
    with Site() as site:
        for name, value in attributes.items():
            setattr(site, name, value)
        thread = threading.Thread(target=site.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield site
        finally:
            site.shutdown()
            thread.join()


def refused_url():
    """Returns a URL at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/images.tar.gz"
