"""The model: the tutorial's network, its loss, and models of the user's own."""

import math
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10 import model as models
from cifar10.errors import UsageError
from cifar10.training.activations import with_activations

IMAGE_SHAPE = (24, 24, 3)


@pytest.fixture(scope="module")
def tutorial():
    """The tutorial's network; tests must not change it."""
    return models.build("tutorial", IMAGE_SHAPE, 10, seed=1)


def random_images(count=3, dtype=np.float32):
    random = np.random.default_rng(0)
    return tf.constant(random.normal(size=(count, *IMAGE_SHAPE)), dtype)


def values_of(variables):
    return [variable.numpy() for variable in variables]


def inference(model, images, *, trainable=None, training=False):
    return models.inference(
        model,
        [variable.value for variable in model.trainable_variables]
        if trainable is None
        else trainable,
        [variable.value for variable in model.non_trainable_variables],
        images,
        training=training,
    )


def test_tutorial_has_the_known_parameters(tutorial):
    assert {v.path: tuple(v.shape) for v in tutorial.variables} == {
        "conv1/kernel": (5, 5, 3, 64),
        "conv1/bias": (64,),
        "conv2/kernel": (5, 5, 64, 64),
        "conv2/bias": (64,),
        "local3/kernel": (2304, 384),
        "local3/bias": (384,),
        "local4/kernel": (384, 192),
        "local4/bias": (192,),
        "softmax_linear/kernel": (192, 10),
        "softmax_linear/bias": (10,),
    }
    assert tutorial.count_params() == 1_068_298


def test_tutorial_has_the_known_layers_in_order(tutorial):
    shapes = {layer.name: layer.output.shape[1:] for layer in tutorial.layers}
    assert list(shapes.items()) == [
        ("images", (24, 24, 3)),
        ("conv1", (24, 24, 64)),
        ("pool1", (12, 12, 64)),
        ("relu1", (12, 12, 64)),
        ("norm1", (12, 12, 64)),
        ("conv2", (12, 12, 64)),
        ("norm2", (12, 12, 64)),
        ("pool2", (6, 6, 64)),
        ("flatten", (2304,)),
        ("local3", (384,)),
        ("local4", (192,)),
        ("softmax_linear", (10,)),
    ]


@pytest.mark.parametrize(
    ("layer", "deviation", "bias"),
    [
        ("conv1", 0.05, 0.0),
        ("conv2", 0.05, 0.1),
        ("local3", 0.04, 0.1),
        ("local4", 0.04, 0.1),
        ("softmax_linear", 1 / 192, 0.0),
    ],
)
def test_tutorial_begins_with_the_known_values(tutorial, layer, deviation, bias):
    kernel, biases = values_of(tutorial.get_layer(layer).weights)
    assert np.unique(biases).tolist() == [np.float32(bias)]
    # A normal distribution cut at two deviations has 0.8796 of its deviation.
    assert np.std(kernel) == pytest.approx(0.8796 * deviation, rel=0.03)
    assert 1.9 * deviation < np.max(np.abs(kernel)) <= 2 * deviation
    assert abs(np.mean(kernel)) < 0.1 * deviation


def test_tutorial_is_the_network_written_out_with_tf_nn(tutorial):
    """Another writing of the network gives the same logits from the same variables."""
    images = random_images()
    (w1, b1, w2, b2, w3, b3, w4, b4, w5, b5) = values_of(tutorial.trainable_variables)

    def convolve(x, w, b):
        return tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME") + b)

    def normalize(x):
        return tf.nn.local_response_normalization(x, 4, 1.0, 0.001 / 9.0, 0.75)

    net = normalize(tf.nn.max_pool2d(convolve(images, w1, b1), 3, 2, "SAME"))
    net = tf.nn.max_pool2d(normalize(convolve(net, w2, b2)), 3, 2, "SAME")
    net = tf.reshape(net, [3, -1])
    net = tf.nn.relu(net @ w3 + b3)
    expected = tf.nn.relu(net @ w4 + b4) @ w5 + b5
    logits, _, _ = inference(tutorial, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_tutorials_penalties_are_those_of_the_hidden_layers_alone(tutorial):
    _, _, penalties = inference(tutorial, random_images(1))
    kernels = [tutorial.get_layer(name).kernel.numpy() for name in ("local3", "local4")]
    expected = [0.002 * np.sum(np.square(kernel, dtype=float)) for kernel in kernels]
    assert sorted(map(float, penalties)) == pytest.approx(sorted(expected), rel=1e-5)
    assert float(penalties[0]) == pytest.approx(
        0.004 * float(tf.nn.l2_loss(kernels[0])), rel=1e-5
    )


def test_seed_determines_the_initial_values(tutorial):
    same = models.build("tutorial", IMAGE_SHAPE, 10, seed=1)
    other = models.build("tutorial", IMAGE_SHAPE, 10, seed=2)
    first = values_of(tutorial.trainable_variables)
    for mine, theirs in zip(first, values_of(same.trainable_variables), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    kernels = values_of(other.trainable_variables)[::2]
    for mine, theirs in zip(first[::2], kernels, strict=True):
        assert np.mean(mine == theirs) < 0.01


def test_layers_of_equal_shape_begin_differently(own_model):
    name = own_model(
        """
        def build(image_shape, classes):
            return keras.Sequential([
                keras.Input(image_shape), keras.layers.Flatten(),
                keras.layers.Dense(classes), keras.layers.Dense(classes),
                keras.layers.Dense(classes),
            ])
        """
    )
    model = models.build(name, IMAGE_SHAPE, 10)
    _, _, second, _, third, _ = values_of(model.trainable_variables)
    assert not np.array_equal(second, third)


def test_variables_lie_on_the_cpu(tutorial):
    devices = {v.value.device.rsplit("/", 1)[-1] for v in tutorial.variables}
    assert devices == {"device:CPU:0"}


def test_precision_is_that_of_variables_and_logits_and_ends_with_the_build():
    before = keras.config.dtype_policy().name
    model = models.build("tutorial", IMAGE_SHAPE, 10, precision="float64")
    assert keras.config.dtype_policy().name == before == "float32"
    assert {variable.dtype for variable in model.variables} == {"float64"}
    logits, _, penalties = inference(model, random_images(1, np.float64))
    assert {tensor.dtype for tensor in (logits, *penalties)} == {tf.float64}


def test_dtype_policy_is_restored_after_a_failing_build(own_model):
    name = own_model(
        """
        def build(image_shape, classes):
            raise RuntimeError(keras.config.dtype_policy().name)
        """
    )
    with pytest.raises(UsageError, match="RuntimeError: float64"):
        models.build(name, IMAGE_SHAPE, 10, precision="float64")
    assert keras.config.dtype_policy().name == "float32"


# ---- inference


@pytest.fixture
def stateful():
    """A small model with batch statistics and a random generator."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.5)),
        ]
    )


BATCH = np.array([[1.0, 2.0, 3.0, 4.0], [3.0, 6.0, 9.0, 0.0]], np.float32)


def test_inference_returns_new_statistics_without_writing_them(stateful):
    before = values_of(stateful.variables)
    _, new, _ = inference(stateful, BATCH, training=True)
    for variable, value in zip(stateful.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    paths = [v.path.rsplit("/", 1)[-1] for v in stateful.non_trainable_variables]
    by_name = dict(zip(paths, new, strict=True))
    # Momentum 0.9 from mean 0 and variance 1 towards the batch's.
    np.testing.assert_allclose(
        by_name["moving_mean"], 0.1 * BATCH.mean(axis=0), rtol=1e-6
    )
    np.testing.assert_allclose(
        by_name["moving_variance"], 0.9 + 0.1 * BATCH.var(axis=0), rtol=1e-5
    )
    old_state = stateful.get_layer(index=1).seed_generator.state.numpy()
    assert not np.array_equal(by_name["seed_generator_state"], old_state)


def test_inference_outside_training_changes_no_statistics(stateful):
    _, new, _ = inference(stateful, BATCH, training=False)
    assert new == [None] * len(stateful.non_trainable_variables)


def test_inference_uses_the_values_given_and_not_the_variables(stateful):
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    kernel = np.arange(8, dtype=np.float32).reshape(4, 2)
    bias = np.array([10.0, -10.0], np.float32)
    logits, _, penalties = inference(
        stateful, BATCH, trainable=[gamma, beta, kernel, bias]
    )
    # The statistics are still mean 0 and variance 1, with Keras' epsilon 1e-3.
    expected = BATCH / math.sqrt(1.001) @ kernel + bias
    np.testing.assert_allclose(logits, expected, rtol=1e-5)
    assert [float(penalty) for penalty in penalties] == [0.5 * 140.0]


class Forgetful(keras.Model):
    """A subclassed model that leaves the training mode to Keras, as it may."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=1)
        self.dense = keras.layers.Dense(
            2, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)
        )

    def call(self, inputs):
        return self.dense(self.dropout(inputs))


def test_a_subclassed_model_need_not_take_the_training_mode():
    model = Forgetful()
    model(BATCH)
    logits, _, penalties = inference(model, BATCH, training=False)
    np.testing.assert_allclose(logits, model(BATCH, training=False))
    assert [float(penalty) for penalty in penalties] == [0.5 * 8]


class NotForwarding(Forgetful):
    """Takes the training mode, but does not hand it on to its layers."""

    def call(self, inputs, training=False):
        del training
        return super().call(inputs)


def test_layers_of_a_subclassed_model_are_in_training_mode():
    model = NotForwarding()
    model(BATCH)
    without_dropout = model(BATCH, training=False).numpy()
    assert not np.array_equal(model(BATCH, training=True), without_dropout)
    logits, _, _ = inference(model, BATCH, training=True)
    assert not np.array_equal(logits, without_dropout)


# ---- loss


def logits_and_labels(dtype=tf.float32):
    """Three images of two classes with probabilities 3/4, 1/2+ and 1/5 of their own."""
    logits = tf.math.log(tf.constant([[1.0, 3.0], [2.0, 1.0], [4.0, 1.0]], dtype))
    return logits, tf.constant([1, 0, 1], tf.int32)


CROSS_ENTROPY = -(math.log(3 / 4) + math.log(2 / 3) + math.log(1 / 5)) / 3


def test_loss_is_what_it_is_by_hand():
    penalties = [tf.constant(0.25), tf.constant(1.5)]
    parts = models.loss(*logits_and_labels(), penalties)
    assert {name: float(value) for name, value in parts.items()} == pytest.approx(
        {
            "total_loss": CROSS_ENTROPY + 1.75,
            "cross_entropy": CROSS_ENTROPY,
            "weight_decay": 1.75,
            "precision @ 1": 2 / 3,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_loss_without_penalties_is_the_cross_entropy_in_its_own_type(dtype):
    parts = models.loss(*logits_and_labels(dtype), [])
    assert {value.dtype for value in parts.values()} == {dtype}
    assert float(parts["weight_decay"]) == 0.0
    assert float(parts["total_loss"]) == pytest.approx(CROSS_ENTROPY, rel=1e-6)


# ---- with_activations


def test_activations_come_with_the_same_logits_and_variables(tutorial):
    view, names = with_activations(tutorial)
    assert names == [
        "conv1",
        "relu1",
        "conv2",
        "local3",
        "local4",
        "softmax_linear",
    ]
    assert [id(v) for v in view.variables] == [id(v) for v in tutorial.variables]
    images = random_images()
    logits, *activations = view(images)
    np.testing.assert_array_equal(logits, tutorial(images))
    by_name = dict(zip(names, activations, strict=True))
    np.testing.assert_array_equal(by_name["softmax_linear"], logits)
    # After ReLU, as the tutorial shows it, and before the pooling, first in this model.
    convolved = tutorial.get_layer("conv1")(images)
    np.testing.assert_array_equal(by_name["conv1"], tf.nn.relu(convolved))
    assert by_name["local4"].shape == (3, 192)
    assert float(tf.reduce_min(by_name["local4"])) == 0.0


def test_activation_layers_are_shown_though_they_have_no_weights():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, name="dense"),
            keras.layers.Dropout(0.5, name="dropout"),
            keras.layers.ReLU(name="relu"),
            keras.layers.Dense(2, name="logits"),
            keras.layers.Activation("tanh", name="tanh"),
        ]
    )
    _, names = with_activations(model)
    assert names == ["dense", "relu", "logits", "tanh"]


class Subclassed(keras.Model):
    """A model that is no graph of layers."""

    def __init__(self, classes):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(classes)

    def call(self, images):
        return self.dense(self.flatten(images))


def test_no_activations_of_a_subclassed_model():
    model = Subclassed(10)
    model(random_images(1))
    assert with_activations(model) is None


def test_activations_of_a_model_within_a_model():
    inner_input = keras.Input((4,))
    inner = keras.Model(inner_input, keras.layers.Dense(3)(inner_input), name="inner")
    images = keras.Input((4,))
    model = keras.Model(images, keras.layers.Dense(2, name="logits")(inner(images)))
    view, names = with_activations(model)
    assert names == ["logits"]
    np.testing.assert_array_equal(view(BATCH)[0], model(BATCH))


# ---- module:function


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """Writes a module into the current directory; returns a name for --model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    already_there = set(sys.modules)

    def write(source, module="own_models"):
        text = "import keras\nfrom keras import layers\n" + textwrap.dedent(source)
        (tmp_path / f"{module}.py").write_text(text)
        return f"{module}:build"

    yield write
    for name in set(sys.modules) - already_there:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_function_of_the_users_own_is_called_with_shape_and_classes(own_model):
    name = own_model(
        """
        def build(image_shape, classes):
            assert (image_shape, classes) == ((24, 24, 3), 7)
            return keras.Sequential(
                [keras.Input(image_shape), layers.Flatten(), layers.Dense(classes)],
                name="of_my_own",
            )
        """
    )
    model = models.build(name, IMAGE_SHAPE, 7, precision="float64")
    assert model.name == "of_my_own"
    logits, _, penalties = inference(model, random_images(2, np.float64))
    assert (logits.shape, logits.dtype) == ((2, 7), tf.float64)
    assert not penalties


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("resnet50", ["resnet", "tutorial", "module:function"]),
        ("own_models:", ["own_models:", "module:function"]),
        (":build", [":build", "module:function"]),
        ("nowhere_to_be_found:build", ["no module nowhere_to_be_found"]),
        ("own_models:other", ["own_models.py has no function other"]),
        ("own_models:CONSTANT", ["own_models.py has no function CONSTANT"]),
    ],
)
def test_a_name_that_leads_nowhere_is_named(own_model, name, named):
    own_model("CONSTANT = 3\ndef build(image_shape, classes): pass\n")
    with pytest.raises(UsageError) as caught:
        models.build(name, IMAGE_SHAPE, 10)
    for part in (f"--model {name}", *named):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        pytest.param("3", ["returned int", "keras.Model"], id="number"),
        pytest.param("None", ["returned NoneType"], id="None"),
        pytest.param(
            "chain(Input(image_shape), Flatten(), Dense(classes + 1))",
            ["(2, 11)", "(2, 10)"],
            id="a class too many",
        ),
        pytest.param(
            "chain(Input(image_shape), Dense(classes))",
            ["(2, 24, 24, 10)", "(2, 10)"],
            id="no vector",
        ),
        pytest.param(
            "chain(Input((8, 8, 3)), Flatten(), Dense(classes))",
            ["does not take images of shape (24, 24, 3)", "8, 8, 3"],
            id="small images",
        ),
        pytest.param(
            "chain(Input((100,)), Dense(classes))",
            ["does not take images of shape (24, 24, 3)", "100"],
            id="vectors",
        ),
        pytest.param(
            "chain(Input(image_shape), Flatten(), Dense(classes, trainable=False))",
            ["no trainable variables"],
            id="frozen",
        ),
        pytest.param(
            "chain(Input((24, 24, 1)), Conv2D(2, 3), Flatten(), Dense(classes))",
            ["does not take images of shape (24, 24, 3)"],
            id="grey images",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(own_model, body, named):
    name = own_model(
        f"""
        from keras import Input
        from keras.layers import Conv2D, Dense, Flatten

        def chain(*parts):
            return keras.Sequential(parts)

        def build(image_shape, classes):
            return {body}
        """
    )
    with pytest.raises(UsageError) as caught:
        models.build(name, IMAGE_SHAPE, 10)
    for part in (f"--model {name}", *named):
        assert part in str(caught.value)


def test_a_model_that_was_not_called_yet_is_built(own_model):
    name = own_model(
        """
        from keras.layers import Dense, Flatten

        def build(image_shape, classes):
            return keras.Sequential([Flatten(), Dense(classes)])
        """
    )
    model = models.build(name, IMAGE_SHAPE, 10)
    kernel, bias = model.trainable_variables
    assert kernel.shape == (24 * 24 * 3, 10)
    assert "CPU:0" in bias.value.device


@pytest.mark.parametrize("missing", ["missing_helper", "own"])
def test_a_failing_import_in_the_users_module_is_shown(own_model, missing):
    name = own_model(f"import {missing}\n")
    with pytest.raises(UsageError) as caught:
        models.build(name, IMAGE_SHAPE, 10)
    said = str(caught.value).splitlines()
    assert said[0] == f"--model {name}: own_models cannot be imported."
    assert said[1] == f"ModuleNotFoundError: No module named '{missing}'"
    assert said[2].endswith('own_models.py", line 3, in <module>')
    assert said[3:] == [f"    import {missing}"]


def test_a_subclassed_model_is_accepted(own_model):
    name = own_model(
        """
        class Own(keras.Model):
            def __init__(self, classes):
                super().__init__()
                self.flatten, self.dense = layers.Flatten(), layers.Dense(classes)

            def call(self, images, training=False):
                return self.dense(self.flatten(images))

        def build(image_shape, classes):
            model = Own(classes)
            model(keras.ops.zeros((2, *image_shape)))
            return model
        """
    )
    model = models.build(name, IMAGE_SHAPE, 10)
    assert inference(model, random_images(2))[0].shape == (2, 10)


def test_a_folder_in_place_of_a_module_is_named(own_model, tmp_path):
    own_model("")
    (tmp_path / "own_package").mkdir()
    with pytest.raises(UsageError, match="own_package"):
        models.build("own_package:build", IMAGE_SHAPE, 10)


# ---- precision, label smoothing, airbench


@pytest.mark.parametrize("name", ["tutorial", "airbench"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float64"])
def test_variables_and_logits_keep_their_precision(name, precision):
    model = models.build(name, (32, 32, 3), 10, precision=precision)
    full = "float64" if precision == "float64" else "float32"
    assert {variable.dtype for variable in model.trainable_variables} == {full}
    assert model.output.dtype == full
    convolution = next(one for one in model.layers if one.name.startswith("conv"))
    assert convolution.compute_dtype == precision


def test_reduced_logits_are_widened_for_the_loss():
    logits, labels = logits_and_labels()
    parts = models.loss(tf.cast(logits, tf.bfloat16), labels, [])
    assert {value.dtype for value in parts.values()} == {tf.float32}
    assert float(parts["cross_entropy"]) == pytest.approx(CROSS_ENTROPY, rel=1e-2)


def test_a_mixed_image_weighs_what_its_parts_do():
    logits, labels = logits_and_labels()
    weights = np.array([0.5, 3.0])
    parts = tf.one_hot(labels, 2)
    for smoothing in (0.0, 0.2):
        whole, mixed = (
            models.loss(
                logits, given, [], label_smoothing=smoothing, class_weights=weights
            )["cross_entropy"]
            for given in (labels, parts)
        )
        assert float(mixed) == pytest.approx(float(whole), rel=1e-6)
    halves = tf.fill(parts.shape, 0.5)
    mixed, plain = (
        models.loss(logits, halves, [], class_weights=given)["cross_entropy"]
        for given in (weights, None)
    )
    assert float(mixed) == pytest.approx(1.75 * float(plain), rel=1e-6)


def test_label_smoothing_is_kerass():
    logits, labels = logits_and_labels()
    parts = models.loss(logits, labels, [], label_smoothing=0.2)
    expected = keras.losses.CategoricalCrossentropy(True, label_smoothing=0.2)
    assert float(parts["total_loss"]) == pytest.approx(
        float(expected(tf.one_hot(labels, 2), logits)), rel=1e-6
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_labels_of_several_classes_are_kerass(label_smoothing):
    random = np.random.default_rng(0)
    logits = tf.constant(random.normal(size=(40, 5)))
    labels = tf.constant(random.dirichlet(np.ones(5), 40), tf.float32)
    parts = models.loss(logits, labels, [], label_smoothing=label_smoothing)
    expected = keras.losses.CategoricalCrossentropy(
        True, label_smoothing=label_smoothing, dtype="float64"
    )
    assert parts["total_loss"].dtype == tf.float64
    assert float(parts["total_loss"]) == pytest.approx(
        float(expected(labels, logits)), rel=1e-6
    )
    accuracy = tf.reduce_mean(keras.metrics.categorical_accuracy(labels, logits))
    assert 0 < float(accuracy) < 1
    assert float(parts["precision @ 1"]) == pytest.approx(float(accuracy))


def test_a_label_of_one_class_is_that_class():
    logits, labels = logits_and_labels()
    of_numbers = models.loss(logits, labels, [])
    of_parts = models.loss(logits, tf.one_hot(labels, 2), [])
    for name, value in of_numbers.items():
        assert float(of_parts[name]) == pytest.approx(float(value), rel=1e-6)


def test_airbench_whitens_patches():
    images = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), np.uint8)
    images[:, :, 1:] = images[:, :, :-1] // 2 + images[:, :, 1:] // 2
    model = models.build("airbench", (32, 32, 3), 10)
    layer = model.get_layer("whitening")
    before = layer.kernel.numpy()
    models.initialize(model, "airbench", images, lambda some: tf.cast(some, "float32"))
    assert not np.array_equal(before, layer.kernel)
    assert id(layer.kernel) not in map(id, model.trainable_variables)
    layer.bias.assign(tf.zeros_like(layer.bias))
    responses = layer(tf.cast(images, tf.float32)).numpy().reshape(-1, 24)
    np.testing.assert_allclose(responses[:, 12:], -responses[:, :12], atol=1e-3)
    covariance = responses[:, :12].T @ responses[:, :12] / len(responses)
    np.testing.assert_allclose(covariance, np.eye(12), atol=1e-3)


@pytest.mark.parametrize(("side", "count"), [(32, 5000), (64, 1250), (4000, 1)])
def test_larger_images_initialize_airbench_with_as_many_pixels(side, count):
    """All of them would take gigabytes; of a folder the first are of one class."""

    class Sliced:
        shape = (10_000, side, side, 3)

        def __len__(self):
            return 10_000

        def __getitem__(self, chosen):
            return np.arange(10_000)[chosen]

    class Seen(Exception):  # noqa: N818 - it ends the test early.
        pass

    def prepare(numbers):
        assert len(numbers) == count
        np.testing.assert_allclose(np.diff(numbers), 10_000 / count, atol=1)
        raise Seen

    with pytest.raises(Seen):
        models.initialize(None, "airbench", Sliced(), prepare)


def test_airbench_takes_images_from_9_x_9_on():
    for shape in ((9, 9, 3), (9, 40, 1)):
        model = models.build("airbench", shape, 10)
        assert model(tf.zeros((2, *shape))).shape == (2, 10)
    with pytest.raises(UsageError) as caught:
        models.build("airbench", (40, 8, 3), 10)
    assert str(caught.value).startswith(
        "--model airbench: it takes images of at least 9 x 9, and these are 40 x 8.\n"
    )


def test_a_deeper_airbench_adds_the_input_of_its_last_two_convolutions():
    """As the network that reaches 96 %; without them it passes its input on alone."""
    model = models.build("airbench", (9, 9, 3), 10, options={"depth": 3, "width": 4})
    filters = [layer.filters for layer in model.layers if hasattr(layer, "filters")]
    assert filters == [24, *[4] * 3, *[16] * 6]
    inside = ("gelu1a", "norm1c", "gelu1c")
    outputs = [model.get_layer(name).output for name in inside]
    images = tf.random.stateless_normal((2, 9, 9, 3), (1, 2))
    first, last, group = keras.Model(model.input, outputs)(images)
    np.testing.assert_allclose(
        group, keras.ops.sigmoid(1.702 * (first + last)) * (first + last), atol=1e-6
    )
    with pytest.raises(UsageError, match="--depth 4: a group of airbench has 2 or 3"):
        models.build("airbench", (9, 9, 3), 10, options={"depth": 4})


@pytest.mark.parametrize("name", ["tutorial", "resnet"])
def test_other_models_take_images_of_any_size(name):
    for shape in ((1, 1, 3), (7, 30, 1)):
        assert models.build(name, shape, 10)(tf.zeros((2, *shape))).shape == (2, 10)


def test_airbench_passes_its_input_on_at_first():
    model = models.build("airbench", (32, 32, 3), 10)
    kernel = model.get_layer("conv1a").kernel.numpy()
    np.testing.assert_array_equal(kernel[1, 1, :, :24], np.eye(24))
    assert np.abs(kernel[0, :, :, :24]).max() == 0.0
    assert kernel[..., 24:].std() == pytest.approx((9 * 24) ** -0.5 / 3**0.5, rel=0.05)
    assert model.get_layer("head").kernel.numpy().std() == pytest.approx(1.0, rel=0.05)


def test_a_model_without_computed_variables_is_left_alone(tutorial):
    before = [variable.numpy() for variable in tutorial.variables]
    models.initialize(tutorial, "tutorial", np.zeros((2, 32, 32, 3)), None)
    for old, variable in zip(before, tutorial.variables, strict=True):
        np.testing.assert_array_equal(old, variable)
