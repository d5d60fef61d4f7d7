"""The example hook that copies a run elsewhere never harms it; the copy resumes."""

import http.server
import importlib.util
import shutil
import sys
import threading
import urllib.parse
import urllib.request

import numpy as np
import pytest

import runs
import small_runs
from cifar10 import Config, train

RANDOM = np.random.default_rng(0)
DATA = (RANDOM.integers(0, 256, (40, 12, 12, 3), np.uint8), np.arange(40) % 2)
# What a store's client does: each file of a folder becomes an object.
UPLOAD = """
import pathlib, sys, urllib.parse, urllib.request
folder, url = pathlib.Path(sys.argv[1]), sys.argv[2]
for path in sorted(folder.rglob("*")):
    if path.is_file():
        name = urllib.parse.quote(str(path.relative_to(folder)))
        put = urllib.request.Request(f"{url}/{name}", path.read_bytes(), method="PUT")
        urllib.request.urlopen(put).close()
"""


@pytest.fixture(scope="module")
def copier():
    path = runs.ROOT / "examples" / "10_copy_elsewhere.py"
    spec = importlib.util.spec_from_file_location("copy_elsewhere", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CopyElsewhere


def trained(train_dir, *hooks, max_steps=6, **changes):
    given = {"model": small_runs.small, "data": DATA, "train_dir": str(train_dir)}
    given |= {"batch_size": 4, "distortions": "none", "deterministic": True}
    given |= {"checkpoint_steps": 2, "learning_rate": 1e-3, "max_steps": max_steps}
    return train(Config(**given, **changes), hooks=hooks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The values of a run that nobody copies, after six steps."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(run)
    return runs.variables(runs.checkpoint(run, 6))


def goes_on(copy, tmp_path, undisturbed):
    """Resumes from a copy of the first steps, in the place of the lost run."""
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(copy, tmp_path / "run")
    trained(tmp_path / "run")
    ends = runs.variables(runs.checkpoint(tmp_path / "run", 6))
    runs.assert_equal(ends, undisturbed)


@pytest.mark.parametrize("program", ["cp", "rsync"])
def test_a_run_copied_to_a_folder_resumes_there(copier, tmp_path, undisturbed, program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    words = {"cp": ["cp", "-r", "{run}/."], "rsync": ["rsync", "-a", "{run}/"]}
    copy = tmp_path / "copy"
    trained(tmp_path / "run", copier([*words[program], f"{copy}"]), max_steps=4)
    assert runs.checkpoint(copy, 4).is_dir()
    goes_on(copy, tmp_path, undisturbed)


def test_a_run_copied_to_an_object_store_resumes_from_there(
    copier, tmp_path, undisturbed
):
    objects = {}

    class Store(http.server.BaseHTTPRequestHandler):
        def do_PUT(self):
            size = int(self.headers["Content-Length"])
            objects[urllib.parse.unquote(self.path)] = self.rfile.read(size)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/mine"
    command = [sys.executable, "-c", UPLOAD, "{run}", url]
    trained(tmp_path / "run", copier(command), max_steps=4)
    server.shutdown()
    server.server_close()
    for name, content in objects.items():
        path = tmp_path / "store" / name.removeprefix("/mine/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    goes_on(tmp_path / "store", tmp_path, undisturbed)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["sh", "-c", "echo the disk is full >&2; exit 3"], "the disk is full"),
        (["no-such-program"], "no-such-program"),
        (["sleep", "600"], "timed out"),
    ],
)
def test_a_failing_or_hanging_copy_is_reported_and_harms_nothing(
    copier, tmp_path, undisturbed, capfd, command, told
):
    record = trained(tmp_path / "run", copier(command, timeout=0.5))
    assert record.step == 6
    runs.assert_equal(runs.variables(runs.checkpoint(tmp_path / "run", 6)), undisturbed)
    assert told in capfd.readouterr().err


def test_a_hanging_copy_does_not_delay_the_end(copier, tmp_path, capfd):
    hook = copier(["sleep", "600"], patience=0.2)
    assert trained(tmp_path / "run", hook).step == 6
    assert "has not ended" in capfd.readouterr().err


def test_an_incomplete_copy_resumes_from_the_checkpoint_before(
    copier, tmp_path, undisturbed
):
    copy = tmp_path / "copy"
    hook = copier(["cp", "-r", "{run}/.", str(copy)])
    trained(tmp_path / "run", hook, max_steps=4)
    (state,) = runs.checkpoint(copy, 4).glob("state.data*")
    state.write_bytes(state.read_bytes()[:-100])
    goes_on(copy, tmp_path, undisturbed)
