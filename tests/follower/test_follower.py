"""The follower: good checkpoints answer, bad ones are refused, none is ever mixed."""

import errno
import shutil
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from cifar10 import model as models
from cifar10.errors import UsageError
from cifar10.follower import Follower, followed_run, live_copy
from cifar10.run_directory import checkpoints, scores
from small_runs import IMAGES, MODELS, describe, evaluated, save


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, build in MODELS.items():
        monkeypatch.setitem(models.REGISTRY, name, build)


@pytest.fixture
def run_dir(tmp_path):
    """A run of the small model, without checkpoints."""
    describe(tmp_path / "run")
    return tmp_path / "run"


# What it answers.


@pytest.mark.parametrize("use_averages", [True, False])
def test_it_answers_bit_for_bit_what_an_evaluation_scores(run_dir, use_averages):
    save(run_dir, 10)
    follower = Follower(run_dir, use_averages=use_averages)
    assert follower.look()
    answer = follower.predict(IMAGES)
    assert answer.step == follower.weights_step == 10
    assert answer.class_names == tuple("abcdefghij")
    np.testing.assert_array_equal(
        answer.logits, evaluated(run_dir, 10, use_averages=use_averages)
    )
    assert follower.predict(IMAGES[:1]).logits.shape == (1, 10)


def test_new_weights_replace_the_old_ones_without_tracing_anew(run_dir, monkeypatch):
    traces = []
    logits = live_copy.evaluation_logits
    counted = lambda *a: traces.append(1) or logits(*a)  # noqa: E731
    monkeypatch.setattr(live_copy, "evaluation_logits", counted)
    save(run_dir, 10)
    with Follower(run_dir, device="/cpu:1") as follower:
        assert follower.look()
        assert not follower.look(), "there is nothing new"
        before = follower.predict(IMAGES)
        save(run_dir, 15)
        save(run_dir, 20)
        assert follower.look()
        after = follower.predict(IMAGES)
        follower.predict(IMAGES[:3])
    assert (before.step, after.step) == (10, 20)
    assert follower.swaps == 2
    assert follower.refused == 0, "that 15 was passed over is no fault of it"
    assert 0 < follower.swap_seconds < 10
    assert 0 <= follower.age_seconds < 60
    assert len(traces) == 1
    np.testing.assert_array_equal(after.logits, evaluated(run_dir, 20))
    assert (before.logits != after.logits).any()


def test_a_thread_looks_for_checkpoints_and_survives_a_fault(
    run_dir, monkeypatch, caplog
):
    with Follower(run_dir).start(interval=0.01) as follower:
        assert follower.weights_step is None
        look, failed = follower.look, threading.Event()

        def fail_once():
            if not failed.is_set():
                failed.set()
                raise RuntimeError("a fault")
            return look()

        monkeypatch.setattr(follower, "look", fail_once)
        assert failed.wait(10)
        save(run_dir, 10)
        for _ in range(1000):
            if follower.weights_step == 10:
                break
            threading.Event().wait(0.01)
    assert follower.weights_step == 10
    assert "failed to look" in caplog.text


@pytest.mark.parametrize(
    "images", [IMAGES.astype(np.float32), IMAGES[0], IMAGES[:, :24, :24], IMAGES[:0]]
)
def test_what_are_no_images_is_refused(run_dir, images):
    save(run_dir, 10)
    follower = Follower(run_dir)
    follower.look()
    with pytest.raises(ValueError, match="images"):
        follower.predict(images)


@pytest.mark.slow
def test_many_threads_never_see_a_mixture_while_weights_change(run_dir):
    """16 threads, 500 swaps between two sets: every answer is of one of the two."""
    follower = Follower(run_dir)
    known = []
    for step in (10, 20):
        save(run_dir, step)
        follower.look()
        known.append(follower._answering)
    expected = {step: evaluated(run_dir, step) for step in (10, 20)}
    ended = threading.Event()

    def ask(_):
        answers = []
        while not ended.is_set():
            answers.append(follower.predict(IMAGES))
        return answers

    with ThreadPoolExecutor(16) as threads:
        asking = [threads.submit(ask, number) for number in range(16)]
        before = follower.swaps
        for number in range(500):
            follower._swap(*known[number % 2], began=0.0)
            threading.Event().wait(0.002)
        ended.set()
        answers = [answer for one in asking for answer in one.result()]
    assert follower.swaps - before == 500
    assert {answer.step for answer in answers} == {10, 20}
    assert len(answers) >= 500
    for answer in answers:
        np.testing.assert_array_equal(answer.logits, expected[answer.step])


def test_a_step_that_was_asked_for_stays(run_dir):
    save(run_dir, 10)
    save(run_dir, 20)
    follower = Follower(run_dir, step=10)
    assert follower.look()
    expected = follower.predict(IMAGES).logits
    np.testing.assert_allclose(expected, evaluated(run_dir, 10), rtol=1e-5)
    save(run_dir, 30)
    assert not follower.look()
    assert (follower.weights_step, follower.refused) == (10, 0)


def test_the_best_answers_until_there_is_a_better_one(run_dir):
    """Which may be an older one, scored later."""
    follower = Follower(run_dir, step="best")
    save(run_dir, 10)
    save(run_dir, 20)
    assert not follower.look()
    assert "no checkpoint has a score" in follower.why_no_weights()
    (run_dir / "eval").mkdir()
    steps = []
    for step, precision in ((20, 0.5), (10, 0.5), (30, 0.4), (20, 0.3)):
        if step == 30:
            save(run_dir, 30)
        scores.append(run_dir / "eval", step, {"precision @ 1": precision}, 100)
        steps.append((follower.look(), follower.weights_step))
    assert steps == [(True, 20), (True, 10), (False, 10), (False, 10)]
    np.testing.assert_allclose(
        follower.predict(IMAGES).logits, evaluated(run_dir, 10), rtol=1e-5
    )


# What it refuses.


def flip_a_bit(path):
    data = path / "state.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def cut_in_half(path):
    data = path / "state.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def test_damaged_and_partial_checkpoints_are_refused_once_each(run_dir):
    save(run_dir, 10)
    follower = Follower(run_dir)
    follower.look()
    expected = follower.predict(IMAGES).logits
    spoiled = [
        (flip_a_bit, "differs from its SHA-256"),
        (cut_in_half, "differs from its SHA-256"),
        (lambda path: (path / "manifest.json").unlink(), "missing or unreadable"),
        (lambda path: (path / "manifest.json").write_text("{}"), "missing or unread"),
        (lambda path: (path / "state.index").unlink(), "missing or unreadable"),
        (lambda path: [file.unlink() for file in path.iterdir()], "missing"),
    ]
    for count, (spoil, why) in enumerate(spoiled, start=1):
        spoil(save(run_dir, 10 + count))
        for _ in range(3):
            assert not follower.look()
        assert follower.refused == count
        assert f"step {10 + count} is refused" in follower.refusals[-1]
        assert why in follower.refusals[-1]
        assert follower.predict(IMAGES).step == 10
    np.testing.assert_array_equal(follower.predict(IMAGES).logits, expected)
    save(run_dir, 20)
    assert follower.look()
    assert (follower.weights_step, follower.refused) == (20, len(spoiled))


def test_foreign_checkpoints_are_refused(run_dir):
    save(run_dir, 10)
    follower = Follower(run_dir)
    follower.look()
    expected = follower.predict(IMAGES).logits
    foreign = [
        ({"model": "wider"}, "does not fit the model"),
        ({"model": "deeper"}, "does not fit the model"),
        ({"precision": "float64"}, "does not fit the model"),
        ({"seed": 1}, "its seed is 1"),
        ({"global_batch_size": 64}, "its global_batch_size is 64"),
        ({"global_step": 15}, "holds global_step 15, not 16"),
    ]
    for count, (options, why) in enumerate(foreign, start=1):
        save(run_dir, 10 + count, **options)
        assert not follower.look()
        assert follower.refused == count
        assert why in follower.refusals[-1]
    np.testing.assert_array_equal(follower.predict(IMAGES).logits, expected)


def test_a_model_of_fewer_variables_does_not_take_those_of_a_deeper_one(tmp_path):
    """All its variables are in the other's checkpoint, with their shapes."""
    describe(tmp_path / "run", model="small")
    follower = Follower(tmp_path / "run")
    save(tmp_path / "run", 10, model="deeper")
    assert not follower.look()
    assert "belongs to another" in follower.refusals[0]
    with pytest.raises(UsageError, match="belongs to another"):
        follower.predict(IMAGES)


def test_an_older_checkpoint_is_ignored_and_the_newest_is_looked_for_first(run_dir):
    for step in (10, 20):
        save(run_dir, step)
    cut_in_half(save(run_dir, 30))
    follower = Follower(run_dir)
    assert follower.look()
    assert follower.weights_step == 20
    assert follower.refused == 1, "10 was there before"
    save(run_dir, 15)
    (run_dir / "checkpoints" / "step-00000010" / "keep").touch()
    assert not follower.look()
    assert not follower.look()
    assert (follower.weights_step, follower.refused) == (20, 1)


@pytest.fixture
def retrying_at_once(monkeypatch):
    """Lets refused checkpoints be read again at each look."""
    monkeypatch.setattr(followed_run, "RETRY_SECONDS", 0.0)


@pytest.mark.usefixtures("retrying_at_once")
def test_a_checkpoint_that_was_still_being_copied_is_taken_when_it_is_whole(
    run_dir, tmp_path
):
    whole = shutil.copytree(save(run_dir, 10), tmp_path / "whole")
    data = run_dir / "checkpoints" / "step-00000010" / "state.data-00000-of-00001"
    data.write_bytes(b"")
    follower = Follower(run_dir)
    assert not follower.look()
    data.write_bytes((whole / data.name).read_bytes())
    assert follower.look()
    assert (follower.weights_step, follower.refused) == (10, 1)


def test_a_checkpoint_that_vanishes_in_mid_read_leaves_the_last_one(
    run_dir, monkeypatch
):
    save(run_dir, 10)
    follower = Follower(run_dir)
    follower.look()
    expected = follower.predict(IMAGES).logits
    save(run_dir, 20)
    restore = checkpoints.restore

    def delete_first(checkpoint, *arguments, **options):
        shutil.rmtree(checkpoint.path)
        restore(checkpoint, *arguments, **options)

    monkeypatch.setattr(checkpoints, "restore", delete_first)
    assert not follower.look()
    assert follower.refused == 0
    np.testing.assert_array_equal(follower.predict(IMAGES).logits, expected)


def test_weights_that_were_read_by_half_never_answer(run_dir, monkeypatch):
    save(run_dir, 10)
    follower = Follower(run_dir)
    follower.look()
    expected = follower.predict(IMAGES).logits
    save(run_dir, 20)
    restore = checkpoints.restore

    def restore_and_fail(*arguments, **options):
        restore(*arguments, **options)  # The variables have the new values now.
        raise UsageError("the disk is gone")

    monkeypatch.setattr(checkpoints, "restore", restore_and_fail)
    assert not follower.look()
    np.testing.assert_array_equal(follower.predict(IMAGES).logits, expected)


# Faults that pass.


def failing_once(monkeypatch, owner, name, error):
    """Lets a function fail the first time."""
    works, left = getattr(owner, name), [error]

    def fail(*arguments, **options):
        if left:
            raise left.pop()
        return works(*arguments, **options)

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (checkpoints.files, "sha256", OSError(errno.EMFILE, "Too many open files")),
        (checkpoints.files, "sha256", OSError(errno.EIO, "Input/output error")),
        (tf.train.Checkpoint, "read", OSError(errno.ESTALE, "Stale file handle")),
        (
            tf.train.Checkpoint,
            "read",
            tf.errors.ResourceExhaustedError(None, None, "out of memory"),
        ),
        (live_copy.Network, "weights", MemoryError()),
    ],
)
@pytest.mark.usefixtures("retrying_at_once")
def test_a_checkpoint_that_could_not_be_read_once_is_read_again(
    run_dir, monkeypatch, owner, name, error
):
    save(run_dir, 10)
    follower = Follower(run_dir)
    failing_once(monkeypatch, owner, name, error)
    assert not follower.look()
    assert "can be used: step 10: " in follower.why_no_weights()
    assert follower.look()
    assert (follower.weights_step, follower.refused) == (10, 1)


def test_a_model_that_could_not_be_built_once_is_built_at_the_next_look(
    run_dir, monkeypatch
):
    save(run_dir, 10)
    follower = Follower(run_dir)
    failing_once(monkeypatch, models, "build", ImportError("not now"))
    with pytest.raises(ImportError, match="not now"):
        follower.look()
    assert follower.look()
    assert follower.weights_step == 10


def test_a_folder_that_the_server_forgot_is_that_of_an_earlier_run(
    run_dir, monkeypatch
):
    save(run_dir, 500)
    follower = Follower(run_dir)
    follower.look()
    run_dir.rename(run_dir.with_name("run.1"))
    describe(run_dir)
    save(run_dir, 10)
    stale = OSError(errno.ESTALE, "Stale file handle")
    failing_once(monkeypatch, followed_run.os.path, "samestat", stale)
    assert follower.look()
    assert (follower.weights_step, follower.refused) == (10, 0)


def test_without_weights_it_says_what_still_holds(run_dir):
    path = save(run_dir, 10)
    cut_in_half(path)
    follower = Follower(run_dir)
    for _ in range(2):
        assert not follower.look()
        assert "differs from its SHA-256" in follower.why_no_weights()
    shutil.rmtree(path)
    assert not follower.look()
    assert "There is no checkpoint" in follower.why_no_weights()
    cut_in_half(save(run_dir, 20))
    assert not follower.look()
    run_dir.rename(run_dir.with_name("run.1"))
    assert not follower.look()
    assert "does not exist" in follower.why_no_weights()
    assert follower.refused == 2


def test_a_configuration_that_breaks_between_looks_is_named(run_dir):
    follower = Follower(run_dir)
    assert not follower.look()
    (run_dir / "config.json").write_text("")
    assert "config.json cannot be read" in follower.why_no_weights()


def test_only_what_may_be_taken_is_read_and_what_was_refused_not_at_once(
    run_dir, monkeypatch
):
    for step in (10, 20, 30):
        save(run_dir, step)
    follower = Follower(run_dir)
    follower.look()
    read, verify = [], checkpoints.verify
    monkeypatch.setattr(
        checkpoints, "verify", lambda *words: read.append(words[1]) or verify(*words)
    )
    path = save(run_dir, 40)
    cut_in_half(path)
    for _ in range(3):
        assert not follower.look()
    assert read == [40]
    much_later = types.SimpleNamespace(monotonic=lambda: float("inf"))
    monkeypatch.setattr(followed_run, "time", much_later)
    assert not follower.look()
    assert read == [40, 40]
    shutil.rmtree(path)
    follower.look()
    assert not follower._refused


# Directories that are no run, and runs that take another's place.


def test_without_weights_it_says_why(tmp_path):
    follower = Follower(tmp_path / "run")
    for make, why in [
        (lambda: None, "does not exist"),
        ((tmp_path / "run").mkdir, "holds no run"),
        (lambda: describe(tmp_path / "run", parameters=3), "no checkpoint"),
        (lambda: save(tmp_path / "run", 10), "has 680 parameters now and had 3"),
        (
            lambda: (tmp_path / "run" / "config.json").write_text("[]"),
            "not a configuration",
        ),
    ]:
        make()
        assert not follower.look()
        with pytest.raises(UsageError, match=why):
            follower.predict(IMAGES)
    describe(tmp_path / "run")
    assert follower.look()
    assert follower.predict(IMAGES).step == 10
    assert follower.refused == 2


def test_what_cannot_be_looked_into_is_a_sentence_and_counts_once(run_dir):
    folder = run_dir / "checkpoints"
    folder.symlink_to(folder)  # A link to itself cannot be followed, by root either.
    follower = Follower(run_dir)
    for _ in range(2):
        assert not follower.look()
    assert follower.refused == 1
    assert "checkpoints cannot be read: Too many levels" in follower.refusals[0]
    folder.unlink()
    save(run_dir, 10)
    assert follower.look()
    aside = folder.rename(run_dir / "aside")
    folder.write_bytes(b"")
    assert not follower.look()
    assert "checkpoints cannot be read: Not a directory" in follower.refusals[1]
    folder.unlink()
    aside.rename(folder)
    save(run_dir, 20)
    assert follower.look()
    assert follower.weights_step == 20


def test_a_new_run_takes_over_with_its_first_checkpoint(run_dir):
    save(run_dir, 500)
    follower = Follower(run_dir)
    follower.look()
    run_dir.rename(run_dir.with_name("run.1"))  # As --fresh does.
    assert not follower.look()
    names = list("klmnopqrst")
    describe(run_dir, model="wider", distortions="flip_translate", class_names=names)
    assert not follower.look()
    assert follower.predict(IMAGES).step == 500
    save(run_dir, 10, model="wider", shape=(32, 32, 3))
    assert follower.look()
    step, logits, class_names = follower.predict(IMAGES)
    assert (step, class_names) == (10, tuple(names))
    np.testing.assert_array_equal(logits, evaluated(run_dir, 10))
    assert follower.refused == 0


def test_a_new_run_whose_model_cannot_be_built_leaves_the_old_one(run_dir):
    save(run_dir, 500)
    follower = Follower(run_dir)
    follower.look()
    run_dir.rename(run_dir.with_name("run.1"))
    describe(run_dir, model="nothing", parameters=1)
    save(run_dir, 10)
    for _ in range(2):
        assert not follower.look()
    assert follower.refused == 1
    assert "there is no such model" in follower.refusals[0]
    assert follower.predict(IMAGES).step == 500


def test_a_further_session_of_the_run_is_followed_on(run_dir):
    save(run_dir, 10)
    follower = Follower(run_dir)
    follower.look()
    describe(run_dir, max_steps=200_000)
    assert not follower.look()
    save(run_dir, 20)
    assert follower.look()
    assert (follower.weights_step, follower.refused) == (20, 0)


def test_copies_of_weights_do_not_change_with_the_variables_they_came_from():
    """What `LiveCopy` rests on: a value that was read stays as it was read."""
    variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]
    model = models.build("small", (24, 24, 3), 10)
    settings = {"model": "small", "data": "cifar10", "distortions": "tutorial"}
    network = live_copy.Network(model, settings, None, "/cpu:0")
    weights = network.weights(1, variables[:1], variables[1:])
    variables[0].assign_add([10.0, 10.0])
    variables[1].assign([0.0])
    np.testing.assert_array_equal(weights.trainable[0], [1.0, 2.0])
    np.testing.assert_array_equal(weights.non_trainable[0], [3.0])
