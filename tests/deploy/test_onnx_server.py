"""An exported model classifies without TensorFlow: in a few lines, and over HTTP."""

import asyncio
import importlib.util
import io
import json
import re
import struct
import subprocess
import sys
import zlib

import httpx
import numpy as np
import pytest
from PIL import Image

import picture_files
import runs
import small_runs
from cifar10.config import run_config
from cifar10.input import synthetic
from cifar10.input.pictures import decoding
from small_folders import packed
from small_pictures import HALVES

pytestmark = pytest.mark.slow

SERVER = runs.ROOT / "deploy" / "onnx_server.py"


def png(width=40, height=30):
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def huge():
    """A head that claims so many pixels that Pillow takes it for a bomb."""
    picture = bytearray(png())
    picture[16:24] = struct.pack(">2I", 20_000, 20_000)
    picture[29:33] = struct.pack(">I", zlib.crc32(picture[12:29]))
    return bytes(picture)


def transparent():
    """A picture whose pixels have colours where nobody sees them."""
    pixels = np.random.default_rng(2).integers(0, 256, (30, 40, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def deep():
    """A grey picture of 16 bits."""
    pixels = np.linspace(0, 65535, 1200).reshape(30, 40).astype(np.uint16)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PICTURES = {"cat.png": png(), "icon.png": transparent(), "xray.png": deep()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, stand_in_dir):
    """A folder with pictures, and an exported model; `predicted` are the run's own."""
    folder = tmp_path_factory.mktemp("onnx")
    run, pictures = folder / "run", [folder / name for name in PICTURES]
    for picture in pictures:
        picture.write_bytes(PICTURES[picture.name])
    named = {"model": "small_runs:small", "class_names": [*synthetic.CLASS_NAMES]}
    small_runs.describe(run, data_dir=str(stand_in_dir), **named)
    run_config.mark_as_own((run / "config.json").read_bytes())
    small_runs.save(run, 10, model="small_runs:small")
    words = ("--output", folder / "model.onnx", "--with_preprocessing")
    done = runs.call("cifar10/__main__.py", "export", *words, "--train_dir", run)
    assert done.returncode == 0, done.stderr
    words = ("predict", *pictures, "--json", "--train_dir", run)
    done = runs.call("cifar10/__main__.py", *words)
    (folder / "predicted.json").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def predicted(folder):
    lines = (folder / "predicted.json").read_text().splitlines()
    return [json.loads(line)["predictions"] for line in lines]


@pytest.fixture(scope="module")
def server():
    spec = importlib.util.spec_from_file_location("onnx_server", SERVER)
    server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(server)
    return server


@pytest.fixture(scope="module")
def client(folder, server):
    return Client(server.application(server.Classifier(str(folder / "model.onnx"))))


class Client:
    """Asks a service in this process."""

    def __init__(self, app):
        self._app = app

    def get(self, path):
        return asyncio.run(self._ask("GET", path))

    def post(self, path, content):
        return asyncio.run(self._ask("POST", path, content))

    async def _ask(self, method, path, content=None):
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://it") as one:
            return await one.request(method, path, content=content)


def assert_alike(found, expected):
    assert [one["class"] for one in found] == [one["class"] for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["probability"] == pytest.approx(other["probability"], abs=2e-3)


def test_the_documented_code_names_the_predicted_class(folder, predicted):
    text = (runs.ROOT / "docs" / "tools.md").read_text()
    (code,) = re.findall(r"```python\n(import json.*?)```", text, re.DOTALL)
    checked = f"{code}\nimport sys\nassert 'tensorflow' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", checked],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    name, probability = done.stdout.rsplit(maxsplit=1)
    found = [{"class": name, "probability": float(probability)}]
    assert_alike(found, predicted[0][:1])


def test_the_server_answers_like_serve_but_without_tensorflow(client, predicted):
    for content, expected in zip(PICTURES.values(), predicted, strict=True):
        answer = client.post("/predict", content=content)
        assert answer.status_code == 200, answer.text
        assert answer.json()["step"] == 10
        assert_alike(answer.json()["predictions"], expected)
    (best,) = client.post("/predict?top_k=1", content=png(9, 70)).json()["predictions"]
    assert 0 < best["probability"] <= 1
    assert client.get("/health").json()["weights_step"] == 10
    alone = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sys.modules)"
    command = [sys.executable, "-c", alone, str(SERVER)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not {"tensorflow", "keras", "cifar10"} & {*loaded.split()}


def test_every_kind_of_picture_is_decoded_as_in_training(server):
    pictures = {name: content for name, content, _ in picture_files.png_files()}
    pictures |= dict(picture_files.other_files())
    pictures["large"] = packed(HALVES, "JPEG")
    for name, content in pictures.items():
        expected = decoding.decode(content, name, 11, 13)
        found = np.asarray(server.decode(content, 11, 13))
        np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (packed(np.full((20, 20), 4095, np.uint16)), "at most 4095"),
        (picture_files.png(np.full((9, 9, 3), 900), 16, 2), "at most 1023"),
        (picture_files.png(np.full((9, 9, 2), [4095, 65535]), 16, 4), "at most 4095"),
        (packed(np.full((9, 9), 0.5, np.float32), "TIFF"), "neither"),
        (packed(np.full((9, 9), 2**20, np.int32), "TIFF"), "neither"),
    ],
)
def test_pictures_that_training_refuses_are_refused_with_its_reason(
    client, content, named
):
    with pytest.raises(decoding.PictureError, match=named):
        decoding.decode(content, "it", 8, 8)
    answer = client.post("/predict", content=content)
    assert answer.status_code == 400
    assert named in answer.json()["error"]


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_pictures_that_curl_joins_are_refused(client, form):
    one = packed(HALVES, form)
    answer = client.post("/predict", content=one + b"&" + png())
    assert answer.status_code == 400
    assert "several pictures" in answer.json()["error"]
    assert client.post("/predict", content=one + b"&top_k=5").status_code == 200


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/predict", b"no picture", 400),
        ("/predict", b"", 400),
        ("/predict", png()[:-40], 400),
        ("/predict", huge(), 400),
        ("/predict?top_k=0", png(), 400),
        ("/predict?top_k=\u00b2", png(), 400),
        ("/predict", bytes(10_000_001), 413),
        ("/elsewhere", png(), 404),
    ],
)
def test_bad_requests_are_refused_with_the_reason_and_counted(
    client, path, content, status
):
    answer = client.post(path, content=content)
    assert answer.status_code == status
    assert answer.json()["error"]
    counted = client.get("/metrics").text
    refused = re.search(r'requests_total{status="4xx"} (\d+)', counted)
    assert int(refused[1]) > 0 or path == "/elsewhere"
    assert int(re.search(r"answer_seconds_count (\d+)", counted)[1]) >= int(refused[1])


def test_exports_without_preprocessing_and_unusable_files_are_refused(folder):
    other = folder / "other.onnx"
    words = ("--output", other, "--train_dir", folder / "run")
    assert runs.call("cifar10/__main__.py", "export", *words).returncode == 0
    command = [sys.executable, str(SERVER), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--with_preprocessing" in done.stderr
    (folder / "text.onnx").write_text("no model")
    for name in ("text.onnx", "missing.onnx"):
        command = [sys.executable, str(SERVER), str(folder / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert name in done.stderr
