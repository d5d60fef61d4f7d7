"""The built-in models, and what towers make of any: its values, its loss."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism

from cifar10.errors import UsageError
from cifar10.model import inference, loss
from cifar10.models import airbench
from cifar10.models.registry import build_model
from cifar10.training.tensorboard import with_activations

IMAGE_SHAPE = (24, 24, 3)


@pytest.fixture(scope="module")
def tutorial():
    """The tutorial's network; tests must not change it."""
    return build_model("tutorial", IMAGE_SHAPE, 10, seed=1)


def random_images(count=3, dtype=np.float32):
    random = np.random.default_rng(0)
    return tf.constant(random.normal(size=(count, *IMAGE_SHAPE)), dtype)


def values_of(variables):
    return [variable.numpy() for variable in variables]


def infer(model, images, *, trainable=None, training=False):
    return inference(
        model,
        [variable.value for variable in model.trainable_variables]
        if trainable is None
        else trainable,
        [variable.value for variable in model.non_trainable_variables],
        images,
        training=training,
    )


# ---- the tutorial


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
    logits, _, _ = infer(tutorial, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_only_the_hidden_layers_of_tutorial_are_penalized(tutorial):
    _, _, penalties = infer(tutorial, random_images(1))
    kernels = [tutorial.get_layer(name).kernel.numpy() for name in ("local3", "local4")]
    expected = [0.002 * np.sum(np.square(kernel, dtype=float)) for kernel in kernels]
    assert sorted(map(float, penalties)) == pytest.approx(sorted(expected), rel=1e-5)


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


def test_inference_uses_the_values_given_and_not_the_variables(stateful):
    gamma, beta = np.ones(4, np.float32), np.zeros(4, np.float32)
    kernel = np.arange(8, dtype=np.float32).reshape(4, 2)
    bias = np.array([10.0, -10.0], np.float32)
    logits, new, penalties = infer(
        stateful, BATCH, trainable=[gamma, beta, kernel, bias]
    )
    # The statistics are still mean 0 and variance 1, with Keras' epsilon 1e-3.
    expected = BATCH / math.sqrt(1.001) @ kernel + bias
    np.testing.assert_allclose(logits, expected, rtol=1e-5)
    assert [float(penalty) for penalty in penalties] == [0.5 * 140.0]
    assert new == [None] * len(stateful.variables)


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


class NotForwarding(Forgetful):
    """Takes the training mode, but does not hand it on to its layers."""

    def call(self, inputs, training=False):
        del training
        return super().call(inputs)


@pytest.mark.parametrize("kind", [Forgetful, NotForwarding])
def test_layers_of_a_subclassed_model_are_in_the_right_mode(kind):
    model = kind()
    without_dropout = model(BATCH, training=False)
    logits, _, penalties = infer(model, BATCH, training=False)
    np.testing.assert_allclose(logits, without_dropout)
    assert [float(penalty) for penalty in penalties] == [0.5 * 8]
    logits, _, _ = infer(model, BATCH, training=True)
    assert not np.array_equal(logits, without_dropout)
    assert with_activations(model) is None


# ---- loss


def logits_and_labels(dtype=tf.float32):
    """Three images of two classes with probabilities 3/4, 1/2+ and 1/5 of their own."""
    logits = tf.math.log(tf.constant([[1.0, 3.0], [2.0, 1.0], [4.0, 1.0]], dtype))
    return logits, tf.constant([1, 0, 1], tf.int32)


CROSS_ENTROPY = -(math.log(3 / 4) + math.log(2 / 3) + math.log(1 / 5)) / 3


@pytest.mark.parametrize(
    ("given", "computed"),
    [("float64", "float64"), ("bfloat16", "float32")],
)
def test_the_loss_equals_its_value_by_hand(given, computed):
    """Logits of reduced precision are widened for it."""
    logits, labels = logits_and_labels()
    logits = tf.cast(logits, given)
    penalties = [tf.constant(0.25, computed), tf.constant(1.5, computed)]
    parts = loss(logits, labels, penalties)
    assert {value.dtype.name for value in parts.values()} == {computed}
    expected = {
        "total_loss": CROSS_ENTROPY + 1.75,
        "cross_entropy": CROSS_ENTROPY,
        "penalties": 1.75,
        "precision @ 1": 2 / 3,
    }
    assert {name: float(parts[name]) for name in expected} == pytest.approx(
        expected, rel=1e-2 if given == "bfloat16" else 1e-6
    )
    assert float(loss(logits, labels, [])["penalties"]) == 0.0


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_losses_of_labels_and_of_label_parts_equal_kerass(label_smoothing):
    random = np.random.default_rng(0)
    logits = tf.constant(random.normal(size=(40, 5)))
    labels = tf.constant(random.integers(0, 5, 40))
    mixed = tf.constant(random.dirichlet(np.ones(5), 40), tf.float32)
    of_keras = keras.losses.CategoricalCrossentropy(
        True, label_smoothing=label_smoothing, dtype="float64"
    )
    ones = tf.one_hot(labels, 5)
    for given, parts in ((labels, ones), (ones, ones), (mixed, mixed)):
        found = loss(logits, given, [], label_smoothing=label_smoothing)
        expected = float(of_keras(parts, logits))
        assert found["total_loss"].dtype == tf.float64
        assert float(found["total_loss"]) == pytest.approx(expected, rel=1e-6)
        accuracy = tf.reduce_mean(keras.metrics.categorical_accuracy(parts, logits))
        assert 0 < float(accuracy) < 1
        assert float(found["precision @ 1"]) == pytest.approx(float(accuracy))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_loss_of_a_class_is_finite_where_another_is_impossible(deterministic):
    if not deterministic:
        disable_op_determinism()
    try:
        logits = tf.constant([[1.0, -np.inf, 1.0], [2.0, -np.inf, 2.0]])
        found = loss(logits, tf.constant([0, 2]), [])
    finally:
        tf.config.experimental.enable_op_determinism()
    assert float(found["cross_entropy"]) == pytest.approx(math.log(2))


def test_penalties_of_different_types_add_up():
    """In bfloat16 weight decay is float32, an activity regularizer's penalty is not."""
    penalties = [tf.constant(0.5), tf.constant(0.25, tf.bfloat16)]
    computed = loss(tf.zeros([1, 2]), tf.constant([0]), penalties)
    assert float(computed["penalties"]) == 0.75


def test_a_mixed_image_weighs_as_much_as_its_parts():
    logits, labels = logits_and_labels()
    weights = np.array([0.5, 3.0])

    def of_batch(given, **options):
        return float(loss(logits, given, [], **options)["cross_entropy"])

    for smoothing in (0.0, 0.2):
        options = {"label_smoothing": smoothing, "class_weights": weights}
        mixed = of_batch(tf.one_hot(labels, 2), **options)
        assert mixed == pytest.approx(of_batch(labels, **options), rel=1e-6)
    halves = tf.fill((3, 2), 0.5)
    mixed = of_batch(halves, class_weights=weights)
    assert mixed == pytest.approx(1.75 * of_batch(halves), rel=1e-6)


# ---- activations


def test_activations_come_with_the_same_logits_and_variables(tutorial):
    view, names = with_activations(tutorial)
    assert names == ["conv1", "relu1", "conv2", "local3", "local4", "softmax_linear"]
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


# ---- precision


@pytest.mark.parametrize(
    ("name", "precision"),
    [("airbench", "bfloat16"), ("tutorial", "float16"), ("tutorial", "float64")],
)
def test_variables_and_logits_keep_their_precision(name, precision):
    model = build_model(name, (9, 9, 3), 10, precision=precision)
    assert keras.config.dtype_policy().name == "float32"
    full = "float64" if precision == "float64" else "float32"
    assert {variable.dtype for variable in model.trainable_variables} == {full}
    assert model.output.dtype == full
    convolution = next(one for one in model.layers if one.name.startswith("conv"))
    assert convolution.compute_dtype == precision


# ---- airbench


def test_the_widest_convolutions_of_airbench_are_those_made_for_processors():
    """There they take 0.4 to 0.95 of the time, and fewer outputs take longer."""
    model = build_model("airbench", (32, 32, 3), 10)
    convolutions = [one for one in model.layers if isinstance(one, keras.layers.Conv2D)]
    of_kinds = {type(one).__name__: set() for one in convolutions}
    for one in convolutions:
        of_kinds[type(one).__name__].add(one.filters)
    assert of_kinds == {"Conv2D": {24, 64}, "WideConv2D": {256}}


def test_airbench_whitens_patches():
    images = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), np.uint8)
    images[:, :, 1:] = images[:, :, :-1] // 2 + images[:, :, 1:] // 2
    model = build_model("airbench", (32, 32, 3), 10)
    layer = model.get_layer("whitening")
    before = layer.kernel.numpy()
    airbench.initialize(model, images, lambda some: tf.cast(some, "float32"))
    assert not np.array_equal(before, layer.kernel)
    assert id(layer.kernel) not in map(id, model.trainable_variables)
    layer.bias.assign(tf.zeros_like(layer.bias))
    responses = layer(tf.cast(images, tf.float32)).numpy().reshape(-1, 24)
    np.testing.assert_allclose(responses[:, 12:], -responses[:, :12], atol=1e-3)
    covariance = responses[:, :12].T @ responses[:, :12] / len(responses)
    np.testing.assert_allclose(covariance, np.eye(12), atol=1e-3)
    # The others pass their input on at first.
    kernel = model.get_layer("conv1a").kernel.numpy()
    np.testing.assert_array_equal(kernel[1, 1, :, :24], np.eye(24))
    assert np.abs(kernel[0, :, :, :24]).max() == 0.0
    assert kernel[..., 24:].std() == pytest.approx((9 * 24) ** -0.5 / 3**0.5, rel=0.05)
    assert model.get_layer("head").kernel.numpy().std() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("side", "count"), [(64, 1250), (4000, 1)])
def test_airbench_is_initialized_from_fewer_images_if_they_are_larger(side, count):
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
        airbench.initialize(None, Sliced(), prepare)


@pytest.mark.parametrize(("depth", "blocks"), [(11, "335"), (8, "224"), (3, "111")])
def test_the_last_scale_of_a_resnet_has_the_most_blocks(depth, blocks):
    """Else a run's checkpoint would fit its model no longer."""
    model = build_model("resnet", (8, 8, 3), 10, options={"depth": depth, "width": 2})
    sums = [layer.name for layer in model.layers if layer.name.endswith("_sum")]
    found = (sum(f"scale{scale}_" in name for name in sums) for scale in range(3))
    assert "".join(map(str, found)) == blocks


def test_models_take_images_of_any_size_from_their_minimum():
    for name, shape, options in (
        ("airbench", (9, 40, 1), {"width": 4}),
        ("tutorial", (7, 30, 1), {}),
        ("resnet", (1, 1, 3), {"depth": 3}),
    ):
        model = build_model(name, shape, 10, options=options)
        assert model(tf.zeros((2, *shape))).shape == (2, 10)
    with pytest.raises(UsageError, match=r"\(40, 8, 3\)"):
        build_model("airbench", (40, 8, 3), 10)
