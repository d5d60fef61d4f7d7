"""What TensorBoard finds in a run that was killed and resumed."""

import json
import math
import re
import signal

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_file_loader

import runs
from cifar10.training import timing
from event_readers import read_as_the_server, tensors

STEPS = list(range(5, 41, 5))  # Those with a line on the console.
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
        patch.setattr(timing, "MOST_SHARE", math.inf)  # All are written.
        resumed = re.search(r"from step (\d+) ", output_of(script.name, *words))
    assert resumed, "the run began anew"
    assert last_written > int(resumed[1]), "the resume has nothing to take back"

    scored = output_of("eval.py", "--run_once", "--json", "--train_dir", train_dir)
    return train_dir, runs.logged(train_dir), json.loads(scored)


def test_curves_hold_the_values_of_metrics_jsonl_and_of_the_evaluation(run):
    """The rates tell the resumed training's points from the killed one's."""
    train_dir, lines, scored = run
    assert [line["step"] for line in lines] == STEPS
    for folder, logged in (("train", lines), ("eval", [{**scored, "step": STEPS[-1]}])):
        events = read_as_the_server(train_dir / folder)
        tags = {*events.PluginTagToContent("scalars")}
        assert tags >= {"total_loss", "cross_entropy", "penalties", "precision @ 1"}
        for name in tags & {*logged[0]}:
            found = [(step, value.item()) for step, value in tensors(events, name)]
            assert found == [
                (line["step"], np.float32(line[name]))
                for line in logged
                if line[name] is not None
            ], name


def test_tensorboard_shows_the_configuration_and_the_graph(run):
    events = read_as_the_server(run[0] / "train")
    [(_, config)] = tensors(events, "config")
    assert b"global_batch_size" in config.item()
    scopes = {node.name.partition("/")[0] for node in events.Graph().node}
    assert {"tower_0", "tower_1", "average", "update"} <= scopes
    shown = {"weight_loss/local3/kernel", "sparsity/conv1", "learning_rate"}
    assert shown <= {*events.PluginTagToContent("scalars")}
    # Zeros come from ReLU, so they are counted after it.
    sparsity = [float(value) for _, value in tensors(events, "sparsity/conv1")]
    assert 0.0 < max(sparsity) < 1.0
