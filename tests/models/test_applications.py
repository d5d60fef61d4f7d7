"""The networks of keras.applications: names, the scale of images, weights."""

import re

import keras
import numpy as np
import pytest

from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import distortions
from cifar10.models import applications, layer_tree
from cifar10.models.registry import (
    build_model,
    find_architecture,
    is_code,
)
from cifar10.training import initial_weights

NETWORKS = [name for name in dir(keras.applications) if name[0].isupper()]
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)


def module_of(application):
    """Returns the module of Keras whose functions a network's code uses."""
    return applications._module(application)


def test_the_network_names_match_keras():
    with pytest.raises(UsageError) as refused:
        find_architecture("applications:Nothing")
    assert (
        re.findall(r"\w+", str(refused.value).partition("networks are")[2]) == NETWORKS
    )
    assert is_code("my_models:small")
    assert not is_code("applications:VGG16")
    assert not is_code("tutorial")


def test_images_are_brought_to_the_scale_of_the_network():
    # One of each module, in which the networks share a scale.
    of_modules = {module_of(name).__name__: name for name in NETWORKS}
    for application in of_modules.values():
        images = keras.Input((32, 32, 3))
        rescaled = applications._rescaled(application, images)
        found = keras.Model(images, rescaled)(distortions.normalize(PIXELS))
        preprocess = module_of(application).preprocess_input
        expected = preprocess(PIXELS.astype("float32"))
        np.testing.assert_allclose(
            found, expected, atol=1e-3, rtol=1e-5, err_msg=application
        )


@pytest.mark.parametrize(
    ("name", "advice"),
    [("MobilNetV2", "MobileNetV2"), ("", "VGG16")],
)
def test_unknown_networks_are_refused(name, advice):
    with pytest.raises(UsageError, match=advice):
        find_architecture(f"applications:{name}")


@pytest.mark.parametrize(
    ("shape", "named"), [((24, 24, 3), "24, 24"), ((32, 32, 1), "channels")]
)
def test_images_unsuitable_for_a_network_are_refused(shape, named):
    with pytest.raises(UsageError, match=named):
        build_model("applications:MobileNetV2", shape, 10)


def test_absent_or_damaged_published_weights_are_refused(tmp_path, monkeypatch):
    def fail(_, origin, **__):
        raise Exception(f"URL fetch failure on {origin}: None -- unreachable")  # noqa: TRY002

    path = tmp_path / "vgg16.weights.h5"
    path.write_bytes(b"none")
    files = module_of("VGG16").file_utils
    for get_file, named in (
        (fail, r"put the file[^:]* into that folder\.\n.*/vgg16_\S+\.h5"),
        (lambda *_, **__: str(path), "VGG16"),
    ):
        monkeypatch.setattr(files, "get_file", get_file)
        with pytest.raises(UsageError, match=named):
            applications.with_imagenet_weights("applications:VGG16", (32, 32, 3))


def test_a_network_takes_all_published_layers_but_its_head(monkeypatch):
    def published(name, shape):
        build = getattr(keras.applications, name.removeprefix("applications:"))
        return build(include_top=False, weights=None, input_shape=shape, pooling="avg")

    monkeypatch.setattr(applications, "with_imagenet_weights", published)
    given = {"model": "applications:VGG16", "distortions": "flip_translate"}
    model = build_model(given["model"], (32, 32, 3), 4)
    config = Config(initial_weights="imagenet", **given)
    _, found = initial_weights.find_weights(config, model, ())
    of_layers = layer_tree.by_name(model)
    assert of_layers.keys() - found.keys() == {applications.HEAD}
    for layer, values in found.items():
        shapes = [tuple(variable.shape) for variable in of_layers[layer]]
        assert shapes == [value.shape for value in values], layer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`input_shape` is undefined")
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Of Keras in saving.
@pytest.mark.parametrize(
    "application",
    ["MobileNetV2", "EfficientNetB0", "VGG16"],  # -1 to 1; a layer more; blue first.
)
def test_a_network_computes_the_same_from_our_images_as_keras_from_pixels(
    application, tmp_path, monkeypatch
):
    """With weights that are as far from their initial values as published ones."""
    name, drawn = f"applications:{application}", np.random.default_rng(1)
    build = getattr(keras.applications, application)
    options = {"include_top": False, "input_shape": (32, 32, 3), "pooling": "avg"}
    path, module = tmp_path / "imagenet.weights.h5", module_of(application)
    monkeypatch.setattr(module.file_utils, "get_file", lambda *_, **__: str(path))
    if application == "EfficientNetB0":  # With all kinds of its layers.
        first = module.DEFAULT_BLOCKS_ARGS[:2]
        monkeypatch.setattr(module, "DEFAULT_BLOCKS_ARGS", first)
    with monkeypatch.context() as patch:
        patch.setattr(keras.Model, "load_weights", lambda *_: None)  # There is no file.
        published = build(weights="imagenet", **options)
    for layer in published.layers:
        if isinstance(layer, keras.layers.Normalization):
            # As published: the variance of B0 to B7 is a deviation.
            layer.weights[0].assign([0.485, 0.456, 0.406])
            layer.weights[1].assign([0.229, 0.224, 0.225])
            layer.finalize_state()
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0
    coarse = drawn.uniform(0.0, 255.0, (32, 4, 4, 3)).round()
    pixels = coarse.repeat(8, axis=1).repeat(8, axis=2).astype("float32")
    published(module.preprocess_input(pixels.copy()), training=True)
    published.save_weights(path)
    expected = published(module.preprocess_input(pixels.copy()))

    model = build_model(name, (32, 32, 3), 4)
    of_layers = layer_tree.by_name(model)
    config = Config(
        initial_weights="imagenet", model=name, distortions="flip_translate"
    )
    _, found = initial_weights.find_weights(config, model, ())
    assert of_layers.keys() - found.keys() == {applications.HEAD}
    for layer, values in found.items():
        for variable, value in zip(of_layers[layer], values, strict=True):
            variable.assign(value)
    features = model.get_layer(applications.HEAD).input
    made = keras.Model(model.inputs, features)(distortions.normalize(pixels))
    scale = np.std(expected, axis=0).max()
    assert scale > 1e-3
    np.testing.assert_allclose(made / scale, expected / scale, atol=1e-3)
