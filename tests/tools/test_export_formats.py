"""Exports to Keras and LiteRT: what the run's model computes, without this package."""

import types
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import forked
import runs
from cifar10 import layers
from cifar10.errors import UsageError
from cifar10.input import synthetic
from cifar10.models.registry import build_model
from cifar10.tools import export as command, exported
from cifar10.tools.export_formats import (
    with_keras_layers,
    wrap,
    write_model,
)
from small_exports import apart, description, export, names

PLAIN = {"model": "own", "with_preprocessing": False}
# Python that has no cifar10 to import.
WITHOUT_THE_PACKAGE = """
import sys
sys.modules["cifar10"] = None
import keras, numpy
images, outputs, path = sys.argv[1:]
model = keras.saving.load_model(path)
numpy.save(outputs, keras.ops.convert_to_numpy(model(numpy.load(images))))
"""


@pytest.mark.parametrize(
    ("name", "side", "options"),
    [
        ("tutorial", 24, {}),
        ("airbench", 32, {}),
        ("resnet", 24, {"depth": 3, "width": 8}),
    ],
)
def test_a_keras_file_computes_the_same_without_our_classes(
    tmp_path, name, side, options
):
    model = build_model(name, (side, side, 3), 10, options=options)
    random = np.random.default_rng(0)
    for variable in model.non_trainable_variables:
        if "moving" in variable.path:
            variable.assign(random.uniform(0.5, 1.5, variable.shape))
    images = random.normal(size=(2, side, side, 3)).astype(np.float32)
    path = tmp_path / "it.keras"
    write_model(model, path, "keras", PLAIN)
    loaded = keras.saving.load_model(path)
    expected = model(images, training=False).numpy()
    assert apart(loaded(images).numpy(), expected) < 1e-5
    with zipfile.ZipFile(path) as archive:
        assert "cifar10" not in archive.read("config.json").decode()


def test_local_response_normalization_is_rebuilt_with_its_constants():
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 7)).astype(np.float32)
    constants = {"depth_radius": 2, "bias": 2.0, "alpha": 0.3, "beta": 0.5}
    layer = layers.LocalResponseNormalization(**constants)
    model = keras.Sequential([keras.Input((4, 4, 7)), layer])
    expected = tf.nn.local_response_normalization(images, **constants)
    np.testing.assert_allclose(with_keras_layers(model)(images), expected, 1e-5)


def test_models_of_any_graph_are_rebuilt_for_any_number_of_images():
    def nested():
        images = keras.Input((8, 8, 3))
        inner = keras.Sequential(
            [keras.layers.Conv2D(4, 3), layers.FusedBatchNormalization()]
        )
        net = keras.ops.relu(inner(layers.NewSection()(images)) - 0.1)
        twice = layers.QuickGelu()
        return keras.Model(images, keras.layers.Flatten()(twice(twice(net))))

    without_input = keras.Sequential(
        [layers.WideConv2D(4), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
    for model in (nested(), without_input):
        expected = model(images).numpy()
        rebuilt = wrap(model, "keras", PLAIN)
        assert rebuilt.input_shape == (None, 8, 8, 3)
        np.testing.assert_allclose(rebuilt(images), expected, rtol=1e-5, atol=1e-6)


class Halved(keras.layers.Layer):
    def call(self, inputs):
        return inputs / 2


def test_a_model_unreadable_by_plain_keras_is_refused(tmp_path):
    model = keras.Sequential([Halved(name="half")])
    model(tf.zeros((2, 4)))
    with pytest.raises(UsageError, match="half"):
        write_model(model, tmp_path / "it.keras", "keras", PLAIN)
    assert not names(tmp_path)


def test_missing_packages_of_a_format_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"(?s)ai_edge_litert.*\[export\]"):
        export(tmp_path / "run", tmp_path / "out.tflite")


def test_the_ending_of_the_output_decides_the_format():
    for output, file_format in (
        ("out", "savedmodel"),
        ("model.v2", "savedmodel"),
        ("out.onnx", "onnx"),
        ("out.keras", "keras"),
        ("out.tflite", "litert"),
    ):
        assert command.Options(output=output).file_format == file_format


def test_an_unknown_ending_is_refused_and_writes_no_folder(tmp_path):
    for name in ("out.h5", "out.weights.h5", "out.pt", "out.ONNX", "out.onnx~"):
        with pytest.raises(UsageError, match=r"no export ends in .*\.onnx, \.keras"):
            export(tmp_path / "run", tmp_path / name)
    assert not names(tmp_path)


def test_values_with_another_shape_or_nan_are_refused():
    expected = np.tile(np.array([2.0, 1.0], np.float32), (1000, 1))
    assert exported.compare(expected, expected)[0]
    for wrong in (expected * np.nan, expected[:, :1], expected[:999]):
        equal, why = exported.compare(wrong, expected)
        assert not equal
        assert "non-finite values, or a different number" in why


def test_a_model_failing_or_crashing_elsewhere_is_refused(tmp_path):
    (tmp_path / "damaged").write_bytes(b"no model")
    for file_format in ("onnx", "litert"):
        with pytest.raises(UsageError, match=file_format):
            exported.compute_in_another_process(
                tmp_path / "damaged", file_format, np.zeros((1, 4), np.float32)
            )


def test_an_operation_missing_from_litert_is_named(tmp_path):
    numbers = keras.Input([4])
    model = keras.Model(numbers, keras.layers.Dense(2)(keras.ops.erfinv(numbers)))
    described = {**PLAIN, "image_shape": [4]}
    with pytest.raises(UsageError, match="Erfinv"):
        write_model(model, tmp_path / "it.tflite", "litert", described)
    assert not names(tmp_path)


# Whole exports.


@pytest.fixture
def preloaded(monkeypatch):
    """Computes exports in copies of a process that has imported TensorFlow."""
    copies = types.SimpleNamespace(get_context=lambda _: forked._CONTEXT)
    monkeypatch.setattr(exported, "multiprocessing", copies)


@pytest.fixture(scope="module")
def tutorial_run(tmp_path_factory, stand_in_dir):
    """A run that has learnt to tell some figures apart."""
    train_dir = tmp_path_factory.mktemp("tutorial") / "run"
    steps = {"max_steps": 40, "checkpoint_steps": 40, "batch_size": 32}
    model = {"model": "tutorial", "optimizer": "adam", "learning_rate": 1e-3}
    runs.train(train_dir, stand_in_dir, **model, **steps, moving_average_decay=0.5)
    return train_dir


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_airbench_is_exported_in_both_formats(tmp_path, stand_in_dir):
    steps = {"max_steps": 1, "batch_size": 4}
    runs.train(tmp_path / "run", stand_in_dir, model="airbench", **steps)
    for name in ("it.keras", "it.tflite"):
        assert export(tmp_path / "run", tmp_path / name) == 0
        described = description(tmp_path / name)
        assert described["class_names"] == list(synthetic.CLASS_NAMES)
        assert described["precision"] == "float32"
    assert names(tmp_path) == ["it.keras", "it.tflite", "run"]


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_all_formats_prepare_images(tutorial_run, tmp_path):
    from ai_edge_litert.interpreter import Interpreter

    for name in ("saved", "it.keras", "it.tflite"):
        output = tmp_path / name
        assert not export(tutorial_run, output, with_preprocessing=True)
    saved = tf.saved_model.load(str(tmp_path / "saved"))
    run = Interpreter(str(tmp_path / "it.tflite")).get_signature_runner()
    files = [tmp_path / name for name in ("images.npy", "out.npy", "it.keras")]
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    given = saved.signatures["serving_default"](tf.constant(images))
    expected = given["probabilities"].numpy()
    np.save(files[0], images)
    assert runs.run("-c", WITHOUT_THE_PACKAGE, *files).returncode == 0
    by_keras, by_litert = np.load(files[1]), run(images=images)["probabilities"]
    np.testing.assert_allclose(by_keras, expected, atol=1e-5)
    np.testing.assert_allclose(by_litert, expected, atol=1e-5)
