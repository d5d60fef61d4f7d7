"""Heat maps lie where what decides the class lies, however layers are wrapped."""

import io
import json
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from PIL import Image

from cifar10.errors import UsageError
from cifar10.input.distortions import prepare
from cifar10.models import applications, tutorial
from cifar10.tools import predict
from cifar10.tools.heat_maps import draw, heat_maps
from recorded_runs import recorded

SIDE = 32


def squares(count):
    """Noise with a bright square in one of four quarters, which is the class."""
    random = np.random.default_rng(count)
    images = random.integers(60, 140, (count, SIDE, SIDE, 3), np.uint8)
    classes = random.integers(0, 4, count)
    squared = np.zeros((count, SIDE, SIDE), bool)
    for image, mask, number in zip(images, squared, classes, strict=True):
        top, left = (16 * np.array(divmod(number, 2))) + random.integers(0, 9, 2)
        place = slice(top, top + 8), slice(left, left + 8)
        image[place], mask[place] = 255, True
    return images, classes, squared


def opened(content):
    return Image.open(io.BytesIO(content))


def restored(model, distortions="flip_translate"):
    return types.SimpleNamespace(
        model=model,
        trainable=[one.value for one in model.trainable_variables],
        non_trainable=[one.value for one in model.non_trainable_variables],
        picture_shape=(SIDE, SIDE, 3),
        run=recorded(distortions=distortions, model="m"),
    )


@pytest.fixture(scope="module")
def trained():
    """The tutorial's network, which tells the quarters apart."""
    keras.utils.set_random_seed(0)
    images, classes, _ = squares(256)
    model = tutorial.build((SIDE, SIDE, 3), 4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss)
    whole = prepare(images, "flip_translate").numpy()
    model.fit(whole, classes, batch_size=32, epochs=3, verbose=0)
    return model


def test_heat_lies_at_the_decisive_square(trained):
    images, classes, squared = squares(32)
    whole = prepare(images, "flip_translate")
    assert (trained(whole).numpy().argmax(axis=1) == classes).mean() > 0.9
    maps = heat_maps(restored(trained), images, classes)
    assert maps.shape == squared.shape
    np.testing.assert_allclose(maps.max(axis=(1, 2)), 1.0, rtol=1e-5)
    for heat, mask, number in zip(maps, squared, classes, strict=True):
        row, column = divmod(int(heat.argmax()), SIDE)
        near = mask[max(0, row - 3) : row + 4, max(0, column - 3) : column + 4]
        assert near.any()
        top, left = 16 * (number // 2), 16 * (number % 2)
        assert heat[top : top + 16, left : left + 16].sum() > 0.6 * heat.sum()


def test_a_model_within_models_has_the_same_map(trained):
    images, classes, _ = squares(4)
    image = keras.Input((SIDE, SIDE, 3))
    inner = keras.Sequential([keras.Input((SIDE, SIDE, 3)), trained])
    outer = keras.Model(image, layers.Identity()(inner(image)))
    bare, nested = (
        heat_maps(restored(model), images, classes) for model in (trained, outer)
    )
    np.testing.assert_allclose(nested, bare, atol=1e-5)


def test_keras_networks_have_maps_and_heat_stays_within_the_crop():
    images, classes, _ = squares(4)
    network = applications.build("MobileNetV2", (SIDE, SIDE, 3), 4)
    maps = heat_maps(restored(network), images, classes)
    assert np.isfinite(maps).all()
    assert maps.max() == pytest.approx(1)
    cropped = tutorial.build((24, 24, 3), 4)
    maps = heat_maps(restored(cropped, "crop"), images, classes)
    assert maps.max() == pytest.approx(1)
    assert not maps[:, :4].any()
    assert not maps[:, :, -4:].any()


def test_a_map_shows_the_last_convolution_after_its_nonlinearity():
    """By hand: a dense layer's weights are the gradients for its logits."""
    keras.utils.set_random_seed(1)
    parts = [layers.Conv2D(4, 3, 2, "same", activation="relu")]
    parts += [layers.Conv2D(5, 3, 4, "same"), layers.BatchNormalization()]
    parts += [layers.ReLU(), layers.Flatten(), layers.Dense(4)]
    model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), *parts])
    images, classes, _ = squares(3)
    seen = keras.Model(model.inputs, model.layers[3].output)
    features = seen(prepare(images, "flip_translate")).numpy()
    slopes = model.layers[-1].kernel.numpy()[:, classes].T.reshape(features.shape)
    heat = np.maximum((features * slopes).sum(axis=-1, keepdims=True), 0)
    large = tf.image.resize(heat, (SIDE, SIDE)).numpy()[..., 0]
    expected = large / large.max(axis=(1, 2), keepdims=True)
    found = heat_maps(restored(model), images, classes)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_model_without_spatial_features_has_no_map():
    images, classes, _ = squares(2)
    for before in ([], [layers.Conv2D(8, SIDE)]):
        parts = [keras.Input((SIDE, SIDE, 3)), *before, layers.Flatten()]
        model = keras.Sequential([*parts, layers.Dense(4)])
        assert heat_maps(restored(model), images, classes) is None


def test_heat_is_drawn_only_at_its_place():
    picture = np.full((64, 64, 1), 100, np.uint8)
    heat = np.zeros((64, 64), np.float32)
    heat[:8, :8] = 1.0
    drawn = np.array(opened(draw(picture, heat)))
    assert drawn.shape == (128, 128, 3)
    assert (drawn[32:, 32:] == 100).all()
    red, green, blue = drawn[0, 0]
    assert red > 190
    assert green > 190
    assert blue < 40


@pytest.mark.usefixtures("registered")
def test_predict_writes_a_map_of_each_image_and_replaces_no_picture(
    small_run, tmp_path, capsys
):
    for name in ("a/one.png", "b/one.png"):
        (tmp_path / name).parent.mkdir()
        Image.fromarray(squares(1)[0][0]).save(tmp_path / name)
    images = [str(tmp_path / folder / "one.png") for folder in "ab"]
    given = {"train_dir": str(small_run), "explain": str(tmp_path / "maps")}
    for as_json in (False, True):  # Its own files it replaces.
        options = predict.Options(images, **given, json=as_json)
        assert predict.predict_files(options) == 0
    said = capsys.readouterr().out.splitlines()
    for number, folder in enumerate("ab", 1):
        name = str(tmp_path / folder / "one.png")
        place = str(tmp_path / "maps" / f"{number}-one.heat-map.png")
        (text,) = [line for line in said if line.startswith(name)]
        assert place in text
        assert json.loads(said[2 + number])["image"] == name
        assert json.loads(said[2 + number])["heat_map"] == place
    found = sorted(path.name for path in (tmp_path / "maps").iterdir())
    assert found == ["1-one.heat-map.png", "2-one.heat-map.png"]
    assert min(opened((tmp_path / "maps" / found[0]).read_bytes()).size) > SIDE
    before = (tmp_path / "a/one.png").read_bytes()
    beside = predict.Options(images, **given | {"explain": str(tmp_path / "a")})
    assert predict.predict_files(beside) == 0
    assert (tmp_path / "a/one.png").read_bytes() == before
    assert (tmp_path / "a/1-one.heat-map.png").exists()
    capsys.readouterr()
    for explain in ("a/one.png", "a/one.png/x"):
        given["explain"] = str(tmp_path / explain)
        with pytest.raises(UsageError, match="--explain") as refused:
            predict.predict_files(predict.Options(images, **given))
    assert "Not a directory" in str(refused.value)
    assert not capsys.readouterr().out
