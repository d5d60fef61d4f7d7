"""The tower builder: N towers are one, and every update is written once."""

import logging
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from cifar10 import model as models
from cifar10.errors import UsageError
from cifar10.scoring import scorer
from cifar10.towers import towers
from cifar10.towers.many_steps import ManySteps
from cifar10.towers.towers import Tower
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update
from cifar10.training import bottleneck
from cifar10.training.activations import activations_of
from cifar10.training.timing import Throughput


def make_towers(
    model,
    devices,
    *,
    optimizer=None,
    device="/cpu:0",
    inference=models.inference,
    loss=models.loss,
    **options,
):
    """A tower builder with constant rates; `options` replace or add arguments."""
    rates = {
        "learning_rate": lambda examples_seen: tf.constant(0.1, tf.float64),
        "average_decay": lambda step: tf.constant(0.75, tf.float64),
    }
    of_update = [*rates, "clip_norm", "halts"]
    rates |= {name: options.pop(name) for name in of_update if name in options}
    return towers.TowerBuilder(
        TrainState(model, optimizer or keras.optimizers.SGD(0.1), device),
        devices,
        tower=Tower(inference, loss, **options),
        update=Update(**rates),
    )


def split(inputs, labels, count):
    return list(zip(tf.split(inputs, count), tf.split(labels, count), strict=True))


def line_model():
    """y = w x + b, from w = 2 and b = 1."""
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(
        1,
        kernel_initializer=keras.initializers.Constant(2.0),
        bias_initializer=keras.initializers.Constant(1.0),
    )(inputs)
    return keras.Model(inputs, outputs)


def squared_error(outputs, labels, penalties):
    del penalties
    return {"total_loss": tf.reduce_mean(tf.square(outputs[:, 0] - labels))}


def small_model(*extra_layers):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8), *extra_layers, keras.layers.Dense(3)]
    )


def random_batch(count=24, seed=0):
    random = np.random.default_rng(seed)
    inputs = tf.constant(random.normal(size=(count, 6)), tf.float32)
    return inputs, tf.constant(random.integers(0, 3, count), tf.int32)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_momentum_follows_a_computation_by_hand(four_cpus, count):
    builder = make_towers(
        line_model(),
        four_cpus[:count],
        optimizer=keras.optimizers.SGD(7.0, momentum=0.9),  # The update sets the rate.
        loss=squared_error,
    )
    x = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    y = np.array([0.0, 1.0, -1.0, 2.0], np.float32)

    w, b, velocity_w, velocity_b = 2.0, 1.0, 0.0, 0.0
    average_w = w
    for _ in range(3):
        error = w * x + b - y
        expected_loss = np.mean(error**2)
        velocity_w = 0.9 * velocity_w - 0.1 * np.mean(2 * error * x)
        velocity_b = 0.9 * velocity_b - 0.1 * np.mean(2 * error)
        w, b = w + velocity_w, b + velocity_b
        average_w = 0.75 * average_w + 0.25 * w
        result = builder.step(split(x[:, None], y, count))
        loss = float(result.metrics["total_loss"])
        assert loss == pytest.approx(expected_loss, rel=1e-5)

    state = builder.state
    kernel, bias = state.model.trainable_variables
    assert kernel.numpy().item() == pytest.approx(w, rel=1e-5)
    assert bias.numpy().item() == pytest.approx(b, rel=1e-5)
    assert state.averages[0].numpy().item() == pytest.approx(average_w, rel=1e-5)
    assert int(state.global_step) == 3
    assert int(state.optimizer.iterations.numpy()) == 3


def test_without_a_decay_averages_stay_as_they_began(four_cpus):
    builder = make_towers(
        line_model(), four_cpus[:2], loss=squared_error, average_decay=None
    )
    builder.step(split(tf.ones([2, 1]), tf.zeros([2]), 2))
    state = builder.state
    assert [average.numpy().item() for average in state.averages] == [2.0, 1.0]
    assert state.model.trainable_variables[0].numpy().item() < 2.0


def test_averages_decay_by_the_updates_before_this_one(four_cpus):
    builder = make_towers(
        line_model(),
        four_cpus[:1],
        loss=squared_error,
        average_decay=lambda step: tf.cast(step, tf.float64) / 4,
    )
    average = 2.0
    for step in range(3):
        builder.step([(tf.ones([2, 1]), tf.zeros([2]))])
        kernel = builder.state.model.trainable_variables[0].numpy().item()
        average = step / 4 * average + (1 - step / 4) * kernel
        assert builder.state.averages[0].numpy().item() == pytest.approx(average)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_weight_decay_counts_once_however_many_towers(four_cpus, count):
    inputs = keras.Input((1,))
    dense = keras.layers.Dense(
        1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5)
    )
    model = keras.Model(inputs, dense(inputs))

    def decayed(outputs, labels, penalties):
        (error,) = squared_error(outputs, labels, penalties).values()
        return {"total_loss": error + sum(penalties)}

    builder = make_towers(model, four_cpus[:count], loss=decayed)
    result = builder.step(split(tf.zeros([4, 1]), tf.zeros([4]), count))
    assert float(result.metrics["total_loss"]) == 0.5
    assert dense.kernel.numpy().item() == pytest.approx(1.0 - 0.1)


def test_batches_of_different_shapes_are_refused(four_cpus):
    builder = make_towers(line_model(), four_cpus[:2], loss=squared_error)
    batches = [(tf.zeros([count, 1]), tf.zeros([count])) for count in (2, 3)]
    with pytest.raises(ValueError, match="have to be of one shape"):
        builder.step(batches)


def test_reported_loss_is_the_mean_and_not_one_towers(four_cpus):
    builder = make_towers(line_model(), four_cpus[:2], loss=squared_error)
    x = tf.constant([[0.0], [0.0]])
    result = builder.step(split(x, tf.constant([1.0, 4.0]), 2))
    assert result.tower_losses.numpy().tolist() == [0.0, 9.0]
    assert float(result.metrics["total_loss"]) == 4.5


def test_learning_rate_is_asked_for_with_global_examples(four_cpus):
    rates = make_towers(
        line_model(),
        four_cpus[:4],
        loss=squared_error,
        learning_rate=lambda examples_seen: tf.cast(examples_seen, tf.float64) / 1e6,
    )
    batch = split(tf.zeros([8, 1]), tf.zeros([8]), 4)
    seen = [float(rates.step(batch).metrics["learning_rate"]) for _ in range(3)]
    assert seen == [0.0, 8e-6, 16e-6]


def test_learning_rate_counts_the_examples_of_all_workers(four_cpus):
    rates = make_towers(
        line_model(),
        four_cpus[:2],
        loss=squared_error,
        learning_rate=lambda examples_seen: tf.cast(examples_seen, tf.float64) / 1e6,
    )
    rates.tower_names = [f"tower {number}" for number in range(6)]  # Of three workers.
    batch = split(tf.zeros([8, 1]), tf.zeros([8]), 2)
    seen = [float(rates.step(batch).metrics["learning_rate"]) for _ in range(2)]
    assert seen == [0.0, 24e-6]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_clipping_scales_all_gradients_as_tensorflow_does(four_cpus, count):
    model = small_model()
    before = [v.numpy() for v in model.trainable_variables]
    plain = make_towers(small_model(), four_cpus[:1]).step(
        [random_batch()], return_gradients=True
    )
    clip_norm = 0.25 * float(plain.metrics["gradient_norm"])
    clipped, _ = tf.clip_by_global_norm(list(plain.gradients.values()), clip_norm)
    builder = make_towers(model, four_cpus[:count], clip_norm=clip_norm)
    result = builder.step(split(*random_batch(), count))
    # What is told is the norm before.
    assert float(result.metrics["gradient_norm"]) == pytest.approx(
        4 * clip_norm, rel=1e-5
    )
    for old, gradient, variable in zip(
        before, clipped, model.trainable_variables, strict=True
    ):
        np.testing.assert_allclose(
            variable.numpy(), old - 0.1 * gradient, rtol=1e-5, atol=1e-7
        )


def test_a_norm_below_the_limit_changes_no_bit(four_cpus):
    weights = []
    for options in ({}, {"clip_norm": 1e3}):
        builder = make_towers(small_model(), four_cpus[:2], **options)
        builder.step(split(*random_batch(), 2))
        weights.append([v.numpy() for v in builder.state.model.variables])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sparse_gradients_are_clipped_too(four_cpus):
    inputs = keras.Input((1,), dtype="int32")
    embedding = keras.layers.Embedding(
        3, 1, embeddings_initializer=keras.initializers.Constant(3.0)
    )
    model = keras.Model(inputs, keras.layers.Flatten()(embedding(inputs)))
    builder = make_towers(model, four_cpus[:1], loss=squared_error, clip_norm=2.0)
    result = builder.step([(tf.constant([[1]]), tf.constant([0.0]))])
    assert float(result.metrics["gradient_norm"]) == 6.0
    assert model.variables[0].numpy().ravel().tolist() == pytest.approx([3, 2.8, 3])


@pytest.mark.parametrize("number", [1, 2])
def test_slices_of_one_index_are_added_before_they_are_squared(four_cpus, number):
    def summed(outputs, labels, penalties):
        del penalties
        return {"total_loss": tf.reduce_mean(outputs[:, 0] * labels)}

    inputs = keras.Input((1,), dtype="int32")
    embedding = keras.layers.Embedding(2, 1, embeddings_initializer="zeros")
    model = keras.Model(inputs, keras.layers.Flatten()(embedding(inputs)))
    adam = keras.optimizers.Adam(0.1, beta_1=0.0, beta_2=0.0)
    devices = four_cpus[:number]
    builder = make_towers(model, devices, loss=summed, optimizer=adam)
    words, labels = tf.constant([[0], [0], [1], [0]]), tf.constant([2.0, 2, -6, 4])
    result = builder.step(split(words, labels, number))
    assert float(result.metrics["gradient_norm"]) == pytest.approx(2.5)
    changed = model.variables[0].numpy().ravel()
    assert changed.tolist() == pytest.approx([-0.1, 0.1], rel=1e-4)


def test_float16_clips_the_gradients_without_the_scale_of_the_loss(four_cpus):
    weights = []
    for optimizer in (
        keras.optimizers.SGD(0.1),
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**10
        ),
    ):
        model = line_model()
        builder = make_towers(
            model,
            four_cpus[:2],
            optimizer=optimizer,
            loss=squared_error,
            clip_norm=0.5,
        )
        batches = split(tf.constant([[1.0], [2.0]]), tf.constant([0.0, 1.0]), 2)
        gradients = builder.step(batches, return_gradients=True).gradients.values()
        assert [gradient.numpy().item() for gradient in gradients] == [11.0, 7.0]
        weights.append([v.numpy().item() for v in model.trainable_variables])
    assert weights[0] == pytest.approx(weights[1], rel=1e-6)
    assert weights[0] != [2.0, 1.0]


def test_each_tower_runs_on_its_device(four_cpus):
    builder = make_towers(small_model(), four_cpus)
    graph = builder.trace(split(*random_batch(), 4)).graph
    products = [node for node in graph.get_operations() if node.type == "MatMul"]
    used = {tf.DeviceSpec.from_string(node.device).device_index for node in products}
    assert used == {0, 1, 2, 3}


def test_number_of_variables_does_not_depend_on_the_towers(four_cpus):
    def paths(count):
        builder = make_towers(small_model(), four_cpus[:count])
        builder.step(split(*random_batch(), count))
        return [v.shape for v in builder.state.optimizer.variables], len(
            builder.state.model.variables
        )

    assert paths(1) == paths(4)


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
    inputs = keras.Input((1000,))
    outputs = keras.layers.Dropout(0.5, seed=3)(inputs)
    # A trainable factor, so that there is something to update.
    outputs = keras.layers.PReLU(shared_axes=[1])(outputs)
    model = keras.Model(inputs, outputs)
    (state,) = model.non_trainable_variables
    before = state.numpy()

    def shares(outputs, labels, penalties):
        # Position k of the mask, weighted by k: equal masks give equal sums.
        weights = tf.range(1000, dtype=tf.float32)
        return {
            **squared_error(outputs, labels, penalties),
            "mask": tf.reduce_sum(outputs[0] * weights),
        }

    builder = make_towers(model, four_cpus[:2], loss=shares)
    result = builder.step(split(tf.ones([2, 1000]), tf.zeros([2]), 2))
    assert (state.numpy() - before).tolist() == [0, 1]
    # Tower 0 draws what a single tower draws; the mean over both differs from it.
    alone, _, _ = models.inference(
        model,
        [variable.value for variable in model.trainable_variables],
        [tf.constant(before)],
        tf.ones([1, 1000]),
        training=True,
    )
    first_mask = float(tf.reduce_sum(alone[0] * tf.range(1000, dtype=tf.float32)))
    assert float(result.metrics["mask"]) != pytest.approx(first_mask, rel=1e-6)


def test_average_gradients_of_two_towers_and_two_variables():
    a0, a1 = tf.constant([1.0, 2.0]), tf.constant([3.0, 6.0])
    b0, b1 = tf.constant(10.0), tf.constant(20.0)
    a, b = towers.average_gradients([[a0, b0], [a1, b1]], ["a", "b"])
    assert a.numpy().tolist() == [2.0, 4.0]
    assert float(b) == 15.0


def test_a_gradient_that_no_tower_has_stays_none():
    one = tf.constant(1.0)
    assert towers.average_gradients([[None, one], [None, one]], ["a", "b"])[0] is None


def test_a_gradient_that_one_tower_lacks_is_an_error_naming_it():
    one = tf.constant(1.0)
    with pytest.raises(ValueError, match=r"conv/kernel .*towers \[1\]"):
        towers.average_gradients([[one], [None], [one]], ["conv/kernel"])


def test_sparse_gradients_stay_sparse_and_average():
    def slices(value, index):
        return tf.IndexedSlices(
            tf.constant([[value]]), tf.constant([index]), tf.constant([3, 1])
        )

    (sparse,) = towers.average_gradients([[slices(2.0, 0)], [slices(4.0, 0)]], ["e"])
    assert isinstance(sparse, tf.IndexedSlices)
    assert tf.convert_to_tensor(sparse).numpy().tolist() == [[3.0], [0.0], [0.0]]

    dense = tf.constant([[0.0], [8.0], [0.0]])
    (mixed,) = towers.average_gradients([[slices(2.0, 0)], [dense]], ["e"])
    assert mixed.numpy().tolist() == [[1.0], [4.0], [0.0]]


def test_an_embedding_trains_alike_on_two_towers(four_cpus):
    def embedding_model():
        inputs = keras.Input((2,), dtype="int32")
        embedded = keras.layers.Embedding(
            5, 1, embeddings_initializer=keras.initializers.Constant(1.0)
        )(inputs)
        return keras.Model(inputs, keras.layers.Flatten()(embedded))

    words = tf.constant([[0, 1], [1, 2], [3, 0], [1, 1]])
    tables = []
    for count in (1, 2):
        builder = make_towers(embedding_model(), four_cpus[:count], loss=squared_error)
        builder.step(split(words, tf.zeros([4]), count))
        tables.append(builder.state.model.trainable_variables[0].numpy())
    assert tables[0][4] == 1.0, "a word that no image shows must not move"
    assert tables[0][0] < 1.0
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-6)


def test_variables_without_gradient_are_skipped_with_one_warning(four_cpus, caplog):
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4, name="used")(inputs)
    unused = keras.layers.Dense(3, name="unused")(hidden)
    detached = keras.layers.Lambda(tf.stop_gradient)(unused)
    outputs = keras.layers.Dense(3, name="head")(hidden) + detached
    model = keras.Model(inputs, outputs)
    builder = make_towers(model, four_cpus[:2])
    kernel = next(v for v in model.variables if v.path == "unused/kernel")
    before = kernel.numpy()
    with caplog.at_level(logging.WARNING):
        for return_gradients in (False, True, False):
            builder.step(split(*random_batch(), 2), return_gradients=return_gradients)
    assert len(caplog.records) == 1
    assert "unused/kernel, unused/bias" in caplog.text
    np.testing.assert_array_equal(kernel.numpy(), before)


def test_a_loss_without_any_gradient_is_refused(four_cpus):
    def constant_loss(outputs, labels, penalties):
        del outputs, labels, penalties
        return {"total_loss": tf.constant(1.0)}

    builder = make_towers(small_model(), four_cpus[:1], loss=constant_loss)
    with pytest.raises(UsageError, match="does not depend on any variable"):
        builder.step(split(*random_batch(), 1))


def test_a_step_that_returns_its_gradients_updates_as_one_that_does_not(four_cpus):
    weights = []
    for return_gradients in (False, True):
        model = small_model(keras.layers.BatchNormalization(), keras.layers.ReLU())
        builder = make_towers(model, four_cpus[:2])
        result = builder.step(
            split(*random_batch(), 2), return_gradients=return_gradients
        )
        weights.append([variable.numpy() for variable in model.variables])
    assert set(result.gradients) == {v.path for v in model.trainable_variables}
    for plain, with_gradients in zip(*weights, strict=True):
        np.testing.assert_allclose(plain, with_gradients, rtol=1e-6)


def test_activations_are_those_of_the_next_step_and_change_nothing(four_cpus):
    dropout = keras.layers.Dropout(0.5, seed=3)
    model = small_model(keras.layers.BatchNormalization(), dropout)
    images, _ = random_batch()
    before = [variable.numpy() for variable in model.variables]
    compute = activations_of(model, four_cpus[0])
    first, again = compute(images), compute(images)
    for old, variable in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, variable)
    logits, _, _ = models.inference(
        model,
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        images,
        training=True,
    )
    last = model.layers[-1].name
    np.testing.assert_allclose(first[last], np.ravel(logits), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(first[last], again[last])


def test_each_training_of_a_process_may_trace_its_own_model(four_cpus, caplog):
    """TensorFlow warns of functions that are traced again and again, by their code."""
    images, labels = random_batch(4)
    batch = tf.data.Dataset.from_tensors((images, labels, tf.fill([4], True)))
    for _ in range(6):
        model = small_model()
        builder = make_towers(model, four_cpus[:1])
        builder.step([(images, labels)], return_gradients=True)
        activations_of(model, four_cpus[0])(images)
        scorer.Scorer(model, 3).score(model.trainable_variables, batch, four_cpus[0])
    assert "retracing" not in caplog.text


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_a_bottleneck_report_divides_the_step_and_changes_nothing(four_cpus, towers):
    model = small_model(keras.layers.BatchNormalization())
    builder = make_towers(model, four_cpus[:towers])
    batches = split(*random_batch(), towers)
    throughput = Throughput(8, time.perf_counter)
    throughput.count(1, waited=1e-9)
    assert throughput.take()
    before = [v.numpy() for v in builder.state.model.variables]
    lines = bottleneck.report(throughput, builder, batches).splitlines()
    assert lines[0].startswith("A step took ")
    assert len(lines) == 5
    percentages = {line[:13]: int(line[-4:-1]) for line in lines[1:]}
    assert sum(percentages.values()) == 100
    assert min(percentages.values()) >= 0
    assert towers > 1 or percentages["  averaging  "] == 0
    for old, variable in zip(before, builder.state.model.variables, strict=True):
        np.testing.assert_array_equal(old, variable)
    assert int(builder.state.global_step) == 0


# ---- Several steps a call, XLA, other places for the variables, float16


def stepped(builder, batches, calls):
    """Runs batches in calls of some sizes; returns all losses and the variables."""
    losses = []
    many_steps = ManySteps(builder)
    for size in calls:
        chunk, batches = batches[:size], batches[size:]
        result = builder.step(chunk[0]) if size == 1 else many_steps(chunk)
        losses += np.atleast_1d(result.metrics["total_loss"]).tolist()
        assert np.atleast_2d(result.tower_losses).shape == (size, len(builder.devices))
    state = builder.state
    return losses, [
        *(v.numpy() for v in state.model.variables),
        *(v.numpy() for v in state.optimizer.variables),
        *(v.numpy() for v in state.averages),
        state.global_step.numpy(),
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_several_steps_a_call_are_the_same_steps(four_cpus, count):
    results = []
    for calls in ([1] * 6, [1, 3, 2], [6]):
        model = small_model(
            keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)
        )
        builder = make_towers(
            model, four_cpus[:count], optimizer=keras.optimizers.SGD(0.1, 0.9)
        )
        batches = [split(*random_batch(seed=seed), count) for seed in range(6)]
        results.append(stepped(builder, batches, calls))
    for losses, variables in results[1:]:
        assert losses == results[0][0]
        for one, other in zip(variables, results[0][1], strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_tower_compiled_with_xla_computes_the_same(four_cpus):
    finals = []
    for xla in (False, True):
        builder = make_towers(
            small_model(keras.layers.BatchNormalization()), four_cpus[:1], xla=xla
        )
        for seed in range(3):
            builder.step([random_batch(seed=seed)])
        finals.append([v.numpy() for v in builder.state.model.variables])
    for one, other in zip(*finals, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("halts", [True, False])
def test_an_infinite_loss_of_one_tower_writes_nothing(four_cpus, halts):
    """Even if all gradients are finite; and with `halts` no later step writes."""

    def at_times_infinite(outputs, labels, penalties):
        loss = squared_error(outputs, labels, penalties)["total_loss"]
        infinite = tf.where(tf.reduce_any(labels < 0.0), np.inf, 0.0)
        return {"total_loss": loss + tf.stop_gradient(infinite)}

    builder = make_towers(
        small_model(keras.layers.BatchNormalization(), keras.layers.Dense(1)),
        four_cpus[:2],
        optimizer=keras.optimizers.SGD(0.1, 0.9),
        loss=at_times_infinite,
        halts=halts,
    )
    inputs, _ = random_batch(4)
    good = split(inputs, tf.constant([1.0, 1.0, 1.0, 1.0]), 2)
    bad = split(inputs, tf.constant([1.0, 1.0, 1.0, -1.0]), 2)
    _, before = stepped(builder, [good], [1])
    result = builder.step(bad)
    assert result.tower_losses.numpy().tolist()[1] == np.inf
    assert np.isfinite(result.metrics["gradient_norm"])
    _, after = stepped(builder, [], [])
    for one, other in zip(before[:-1], after[:-1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert int(after[-1]) == (1 if halts else 2)
    _, later = stepped(builder, [good], [1])
    assert int(later[-1]) == (1 if halts else 3)
    assert np.array_equal(later[0], after[0]) == halts


def test_variables_live_where_they_are_told_to(four_cpus):
    with tf.device(four_cpus[1]):
        model = small_model()
        optimizer = keras.optimizers.SGD(0.1, 0.9)
    builder = make_towers(
        model, four_cpus[1:3], optimizer=optimizer, device=four_cpus[1]
    )
    state = builder.state
    builder.step(split(*random_batch(), 2))
    assert all(average.device.endswith("CPU:1") for average in state.averages)
    assert state.global_step.device.endswith("CPU:1")
    operations = builder.trace(split(*random_batch(), 2)).graph.get_operations()
    placed = {one.device for one in operations if one.name.startswith("update/")}
    assert {device for device in placed if device} == {"/device:CPU:1"}


def test_an_overflow_in_float16_is_passed_over_and_lowers_the_loss_scale(four_cpus):
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**10
    )
    builder = make_towers(
        line_model(), four_cpus[:2], optimizer=optimizer, loss=squared_error
    )
    plain = make_towers(line_model(), four_cpus[:2], loss=squared_error)
    good = split(tf.constant([[1.0], [2.0]]), tf.constant([0.0, 1.0]), 2)
    for _ in range(2):
        scaled = builder.step(good, return_gradients=True)
        unscaled = plain.step(good, return_gradients=True)
    assert float(scaled.metrics["loss_scale"]) == 2.0**10
    assert float(scaled.metrics["gradient_norm"]) == pytest.approx(
        float(unscaled.metrics["gradient_norm"])
    )
    expected = list(unscaled.gradients.values())
    for gradient, other in zip(scaled.gradients.values(), expected, strict=True):
        np.testing.assert_allclose(gradient, other, rtol=1e-5)
    before = [v.numpy() for v in builder.state.model.trainable_variables]
    bad = split(tf.constant([[1e18], [1.0]]), tf.constant([0.0, 1.0]), 2)
    result = builder.step(bad)
    assert np.isfinite(result.tower_losses).all()
    assert float(result.metrics["gradient_norm"]) == 0.0
    after = [v.numpy() for v in builder.state.model.trainable_variables]
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[1], after[1])
    assert float(builder.step(good).metrics["loss_scale"]) == 2.0**9
