"""The tower builder: N towers are one, and every update is written once."""

import dataclasses
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.evaluation.scored_set import Scorer
from cifar10.input import calls
from cifar10.model import inference
from cifar10.towers import copies, towers
from cifar10.towers.optimizers import build_optimizer
from cifar10.training.tensorboard import activations_of
from small_towers import (
    assert_equal,
    line_model,
    make_towers,
    random_batch,
    small_model,
    split,
    squared_error,
    values,
)


@pytest.mark.parametrize(("count", "workers"), [(4, 1), (2, 3)])
def test_steps_follow_a_computation_by_hand(four_cpus, count, workers):
    """The rate falls with the images of all workers, the averages' decay by steps."""
    builder = make_towers(
        line_model(),
        four_cpus[:count],
        optimizer=keras.optimizers.SGD(7.0, momentum=0.9),  # The update sets the rate.
        loss=squared_error,
        learning_rate=lambda seen: 0.1 - tf.cast(seen, tf.float64) / 1000.0,
        average_decay=lambda step: tf.cast(step + 1, tf.float64) / 4.0,
    )
    builder.tower_names = [f"tower {number}" for number in range(count * workers)]
    x = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    y = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    line = average = np.array([2.0, 1.0])
    velocity = np.zeros(2)
    for step in range(3):
        error = line[0] * x + line[1] - y
        gradient = np.array([np.mean(2 * error * x), np.mean(2 * error)])
        rate = 0.1 - step * 4 * workers / 1000
        velocity = 0.9 * velocity - rate * gradient
        line = line + velocity
        average = average + (1 - (step + 1) / 4) * (line - average)
        batches = split(x[:, None], y, count)
        shown = builder.gradients(batches).values()  # Which changes nothing.
        assert [float(np.ravel(one)[0]) for one in shown] == pytest.approx(
            [*gradient], rel=1e-5
        )
        result = builder.step(batches)
        metrics = {name: float(value) for name, value in result.metrics.items()}
        assert metrics["total_loss"] == pytest.approx(np.mean(error**2), rel=1e-5)
        assert metrics["learning_rate"] == pytest.approx(rate)
    state = builder.state
    found = [float(np.ravel(v)[0]) for v in state.model.trainable_variables]
    assert found == pytest.approx([*line], rel=1e-5)
    averages = [float(np.ravel(v)[0]) for v in state.averages]
    assert averages == pytest.approx([*average], rel=1e-5)
    assert int(state.global_step) == int(state.optimizer.iterations.numpy()) == 3


def test_reported_loss_is_the_mean_and_averages_stay_without_a_decay(four_cpus):
    builder = make_towers(
        line_model(), four_cpus[:2], loss=squared_error, average_decay=None
    )
    result = builder.step(split(tf.zeros([2, 1]), tf.constant([1.0, 4.0]), 2))
    assert result.tower_losses.numpy().tolist() == [0.0, 9.0]
    assert float(result.metrics["total_loss"]) == 4.5
    assert [one.numpy().item() for one in builder.state.averages] == [2.0, 1.0]
    bias = builder.state.model.trainable_variables[1]
    assert bias.numpy().item() == pytest.approx(1.3)


def test_weight_decay_counts_once_on_several_towers(four_cpus):
    inputs = keras.Input((1,))
    dense = keras.layers.Dense(
        1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)
    )
    model = keras.Model(inputs, dense(inputs))

    def decayed(outputs, labels, penalties):
        (error,) = squared_error(outputs, labels, penalties).values()
        return {"total_loss": error + sum(penalties)}

    builder = make_towers(model, four_cpus, loss=decayed)
    result = builder.step(split(tf.zeros([4, 1]), tf.zeros([4]), 4))
    assert float(result.metrics["total_loss"]) == 0.5
    assert dense.kernel.numpy().item() == pytest.approx(1.0 - 0.1)


def test_batches_of_different_shapes_are_refused(four_cpus):
    builder = make_towers(line_model(), four_cpus[:2], loss=squared_error)
    batches = [(tf.zeros([count, 1]), tf.zeros([count])) for count in (2, 3)]
    with pytest.raises(ValueError, match="shape"):
        builder.step(batches)


# Of `line_model` for these batches of two towers.
TWO_POINTS = np.array([[1.0], [2.0]], "f"), np.array([0.0, 1.0], "f")
GRADIENTS = np.array([11.0, 7.0])
NORM = np.linalg.norm(GRADIENTS)


def weights(builder):
    return [v.numpy().item() for v in builder.state.model.trainable_variables]


@pytest.mark.parametrize("clip_norm", [0.5, 1e3])
def test_gradients_are_clipped_together_by_their_norm(four_cpus, clip_norm):
    builder = make_towers(
        line_model(), four_cpus[:2], loss=squared_error, clip_norm=clip_norm
    )
    result = builder.step(split(*TWO_POINTS, 2))
    assert float(result.metrics["gradient_norm"]) == pytest.approx(NORM)
    clipped = GRADIENTS * min(clip_norm / NORM, 1.0)
    assert weights(builder) == pytest.approx([*([2.0, 1.0] - 0.1 * clipped)])


def test_float16_clips_without_its_scale_and_passes_over_an_overflow(four_cpus):
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**10
    )
    builder = make_towers(
        line_model(),
        four_cpus[:2],
        optimizer=optimizer,
        loss=squared_error,
        clip_norm=0.5,
    )
    good = split(*TWO_POINTS, 2)
    gradients = [one.numpy().item() for one in builder.gradients(good).values()]
    assert gradients == pytest.approx([*GRADIENTS])
    result = builder.step(good)
    assert float(result.metrics["gradient_norm"]) == pytest.approx(NORM)
    assert float(result.metrics["loss_scale"]) == 2.0**10
    clipped = GRADIENTS * 0.5 / NORM
    assert weights(builder) == pytest.approx([*([2.0, 1.0] - 0.1 * clipped)])

    before = weights(builder)
    bad = split(tf.constant([[1e18], [1.0]]), tf.constant([0.0, 1.0]), 2)
    result = builder.step(bad)
    assert np.isfinite(result.tower_losses).all()
    assert float(result.metrics["gradient_norm"]) == 0.0
    assert weights(builder) == before
    result = builder.step(good)
    assert float(result.metrics["loss_scale"]) == 2.0**9


@pytest.mark.parametrize("count", [1, 2])
def test_slices_of_one_index_are_added_before_they_are_clipped(four_cpus, count):
    """An embedding has a slice for every time that a word occurs."""

    def product(outputs, labels, penalties):
        del penalties
        return {"total_loss": tf.reduce_mean(outputs[:, 0] * labels)}

    inputs = keras.Input((1,), dtype="int32")
    embedding = keras.layers.Embedding(3, 1, embeddings_initializer="zeros")
    model = keras.Model(inputs, keras.layers.Flatten()(embedding(inputs)))
    builder = make_towers(model, four_cpus[:count], loss=product, clip_norm=1.25)
    words, labels = tf.constant([[0], [0], [1], [0]]), tf.constant([2.0, 2, -6, 4])
    result = builder.step(split(words, labels, count))
    assert float(result.metrics["gradient_norm"]) == pytest.approx(2.5)
    # Words that no image shows do not move.
    moved = model.variables[0].numpy().ravel().tolist()
    assert moved == pytest.approx([-0.1, 0.075, 0.0])


def placed_towers(four_cpus):
    """Returns towers on all four devices, whose variables are on the second."""
    with tf.device(four_cpus[1]):
        model, optimizer = small_model(), keras.optimizers.SGD(0.1, 0.9)
    return make_towers(model, four_cpus, optimizer=optimizer, device=four_cpus[1])


@pytest.mark.parametrize("packs", [False, True])
def test_towers_and_update_run_on_their_devices(four_cpus, packs):
    builder = placed_towers(four_cpus)
    builder.packs_copies = packs
    written = {v.device.rpartition("/")[2] for v in builder.state.variables()}
    assert written == {"device:CPU:1"}
    operations = builder.trace(split(*random_batch(), 4)).graph.get_operations()
    products = [node.device for node in operations if node.type == "MatMul"]
    assert {*products} == {f"/device:CPU:{number}" for number in range(4)}
    for part in ("update", *(["flat"] if packs else [])):
        placed = {one.device for one in operations if one.name.startswith(f"{part}/")}
        assert placed - {""} == {"/device:CPU:1"}
    placed = {one.device for one in operations if one.name.startswith("average/")}
    # What had no device would be on the host in a call of several steps. Each tower
    # has its part of the noise scale, the first one the square of its gradients.
    assert placed == {f"/device:CPU:{number}" for number in range(4)}


def test_results_are_where_they_are_awaited_despite_a_programs_chosen_device(four_cpus):
    """Those of one step beside the variables, those of many on the host."""
    builder = placed_towers(four_cpus)
    batches = [split(*random_batch(seed=seed), 4) for seed in range(2)]
    with tf.device(four_cpus[2]):
        found = builder.step(batches[0]), builder.steps(calls.stacked(batches, 2), 2)
    for result, device in zip(found, ("CPU:1", "CPU:0"), strict=True):
        assert {one.device[-5:] for one in tf.nest.flatten(result)} == {device}


def test_the_batches_of_a_call_are_taken_apart_on_their_towers(four_cpus):
    """And travel to no other device."""
    builder = make_towers(small_model(), four_cpus[1:3])
    stacked = calls.stacked([split(*random_batch(), 2)] * 3, 3)
    graph = builder._steps.get_concrete_function(stacked, tf.constant(3)).graph
    bodies = graph.as_graph_def().library.function
    nodes = [node for one in bodies for node in one.node_def]
    slices = [node for node in nodes if node.op == "StridedSlice"]
    # Those of what the body is given, not of what it computes.
    taken = [node.device[-5:] for node in slices if ":" not in node.input[0]]
    assert sorted(taken) == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]


def test_joined_tensors_keep_every_bit():
    random = np.random.default_rng(0)
    dtypes = (tf.float32, tf.bfloat16, tf.float64, tf.int32, tf.uint32)
    shapes = ((), (1,), (3, 5), (2, 4, 8), (16,), (0, 3))
    values = {
        dtype.name: [tf.cast(random.normal(size=shape) * 9, dtype) for shape in shapes]
        for dtype in dtypes
    }
    values["float32"] += [tf.constant([-0.0, np.nan, np.inf]), None]
    found = copies.Packed(values, "/cpu:0").unpacked()
    tf.nest.assert_same_structure(found, values)
    for one, other in zip(*map(tf.nest.flatten, (found, values)), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("scale_loss", [False, True])
@pytest.mark.parametrize(
    ("places", "is_exact"),
    [((1, 2, 1, 2), True), ((1, 0), True), ((1, 2, 3, 0), False)],
)
def test_joining_all_tensors_does_not_change_the_step(
    four_cpus, places, is_exact, scale_loss
):
    """As on GPUs; also two towers of a device, and one beside the variables.

    In which order TensorFlow adds up three tensors depends on what else is in memory.
    """
    ends = []
    for packs in (False, True):
        layers = [
            keras.layers.BatchNormalization(dtype="float64"),
            keras.layers.Dropout(0.5, seed=1, dtype="float64"),
            keras.layers.Dense(5, kernel_initializer="ones", name="frozen"),
        ]
        optimizer = build_optimizer("sgd", 0.1, 0.9, scale_loss=scale_loss)
        model = small_model(*layers[is_exact:], dtype="float64")
        devices = [four_cpus[place] for place in places]
        builder = make_towers(model, devices, optimizer=optimizer)
        builder.packs_copies = packs
        builder.freeze(["frozen"])
        batches = [random_batch(seed=seed, dtype=tf.float64) for seed in range(3)]
        results = [builder.step(split(*batch, len(places))) for batch in batches]
        assert {result.numbers.device[-5:] for result in results} == {"CPU:0"}
        ends.append([*values(builder), *(result.numbers for result in results)])
    if is_exact:
        assert_equal(*ends)
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_batch_statistics_are_averaged_and_written_once(four_cpus):
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.9)]
    )
    builder = make_towers(model, four_cpus[:2], loss=squared_error)
    # The towers' means are 1 and 5; so one update goes a tenth of the way to 3.
    x = tf.constant([[0.0], [2.0], [4.0], [6.0]])
    builder.step(split(x, tf.zeros([4]), 2))
    moving_mean, moving_variance = model.non_trainable_variables
    assert moving_mean.numpy() == pytest.approx(0.3)
    assert moving_variance.numpy() == pytest.approx(0.9 * 1 + 0.1 * 1)


def test_dropout_differs_between_towers_and_advances_once(four_cpus):
    losses = []
    for count in (1, 2):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1000,)), *layers])
        (state,) = model.non_trainable_variables
        before = state.numpy()
        builder = make_towers(model, four_cpus[:count], loss=squared_error)
        result = builder.step(split(tf.ones([count, 1000]), tf.zeros([count]), count))
        assert (state.numpy() - before).tolist() == [0, 1]
        losses += result.tower_losses.numpy().tolist()
    alone, first, second = losses
    assert first == pytest.approx(alone)
    assert second != pytest.approx(first)


def test_average_gradients_matches_a_computation_by_hand():
    a0, a1 = tf.constant([1.0, 2.0]), tf.constant([3.0, 6.0])
    b0, b1 = tf.constant(10.0), tf.constant(20.0)
    gradients = [[a0, b0, None], [a1, b1, None]]
    a, b, absent = towers.average_gradients(gradients)
    assert a.numpy().tolist() == [2.0, 4.0]
    assert float(b) == 15.0
    assert absent is None
    with pytest.raises(ValueError, match="at least one Tensor"):
        towers.average_gradients([[b0], [None], [b0]])


def test_variables_without_gradient_are_skipped_with_a_single_warning(
    four_cpus, caplog
):
    inputs = keras.Input((6,))
    unused = keras.layers.Dense(3, name="unused")(inputs)
    detached = keras.layers.Lambda(tf.stop_gradient)(unused)
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs) + detached)
    builder = make_towers(model, four_cpus[:1])
    kernel = next(v for v in model.variables if v.path == "unused/kernel")
    before = kernel.numpy()
    with caplog.at_level(logging.WARNING):
        builder.step([random_batch()])
        builder.gradients([random_batch()])
    assert len(caplog.records) == 1
    assert "unused/kernel, unused/bias" in caplog.text
    np.testing.assert_array_equal(kernel.numpy(), before)


def test_a_loss_without_any_gradient_is_refused(four_cpus):
    def constant_loss(outputs, labels, penalties):
        del outputs, labels, penalties
        return {"total_loss": tf.constant(1.0)}

    builder = make_towers(line_model(), four_cpus[:1], loss=constant_loss)
    with pytest.raises(UsageError, match="gradient"):
        builder.step([TWO_POINTS])


def test_activations_match_the_next_step_and_change_nothing(four_cpus):
    dropout = keras.layers.Dropout(0.5, seed=3)
    model = small_model(keras.layers.BatchNormalization(), dropout)
    images, _ = random_batch()
    before = [variable.numpy() for variable in model.variables]
    compute = activations_of(model, four_cpus[1])
    first, again = compute(images), compute(images)
    assert_equal([variable.numpy() for variable in model.variables], before)
    logits, _, _ = inference(
        model,
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        images,
        training=True,
    )
    last = model.layers[-1].name
    np.testing.assert_allclose(first[last], np.ravel(logits), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(first[last], again[last])
    operations = compute.get_concrete_function(images).graph.get_operations()
    products = [node.device for node in operations if node.type == "MatMul"]
    assert {*products} == {"/device:CPU:1"}


def test_each_run_of_a_process_may_trace_its_own_model(four_cpus, caplog):
    """TensorFlow warns of functions that are traced again and again, by their code."""
    images, _ = TWO_POINTS
    batch = tf.data.Dataset.from_tensors((images, tf.zeros([2], "int32"), [True] * 2))
    for _ in range(5):
        model = line_model()
        make_towers(model, four_cpus[:1], loss=squared_error).step([TWO_POINTS])
        activations_of(model, four_cpus[0])(images)
        Scorer(model).score(model.trainable_variables, batch, four_cpus[0])
    assert "retracing" not in caplog.text


# ---- Several steps a call, XLA, numbers that are not finite


def test_several_steps_per_call_equal_single_steps(four_cpus):
    extra = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)
    sgd = keras.optimizers.SGD(0.1, 0.9)
    builder = make_towers(small_model(*extra), four_cpus[:2], optimizer=sgd)
    batches = [split(*random_batch(seed=seed), 2) for seed in range(4)]
    start = values(builder)
    single = [builder.step(batch) for batch in batches]
    end = values(builder)
    for variable, value in zip(builder.state.variables(), start, strict=True):
        variable.assign(value)
    assert_equal(builder.step(batches[0]).tower_losses, single[0].tower_losses)
    several = builder.steps(calls.stacked(batches[1:], 5), 3)
    assert several.tower_losses.shape == (3, 2)
    assert_equal(several.tower_losses, [step.tower_losses for step in single[1:]])
    assert_equal(values(builder), end)


def compiled_towers(device, **of_update):
    """Returns towers whose steps XLA compiles into one program."""
    extra = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)
    sgd = keras.optimizers.SGD(0.1, 0.9)
    model = small_model(*extra)
    builder = make_towers(model, [device], optimizer=sgd, device=device, **of_update)
    builder.tower.xla = True
    builder.freeze(())
    return builder


@pytest.mark.parametrize("halts", [True, False])
@pytest.mark.parametrize("bad", [None, 5])
def test_a_compiled_program_computes_the_same_for_any_division_of_steps(
    four_cpus, halts, bad
):
    """Bit for bit; also if step `bad` is not finite, and later ones write or not."""
    batches = [split(*random_batch(seed=seed), 1) for seed in range(9)]
    if bad:
        inputs, labels = batches[bad][0]
        batches[bad] = [(inputs * np.nan, labels)]
    ends = []
    for division in ([3, 3, 3], [1, 3, 2, 2, 1]):
        builder, losses = compiled_towers(four_cpus[0], halts=halts), []
        for count in division:
            first = len(losses)
            call = calls.stacked(batches[first : first + count], 3)
            result = builder.steps(call, count)
            losses += result.tower_losses[:, 0].numpy().tolist()
        ends.append([*values(builder), losses])
    assert_equal(*ends)
    *_, steps, losses = ends[0]
    assert steps == (bad if bad and halts else 9)
    assert [*np.flatnonzero(np.isnan(losses))] == ([bad] if bad else [])


def test_a_compiled_program_never_waits_for_the_host(four_cpus):
    """XLA knows how many steps it has, and it has no branch."""
    builder = compiled_towers(four_cpus[0])
    call = calls.stacked([split(*random_batch(), 1)], 4)
    compiler = builder._steps.experimental_get_compiler_ir(call, tf.constant(3))
    program = compiler(stage="optimized_hlo", platform_name="CPU")
    loops = [line for line in program.splitlines() if " while(" in line]
    assert loops
    assert all("known_trip_count" in line for line in loops)
    assert " conditional(" not in program


@pytest.mark.parametrize("halts", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_separately_compiled_update_equals_the_plain_update(
    four_cpus, optimizer, halts
):
    """Of two towers and statistics; also when a step is not finite, in calls or not."""
    ends = []
    for xla in (False, True):
        extra = keras.layers.BatchNormalization, keras.layers.Dropout
        norm, dropout = (
            extra[0](dtype="float64"),
            extra[1](0.5, seed=1, dtype="float64"),
        )
        model = small_model(norm, dropout, dtype="float64")
        given = {"optimizer": build_optimizer(optimizer, 0.1, 0.0), "clip_norm": 0.1}
        builder = make_towers(model, four_cpus[:2], halts=halts, xla=xla, **given)
        batches = [
            split(*random_batch(seed=seed, dtype=tf.float64), 2) for seed in range(6)
        ]
        inputs, labels = batches[4][1]
        batches[4][1] = inputs * np.nan, labels
        for batch in batches[:2]:
            builder.step(batch)
        builder.steps(calls.stacked(batches[2:], 5), 4)
        ends.append(values(builder))
    assert ends[0][-1] == (4 if halts else 6)
    for one, other in zip(*ends, strict=True):
        # A bias before batch norm has no gradient but rounding, which AdamW enlarges.
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-8)


def test_all_traces_share_a_compiled_update(four_cpus):
    """XLA compiles it once for each set of frozen variables, whatever the images."""
    builder = make_towers(small_model(), four_cpus[:1], xla=True)
    batch = split(*random_batch(), 1)
    for frozen in ((), (), ("dense",), ()):
        builder.freeze(frozen)
        builder.step(batch)
        builder.steps(calls.stacked([batch], 3), 1)
    assert builder._update_by_xla.experimental_get_tracing_count() == 2


def test_another_update_replaces_a_compiled_update(four_cpus):
    """As `whatif` does for some steps; the first one comes back as it was compiled."""
    builder = make_towers(small_model(), four_cpus[:1], xla=True)
    batch, first = split(*random_batch(), 1), builder.update
    other = dataclasses.replace(
        first, learning_rate=lambda _: tf.constant(0.25, tf.float64)
    )
    for update, expected in ((first, 0.1), (other, 0.25), (first, 0.1)):
        builder.update = update
        builder.freeze(())
        assert float(builder.step(batch).metrics["learning_rate"]) == expected
    assert builder._update_by_xla.experimental_get_tracing_count() == 2


@pytest.mark.parametrize("halts", [True, False])
def test_an_infinite_loss_of_one_tower_writes_nothing(four_cpus, halts):
    """Even if all gradients are finite; and with `halts` no later step writes."""

    def at_times_infinite(outputs, labels, penalties):
        loss = squared_error(outputs, labels, penalties)["total_loss"]
        infinite = tf.where(tf.reduce_any(labels < 0.0), np.inf, 0.0)
        return {"total_loss": loss + tf.stop_gradient(infinite)}

    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    builder = make_towers(
        keras.Sequential([keras.Input((1,)), *layers]),
        four_cpus[:2],
        optimizer=keras.optimizers.SGD(0.1, 0.9),
        loss=at_times_infinite,
        halts=halts,
    )
    inputs = tf.constant([[0.0], [1.0], [3.0], [2.0]])
    good = split(inputs, tf.constant([1.0, 1.0, 1.0, 1.0]), 2)
    bad = split(inputs, tf.constant([1.0, 1.0, 1.0, -1.0]), 2)
    builder.step(good)
    before = values(builder)
    result = builder.step(bad)
    assert result.tower_losses.numpy().tolist()[1] == np.inf
    assert np.isfinite(result.metrics["gradient_norm"])
    after = values(builder)
    assert_equal(after[:-1], before[:-1])
    assert after[-1] == (1 if halts else 2)
    builder.step(good)
    later = values(builder)
    assert later[-1] == (1 if halts else 3)
    assert np.array_equal(later[0], after[0]) == halts


class Counting(keras.layers.Layer):
    """Counts its batches in a variable of a device of its own."""

    def __init__(self, device):
        super().__init__()
        with tf.device(device):
            self.batches = self.add_weight(
                shape=(), initializer="zeros", dtype="int32", trainable=False
            )

    def call(self, inputs):
        self.batches.assign(self.batches + 1)
        return inputs


def test_a_variable_of_another_device_is_undone_with_the_others(four_cpus):
    """As on a GPU, where TensorFlow keeps variables of int32 on the host."""

    def nan_for_negative(outputs, labels, penalties):
        loss = squared_error(outputs, labels, penalties)["total_loss"]
        return {"total_loss": tf.math.sqrt(tf.reduce_min(labels)) + loss}

    home, host = four_cpus[1], four_cpus[0]
    with tf.device(home):
        layers = [keras.layers.Dense(1), Counting(host)]
        model = keras.Sequential([keras.Input((1,)), *layers])
        sgd = keras.optimizers.SGD(0.1)
        builder = make_towers(
            model, [home], optimizer=sgd, device=home, loss=nan_for_negative
        )
    assert {v.device[-5:] for v in builder.state.variables()} == {"CPU:0", "CPU:1"}
    inputs = tf.constant([[1.0], [2.0]])
    builder.step([(inputs, tf.constant([1.0, 1.0]))])
    before = values(builder)
    assert layers[1].batches.numpy() == 1
    bad = inputs, tf.constant([1.0, -1.0])
    builder.steps(calls.stacked([[bad]], 2), 2)
    assert_equal(values(builder), before)


def test_batches_of_one_device_are_computed_one_after_another(four_cpus):
    """Side by side they would take as many times the memory."""
    for devices, waits in ((four_cpus[:1] * 4, True), (four_cpus, False)):
        builder = make_towers(small_model(), devices)
        graph = builder.trace(split(*random_batch(), 4)).graph
        for tower in range(1, 4):
            waiting = [
                before.name
                for operation in graph.get_operations()
                if operation.name.startswith(f"tower_{tower}/")
                for before in operation.control_inputs
                if f"tower_{tower - 1}/" in before.name
            ]
            assert bool(waiting) == waits


def test_batches_of_several_sizes_are_refused(four_cpus):
    """The mean of the towers' losses would not be that of the images."""
    builder = make_towers(small_model(), four_cpus[:2])
    with pytest.raises(ValueError, match="same shape"):
        builder.step([random_batch(4), random_batch(8)])
    assert builder.state.global_step == 0
