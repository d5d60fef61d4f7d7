"""Results: what is not finite is named, whatever the number of steps a call."""

import numpy as np
import pytest
import tensorflow as tf

from cifar10.towers import readout
from cifar10.towers.towers import StepResult
from cifar10.training.results import NotFiniteError, Results


def metrics(**changed):
    values = {
        "total_loss": 2.0,
        "cross_entropy": 1.5,
        "weight_decay": 0.5,
        "precision @ 1": 0.25,
        "gradient_norm": 1.0,
        **changed,
    }
    return {name: tf.constant(value) for name, value in values.items()}


def result(one, losses):
    """The result of a step with these metrics and losses of the towers."""
    losses = tf.constant(losses, tf.float32)
    return StepResult(one, losses, {}, readout.join(one, losses))


def several(*steps):
    """The result of one call of several steps."""
    return tf.nest.map_structure(lambda *values: tf.stack(values), *steps)


def test_steps_of_one_call_are_averaged_as_single_ones():
    losses = [4.0, 2.0, 3.0]
    single, together = Results(["/cpu:0"]), Results(["/cpu:0"])
    each = [metrics(total_loss=loss) for loss in losses]
    steps = [result(one, [loss]) for one, loss in zip(each, losses, strict=True)]
    for number, step in enumerate(steps, 1):
        single.add(number, step)
    together.add(3, several(*steps))
    assert single.read() == together.read()
    assert single.loss_averages == together.loss_averages


def test_the_step_within_a_call_and_the_tower_are_named():
    results = Results(["/cpu:0", "/cpu:1"])
    losses = [[1.0, 1.0], [1.0, np.nan], [1.0, 1.0]]
    results.add(12, several(*[result(metrics(), each) for each in losses]))
    with pytest.raises(NotFiniteError, match=r"at step 11 the loss of tower 1"):
        results.read()


def test_only_skipped_steps_in_a_row_add_up():
    results = Results(["/cpu:0"], skips=True)
    in_a_row = []
    for step, loss in enumerate([np.nan, np.nan, 1.0, np.nan]):
        results.add(step, result(metrics(), [loss]))
        results.read()
        in_a_row.append(results.skipped_in_a_row)
    assert in_a_row == [1, 2, 0, 1]
    assert [error.step for error in results.skipped] == [0, 1, 3]


def test_a_loss_scale_below_one_is_no_training():
    results = Results(["/cpu:0"])
    results.add(5, result(metrics(loss_scale=2.0, gradient_norm=0.0), [1.0]))
    assert results.read()["loss_scale"] == 2.0
    results.add(6, result(metrics(loss_scale=0.5, gradient_norm=0.0), [1.0]))
    with pytest.raises(NotFiniteError, match="at step 6 the gradients are not finite"):
        results.read()


def test_a_checkpoint_without_an_average_of_the_precision_gets_one():
    results = Results(["/cpu:0"])
    results.reset({"total_loss": 2.0, "cross_entropy": 1.5, "weight_decay": 0.5})
    results.add(1, result(metrics(), [2.0]))
    assert results.read()["precision @ 1/average"] == 0.25
    assert results.loss_averages["precision @ 1"] == 0.25


# ---- Sudden rises


def warnings(cross_entropies):
    """Returns what is said of a run with these cross entropies, read ten by ten."""
    results, said = Results(["/cpu:0"]), []
    for first in range(0, len(cross_entropies), 10):
        part = cross_entropies[first : first + 10]
        one = {name: tf.ones(len(part)) for name in metrics()}
        one["cross_entropy"] = tf.constant(part, tf.float32)
        losses = [[loss] for loss in part]
        results.add(first + len(part), result(one, losses))
        results.read()
        said.append(results.take_warning())
    return [warning for warning in said if warning]


def test_a_sudden_rise_is_named_with_what_helps():
    [warning] = warnings([0.09] * 35 + [0.17, 0.43, 1.33, 12.4, 9.0])
    first, second = warning.splitlines()
    assert first == "UNSTABLE: at step 39 the cross entropy rose from 0.25 to 12.40."
    assert "--learning_rate" in second
    assert "--clip_norm 3" in second
    assert max(len(first), len(second)) <= 80


def test_a_run_that_is_unstable_from_the_start_is_named():
    assert "at step 3 " in warnings([3.9, 7.0, 17.0] + [30.0] * 7)[0]


def test_a_run_that_stays_unstable_is_named_once_in_a_hundred_steps():
    spikes = [2.0] * 10 + ([50.0] + [2.0] * 19) * 12
    assert len(warnings(spikes)) == 3


@pytest.mark.parametrize("images", [8, 32, 128])
def test_noise_of_a_falling_loss_is_no_rise(images):
    """As measured: the deviation of an image's loss is about the mean's root."""
    generator = np.random.default_rng(0)
    means = 2.3 * np.exp(-np.arange(5000) / 1500)
    # A gamma distribution has the long tail of images that are taken for others.
    shape = means**2 / (1.5 * means) * images
    losses = generator.gamma(shape, means / shape)
    assert warnings(losses) == []


def test_averages_of_other_names_are_not_taken_over():
    results = Results(["/cpu:0"])
    results.reset({"total_loss": 2.0, "\ud800": 1.0, "\x1b[2J": 1.0})
    assert results.loss_averages == {"total_loss": 2.0}


def test_a_step_is_read_in_one_transfer(monkeypatch):
    """Each waits for the device: that of a tensor of hundreds as long as of one."""
    one = metrics(learning_rate=tf.constant(0.1, tf.float64), loss_scale=8.0)
    results = Results(["/gpu:0", "/gpu:1"])
    results.add(1, result(one, [2.5, 1.5]))
    read = []
    eager = type(one["total_loss"])
    monkeypatch.setattr(eager, "_numpy", counted(eager._numpy, read))
    newest = results.read()
    assert len(read) == 1
    assert newest["learning_rate"] == 0.1
    assert newest["loss_scale"] == 8.0
    assert newest["precision @ 1"] == 0.25


def counted(method, calls):
    def counting(tensor):
        calls.append(tensor)
        return method(tensor)

    return counting
