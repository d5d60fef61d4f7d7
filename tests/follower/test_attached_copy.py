"""A copy that follows a training in the same process, without a disk."""

import threading
import types

import numpy as np
import pytest
import tensorflow as tf

from cifar10.config.config import Config
from cifar10.follower import Follower
from cifar10.follower.trained_model import TrainedModel
from cifar10.input.evaluation import evaluation_batches
from cifar10.scoring.scorer import Scorer
from cifar10.training import train

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def followed(tmp_path_factory, stand_in_dir):
    """A training of 8 steps with a checkpoint at each, copied every 3 steps.

    A thread asks the copy from the first step that has a checkpoint on.
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
    )
    copies, answers, began, ended = [], [], threading.Event(), threading.Event()
    had = []

    def on_start(run):
        options = {"every": 3, "device": "/cpu:3"}
        copies.extend(
            Follower.attach(run.state, run.settings, use_averages=averages, **options)
            for averages in (True, False)
        )
        on_step(run.step)

    def on_step(step):
        for copy in copies:
            copy.after_step(step)
        had.append((step, copies[0].weights_step))
        if step == 3:
            began.set()

    def ask():
        began.wait(60)
        while not ended.is_set():
            answers.extend(
                (number, copy.predict(IMAGES)) for number, copy in enumerate(copies)
            )

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        hook = types.SimpleNamespace(on_start=on_start, on_step=on_step)
        train.train(config, hooks=[hook])
    finally:
        ended.set()
        asking.join()
    answers.extend((number, copy.predict(IMAGES)) for number, copy in enumerate(copies))
    return train_dir, copies, answers, had


def test_each_copy_answers_as_an_evaluation_of_its_step(followed):
    train_dir, _, answers, _ = followed
    ((images, _, _),) = evaluation_batches(IMAGES, np.zeros(4, np.int32), 4, "tutorial")
    expected = {}
    for number, use_averages in enumerate((True, False)):
        trained = TrainedModel(train_dir, use_averages=use_averages)
        scorer = Scorer(trained.model, trained.classes)
        logits_of = tf.function(scorer._logits)
        for step in (3, 6, 8):
            trained.restore(step)
            values = [tf.convert_to_tensor(value) for value in trained.trainable]
            logits, _ = logits_of(values, images)
            expected[number, step] = logits.numpy()
    assert {(number, answer.step) for number, answer in answers} <= set(expected)
    for number, answer in answers:
        np.testing.assert_array_equal(answer.logits, expected[number, answer.step])


def test_it_copies_before_the_first_step_then_every_so_many_and_the_last(followed):
    _, copies, answers, had = followed
    copied = [0, 0, 0, 3, 3, 3, 6, 6, 8]
    assert had == list(enumerate(copied))
    for copy in copies:
        assert (copy.weights_step, copy.swaps) == (8, 4)
        assert 0 < copy.swap_seconds < 10
    assert answers[-1][1].class_names[0] == "disc"
    assert answers[-1][1].step == 8


def test_a_step_without_an_update_is_not_copied(followed):
    _, (copy, _), *_ = followed
    copy._state.halted.assign(True)
    copy.after_step(9)
    assert copy.weights_step == 8
    copy._state.halted.assign(False)
    copy.after_step(9)
    assert copy.weights_step == 9
    copy.after_step(4)  # The training has gone back to an earlier checkpoint.
    assert copy.weights_step == 4


def test_a_step_between_two_copies_has_to_be_a_number(followed):
    _, (copy, _), *_ = followed
    with pytest.raises(ValueError, match="every 0"):
        Follower.attach(copy._state, {}, every=0)
