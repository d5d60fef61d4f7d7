"""Sectioned towers compute what plain ones compute, and refuse what cannot be cut."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.distributed.replicas import ReplicaBuilder
from cifar10.errors import UsageError
from cifar10.layers import NewSection, QuickGelu
from cifar10.model import inference, loss
from cifar10.sections import planning
from cifar10.sections.sectioned_tower import SectionedTower
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.update import TrainState, Update
from cifar10.training import train as training

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


def dropped():
    """Three sections of it have the one layer that draws random numbers."""
    images = keras.Input((4, 4, 1))
    drop = keras.layers.Dropout(0.5, seed=7)
    net = drop(keras.layers.Flatten()(images))
    net = drop(keras.layers.Dense(8, name="hidden1")(net))
    net = drop(keras.layers.Dense(8, name="hidden2")(net))
    return keras.Model(images, keras.layers.Dense(CLASSES, name="head")(net))


def small():
    layers = [
        keras.layers.Conv2D(4, 3, name="first"),
        keras.layers.Flatten(name="flat"),
        keras.layers.Dense(CLASSES, name="head"),
    ]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers])


# The rate falls with the images of all towers.
UPDATE = Update(
    lambda images: 0.05 * tf.exp(-tf.cast(images, tf.float32) / 1e3),
    lambda _: tf.constant(0.9),
)


def devices(towers):
    return [f"/cpu:{number}" for number in range(towers)]


def state_of(model, momentum=0.9):
    return TrainState(model, keras.optimizers.SGD(0.05, momentum=momentum))


def places(model, cuts):
    """Returns where the sections begin that have names, such as `norm1,sum`."""
    return planner(model).choose(cuts).starts


def built(build, precision="float64"):
    """Builds a model with the same values every time."""
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(precision)
    try:
        return build()
    finally:
        keras.config.set_dtype_policy("float32")


def builder_of(states, towers, cuts, accumulate=1, *, xla=False, on=None):
    """Builds the step of towers in sections, or plain ones without `cuts`."""
    state, *others = states
    tower = Tower(inference, loss, xla=xla)
    if cuts or accumulate > 1:
        begins = places(state.model, cuts) if cuts else ()
        tower = SectionedTower(tower, begins)
    on = on or devices(towers)
    batches = [device for device in on for _ in range(accumulate)]
    if not others:
        return TowerBuilder(state, batches, tower=tower, update=UPDATE)
    strategy = tf.distribute.MirroredStrategy(on, tf.distribute.ReductionToOneDevice())
    builder = ReplicaBuilder(strategy, states, batches, tower=tower, update=UPDATE)
    builder.broadcast([], variables=True)
    return builder


def train(build, towers, cuts=None, accumulate=1, *, steps=3, replicas=1, **options):
    """Trains from the same start; returns all metrics and all variables."""
    states = [state_of(built(build)) for _ in range(replicas)]
    builder = builder_of(states, towers, cuts, accumulate, **options)
    state = states[0]
    random = np.random.default_rng(5)
    values = []
    for _ in range(steps):
        images = random.standard_normal((BATCH, *state.model.input_shape[1:]))
        labels = random.integers(0, CLASSES, BATCH)
        parts = zip(
            tf.split(tf.constant(images), builder.num_towers),
            tf.split(tf.constant(labels, tf.int32), builder.num_towers),
            strict=True,
        )
        metrics = builder.step(list(parts)).metrics
        values += [metrics[name].numpy() for name in sorted(metrics)]
    variables = [*state.model.variables, *state.optimizer.variables, *state.averages]
    return [*values, *(variable.numpy() for variable in variables)]


def assert_same(values, expected):
    """Compares metrics and every variable, in units of their own size."""
    for value, wanted in zip(values, expected, strict=True):
        scale = max(1.0, np.abs(wanted).max())
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-9 * scale)


@functools.cache
def plain(towers):
    return train(entangled, towers)


@pytest.mark.parametrize(
    ("towers", "accumulate", "cuts", "options"),
    [
        pytest.param(1, 2, "norm1,whitened,relu2,sum", {}, id="sections"),
        pytest.param(
            2, 2, "norm2,sum", {"replicas": 2}, id="mirrored", marks=pytest.mark.slow
        ),
    ],
)
def test_sections_and_accumulated_batches_equal_plain_towers(
    towers, accumulate, cuts, options
):
    measured = train(entangled, towers, cuts, accumulate, **options)
    assert_same(measured, plain(towers * accumulate))


@pytest.mark.slow
def test_xla_sections_equal_the_plain_step():
    """Without dropout, of which XLA draws other masks."""
    build = functools.partial(entangled, 0.0)
    measured = train(build, 2, "norm2", 2, replicas=2, xla=True)
    assert_same(measured, train(build, 4))


@pytest.mark.slow
def test_xla_sections_equal_the_whole_with_xla():
    measured, whole = (train(dropped, 1, cuts, xla=True) for cuts in ("hidden2", None))
    assert_same(measured, whole)


def test_a_layer_shared_by_sections_draws_the_same_random_numbers():
    measured = train(dropped, 1, "hidden1,hidden2", steps=2)
    assert_same(measured, train(dropped, 1, steps=2))


def test_batch_statistics_move_once_a_step():
    images = keras.Input((8, 8, 3))
    net = keras.layers.BatchNormalization(momentum=0.9, name="norm")(images)
    net = keras.layers.Flatten(name="flat")(net)
    model = keras.Model(images, keras.layers.Dense(CLASSES)(net))
    batch = tf.random.stateless_normal((BATCH, 8, 8, 3), [1, 2], mean=3.0)
    builder = builder_of([state_of(model)], 1, "flat")
    builder.step([(batch, tf.zeros(BATCH, tf.int32))])
    mean = model.get_layer("norm").moving_mean.numpy()
    np.testing.assert_allclose(mean, 0.1 * np.mean(batch, (0, 1, 2)), rtol=1e-5)


def tokens():
    words = keras.Input((7,), dtype="int32")
    net = keras.layers.Embedding(50, 8, mask_zero=True, name="embedding")(words)
    net = keras.layers.GRU(6, dropout=0.2, seed=1, name="gru")(net)
    return keras.Model(words, keras.layers.Dense(2, name="head")(net))


def test_each_tower_computes_its_sections_on_its_device(four_cpus):
    """The results of a function are where the step calls it, wherever it made them."""
    images = keras.Input((8, 8, 3))
    net = keras.layers.Conv2D(4, 3, name="first")(images)
    net = keras.layers.Flatten(name="flat")(net)
    model = keras.Model(images, keras.layers.Dense(CLASSES)(net))
    towers = four_cpus[1:3]
    builder = builder_of([state_of(model)], 2, "flat", on=towers)
    batches = [(tf.zeros((12, 8, 8, 3)), tf.zeros(12, tf.int32)) for _ in towers]
    graph = builder.trace(batches).graph.as_graph_def()
    calls = [node for node in graph.node if node.attr["f"].func.name]
    functions = {one.signature.name: one for one in graph.library.function}
    # The first section forward and backward; the last one is part of the step.
    for place, device in enumerate(towers):
        own = [one for one in calls if one.name.startswith(f"tower_{place}/")]
        assert len(own) == 2
        for call in own:
            body = functions[call.attr["f"].func.name].node_def
            found = {node.device for node in body if "Conv2D" in node.op}
            assert found <= {call.device}
            assert call.device.lower().endswith(device.strip("/"))


# Plans.


def planner(model, *, on=("/cpu:0",), images=None, **options):
    """Plans the training of a model on the images of a batch of each tower."""
    if images is None:
        images = tf.TensorSpec([BATCH, *model.input_shape[1:]], model.dtype)
    tower = Tower(inference, loss)
    return planning.Planner(state_of(model), tower, on, images, **options)


def chosen(model, sections, **options):
    return planner(model, **options).choose(sections)


def test_cuts_nearly_minimize_the_largest_section():
    """As a search over all ways to cut 8 layers finds."""

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

    random = np.random.default_rng(0)
    for _, count in itertools.product(range(100), (2, 3, 4)):
        carried = [0, *random.integers(1, 100, 7).tolist(), 0]
        activations = random.integers(1, 100, 8).tolist()
        boundaries = dict(enumerate(carried[:-1]))
        most, found = planning.balanced(activations, boundaries, count)
        assert len(found) == count - 1
        assert most == most_bytes(found, activations, carried)
        best = min(
            most_bytes(places, activations, carried)
            for places in itertools.combinations(range(1, 8), count - 1)
        )
        assert most <= 1.05 * best


def test_planned_memory_of_towers_and_replicas_adds_up():
    model = small()
    one, two, mirrored = (
        planner(model, on=devices(towers), replicas=replicas)
        for towers, replicas in ((1, 1), (2, 1), (2, 2))
    )
    more = two.plain.total_bytes - one.plain.total_bytes
    assert more == one.plain.tower_bytes
    variables = mirrored.plain.total_bytes - two.plain.total_bytes
    assert variables == one.variable_bytes > 0
    assert mirrored.bytes_so_far == 2 * one.bytes_so_far == 2 * variables


def test_a_plan_counts_the_memory_of_compiling_with_xla():
    images = keras.Input((8, 8, 3))
    plain, compiled = (
        planner(keras.Model(images, keras.layers.Flatten()(activation(images)))).plain
        for activation in (keras.layers.ReLU(), QuickGelu())
    )
    # One compilation of a small function took 50 MB (dev/LOG.md).
    assert compiled.total_bytes - plain.total_bytes > 50_000_000


def test_a_model_may_mark_the_starts_of_its_sections():
    images = keras.Input((8, 8, 3))
    net = keras.layers.Conv2D(4, 3)(images)
    net = NewSection(name="second")(net)
    net = keras.layers.Flatten()(net)
    net = NewSection(name="third")(net)
    model = keras.Model(images, keras.layers.Dense(CLASSES)(net))
    assert chosen(model, None).cuts == ("second", "third")
    assert chosen(model, "1").cuts == ()
    assert chosen(small(), None).cuts == ()


def test_auto_chooses_sections_only_if_needed_to_fit_the_limit():
    convolutions = [keras.layers.Conv2D(16, 3, padding="same") for _ in range(8)]
    head = [keras.layers.Flatten(), keras.layers.Dense(CLASSES)]
    model = keras.Sequential([keras.Input((16, 16, 3)), *convolutions, *head])
    planned = planner(model)
    needed = planned.plain.total_bytes
    assert planned.choose("auto", needed) == planned.plain
    fitting = planned.choose("auto", needed - 1)
    assert fitting.cuts
    assert fitting.total_bytes < needed
    with pytest.raises(UsageError, match="batch_size"):
        planned.choose("auto", 1)


@pytest.mark.parametrize("size", [1, 2, 12, 80])
def test_the_largest_batch_just_fits_the_limit(size):
    needed = planner(small(), images=tf.TensorSpec([size, 8, 8, 3])).plain.total_bytes
    planned = planner(small())
    assert planned.largest_batch(1, needed + 10, 1000) == size
    assert planned.largest_batch(1, needed - 10, 1000) < size
    assert planned.largest_batch(1, needed + 10, size // 2) == size // 2


def test_the_largest_batch_is_found_despite_nonlinear_memory():
    """A tensor that every batch needs decides once batches are small."""
    planned = planner(small(), images=tf.TensorSpec([4000, 8, 8, 3]))
    for one in (planned, planned._doubled):
        vars(one)["costs"] = [one.costs[0] + 10**6, *one.costs[1:]]
    needed = planned._resized(48).plain.total_bytes
    assert planned.largest_batch(1, needed, 10_000) == 48
    needed = planned._resized(1).plain.total_bytes
    assert planned.largest_batch(1, needed - 1, 10_000) == 0


# Refusals.


class Subclassed(keras.Model):
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


def random():
    tf.random.set_seed(0)  # Deterministic TensorFlow, as in all tests, wants one.
    images = keras.Input((8, 8, 3))
    net = Noisy(name="noise")(images)
    net = keras.layers.Flatten(name="flat")(net)
    return keras.Model(images, keras.layers.Dense(CLASSES, name="head")(net))


# Keras's nightly builds say so of a GRU, which does.
@pytest.mark.filterwarnings("ignore:.*does not support masking")
def test_impossible_cuts_are_refused_by_name():
    words = tf.TensorSpec([6, 7], tf.int32)
    with pytest.raises(UsageError, match="begin with layer first2"):
        chosen(small(), "first2")
    with pytest.raises(UsageError, match=r"3 layers.*\n.*smaller number\.$"):
        chosen(small(), "4")
    with pytest.raises(UsageError, match="gru"):
        chosen(tokens(), "gru", images=words)
    builder = builder_of([state_of(random())], 1, "flat")
    with pytest.raises(UsageError, match=r"noise.*RandomStandardNormal"):
        builder.trace([(tf.zeros((4, 8, 8, 3)), tf.zeros(4, tf.int32))])


def test_subclassed_model_cannot_be_cut_but_accumulates():
    model = Subclassed()
    model(tf.zeros((1, 8, 8, 3)))
    images = tf.TensorSpec([4, 8, 8, 3])
    with pytest.raises(UsageError, match="Subclassed"):
        chosen(model, "2", images=images)
    planned = planner(model, accumulate=2, images=images)
    with pytest.raises(UsageError, match="Subclassed"):
        planned.choose("auto", 1)
    assert not planned.choose(None).cuts
    on = ["/cpu:0"] * 2
    builder = TowerBuilder(planned.state, on, tower=planned.tower, update=UPDATE)
    one = (tf.zeros((4, 8, 8, 3)), tf.zeros(4, tf.int32))
    losses = builder.step([one, one]).tower_losses.numpy()
    assert losses == pytest.approx([np.log(CLASSES)] * 2)


@pytest.mark.slow
def test_the_program_trains_in_sections(tmp_path, stand_in_dir, capsys):
    """With summaries and several steps a call."""
    ways = {
        "plain": {"num_gpus": 2, "sections": "auto"},
        "sectioned": {
            "num_gpus": 1,
            "accumulate": 2,
            "sections": "softmax_linear",
            "steps_per_call": 2,
        },
    }
    averages, printed = {}, {}
    for name, options in ways.items():
        config = Config(
            model=runs.SMALL,
            batch_size=8,
            max_steps=10,
            summary_steps=10,
            learning_rate=0.01,
            precision="bfloat16",
            data="synthetic",
            data_dir=str(stand_in_dir),
            deterministic=True,
            train_dir=str(tmp_path / name),
            **options,
        )
        assert training.train(config) == 10
        values = runs.variables(runs.checkpoint(tmp_path / name, 10))
        averages[name] = {k: v for k, v in values.items() if "averages" in k}
        printed[name] = capsys.readouterr().out
    assert runs.largest_difference(averages["sectioned"], averages["plain"]) < 1e-4
    assert "Sections: none" in printed["plain"]
    assert "Sections: 2" in printed["sectioned"]
    assert "x 2 accumulated" in printed["sectioned"]


def test_a_plan_counts_the_batches_kept_by_accumulation():
    model = small()
    once, four = (planner(model, accumulate=count).plain for count in (1, 4))
    batch = BATCH * (8 * 8 * 3 * 4 + 8)  # Images in float32, and labels.
    gradients = 4 * sum(int(np.prod(one.shape)) for one in model.trainable_variables)
    assert four.tower_bytes - once.tower_bytes == 3 * batch + gradients


def test_a_boundary_takes_the_bytes_of_the_whole_batch():
    """A cut at wide tensors would cost what it was to save."""
    of_image = (6 * 6 * 4, 144)  # After the convolution, and flattened.
    expected = {place: BATCH * 4 * size for place, size in enumerate(of_image, 1)}
    assert planner(small())._boundaries == {0: 0, **expected}
