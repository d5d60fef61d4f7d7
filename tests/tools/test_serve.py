"""The HTTP service: right answers, clear refusals, and no client blocks another."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from cifar10 import model as models
from cifar10.config.config import TRAIN_DIR
from cifar10.errors import UsageError
from cifar10.follower import Follower
from cifar10.follower.live_copy import Prediction
from cifar10.tools.export import exporter
from cifar10.tools.serve import (
    command,
    connection,
    exported,
    form,
    service,
    serving,
)
from small_pictures import bomb, with_chunks, with_profiles, with_scans
from small_runs import IMAGES, MODELS, describe, evaluated, save

ROOT = Path(__file__).parents[2]
PATIENCE = 1.0
BATCH = (None, 24, 24, 3)


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


@contextlib.contextmanager
def served(copy, **options):
    """A service in a thread; gives its port."""
    options = {"timeout_secs": PATIENCE, "max_request_mb": 1.0, **options}
    with serving.listening("127.0.0.1", 0) as listener:
        server = serving.server(
            copy, serving.Options(**{"train_dir": "run", **options})
        )
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        for name, build in MODELS.items():
            patch.setitem(models.REGISTRY, name, build)
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with a checkpoint of step 10."""
    directory = tmp_path_factory.mktemp("served") / "run"
    describe(directory)
    save(directory, 10)
    return directory


@pytest.fixture(scope="module")
def follower(run_dir):
    with Follower(run_dir) as follower:
        follower.look()
        yield follower


@pytest.fixture(scope="module")
def port(follower):
    with served(follower) as port:
        yield port


@pytest.fixture
def client(port):
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client


def still_answers(client):
    answer = client.post("/predict", content=png(IMAGES[0]))
    return answer.status_code == 200


class Busy:
    """A copy whose predictions take until they are let go."""

    weights_step, age_seconds, swaps, swap_seconds, refused = 1, 0.0, 1, 0.1, 0
    image_shape = (32, 32, 3)
    names = {"model": "busy", "class_names": ("a", "b")}  # noqa: RUF012

    def __init__(self):
        self.go_on = threading.Event()
        self.asked = []

    def predict(self, images):
        self.go_on.wait(30)
        self.asked.append(images)
        return Prediction(1, np.zeros((len(images), 2)), ("a", "b"))


# What it answers.


def test_the_answer_is_what_an_evaluation_computes(client, run_dir):
    logits = evaluated(run_dir, 10).astype(np.float64)
    for image, row in zip(IMAGES, logits, strict=True):
        answer = client.post("/predict?top_k=10", content=png(image))
        assert answer.status_code == 200
        said = answer.json()
        assert said["step"] == 10
        found = {one["class"]: one["probability"] for one in said["predictions"]}
        expected = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        # A batch of one rounds otherwise without oneDNN, as the tests run.
        np.testing.assert_allclose(
            [found[name] for name in "abcdefghij"], expected, rtol=1e-4
        )
    said = client.post("/predict", content=png(IMAGES[0])).json()
    assert len(said["predictions"]) == 3


@pytest.mark.parametrize("kind", ["WEBP", "BMP"])
def test_it_takes_the_kinds_of_pictures_that_training_takes(client, kind):
    file = io.BytesIO()
    Image.fromarray(IMAGES[0]).save(file, kind, lossless=True)
    answer = client.post("/predict", content=file.getvalue())
    assert answer.status_code == 200
    assert answer.json() == client.post("/predict", content=png(IMAGES[0])).json()


def test_images_of_a_form_are_answered_in_their_order(client):
    alone = [client.post("/predict", content=png(image)).json() for image in IMAGES[:3]]
    for count in (1, 3):
        files = [("image", png(image)) for image in IMAGES[:count]]
        said = client.post("/predict", files=files).json()
        assert said["step"] == 10
        assert len(said["predictions"]) == count
        for one, other in zip(said["predictions"], alone, strict=False):
            for ranked, expected in zip(one, other["predictions"], strict=True):
                assert ranked["class"] == expected["class"]
                assert ranked["probability"] == pytest.approx(
                    expected["probability"], rel=1e-4
                )


def test_images_of_a_form_are_predicted_together():
    idle = Busy()
    idle.go_on.set()
    files = [("image", png(image)) for image in IMAGES]
    with served(idle) as port:
        url = f"http://127.0.0.1:{port}/predict?top_k=1"
        assert httpx.post(url, files=files).status_code == 200
    (images,) = idle.asked
    np.testing.assert_array_equal(images, IMAGES)


def test_a_form_is_taken_apart_byte_for_byte():
    random = np.random.default_rng(0)
    sent = [random.bytes(5000), b"", b"\r\n", b"\n--", b"a\r", b"\r\n\r\n--b--"]
    files = [("image", (f"{n}.png", part)) for n, part in enumerate(sent)]
    request = httpx.Request("POST", "http://a/", files=files)
    taken = form.files(request.headers["content-type"], request.read(), len(sent))
    assert list(taken.values()) == sent


def test_the_first_page_shows_commands_that_work(client, port, tmp_path):
    answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/plain")
    page = answer.text
    assert "Model small, step 10: a, b, c, d, e, f, g, h, i, j.\n" in page
    assert "1,000,000 bytes and 32 images of 12,500,000 pixels each" in page
    assert max(map(len, page.splitlines())) <= 80
    application = service.Service(Busy(), serving.Options("run")).application()
    for route in application.routes:
        assert f"http://127.0.0.1:{port}{route.path}" in page
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    for name in ("cat.png", "dog.png"):
        (tmp_path / name).write_bytes(png(IMAGES[0]))
    commands = [line for line in page.splitlines() if line.startswith("  curl ")]
    assert len(commands) == 4
    for line in commands:
        words = [*shlex.split(line), "--fail", "--silent"]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)


def test_health_and_metrics_tell_of_the_weights(client, follower):
    assert still_answers(client)
    health = client.get("/health")
    assert health.status_code == 200
    assert health.json()["weights_step"] == 10
    assert health.json()["model"] == "small"
    assert health.json()["class_names"] == list("abcdefghij")
    assert 0 <= health.json()["age_seconds"] < 600
    assert str(Path.cwd()) not in health.text, "paths are not for clients"
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\ncifar10_weights_step 10.0\n" in metrics.text
    assert f"\ncifar10_swaps_total {float(follower.swaps)}\n" in metrics.text
    assert re.search(r'cifar10_answers_total{status="200"} [1-9]', metrics.text)
    assert client.get("/none").status_code == 404
    assert client.get("/predict").status_code == 405


def test_without_weights_it_is_not_healthy_until_the_first_checkpoint(tmp_path):
    describe(tmp_path / "run")
    follower = Follower(tmp_path / "run")
    with served(follower) as port, httpx.Client() as client:
        url = f"http://127.0.0.1:{port}"
        for answer in (
            client.get(f"{url}/health"),
            client.post(f"{url}/predict", content=png(IMAGES[0])),
        ):
            assert answer.status_code == 503
            why = "There is no checkpoint to use yet; the service's console says why."
            assert answer.json() == {"error": why}
        page = client.get(url).text
        assert page.startswith("No image can be classified yet. There is no checkpoint")
        assert "weights_step " not in client.get(f"{url}/metrics").text
        save(tmp_path / "run", 20)
        follower.look()
        assert client.get(f"{url}/health").json()["weights_step"] == 20


@pytest.mark.slow
def test_a_thousand_requests_are_answered_each_with_its_own(client, port):
    """Sixteen clients at a time, each told of its own image."""
    images = [png(image) for image in IMAGES]
    expected = [client.post("/predict", content=image).json() for image in images]
    assert len({str(one["predictions"]) for one in expected}) == len(images)
    limits = httpx.Limits(max_connections=16)
    url = f"http://127.0.0.1:{port}/predict"
    with httpx.Client(limits=limits, timeout=60) as many, ThreadPoolExecutor(16) as go:
        answers = list(
            go.map(
                lambda number: many.post(url, content=images[number % len(images)]),
                range(1000),
            )
        )
    assert {answer.status_code for answer in answers} == {200}
    for number, answer in enumerate(answers):
        assert answer.json() == expected[number % len(images)]


# What it refuses.


@pytest.mark.parametrize(
    ("content", "status", "why"),
    [
        (b"", 400, "neither a PNG nor a JPEG"),
        (os.urandom(1000), 400, "neither a PNG nor a JPEG"),
        (png(IMAGES[0])[:100], 400, "is damaged"),
        (bomb(30_000, 30_000), 400, "pixels; at most"),
        (bomb(3_536, 3_536), 400, "at most 12,500,000 are read"),
        (bytes(1_000_001), 413, "1,000,000 bytes at most"),
        (with_scans(5000, (1000, 1000)), 400, "more parts than it needs"),
        (with_chunks(60_000), 400, "more parts than it needs"),
    ],
)
def test_bad_images_are_refused_and_the_service_continues(client, content, status, why):
    answer = client.post("/predict", content=content)
    assert answer.status_code == status
    assert why in answer.json()["error"]
    assert still_answers(client)


def test_an_image_that_takes_long_is_refused_and_no_other_waits_for_it(
    follower, monkeypatch
):
    monkeypatch.setattr(service, "_DECODING_SECONDS", 0.2)
    options = {"max_request_mb": 3.0, "timeout_secs": 60.0}
    with served(follower, **options) as port, httpx.Client(timeout=60) as client:
        url = f"http://127.0.0.1:{port}/predict"
        answer = client.post(url, content=with_profiles(1000))
        assert answer.status_code == 422
        error = "The request's body takes more than 0.3 s to decode"
        assert answer.json()["error"].startswith(error)
        assert client.post(url, content=png(IMAGES[0])).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_sends_all_before_it_reads_is_told_what_was_too_large(
    follower, announced, version
):
    body = bytes(20_000_000)
    length = f"Content-Length: {len(body)}\r\n"
    if not announced:
        length = "Transfer-Encoding: chunked\r\n"
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = f"POST /predict HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    with (
        served(follower, timeout_secs=60.0) as port,
        socket.create_connection(("127.0.0.1", port), 60) as raw,
    ):
        raw.sendall(f"{head}{length}\r\n".encode() + body)
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"1,000,000 bytes at most" in answer


OWN = f"{socket.gethostname()}:8000"


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", {"Host": "evil.example:8000"}, 421),
        ("GET", {"Host": "evil.example"}, 421),
        ("GET", {"Host": "localhost.evil.example"}, 421),
        ("GET", {"Host": "[::1"}, 421),
        ("GET", {"Host": ""}, 421),
        ("GET", {"Host": "localhost/evil"}, 421),
        ("GET", {"Host": "localhost?evil"}, 421),
        ("GET", {"Host": "evil@localhost"}, 421),
        ("GET", {"Host": "localhost:evil"}, 421),
        ("GET", {"Host": "[::1]evil"}, 421),
        ("GET", {"Host": "LOCALHOST:8000"}, 200),
        ("GET", {"Host": OWN.upper()}, 200),
        ("GET", {"Host": "192.0.2.1:8000"}, 200),
        ("GET", {"Host": "[::1]:8000"}, 200),
        ("POST", {"Origin": "https://evil.example", "Content-Type": "text/plain"}, 403),
        ("POST", {"Origin": "null"}, 403),
        ("POST", {"Host": OWN, "Origin": "http://localhost:8000"}, 403),
        ("POST", {"Host": OWN, "Origin": f"http://{OWN}"}, 200),
        ("POST", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ("GET", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("GET", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        # By the browser's word, behind a proxy that puts its own host.
        ("POST", {"Sec-Fetch-Site": "same-origin", "Origin": "https://a.example"}, 200),
    ],
)
def test_it_answers_by_its_own_names_and_to_no_other_site(
    client, method, headers, status
):
    path, content = ("/predict", png(IMAGES[0])) if method == "POST" else ("/", None)
    answer = client.request(method, path, headers=headers, content=content)
    assert answer.status_code == status


def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_read(port):
    """A proxy that believes the other length takes what follows for another body."""
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n" + both + smuggled)
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_large_body_is_not_read(client, port):
    """100 MB, in one piece that is announced and in pieces that are not."""
    for content in (bytes(100_000_000), (bytes(100_000) for _ in range(1000))):
        answer = client.post("/predict", content=content)
        assert answer.status_code == 413
        assert "bytes at most" in answer.json()["error"]
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n")
        raw.sendall(b"Content-Length: 100000000\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 413"), "before any of it was sent"
    assert still_answers(client)


@pytest.mark.parametrize("top_k", ["0", "11", "-1", "x", "9" * 5000, "%C2%B2"])
def test_numbers_of_classes_that_make_no_sense_are_named(client, top_k):
    answer = client.post(f"/predict?top_k={top_k}", content=png(IMAGES[0]))
    assert answer.status_code == 400
    assert "top_k" in answer.json()["error"]


@pytest.mark.parametrize(
    ("contents", "status", "why"),
    [
        ([png(IMAGES[0]), png(IMAGES[0])[:100]], 400, "Image 2 of 2 is damaged"),
        ([b"cat.png"], 400, "Image 1 of 1 is neither a PNG nor a JPEG"),
        ([bomb(3_536, 3_536)], 400, "at most 12,500,000 are read"),
        ([png(IMAGES[0])] * 33, 400, "more than 32 images"),
        ([bytes(600_000)] * 2, 413, "1,000,000 bytes at most"),
    ],
)
def test_bad_images_of_a_form_are_named(client, contents, status, why):
    files = [("image", content) for content in contents]
    answer = client.post("/predict", files=files)
    assert answer.status_code == status
    assert why in answer.json()["error"]
    assert still_answers(client)


def test_what_is_no_route_is_refused(client):
    for method, path, status in (("GET", "/predict", 405), ("GET", "/nothing", 404)):
        answer = client.request(method, path)
        assert answer.status_code == status
        why = f"There is no {method} {path}; GET / explains what is."
        assert answer.json() == {"error": why}
        assert answer.text.endswith("\n")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nan image"),
        ("multipart/form-data; boundary=b", b"--b--\r\n"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\na field\r\n--b--"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data", b"--\r\n\r\nan image\r\n----"),
        ("multipart/form-data; boundary*=utf-8''%E2%82%AC", b"--b\r\n\r\na\r\n--b--"),
        ("multipart/form-data; boundary*=undefined''b", b"--b\r\n\r\na\r\n--b--"),
        (f"multipart/form-data; boundary*{'9' * 5000}=b", b"--b\r\n\r\na\r\n--b--"),
    ],
)
def test_what_is_no_form_is_refused(client, content_type, body):
    headers = {"Content-Type": content_type}
    answer = client.post("/predict", content=body, headers=headers)
    assert answer.status_code == 400
    assert "curl -F image=@cat.png" in answer.json()["error"]


def read_all(raw):
    raw.settimeout(20)
    parts = iter(lambda: raw.recv(65536), b"")
    return b"".join(parts)


def stalled(port, stack):
    """Clients that stall: 60 each before, in and after their heads, 50 in their bodies.

    Returns the last ones.
    """
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
    unread = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\na"

    def connect(*parts):
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for part in parts:
            raw.sendall(part)
        return raw

    for parts in ((), (head,), (unread,)):
        for _ in range(60):
            connect(*parts)
    return [connect(head, b"\r\nabc") for _ in range(50)]


def test_clients_that_stall_block_nobody(follower):
    with (
        served(follower, timeout_secs=120.0) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        contextlib.ExitStack() as stack,
    ):
        stalled(port, stack)
        assert still_answers(client)


def test_clients_that_stall_are_told_so_in_the_end(client, port):
    with contextlib.ExitStack() as stack:
        for raw in stalled(port, stack):
            answer = read_all(raw)
            assert answer.startswith(b"HTTP/1.1 408")
            assert b"did not arrive within 1 seconds" in answer
        assert still_answers(client)


HALF = b"GET /health HTTP/1.1\r\nHost: loc"


@pytest.mark.parametrize(
    "sent", [b"", HALF, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + HALF]
)
def test_a_head_that_does_not_arrive_ends_its_connection(port, sent):
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(sent)
        answer = read_all(raw)
    assert answer.count(b"HTTP/1.1 ") == sent.count(b"\r\n\r\n")


def test_a_head_that_does_not_arrive_after_a_long_answer_ends_its_connection():
    busy = Busy()
    image = png(IMAGES[0])
    head = f"Host: localhost\r\nContent-Length: {len(image)}\r\n\r\n"
    with (
        served(busy) as port,
        socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
    ):
        raw.sendall(f"POST /predict HTTP/1.1\r\n{head}".encode() + image)
        time.sleep(1.5 * PATIENCE)  # Its first head had to arrive by then.
        busy.go_on.set()
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        raw.sendall(HALF)
        read_all(raw)


def test_when_there_are_too_many_connections_those_that_stall_make_room(
    monkeypatch, capsys
):
    monkeypatch.setattr(connection, "limits", lambda: (16, 64))
    monkeypatch.setattr(connection.Connection, "_next_line", 0.0)
    busy = Busy()
    with (
        served(busy, timeout_secs=120.0) as port,
        ThreadPoolExecutor(1) as threads,
        contextlib.ExitStack() as stack,
    ):
        url = f"http://127.0.0.1:{port}"
        image = png(IMAGES[0])
        asked = threads.submit(httpx.post, f"{url}/predict", content=image, timeout=60)
        while httpx.get(f"{url}/health").json()["waiting"] < 1:
            time.sleep(0.01)
        socks = []
        body = (
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\na"
        )
        for sent in (b"", HALF, body) * 20:
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            raw.sendall(sent)
            socks.append(raw)
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        with contextlib.suppress(ConnectionResetError):
            assert read_all(socks[0]) == b"", "the first one is closed"
        busy.go_on.set()
        assert asked.result().status_code == 200
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "connections are too many" in said


def test_a_connection_sends_a_short_answer_at_once():
    """It does not keep the body back until the client has acknowledged the head."""
    with (
        serving.listening("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_more_slow_bodies_than_are_received_at_a_time_only_delay_the_next(client, port):
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(service._RECEIVING):
            address = ("127.0.0.1", port)
            raw = stack.enter_context(socket.create_connection(address))
            raw.sendall(head)
        assert still_answers(client)


def test_a_client_that_does_not_read_its_answers_blocks_nobody(client, port):
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.settimeout(1)
        with pytest.raises((TimeoutError, ConnectionError)):
            raw.sendall(request * 1_000_000)  # More than the buffers in between hold.
        assert still_answers(client)
    assert still_answers(client)


def test_garbage_and_clients_that_leave_do_no_harm(client, port):
    for garbage in (
        os.urandom(5000) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            raw.sendall(garbage + b"\r\n\r\n")
            assert b"400" in raw.recv(100)
    with socket.create_connection(("127.0.0.1", port), 10) as raw:
        raw.sendall(
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\na"
        )
    assert still_answers(client)


def test_when_the_queue_is_full_the_next_is_sent_away_at_once():
    busy = Busy()
    with (
        served(busy, queue=2) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        image = png(IMAGES[0])
        asked = [
            threads.submit(client.post, "/predict?top_k=1", content=image)
            for _ in range(2)
        ]
        while client.get("/health").json()["waiting"] < 2:
            time.sleep(0.01)
        sent_away = client.post("/predict", content=image)
        busy.go_on.set()
        assert sent_away.status_code == 503
        assert sent_away.headers["retry-after"] == "1"
        assert "waiting already" in sent_away.json()["error"]
        assert [one.result().status_code for one in asked] == [200, 200]
        assert client.get("/health").json()["waiting"] == 0


def test_what_fails_and_what_is_no_number_is_an_error_that_is_counted():
    class Failing(Busy):
        def predict(self, images):
            del images
            if answers:
                return answers.pop()
            raise RuntimeError("a fault")

    answers = [Prediction(1, np.array([[np.nan, 0.0]]), ("a", "b"))]
    with served(Failing()) as port, httpx.Client() as client:
        url = f"http://127.0.0.1:{port}"
        image = png(IMAGES[0])
        first = client.post(f"{url}/predict?top_k=1", content=image)
        assert first.status_code == 500
        assert "not finite" in first.json()["error"]
        assert client.post(f"{url}/predict", content=image).status_code == 500
        metrics = httpx.get(f"{url}/metrics").text  # That connection is closed.
        assert 'cifar10_answers_total{status="500"} 2.0' in metrics


# How it starts and ends.


def test_answers_that_take_too_long_at_the_end_are_refused(monkeypatch, caplog):
    monkeypatch.setattr(serving, "_SHUTDOWN_SECONDS", 1)
    busy = Busy()
    with ThreadPoolExecutor(1) as threads:
        with served(busy) as port:
            url = f"http://127.0.0.1:{port}"
            asked = threads.submit(httpx.post, f"{url}/predict", content=png(IMAGES[0]))
            while httpx.get(f"{url}/health").json()["waiting"] < 1:
                time.sleep(0.01)
        assert asked.result().status_code == 503
        busy.go_on.set()
    assert not [record for record in caplog.records if record.exc_info]


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "uvicorn" else find(name),
    )
    with pytest.raises(UsageError, match=r"(?s)needs uvicorn, .*pip install .*serve"):
        command.run(None)


@pytest.mark.parametrize("exists", [False, True])
def test_it_waits_for_a_run_that_begins_later(tmp_path, monkeypatch, capsys, exists):
    run = tmp_path / "run"
    if exists:
        run.mkdir()
    why = "holds no run" if exists else "does not exist; no training has begun there"

    said = []

    def begin(model):
        monkeypatch.undo()
        with served(model) as port:
            url = f"http://127.0.0.1:{port}/health"
            answer = httpx.get(url)
            assert answer.status_code == 503
            assert "console says why" in answer.json()["error"]
            describe(run)
            while "There is no checkpoint in" not in "".join(said):
                time.sleep(0.02)
                said.append(capsys.readouterr().err)
            save(run, 10)
            while (answer := httpx.get(url)).status_code == 503:
                time.sleep(0.02)
            assert answer.json()["weights_step"] == 10
            said.append(capsys.readouterr().err)
            copy = shutil.copytree(run / "checkpoints/step-00000010", tmp_path / "copy")
            copy.rename(run / "checkpoints/step-00000020")
            while "is served meanwhile" not in said[-1]:  # Another thread says so.
                time.sleep(0.02)
                said.append(capsys.readouterr().err)
            assert httpx.get(url).json()["weights_step"] == 10

    monkeypatch.setattr(
        serving,
        "server",
        lambda model, _: SimpleNamespace(run=lambda _: begin(model)),
    )
    serving.run(serving.Options(str(run), port=0, interval_secs=0.05))
    assert "".join(said).startswith(f"{run} {why}")
    assert "\nLooking every 0.05 s.\n" in "".join(said)
    assert "\nServing step 10.\nThe checkpoint of step 20 is refused: " in "".join(said)
    assert "".join(said).endswith("\nStep 10 is served meanwhile.\n")


def test_the_checkpoint_that_was_asked_for_is_served(tmp_path, monkeypatch):
    describe(tmp_path / "run")
    save(tmp_path / "run", 10)
    save(tmp_path / "run", 20)
    steps = []
    run = lambda model: lambda _: steps.append(model.weights_step)  # noqa: E731
    fake = lambda model, _: SimpleNamespace(run=run(model))  # noqa: E731
    monkeypatch.setattr(serving, "server", fake)
    for step in ("10", None):
        serving.run(serving.Options(str(tmp_path / "run"), step=step, port=0))
    assert steps == [10, 20]


def test_what_cannot_be_served_is_refused(tmp_path, run_dir):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    describe(tmp_path / "other")
    save(tmp_path / "other", 10, model="wider")
    for options, why in [
        (
            {"train_dir": str(tmp_path / "file")},
            "no directory of a run; it, or a part of its path, is a file",
        ),
        ({"train_dir": str(tmp_path / "other")}, "belongs to another"),
        (
            {"savedmodel": str(tmp_path / "empty"), "train_dir": TRAIN_DIR},
            "holds no exported model",
        ),
        (
            {"savedmodel": "a" * 5000, "train_dir": TRAIN_DIR},
            "holds no exported model",
        ),
        ({"savedmodel": ""}, "--savedmodel: it is empty"),
        (
            {"savedmodel": "a", "train_dir": TRAIN_DIR, "step": "10"},
            "--step has no meaning",
        ),
        ({"savedmodel": "a"}, "--savedmodel a: --train_dir has no meaning"),
        (
            {"savedmodel": "a", "train_dir": TRAIN_DIR, "use_averages": False},
            "--use_averages has no meaning",
        ),
        (
            {"savedmodel": "a", "train_dir": TRAIN_DIR, "interval_secs": 2.0},
            "--interval_secs has no meaning",
        ),
        ({"host": "no.such.host.invalid"}, "--host no.such.host.invalid --port 0"),
        ({"host": "a\udcff"}, r"--host a\\udcff --port 0"),
        ({"port": 65536}, "--port 65536"),
        ({"queue": 0}, "--queue 0"),
        ({"timeout_secs": float("nan")}, "--timeout_secs nan"),
    ]:
        with pytest.raises(UsageError, match=why):
            serving.run(
                serving.Options(**{"train_dir": str(run_dir), "port": 0, **options})
            )
    with serving.listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UsageError, match=f"--port {port}.* in use"),
            serving.listening("127.0.0.1", port),
        ):
            pass


def test_all_addresses_are_warned_of(capsys):
    options = serving.Options("run", host="0.0.0.0")  # noqa: S104
    serving._announce(options, "0.0.0.0", 8000)  # noqa: S104
    assert "WARNING: --host 0.0.0.0: anyone" in capsys.readouterr().err
    serving._announce(options, "::1", 8000)
    written = capsys.readouterr()
    assert written.err == ""
    assert "http://[::1]:8000/predict" in written.out


def export(run_dir, path, data_dir, **options):
    options = {"output": str(path), "data_dir": str(data_dir), **options}
    assert exporter.run(exporter.Options(str(run_dir), **options)) == 0
    return path


@pytest.fixture(scope="module")
def savedmodel(tmp_path_factory, run_dir, stand_in_dir):
    """The run's model, as `python -m cifar10 export` writes it."""
    path = tmp_path_factory.mktemp("exported") / "model"
    return export(run_dir, path, stand_in_dir)


@pytest.mark.slow
@pytest.mark.parametrize("with_preprocessing", [False, True])
def test_an_exported_model_is_served_as_well(
    savedmodel, run_dir, stand_in_dir, client, tmp_path, with_preprocessing
):
    path = savedmodel
    if with_preprocessing:
        path = tmp_path / "model"
        export(run_dir, path, stand_in_dir, with_preprocessing=True)
    loaded = exported.ExportedModel(path)
    step, logits, names = loaded.predict(IMAGES)
    assert (step, names) == (loaded.weights_step, tuple("abcdefghij"))
    expected = evaluated(run_dir, 10)
    if with_preprocessing:
        expected = tf.nn.log_softmax(expected).numpy()
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    with served(loaded, train_dir=TRAIN_DIR, savedmodel=str(path)) as port:
        asked = {"params": {"top_k": 10}, "content": png(IMAGES[0])}
        answer = httpx.post(f"http://127.0.0.1:{port}/predict", **asked).json()
        health = httpx.get(f"http://127.0.0.1:{port}/health").json()
    assert health["model"] == "small"
    of_the_run = client.post("/predict", **asked).json()
    assert answer["step"] == of_the_run["step"] == 10
    for one, other in zip(
        answer["predictions"], of_the_run["predictions"], strict=True
    ):
        assert one["class"] == other["class"]
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "spec", "why"),
    [
        (lambda **given: given, tf.TensorSpec(None), r"\[2, 24, 24, 3\] values"),
        (lambda **given: given, tf.TensorSpec(BATCH, tf.uint8), "uint8"),
        (lambda **given: {**given, "b": 1}, tf.TensorSpec(BATCH), "too many values"),
        (
            lambda a: {"a": tf.reduce_sum(a)},
            tf.TensorSpec(BATCH),
            r"computes \[\] values",
        ),
    ],
)
def test_a_savedmodel_of_another_make_is_refused(savedmodel, tmp_path, made, spec, why):
    module = tf.Module()
    module.made = tf.function(made, autograph=False)
    signature = module.made.get_concrete_function(a=spec)
    tf.saved_model.save(module, str(tmp_path), signatures=signature)
    shutil.copy(savedmodel / "cifar10.json", tmp_path)
    with pytest.raises(UsageError, match=why):
        exported.ExportedModel(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"distortions": "all"}, "unknown distortions all"),
        ({"distortions": "flip_translate"}, "cannot be used"),
        ({"class_names": ["a"]}, "names 1 classes"),
    ],
)
def test_an_export_that_does_not_fit_its_description_is_refused(
    savedmodel, changes, why
):
    path = savedmodel
    described = (path / "cifar10.json").read_text()
    try:
        changed = {**json.loads(described), **changes}
        (path / "cifar10.json").write_text(json.dumps(changed))
        with pytest.raises(UsageError, match=why):
            exported.ExportedModel(path)
    finally:
        (path / "cifar10.json").write_text(described)


@contextlib.contextmanager
def started(savedmodel, *prefix):
    """A service as a program of its own; gives it and its address."""
    words = ["-m", "cifar10", "serve", "--port", "0", "--savedmodel", savedmodel]
    with subprocess.Popen(
        [*prefix, sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        try:
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


@pytest.mark.slow
def test_sigterm_ends_it_after_the_answers_under_way(savedmodel):
    with started(savedmodel) as (process, url):
        assert httpx.post(f"{url}/predict", content=png(IMAGES[0])).status_code == 200
        with socket.create_connection(
            ("127.0.0.1", int(url.rpartition(":")[2]))
        ) as raw:
            image = png(IMAGES[0])
            raw.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\n")
            raw.sendall(b"Content-Length: %d\r\n\r\n" % len(image) + image[:10])
            time.sleep(0.5)  # It is to be read before the signal.
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            raw.sendall(image[10:])
            assert read_all(raw).startswith(b"HTTP/1.1 200")
        _, said = process.communicate(timeout=30)
        assert process.returncode == 143
        ends = "python -m cifar10: stopped by SIGTERM.\n"
        assert said == f"Starting TensorFlow ...\n{ends}"


@pytest.mark.slow
def test_sigterm_ends_it_whatever_is_being_decoded(savedmodel):
    """Twenty images at once, each of which takes Pillow twenty seconds."""
    image = with_profiles(9000)
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(image)}"
    with started(savedmodel) as (process, url), contextlib.ExitStack() as stack:
        for _ in range(20):
            address = ("127.0.0.1", int(url.rpartition(":")[2]))
            raw = stack.enter_context(socket.create_connection(address))
            raw.sendall(f"{head}\r\n\r\n".encode() + image)
        while httpx.get(f"{url}/health", timeout=60).json()["waiting"] < 10:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 143
    assert "leaked" not in said
    assert said.endswith("python -m cifar10: stopped by SIGTERM.\n")


@pytest.mark.slow
def test_with_few_files_clients_that_stall_cost_neither_the_service_nor_its_end(
    savedmodel,
):
    few = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with started(savedmodel, *few) as (process, url):
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for sent in (HALF, head):
            with contextlib.ExitStack() as stack:
                for _ in range(400):
                    raw = stack.enter_context(socket.create_connection(address))
                    raw.sendall(sent)
                assert httpx.get(f"{url}/health", timeout=30).status_code == 200
            assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        image = png(IMAGES[0])
        answer = httpx.post(f"{url}/predict", content=image, timeout=60)
        assert answer.status_code == 200
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                raw = stack.enter_context(socket.create_connection(address))
                raw.sendall(head)
            httpx.get(f"{url}/health", timeout=30)
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    starts, *lines, ends = said.splitlines()
    assert starts == "Starting TensorFlow ..."
    assert ends == "python -m cifar10: stopped by SIGTERM."
    assert ["connections are too many" in line for line in lines] == [True]
