"""Helpers: servers on this machine, good, bad, slow and lying, and what they serve."""

import contextlib
import hashlib
import http.server
import io
import socket
import tarfile
import threading
import time

import numpy as np

from cifar10.input import download

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


def archive_of(content, url="http://127.0.0.1:1/"):
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return download.Archive("images.tar.gz", "images-bin", len(content), md5, url)


ARCHIVE = archive_of(CONTENT)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as the server's attributes say."""

    def do_GET(self):
        site = self.server
        asked = self.headers.get("Range")
        site.asked.append(asked)
        if site.statuses:
            status = site.statuses.pop(0)
            if status != 200:
                self.send_error(status)
                return
        if site.raw:
            self.wfile.write(site.raw)
            time.sleep(site.delay)
            return
        start = int(asked[len("bytes=") : -1]) if asked and site.ranges else 0
        body = site.content[start:]
        self.send_response(206 if start else 200)
        if start:
            total = len(site.content)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if site.claim != "none":
            self.send_header("Content-Length", site.claim or len(body))
        self.end_headers()
        cut = site.cuts.pop(0) if site.cuts else site.cut_always
        for place in range(0, len(body[:cut]), site.piece):
            self.wfile.write(body[:cut][place : place + site.piece])
            time.sleep(site.delay)

    def log_message(self, *_):
        """Keeps quiet."""


class Site(http.server.ThreadingHTTPServer):
    """A server on this machine and what is wrong with it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.ranges = True
        self.statuses = []  # Of the first answers, in order.
        self.cuts = []  # Bytes after which the first connections end, in order.
        self.cut_always = None
        self.claim = None
        self.delay = 0.0  # Seconds after each piece of so many bytes.
        self.piece = 16384
        self.raw = b""  # The whole answer, status and headers included.
        self.asked = []  # The Range header of each request.
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
