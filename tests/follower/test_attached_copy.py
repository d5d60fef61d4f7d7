"""A copy that follows a training in the same process, without a disk."""

import threading
import types
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import runs
from cifar10.config.config import Config
from cifar10.follower import Follower
from cifar10.towers.update import TrainState
from cifar10.training import train
from small_model import two_layers
from small_runs import IMAGES, evaluated


@pytest.fixture(scope="module")
def followed(tmp_path_factory, stand_in_dir):
    """A training of 8 steps with a checkpoint at each, copied every 3 steps.

    From the first checkpoint on, the copies, of the averages and of the last values,
    are asked after each step.
    """
    train_dir = tmp_path_factory.mktemp("followed") / "run"
    config = Config(
        batch_size=8,
        max_steps=8,
        checkpoint_steps=1,
        keep_checkpoints=10,
        train_dir=str(train_dir),
        data="synthetic",
        data_dir=str(stand_in_dir),
        num_gpus=2,
        model=runs.SMALL,
    )
    found = types.SimpleNamespace(train_dir=train_dir, answers=[], had=[], copies=[])

    def on_start(run):
        found.state = run.state
        options = {"every": 3, "device": "/cpu:3"}
        found.copies.extend(
            Follower.attach(run.state, run.settings, use_averages=averages, **options)
            for averages in (True, False)
        )
        on_step(run.step)

    def on_step(step):
        for copy in found.copies:
            copy.after_step(step)
        found.had.append((step, found.copies[0].weights_step))
        if step >= 3:
            answers = enumerate(copy.predict(IMAGES) for copy in found.copies)
            found.answers.extend(answers)

    hook = types.SimpleNamespace(on_start=on_start, on_step=on_step)
    train.train(config, hooks=[hook])
    return found


def test_each_copy_answers_as_an_evaluation_of_its_step(followed):
    expected = {
        (number, step): evaluated(followed.train_dir, step, use_averages=not number)
        for number in (0, 1)
        for step in (3, 6, 8)
    }
    steps = [answer.step for _, answer in followed.answers]
    assert steps == [3] * 6 + [6] * 4 + [8] * 2
    for number, answer in followed.answers:
        np.testing.assert_array_equal(answer.logits, expected[number, answer.step])


def test_it_copies_before_the_first_step_then_every_so_many_and_the_last(followed):
    copied = [0, 0, 0, 3, 3, 3, 6, 6, 8]
    assert followed.had == list(enumerate(copied))
    for copy in followed.copies:
        assert (copy.weights_step, copy.swaps) == (8, 4)


def test_a_step_without_an_update_is_not_copied(followed):
    copy, state = followed.copies[0], followed.state
    state.halted.assign(True)
    copy.after_step(9)
    assert copy.weights_step == 8
    state.halted.assign(False)
    copy.after_step(9)
    assert copy.weights_step == 9
    copy.after_step(4)  # The training has gone back to an earlier checkpoint.
    assert copy.weights_step == 4


def test_many_threads_never_see_a_mixture_while_weights_change():
    """Every answer is of one of two sets of weights, which take turns."""
    model = two_layers((24, 24, 3), 10)
    state = TrainState(model, keras.optimizers.SGD(0.1))
    settings = {**Config(data="cifar10", model=runs.SMALL).values, "class_names": None}
    copy = Follower.attach(state, settings, use_averages=False)
    expected = []

    def change(step):
        for variable in model.variables:
            variable.assign(np.full(variable.shape, 0.1 * (1 + step % 2)))
        copy.after_step(step)

    for step in (0, 1):
        change(step)
        expected.append(copy.predict(IMAGES).logits)
    assert (expected[0] != expected[1]).any()
    for variable in model.variables:  # The copy has values of its own.
        variable.assign(-variable)
    np.testing.assert_array_equal(copy.predict(IMAGES).logits, expected[1])
    ended = threading.Event()

    def ask(_):
        answers = []
        while not ended.is_set():
            answers.append(copy.predict(IMAGES))
        return answers

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(ask, number) for number in range(8)]
        for step in range(2, 52):
            change(step)
            ended.wait(0.002)
        ended.set()
        answers = [answer for one in asking for answer in one.result()]
    assert copy.swaps == 52
    assert {answer.step % 2 for answer in answers} == {0, 1}
    for answer in answers:
        np.testing.assert_array_equal(answer.logits, expected[answer.step % 2])
