"""The HTTP service: right answers, clear refusals, and no client blocks another."""

import base64
import contextlib
import math
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

import runs
from cifar10.errors import UsageError
from cifar10.follower import Follower
from cifar10.follower.live_copy import Prediction
from cifar10.tools import serve, service
from small_folders import packed
from small_pictures import bomb, with_profiles
from small_runs import IMAGES, describe, evaluated, save

PATIENCE = 1.0
NAMES = "abcdefghij"
pytestmark = pytest.mark.usefixtures("registered")
PNG = packed(IMAGES[0])
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"
UNFINISHED_HEAD = b"GET /health HTTP/1.1\r\nHost: loc"
UNFINISHED_BODY = HEAD + b"Content-Length: 1000\r\n\r\nabc"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(PNG) + PNG


@contextlib.contextmanager
def served(model, *, last_seconds=7, timeout=PATIENCE):
    """A service in a thread; gives a client of it."""
    served = service.Service(model, "127.0.0.1", 1_000_000, timeout)
    with serve.listen("127.0.0.1", 0) as listener:
        server = served.create_server()
        server.config.timeout_graceful_shutdown = last_seconds
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            with client_of(url) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()


@contextlib.contextmanager
def connected(client, *sent):
    """A connection for each of the texts, over which it was sent."""
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", client.base_url.port)
        sockets = []
        for text in sent:
            raw = socket.create_connection(address, timeout=60)
            sockets.append(stack.enter_context(raw))
            with contextlib.suppress(ConnectionError):  # It may be closed at once.
                raw.sendall(text)
        yield sockets


def client_of(url):
    """Returns a client that keeps no connection, which the service would end."""
    return httpx.Client(
        base_url=url, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
    )


def escaped(character):
    """Returns a character as JSON of .NET has it."""
    return character if character.isalnum() else f"\\u{ord(character):04X}"


def read_all(raw):
    return b"".join(iter(lambda: raw.recv(65536), b""))


def error_of(answer, status):
    assert answer.status_code == status
    return answer.json()["error"]


def still_answers(client):
    return client.post("/predict", content=PNG).status_code == 200


def wait_until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    pytest.fail("it did not happen within a minute")


@pytest.fixture(scope="module")
def follower(small_run):
    with Follower(small_run) as follower:
        follower.look()
        yield follower


@pytest.fixture(scope="module")
def client(follower):
    with served(follower) as client:
        yield client


class Busy:
    """A copy whose predictions take until they are let go."""

    weights_step, age_seconds = 1, 0.0
    image_shape = (32, 32, 3)
    names = {"model": "busy", "class_names": ("a", "b", "c")}  # noqa: RUF012

    def __init__(self, value=0.0):
        self.go_on = threading.Event()
        self.asked = 0
        self.value = value

    def predict(self, images):
        self.asked += 1
        self.go_on.wait(60)
        return Prediction(1, np.full((len(images), 3), self.value), ("a", "b", "c"))


# What it answers.


def test_answers_equal_an_evaluation(client, small_run):
    logits = evaluated(small_run, 20).astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for image, expected in zip(IMAGES, probabilities, strict=True):
        answer = client.post("/predict?top_k=10", content=packed(image, "BMP")).json()
        assert answer["step"] == 20
        found = {one["class"]: one["probability"] for one in answer["predictions"]}
        # A batch of a single image rounds otherwise without oneDNN.
        np.testing.assert_allclose([found[n] for n in NAMES], expected, rtol=1e-4)


def test_health_describes_the_weights(client):
    health = client.get("/health")
    assert health.json()["weights_step"] == 20
    assert health.json()["age_seconds"] >= 0
    assert health.json()["class_names"] == list(NAMES)
    assert str(Path.cwd()) not in health.text, "paths are not for clients"


def values_of(text):
    """The values in Prometheus's text format, by name."""
    sample = re.compile(r'(\w+(?:\{\w+="[^"]*"\})?) (\S+)\n')
    assert sample.sub("", text) == ""
    return {name: float(value) for name, value in sample.findall(text)}


def test_metrics_count_requests_by_their_outcome(follower):
    of = 'cifar10_requests_total{{status="{}"}}'.format
    with served(follower) as client:
        for _ in range(2):
            assert client.post("/predict", content=PNG).status_code == 200
        assert client.post("/predict", content=b"x").status_code == 400
        assert client.get("/predict").status_code == 404
        assert client.get("/health").status_code == 200
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = values_of(answer.text)
        assert (found[of("2xx")], found[of("4xx")], found[of("5xx")]) == (2, 2, 0)
        assert found["cifar10_images_total"] == 2
        assert found["cifar10_answer_seconds_count"] == 4
        assert found["cifar10_answer_seconds_sum"] > 0
        assert found["cifar10_weights_step"] == follower.weights_step
        assert values_of(client.get("/metrics").text) == found, "it does not count"
        strange = client.get("/metrics", headers={"Host": "example.org"})
        assert strange.status_code == 400


def test_metrics_are_available_before_the_first_checkpoint_and_after_failures():
    failing = Busy(np.nan)
    failing.go_on.set()
    with served(failing) as client:
        client.post("/predict", content=PNG)
        failing.weights_step = None
        client.post("/predict", content=PNG)
        found = values_of(client.get("/metrics").text)
        assert found['cifar10_requests_total{status="5xx"}'] == 2
        assert math.isnan(found["cifar10_weights_step"])


def test_a_request_for_too_many_classes_gets_all_classes(client):
    for query, count in (("", 3), ("?top_k=5", 5), ("?top_k=11", 10)):
        answer = client.post(f"/predict{query}", content=PNG).json()
        assert len(answer["predictions"]) == count


def test_simultaneous_clients_each_get_their_own_answer(client):
    images = [packed(image) for image in IMAGES] * 20
    answers = [client.post("/predict", content=image).json() for image in images[:7]]
    assert len(set(map(str, answers))) == len(IMAGES)
    with ThreadPoolExecutor(16) as threads:
        found = threads.map(lambda one: client.post("/predict", content=one), images)
        assert [one.json() for one in found] == answers * 20


@pytest.mark.parametrize("image", IMAGES[:3])
def test_a_form_and_base64_get_the_same_answer_as_the_file(client, image):
    for content in (packed(image), packed(image, "JPEG", quality=95)):
        coded = base64.b64encode(content).decode()
        lines = base64.encodebytes(content).decode()
        url_safe = base64.urlsafe_b64encode(content).decode().rstrip("=")
        expected = client.post("/predict", content=content).json()
        assert len(expected["predictions"]) == 3
        for request in (
            {"files": {"file": ("cat.png", content, "image/png")}},
            {"files": {"image": content}, "data": {"top": "5", "note": "\r\n\r\n--"}},
            {"json": {"instances": [{"b64": coded}]}},
            {"json": {"instances": [{"image_bytes": {"b64": lines}}]}},
            {"json": {"signature_name": "serving_default", "inputs": url_safe}},
            {"json": {"image": f"data:image/png;base64,{coded}"}},
            {"content": '{"b64": "' + coded.replace("/", "\\/") + '"}'},
            {"content": '{"b64": "' + "".join(map(escaped, coded)) + '"}'},
            {"json": {"id": "0" * 64, "b64": coded, "labels": ["a", "b"]}},
            {"json": {"images": [coded], "size": [32, 32]}},
            {"content": coded},
            {"data": {"image": coded}},
            {"content": lines},
        ):
            assert client.post("/predict", **request).json() == expected, request


def test_a_request_with_several_pictures_is_refused(client):
    """The client would take the answer of one picture for the other's."""
    good = base64.b64encode(PNG).decode()
    for other in (good, base64.b64encode(PNG[:60]).decode(), "A" * 80):
        for request in (
            {"json": {"instances": [{"b64": good}, {"b64": other}]}},
            {"json": {"instances": [{"b64": other}, {"b64": good}]}},
            {"json": {"inputs": {"image": [other, good]}}},
            {"files": [("a", PNG), ("b", base64.b64decode(other + "=="))]},
        ):
            answer = client.post("/predict", **request)
            assert "several pictures" in error_of(answer, 400), request
    for bad in ({"b64": "no"}, {"b64": ""}, "no", None, {"image": good[:80]}):
        for key in ("instances", "inputs", "images"):
            answer = client.post("/predict", json={key: [{"image": good}, bad]})
            assert "several pictures" in error_of(answer, 400), (key, bad)
    for others in ([good, ""], {"images": [good, ""]}, {"a": good, "b": good}):
        assert "several" in error_of(client.post("/predict", json=others), 400)
    many = [(f"file{number}", PNG) for number in range(101)]
    assert "parts" in error_of(client.post("/predict", files=many), 400)
    headers = {"Content-Type": "multipart/form-data; boundary=another"}
    form = b"--one\r\nname\r\n\r\n" + PNG + b"\r\n--one--"
    answer = client.post("/predict", content=form, headers=headers)
    assert "boundary" in error_of(answer, 400)
    for other in (good, ""):
        twice = f'{{"b64": "{good}", "b64": "{other}"}}'
        assert "several" in error_of(client.post("/predict", content=twice), 400)
    deep = "[" * 100_000 + f'"{good}"'
    assert "JSON" in error_of(client.post("/predict", content=deep), 400)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_pictures_joined_in_one_body_are_refused(client, form):
    random = np.random.default_rng(0)
    noise = (random.integers(0, 256, (n, n, 3), np.uint8) for n in range(64, 200))
    files = (packed(image, form) for image in noise)
    one = next(file for file in files if len(file) % 3 == 0)  # Its base64 has no `=`.
    for other in (PNG, *(packed(IMAGES[1], kind) for kind in ("JPEG", "BMP"))):
        first, second = (base64.b64encode(file).decode() for file in (one, other))
        for request in (
            {"content": one + b"&" + other},
            {"content": base64.b64encode(one + b"&" + other)},
            {"content": f"{first}\n{second}"},
            {"content": f"{first}\r\n{second}\r\n"},
            {"content": f"{first},{second}"},
            {"json": {"b64": f"{first}\n{second}"}},
            {"files": {"image": one + b"&" + other}},
        ):
            answer = client.post("/predict", **request)
            assert "several pictures" in error_of(answer, 400), request
    if form not in ("JPEG", "GIF"):
        answer = client.post("/predict", content=one + PNG)
        assert "several pictures" in error_of(answer, 400)


def test_a_picture_with_more_behind_it_is_answered(client):
    """Such as a preview or a film, which phones and cameras put there."""
    plain, preview = (packed(image, "JPEG") for image in IMAGES[:2])
    expected = client.post("/predict", content=plain).json()["predictions"]
    # With a thumbnail, and so long that its last line of base64 is full.
    thumbnail = b"&" + preview + bytes(-(len(plain) + len(preview) + 5) % 57)
    head = b"\xff\xd8\xff\xfe" + (len(thumbnail) + 2).to_bytes(2, "big")
    jpeg = head + thumbnail + plain[2:]
    for content in (
        jpeg + preview,
        jpeg + b"\0\0\0\x18ftypmp42" + preview,
        jpeg + b"&top_k=5",
        jpeg + b"\r\n",
        base64.b64encode(jpeg + preview),
        base64.encodebytes(jpeg + preview),
        base64.encodebytes(jpeg + preview).replace(b"\n", b"\r\n"),
    ):
        answer = client.post("/predict", content=content)
        assert answer.status_code == 200, answer.text
        assert answer.json()["predictions"] == expected
    bmp = packed(IMAGES[0], "BMP")
    for content in (PNG, bmp, bmp[:2] + bytes(4) + bmp[6:]):  # Some write no length.
        for more in (b"&", b"&a=1", b"\n", bytes(9)):
            assert client.post("/predict", content=content + more).is_success


def test_a_head_request_for_health_is_answered(client):
    answer = client.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


# What it refuses.


def test_bad_requests_are_refused_and_the_service_continues(client):
    def ask(content=PNG, query=""):
        return client.post(f"/predict{query}", content=content)

    for answer, status, why in (
        (ask(b"\xba" * 1000), 400, "PNG"),
        (ask(b""), 400, "empty"),
        (ask(b'{"image": "cat.png"}'), 400, "PNG"),
        (ask(bytes(4) + b"ftypheic"), 400, "JPEG"),
        (ask(PNG[:100]), 400, "damaged"),
        (ask(bomb(3_536, 3_536)), 400, "12,500,000"),
        (ask(bytes(1_000_001)), 413, "1,000,000"),
        (ask(query="?top_k=0"), 400, "top_k"),
        (ask(query=f"?top_k={'9' * 5000}"), 400, "top_k"),
        (ask(PNG.replace(b"\r", b"").replace(b"\n", b"")), 400, "--data-binary"),
        (client.post("/predict", files=[("image", PNG)] * 2), 400, "one file"),
        (client.post("/predict", files={"image": b"no"}), 400, "one file"),
        *(
            (client.post("/predict", json={"b64": n * "n"}), 400, "instances")
            for n in range(32, 37)
        ),
        (client.get("/nothing"), 404, "Not Found"),
        (client.get("/predict"), 404, "POST /predict"),
    ):
        assert why in error_of(answer, status)
    assert still_answers(client)


def test_a_large_body_is_refused_with_and_without_chunks(client):
    """The client may read nothing before it has sent all of it."""
    body = bytes(20_000_000)
    pieces = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    length = b"Content-Length: 20000000\r\n"
    closes = b"Connection: close\r\n\r\n"
    for sent in (
        HEAD.replace(b"1.1", b"1.0") + length + b"\r\n" + body,
        HEAD + length + closes + body,
        HEAD + chunked + closes + pieces,
    ):
        with connected(client, sent) as (raw,):
            assert read_all(raw).startswith(b"HTTP/1.1 413")


def test_request_with_two_lengths_is_refused_and_nothing_after_it_is_read(client):
    """A proxy that believes the other length takes what follows for another body."""
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(client, HEAD + both + smuggled) as (raw,):
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


def test_requests_for_other_hosts_or_from_other_sites_are_refused(client):
    own = f"{socket.gethostname()}:8000"
    evil = ("evil.example:8000", "localhost.evil.example", "", "evil@localhost")
    evil += ("localhost/evil", "[::1]evil")
    good = ("LOCALHOST:8000", own.upper(), "192.0.2.1:8000", "[::1]:8000")
    for host in evil + good:
        answer = client.get("/health", headers={"Host": host})
        assert answer.status_code == (200 if host in good else 400), host
    for site, status in (("cross-site", 400), ("same-site", 400), ("same-origin", 200)):
        answer = client.post("/predict", headers={"Sec-Fetch-Site": site}, content=PNG)
        assert answer.status_code == status, site


# Clients that stall.


def stalled(client, bodies):
    """Clients that stall, 60 each before, in and after heads, and some in bodies."""
    health = UNFINISHED_HEAD + b"alhost\r\nContent-Length: 10\r\n\r\na"
    heads = (b"", UNFINISHED_HEAD, health) * 60
    return connected(client, *heads, *[UNFINISHED_BODY] * bodies)


def test_stalled_clients_block_nobody_and_get_an_answer(follower, client):
    with served(follower, timeout=120.0) as other, stalled(other, 50):
        assert still_answers(other)
    with stalled(client, 5) as sockets:
        for raw in sockets[180:]:
            assert read_all(raw).startswith(b"HTTP/1.1 408")
        assert still_answers(client)


def test_an_unfinished_request_is_answered_with_the_reason(client):
    with connected(client, UNFINISHED_BODY) as (raw,):
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 1 seconds" in answer


def test_an_unfinished_head_ends_its_connection(client):
    whole = UNFINISHED_HEAD + b"alhost\r\n\r\n"
    heads = (b"", UNFINISHED_HEAD, whole + UNFINISHED_HEAD)
    with connected(client, *heads) as sockets:
        assert [read_all(raw).count(b"HTTP/1.1 ") for raw in sockets] == [0, 0, 1]
    busy = Busy()
    with served(busy) as other, connected(other, WHOLE) as (raw,):
        time.sleep(1.5 * PATIENCE)  # Its first head had to arrive by then.
        busy.go_on.set()
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")
        raw.sendall(UNFINISHED_HEAD)
        read_all(raw)


def test_connections_beyond_the_limit_are_closed_and_others_answered(monkeypatch):
    monkeypatch.setattr(service, "connection_limit", lambda: 16)
    busy = Busy()
    with served(busy, timeout=120.0) as client, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(client.post, "/predict", content=PNG)
        wait_until(lambda: busy.asked)
        expecting = UNFINISHED_BODY.replace(
            b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"
        )
        with connected(client, *[expecting] * 15) as bodies:
            for body in bodies:  # Their heads have been read.
                assert body.recv(100).startswith(b"HTTP/1.1 100")
            with (
                connected(client, WHOLE) as (last,),
                contextlib.suppress(ConnectionError),
            ):
                assert read_all(last) == b""
            busy.go_on.set()
            assert asked.result().status_code == 200
        wait_until(lambda: answers_again(client))


def test_health_is_answered_beside_many_silent_clients(follower, monkeypatch):
    monkeypatch.setattr(service, "connection_limit", lambda: 16)
    with served(follower, timeout=120.0) as client:
        heads = (b"", UNFINISHED_HEAD) * 40
        with connected(client, *heads), connected(client, UNFINISHED_BODY) as (body,):
            for _ in range(20):
                assert client.get("/health").status_code == 200
                assert still_answers(client)
            body.sendall(bytes(997))
            assert body.recv(100).startswith(b"HTTP/1.1 400")


def answers_again(client):
    try:
        return still_answers(client)
    except httpx.TransportError:  # Closed, as the others are not yet.
        return False


def test_connection_sends_a_short_answer_at_once():
    """It does not keep the body back until the client has acknowledged the head."""
    with (
        serve.listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_open_requests_are_rejected_at_the_end(caplog):
    busy = Busy()
    with ThreadPoolExecutor(2) as threads:
        with served(busy, last_seconds=1) as client:
            url = client.base_url.join("/predict")
            asked = [threads.submit(httpx.post, url, content=PNG) for _ in range(2)]
            wait_until(lambda: busy.asked == 2)
        assert [one.result().status_code for one in asked] == [503, 503]
        busy.go_on.set()
    assert not [record for record in caplog.records if record.exc_info]


def test_failures_and_nonfinite_numbers_are_errors_of_the_service():
    for value in (np.nan, "no number"):
        failing = Busy(value)
        failing.go_on.set()
        with served(failing) as client:
            assert client.post("/predict", content=PNG).status_code == 500


# How it starts and ends.


def test_wrong_options_are_refused(tmp_path, small_run):
    describe(tmp_path / "other")
    save(tmp_path / "other", 10, model="wider")
    given = {"train_dir": str(small_run), "port": 0}
    with pytest.raises(UsageError, match="another --host"):
        serve.listen("192.0.2.1", 0)  # A block that no machine has.
    with serve.listen("127.0.0.1", 0) as taken:
        in_use = taken.getsockname()[1]
        for options, why in (
            ({"train_dir": str(tmp_path / "other")}, "another model"),
            ({"port": in_use}, "--port"),
            ({"timeout_secs": float("nan")}, "--timeout_secs"),
        ):
            with pytest.raises(UsageError, match=why):
                serve.serve_model(serve.Options(**{**given, **options}))


# With few files that it may open.
PROGRAM = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
runpy.run_module("cifar10", run_name="__main__")
"""


@pytest.fixture(scope="module")
def small_copy(tmp_path_factory):
    """What is enough to serve: a configuration and a checkpoint."""
    run_dir = tmp_path_factory.mktemp("copy") / "run"
    describe(run_dir, model="tutorial")
    save(run_dir, 10, model="tutorial")
    return run_dir


@contextlib.contextmanager
def started(run_dir):
    """A service as a program of its own; gives it and a client."""
    words = ("serve", "--port", "0", "--train_dir", run_dir, "--timeout_secs", "5")
    with runs.started("-c", PROGRAM, *words) as process:
        url = process.stdout.readline().split()[-1]
        with client_of(url) as client:
            yield process, client


def ended(process):
    """Returns what the service has written, once it has ended after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=90)
    assert process.returncode == 143, said
    return said


@pytest.mark.slow
def test_sigterm_ends_the_service_even_while_it_decodes(small_copy):
    """Twenty images at once, each of which takes Pillow twenty seconds."""
    image = with_profiles(9000)
    sent = HEAD + b"Content-Length: %d\r\n\r\n" % len(image) + image
    with started(small_copy) as (process, client), connected(client, *[sent] * 20):
        tasks = Path(f"/proc/{process.pid}/task")
        wait_until(
            lambda: (
                sum(len(one.read_text().split()) for one in tasks.glob("*/children"))
                >= 4
            )  # One for each thread.
        )
        time.sleep(1)
        assert "leaked" not in ended(process)


@pytest.mark.slow
def test_stalled_clients_block_neither_service_nor_shutdown(small_copy):
    """Nor do they keep a request from its answer that is under way at the signal."""
    with started(small_copy) as (process, client):
        for sent in (UNFINISHED_HEAD, UNFINISHED_BODY):
            with connected(client, *[sent] * 400):
                wait_until(lambda: answers_again(client))
        sent = [UNFINISHED_BODY] * 50
        with connected(client, *sent, WHOLE[:-10]) as (*_, raw):
            time.sleep(0.5)  # It is to be read before the signal.
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            raw.sendall(WHOLE[-10:])
            assert read_all(raw).startswith(b"HTTP/1.1 200")
            said = ended(process)
    assert "Traceback" not in said


def test_the_requested_step_is_served(small_run, monkeypatch):
    steps = []

    def note(model, *_):
        steps.append(model.weights_step)
        server = SimpleNamespace(run=lambda _: None)
        return SimpleNamespace(create_server=lambda: server, close=lambda: None)

    monkeypatch.setattr(service, "Service", note)
    for step in ("10", None):
        serve.serve_model(serve.Options(train_dir=str(small_run), step=step, port=0))
    assert steps == [10, 20]


def test_the_processes_that_decode_end_with_the_service(small_run, monkeypatch):
    def fail(_):
        raise LookupError

    ended = []
    server = SimpleNamespace(run=fail)
    made = SimpleNamespace(create_server=lambda: server, close=lambda: ended.append(1))
    monkeypatch.setattr(service, "Service", lambda *_: made)
    with pytest.raises(LookupError):
        serve.serve_model(serve.Options(train_dir=str(small_run), port=0))
    assert ended == [1]


def test_the_requested_values_are_served(small_run, monkeypatch):
    """The averages, or the last ones, which answer otherwise."""
    answers = []

    def note(model, *_):
        answers.append(model.predict(IMAGES).logits)
        server = SimpleNamespace(run=lambda _: None)
        return SimpleNamespace(create_server=lambda: server, close=lambda: None)

    monkeypatch.setattr(service, "Service", note)
    options = {"train_dir": str(small_run), "port": 0}
    for use_averages, answer in ((True, 0), (False, 1)):
        serve.serve_model(serve.Options(**options, use_averages=use_averages))
        expected = evaluated(small_run, 20, use_averages=use_averages)
        np.testing.assert_allclose(answers[answer], expected, rtol=1e-4)
    assert (answers[0] != answers[1]).any()
