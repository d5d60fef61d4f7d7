"""On GPUs every operation has a kernel, and no data set travels: seen without a GPU."""

import functools
import itertools
import math
import operator

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tensorflow_config

from benchmarks.gpu_graphs import (
    BATCH_SIZE,
    HOST,
    PROGRAMS,
    asked_of_gpus,
    build_towers,
    count_program,
    count_step,
    crossings,
    has_kernels,
    trace_input,
    without_kernel,
)
from cifar10.config.augmentation import PARTS
from cifar10.config.fields import DISTORTIONS
from cifar10.evaluation.scored_set import Scorer
from cifar10.follower.live_copy import traced_logits
from cifar10.input import (
    augmentation as augmentations,
    distortions,
    pipeline,
)
from cifar10.input.augmentation import Augmentation
from cifar10.layers import FusedBatchNormalization
from cifar10.training import tensorboard

pytestmark = pytest.mark.skipif(
    not has_kernels(), reason="this TensorFlow was built without GPUs"
)

IMAGES = np.random.default_rng(0).integers(0, 256, (1000, 32, 32, 3), np.uint8)

# What may run on the host although a GPU is asked for it.
KNOWN = {
    # float64 is for proofs; its loss travels, a few numbers an image.
    ("SparseSoftmaxCrossEntropyWithLogits", "float64", "int32"),
    ("SparseSoftmaxCrossEntropyWithLogits", "float64", "int64"),
    # Mirrored random generators: two numbers for each layer with dropout.
    ("SplitV", "int32", "int64"),
}

MODELS = [
    *itertools.product(
        ("tutorial", "airbench", "resnet"), ("float32", "bfloat16", "float16")
    ),
    ("tutorial", "float64"),
]


@pytest.fixture(autouse=True)
def as_by_default():
    """Without --deterministic, which changes the operations of the loss."""
    tensorflow_config.disable_op_determinism()
    yield
    tf.config.experimental.enable_op_determinism()


def build(gpus, **given):
    return build_towers(gpus, IMAGES, **given)


@functools.cache
def tutorials_step(gpus):
    """The towers of the default training, and its step."""
    towers, batches = build(gpus)
    return towers, towers.trace(batches)


@functools.cache
def made_on_device(distortion, augmentation=None):
    """The function that makes the batches of a tower on a GPU."""
    maker = pipeline.BatchMaker(distortion, 0, augmentation=augmentation)
    return trace_input(IMAGES, maker)


def assert_kernels(graph, at_least=100):
    assert len(asked_of_gpus(graph)) >= at_least, "nothing is meant for a GPU"
    assert without_kernel(graph) - KNOWN == set()


# ---- kernels


@pytest.mark.parametrize("distortion", ["tutorial", "random_resized_crop"])
def test_an_input_is_computed_on_a_gpu_from_numbers_of_images(distortion):
    drawn = 3 + 2 * (1 if distortion == "tutorial" else distortions.CROP_ATTEMPTS)
    assert_made_of_numbers(made_on_device(distortion), drawn)


def test_augmentations_are_computed_on_a_gpu():
    half = {"probability": 0.5}
    parts = {part: {} for part in PARTS} | {"mixup": half, "cutmix": half}
    augmentation = Augmentation(parts, 10)
    # Two for each of RandAugment's two operations, and for a square to cut out. The
    # noise of erased rectangles is as large as an image.
    numbers = 5 + 4 + sum(count for count, _ in augmentations.SINGLE.values())
    numbers += augmentations.ERASING_NUMBERS + augmentations.MIXING_NUMBERS
    numbers += math.prod(IMAGES.shape[1:]) / BATCH_SIZE
    assert_made_of_numbers(made_on_device("tutorial", augmentation), numbers, 40)


def assert_made_of_numbers(function, drawn, at_least=20):
    """For each image its index is sent, and so many random numbers of four bytes.

    A GPU would draw the numbers of each step of a call by a kernel of its own.
    """
    assert_kernels(function.graph, at_least)
    assert not [node for node in asked_of_gpus(function.graph) if "Random" in node.op]
    crossed = crossings(function, [HOST, "/gpu:0"])
    assert crossed, "the numbers of the images are made on the CPU"
    assert HOST not in {one.target for one in crossed}
    assert sum(one.bytes for one in crossed) <= (8 + 4 * drawn) * BATCH_SIZE + 64


def test_a_step_with_labels_of_several_classes_has_gpu_kernels():
    options = {"augmentation": {"mixup": {}}, "label_smoothing": 0.1}
    towers, batches = build(1, model="small_runs:small", **options)
    assert_kernels(towers.trace(batches).graph)


def normalized(image_shape, classes):
    """A model that is normalized twice, as airbench is."""
    net = images = keras.Input(image_shape)
    for number in (1, 2):
        net = keras.layers.Conv2D(4, 5, strides=4)(net)
        net = FusedBatchNormalization(name=f"norm{number}")(net)
    net = keras.layers.Flatten()(net)
    return keras.Model(images, keras.layers.Dense(classes)(net))


def test_a_frozen_batch_norm_has_a_deterministic_gradient():
    """That of the fused operation has a kernel which refuses to be deterministic."""
    towers, batches = build(1, model=f"{__name__}:normalized")
    towers.freeze(("norm1",))
    nodes = asked_of_gpus(towers.trace(batches).graph)
    computed = [n.attr["is_training"].b for n in nodes if n.op == "FusedBatchNormV3"]
    assert set(computed) == {True}
    gradients = [n for n in nodes if n.op == "FusedBatchNormGradV3"]
    assert gradients
    assert all(node.attr["is_training"].b for node in gradients)


def assert_evaluation_has_kernels(towers, shape, kind, *, views):
    """Scoring, with views if wanted, and a live copy of the model on a GPU."""
    model = towers.state.model
    scorer = Scorer(model, test_time_augmentation=views)
    score = scorer._score.get_concrete_function(
        [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables],
        tf.TensorSpec(shape),
        tf.TensorSpec(shape[:1], tf.int32),
    )
    assert_kernels(score.graph, at_least=50)
    copy = traced_logits(model, (32, 32, 3), kind, "/gpu:0")
    assert_kernels(copy.graph, at_least=30)


def test_every_operation_of_an_evaluation_has_a_gpu_kernel():
    towers, _ = tutorials_step(1)
    assert_evaluation_has_kernels(
        towers, [BATCH_SIZE, 24, 24, 3], "tutorial", views=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision"), MODELS)
def test_every_model_and_precision_has_gpu_kernels(model, precision):
    """A residual network of one block a scale asks for what those of any depth do.

    And one tower on a GPU for what several do, but for their averages, which are above.
    """
    options = {"depth": 3} if model == "resnet" else {}
    options |= {"model": model, "precision": precision}
    towers, batches = build(1, **options)
    assert_kernels(towers.trace(batches).graph)
    shape = [*batches[0][0].shape]
    kind = "tutorial" if model == "tutorial" else "flip_translate"
    assert_evaluation_has_kernels(towers, shape, kind, views=model != "tutorial")
    shown = tensorboard.activations_of(towers.state.model, "/gpu:0")
    assert_kernels(shown.get_concrete_function(batches[0][0]).graph, at_least=30)
    if precision != "bfloat16":
        tf.config.experimental.enable_op_determinism()
        options |= {"variable_update": "mirrored", "deterministic": True}
        towers, batches = build(2, **options)
        assert_kernels(towers.trace(batches).graph)


@pytest.mark.slow
def test_every_kind_of_input_has_gpu_kernels():
    for distortion in DISTORTIONS:
        assert_kernels(made_on_device(distortion).graph, at_least=10)


# ---- kernels and crossings of the default training


def test_a_step_of_one_gpu_copies_nothing_large():
    towers, step = tutorials_step(1)
    assert_kernels(step.graph)
    crossed = crossings(step, ["/gpu:0", "/gpu:0", HOST], home=towers.state.device)
    assert sum(one.bytes for one in crossed) <= 64, crossed


def test_steps_of_four_gpus_copy_only_variables_and_gradients():
    towers, step = tutorials_step(4)
    assert_kernels(step.graph)
    inputs = [device for device in towers.devices for _ in range(2)]
    crossed = crossings(step, [*inputs, HOST], "/cpu:0", "/cpu:0", gpus=4)
    # Variables to each GPU; gradients, and losses and metrics, from it.
    assert len(crossed) == 12
    variables = [v.value for v in towers.state.model.variables]
    held = sum(v.dtype.size * v.shape.num_elements() for v in variables)
    for gpu in (f"/device:GPU:{number}" for number in range(4)):
        received = [one for one in crossed if one.target == gpu]
        sent = [one for one in crossed if one.source == gpu]
        assert (
            {one.source for one in received} == {one.target for one in sent} == {HOST}
        )
        for copied in (received, sent):
            # Beside it the step's few numbers, and what fills each up to 64 bytes.
            most = held + 64 * (len(variables) + 8)
            assert held <= sum(one.bytes for one in copied) <= most, copied


# Operations, kernels, copies, those of them to the host, and kernels for images.
MOST = {
    "tutorial": (359, 198, 1, 1, 4.1),
    "tutorial on 4 GPUs": (912, 440, 12, 8, 16.4),
    # TensorFlow 2.22 takes three operations more for a norm.
    "fast": (986, 586, 1, 1, 3.3)
    if tf.__version__ < "2.22"
    else (1019, 622, 1, 1, 3.3),
    "resnet": (2309, 1019, 1, 1, 3.2),
    "tutorial, update by XLA": (185, 108, 0, 0, 4.1),
    "fast, update by XLA": (290, 163, 0, 0, 3.3),
}


@pytest.mark.parametrize("name", MOST)
def test_a_step_stays_within_its_recorded_counts(name):
    """More operations are time of the host, more kernels and copies that of GPUs.

    So are kernels that make images: for all steps of a call as many as for one.
    """
    counts = count_step(name)
    found = (*counts[:4], counts.input)
    assert all(map(operator.le, found, MOST[name])), counts
    assert counts.steps == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_steps_waits_for_nothing(name):
    """The host would wait in each step for a loop of unknown length and a branch."""
    # TensorFlow 2.22's XLA fuses less of `fast`.
    fast = 307 if tf.__version__ < "2.22" else 376
    most = {"tutorial": 137, "fast": fast, "resnet": 722}
    found = count_program(name)
    assert (found.loops, found.waits, found.scatters) == (1, 0, 0)
    assert found.steps == (10 if name == "fast" else 50)
    # What is fused differs between versions of XLA.
    assert found.fusions <= 1.2 * most[name]


def pools_of(towers, batches):
    """Returns how many gradients of max pooling are TensorFlow's in a step."""
    step = towers.trace(batches).graph.as_graph_def()
    nodes = itertools.chain(step.node, *(one.node_def for one in step.library.function))
    return sum(node.op == "MaxPoolGrad" for node in nodes)


def shared_pool(image_shape, classes):
    """A model that pools twice by one layer, once in a model within."""
    pool = keras.layers.MaxPooling2D(3, 2)
    within = keras.Sequential([keras.layers.Conv2D(3, 3), pool])
    layers = [keras.Input(image_shape), within, pool, keras.layers.Flatten()]
    return keras.Sequential([*layers, keras.layers.Dense(classes)])


@pytest.mark.parametrize(
    ("gpus", "given", "own"),
    [
        (1, {"xla": True}, True),
        (1, {"xla": True, "deterministic": True}, True),
        (2, {"xla": True}, True),
        pytest.param(
            *(2, {"xla": True, "variable_update": "mirrored"}, True),
            marks=pytest.mark.slow,
        ),
        (1, {"xla_update": True}, False),
        (1, {}, False),
    ],
)
def test_programs_of_gpus_pool_without_tensorflows_gradient(gpus, given, own):
    """And the layers are as they were afterwards."""
    towers, batches = build(gpus, model=f"{__name__}:shared_pool", **given)
    assert pools_of(towers, batches) == (0 if own else 2 * gpus)
    towers.compile_steps()
    assert pools_of(towers, batches) == 2 * gpus


def test_cpu_programs_pool_with_tensorflows_gradient():
    """With the gradient that the golden curve of XLA has."""
    towers, batches = build(1, model=f"{__name__}:shared_pool", xla=True)
    towers.devices = ("/cpu:0",)
    assert pools_of(towers, batches) == 2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_other_kinds_of_steps_have_gpu_kernels(precision):
    """Sections, accumulation, several steps in a call, dropout, gradients to show."""
    options = {"precision": precision, "model": "small_runs:small"}
    towers, batches = build(
        2,
        sections="2",
        accumulate=2,
        clip_norm=1.0,
        on_nan="skip",
        **options,
    )
    assert_kernels(towers.trace(batches).graph)
    towers, batches = build(2, variable_update="mirrored", **options)
    assert_kernels(towers.trace(batches).graph)
    towers, batches = build(1, **options)
    results = towers._results.get_concrete_function(towers.devices, batches)
    assert_kernels(results.graph)
    verified = towers._step_and_results.get_concrete_function(batches)
    assert_kernels(verified.graph)
    stacked = [tf.TensorSpec([3, *spec.shape], spec.dtype) for spec in batches[0]]
    count = tf.TensorSpec([], tf.int32)
    many = towers._steps.get_concrete_function([tuple(stacked)], count)
    assert_kernels(many.graph)
