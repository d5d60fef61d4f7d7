"""Models of the user's own: resumed bit for bit, averaged, refused in a sentence."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.models import custom
from cifar10.towers import schedule, towers
from cifar10.towers.towers import Tower
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update
from cifar10.training import train as training
from cifar10.training.activations import with_activations

IMAGE_SHAPE = (24, 24, 3)


@pytest.fixture(autouse=True)
def module_path(monkeypatch):
    """`--model module:function` adds the current directory to the module path."""
    monkeypatch.setattr(sys, "path", list(sys.path))


# ---- Exact resume


def stateful(image_shape, classes):
    """Everything that a model can keep besides its trainable variables."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(4, 5, strides=4),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(classes),
        ]
    )


def final_values(train_dir, step):
    """The bytes of every variable of a checkpoint, by name."""
    values = runs.variables(runs.checkpoint(train_dir, step))
    return {name: value.tobytes() for name, value in values.items()}


@pytest.mark.slow
def test_a_model_with_statistics_masks_and_momentum_goes_on_bit_for_bit(
    tmp_path, stand_in_dir
):
    def train(name, max_steps):
        config = Config(
            num_gpus=2,
            batch_size=8,
            max_steps=max_steps,
            train_dir=str(tmp_path / name),
            model=f"{__name__}:stateful",
            data="synthetic",
            data_dir=str(stand_in_dir),
            momentum=0.9,
            deterministic=True,
        )
        assert training.train(config) == max_steps

    train("at once", 9)
    train("stopped", 4)
    train("stopped", 9)

    at_once = final_values(tmp_path / "at once", 9)
    for kind in ("optimizer/", "averages/", "non_trainable/", "global_step"):
        assert any(name.startswith(kind) for name in at_once), kind
    assert final_values(tmp_path / "stopped", 9) == at_once
    # The comparison can fail: statistics, masks and slots do change on the way.
    earlier = final_values(tmp_path / "stopped", 4)
    same = {name for name in earlier if earlier[name] == at_once[name]}
    assert not any(name.startswith("non_trainable/") for name in same), same


# ---- What the towers make of them


def frozen(image_shape, classes):
    """A network of which only the last layer is trained."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(7, trainable=False),
            keras.layers.BatchNormalization(trainable=False),
            keras.layers.Dense(classes),
        ]
    )


def test_frozen_layers_do_not_drift_on_three_towers(four_cpus):
    """The mean of three equal values is not always that value."""
    model = models.build(f"{__name__}:frozen", IMAGE_SHAPE, 10)
    kernel = model.layers[1].kernel
    third = np.float32(1 / 3) * kernel.numpy()
    assert np.any(third + third + third != kernel.numpy()), "no value would show it"
    builder = towers.TowerBuilder(
        TrainState(model, keras.optimizers.SGD(0.1)),
        four_cpus[:3],
        tower=Tower(models.inference, models.loss),
        update=Update(
            schedule.StaircaseDecay(0.1, 350.0, 50_000),
            lambda step: schedule.average_decay(0.9999, step),
        ),
    )
    before = [variable.numpy() for variable in model.non_trainable_variables]
    trained = [variable.numpy() for variable in model.trainable_variables]
    random = np.random.default_rng(0)
    for return_gradients in (False, True, False):
        batches = [
            (
                tf.constant(random.normal(size=(2, *IMAGE_SHAPE)), tf.float32),
                tf.constant([1, 2]),
            )
            for _ in range(3)
        ]
        builder.step(batches, return_gradients=return_gradients)
    assert len(before) == 6
    for variable, value in zip(model.non_trainable_variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, variable.path)
    for variable, value in zip(model.trainable_variables, trained, strict=True):
        assert np.any(variable.numpy() != value), variable.path


class Halved(keras.Model):
    """Made like a graph of layers, but computes something else than its graph."""

    def call(self, images, training=None):
        return super().call(images, training=training) / 2.0


def test_no_activations_of_a_subclass_that_does_not_compute_its_graph():
    images = keras.Input(IMAGE_SHAPE)
    logits = keras.layers.Dense(10)(keras.layers.Flatten()(images))
    # A view of its graph would train another function, at summary steps only.
    assert with_activations(Halved(images, logits)) is None
    assert with_activations(keras.Model(images, logits)) is not None


# ---- What is told


def scaled(*scales, then=1.0):
    """A model that multiplies its images, and `then` its logits."""
    layers = [keras.layers.Rescaling(scale) for scale in scales]
    layers += [keras.layers.Flatten(), keras.layers.Dense(10)]
    layers += [keras.layers.Rescaling(then)]
    inner = keras.Sequential([keras.Input(IMAGE_SHAPE), *layers])
    images = keras.Input(IMAGE_SHAPE)
    return keras.Model(images, inner(images))


@pytest.mark.parametrize("scales", [[1 / 255], [1 / 127.5], [[1 / 58, 1 / 57, 1 / 57]]])
def test_a_model_that_takes_its_images_for_pixels_is_told_of(scales):
    assert "come standardized; layer rescaling" in custom.flattening(scaled(*scales))


@pytest.mark.parametrize("scales", [[], [0.5], [63.0, 1 / 255]])
def test_a_scale_that_does_no_harm_is_not_told_of(scales):
    assert not custom.flattening(scaled(*scales, then=1 / 255))


# ---- What is refused


def dense(image_shape, classes):
    images = keras.Input(image_shape)
    return images, keras.layers.Dense(classes)(keras.layers.Flatten()(images))


def list_of_logits(image_shape, classes):
    images, logits = dense(image_shape, classes)
    return keras.Model(images, [logits, logits])


def dict_of_logits(image_shape, classes):
    images, logits = dense(image_shape, classes)
    return keras.Model(images, {"logits": logits})


def predictions(image_shape, classes):
    images, logits = dense(image_shape, classes)
    return keras.Model(
        images, keras.layers.Lambda(lambda x: tf.cast(x, "int32"))(logits)
    )


def another_size(_image_shape, classes):
    return keras.Model(*dense((8, 8, 3), classes))


def in_grey(_image_shape, classes):
    return keras.Model(*dense((24, 24, 1), classes))


class Changing(keras.Model):
    """Returns something else in training."""

    def call(self, images, training=False):
        logits = images[:, 0, :10, 0] * self.scale
        return [logits, logits] if training else logits

    def build(self, _):
        self.scale = self.add_weight()


def two_in_training(_image_shape, _classes):
    return Changing()


def no_arguments():
    return None


def another_name(image_shape, *, classes):
    return dense(image_shape, classes)


def one_too_many(image_shape, classes, width):
    return dense(image_shape, classes + width)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (list_of_logits, ["returns list", "one floating tensor, the logits"]),
        (dict_of_logits, ["returns dict", "one floating tensor, the logits"]),
        (predictions, ["one floating tensor, the logits"]),
        (
            another_size,
            [
                "images of shape (24, 24, 3): its input shape is (8, 8, 3).\n",
                "or have it begin with keras.layers.Resizing(8, 8).",
            ],
        ),
        (in_grey, ["its input shape is (24, 24, 1).\nBuild it for the image_shape"]),
        (two_in_training, ["returns list", "one floating tensor, the logits"]),
        (dense, ["the function returned tuple", "keras.Model"]),
        (no_arguments, ["has to take (image_shape, classes)", "too many"]),
        (another_name, ["has to take (image_shape, classes)", "too many"]),
        (one_too_many, ["has to take (image_shape, classes)", "'width'"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_that_does_not_fit_is_refused_in_a_sentence(function, parts):
    name = f"{__name__}:{function.__name__}"
    message = refused(name)
    assert message.startswith(f"--model {name}: ")
    for part in parts:
        assert part in message
    assert len(message) < 400


def refused(name):
    """Returns why the function that `--model` names is refused for a training."""
    try:
        model = models.build(name, IMAGE_SHAPE, 10)
        custom.check_training(name, model, IMAGE_SHAPE, 10)
    except UsageError as error:
        return str(error)
    return pytest.fail("it was not refused")


# ---- What fails in the user's code


def misspelt(image_shape, classes):
    return dens(image_shape, classes)  # noqa: F821


def too_small(image_shape, classes):
    return keras.applications.MobileNet(
        weights=None, input_shape=image_shape, classes=classes
    )


def pooled_away(_image_shape, classes):
    pools = [keras.layers.AveragePooling2D(2) for _ in range(6)]
    return keras.Sequential([*pools, keras.layers.Dense(classes)])


def unchained(image_shape, classes):
    """The layers of a network with branches, one after another."""
    images = keras.Input(image_shape)
    halves = [keras.layers.Conv2D(4, 3)(images) for _ in range(2)]
    branched = keras.Model(images, keras.layers.Add()(halves))
    return keras.Sequential([*branched.layers, keras.layers.Dense(classes)])


def offline(_image_shape, _classes):
    return keras.utils.get_file("weights", "http://127.0.0.1:9/weights")


class Awkward(keras.Model):
    """Computes what a tower's graph cannot."""

    def call(self, images, training=False):
        return images.numpy() if training else images[:, 0, :10, 0] * self.scale

    def build(self, _):
        self.scale = self.add_weight()


def only_eagerly(_image_shape, _classes):
    return Awkward()


def unlike(image_shape, classes):
    images, two = keras.Input(image_shape), keras.Input((1,))
    return keras.Model([images, two], keras.layers.Dense(classes)(two))


FUNCTION_FAILED = (
    "the function failed,\ncalled with image_shape=(24, 24, 3), classes=10."
)
TRAINING_FAILED = "training failed on images of shape (24, 24, 3)."
MODEL_FAILED = "the model failed on images of shape (24, 24, 3)."
LARGER = "With --distortions flip_translate images are whole, not cropped"


@pytest.mark.parametrize(
    ("function", "problem", "error", "line", "hint"),
    [
        (misspelt, FUNCTION_FAILED, "NameError: ", "return dens(", None),
        (too_small, FUNCTION_FAILED, "ValueError: Input size", "MobileNet(", LARGER),
        (pooled_away, MODEL_FAILED, "", None, LARGER),
        (unchained, FUNCTION_FAILED, "ValueError: ", "Sequential(", "keras.Model(base"),
        (offline, FUNCTION_FAILED, "Exception: URL", "get_file(", "weights=None"),
        (unlike, MODEL_FAILED, "ValueError: ", None, None),
        (only_eagerly, TRAINING_FAILED, "AttributeError: ", ".numpy()", None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_fails_in_the_users_code_is_shown_with_its_lines(
    function, problem, error, line, hint
):
    name = f"{__name__}:{function.__name__}"
    message = refused(name)
    assert message.startswith(f"--model {name}: {problem}")
    said = message.partition(problem)[2].splitlines()
    assert said[1].startswith(error)
    if line:
        assert said[2].startswith(f'  File "{__file__}", line ')
        assert line in said[3]
    # No line of Keras, TensorFlow or Python.
    assert sum(text.startswith("  File") for text in said) == bool(line)
    assert hint is None or hint in "\n".join(said[-2:])
    assert not any("\033" in text for text in said)


# ---- What is not logits


def odds(image_shape, classes):
    images, logits = dense(image_shape, classes)
    return keras.Model(images, keras.layers.Softmax(name="odds")(logits))


def dense_odds(image_shape, classes):
    images, logits = dense(image_shape, classes)
    last = keras.layers.Dense(classes, activation="softmax", name="odds")
    return keras.Model(images, last(logits))


def inner_odds(image_shape, classes):
    """With a cast at the end, as Keras recommends for reduced precision."""
    inner = dense_odds(image_shape, classes)
    cast = keras.layers.Activation("linear", dtype="float32")
    return keras.Sequential([keras.Input(image_shape), inner, cast])


def sigmoids(image_shape, classes):
    images, logits = dense(image_shape, classes)
    return keras.Model(images, keras.layers.Activation("sigmoid", name="odds")(logits))


class Odds(keras.Model):
    """A model that is no graph of layers."""

    def __init__(self, classes):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(classes)

    def call(self, images):
        return tf.nn.softmax(self.dense(self.flatten(images)))


def own_odds(_image_shape, classes):
    return Odds(classes)


@pytest.mark.parametrize(
    "function",
    [odds, dense_odds, inner_odds, sigmoids, own_odds],
    ids=lambda value: value.__name__,
)
def test_a_softmax_at_the_end_is_refused(function):
    name = f"{__name__}:{function.__name__}"
    said = refused(name)
    kind = "sigmoid" if function is sigmoids else "softmax"
    assert said.startswith(f"--model {name}: it ends in a {kind} (in odds).")
    assert "Dense(classes)" in said
    assert "classifier_activation=None" in said


@pytest.mark.parametrize("function", [stateful, frozen], ids=["stateful", "frozen"])
def test_a_check_changes_nothing(function):
    model = models.build(f"{__name__}:{function.__name__}", IMAGE_SHAPE, 10)
    before = [variable.numpy() for variable in model.variables]
    custom.check_training("of mine", model, IMAGE_SHAPE, 10)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, variable.path)


def compiled(image_shape, classes):
    model = keras.Model(*dense(image_shape, classes))
    model.compile("adam", "mse")
    return model


def test_a_training_looks_at_the_model_first(tmp_path, stand_in_dir, capsys):
    def train(function):
        config = Config(
            num_gpus=1,
            batch_size=8,
            max_steps=1,
            train_dir=str(tmp_path / "run"),
            model=f"{__name__}:{function.__name__}",
            data="synthetic",
            data_dir=str(stand_in_dir),
        )
        return training.train(config)

    with pytest.raises(UsageError, match="it ends in a softmax"):
        train(odds)
    models.build(f"{__name__}:odds", IMAGE_SHAPE, 10)  # As for an evaluation.
    assert not (tmp_path / "run").exists()
    assert train(compiled) == 1
    assert "\nNOTE: the model's compile() is not used; " in capsys.readouterr().out
