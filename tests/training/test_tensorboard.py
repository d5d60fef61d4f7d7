"""What TensorBoard's server shows of a run that was killed and resumed."""

import http.client
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest
import tensorboard_data_server
from tensorboard.backend.event_processing import event_file_loader

import runs
from cifar10.training.summary_budget import SummaryBudget

STEPS = list(range(5, 41, 5))  # Those with a line on the console.
SUMMARY_STEPS = list(range(10, 41, 10))
LAYERS = ["conv1", "relu1", "conv2", "local3", "local4", "softmax_linear"]
VARIABLES = [
    f"{layer}/{name}"
    for layer in LAYERS
    if layer != "relu1"
    for name in ("kernel", "bias")
]
LOSSES = ["total_loss", "cross_entropy", "weight_decay"]
WEIGHT_LOSSES = ["weight_loss/local3/kernel", "weight_loss/local4/kernel"]
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


pytestmark = pytest.mark.slow


def output_of(*words):
    done = runs.call(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory, stand_in_dir):
    """A run that was killed beyond a checkpoint, resumed and scored.

    Its directory, the lines of metrics.jsonl and what the evaluation printed.
    """
    train_dir = tmp_path_factory.mktemp("tensorboard") / "run"
    flags = {"num_gpus": 2, "log_frequency": 5, "checkpoint_steps": 20}
    flags |= {"max_steps": STEPS[-1], "model": "tutorial"}
    words = runs.training_flags(train_dir, stand_in_dir, **flags)
    script = runs.ROOT / "train_multi_gpu.py"
    with runs.started(script, *words) as process:
        # The histograms before this line push the scalars of step 25 into the file.
        runs.read_until(process.stdout, "step 30,")
        process.kill()
    assert process.returncode == -signal.SIGKILL
    [left] = (train_dir / "train").iterdir()
    events = event_file_loader.EventFileLoader(str(left)).Load()
    last_written = max(event.step for event in events)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SummaryBudget, "allows", lambda _: True)  # All are written.
        resumed = re.search(r"from step (\d+) ", output_of(script.name, *words))
    assert resumed, "the run began anew"
    assert last_written > int(resumed[1]), "the resume has nothing to take back"

    scored = output_of("eval.py", "--run_once", "--json", "--train_dir", train_dir)
    return train_dir, runs.logged(train_dir), json.loads(scored)


class Board:
    """A TensorBoard server, asked over HTTP."""

    def __init__(self, url):
        self.url = url

    def get(self, path, data=None, **query):
        """Returns the bytes of an answer; `data` is sent as JSON by POST."""
        request = urllib.request.Request(  # noqa: S310 - http of our own server.
            f"{self.url}data/{path}?{urllib.parse.urlencode(query)}",
            data=None if data is None else json.dumps(data).encode(),
            headers={"Content-Type": "application/json"},
        )
        with NO_PROXY.open(request, timeout=20) as answer:
            return answer.read()

    def ask(self, plugin, path, data=None, **query):
        return json.loads(self.get(f"plugin/{plugin}/{path}", data, **query))

    def tags(self, plugin):
        """Tags by run."""
        found = self.ask(plugin, "tags")
        return {name: sorted(tags) for name, tags in found.items()}

    def curve(self, run, tag):
        """(step, value) of all points of a scalar."""
        points = self.ask("scalars", "scalars", run=run, tag=tag)
        return [(step, np.float32(value)) for _, step, value in points]

    def steps(self, plugin, path, **query):
        """The steps of all entries of a tag of another kind."""
        entries = self.ask(plugin, path, **query)
        return [one["step"] if isinstance(one, dict) else one[1] for one in entries]

    def has_read_all(self):
        """Whether what the run and the evaluation wrote last is there."""
        return (
            "evaluation" in self.ask("text", "tags").get("eval", ())
            and self.curve("train", "examples_per_sec")[-1][0] == STEPS[-1]
        )


def wait_until(happened, process, log, seconds=60):
    """Returns the first true value of `happened`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if value := happened():
                return value
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError):
            pass  # Not listening yet, or that run has not been found yet.
        time.sleep(0.2)
    pytest.fail(f"TensorBoard does not show the run:\n{log.read_text()}")


@pytest.fixture(scope="module", params=["true", "false"], ids="load_fast={}".format)
def board(request, run, tmp_path_factory):
    """A server on the run; both of its ways to read event files."""
    if request.param == "true" and tensorboard_data_server.server_binary() is None:
        pytest.skip("TensorBoard has no fast loader for this platform")
    log = tmp_path_factory.mktemp("server") / "log"
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(run[0])]
    flags = ["--host", "127.0.0.1", "--port", "0", "--load_fast", request.param]
    with (
        log.open("w") as file,
        subprocess.Popen([*words, *flags], stdout=file, stderr=file) as process,
    ):
        try:
            address = re.compile(r"http://127\.0\.0\.1:\d+/")
            found = wait_until(lambda: address.search(log.read_text()), process, log)
            board = Board(found.group())
            wait_until(board.has_read_all, process, log)
            yield board
        finally:
            process.terminate()  # Its fast loader ends with it.
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


# Curves.


def test_training_and_evaluation_share_tags(board):
    tags = board.tags("scalars")
    assert set(tags) == {"train", "eval"}
    assert tags["train"] == sorted(
        [
            *LOSSES,
            "precision @ 1",
            *(f"{name}/average" for name in [*LOSSES, "precision @ 1"]),
            "learning_rate",
            "examples_per_sec",
            "gradient_norm",
            *(f"sparsity/{layer}" for layer in LAYERS),
            *WEIGHT_LOSSES,
        ]
    )
    assert tags["eval"] == sorted(
        [*LOSSES, "precision @ 1", "precision @ 5", "macro F1", "balanced accuracy"]
    )


def test_curves_hold_the_values_of_metrics_jsonl_and_of_the_evaluation(board, run):
    """The rates tell the resumed training's points from the killed one's."""
    _, lines, scored = run
    assert [line["step"] for line in lines] == STEPS
    assert [step for step, _ in board.curve("train", "total_loss")] == STEPS
    for name in set(lines[0]) - {"step", "time", "seconds"}:
        expected = [
            (line["step"], np.float32(line[name]))
            for line in lines
            if line[name] is not None
        ]
        assert board.curve("train", name) == expected, name
    for name in board.tags("scalars")["eval"]:
        expected = [(STEPS[-1], np.float32(scored[name]))]
        assert board.curve("eval", name) == expected, name


def test_sparsity_and_weight_decay_are_shown_by_layer_and_variable(board):
    last = {}
    for layer in LAYERS:
        curve = board.curve("train", f"sparsity/{layer}")
        assert [step for step, _ in curve] == SUMMARY_STEPS
        last[layer] = curve[-1][1]
    # A ReLU makes zeros, fewer where a maximum follows; the logits have none.
    assert 1 > last["conv1"] > last["relu1"] > 0.1
    assert last["softmax_linear"] == 0
    # Only the tutorial's two hidden layers have any: what the loss exceeds CE by.
    curves = {name: dict(board.curve("train", name)) for name in WEIGHT_LOSSES}
    total = dict(board.curve("train", "total_loss"))
    cross_entropy = dict(board.curve("train", "cross_entropy"))
    for step in SUMMARY_STEPS:
        decay = sum(curve[step] for curve in curves.values())
        assert decay == pytest.approx(total[step] - cross_entropy[step], rel=0.01)


# The other tabs.


def test_histograms_and_images_are_shown(board):
    tags = board.tags("histograms")["train"]
    kinds = {"variables": VARIABLES, "gradients": VARIABLES, "activations": LAYERS}
    assert tags == sorted(
        f"{kind}/{of}" for kind, names in kinds.items() for of in names
    )
    for tag in tags[:: len(VARIABLES)]:
        shown = board.steps("histograms", "histograms", run="train", tag=tag)
        assert shown == SUMMARY_STEPS, tag
    query = {"run": "train", "tag": "distorted_images"}
    assert board.steps("images", "images", sample=0, **query) == SUMMARY_STEPS
    query = {"run": "eval", "tag": "confusion_matrix"}
    assert board.steps("images", "images", sample=0, **query) == STEPS[-1:]


def test_configuration_graph_and_hyperparameters_are_shown(board, run):
    train_dir, _, _ = run
    assert board.tags("text") == {"train": ["config"], "eval": ["evaluation"]}
    [config] = board.ask("text", "text", run="train", tag="config")
    cells = re.findall(r"<t[dh]>(.*?)</t[dh]>", config["text"])
    rows = dict(zip(cells[::2], cells[1::2], strict=True))
    settings = json.loads((train_dir / "config.json").read_text())
    assert set(rows) == {"setting", *settings}
    assert rows["global_batch_size"] == "16"

    graph = board.get("plugin/graphs/graph", run="train").decode()
    scopes = set(re.findall(r'^  name: "(\w+)/', graph, re.MULTILINE))
    assert {"tower_0", "tower_1", "average", "update"} <= scopes
    assert "tower_2" not in scopes

    statuses = [f"STATUS_{name}" for name in ("UNKNOWN", "SUCCESS", "RUNNING")]
    asked = {"allowedStatuses": statuses, "startIndex": 0, "sliceSize": 10}
    [group] = board.ask("hparams", "session_groups", asked)["sessionGroups"]
    assert group["name"] == str(train_dir)
    assert group["hparams"]["learning_rate"] == 0.1
    assert group["hparams"]["global_batch_size"] == 16
    metrics = {metric["name"]["tag"]: metric for metric in group["metricValues"]}
    assert metrics["total_loss"]["trainingStep"] == STEPS[-1]
