"""The networks of keras.applications: names, the scale of images, weights."""

import keras
import numpy as np
import pytest

from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import distortions
from cifar10.models import applications, layer_tree, names
from cifar10.training import initial_weights

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
# One of each module, in which the networks share a scale.
OF_MODULES = {
    applications._module(f"applications:{name}").__name__: name
    for name in names.APPLICATIONS
}


def test_names_are_those_of_keras():
    there = {name for name in dir(keras.applications) if name[0].isupper()}
    assert {*names.APPLICATIONS} == there


@pytest.mark.parametrize("application", OF_MODULES.values())
def test_images_are_brought_to_the_scale_of_the_network(application):
    name = f"applications:{application}"
    images = keras.Input((32, 32, 3))
    rescale = keras.Model(images, applications._rescaled(name, images))
    expected = applications._module(name).preprocess_input(PIXELS.astype("float32"))
    rescaled = rescale(distortions.normalize(PIXELS))
    np.testing.assert_allclose(rescaled, expected, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("applications:MobilNetV2", "Did you mean applications:MobileNetV2?"),
        ("applications:", "keras.applications has no such network"),
        ("applications:imagenet_utils", "keras.applications has no such network"),
    ],
)
def test_unknown_networks_are_refused(name, said):
    with pytest.raises(UsageError) as caught:
        names.check(name)
    assert said in str(caught.value)


def test_a_network_of_keras_is_no_code_of_a_stranger():
    assert names.is_code("my_models:small")
    assert not names.is_code("applications:VGG16")
    assert not names.is_code("tutorial")


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((24, 24, 3), "at least 32 x 32, and these are 24 x 24"),
        ((32, 32, 1), "images of 3 channels, and these have 1"),
    ],
)
def test_images_that_a_network_does_not_take_are_refused(shape, said):
    with pytest.raises(UsageError) as caught:
        models.build("applications:MobileNetV2", shape, 10)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "resnet"}, "resnet has no published weights"),
        ({"distortions": "crop_flip"}, "which cannot be restored from it"),
        (
            {"distortions": "tutorial"},
            "flip_translate or flip_translate_far or random_resized_crop or none",
        ),
    ],
)
def test_imagenets_weights_need_a_network_and_pixels(options, said):
    given = {"model": "applications:VGG16", "distortions": "flip_translate", **options}
    with pytest.raises(UsageError) as caught:
        Config(initial_weights="imagenet", **given)
    assert said in str(caught.value)


def test_without_a_network_it_says_where_weights_are_put(monkeypatch):
    def fail(_, origin, **__):
        raise Exception(f"URL fetch failure on {origin}: None -- unreachable")  # noqa: TRY002

    module = applications._module("applications:VGG16")
    monkeypatch.setattr(module.file_utils, "get_file", fail)
    with pytest.raises(UsageError, match=r"kernels_notop\.h5\ninto ~/\.keras/models"):
        applications.with_imagenet_weights("applications:VGG16", (32, 32, 3))


def test_published_weights_that_are_damaged_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "vgg16.weights.h5"
    path.write_bytes(b"none")
    module = applications._module("applications:VGG16")
    monkeypatch.setattr(module.file_utils, "get_file", lambda *_, **__: str(path))
    with pytest.raises(UsageError, match="the weights of VGG16 cannot be loaded"):
        applications.with_imagenet_weights("applications:VGG16", (32, 32, 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`input_shape` is undefined")
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Of Keras in saving.
@pytest.mark.parametrize(
    "application",
    ["MobileNetV2", "EfficientNetB0", "VGG16"],  # -1 to 1; a layer more; blue first.
)
def test_it_computes_from_our_images_what_keras_computes_from_pixels(
    application, tmp_path, monkeypatch
):
    """With weights that are as far from their initial values as published ones."""
    name, drawn = f"applications:{application}", np.random.default_rng(1)
    build = getattr(keras.applications, application)
    options = {"include_top": False, "input_shape": (32, 32, 3), "pooling": "avg"}
    path, module = tmp_path / "imagenet.weights.h5", applications._module(name)
    monkeypatch.setattr(module.file_utils, "get_file", lambda *_, **__: str(path))
    build(weights=None, **options).save_weights(path)
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

    model = models.build(name, (32, 32, 3), 4)
    of_layers = layer_tree.by_name(model)
    config = Config(
        initial_weights="imagenet", model=name, distortions="flip_translate"
    )
    found = initial_weights.find(config, model, {})
    assert found.new == {applications.HEAD: "not in it"}
    for layer, values in found.layers.items():
        for variable, value in zip(of_layers[layer], values, strict=True):
            variable.assign(value)
    features = model.get_layer(applications.HEAD).input
    made = keras.Model(model.inputs, features)(distortions.normalize(pixels))
    scale = np.std(expected, axis=0).max()
    assert scale > 1e-3
    np.testing.assert_allclose(made / scale, expected / scale, atol=1e-3)
