"""Models of the user's own: averaged, or refused with a reason."""

import signal
import sys
import textwrap
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.applications import mobilenet_v2, resnet50

import runs
from cifar10.errors import STOP_SIGNALS, UsageError
from cifar10.models import custom
from cifar10.models.registry import build_model
from cifar10.process import entry_point
from cifar10.training.tensorboard import with_activations
from small_towers import make_towers

IMAGE_SHAPE = (24, 24, 3)


@pytest.fixture(autouse=True)
def module_path(monkeypatch):
    """`--model module:function` adds the current directory to the module path."""
    monkeypatch.setattr(sys, "path", list(sys.path))


# ---- What the towers make of them


class Counted(layers.Layer):
    """Counts the calls in training mode."""

    calls = 0

    def call(self, inputs, training=False):
        Counted.calls += bool(training)
        return inputs


def counted(image_shape, classes):
    flat = [Counted(), layers.Flatten(), layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *flat])


def test_a_run_calls_its_model_once_for_all_checks_and_once_for_its_steps(
    tmp_path, stand_in_dir
):
    """Each call of a large model delays the start."""
    Counted.calls = 0
    runs.train(
        tmp_path / "run",
        stand_in_dir,
        model=f"{__name__}:counted",
        batch_size=8,
        max_steps=3,
        num_gpus=1,
    )
    assert Counted.calls == 2


def frozen(image_shape, classes):
    """A network of which only the last layer is trained."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            layers.Flatten(),
            layers.Dense(7, trainable=False),
            layers.BatchNormalization(trainable=False),
            layers.Dense(classes),
        ]
    )


def test_frozen_layers_do_not_drift_on_three_towers(four_cpus):
    """The mean of three equal values is not always that value."""
    model = build_model(f"{__name__}:frozen", IMAGE_SHAPE, 10)
    kernel = model.layers[1].kernel
    third = np.float32(1 / 3) * kernel.numpy()
    assert np.any(third + third + third != kernel.numpy()), "no value would show it"
    builder = make_towers(model, four_cpus[:3])
    before = [variable.numpy() for variable in model.variables]
    random = np.random.default_rng(0)
    images = tf.constant(random.normal(size=(3, 2, *IMAGE_SHAPE)), tf.float32)
    for _ in range(2):
        builder.step([(images[tower], tf.constant([1, 2])) for tower in range(3)])
    trained = {id(variable) for variable in model.trainable_variables}
    assert len(trained) == 2
    for variable, value in zip(model.variables, before, strict=True):
        moved = np.any(variable.numpy() != value)
        assert moved == (id(variable) in trained), variable.path


class Halved(keras.Model):
    """Made like a graph of layers, but computes something else than its graph."""

    def call(self, images, training=None):
        return super().call(images, training=training) / 2.0


def test_activations_are_unavailable_if_a_model_overrides_its_graph():
    images = keras.Input(IMAGE_SHAPE)
    logits = layers.Dense(10)(layers.Flatten()(images))
    # A view of its graph would train another function, at summary steps only.
    assert with_activations(Halved(images, logits)) is None
    assert with_activations(keras.Model(images, logits)) is not None


# ---- module:function


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """Writes a module of that name into the current directory."""
    monkeypatch.chdir(tmp_path)

    def write(source):
        text = "import keras\nfrom keras import layers\n" + textwrap.dedent(source)
        (tmp_path / "own_models.py").write_text(text)

    yield write
    for name in ("own_models", "own_package"):
        sys.modules.pop(name, None)


def test_a_users_function_is_called_with_shape_and_classes(own_models):
    own_models(
        """
        def build(image_shape, classes):
            assert (image_shape, classes) == ((24, 24, 3), 7)
            return keras.Sequential([layers.Flatten(), layers.Dense(classes)])
        """
    )
    model = build_model("own_models:build", IMAGE_SHAPE, 7, precision="float64")
    # Its variables were made, since it has been called.
    kernel, bias = model.trainable_variables
    assert kernel.shape == (24 * 24 * 3, 7)
    assert "CPU:0" in bias.value.device
    assert model(tf.zeros((2, *IMAGE_SHAPE), tf.float64)).dtype == tf.float64


def test_a_signal_while_a_model_is_traced_is_no_fault_of_the_model(
    own_models, monkeypatch
):
    own_models(
        """
        import os, signal

        class Slow(keras.Model):
            def __init__(self, classes):
                super().__init__()
                self.dense = layers.Dense(classes)

            def call(self, images):
                os.kill(os.getpid(), signal.SIGTERM)
                return self.dense(keras.ops.reshape(images, (2, 1728)))

        def build(image_shape, classes):
            return Slow(classes)
        """
    )

    def main():
        build_model("own_models:build", IMAGE_SHAPE, 7)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    monkeypatch.setattr(sys, "argv", ["predict.py"])
    try:
        with pytest.raises(SystemExit) as ended:
            entry_point.run_program(main)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (":build", "module:function"),
        ("nowhere_to_be_found:build", "module nowhere_to_be_found"),
        ("own_package:build", "own_package"),
        ("own_models:CONSTANT", "function CONSTANT"),
        ("own_models:build", "image_shape="),
    ],
)
def test_a_name_without_a_target_is_named(own_models, tmp_path, name, named):
    own_models("CONSTANT = 3\ndef build(): pass\n")
    (tmp_path / "own_package").mkdir()
    with pytest.raises(UsageError, match=named):
        build_model(name, IMAGE_SHAPE, 10)


@pytest.mark.parametrize("missing", ["missing_helper", "own"])
def test_a_failing_import_in_the_users_module_is_shown(own_models, missing):
    own_models(f"import {missing}\n")
    with pytest.raises(UsageError, match="ModuleNotFoundError") as caught:
        build_model("own_models:build", IMAGE_SHAPE, 10)
    place, line = str(caught.value).splitlines()[-2:]
    assert 'own_models.py", line 3' in place
    assert line == f"    import {missing}"


def test_a_module_that_ends_the_program_is_no_success(own_models):
    own_models("raise SystemExit\n")
    with pytest.raises(UsageError, match="own_models cannot be imported") as caught:
        build_model("own_models:build", IMAGE_SHAPE, 10)
    assert str(caught.value).splitlines()[-1] == "    raise SystemExit"


# ---- What is refused


def test_a_refusal_by_this_package_within_a_users_function_stays_as_it_is(own_models):
    own_models(
        """
        from cifar10.models.registry import build_model

        def build(image_shape, classes):
            return build_model("no such name", image_shape, classes)
        """
    )
    with pytest.raises(UsageError) as inner:
        build_model("no such name", IMAGE_SHAPE, 10)
    with pytest.raises(UsageError) as outer:
        build_model("own_models:build", IMAGE_SHAPE, 10)
    assert str(outer.value) == str(inner.value)


class Noisy(layers.Layer):
    """Adds noise in evaluation, too."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs):
        return inputs + 1e-3 * keras.random.normal((10,), seed=self.seeds)


def noisy(image_shape, classes):
    net = images = keras.Input(image_shape)
    net = layers.Dense(classes)(layers.Flatten()(net))
    return keras.Model(images, Noisy()(net))


def test_the_check_of_a_model_draws_none_of_its_random_numbers():
    """A run begins with the same, whether or not it was checked."""
    name = f"{__name__}:noisy"
    model = build_model(name, IMAGE_SHAPE, 10)
    before = [variable.numpy().tolist() for variable in model.variables]
    custom.check_training(name, model, IMAGE_SHAPE, 10)
    assert [variable.numpy().tolist() for variable in model.variables] == before


SOURCE = """
class Own(keras.Model):
    def build(self, _):
        self.scale = self.add_weight()

    def call(self, images, training=False):
        logits = images[:, 0, :10, 0] * self.scale
        return {called}

def dense_on(images):
    return keras.Model(images, layers.Dense(10)(layers.Flatten()(images / 255)))

def with_own(model, method):
    setattr(model, method, lambda *_: None)
    return model

def build(image_shape, classes):
    images = keras.Input(image_shape)
    logits = layers.Dense(classes)(layers.Flatten()(images))
    return {built}
"""


def refused(own_models, built="Own()", called="logits"):
    """Returns why a function or the call of its model is refused for a run."""
    own_models(SOURCE.format(built=built, called=called))
    name = "own_models:build"
    try:
        model = build_model(name, IMAGE_SHAPE, 10)
        custom.check_training(name, model, IMAGE_SHAPE, 10)
    except UsageError as error:
        return str(error)
    return pytest.fail("it was not refused")


@pytest.mark.parametrize(
    ("built", "named"),
    [
        ("keras.Model(images, [logits, logits])", "list"),
        ("keras.Model(images, layers.Dense(classes + 1)(logits))", "(2, 11)"),
        (
            "keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(2, 3)])",
            "(24, 24, 3) (from --distortions and --image_size)",
        ),
        ("keras.Model(images, images[:, 0, :10, 0])", "trainable"),
        ("keras.Model(images, keras.ops.sigmoid(logits))", "ends in a sigmoid"),
        ("dense_on(keras.Input(image_shape, dtype='uint8'))", "its input is uint8"),
        ("with_own(dense_on(images), 'train_step')", "overrides train_step()"),
    ],
)
def test_an_unsuitable_function_is_refused(own_models, built, named):
    assert named in refused(own_models, built)


@pytest.mark.parametrize(
    ("called", "named"),
    [
        ("keras.ops.softmax(logits)", "softmax"),
        ("images.numpy() if training else logits", "AttributeError"),
        ("layers.Dense(10)(logits)", "kernel, which is in none of its layers"),
    ],
)
def test_a_model_untrainable_on_towers_is_refused(own_models, called, named):
    assert named in refused(own_models, called=called)


@pytest.mark.parametrize(
    ("built", "error"),
    [
        ("misspelt(logits)", "NameError"),
        (
            "keras.applications.MobileNet(weights=None, input_shape=image_shape)",
            "ValueError",
        ),
    ],
)
def test_failures_in_the_users_code_are_shown_with_its_line(own_models, built, error):
    _, said, *shown = refused(own_models, built).splitlines()[1:]
    assert error in said
    # No line of Keras, TensorFlow or Python.
    assert [line for line in shown if line.startswith("  File")] == shown[:1]
    assert "own_models.py" in shown[0]
    assert shown[1:] == [f"    return {built}"]


def dense(image_shape, classes, **options):
    last = [layers.Flatten(), layers.Dense(classes, **options)]
    return keras.Sequential([keras.Input(image_shape), *last])


def softmax(image_shape, classes):
    return dense(image_shape, classes, activation="softmax")


def test_a_run_checks_the_model_first(tmp_path, stand_in_dir):
    def train(function):
        model = f"{__name__}:{function.__name__}"
        options = {"num_gpus": 1, "batch_size": 8, "max_steps": 1, "model": model}
        runs.train(tmp_path / "run", stand_in_dir, **options)

    with pytest.raises(UsageError, match="softmax"):
        train(softmax)
    build_model(f"{__name__}:softmax", IMAGE_SHAPE, 10)  # As for an evaluation.
    assert not (tmp_path / "run").exists()


# ---- What a model brings along from Keras


def adapted():
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(0).uniform(0, 255, [8, 24, 24, 3]))
    return layer


def model_with(*first):
    return keras.Sequential(
        [
            keras.Input(IMAGE_SHAPE),
            *first,
            layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )


def computing(function):
    """A model that prepares its images by operations."""
    images = keras.Input(IMAGE_SHAPE)
    return keras.Model(images, model_with()(function(images)))


def ending(function):
    """A model that computes its logits by a last function."""
    model = model_with()
    return keras.Model(model.inputs, function(model.outputs[0]))


TRIPLE = np.array([1.0, 2.0, 3.0], np.float32)
# Makes pixels of standardized images.
BACK = layers.Rescaling(64.0, 120.0, name="back")


def moved():
    """Layers that move the values of images to other places."""
    across = layers.RandomTranslation(0.1, 0.1), layers.RandomShear(0.1, 0.1)
    turned = layers.RandomRotation(0.1), layers.RandomZoom(0.1)
    return *turned, *across, layers.RandomPerspective(), layers.RandomCrop(20, 20)


def contrast():
    return layers.RandomContrast(0.2, (-1, 1))


class Ranged(layers.Layer):
    """Has a word of Keras's layers for something else."""

    value_range = 255.0

    def call(self, inputs):
        return inputs


class Dividing(keras.Model):
    """Divides its images in its own code."""

    def __init__(self):
        super().__init__()
        self.last = model_with()

    def call(self, inputs):
        return self.last(inputs / 255.0)


class Holding(keras.Model):
    """Has a layer that it does not call."""

    def __init__(self, layer):
        super().__init__()
        self.held, self.last = layer, model_with()

    def build(self, _):
        self.built = True  # `last` is.

    def call(self, inputs):
        return self.last(inputs)


def of_compile():
    model = model_with()
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: model_with(layers.Rescaling(1 / 255)), "rescaling"),
        (lambda: model_with(layers.Rescaling([1 / 127] * 3, -1)), "rescaling"),
        (
            lambda: model_with(keras.Sequential([layers.Rescaling(1 / 255)])),
            "rescaling",
        ),
        (
            lambda: model_with(layers.Normalization(mean=120, variance=60**2)),
            "normalization",
        ),
        (lambda: model_with(adapted()), "normalization"),
        (of_compile, "compile()"),
        (lambda: computing(lambda images: images / 255.0), "its truediv "),
        (lambda: computing(lambda images: 0.5 + images * (1 / 255)), "pixels"),
        (
            lambda: computing(lambda images: layers.Resizing(24, 24)(images) / 255),
            "div",
        ),
        (lambda: computing(lambda x: layers.RandomFlip()(x) / 255), "div"),
        (lambda: model_with(*moved(), layers.Rescaling(1 / 255)), "rescaling"),
        (lambda: model_with(*moved()), None),
        (lambda: computing(resnet50.preprocess_input), "its BiasAdd "),
        (lambda: computing(mobilenet_v2.preprocess_input), "pixels"),
        (Dividing, "its truediv "),
        # A large constant is captured, and not in the graph.
        (lambda: computing(lambda x: x - tf.fill(IMAGE_SHAPE, 120.0)), "pixels"),
        (lambda: model_with(layers.RandomContrast(0.2)), "RandomContrast"),
        (lambda: model_with(layers.RandomContrast(0.2, value_range=(-5, 5))), None),
        (lambda: model_with(layers.RandomContrast(0.2, (0, 1))), "from 0 to 1,"),
        (lambda: model_with(layers.RandomContrast(0.2, (-1, 1))), "from -1 to 1,"),
        (lambda: model_with(layers.RandomBrightness(0.2, (-3, 1))), "from -3 to 1,"),
        (lambda: model_with(layers.RandomBrightness(0.2, (-2, 2))), None),
        (lambda: model_with(layers.Rescaling(0.4), contrast()), None),
        (lambda: computing(lambda x: contrast()(keras.ops.tanh(x))), None),
        (lambda: model_with(layers.RandomErasing(value_range=(-1, 1))), None),
        (lambda: model_with(BACK, layers.RandomContrast(0.2)), None),
        (lambda: model_with(BACK, layers.Rescaling(1 / 255)), None),
        (lambda: computing(lambda x: resnet50.preprocess_input(BACK(x))), None),
        (lambda: model_with(Ranged()), None),
        (lambda: ending(keras.ops.relu), "ends in relu,"),
        (lambda: ending(keras.ops.tanh), "ends in tanh,"),
        (lambda: ending(lambda logits: 30 * keras.ops.tanh(logits / 30)), None),
        (lambda: computing(lambda images: (images * 64 + 120) / 255), None),
        (lambda: computing(lambda x: x[..., :1] * TRIPLE - TRIPLE[None]), None),
        (lambda: computing(lambda images: (images - 0.5) / 0.25), None),
        (lambda: computing(lambda images: images[..., ::-1]), None),
        (lambda: model_with(layers.Rescaling(2.0), layers.Normalization()), None),
        (lambda: model_with(layers.Rescaling(0.5, offset=0.001)), None),
        (lambda: model_with(layers.Rescaling(255)), None),
        (lambda: model_with(layers.Rescaling(tf.constant([1, 2, 3]))), None),
        (lambda: Holding(layers.Normalization()), None),
        (
            lambda: model_with(layers.Normalization(invert=True, mean=9, variance=9e3)),
            None,
        ),
        (model_with, None),
    ],
)
def test_what_a_run_does_not_use_or_need_of_a_model_is_said(
    monkeypatch, capsys, request, build, word
):
    """Once, although each replica builds the model."""
    name = f"brought:{request.node.name}"
    functions = {request.node.name: lambda *_: build()}
    monkeypatch.setitem(sys.modules, "brought", types.SimpleNamespace(**functions))
    build_model(name, IMAGE_SHAPE, 4, deterministic=False)
    said = capsys.readouterr().err
    assert (word in said and name in said) if word else not said
    build_model(name, IMAGE_SHAPE, 4)  # As an evaluation does.
    build_model(name, IMAGE_SHAPE, 4, deterministic=False)
    assert not capsys.readouterr().err


def test_a_model_that_was_trained_is_no_new_model(monkeypatch):
    """Its run would begin with trained weights."""
    models = []

    def cached(*_):
        models[:] = models or [model_with()]
        return models[0]

    monkeypatch.setitem(sys.modules, "brought", types.SimpleNamespace(of=cached))
    for _ in range(2):  # For evaluations.
        build_model("brought:of", IMAGE_SHAPE, 4)
    build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)
    build_model("brought:of", IMAGE_SHAPE, 4)
    with pytest.raises(UsageError, match="returned before"):
        build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)
    models.clear()
    build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)


def test_layers_that_were_trained_are_in_no_new_model(monkeypatch):
    """Its run would begin with trained weights, unless these are frozen."""
    base = model_with()

    def around(*_):
        images = keras.Input(IMAGE_SHAPE)
        return keras.Model(images, layers.Dense(4)(base(images)))

    monkeypatch.setitem(sys.modules, "brought", types.SimpleNamespace(of=around))
    for _ in range(2):  # The first run of them was refused for another reason.
        build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)
    kernel = base.trainable_variables[0]
    kernel.assign(kernel + 1.0)
    model = build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)
    assert "kernel was trained since" in model.not_new
    build_model("brought:of", IMAGE_SHAPE, 4)  # As an evaluation does.
    base.trainable = False
    model = build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)
    assert not hasattr(model, "not_new")


def test_a_layer_outside_the_model_is_refused_unless_it_is_frozen(monkeypatch):
    def around(*_):
        return ending(layers.Lambda(lambda x: 2.0 * outer(x)))

    monkeypatch.setitem(sys.modules, "brought", types.SimpleNamespace(of=around))
    outer = layers.Dense(4, trainable=False)
    build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)
    outer = layers.Dense(4)
    build_model("brought:of", IMAGE_SHAPE, 4)  # As an evaluation does.
    with pytest.raises(UsageError, match="in none of its layers"):
        build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)


def test_a_layer_that_draws_once_for_each_graph_is_refused(monkeypatch):
    """A section's recomputation would have another augmentation than its loss."""
    layer = layers.AugMix(value_range=(-5, 5))
    brought = types.SimpleNamespace(of=lambda *_: model_with(layer))
    monkeypatch.setitem(sys.modules, "brought", brought)
    with pytest.raises(UsageError, match="Use RandAugment"):
        build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)
    layer = layers.RandAugment(value_range=(-5, 5), num_ops=1)
    build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)


@pytest.mark.parametrize(
    "change",
    [
        keras.backend.clear_session,
        lambda: keras.mixed_precision.set_global_policy("float32"),
    ],
)
def test_a_function_that_changes_the_precision_is_refused(monkeypatch, change):
    """The run would have another than config.json says; old runs can be scored."""

    def changing(*_):
        change()
        return model_with()

    monkeypatch.setitem(sys.modules, "brought", types.SimpleNamespace(of=changing))
    with pytest.raises(UsageError, match="mixed_bfloat16, to float32"):
        build_model(
            "brought:of", IMAGE_SHAPE, 4, precision="bfloat16", deterministic=False
        )
    build_model("brought:of", IMAGE_SHAPE, 4, precision="bfloat16")
    build_model("brought:of", IMAGE_SHAPE, 4, deterministic=False)
