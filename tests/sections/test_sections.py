"""Sectioned towers compute what plain ones compute, and refuse what cannot be cut."""

import ctypes
import functools
import itertools
import mmap
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.errors import UsageError
from cifar10.layers import NewSection
from cifar10.sections import assembly, estimate
from cifar10.sections.cutting import calls_of
from cifar10.sections.planner import Planner
from cifar10.towers.devices import Placement
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update
from cifar10.training import settings, train as training

BATCH = 24
CLASSES = 5


class Whitened(keras.layers.Layer):
    """Adds a penalty that depends on the activations."""

    def call(self, inputs):
        self.add_loss(1e-2 * tf.reduce_mean(tf.square(inputs)))
        return inputs


def entangled(rate=0.3):
    """Everything that a boundary can cut through.

    Batch norm, dropout, a skip connection over several boundaries, a convolution that
    is called twice, weight decay on it, a penalty on activations, dropout that is
    called twice.
    """
    decay = keras.regularizers.L2(1e-2)
    images = keras.Input((8, 8, 3))
    shared = keras.layers.Conv2D(
        6, 3, padding="same", kernel_regularizer=decay, name="shared"
    )
    drop = keras.layers.Dropout(rate, seed=7, name="drop")
    first = keras.layers.Conv2D(6, 3, padding="same", name="first")(images)
    net = keras.layers.BatchNormalization(name="norm1")(first)
    net = drop(keras.layers.ReLU(name="relu1")(net))
    other = drop(keras.layers.ReLU(name="other")(first))
    net = keras.layers.Add(name="branches")([net, other])
    net = shared(net)
    net = Whitened(name="whitened")(net)
    net = keras.layers.BatchNormalization(name="norm2")(net)
    net = drop(keras.layers.ReLU(name="relu2")(net))
    net = shared(net)
    net = keras.layers.Add(name="sum")([net, first])
    net = keras.layers.GlobalAveragePooling2D(name="pool")(net)
    logits = keras.layers.Dense(CLASSES, kernel_regularizer=decay, name="head")(net)
    return keras.Model(images, logits)


def small_resnet(depth):
    options = {"depth": depth, "width": 4}
    return models.build("resnet", (16, 16, 3), CLASSES, options=options)


def planner(
    model, towers, *, momentum=0.9, batch=None, devices=None, xla=False, **options
):
    """Plans the training of a model by momentum."""
    state = TrainState(model, keras.optimizers.SGD(0.05, momentum=momentum))
    if batch is None:
        shape = [
            BATCH // towers // options.get("accumulate", 1),
            *model.input_shape[1:],
        ]
        batch = tf.TensorSpec(shape, model.dtype), tf.TensorSpec(shape[:1], tf.int32)
    return Planner(
        state,
        devices or [f"/cpu:{number}" for number in range(towers)],
        batch,
        tower=Tower(models.inference, models.loss, xla=xla),
        update=UPDATE,
        **options,
    ), state


# The rate falls with the images of all towers.
UPDATE = Update(
    lambda images: 0.05 * tf.exp(-tf.cast(images, tf.float32) / 1e3),
    lambda _: tf.constant(0.9),
)


def built(build, precision):
    """Builds a model with the same values every time."""
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(precision)
    try:
        return build()
    finally:
        keras.config.set_dtype_policy("float32")


def mirrored(planned, plan, state, build, precision, towers, accumulate):
    """Builds the step of a plan with variables on every device."""
    devices = [f"/cpu:{number}" for number in range(towers)]
    optimizer = state.optimizer
    states = [state] + [
        TrainState(
            built(build, precision), type(optimizer).from_config(optimizer.get_config())
        )
        for _ in devices[1:]
    ]
    builder = ReplicaBuilder(
        tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice()),
        states,
        [device for device in devices for _ in range(accumulate)],
        tower=planned.tower(plan.sections),
        update=UPDATE,
    )
    builder.synchronize([])
    return builder


def train(
    build, precision, steps, towers, sections, *, mirror=False, accumulate=1, **options
):
    """Trains from the same start; returns the losses of all steps and all variables."""
    model = built(build, precision)
    planned, state = planner(model, towers, accumulate=accumulate, **options)
    plan = planned.choose(sections, None)
    if mirror:
        builder = mirrored(planned, plan, state, build, precision, towers, accumulate)
    else:
        builder = planned.build(plan.sections)
    random = np.random.default_rng(5)
    losses = []
    for _ in range(steps):
        images = random.standard_normal((BATCH, *model.input_shape[1:]))
        labels = random.integers(0, CLASSES, BATCH)
        parts = zip(
            tf.split(tf.constant(images, precision), builder.num_towers),
            tf.split(tf.constant(labels, tf.int32), builder.num_towers),
            strict=True,
        )
        metrics = builder.step(list(parts)).metrics
        losses.append([metrics[name].numpy() for name in sorted(metrics)])
    variables = [*model.variables, *state.optimizer.variables, *state.averages]
    return np.array(losses), [variable.numpy() for variable in variables]


def assert_same(one, other, tolerance):
    """Compares losses and every variable, in units of their own size."""
    losses, variables = one
    other_losses, other_variables = other
    np.testing.assert_allclose(losses, other_losses, rtol=tolerance, atol=tolerance)
    for value, expected in zip(variables, other_variables, strict=True):
        if value.dtype.kind == "f":
            scale = max(1.0, np.abs(expected).max())
            assert np.abs(value - expected).max() <= tolerance * scale
        else:
            np.testing.assert_array_equal(value, expected)


@functools.cache
def plain(precision, steps, towers):
    return train(entangled, precision, steps, towers, None)


cuts = pytest.mark.parametrize(
    ("towers", "sections"),
    [
        (1, "norm1,whitened,relu2,sum"),
        pytest.param(1, "2", marks=pytest.mark.slow),
        (1, "4"),
        pytest.param(4, "2", marks=pytest.mark.slow),
        (4, "4"),
    ],
)


@pytest.mark.slow
@cuts
def test_sections_equal_the_plain_step_for_50_steps_in_float64(towers, sections):
    measured = train(entangled, "float64", 50, towers, sections)
    assert_same(measured, plain("float64", 50, towers), 1e-8)


@pytest.mark.slow
@cuts
def test_sections_equal_the_plain_step_for_10_steps_in_float32(towers, sections):
    measured = train(entangled, "float32", 10, towers, sections)
    assert_same(measured, plain("float32", 10, towers), 1e-6)


@pytest.mark.slow
def test_the_comparison_can_fail():
    """Other masks, as a second draw of dropout would give, end elsewhere."""
    one, other = plain("float64", 50, 1), plain("float64", 50, 4)
    with pytest.raises(AssertionError):
        assert_same(one, other, 1e-4)


@pytest.mark.parametrize(
    ("towers", "accumulate", "sections"), [(1, 4, None), (2, 2, "norm2,sum")]
)
def test_accumulated_batches_equal_as_many_towers(towers, accumulate, sections):
    """Also where what waits between sections does so on another device."""
    measured = train(
        entangled,
        "float64",
        50,
        towers,
        sections,
        accumulate=accumulate,
        cache_device="/cpu:3",
    )
    assert_same(measured, plain("float64", 50, 4), 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "accumulate", "sections"),
    [(4, 1, "4"), (2, 2, None), (2, 2, "norm2,sum")],
)
def test_mirrored_sections_equal_the_plain_step(towers, accumulate, sections):
    measured = train(
        entangled, "float64", 50, towers, sections, accumulate=accumulate, mirror=True
    )
    assert_same(measured, plain("float64", 50, 4), 1e-8)


def without_dropout():
    return entangled(0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "accumulate", "sections", "mirror"),
    [(1, 4, None, False), (2, 2, "4", False), (2, 2, "4", True), (4, 1, None, False)],
)
def test_xla_sections_equal_the_plain_step(towers, accumulate, sections, mirror):
    measured = train(
        without_dropout,
        "float64",
        50,
        towers,
        sections,
        accumulate=accumulate,
        mirror=mirror,
        xla=True,
    )
    expected = train(without_dropout, "float64", 50, 4, None)
    assert_same(measured, expected, 1e-8)


@pytest.mark.slow
def test_xla_sections_equal_the_whole_with_xla():
    """XLA draws other dropout masks, the same ones for both."""
    measured, whole = (
        train(entangled, "float64", 10, 1, sections, xla=True)
        for sections in ("norm2", None)
    )
    assert_same(measured, whole, 1e-8)


def test_batch_statistics_move_once_a_step():
    images = keras.Input((8, 8, 3))
    net = keras.layers.BatchNormalization(momentum=0.9, name="norm")(images)
    net = keras.layers.ReLU(name="relu")(net)
    net = keras.layers.Flatten(name="flat")(net)
    model = keras.Model(images, keras.layers.Dense(CLASSES, name="head")(net))
    planned, _ = planner(model, 1)
    batch = tf.random.stateless_normal((BATCH, 8, 8, 3), [1, 2], mean=3.0)
    labels = tf.zeros(BATCH, tf.int32)
    planned.build(planned.choose("flat", None).sections).step([(batch, labels)])
    mean = model.get_layer("norm").moving_mean.numpy()
    np.testing.assert_allclose(mean, 0.1 * np.mean(batch, (0, 1, 2)), rtol=1e-5)


def test_weight_decay_of_a_shared_layer_counts_once():
    one, other = (
        train(entangled, "float64", 1, 1, sections)[0][0, -1]  # The last by name.
        for sections in (None, "norm1,relu2,sum")
    )
    assert one == pytest.approx(other, rel=1e-12)
    assert one > 0


def tokens(*, mask=False):
    words = keras.Input((7,), dtype="int32")
    net = keras.layers.Embedding(50, 8, mask_zero=mask, name="embedding")(words)
    net = keras.layers.GRU(6, dropout=0.2, seed=1, name="gru")(net)
    return keras.Model(words, keras.layers.Dense(2, name="head")(net))


@pytest.mark.slow
def test_words_and_recurrent_layers_can_be_cut():
    """Whole numbers have no gradient, and the embedding's is sparse."""
    results = []
    for sections in (None, "gru,head"):
        keras.utils.set_random_seed(1)
        model = tokens()
        batch = tf.TensorSpec([6, 7], tf.int32), tf.TensorSpec([6], tf.int32)
        planned, state = planner(model, 2, accumulate=2, batch=batch, momentum=0.0)
        plan = planned.choose(sections, None)
        builder = planned.build(plan.sections)
        random = np.random.default_rng(0)
        for _ in range(3):
            batches = [
                (
                    tf.constant(random.integers(0, 50, (6, 7)), tf.int32),
                    tf.constant(random.integers(0, 2, 6), tf.int32),
                )
                for _ in range(builder.num_towers)
            ]
            builder.step(batches)
        results.append([variable.numpy() for variable in state.model.variables])
    for value, expected in zip(*results, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)


@pytest.mark.slow
def test_results_name_every_batch_of_every_tower():
    """What --on_nan looks at."""
    keras.utils.set_random_seed(0)
    model = entangled()
    planned, _ = planner(model, 2, accumulate=2)
    images = tf.random.stateless_normal((4, 6, 8, 8, 3), [0, 1])
    batches = [(images[n], tf.fill([6], n)) for n in range(4)]
    results, expected = (
        planned.build(sections).results(batches)
        for sections in (planned.choose("norm2,sum", None).sections, ())
    )
    assert len(results) == 4
    devices = ("/cpu:0", "/cpu:1")
    names = tuple(f"{name}, batch {number}" for name in devices for number in (0, 1))
    assert planned.build().tower_names == names
    for one, other in zip(results, expected, strict=True):
        for name, value in other.metrics.items():
            np.testing.assert_allclose(one.metrics[name], value, rtol=1e-5)
        for value, wanted in zip(one.gradients, other.gradients, strict=True):
            np.testing.assert_allclose(value, wanted, atol=1e-5)


def run_by_device(builder, batches):
    """Runs a step; returns the nodes of each device, as TensorFlow has placed them."""
    context.context().enable_run_metadata()
    builder.step(batches)
    (step,) = context.context().export_run_metadata().function_graphs
    context.context().disable_run_metadata()
    return {part.node[0].device[-5:]: part.node for part in step.partition_graphs}


def test_each_tower_computes_its_sections_and_the_host_keeps_what_waits():
    """The results of a function are where the step calls it, wherever it made them."""
    towers = ["/cpu:1", "/cpu:2"]
    images = keras.Input((8, 8, 3))
    net = keras.layers.Conv2D(4, 3, name="first")(images)
    net = keras.layers.Conv2D(4, 3, name="second")(net)
    net = keras.layers.Flatten(name="flat")(net)
    model = keras.Model(images, keras.layers.Dense(CLASSES)(net))
    planned, _ = planner(model, 2, devices=towers, cache_device="/cpu:0")
    builder = planned.build(planned.choose("second,flat", None).sections)
    batches = [(tf.zeros((12, 8, 8, 3)), tf.zeros(12, tf.int32)) for _ in towers]
    parts = run_by_device(builder, batches)
    host = parts["CPU:0"]
    come_from = {n.name: n.attr["send_device"].s[-5:] for n in host if n.op == "_Recv"}
    go_to = {n.input[0]: n.attr["recv_device"].s[-5:] for n in host if n.op == "_Send"}
    for tower, device in enumerate(["CPU:1", "CPU:2"]):
        # Three sections forward, the last one also backward, and two backward.
        calls = [node.name for node in parts[device] if node.attr["f"].func.name]
        prefix = f"tower_{tower}/StatefulPartitionedCall"
        assert sorted(calls) == [prefix, *(f"{prefix}_{n}" for n in (1, 2, 3, 4))]
        # What the second section takes, until the last one has computed its gradient.
        name = f"tower_{tower}/cached"
        (kept,) = (n for n in host if n.op == "Identity" and n.name.startswith(name))
        value, due = kept.input
        assert come_from[value] == go_to[kept.name] == device.encode()
        assert due.startswith(f"^{prefix}_2")
    for op in builder.trace(batches).graph.get_operations():
        if op.type == "StatefulPartitionedCall":
            body = op.graph._get_function(op.get_attr("f").name).graph.get_operations()
            assert {o.device for o in body if "Conv2D" in o.type} <= {op.device}


def names(model):
    return [call.operation.name for call in calls_of(model)]


def test_calls_come_after_what_they_take():
    model = entangled()
    known = {id(tensor) for tensor in model.inputs}
    for call in calls_of(model):
        assert {id(tensor) for tensor in call.input_tensors} <= known
        known |= {id(tensor) for tensor in call.output_tensors}
    assert names(model).count("shared") == 2


def chosen(model, sections, **options):
    planned, _ = planner(model, 1, **options)
    return planned.choose(sections, None)


def most_bytes(places, activations, carried):
    """Returns what the largest of the sections between some places takes."""
    bounds = [0, *places, len(activations)]
    return max(
        sum(activations[begin:end])
        + carried[begin]
        + carried[end]
        + sum(carried[place] for place in bounds if place <= begin)
        for begin, end in itertools.pairwise(bounds)
    )


@pytest.mark.parametrize("count", [2, 3, 4])
def test_sections_are_cut_where_the_largest_is_smallest(monkeypatch, count):
    """As a search over all ways to cut 8 layers finds."""
    random = np.random.default_rng(count)
    for _ in range(200):
        activations = random.integers(1, 100, 8).tolist()
        carried = [0, *random.integers(1, 100, 7).tolist(), 0]
        sizes = iter(carried[1:-1])
        monkeypatch.setattr(estimate, "_carried", lambda *_, sizes=sizes: next(sizes))
        chosen = estimate.balanced(None, range(8), activations, 1, count)
        assert len(chosen) == count - 1
        best = min(
            most_bytes(places, activations, carried)
            for places in itertools.combinations(range(1, 8), count - 1)
        )
        assert most_bytes(chosen, activations, carried) <= 1.05 * best


@pytest.mark.slow
def test_a_step_of_many_batches_is_planned_from_a_few(monkeypatch):
    """What 4,096 batches need takes no longer to find than what four do."""
    traced = []
    trace = TowerBuilder.trace

    def count(builder, batches):
        traced.append(len(batches))
        return trace(builder, batches)

    monkeypatch.setattr(TowerBuilder, "trace", count)
    plans = []
    for most in (3, 5):
        monkeypatch.setattr("cifar10.sections.planner._TRACED_BATCHES", most)
        planned, _ = planner(entangled(), 1, accumulate=5)
        plans.append(planned.choose("norm2,sum", None))
    assert traced == [3, 2, 5]
    few, all_of_them = plans
    assert few.tower_bytes == pytest.approx(all_of_them.tower_bytes, rel=0.01)
    assert few.operations == all_of_them.operations


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_the_memory_of_tensors_between_sections_is_returned_when_freed():
    """A block of memory of its own lies at the beginning of a page, after its size.

    Some may fit into gaps that other tests have left.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]

    def places(size):
        blocks = [library.malloc(size) for _ in range(64)]
        for block in blocks:
            library.free(block)
        return [block % mmap.PAGESIZE for block in blocks]

    places(2**24)  # From now on glibc keeps what is smaller.
    planned, _ = planner(entangled(), 1)
    placement = Placement(("/cpu:0",), simulated=False, description="")
    config = Config(batch_size=8, precision="float32", sections="2")
    config = settings.resolve(config, placement, workers=1)
    assembly.build_tower(config, placement, planned)
    assert places(2**23).count(16) > 32


def test_names_may_be_the_beginnings_of_names():
    model = models.build(
        "resnet", (16, 16, 3), CLASSES, options={"depth": 3, "width": 4}
    )
    plan = chosen(model, "conv1,scale1,scale2")
    assert plan.cuts == ("scale1_block0_in_norm", "scale2_block0_in_norm")


def test_a_model_says_where_its_sections_begin():
    images = keras.Input((8, 8, 3))
    net = keras.layers.Conv2D(4, 3)(images)
    net = NewSection(name="second")(net)
    net = keras.layers.Flatten()(net)
    net = NewSection(name="third")(net)
    model = keras.Model(images, keras.layers.Dense(CLASSES)(net))
    assert chosen(model, None).cuts == ("second", "third")
    assert len(chosen(model, "1").sections) == 1
    assert len(chosen(entangled(), None).sections) == 1


def parts(image_shape, classes):
    return [
        keras.Sequential([keras.Input(image_shape), keras.layers.Conv2D(4, 3)]),
        keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(classes)]),
    ]


def unlike_parts(image_shape, classes):
    first = keras.Sequential([keras.Input(image_shape), keras.layers.Flatten()])
    return [first, parts(image_shape, classes)[0]]


def test_a_list_of_models_is_a_list_of_sections():
    model = models.build(f"{__name__}:parts", (8, 8, 3), CLASSES)
    assert len(chosen(model, None).sections) == 2
    with pytest.raises(UsageError, match="model 2 of its list does not fit"):
        models.build(f"{__name__}:unlike_parts", (8, 8, 3), CLASSES)


class OfItsOwn(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)

    def call(self, inputs):
        return self.dense(tf.reshape(inputs, [-1, 192]))


class Noisy(keras.layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal([3])

    def compute_output_shape(self, input_shape):
        return input_shape


def masked():
    return tokens(mask=True)


def random():
    tf.random.set_seed(0)  # Deterministic TensorFlow, as in all tests, wants one.
    images = keras.Input((8, 8, 3))
    net = Noisy(name="noise")(images)
    net = keras.layers.Flatten(name="flat")(net)
    return keras.Model(images, keras.layers.Dense(CLASSES, name="head")(net))


@pytest.mark.parametrize(
    ("build", "asked", "said"),
    [
        (entangled, "norm3", "no layer norm3.\nThe closest names are norm2, norm1"),
        (entangled, "17", "the model has 16 layers"),
        (masked, "gru", "a mask crosses the boundary before gru"),
        (
            random,
            "flat",
            "layer noise cannot be computed twice: .* RandomStandardNormal",
        ),
    ],
)
def test_what_cannot_be_cut_is_named(build, asked, said):
    batch = None
    if build is masked:
        batch = tf.TensorSpec([6, 7], tf.int32), tf.TensorSpec([6], tf.int32)
    with pytest.raises(UsageError, match=said):
        chosen(build(), asked, batch=batch)


def test_a_class_of_its_own_cannot_be_cut_but_accumulates():
    model = OfItsOwn()
    model(tf.zeros((1, 8, 8, 3)))
    batch = tf.TensorSpec([4, 8, 8, 3]), tf.TensorSpec([4], tf.int32)
    with pytest.raises(UsageError, match="class OfItsOwn, and only a graph of layers"):
        chosen(model, "2", batch=batch)
    planned, _ = planner(model, 1, accumulate=2, batch=batch)
    builder = planned.build(planned.choose(None, None).sections)
    one = (tf.zeros((4, 8, 8, 3)), tf.zeros(4, tf.int32))
    losses = builder.step([one, one]).tower_losses.numpy()
    assert losses == pytest.approx([np.log(CLASSES)] * 2)


def test_auto_takes_the_fewest_that_fit():
    convolutions = [keras.layers.Conv2D(16, 3, padding="same") for _ in range(4)]
    head = [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((16, 16, 3)), *convolutions, *head])
    planned, _ = planner(model, 1)
    plans = list(planned.all())
    totals = [planned.total_bytes(plan) for plan in plans]
    assert totals == sorted(totals, reverse=True)
    assert len(plans) > 1
    assert len(planned.choose("auto", lambda: totals[0]).sections) == 1
    fitting = planned.choose("auto", lambda: totals[1])
    assert len(fitting.sections) == len(plans[1].sections)
    with pytest.raises(UsageError, match=r"still take .* and there are .* GB\.\nGive"):
        planned.choose("auto", lambda: totals[-1] - 1)


def test_mirrored_variables_are_counted_once_for_each_tower():
    layers = [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    one, two = (planner(model, 2, replicas=count)[0] for count in (1, 2))
    more = two.total_bytes(two.plain) - one.total_bytes(one.plain)
    assert more == sum(one.variable_bytes().values()) > 0
    assert two.bytes_so_far() == 2 * one.bytes_so_far() == 2 * more


def small_config(train_dir, data_dir, **options):
    return Config(
        model="resnet",
        depth=3,
        width=4,
        max_steps=10,
        checkpoint_steps=10,
        summary_steps=10,
        learning_rate=0.01,
        data="synthetic",
        data_dir=str(data_dir),
        deterministic=True,
        train_dir=str(train_dir),
        **options,
    )


def run_training(train_dir, data_dir, **options):
    """Trains by the whole program; returns the averages of the last checkpoint."""
    assert training.train(small_config(train_dir, data_dir, **options)) == 10
    values = runs.variables(runs.checkpoint(train_dir, 10))
    names = sorted(name for name in values if "averages" in name)
    return np.concatenate([values[name].ravel() for name in names])


@pytest.mark.slow
def test_the_program_trains_in_sections(tmp_path, stand_in_dir, capsys):
    """With summaries, several steps a call, the host as cache, a bottleneck report."""
    plain = run_training(
        tmp_path / "plain",
        stand_in_dir,
        num_gpus=2,
        batch_size=8,
        precision="bfloat16",
    )
    capsys.readouterr()
    sectioned = run_training(
        tmp_path / "sectioned",
        stand_in_dir,
        num_gpus=1,
        batch_size=8,
        precision="bfloat16",
        accumulate=2,
        sections="scale1,scale2",
        section_cache="host",
        steps_per_call=2,
        report_bottleneck=True,
    )
    printed = capsys.readouterr().out
    np.testing.assert_allclose(sectioned, plain, atol=1e-4)
    assert "8 images per tower and step x 1 x 2 before an update = 16" in printed
    assert "Sections: 3, cut before scale1_block0_in_norm, scale2_" in printed
    assert "towers: forward and backward" in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_limit": 1.5}, "--memory_limit 1.5: only --sections auto"),
        (
            {"memory_limit": 1.5, "sections": "2"},
            "--memory_limit 1.5: only --sections auto",
        ),
        ({"section_cache": "host"}, "--section_cache host: there are no sections"),
        ({"section_cache": "host", "accumulate": 2}, "host: there are no sections"),
        (
            {"variable_update": "mirrored", "memory_limit": 1.5},
            "--memory_limit 1.5: only",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(tmp_path, stand_in_dir, options, said):
    with pytest.raises(UsageError, match=said):
        training.train(
            small_config(tmp_path / "run", stand_in_dir, num_gpus=2, **options)
        )


@pytest.mark.slow
def test_auto_says_so_where_nothing_has_to_be_cut(tmp_path, stand_in_dir, capsys):
    run_training(tmp_path, stand_in_dir, batch_size=8, sections="auto")
    assert "Sections: none; a step takes about 0." in capsys.readouterr().out
