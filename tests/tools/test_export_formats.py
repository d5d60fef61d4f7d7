"""Exports to Keras and LiteRT: what the run's model computes, without this package."""

import json
import re
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_export import MODEL, export, names, train

from cifar10 import layers, model as models
from cifar10.errors import UsageError
from cifar10.input import cifar
from cifar10.tools import child_process
from cifar10.tools.export import comparison, formats, keras_alone, to_litert
from cifar10.tools.export.options import Options

PLAIN = {"with_preprocessing": False}
SIZES = {"tutorial": 24, "resnet": 24, "airbench": 32}
# Python that has no cifar10 to import.
WITHOUT_THE_PACKAGE = """
import sys
sys.modules["cifar10"] = None
import keras, numpy
images, outputs, path = sys.argv[1:]
model = keras.saving.load_model(path)
numpy.save(outputs, keras.ops.convert_to_numpy(model(numpy.load(images))))
"""


def built(name, **options):
    """A model whose moving statistics are not their initial values, and images."""
    side = SIZES[name]
    model = models.build(name, (side, side, 3), 10, options=options)
    random = np.random.default_rng(0)
    for variable in model.non_trainable_variables:
        if "moving" in variable.path:
            variable.assign(random.uniform(0.5, 1.5, variable.shape))
    return model, random.normal(size=(5, side, side, 3)).astype(np.float32)


def apart(one, other):
    return np.abs(one - other).max() / np.abs(other).max()


@pytest.mark.parametrize(
    ("name", "options"),
    [("tutorial", {}), ("airbench", {}), ("resnet", {"depth": 3, "width": 4})],
)
def test_a_keras_file_computes_the_same_and_names_no_class_of_ours(
    tmp_path, name, options
):
    model, images = built(name, **options)
    formats.write(model, tmp_path / "it.keras", "keras", PLAIN)

    loaded = keras.saving.load_model(tmp_path / "it.keras")
    expected = formats.logits(model, tf.constant(images)).numpy()
    assert apart(loaded(images).numpy(), expected) < 1e-5
    with zipfile.ZipFile(tmp_path / "it.keras") as archive:
        assert "cifar10" not in archive.read("config.json").decode()


@pytest.mark.parametrize("beta", [0.5, 0.75])
def test_local_response_normalization_is_rebuilt_with_its_constants(beta):
    images = np.random.default_rng(0).normal(size=(2, 4, 4, 7)).astype(np.float32)
    constants = {"depth_radius": 2, "bias": 2.0, "alpha": 0.3, "beta": beta}
    layer = layers.LocalResponseNormalization(**constants)
    model = keras.Sequential([keras.Input((4, 4, 7)), layer])
    rebuilt = keras_alone.rebuild(model)
    np.testing.assert_allclose(
        rebuilt(images), tf.nn.local_response_normalization(images, **constants), 1e-5
    )


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
        rebuilt = keras_alone.build(model, PLAIN)
        assert rebuilt.input_shape == (None, 8, 8, 3)
        np.testing.assert_allclose(rebuilt(images), expected, rtol=1e-5, atol=1e-6)


class Halved(keras.layers.Layer):
    def call(self, inputs):
        return inputs / 2


class Subclass(keras.Model):
    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (keras.Sequential([Halved(name="half")]), r"its layer half is of the class "),
        (Subclass(), "it is a Subclass, whose call is Python code"),
    ],
)
def test_what_keras_alone_cannot_open_is_a_sentence(tmp_path, model, why):
    model(tf.zeros((2, 4)))
    with pytest.raises(UsageError, match=f"--format keras; ValueError: {why}"):
        formats.write(model, tmp_path / "it.keras", "keras", PLAIN)
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "keras", "output": "x"}, r"names end in .keras.\nGive .* x.keras"),
        ({"format": "onnx", "quantize": "int8"}, "Add --format litert"),
        ({"quantize": "int8"}, "--format savedmodel is written in float32"),
        ({"format": "litert", "quantize": "int4"}, "one of none, int8"),
        (
            {"format": "litert", "quantize": "int8", "with_preprocessing": True},
            "too coarse to resize",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        Options(**{"output": "out", **options})


def test_a_missing_package_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs ai_edge_litert, .*\n.*\[export\]"):
        export(tmp_path / "run", tmp_path / "out", "litert")


def test_rounding_alone_may_differ_in_float32():
    expected = np.array([[4.0, -8.0]], np.float32)
    for difference, passes in ((7e-5, True), (9e-5, False), (np.nan, False)):
        computed = expected + np.array([[difference, 0.0]], np.float32)
        assert comparison.of_values(computed, expected, "logits").passed == passes
    assert not comparison.of_values(expected[:, :1], expected, "logits").passed


def test_int8_may_lose_one_point():
    labels = np.zeros(1000, int)
    expected = np.tile(np.array([2.0, 1.0], np.float32), (1000, 1))
    expected[900:] = expected[900:, ::-1]  # 0.9 are classified correctly.
    for lost, passes in ((0, True), (10, True), (11, False)):
        computed = expected.copy()
        computed[:lost] = computed[:lost, ::-1]
        verdict = comparison.of_precisions(computed, expected, labels)
        assert verdict.passed == passes
        assert f"{0.9 - lost / 1000:.4f} in int8" in verdict.finding
        assert "0.9000 in float32" in verdict.finding
    assert not comparison.of_precisions(expected * np.nan, expected, labels).passed
    assert not comparison.of_precisions(expected[:, :1], expected, labels).passed


@pytest.mark.parametrize(
    ("output", "error", "match"),
    [
        (([{"os_error": [28, "No space left"]}], "", ""), OSError, "No space left"),
        (([{"error": "it lacks If"}], "", ""), UsageError, "as --format litert; it la"),
        (([], "", "the process died of SIGABRT"), UsageError, "litert; the process di"),
    ],
)
def test_what_the_converter_says_is_a_sentence(
    tmp_path, monkeypatch, output, error, match
):
    monkeypatch.setattr(formats, "_export", lambda *arguments: None)
    monkeypatch.setattr(
        child_process, "run", lambda *words, **others: child_process.Output(*output)
    )
    with pytest.raises(error, match=match):
        formats.write(None, tmp_path / "out", "litert", {"model": MODEL})


def test_the_operations_that_litert_lacks_are_named():
    pages = "".join(
        f"loc(fused[...]): error: 'tf.{name}' op is neither a custom op nor a flex op\n"
        for name in ("Inv", "Betainc", "Inv")
    )
    assert to_litert._why(ValueError(pages)).endswith("TensorFlow: Betainc, Inv")
    assert to_litert._why(ValueError("one.\ntwo")) == "ValueError: one"


def description(path):
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("cifar10.json"))


@pytest.fixture(scope="module")
def tutorial_run(tmp_path_factory, stand_in_dir):
    train_dir = tmp_path_factory.mktemp("tutorial") / "run"
    flags = {"max_steps": 100, "checkpoint_steps": 100, "batch_size": 32}
    return train(train_dir, stand_in_dir, model="tutorial", **flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        {"model": "airbench", "distortions": "flip_translate"},
        {"model": "resnet", "depth": 3, "width": 4},
    ],
)
def test_every_model_in_both_formats(tmp_path, stand_in_dir, capfd, flags):
    run = train(tmp_path / "run", stand_in_dir, max_steps=2, **flags)
    capfd.readouterr()
    for file_format, name in (("keras", "it.keras"), ("litert", "it.tflite")):
        assert export(run, tmp_path / name, file_format) == 0
        said = capfd.readouterr()
        assert "(at most 1e-05)" in said.out
        assert not said.err
        described = description(tmp_path / name)
        assert described["class_names"] == list(cifar.SYNTHETIC.default_names)
        assert described["precision"] == "float32"
    assert sorted(names(tmp_path)) == ["it.keras", "it.tflite", "run"]


@pytest.mark.slow
def test_a_keras_file_and_a_litert_file_prepare_images_of_any_size(
    tutorial_run, tmp_path
):
    from ai_edge_litert.interpreter import Interpreter

    for file_format in ("savedmodel", "keras", "litert"):
        output = tmp_path / f"{file_format}.keras"
        assert not export(tutorial_run, output, file_format, with_preprocessing=True)
    saved = tf.saved_model.load(str(tmp_path / "savedmodel.keras"))
    run = Interpreter(str(tmp_path / "litert.keras")).get_signature_runner()
    for size in ((32, 32), (45, 60), (20, 10)):
        images = np.random.default_rng(0).integers(0, 256, (2, *size, 3), np.uint8)
        given = saved.signatures["serving_default"](tf.constant(images))
        expected = given["probabilities"].numpy()
        np.save(tmp_path / "images.npy", images)
        files = [tmp_path / name for name in ("images.npy", "out.npy", "keras.keras")]
        subprocess.run(
            [sys.executable, "-P", "-c", WITHOUT_THE_PACKAGE, *files], check=True
        )
        np.testing.assert_allclose(np.load(files[1]), expected, atol=1e-5)
        np.testing.assert_allclose(
            run(images=images)["probabilities"], expected, atol=1e-5
        )


@pytest.mark.slow
def test_int8_classifies_as_float32_does_and_computes_in_integers(
    tutorial_run, tmp_path, capsys
):
    from ai_edge_litert.interpreter import Interpreter

    assert export(tutorial_run, tmp_path / "float", "litert") == 0
    assert export(tutorial_run, tmp_path / "int8", "litert", quantize="int8") == 0

    pattern = r"precision @ 1 = (\S+) in int8, and the run's model\s+(\S+) in float32"
    int8, float32 = map(float, re.search(pattern, capsys.readouterr().out).groups())
    assert float32 > 0.3
    assert abs(int8 - float32) <= 0.01
    assert description(tmp_path / "int8")["precision"] == "int8"
    sizes = [(tmp_path / name).stat().st_size for name in ("int8", "float")]
    assert sizes[0] < 0.3 * sizes[1]
    tensors = Interpreter(str(tmp_path / "int8")).get_tensor_details()
    floating = [one["name"] for one in tensors if one["dtype"] == np.float32]
    assert len(floating) == 2  # Its input and its output.


class NeedsTensorFlow(keras.layers.Layer):
    def call(self, inputs):
        return tf.math.bessel_i1(inputs)


def beyond_litert(image_shape, classes):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(classes),
            NeedsTensorFlow(),
        ]
    )


@pytest.mark.slow
def test_a_model_beyond_litert_leaves_nothing(tmp_path, stand_in_dir):
    model = f"{__name__}:beyond_litert"
    run = train(tmp_path / "run", stand_in_dir, max_steps=1, model=model)
    with pytest.raises(UsageError, match="operations of TensorFlow: BesselI1"):
        export(run, tmp_path / "out", "litert")
    assert names(tmp_path) == ["run"]
