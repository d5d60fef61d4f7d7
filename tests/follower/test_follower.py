"""The follower: good checkpoints answer, bad ones are refused, none is ever mixed."""

import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.follower import Follower, live_copy
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES
from cifar10.run_directory import checkpoints, scores
from small_runs import IMAGES, MODELS, describe, evaluated, save


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, build in MODELS.items():
        monkeypatch.setitem(ARCHITECTURES, name, Architecture(build))


@pytest.fixture
def run_dir(tmp_path):
    """A run of the small model, without checkpoints."""
    describe(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def follower(run_dir):
    """A follower of the run with the checkpoint of step 10."""
    save(run_dir, 10)
    follower = Follower(run_dir)
    assert follower.look()
    return follower


# Answers.


def test_weights_are_kept_and_used_on_the_chosen_device(
    run_dir, four_cpus, monkeypatch
):
    """Another logical one stands for a GPU."""
    found, traced = set(), live_copy.traced_logits

    def noting(*given):
        function = traced(*given)

        def compute(*given):
            logits = function(*given)
            found.update(one.device[-5:] for one in tf.nest.flatten((given, logits)))
            return logits

        return compute

    monkeypatch.setattr(live_copy, "traced_logits", noting)
    save(run_dir, 10)
    follower = Follower(run_dir, device=four_cpus[1])
    assert follower.look()
    follower.predict(IMAGES)
    assert found == {"CPU:1"}


@pytest.mark.parametrize("use_averages", [True, False])
def test_a_followers_answers_equal_an_evaluation_bit_for_bit(run_dir, use_averages):
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
    other = (IMAGES.astype(np.float32), IMAGES[0], IMAGES[:, :24, :24], IMAGES[:0])
    for images in other:
        with pytest.raises(ValueError, match="images"):
            follower.predict(images)


def test_weights_in_use_are_calibrated(run_dir, follower, capsys):
    """As by `eval.py --calibrate` beside a service."""
    before = follower.predict(IMAGES)
    file = run_dir / "checkpoints/step-00000010/temperature.txt"
    file.write_text("2.0")
    assert follower.look()
    after = follower.predict(IMAGES)
    np.testing.assert_allclose(after.logits, before.logits / 2, rtol=1e-6)
    assert not follower.look()
    said = capsys.readouterr().err
    assert said.count("temperature of step 10") == 1, "it is loaded once"
    file.write_text("damaged")
    assert not follower.look()
    assert "temperature.txt" in follower.refusals[-1]
    np.testing.assert_array_equal(follower.predict(IMAGES).logits, after.logits)


def test_weights_of_an_extended_run_are_calibrated(run_dir, follower):
    before = follower.predict(IMAGES)
    file = run_dir / "checkpoints/step-00000010/temperature.txt"
    describe(run_dir, max_steps=200_000)
    assert not follower.look(), "the checkpoint is the same"
    file.write_text("2.0")
    assert follower.look()
    after = follower.predict(IMAGES)
    np.testing.assert_allclose(after.logits, before.logits / 2, rtol=1e-6)
    # Extended and calibrated between two looks.
    describe(run_dir, max_steps=300_000)
    file.write_text("4.0")
    assert follower.look()
    after = follower.predict(IMAGES)
    np.testing.assert_allclose(after.logits, before.logits / 4, rtol=1e-6)
    assert follower.refusals == []


def test_copying_a_run_keeps_the_age_of_its_weights(run_dir, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e9)
        save(run_dir, 10)
    copy = shutil.copytree(run_dir, tmp_path / "copy", copy_function=shutil.copy)
    follower = Follower(copy)
    assert follower.look()
    assert follower.age_seconds == pytest.approx(time.time() - 1e9, abs=60)


def test_new_weights_replace_the_old_without_retracing(run_dir, monkeypatch):
    traces = []
    infer = live_copy.inference
    counted = lambda *a, **how: traces.append(1) or infer(*a, **how)  # noqa: E731
    monkeypatch.setattr(live_copy, "inference", counted)
    save(run_dir, 10)
    with Follower(run_dir, device="/cpu:1") as follower:
        assert follower.look()
        assert 0 < follower.age_seconds < 60
        assert not follower.look(), "there is nothing new"
        before = follower.predict(IMAGES)
        save(run_dir, 15)
        ahead = time.time() + 1000  # The clock of the machine that trains.
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: ahead)
            save(run_dir, 20)
        assert follower.look()
        assert follower.age_seconds == 0
        after = follower.predict(IMAGES)
        follower.predict(IMAGES[:3])
    assert (before.step, after.step) == (10, 20)
    assert follower.refusals == []
    assert len(traces) == 1
    np.testing.assert_array_equal(after.logits, evaluated(run_dir, 20))
    assert (before.logits != after.logits).any()


def test_many_threads_never_see_a_mixture_while_weights_change(run_dir, follower):
    """Every answer is of the weights of one step."""
    answers, ended = [follower.predict(IMAGES)], threading.Event()

    def ask():
        while not ended.is_set():
            answers.append(follower.predict(IMAGES))

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(ask) for _ in range(8)]
        for step in (20, 30, 40):
            save(run_dir, step)
            assert follower.look()
            while answers[-1].step != step and not asking[0].done():
                time.sleep(0.01)
        ended.set()
        assert [one.result() for one in asking] == [None] * 8
    expected = {step: evaluated(run_dir, step) for step in (10, 20, 30, 40)}
    assert {answer.step for answer in answers} == {*expected}
    for answer in answers:
        np.testing.assert_array_equal(answer.logits, expected[answer.step])
    model = follower.model
    for variable in (*model.trainable, *model.non_trainable):  # It has its own values.
        variable.assign(tf.zeros_like(variable))
    np.testing.assert_array_equal(follower.predict(IMAGES).logits, expected[40])


def test_a_gpu_that_is_missing_is_refused(run_dir):
    with pytest.raises(UsageError, match="no GPU"):
        Follower(run_dir, "/gpu:0")


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
        while follower.weights_step != 10:
            time.sleep(0.01)
    assert "a fault" in caplog.text


def test_the_best_checkpoint_is_used_until_a_better_score_appears(run_dir):
    """Which may be an older one, scored later."""
    follower = Follower(run_dir, step="best")
    save(run_dir, 10)
    save(run_dir, 20)
    assert not follower.look()
    assert "score" in follower.why_no_weights
    (run_dir / "eval").mkdir()
    steps = []
    for step, precision in ((20, 0.5), (10, 0.5), (30, 0.4), (20, 0.3)):
        if step == 30:
            save(run_dir, 30)
        scores.append(run_dir / "eval", step, {"precision @ 1": precision}, 100)
        steps.append((follower.look(), follower.weights_step))
    assert steps == [(True, 20), (True, 10), (False, 10), (False, 10)]


# Refusals.


def cut_in_half(path):
    data = path / "state.data-00000-of-00001"
    os.truncate(data, data.stat().st_size // 2)


def test_damaged_and_foreign_checkpoints_are_refused_once_each(run_dir, follower):
    expected = follower.predict(IMAGES).logits
    unspoiled = lambda path: None  # noqa: E731
    bad = [
        ({}, cut_in_half, "SHA-256"),
        ({}, lambda path: (path / "manifest.json").write_text("{}"), "manifest"),
        ({}, lambda path: [file.unlink() for file in path.iterdir()], "missing"),
        ({"model": "wider"}, unspoiled, "model"),
        ({"seed": 1}, unspoiled, "seed"),
    ]
    for step, (options, spoil, why) in enumerate(bad, start=20):
        spoil(save(run_dir, step, **options))
        for _ in range(2):
            assert not follower.look()
        assert len(follower.refusals) == step - 19
        assert f"step {step}" in follower.refusals[-1]
        assert why in follower.refusals[-1]
        assert follower.predict(IMAGES).step == 10
    np.testing.assert_array_equal(follower.predict(IMAGES).logits, expected)
    save(run_dir, 30)
    cut_in_half(save(run_dir, 31))
    assert follower.look()
    save(run_dir, 15)  # Older than the one in use.
    assert not follower.look()
    assert (follower.weights_step, len(follower.refusals)) == (30, len(bad) + 1)


def test_partly_read_weights_never_answer(run_dir, follower, monkeypatch):
    expected = follower.predict(IMAGES).logits
    save(run_dir, 20)
    restore = checkpoints.restore

    def restore_and_fail(*arguments, **options):
        restore(*arguments, **options)  # The variables have the new values now.
        raise UsageError("the disk is gone")

    monkeypatch.setattr(checkpoints, "restore", restore_and_fail)
    assert not follower.look()
    assert len(follower.refusals) == 1
    np.testing.assert_array_equal(follower.predict(IMAGES).logits, expected)


# Faults that pass.


def test_an_unreadable_checkpoint_is_read_again(run_dir, follower, monkeypatch):
    works, left = checkpoints.files.sha256, [OSError(errno.EMFILE, "Too many files")]

    def fail_once(*arguments, **options):
        if left:
            raise left.pop()
        return works(*arguments, **options)

    save(run_dir, 11)
    monkeypatch.setattr(checkpoints.files, "sha256", fail_once)
    assert not follower.look()
    assert "step 11" in follower.refusals[0]
    assert follower.look()
    assert (follower.weights_step, len(follower.refusals)) == (11, 1)

    # Another program is copying it still.
    data = save(run_dir, 20) / "state.data-00000-of-00001"
    whole = data.read_bytes()
    data.write_bytes(b"")
    assert not follower.look()
    data.write_bytes(whole)
    assert follower.look()
    assert follower.weights_step == 20


# Directories without a run, and runs that take another's place.


def test_a_follower_without_weights_says_why(tmp_path):
    run = tmp_path / "run"
    step_10 = run / "checkpoints" / "step-00000010"
    follower = Follower(run)
    for make, why in [
        (lambda: None, "holds no run"),
        (lambda: describe(run), "no checkpoint"),
        (lambda: (describe(run, parameters=3), save(run, 10)), "680 parameters"),
        (lambda: (describe(run), cut_in_half(step_10)), "SHA-256"),
        (lambda: shutil.rmtree(step_10), "no checkpoint"),
    ]:
        make()
        assert follower.look() is False
        with pytest.raises(UsageError, match=why):
            follower.predict(IMAGES)
    save(run, 20)
    assert follower.look()
    assert follower.predict(IMAGES).step == 20


def test_two_threads_load_a_checkpoint_once(run_dir, follower, monkeypatch):
    verify = checkpoints.verify

    def slow(*given):
        time.sleep(0.2)
        return verify(*given)

    save(run_dir, 20)
    monkeypatch.setattr(checkpoints, "verify", slow)
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda _: follower.look(), range(2))
    assert sorted(found) == [False, True]


def test_a_run_that_is_being_moved_is_looked_at_again(run_dir, follower, monkeypatch):
    def vanish(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    save(run_dir, 20)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "steps", vanish)
        assert follower.look() is False
    assert follower.refusals == []
    assert follower.look() is True
    assert follower.weights_step == 20


def test_a_new_run_takes_over_with_its_first_checkpoint(run_dir, follower):
    run_dir.rename(run_dir.with_name("run.1"))  # As --fresh does.
    assert not follower.look()
    names = list("klmnopqrst")
    describe(run_dir, model="wider", distortions="flip_translate", class_names=names)
    assert not follower.look()
    assert follower.predict(IMAGES).step == 10
    save(run_dir, 5, model="wider", shape=(32, 32, 3))
    assert follower.look()
    step, logits, class_names = follower.predict(IMAGES)
    assert (step, class_names) == (5, tuple(names))
    np.testing.assert_array_equal(logits, evaluated(run_dir, 5))
    # A further one, with the same settings, is noticed by its lower steps.
    shutil.rmtree(run_dir / "checkpoints" / "step-00000005")
    save(run_dir, 3, model="wider", shape=(32, 32, 3))
    assert follower.look()
    assert follower.predict(IMAGES[:1]).step == 3
    assert follower.refusals == []


@pytest.mark.parametrize("step", [None, 10, "best"])
def test_a_new_run_takes_over_at_the_same_step(run_dir, tmp_path, step):
    """Without a look in between, as where a link gets another target."""
    names, new, link = tuple("klmnopqrst"), tmp_path / "new", tmp_path / "link"
    describe(new, model="wider", class_names=names)
    for run, model in ((run_dir, "small"), (new, "wider")):
        save(run, 10, model=model)
        (run / "eval").mkdir()
        scores.append(run / "eval", 10, {"precision @ 1": 0.5}, 100)
    link.symlink_to(run_dir)
    follower = Follower(link, step=step)
    assert follower.look()
    link.unlink()
    link.symlink_to(new)
    assert follower.look()
    answer = follower.predict(IMAGES)
    assert (answer.step, answer.class_names) == (10, names)
    np.testing.assert_array_equal(answer.logits, evaluated(new, 10))
    assert not follower.look()
    assert follower.refusals == []


def test_a_run_repeated_to_the_same_step_takes_over(run_dir, monkeypatch):
    """With the same settings, as by --fresh."""
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1e9)
        save(run_dir, 10)
    follower = Follower(run_dir)
    assert follower.look()
    assert follower.age_seconds > 1000
    shutil.rmtree(run_dir / "checkpoints")
    save(run_dir, 10)
    assert follower.look()
    assert follower.age_seconds < 1000
    assert not follower.look()


def test_a_new_run_takes_over_beside_the_old_runs_checkpoints(run_dir, follower):
    """Which a copy of the new run leaves in place."""
    describe(run_dir, seed=1)
    assert not follower.look()
    assert follower.weights_step == 10
    for step in (5, 7):
        save(run_dir, step, seed=1)
        assert follower.look()
        assert follower.weights_step == step
    (why,) = follower.refusals
    assert "step 10" in why
    assert "another run" in why


def test_a_new_run_with_an_unknown_model_leaves_the_old_copy(run_dir, follower):
    run_dir.rename(run_dir.with_name("run.1"))
    describe(run_dir, model="nothing", parameters=1)
    save(run_dir, 5)
    for _ in range(2):
        assert not follower.look()
    assert len(follower.refusals) == 1
    assert follower.predict(IMAGES).step == 10
