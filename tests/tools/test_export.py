"""Export: the averaged variables, equal logits, and nothing left where it fails."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import runs
from cifar10.config import origin
from cifar10.config.config import DISTORTIONS, Config
from cifar10.errors import UsageError
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import cifar, datasets, pipeline
from cifar10.input.pictures import decoding
from cifar10.run_directory import checkpoints
from cifar10.tools.export import exporter, formats, preparation
from cifar10.training import train as training

REPOSITORY = Path(__file__).parents[2]
MODEL = f"{__name__}:own"
FORMATS = ("savedmodel", "onnx")


class Contrary(keras.layers.Layer):
    """Does in training, which is its default, what it must not do in evaluation."""

    def call(self, inputs, training=True):
        return inputs + 9.0 if training else inputs


class OnlyKnownBatches(keras.layers.Layer):
    """Cannot be exported: a SavedModel takes batches of any size."""

    def call(self, inputs):
        if inputs.shape[0] is None:
            raise ValueError("the batch\nhas to be known.")
        return inputs


def own(image_shape, classes):
    """A user's model with statistics, dropout and a layer of its own."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(8, 5, strides=4, activation="relu"),
            keras.layers.BatchNormalization(),
            Contrary(),
            keras.layers.Dropout(0.5),
            keras.layers.Flatten(),
            keras.layers.Dense(classes),
        ]
    )


def train(train_dir, data_dir, **flags):
    config = Config(
        train_dir=str(train_dir),
        data="synthetic",
        data_dir=str(data_dir),
        **{"batch_size": 16, "max_steps": 20, "checkpoint_steps": 10} | flags,
    )
    training.train(config)
    return train_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, stand_in_dir):
    """A run in a reduced precision; tests must not change it."""
    train_dir = tmp_path_factory.mktemp("exported") / "run"
    return train(train_dir, stand_in_dir, model=MODEL, precision="bfloat16")


def export(run_dir, output, file_format="onnx", **options):
    return exporter.run(
        exporter.Options(str(run_dir), file_format, output=str(output), **options)
    )


def values(run_dir, step=20):
    """A checkpoint's tensors by name, read without this package."""
    path = run_dir / "checkpoints" / f"step-{step:08d}" / "state"
    reader = tf.train.load_checkpoint(str(path))
    names = (name.split("/.ATTR")[0] for name in reader.get_variable_to_shape_map())
    return {
        name: reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")
        for name in names
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH"
    }


def prepared_images(stand_in_dir, count):
    images, _ = datasets.find("synthetic", str(stand_in_dir)).read("test")
    return pipeline.prepare(tf.constant(images[:count]), "tutorial").numpy()


def computed(run_dir, images, kind, step=20):
    """The logits from a checkpoint's numbers: averages or last values of `own`."""
    found = values(run_dir, step)
    model = own((24, 24, 3), 10)
    averages = [found[f"averages/{number}"] for number in range(6)]
    if kind == "averages":
        for variable, value in zip(model.trainable_variables, averages, strict=True):
            variable.assign(value)
    else:
        tf.train.Checkpoint(model=model).read(
            str(run_dir / "checkpoints" / f"step-{step:08d}" / "state")
        ).expect_partial()
    norm = model.layers[1]
    norm.moving_mean.assign(found["non_trainable/0"])
    norm.moving_variance.assign(found["non_trainable/1"])
    return model(images, training=False).numpy()


def onnx_logits(path, images):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    return session.run(["logits"], {"images": images})[0]


def names(folder):
    return [path.name for path in folder.iterdir()]


def apart(one, other):
    return np.abs(one - other).max() / np.abs(other).max()


def test_a_savedmodel_computes_what_the_averages_do_in_float32(
    run_dir, tmp_path, stand_in_dir, capsys
):
    output = tmp_path / "model"
    assert export(run_dir, output, "savedmodel") == 0

    said = capsys.readouterr().out
    assert "step 20 of " in said
    assert "trained in bfloat16, exported in float32" in said
    assert "256 test images of SYNTHETIC stand-in, NOT CIFAR-10" in said
    assert names(tmp_path) == ["model"]
    signature = tf.saved_model.load(str(output)).signatures["serving_default"]
    for count in (1, 7):
        images = prepared_images(stand_in_dir, count)
        (logits,) = signature(tf.constant(images)).values()
        assert logits.dtype == tf.float32
        assert apart(logits.numpy(), computed(run_dir, images, "averages")) < 1e-5
    assert json.loads((output / "cifar10.json").read_text()) == {
        "model": MODEL,
        "distortions": "tutorial",
        "image_shape": [24, 24, 3],
        "picture_shape": [32, 32, 3],
        "class_names": list(cifar.SYNTHETIC.default_names),
        "step": 20,
        "use_averages": True,
        "precision": "float32",
        "trained_precision": "bfloat16",
        "data": "synthetic",
        "data_is_real": False,
        "simulated": False,
        "with_preprocessing": False,
        "input": {"name": "images", "dtype": "float32", "shape": [None, 24, 24, 3]},
        "output": {"name": "logits", "dtype": "float32", "shape": [None, 10]},
        "preparation": preparation.describe("tutorial", (32, 32, 3)),
    }


def test_onnx_computes_the_same_and_says_what_it_is(run_dir, tmp_path, stand_in_dir):
    import onnx

    assert export(run_dir, tmp_path / "model.onnx") == 0

    for count in (1, 7):
        images = prepared_images(stand_in_dir, count)
        logits = onnx_logits(tmp_path / "model.onnx", images)
        assert logits.dtype == np.float32
        assert apart(logits, computed(run_dir, images, "averages")) < 1e-5
    properties = {
        entry.key: entry.value
        for entry in onnx.load(str(tmp_path / "model.onnx")).metadata_props
    }
    assert properties["distortions"] == "tutorial"
    assert json.loads(properties["image_shape"]) == [24, 24, 3]
    assert json.loads(properties["class_names"])[0] == "disc"
    assert json.loads(properties["step"]) == 20


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_the_description_is_enough_to_prepare_images_without_this_package(distortion):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (3, 32, 32, 3), np.uint8)
    images[1] = 7  # Its deviation is 0.
    described = json.loads(json.dumps(preparation.describe(distortion, (32, 32, 3))))

    crop, standardization = described["crop"], described["standardization"]
    rows = slice(crop["top"], crop["top"] + crop["height"])
    columns = slice(crop["left"], crop["left"] + crop["width"])
    values = images[:, rows, columns].astype(np.float64)
    if standardization["mean"] == "of all values of one image, after the crop":
        mean = values.mean(axis=(1, 2, 3), keepdims=True)
        deviation = values.std(axis=(1, 2, 3), keepdims=True)
        deviation = np.maximum(deviation, standardization["least_deviation"])
    else:
        mean, deviation = standardization["mean"], standardization["deviation"]
    expected = pipeline.prepare(tf.constant(images), distortion).numpy()
    np.testing.assert_allclose((values - mean) / deviation, expected, atol=1e-4)
    assert described["size"] == [32, 32]
    assert described["channels"] == ["red", "green", "blue"]


def smooth(height, width):
    """An image as a camera makes them, without noise."""
    small = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    large = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    large.save(file, "PNG")
    return np.asarray(large), file.getvalue()


@pytest.mark.parametrize("distortion", DISTORTIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_export_prepares_images_as_evaluation_does(distortion, channels):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (3, 32, 32, channels), np.uint8)
    images[1] = 7  # Its deviation is 0.
    prepared = preparation.prepare(tf.constant(images), images.shape[1:], distortion)
    expected = pipeline.prepare(tf.constant(images), distortion)
    np.testing.assert_allclose(prepared, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "size", [(32, 32), (1, 1), (16, 20), (45, 60), (480, 640), (900, 300), (37, 1000)]
)
def test_images_are_resized_as_predict_does(size):
    image, file = smooth(*size)
    resized = preparation.fit(tf.constant(image[None]), (32, 32, 3))[0].numpy()
    apart = np.abs(resized - decoding.decode(file, "it", 32, 32))
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.1
    if size == (32, 32):
        np.testing.assert_array_equal(resized, image)


@pytest.mark.parametrize(
    "file_format", [pytest.param("savedmodel", marks=pytest.mark.slow), "onnx"]
)
def test_an_export_can_prepare_images_of_any_size(
    run_dir, tmp_path, capsys, file_format
):
    output = tmp_path / "out"
    assert export(run_dir, output, file_format, with_preprocessing=True) == 0

    said = capsys.readouterr().out
    assert "largest of the probabilities (at most 1e-05)" in said
    assert "from uint8 [None, None, None, 3], as its " in said
    assert "to probabilities, float32 [None, 10]" in said
    if file_format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(output))
    else:
        signature = tf.saved_model.load(str(output)).signatures["serving_default"]
        description = json.loads((output / "cifar10.json").read_text())
        assert description["with_preprocessing"]
        assert description["input"]["dtype"] == "uint8"
    for count, size in ((1, (45, 60)), (3, (32, 32)), (2, (20, 10))):
        image, file = smooth(*size)
        images = np.stack([image] * count)
        if file_format == "onnx":
            (given,) = session.run(["probabilities"], {"images": images})
        else:
            given = signature(images=tf.constant(images))["probabilities"].numpy()
        decoded = decoding.decode(file, "it", 32, 32)
        prepared = pipeline.prepare(tf.constant(decoded[None]), "tutorial").numpy()
        expected = tf.nn.softmax(computed(run_dir, prepared, "averages")).numpy()
        assert given.dtype == np.float32
        np.testing.assert_allclose(given, np.repeat(expected, count, 0), atol=2e-3)


def test_the_last_values_of_a_step_that_was_asked_for(run_dir, tmp_path, stand_in_dir):
    assert export(run_dir, tmp_path / "out", step=10, use_averages=False) == 0

    images = prepared_images(stand_in_dir, 5)
    logits = onnx_logits(tmp_path / "out", images)
    assert apart(logits, computed(run_dir, images, "raw", step=10)) < 1e-5
    assert apart(logits, computed(run_dir, images, "averages", step=10)) > 1e-3


def test_a_damaged_newest_checkpoint_is_passed_over_and_named(
    run_dir, tmp_path, stand_in_dir, capsys
):
    damaged = shutil.copytree(run_dir, tmp_path / "run")
    state = damaged / "checkpoints" / "step-00000020" / "state.data-00000-of-00001"
    state.write_bytes(b"\0" + state.read_bytes()[1:])
    assert export(damaged, tmp_path / "out") == 0

    said = capsys.readouterr()
    assert "PASSING OVER the damaged checkpoint of step 20" in said.err
    assert "step 10 of " in said.out
    images = prepared_images(stand_in_dir, 5)
    expected = computed(run_dir, images, "averages", step=10)
    assert apart(onnx_logits(tmp_path / "out", images), expected) < 1e-5
    with pytest.raises(UsageError, match=r"--step 20: .*SHA-256.* 10, 20"):
        export(damaged, tmp_path / "other", step=20)


@pytest.fixture
def written(monkeypatch):
    """Replaces the conversion by a file, and the fresh process by an answer."""

    ours = np.random.default_rng(0).normal(size=(256, 10)).astype(np.float32)
    monkeypatch.setattr(formats, "logits", lambda *arguments: tf.constant(ours))
    monkeypatch.setattr(
        formats, "write", lambda model, path, *rest: path.write_text("a model")
    )
    return lambda change: monkeypatch.setattr(
        exporter, "_in_a_fresh_process", lambda *arguments: change(ours)
    )


def one_off(part):
    def change(logits):
        changed = logits.copy()
        changed.flat[3] += part * np.abs(logits).max()
        return changed

    return change


@pytest.mark.parametrize(
    "change", [one_off(1.5e-5), one_off(np.nan), lambda logits: logits[:, :9]]
)
def test_what_computes_otherwise_is_refused_and_removed(
    run_dir, tmp_path, written, change, capsys
):
    written(change)
    assert export(run_dir, tmp_path / "out") == 1

    assert "REFUSED: on 256 test images" in capsys.readouterr().err
    assert not names(tmp_path)


def test_rounding_is_not_refused(run_dir, tmp_path, written, capsys):
    written(one_off(5e-6))
    assert export(run_dir, tmp_path / "out") == 0

    assert (
        "differs by\n        5.0e-06 of the largest of the logits (at most 1e-05)"
        in (capsys.readouterr().out)
    )
    assert (tmp_path / "out").read_text() == "a model"


def test_what_appears_meanwhile_is_not_overwritten(run_dir, tmp_path, written):
    def late(logits):
        (tmp_path / "out").write_text("another's")
        return logits

    written(late)
    with pytest.raises(UsageError, match="exists already"):
        export(run_dir, tmp_path / "out")

    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "another's"


def test_a_model_that_cannot_be_loaded_again_leaves_nothing(
    run_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        formats, "write", lambda model, path, *rest: path.write_text("no model")
    )
    with pytest.raises(
        UsageError, match="cannot be exported as --format onnx; the process"
    ):
        export(run_dir, tmp_path / "out")

    assert not names(tmp_path)


def test_the_fresh_process_sees_no_gpu_and_finds_the_packages(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    show = tmp_path / "python"
    # It writes an array of its environment's values where logits are expected.
    show.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, numpy\n"
        "seen = [os.environ[name] for name in ('CUDA_VISIBLE_DEVICES', 'PYTHONPATH')]\n"
        f"numpy.save({str(tmp_path / 'outputs.npy')!r}, seen)\n"
    )
    show.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(show))
    images = np.zeros((1, 2, 2, 3), np.float32)
    gpus, search = exporter._in_a_fresh_process(tmp_path / "out", "savedmodel", images)
    assert gpus == "-1"
    assert search.split(os.pathsep) == [str(REPOSITORY), "/elsewhere"]


@pytest.mark.parametrize("file_format", [*FORMATS, "litert"])
def test_a_layer_that_cannot_be_converted_is_a_sentence(tmp_path, file_format):
    model = keras.Sequential(
        [keras.layers.Flatten(), keras.layers.Dense(3), OnlyKnownBatches()]
    )
    model(tf.zeros((2, 4, 4, 3)))
    description = {
        "model": MODEL,
        "with_preprocessing": False,
        "input": {"name": "images", "dtype": "float32", "shape": [None, 4, 4, 3]},
        "output": {"name": "logits"},
    }
    with pytest.raises(
        UsageError,
        match=f"as --format {file_format}; ValueError: the batch has to be known. N",
    ) as caught:
        formats.write(model, tmp_path / "out", file_format, description)
    assert str(caught.value).count("\n") == 1


@pytest.mark.slow
def test_a_model_with_options(tmp_path, stand_in_dir):
    run = train(
        tmp_path / "run",
        stand_in_dir,
        model="resnet",
        depth=3,
        width=4,
        max_steps=2,
        checkpoint_steps=2,
    )
    assert export(run, tmp_path / "out", "savedmodel") == 0

    assert json.loads((tmp_path / "out" / "cifar10.json").read_text())["step"] == 2
    written = tf.saved_model.load(str(tmp_path / "out"))
    counted = sum(int(tf.size(one)) for one in written.variables)
    assert counted == json.loads((run / "config.json").read_text())["parameters"]


def test_a_full_disk_leaves_nothing(run_dir, tmp_path):
    if os.geteuid():
        pytest.skip("only root mounts a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", disk]
    if subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this container may not mount")
    try:
        for file_format in ("savedmodel", "onnx"):
            with pytest.raises(UsageError) as caught:
                export(run_dir, disk / "out", file_format)
            assert f"--output {disk / 'out'} cannot be written" in str(caught.value)
            assert "No space left on device" in str(caught.value)
            assert not names(disk)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)  # noqa: S607


def test_bad_input_is_a_sentence(run_dir, tmp_path, monkeypatch):
    def refused(match, run=run_dir, output=tmp_path / "out", **options):
        with pytest.raises(UsageError, match=match):
            export(run, output, **options)
        assert not (tmp_path / "out").exists()

    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    refused("exists already, and nothing is overwritten", output=there)
    refused("exists already", output=tmp_path / "link")
    refused("there is no folder", output=tmp_path / "no" / "out")
    refused("there is no config.json", run=tmp_path)
    refused("the checkpoint does not exist.* There are: 10, 20", step=15)
    refused("no checkpoint has a score.* There are: 10, 20", step="best")
    for name, change, match in (
        ("other", {"parameters": 5}, "its code has changed since"),
        ("gone", {"model": "nowhere:own"}, "there is no module nowhere"),
        ("new", {}, "There is no checkpoint in "),
        ("later", {"distortions": "mixup"}, "distortions is 'mixup', and this version"),
        ("half", {"precision": "float8"}, "precision is 'float8', and this version"),
    ):
        (tmp_path / name).mkdir()
        settings = json.loads((run_dir / "config.json").read_text())
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps(settings | change))
        origin.remember(config.read_bytes())
        refused(match, run=tmp_path / name)
    foreign = shutil.copytree(run_dir, tmp_path / "foreign")
    shutil.rmtree(foreign / "checkpoints")
    variable = {"model": tf.Variable(1.0)}
    settings = json.loads((run_dir / "config.json").read_text())
    facts = {name: settings[name] for name in ("seed", "global_batch_size")}
    checkpoints.save(foreign / "checkpoints", variable, step=20, facts=facts)
    refused("does not fit the model", run=foreign)
    monkeypatch.setattr(importlib.util, "find_spec", {"onnx": 1}.get)
    refused(r"(?s)tf2onnx and onnxruntime, which cannot be imported.*'\.\[export\]'")


def test_reading_a_run_does_not_seed_the_process(run_dir):
    def draws():
        numpy = np.random.uniform()  # noqa: NPY002 - it is a user's.
        return float(tf.random.uniform(())), numpy

    keras.utils.set_random_seed(5)
    expected = draws()
    keras.utils.set_random_seed(5)
    TrainedModel(run_dir)
    assert draws() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"num_gpus": 2, "precision": "auto"},
        {"recipe": "fast", "precision": "bfloat16"},
    ],
)
def test_both_formats_of_real_runs(flags, real_data_dir, tmp_path):
    run = tmp_path / "run"
    shared = {"max_steps": 10, "checkpoint_steps": 10, "train_dir": run}
    words = runs.flags(**flags, **shared, data_dir=real_data_dir)
    done = runs.run("train_multi_gpu.py", "--batch_size", 100, *words)
    assert done.returncode == 0, done.stderr
    for file_format in FORMATS:
        output = tmp_path / file_format
        where = ("--train_dir", run, "--format", file_format, "--output", output)
        done = runs.run("-m", "cifar10", "export", *where)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "Starting TensorFlow ...\n"
        assert "256 test images of CIFAR-10 in " in done.stdout
        assert output.exists()
