"""A run that was killed ends bit for bit where one that was not killed ends."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import runs

SCRIPT = "train_multi_gpu.py"
STEPS = 80


def command(train_dir, stand_in_dir, *, xla=False, **flags):
    """Two towers with batch norm and dropout, which the state of a run has to hold."""
    flags = {
        "num_gpus": 2,
        "batch_size": 4,
        "max_steps": STEPS,
        "checkpoint_steps": 7,
        "summary_steps": 20,
        "model": "small_runs:small",
        **flags,
    }
    words = ["--deterministic", *["--xla"] * xla]
    return [*words, *runs.training_flags(train_dir, stand_in_dir, **flags)]


def run_to_the_end(*arguments, **flags):
    """Trains in this process, which ends where others do."""
    done = runs.call(SCRIPT, *command(*arguments, **flags))
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(*arguments, **flags):
    words = [runs.ROOT / SCRIPT, *command(*arguments, **flags)]
    return runs.started(*words, stderr=subprocess.STDOUT)


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def kill_after_line(words, *arguments, **flags):
    """Kills a run a random moment after it has printed a line with `words`."""
    with start(*arguments, **flags) as process:
        runs.read_until(process.stdout, words)
        time.sleep(random.random() * 0.01)  # A few steps; ten more would be the end.
        kill(process)


def kill_while_saving(train_dir, stand_in_dir):
    """Starts a run and kills it while a checkpoint is half-written.

    The checkpoint may be complete before the signal arrives; then the next one will do.
    """
    checkpoints = train_dir / "checkpoints"
    for _ in range(3):
        with start(train_dir, stand_in_dir) as process:
            while not any(checkpoints.glob(".incomplete-*/state*")):
                assert process.poll() is None, "it ended before it saved a checkpoint"
            kill(process)
        if any(checkpoints.glob(".incomplete-*")):
            return
    pytest.fail("three kills came too late to leave a half-written checkpoint")


def resumed_step(output):
    return int(re.search(r"Resuming from step (\d+) ", output)[1])


def final_files(train_dir, step=STEPS):
    return runs.files(runs.checkpoint(train_dir, step))


def logged(train_dir):
    """The steps and losses of metrics.jsonl."""
    entries = runs.logged(train_dir)
    return [(entry["step"], entry["total_loss/average"]) for entry in entries]


def assert_ended(train_dir, whole):
    """Fails if a run differs from another, or a step was logged twice or not at all."""
    assert final_files(train_dir) == final_files(whole)
    assert [step for step, _ in logged(train_dir)] == list(range(10, STEPS + 1, 10))
    assert logged(train_dir) == logged(whole)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, stand_in_dir):
    train_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_to_the_end(train_dir, stand_in_dir)
    return train_dir


@pytest.mark.slow
def test_kills_change_nothing(tmp_path, stand_in_dir, undisturbed):
    train_dir = tmp_path / "run"
    kill_after_line("Batch:", train_dir, stand_in_dir)  # Before the first step.
    kill_while_saving(train_dir, stand_in_dir)
    kill_after_line("step 30,", train_dir, stand_in_dir)
    output = run_to_the_end(train_dir, stand_in_dir)
    assert resumed_step(output) >= 28, "not from the newest checkpoint"
    assert_ended(train_dir, undisturbed)


@pytest.mark.slow
def test_kills_and_signals_do_not_change_compiled_multi_step_runs(
    tmp_path, stand_in_dir
):
    """XLA compiles four steps; a call to a checkpoint at a seventh step has three."""
    flags = {"xla": True, "num_gpus": 1, "batch_size": 8, "steps_per_call": 4}
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_to_the_end(whole, stand_in_dir, **flags)
    kill_after_line("step 10,", run, stand_in_dir, **flags)
    stop(signal.SIGTERM, printed("step 20,"), run, stand_in_dir, **flags)
    kill_after_line("step 50,", run, stand_in_dir, **flags)
    assert resumed_step(run_to_the_end(run, stand_in_dir, **flags)) >= 49
    assert_ended(run, whole)


@pytest.mark.slow
def test_a_longer_run_skips_a_damaged_checkpoint_and_is_unchanged_once_finished(
    tmp_path, stand_in_dir, undisturbed
):
    train_dir = tmp_path / "run"
    run_to_the_end(train_dir, stand_in_dir, max_steps=25)
    newest = max((train_dir / "checkpoints").glob("step-*"))
    data = newest / "state.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    output = run_to_the_end(train_dir, stand_in_dir)
    assert "PASSING OVER" in output
    assert resumed_step(output) == 21
    assert (train_dir / "checkpoints" / f"damaged-{newest.name}-1").is_dir()
    assert_ended(train_dir, undisturbed)
    assert "Nothing to do" in run_to_the_end(train_dir, stand_in_dir)
    assert final_files(train_dir) == final_files(undisturbed)


@pytest.mark.soak
def test_many_random_kills_change_nothing(tmp_path, stand_in_dir):
    """`make soak`: SOAK_KILLS kills, 200 unless set; about six seconds each."""
    kills = int(os.environ.get("SOAK_KILLS", "200"))
    flags = {"checkpoint_steps": 5, "log_frequency": 50, "summary_steps": 100}
    flags["model"] = "tutorial"
    train_dir = tmp_path / "run"
    steps = [0]
    for _ in range(kills):
        with start(train_dir, stand_in_dir, **flags, max_steps=10**9) as process:
            if random.random() < 0.25:  # At the start, with nothing said yet.
                time.sleep(random.uniform(0, 5))
            else:
                resumed = runs.read_until(process.stdout, f" in {train_dir}")
                steps.append(int((re.search(r"from step (\d+)", resumed) or [0, 0])[1]))
                time.sleep(random.uniform(0, 4))
            kill(process)
    assert steps == sorted(steps), "a checkpoint was lost"
    newest = max((train_dir / "checkpoints").glob("step-*"))
    flags["max_steps"] = int(newest.name[5:]) + 50  # It goes on after the last kill.
    output = run_to_the_end(train_dir, stand_in_dir, **flags)
    assert "PASSING OVER" not in output
    whole = tmp_path / "undisturbed"
    run_to_the_end(whole, stand_in_dir, **flags)
    last = flags["max_steps"]
    assert final_files(train_dir, last) == final_files(whole, last)
    assert logged(train_dir) == logged(whole)


@pytest.mark.slow
def test_resume_continues_with_the_flags_of_the_run(tmp_path, stand_in_dir):
    """With other towers and another script, and with none of its flags."""
    run = tmp_path / "run"
    flags = runs.training_flags(run, stand_in_dir, max_steps=3, learning_rate=0.05)
    assert runs.call("train.py", *flags).returncode == 0
    words = runs.flags(resume=run, num_gpus=2, max_steps=5)
    done = runs.call(SCRIPT, *words)
    assert done.returncode == 0, done.stderr
    assert resumed_step(done.stdout) == 3
    assert runs.checkpoint(run, 5).is_dir()

    refused = runs.call(SCRIPT, *words, "--batch_size", 8)
    assert refused.returncode == 2
    assert "global_batch_size: 8 there, 16 now" in refused.stderr


def test_a_data_mismatch_names_both_sets(tmp_path):
    pixels, classes = np.zeros((16, 32, 32, 3), np.uint8), np.arange(16) % 2
    both = {"x_train": pixels, "x_test": pixels, "y_train": classes, "y_test": classes}
    np.savez(file := tmp_path / "data.npz", **both)
    flags = runs.flags(data=file, max_steps=1, batch_size=8, model=runs.SMALL)
    run = tmp_path / "run"
    assert runs.call("train.py", *flags, "--train_dir", run).returncode == 0
    refused = runs.call("train.py", *runs.flags(resume=run, data="synthetic"))
    assert refused.returncode == 2
    assert "data: npz there, synthetic now" in refused.stderr


def test_other_towers_with_batch_norm_are_refused_with_working_flags(
    tmp_path, stand_in_dir
):
    run = tmp_path / "run"
    normed = "small_model:normalized"
    flags = runs.training_flags(run, stand_in_dir, max_steps=1, model=normed)
    assert runs.call(SCRIPT, *flags, "--num_gpus", 2).returncode == 0
    words = runs.flags(resume=run, num_gpus=1, max_steps=2)
    refused = runs.call(SCRIPT, *words)
    assert refused.returncode == 2
    assert "    batch_size: 8 there, 16 now" in refused.stderr
    hint = re.compile(r"^ *(--.*) on 1 tower keeps", re.MULTILINE)
    (way,) = hint.findall(refused.stderr)
    # The same command on one tower, which has another global batch, too.
    refused = runs.call(SCRIPT, *flags, "--num_gpus", 1, "--batch_size", 8)
    assert hint.findall(refused.stderr) == [way]
    done = runs.call(SCRIPT, *words, *way.split())
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_from_another_configuration_is_not_resumed(tmp_path, stand_in_dir):
    """As a copy that only adds files holds it after --fresh."""
    for name, steps, rate in (("old", 6, 0.1), ("run", 3, 0.05)):
        flags = {"max_steps": steps, "learning_rate": rate}
        words = runs.training_flags(tmp_path / name, stand_in_dir, **flags)
        assert runs.call("train.py", *words).returncode == 0
    old = runs.checkpoint(tmp_path / "old", 6)
    shutil.copytree(old, left := runs.checkpoint(tmp_path / "run", 6))
    words = runs.flags(resume=tmp_path / "run", max_steps=9)
    refused = runs.call("train.py", *words)
    assert refused.returncode == 2
    assert f"{left} is from another run: its learning_rate is 0.1" in refused.stderr
    scored = runs.call("eval.py", "--run_once", "--train_dir", tmp_path / "run")
    assert "step 3: precision" in scored.stdout, "of the run's own checkpoint"
    assert f"{left} is from another run" in scored.stderr
    shutil.rmtree(left)
    assert resumed_step(runs.call("train.py", *words).stdout) == 3


def test_the_proposed_command_keeps_the_given_flags(tmp_path, stand_in_dir):
    run = tmp_path / "run"
    words = runs.training_flags(run, stand_in_dir, max_steps=4)
    assert runs.call("train.py", *words).returncode == 0
    others = runs.flags(learning_rate=0.05, eval_steps=2, keep_best=0)
    refused = runs.call("train.py", *words, *others).stderr.splitlines()
    _, *proposed = shlex.split(refused[-1])
    assert {*map(str, others)} <= {*proposed}
    done = runs.call("train.py", *proposed[1:])
    assert done.returncode == 0, done.stderr
    assert json.loads(Path(f"{run}.1/config.json").read_text())["keep_best"] == 0


def test_no_command_is_proposed_without_the_runs_recipe(tmp_path, stand_in_dir):
    """What flags cannot tell would be lost."""
    (recipe := tmp_path / "mine.toml").write_text("batch_size = 8\nmax_steps = 1\n")
    words = runs.training_flags(tmp_path / "run", stand_in_dir, recipe=recipe)
    assert runs.call("train.py", *words).returncode == 0
    recipe.unlink()
    again = runs.flags(resume=tmp_path / "run", learning_rate=0.05)
    refused = runs.call("train.py", *again)
    assert refused.returncode == 2
    assert f"--recipe {recipe}: no such file" in refused.stderr.splitlines()[-1]
    assert "once its recipe can be used" in refused.stderr


def test_the_proposed_command_keeps_the_batches_of_towers(tmp_path, stand_in_dir):
    """Which batch norm sees."""
    normed = {"max_steps": 1, "model": "small_model:normalized", "accumulate": 2}
    words = runs.training_flags(tmp_path / "run", stand_in_dir, **normed, num_gpus=2)
    assert runs.call(SCRIPT, *words).returncode == 0
    refused = runs.call(SCRIPT, *words, "--learning_rate", 0.05).stderr.splitlines()
    proposed = shlex.split(refused[-1])[2:]
    assert runs.call(SCRIPT, *proposed).returncode == 0
    before, after = (
        json.loads(Path(f"{tmp_path}/{name}/config.json").read_text())
        for name in ("run", "run.1")
    )
    for name in ("batch_size", "towers", "accumulate"):
        assert after[name] == before[name]


def test_a_pruned_run_has_nothing_left_to_do(tmp_path, stand_in_dir):
    """As cron starts the same command again and again."""
    run = tmp_path / "run"
    flags = {"max_steps": 4, "eval_steps": 2, "checkpoint_steps": 2}
    words = runs.training_flags(run, stand_in_dir, **flags)
    assert runs.call("train.py", *words).returncode == 0
    prune = "--prune", "run", "--keep", "best", "--yes"
    assert runs.call("cifar10/__main__.py", "runs", tmp_path, *prune).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*.json*")}
    for steps in (4, 3):
        done = runs.call("train.py", *words, "--max_steps", steps)
        assert done.returncode == 0, done.stderr
        assert "Nothing to do" in done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*.json*")}
    assert runs.call("train.py", *words, "--max_steps", 9).returncode == 2


# ---- Signals


def stop(number, ready, train_dir, stand_in_dir, **flags):
    """Stops a run by a signal as soon as it is `ready`; returns its step."""
    with start(train_dir, stand_in_dir, **flags) as process:
        ready(process)
        process.send_signal(number)
        said, _ = process.communicate()
    assert process.returncode == 128 + number, said
    step = int(re.search(rf"stopped by {number.name} after step (\d+)\.", said)[1])
    assert ("--resume" in said) == bool(step)
    assert (runs.checkpoint(train_dir, step) / "manifest.json").exists() or not step
    assert not (train_dir.parent / f".{train_dir.name}.lock").exists()
    return step


def printed(words):
    return lambda process: runs.read_until(process.stdout, words)


@pytest.mark.slow
def test_a_signal_in_any_phase_leaves_a_checkpoint_of_that_step(
    tmp_path, stand_in_dir, undisturbed
):
    arguments = (tmp_path / "run", stand_in_dir)
    checkpoints = tmp_path / "run" / "checkpoints"

    def saving(process):
        while not any(checkpoints.glob(".incomplete-*/state*")):
            assert process.poll() is None, "it ended before it saved a checkpoint"

    # Tracing the first step, which ends first; saving; between steps.
    assert stop(signal.SIGUSR1, printed("Towers:"), *arguments) <= 1
    assert stop(signal.SIGTERM, saving, *arguments) >= 7
    assert stop(signal.SIGINT, printed("step 20,"), *arguments) >= 20
    run_to_the_end(*arguments)
    assert_ended(arguments[0], undisturbed)


@pytest.mark.slow
def test_the_second_signal_ends_at_once(tmp_path, stand_in_dir):
    flags = {"max_steps": 100_000, "steps_per_call": 5, "model": "airbench"}
    with start(tmp_path / "run", stand_in_dir, **flags, batch_size=500) as process:
        runs.read_until(process.stdout, "New run")
        process.send_signal(signal.SIGTERM)
        runs.read_until(process.stdout, "second signal")
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_end_before_the_last_checkpoint_leaves_the_run_unchanged(
    tmp_path, stand_in_dir
):
    """Its `config.json` would say that it has more steps than there are."""
    run_to_the_end(tmp_path, stand_in_dir, max_steps=4)
    before = (tmp_path / "config.json").read_bytes()
    assert "Nothing to do" in run_to_the_end(tmp_path, stand_in_dir, max_steps=2)
    assert (tmp_path / "config.json").read_bytes() == before


def short(run, stand_in_dir, *words, **flags):
    """Trains in this process for some steps, with a small batch."""
    flags = {"max_steps": 4, "checkpoint_steps": 2, "batch_size": 8, **flags}
    flags |= {"log_frequency": 1}
    return runs.call(
        "train.py", *runs.training_flags(run, stand_in_dir, **flags), *words
    )


def test_a_resume_that_is_refused_leaves_the_run_unchanged(tmp_path, stand_in_dir):
    """Else its `config.json` would have changed since the last checkpoint."""
    short(run := tmp_path / "run", stand_in_dir)
    shutil.copytree(run, whole := tmp_path / "whole")
    for data in (run / "checkpoints").glob("*/state.data*"):
        os.truncate(data, 100)
    refused = short(run, stand_in_dir, max_steps=6)
    assert refused.returncode == 2
    for file in ("config.json", "starts.jsonl"):
        assert (run / file).read_bytes() == (whole / file).read_bytes()
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(whole / "checkpoints", run / "checkpoints")
    audited = runs.call("cifar10/__main__.py", "audit", run)
    assert audited.returncode == 0, audited.stdout


def test_missing_lines_of_the_log_are_reported(tmp_path, stand_in_dir):
    """As in a copy that was made during the run, the log first."""
    short(run := tmp_path / "run", stand_in_dir)
    assert "missing or changed" not in short(run, stand_in_dir, max_steps=6).stdout
    log = run / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]))
    assert "missing or changed" in short(run, stand_in_dir, max_steps=8).stdout


def test_a_torn_start_breaks_no_chain(tmp_path, stand_in_dir):
    short(run := tmp_path / "run", stand_in_dir)
    with (run / "starts.jsonl").open("a") as file:
        file.write('{"step": 4, "ti')  # A machine lost its power.
    assert short(run, stand_in_dir, max_steps=6).returncode == 0
    audited = runs.call("cifar10/__main__.py", "audit", run)
    assert audited.returncode == 0, audited.stdout


def test_a_resume_looks_elsewhere_for_a_known_data_set_that_is_gone(
    tmp_path, stand_in_dir, monkeypatch
):
    """Its folder need not have been given: it may be a cache's."""
    shutil.copytree(stand_in_dir, own := tmp_path / "data")
    short(run := tmp_path / "run", own)
    words = ("train.py", "--resume", run, "--max_steps", 6)
    (there,) = [own.rename(tmp_path / "moved")]
    monkeypatch.setenv("CIFAR10_DATA_DIR", str(there))
    done = runs.call(*words)
    assert done.returncode == 0, done.stderr
    assert "Resuming from step 4" in done.stdout


@pytest.mark.parametrize("part", ["train", "labels"])
def test_changed_files_of_a_known_data_set_do_not_continue_a_run(
    tmp_path, stand_in_dir, part
):
    """Nor does the run of a version that recorded nothing of them end."""
    shutil.copytree(stand_in_dir, own := tmp_path / "data")
    short(run := tmp_path / "run", own)
    (config,) = [json.loads((run / "config.json").read_text())]
    assert config["data_fingerprint"]
    scored = runs.call("eval.py", "--run_once", "--train_dir", run)
    assert "changed" not in scored.stderr
    assert (run / "eval").is_dir(), "they count as scores of the run"
    file = next(own.rglob("*data_batch_3.bin"))
    content = bytearray(before := file.read_bytes())
    content[0 if part == "labels" else 1] ^= 1
    file.write_bytes(content)
    refused = short(run, own, max_steps=6)
    assert refused.returncode == 2
    assert "have changed since the run began" in refused.stderr
    (run / "config.json").write_text(json.dumps(config | {"data_fingerprint": None}))
    file.write_bytes(before)
    assert short(run, own, max_steps=6).returncode == 0
    assert json.loads((run / "config.json").read_text())["data_fingerprint"]
