"""Export: the averaged variables, equal logits, and nothing left where it fails."""

import importlib.util
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10 import files
from cifar10.config import run_config
from cifar10.config.fields import DISTORTIONS
from cifar10.errors import UsageError
from cifar10.input import datasets, distortions, synthetic
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES
from cifar10.run_directory import checkpoints
from cifar10.tools import export_formats, exported
from cifar10.tools.export_formats import as_input, preparation
from small_exports import apart, export, names
from small_runs import describe, save, small


class Contrary(keras.layers.Layer):
    """Does in training, which is its default, what it must not do in evaluation."""

    def call(self, inputs, training=True):
        return inputs + 9.0 if training else inputs


def contrary(image_shape, classes):
    """A model with statistics, dropout and a layer of its own."""
    model = small(image_shape, classes)
    model.add(Contrary())
    return model


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "contrary", Architecture(contrary))
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, stand_in_dir):
    """A run in a reduced precision; tests must not change it."""
    run_dir = tmp_path_factory.mktemp("exported") / "run"
    model = {"model": f"{__name__}:contrary", "precision": "bfloat16"}
    names = list(synthetic.CLASS_NAMES)
    describe(run_dir, **model, data_dir=str(stand_in_dir), class_names=names)
    run_config.mark_as_own((run_dir / "config.json").read_bytes())
    for step in (10, 20):
        save(run_dir, step, **model)
    return run_dir


def prepared_images(stand_in_dir, count=7):
    images, _ = datasets.find("synthetic", str(stand_in_dir)).read("test")
    return distortions.prepare(tf.constant(images[:count]), "tutorial").numpy()


def computed(run_dir, images, kind="averages", step=20):
    """The logits from a checkpoint's numbers: averages or last values."""
    folder = runs.checkpoint(run_dir, step)
    values = runs.variables(folder)
    model = contrary((24, 24, 3), 10)
    tf.train.Checkpoint(model=model).read(str(folder / "state")).expect_partial()
    for number, variable in enumerate(model.trainable_variables):
        if kind == "averages":
            variable.assign(values[f"averages/{number}/.ATTRIBUTES/VARIABLE_VALUE"])
    for number, name in enumerate(("moving_mean", "moving_variance")):
        value = values[f"non_trainable/{number}/.ATTRIBUTES/VARIABLE_VALUE"]
        getattr(model.layers[1], name).assign(value)
    return model(images, training=False).numpy()


def onnx_outputs(path, images):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    return session.run(None, {"images": images})[0]


def test_savedmodel_computes_the_averages_in_float32(run_dir, tmp_path, stand_in_dir):
    output = tmp_path / "model"
    words = runs.flags(train_dir=run_dir, output=output)
    done = runs.call("cifar10/__main__.py", "export", *words)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == ["model"]
    signature = tf.saved_model.load(str(output)).signatures["serving_default"]
    for count in (1, 7):
        images = prepared_images(stand_in_dir, count)
        logits = signature(tf.constant(images))["logits"]
        assert logits.dtype == tf.float32
        assert apart(logits.numpy(), computed(run_dir, images)) < 1e-5
    expected = {
        "class_names": list(synthetic.CLASS_NAMES),
        "step": 20,
        "use_averages": True,
        "precision": "float32",
        "preparation": preparation("tutorial", (32, 32, 3)),
    }
    said = json.loads((output / "cifar10.json").read_text())
    assert said.items() >= expected.items()


def test_last_values_come_from_the_newest_intact_checkpoint(
    run_dir, tmp_path, stand_in_dir, capsys
):
    damaged = shutil.copytree(run_dir, tmp_path / "run")
    state = runs.checkpoint(damaged, 20) / "state.data-00000-of-00001"
    state.write_bytes(b"\0" + state.read_bytes()[1:])
    assert export(damaged, tmp_path / "out.onnx", use_averages=False) == 0
    said = capsys.readouterr()
    assert "step 20" in said.err
    assert "step 10" in said.out
    images = prepared_images(stand_in_dir)
    logits = onnx_outputs(tmp_path / "out.onnx", images)
    assert apart(logits, computed(run_dir, images, "raw", step=10)) < 1e-5
    with pytest.raises(UsageError, match="--step 20"):
        export(damaged, tmp_path / "other.onnx", step="20")


# How images are prepared.


def pictures(height, width, channels=3):
    """Pictures of random values, of a single value, and but for one pixel so."""
    shape = (3, height, width, channels)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    images[1:] = 7  # The deviation of the second is 0.
    images[2, height // 2, width // 2, 0] = 8
    return images


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_images_are_prepared_as_evaluation_does_and_as_described(distortion):
    for size in ((32, 32), (32, 48), (48, 32), (32, 48, 1)):
        images = pictures(*size)
        shape = images.shape[1:]
        expected = distortions.prepare(tf.constant(images), distortion).numpy()
        prepared = as_input(tf.constant(images), shape, distortion)
        np.testing.assert_allclose(prepared, expected, rtol=2e-5, atol=1e-5)

        # The description is enough to do it without this package.
        described = json.loads(json.dumps(preparation(distortion, shape)))
        crop = described["crop"]
        rows = slice(crop["top"], crop["top"] + crop["height"])
        columns = slice(crop["left"], crop["left"] + crop["width"])
        values = images[:, rows, columns].astype(np.float64)
        if "least_deviation" in described:
            mean = values.mean(axis=(1, 2, 3), keepdims=True)
            deviation = values.std(axis=(1, 2, 3), keepdims=True)
            deviation = np.maximum(deviation, described["least_deviation"])
        else:
            mean, deviation = described["mean"], described["deviation"]
        by_hand = (values - mean) / deviation
        np.testing.assert_allclose(by_hand, expected, rtol=2e-5, atol=1e-5)
        assert described["size"] == [*shape[:2]]


def test_export_can_prepare_images(run_dir, tmp_path):
    assert export(run_dir, tmp_path / "out.onnx", with_preprocessing=True) == 0
    images = pictures(32, 32)
    given = onnx_outputs(tmp_path / "out.onnx", images)
    prepared = distortions.prepare(tf.constant(images), "tutorial").numpy()
    expected = tf.nn.softmax(computed(run_dir, prepared)).numpy()
    assert given.dtype == np.float32
    np.testing.assert_allclose(given, expected, atol=2e-3)


# Where it fails.


@pytest.fixture
def written(monkeypatch, run_dir):
    """Replaces the conversion by a file, and what the other process computes."""

    def write(_, path, *__):
        path.write_text("a model")

    def written(change):
        def compute(_, __, images):
            return change(computed(run_dir, images))

        monkeypatch.setattr(export_formats, "write_model", write)
        monkeypatch.setattr(exported, "compute_in_another_process", compute)

    return written


def one_off(part):
    def change(logits):
        changed = logits.copy()
        changed.flat[3] += part * np.abs(logits).max()
        return changed

    return change


def test_a_wrong_export_is_refused_and_removed(run_dir, tmp_path, written, capsys):
    for change in (one_off(1.5e-5), one_off(np.nan), lambda logits: logits[:, :9]):
        written(change)
        assert export(run_dir, tmp_path / "out") == 1
        assert "REFUSED" in capsys.readouterr().err
        assert not names(tmp_path)
    written(one_off(5e-6))  # It is rounding.
    assert export(run_dir, tmp_path / "out") == 0
    assert (tmp_path / "out").read_text() == "a model"


def test_every_part_of_an_export_is_on_disk_before_it_has_its_name(
    run_dir, tmp_path, written, monkeypatch
):
    """Or the machine may fail, and leave a name without its content."""
    written(lambda logits: logits)
    output, synced = tmp_path / "out", []

    def write(_, path, *__):
        (path / "variables").mkdir(parents=True)
        (path / "variables/data").write_text("numbers")

    monkeypatch.setattr(export_formats, "write_model", write)
    monkeypatch.setattr(files, "sync", synced.append)
    assert export(run_dir, output) == 0
    *parts, last = synced
    assert {path.name for path in parts} == {"model", "variables", "data"}
    assert last == tmp_path, "which then has the name"


def test_a_run_on_arrays_of_a_program_needs_them_in_a_file(run_dir, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    content = json.loads((copy / "config.json").read_text())
    content |= {"data": "python:arrays", "data_dir": None, "image_shape": [32, 32, 3]}
    (copy / "config.json").write_text(json.dumps(content))
    run_config.mark_as_own((copy / "config.json").read_bytes())
    with pytest.raises(UsageError, match=r"--data_dir FILE\.npz"):
        export(copy, tmp_path / "out")


def test_a_file_created_meanwhile_is_not_overwritten(run_dir, tmp_path, written):
    def late(logits):
        (tmp_path / "out").write_text("another's")
        return logits

    written(late)
    with pytest.raises(UsageError, match="already exists"):
        export(run_dir, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "another's"


def test_unusable_outputs_and_runs_are_refused(run_dir, tmp_path, monkeypatch):
    there, output = tmp_path / "there", tmp_path / "out.onnx"
    there.mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("new", "foreign"):
        describe(tmp_path / name, model="contrary")
    variable = {"model": tf.Variable(1.0)}
    facts = {"seed": 0, "global_batch_size": 128}
    folder = tmp_path / "foreign" / "checkpoints"
    checkpoints.save(folder, variable, step=20, facts=facts)
    for match, run, place, options in (
        ("already exists", run_dir, there, {}),
        ("already exists", run_dir, tmp_path / "link", {}),
        ("of the run", run_dir, run_dir / "checkpoints" / "out.onnx", {}),
        ("no/out.keras cannot be written", run_dir, tmp_path / "no/out.keras", {}),
        ("config.json", there, output, {}),
        ("10, 20", run_dir, output, {"step": "15"}),
        ("no checkpoint", tmp_path / "new", output, {}),
        ("another model", tmp_path / "foreign", output, {}),
    ):
        with pytest.raises(UsageError, match=match):
            export(run, place, **options)
        assert not output.exists()
    monkeypatch.setattr(importlib.util, "find_spec", {"onnx": 1}.get)
    with pytest.raises(UsageError, match=r"(?s)tf2onnx.*\[export\]"):
        export(run_dir, output)
