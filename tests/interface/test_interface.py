"""Training and scoring from a Python program, on its functions and arrays."""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import types

import keras
import numpy as np
import pytest
from PIL import Image, ImageOps

import cifar10
import runs
import small_runs
from cifar10 import Config, Follower, evaluate, hardware, train
from cifar10.config.run_config import RecordedRun
from cifar10.distributed import cluster
from cifar10.errors import StoppedError, UsageError
from cifar10.input.dataset_base import Dataset
from cifar10.interface.data import as_dataset
from cifar10.interface.train import read_record
from cifar10.models.registry import ARCHITECTURES, name_of_function

RANDOM = np.random.default_rng(0)
X = RANDOM.integers(0, 256, (60, 12, 12, 3), np.uint8)
Y = np.arange(60) % 3
TEST = (X[:20, :, ::-1], Y[:20])


def local():
    """A function that no module has by its name."""

    def linear(image_shape, classes):
        layers = [keras.layers.Flatten(), keras.layers.Dense(classes, name="head")]
        return keras.Sequential([keras.Input(image_shape), *layers], name="linear")

    return linear


def config(train_dir, **changes):
    return Config(
        **{
            "model": local(),
            "data": ((X, Y), TEST),
            "train_dir": train_dir,
            "num_gpus": 1,
            "batch_size": 4,
            "max_steps": 4,
            "log_frequency": 2,
            "learning_rate": 1e-3,
            "precision": "float32",
            "distortions": "none",
            **changes,
        }
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on two towers that scores itself; it is gone on with once."""
    train_dir = tmp_path_factory.mktemp("interface") / "run"
    options = {"num_gpus": 2, "eval_steps": 2}
    first = train(config(train_dir, **options))
    seen = []
    hook = types.SimpleNamespace(on_start=lambda run: seen.append(run.step))
    second = train(config(train_dir, **options, max_steps=6), hooks=[hook])
    return first, second, seen


def test_importing_the_package_starts_nothing():
    code = (
        "import sys, cifar10; from cifar10 import Config; "
        "Config(model=print, data=(1, 2)); "
        "assert not {'tensorflow', 'keras'} & {*sys.modules}; "
        "assert {*cifar10.__all__} <= {*dir(cifar10)}"
    )
    done = runs.run_anew("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for name in cifar10.__all__:
        assert getattr(cifar10, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        cifar10.nothing  # noqa: B018


def test_record_holds_how_the_run_went(trained):
    first, second, seen = trained
    assert seen == [4]
    assert (first.step, first.ended, second.step) == (4, "max_steps", 6)
    assert list(second.history) == [2, 4, 6]
    lines = runs.logged(second.train_dir)
    assert second.metrics["total_loss"] == lines[-1]["total_loss"]
    assert not {"step", "time", "seconds"} & second.metrics.keys()
    assert list(second.scores) == [2, 4, 6]
    step, best = second.best
    assert best == max(second.scores.values()) == second.scores[step]
    assert first.seconds > 0


def test_a_worker_with_an_older_copy_of_the_run_returns_a_record(trained):
    """The chief alone has the checkpoint of the last step."""
    here = trained[1].train_dir
    record = read_record(here, 9, 1.0, config(here, max_steps=9))
    assert (record.step, record.ended) == (9, "max_steps")


def test_run_resumes_by_its_directory(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained[1].train_dir, copy)
    objects = {"model": local(), "data": ((X, Y), TEST)}
    resumed = Config(resume=copy, max_steps=8, **objects)
    assert resumed.batch.num_gpus == resumed.checkpoints.eval_steps == 2
    assert list(train(resumed).history) == [2, 4, 6, 8]
    with pytest.raises(UsageError, match="learning_rate"):
        train(Config(resume=copy, learning_rate=0.5, **objects))


def test_a_run_on_a_discontinued_data_source_is_scored_on_given_data(trained, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(trained[1].train_dir, copy)
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"python:arrays"', '"tfds:mnist"'))
    found = evaluate(copy, data=TEST, model=local())
    assert found == evaluate(trained[1], data=TEST)
    with pytest.raises(UsageError, match=r"cifar10\.evaluate"):
        evaluate(copy, model=local())
    with pytest.raises(UsageError, match="tfds:mnist"):
        Config(resume=copy, model=local())


def test_a_model_other_than_the_runs_is_refused(trained):
    def other(*_):
        raise AssertionError("it is built")

    def linear(*_):
        raise AssertionError("it has the same name")

    for run, model in ((trained[1].train_dir, other), (trained[1], linear)):
        with pytest.raises(UsageError, match=r"the run has .*linear"):
            evaluate(run, data=TEST, model=model)
    own = trained[1].config.model_function
    assert evaluate(trained[1], model=own) == evaluate(trained[1])


def test_a_models_module_may_be_named_later(trained, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_linear", types.ModuleType("my_linear"))
    linear = local()
    linear.__module__, linear.__qualname__ = "my_linear", "linear"
    sys.modules["my_linear"].linear = linear
    assert name_of_function(linear) == "my_linear:linear"
    found = evaluate(trained[1].train_dir, data=TEST, model=linear)
    assert found == evaluate(trained[1], data=TEST)


def test_a_follower_takes_a_record(trained):
    with Follower(trained[1]).start() as follower:
        assert follower.predict(X[:2]).step == 6
    for interval in (0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="interval"):
            Follower(trained[1]).start(interval)


def test_a_data_dir_beside_arrays_is_refused(tmp_path):
    with pytest.raises(UsageError, match="data_dir"):
        config(tmp_path / "run", data_dir=tmp_path)


def test_values_that_an_array_would_lose_are_refused():
    masked = np.ma.masked_array(Y, mask=Y == 2)
    pictures = [Image.fromarray(image) for image in X]
    plain = as_dataset((pictures, Y)).read("train")[0]
    np.testing.assert_array_equal(plain[:], X)

    class Tensor:  # Of PyTorch, or a series of pandas: `mode` is a method.
        def __init__(self, image):
            self.image = image

        def mode(self):
            raise AssertionError

        def __array__(self, *_, **__):
            return self.image

    tensors = [Tensor(image) for image in X]
    np.testing.assert_array_equal(as_dataset((tensors, Y)).read("train")[0][:], X)
    palettes = [one.convert("P", palette=Image.Palette.ADAPTIVE) for one in pictures]
    hidden = np.ma.masked_equal(X, 3)
    for images, labels in ((X, masked), (hidden, Y), ([*hidden], Y), (palettes, Y)):
        with pytest.raises(UsageError, match="mask or palette"):
            as_dataset((images, labels))


def test_pictures_that_are_to_be_rotated_are_refused(tmp_path):
    """As phones write them; a folder's pictures are rotated."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(X[0]).save(tmp_path / "1.jpg", exif=exif)
    pictures = [Image.open(tmp_path / "1.jpg"), *map(Image.fromarray, X[1:])]
    with pytest.raises(UsageError, match=r"use ImageOps\.exif_transpose"):
        as_dataset((pictures, Y))
    as_dataset(([*map(ImageOps.exif_transpose, pictures)], Y))
    exif[0x0112] = 0  # Some cameras write it; it rotates nothing.
    Image.fromarray(X[0]).save(tmp_path / "1.jpg", exif=exif)
    as_dataset(([Image.open(tmp_path / "1.jpg"), *pictures[1:]], Y))


def test_evaluate_equals_the_evaluation_of_the_run(trained):
    record = trained[1]
    logged = runs.logged(record.train_dir / "eval")
    losses = {line["step"]: line["total_loss"] for line in logged}
    for step in (4, 6):
        found = evaluate(record, step=step)
        assert found["precision @ 1"] == record.scores[step]
        assert found["step"] == step
        assert found["total_loss"] == pytest.approx(losses[step])
    best = evaluate(record, step="best")["precision @ 1"]
    assert best == max(record.scores[step] for step in (4, 6))
    before = runs.logged(record.train_dir / "eval")
    assert evaluate(str(record.train_dir), data=TEST, model=local()) == found
    assert runs.logged(record.train_dir / "eval") == before, "it is no score of the run"
    on_all = evaluate(record, data=(X, Y))
    assert on_all == pytest.approx(evaluate(record, split="train"))
    assert on_all != pytest.approx(found)


def test_other_arrays_do_not_resume_a_run(trained):
    train_dir = trained[0].train_dir
    with pytest.raises(UsageError, match="or labels have changed") as caught:
        train(config(train_dir, data=((X[::-1], Y[::-1]), TEST), max_steps=9))
    assert "--fresh" in str(caught.value)


def test_commands_refuse_a_run_on_arrays_and_a_follower_answers(trained, tmp_path):
    done = runs.call("eval.py", "--run_once", "--train_dir", trained[0].train_dir)
    assert done.returncode == 2
    assert "cifar10.evaluate" in done.stderr

    record = train(config(tmp_path / "run", model=small_runs.small, max_steps=1))
    done = runs.call("train.py", "--max_steps", 9, "--resume", record.train_dir)
    assert done.returncode == 2, done.stdout
    assert "python:arrays" in done.stderr
    # The model has a module, so that it answers anywhere.
    settings = RecordedRun.read(record.train_dir).entries
    assert settings["model"] == "small_runs:small"
    with Follower(record.train_dir) as follower:
        assert follower.look()
        assert follower.predict(X[:2]).logits.shape == (2, 3)


def test_commands_take_a_programs_function_from_a_module_or_give_advice(
    tmp_path, monkeypatch, stand_in_dir
):
    run = tmp_path / "run"
    given = {"data": "synthetic", "data_dir": stand_in_dir}
    train(config(run, **given))
    monkeypatch.delitem(ARCHITECTURES, "python:linear")  # As in another process.
    resume = ("train.py", "--resume", run, "--max_steps", 6)
    score = ("eval.py", "--run_once", "--train_dir", run)
    for words in (resume, score):
        done = runs.call(*words)
        assert done.returncode == 2
        assert "cifar10.evaluate(train_dir, model=..., data=...)" in done.stderr
        assert "MODULE:linear" in done.stderr
    done = runs.call("train.py", "--train_dir", run)
    assert f"cifar10.Config(resume={str(run)!r}, model=...)" in done.stderr
    assert "--resume" not in done.stderr, "it would be refused"
    mine = types.ModuleType("mine")
    mine.linear = local()
    monkeypatch.setitem(sys.modules, "mine", mine)
    done = runs.call(*score, "--trust_model", "mine:linear")
    assert done.returncode == 0, done.stderr
    done = runs.call(*resume, "--model", "mine:linear")
    assert done.returncode == 0, done.stderr
    assert train(config(run, **given, max_steps=8)).step == 8, "the name stays"


def squares(images=X):
    return Dataset(
        name="cifar10",  # Which it is not.
        directory=None,
        image_shape=(12, 12, 3),
        class_names=("a", "b", "c"),
        description="squares",
        read=lambda split: (images, Y.astype(np.int32)) if split == "train" else TEST,
    )


def broken(**given):
    images, labels = np.zeros((6, 12, 12, 3), np.uint8), np.array([0, 1, 2, 0, 1, 2])
    whole = {"images": images, "labels": labels, **given}
    return dataclasses.replace(squares(), read=lambda _: (*whole.values(),))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"labels": np.array([1, 2, 3, 1, 2, 3])}, "from 1 to 3"),
        ({"labels": np.linspace(0.1, 0.9, 6)}, "Give a whole number"),
        ({"labels": np.eye(6)}, "argmax"),
        ({"labels": np.zeros(5, int)}, "each of 6 images"),
        ({"images": np.zeros((6, 8, 8, 3), np.uint8)}, "images .*6, 8, 8, 3"),
        ({"images": np.zeros((0, 12, 12, 3), np.uint8)}, "Give at least one"),
        ({"images": np.zeros((6, 12, 12, 3), np.float32)}, "float32"),
    ],
)
def test_a_programs_data_set_is_checked_like_arrays(tmp_path, given, why):
    with pytest.raises(UsageError, match=why):
        train(config(tmp_path / "run", data=broken(**given), max_steps=1))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("names", [("a", "b", "a"), ("ä", "b", "a\u0308"), (0, 1, 2)])
def test_classes_of_a_programs_data_set_have_different_names(tmp_path, names):
    data = dataclasses.replace(squares(), class_names=names)
    with pytest.raises(UsageError, match="Name each class once"):
        train(config(tmp_path / "run", data=data, max_steps=1))
    named = dataclasses.replace(squares(), class_names=tuple(np.array(["a", "b", "c"])))
    assert as_dataset(named).classes == 3, "NumPy's strings are strings"


def test_program_may_bring_a_data_set(tmp_path):
    record = train(config(tmp_path / "run", data=squares(), max_steps=1))
    settings = RecordedRun.read(record.train_dir).entries
    assert settings["data"] == "python:dataset"
    assert settings["data_description"] == "squares"
    assert evaluate(record) == evaluate(record, data=TEST)


def test_a_signal_saves_and_then_has_its_usual_effect(tmp_path, capfd):
    def stop(step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            while "SIGUSR1" not in capfd.readouterr().err:  # A thread notes it.
                time.sleep(0.01)

    taken = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: taken.append(number))
    try:
        hook = types.SimpleNamespace(on_step=stop)
        with pytest.raises(StoppedError, match="SIGUSR1 after step 2"):
            train(config(tmp_path / "run"), hooks=[hook])
        assert taken == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert taken == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert list(train(config(tmp_path / "run")).history) == [2, 4]


def test_another_thread_may_train(tmp_path):
    given, records = config(tmp_path / "run", max_steps=1), []
    thread = threading.Thread(target=lambda: records.append(train(given)))
    thread.start()
    thread.join()
    assert records[0].step == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_stps": 4}, "max_stps"),
        ({"max_steps": "4"}, "max_steps"),
        ({"model": keras.Sequential()}, "function"),
        ({"image_size": 16}, "image_size"),
        ({"resume": ""}, "resume"),
    ],
)
def test_bad_configurations_are_refused(given, named):
    with pytest.raises(UsageError, match=named):
        Config(**{"data": (X, Y), **given})


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ((X / 255, Y), "float64"),
        (squares(np.full(X.shape, np.nan, np.float32)), r"read\('train'\) is float32"),
        ((X, Y[:-1]), "60 images"),
        ((X, Y - 1), "from -1"),
        (([*X[:30], *X[30:, 1:]], Y), "inhomogeneous.* Bring all images to one size"),
        (([*X[:30], *X[30:, :, 1:]], Y), "inhomogeneous.* Bring all images to one"),
        (((X, Y), None), "x_test"),
        (((X, Y), (X[:, :6], Y)), "shape"),
        (types.SimpleNamespace(), "SimpleNamespace"),
    ],
)
def test_bad_data_is_refused(tmp_path, data, named):
    with pytest.raises(UsageError, match=named):
        train(config(tmp_path / "run", data=data))
    assert not (tmp_path / "run").exists()


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match="max_restarts"):
        train(config(tmp_path / "run", max_restarts=2))
    with pytest.raises(UsageError, match="dict"):
        train({"max_steps": 4})
    with pytest.raises(UsageError, match="hooks"):
        train(Config(data=(X, Y)), types.SimpleNamespace())
    with pytest.raises(UsageError, match="split"):
        evaluate(tmp_path, split="x", data=(X, Y))


def test_a_deterministic_run_is_refused_once_tensorflow_has_onednn(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(hardware, "uses_onednn", lambda **_: True)
    brief = {"max_steps": 1, "data": "synthetic", "model": runs.SMALL}
    config = Config(train_dir=str(tmp_path / "run"), deterministic=True, **brief)
    with pytest.raises(UsageError, match="TF_ENABLE_ONEDNN_OPTS=0"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_scoring_needs_suitable_data_and_options(trained, tmp_path):
    with pytest.raises(UsageError, match=r"\(12, 12, 3\)"):
        evaluate(trained[0], data=(X[:, :6], Y))
    alone = dataclasses.replace(trained[0], config=config(tmp_path, data=(X, Y)))
    with pytest.raises(UsageError, match="test"):
        evaluate(alone)
    for step in (5, 1.5):
        with pytest.raises(UsageError, match=f"step {step}"):
            evaluate(trained[0], step=step)
    with pytest.raises(UsageError, match="--num_examples 0"):
        evaluate(trained[0], num_examples=0)


def test_functions_are_named_by_their_import_path(monkeypatch):
    assert name_of_function(small_runs.small) == "small_runs:small"
    assert name_of_function(local()) == "python:linear"
    main = types.ModuleType("__main__")
    main.mine = types.FunctionType(small_runs.small.__code__, {}, "mine")
    main.mine.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert name_of_function(main.mine) == "python:mine"


WORKER = """
import sys
import numpy as np
from cifar10 import Config, train

class Telling:
    def on_log(self, step, metrics):
        print("TOLD of", step, flush=True)

images = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), np.uint8)
data = images, np.arange(40) % 4
options = {"batch_size": 4, "max_steps": 4, "log_frequency": 2, "num_gpus": 1}
options |= {"model": "small_model:two_layers", "data": data, "train_dir": sys.argv[1]}
record = train(Config(**options), hooks=[Telling()])
print("REACHED", record.step)
"""


@pytest.mark.slow
def test_only_the_first_of_several_workers_calls_its_hooks(tmp_path):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in held]
    with contextlib.ExitStack() as stack:
        workers = []
        for index in range(2):
            env = {"TF_CONFIG": cluster.tf_config(addresses, index)}
            words = ["-c", WORKER, tmp_path / "run"]
            worker = runs.started(*words, env=env)
            workers.append(stack.enter_context(worker))
        printed = [worker.communicate() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], printed
    told = [re.findall(r"^TOLD of (\d)", out, re.MULTILINE) for out, _ in printed]
    assert told == [["2", "4"], []]
    assert all("REACHED 4" in out for out, _ in printed)
