"""What a run would have become with a change, compared with trainings that had it."""

import argparse
import json
import re
import shutil

import keras
import numpy as np
import pytest

import runs
import shared_graphs
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.evaluation import eval_command
from cifar10.input.regrouping import stand_ins
from cifar10.tools import audit, replay, runs as list_runs, whatif
from cifar10.training import train as training
from forging import edit, edit_config

RANDOM = np.random.default_rng(0)
CLASSES = 3
IMAGES = RANDOM.integers(0, 256, (48, 32, 32, 3), np.uint8)
LABELS = np.arange(48) % CLASSES
STEPS, BATCH = 12, 8
RUN = {"batch_size": BATCH, "max_steps": STEPS, "checkpoint_steps": 4, "seed": 5}
RUN |= {"log_frequency": 1, "deterministic": True, "precision": "float32"}


def trained(folder, images=IMAGES, labels=LABELS, **values):
    keras.backend.clear_session(free_memory=False)
    folder.mkdir(exist_ok=True)
    arrays = {"x_train": images, "y_train": labels, "x_test": IMAGES, "y_test": LABELS}
    np.savez(folder / "data.npz", **arrays)
    given = {"data": str(folder / "data.npz"), "model": runs.SMALL, **RUN, **values}
    training.train(Config(train_dir=str(folder / "run"), **given))
    return folder / "run"


@pytest.fixture(scope="module", autouse=True)
def shared():
    with shared_graphs.assembled_once():
        yield


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("trained"))


def file_of(folder, **classes):
    """A file of corrections: `p3=""` leaves picture 3 out, `p3=2` moves it."""
    rows = [f"train picture {name[1:]},{of}\n" for name, of in classes.items()]
    path = folder / "corrections.csv"
    path.write_text("".join(["picture,class\n", *rows]))
    return path


def called(capsys, *words, command=whatif):
    keras.backend.clear_session(free_memory=False)
    code = command.main(argparse.ArgumentParser(), [*map(str, words)])
    return code, capsys.readouterr().out


def values_of(run, step):
    return runs.variables(runs.checkpoint(run, step))


def test_the_next_picture_of_a_class_replaces_a_removed_picture():
    before = np.array([0, 1, 0, 1, 1, 2, 1])
    after = np.array([-1, 1, 2, -1, -1, -1, 1])
    # No picture of class 0 is left. Picture 2 has become the only one of class 2.
    assert stand_ins(before, after).tolist() == [1, 1, 2, 6, 6, 2, 6]
    assert stand_ins(before, np.where(before == 2, -1, before))[5] == 6


def test_changed_pictures_reproduce_a_run_trained_with_them(run_dir, tmp_path, capsys):
    images, labels = IMAGES.copy(), LABELS.copy()
    labels[11] = 0
    images[7], labels[10] = images[13], 2  # 10 is no longer of the class of 7 and 13.
    other = trained(tmp_path, images, labels)
    file = file_of(tmp_path, p7="", p10="class 2", p11="class 0")
    out = tmp_path / "out"
    words = [run_dir, "--steps", f"1:{STEPS}", "--corrections", file, "--out", out]
    code, said = called(capsys, *words)
    assert code == 0
    assert "bit for bit" in said
    assert "without 1 picture (train picture 7)" in said
    assert "2 pictures (train picture 10, train picture 11)" in said
    runs.assert_equal(values_of(out, STEPS), values_of(other, STEPS))
    logged = {line["step"]: line["total_loss"] for line in runs.logged(other)}
    assert {one["step"]: one["total_loss"] for one in runs.logged(out)} == logged


@pytest.mark.parametrize("weights", ["balanced", {"class 0": 4.0}])
def test_classes_weigh_as_in_a_run_trained_with_the_changed_labels(
    tmp_path, capsys, weights
):
    """Those of a table, too: their mean over the training pictures is 1."""
    given, labels = {"class_weights": weights, "max_steps": 4}, LABELS.copy()
    labels[[3, 4, 6, 7]] = 2
    run = trained(tmp_path / "run", **given)
    other = trained(tmp_path / "other", labels=labels, **given)
    file = file_of(tmp_path, p3="class 2", p4="class 2", p6="class 2", p7="class 2")
    out = tmp_path / "out"
    words = [run, "--steps", "1:4", "--corrections", file, "--out", out]
    assert called(capsys, *words)[0] == 0
    runs.assert_equal(values_of(out, 4), values_of(other, 4))


def test_a_setting_changes_only_the_named_steps(run_dir, tmp_path, capsys):
    """Of a rate of 0 in steps 9 to 10, and the run's rate in 11 and 12."""
    out = tmp_path / "out"
    words = ["--steps", "9:10", "--until", STEPS, "--learning_rate", "0"]
    assert called(capsys, run_dir, *words, "--out", out)[0] == 0
    rates = [line["learning_rate"] for line in runs.logged(out)]
    of_run = {line["step"]: line["learning_rate"] for line in runs.logged(run_dir)}
    assert rates == [0.0, 0.0, of_run[11], of_run[12]]
    other = tmp_path / "other"
    words = ["--steps", "9:10", "--learning_rate", "0", "--out", other]
    called(capsys, run_dir, *words)
    reached, before = values_of(other, 10), values_of(run_dir, 8)
    weights = [name for name in before if "/_trainable_variables/" in name]
    assert weights
    for name in weights:
        np.testing.assert_array_equal(reached[name], before[name], err_msg=name)


def test_a_rate_changes_steps_whose_update_xla_compiles(tmp_path, capsys):
    run, out = trained(tmp_path, xla_update=True, max_steps=4), tmp_path / "out"
    words = ["--steps", "3:3", "--until", "4", "--learning_rate", "0", "--out", out]
    assert called(capsys, run, *words)[0] == 0
    rates = [line["learning_rate"] for line in runs.logged(out)]
    assert rates == [0.0, runs.logged(run)[3]["learning_rate"]]


def test_another_rate_of_muon_is_that_of_a_run_begun_with_it(tmp_path, capsys):
    """Biases and heads have rates of their own, which it leaves as they are."""
    muon = {"optimizer": "muon", "schedule": "linear"}
    run = trained(tmp_path / "run", **muon, learning_rate=0.1)
    other = trained(tmp_path / "other", **muon, learning_rate=0.3)
    out = tmp_path / "out"
    words = ["--steps", f"1:{STEPS}", "--learning_rate", "0.3", "--out", out]
    assert called(capsys, run, *words)[0] == 0
    runs.assert_equal(values_of(out, STEPS), values_of(other, STEPS))


def test_a_picture_outside_all_batches_changes_nothing(run_dir, tmp_path, capsys):
    said = rank(run_dir, tmp_path, capsys, *range(48))
    drawn = {int(one) for one in re.findall("in 1 window: train picture (.*)", said)}
    assert len(drawn) == BATCH
    assert f"In no batch of these steps: {48 - BATCH} pictures" in said
    unseen = min({*range(48)} - drawn)
    file = file_of(tmp_path, **{f"p{unseen}": ""})
    _, said = called(capsys, run_dir, "--steps", "3:3", "--corrections", file)
    assert "step 3: the weights are 0 apart" in said
    assert "0 of 48 predictions differ" in said


def rank(run, folder, capsys, *pictures, steps="3:3", windows=1):
    file = file_of(folder, **{f"p{one}": "" for one in pictures})
    words = ["--steps", steps, "--windows", windows, "--each", file]
    code, said = called(capsys, run, *words)
    assert code == 0
    return said


def test_pictures_are_ranked_by_mean_effect_over_windows(run_dir, tmp_path, capsys):
    said = rank(run_dir, tmp_path, capsys, *range(6), steps="1:6", windows=2)
    rows = [line for line in said.splitlines() if "in 2 windows" in line]
    assert len(rows) == 6, "an epoch is six steps"
    effects = [float(row.split()[0]) for row in rows]
    assert effects == sorted(effects)
    assert len({*effects}) == 6
    # The effect of one is what leaving it out alone gives.
    first = rows[0].split("train picture ")[1]
    file = file_of(tmp_path, **{f"p{first}": ""})
    mean = 0.0
    for steps in ("1:6", "7:12"):
        _, said = called(capsys, run_dir, "--steps", steps, "--corrections", file)
        (row,) = [one for one in said.splitlines() if "cross_entropy" in one]
        before, after = map(float, row.split()[1:])
        mean += (after - before) / 2
    assert effects[0] == pytest.approx(mean, abs=2e-4)


def test_a_changed_run_is_scored_and_recomputed_but_not_taken_for_a_trained_run(
    run_dir, tmp_path, capsys
):
    out = tmp_path / "out"
    words = [run_dir, "--steps", "5:8", "--without_class", "class 1", "--out", out]
    assert called(capsys, *words)[0] == 0
    words = ["--train_dir", out, "--run_once"]
    assert "correct of 48 test" in called(capsys, *words, command=eval_command)[1]
    code, said = called(capsys, out)
    assert code == 0
    assert "at most 0 apart" in said
    with pytest.raises(UsageError, match="a changed run and --steps cannot"):
        called(capsys, out, "--steps", "5:6")
    for command, more in ((audit, []), (replay, ["--steps", "5:6"])):
        with pytest.raises(UsageError, match="computed from another run"):
            called(capsys, out, *more, command=command)
    with pytest.raises(UsageError, match="computed from another run"):
        training.train(
            Config.from_values(json.loads((out / "config.json").read_text()))
        )
    listed = called(capsys, out.parent, command=list_runs)[1]
    assert "what if in steps 5 to 8 without 16 pictures" in listed
    # Somebody else's weights are noticed, and another's files are not followed.
    saved = out / "checkpoints" / "step-00000008"
    manifest = json.loads((saved / "manifest.json").read_text())
    for file in saved.iterdir():
        file.unlink()
    saved.rmdir()
    (run_dir / "checkpoints" / "step-00000008").rename(saved)
    try:
        code, said = called(capsys, out)
    finally:
        saved.rename(run_dir / "checkpoints" / "step-00000008")
    assert manifest["step"] == 8
    assert code == 1
    assert "differs from" in said
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "what_if": {"run": "/"}}))
    with pytest.raises(UsageError, match="not written by you"):
        called(capsys, out)


def test_a_changed_run_is_recomputed_on_as_many_towers(run_dir, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--steps", "9:10", "--clip_norm", "0.1", "--num_gpus", "2", "--out", out]
    assert called(capsys, run_dir, *words)[0] == 0
    code, said = called(capsys, out)
    assert code == 0
    assert "at most 0 apart" in said
    shutil.rmtree(out / "checkpoints" / "step-00000010")
    with pytest.raises(UsageError, match="step-00000010"):
        called(capsys, out)


def test_no_change_is_tried_on_an_irreproducible_run(tmp_path, capsys):
    run = trained(tmp_path)
    edit(
        run / "metrics.jsonl",
        lambda lines: [
            {**one, "total_loss": one["total_loss"] + 1e-6} for one in lines
        ],
    )
    words = [
        run,
        "--steps",
        "2:4",
        "--learning_rate",
        "0",
        "--out",
        tmp_path / "out",
    ]
    code, said = called(capsys, *words)
    assert code == 1
    assert re.search(r"Control: step [2-4] differs by .* \(total_loss", said)
    assert "What if" not in said
    assert not (tmp_path / "out").exists()


def test_steps_without_a_record_are_refused_before_they_are_computed(tmp_path, capsys):
    run = trained(tmp_path, log_frequency=6)
    words = ["--until", "5", "--clip_norm", "1", "--num_gpus", "2"]  # Not bit for bit.
    capsys.readouterr()
    with pytest.raises(UsageError, match="No step from 3 to 5 is logged"):
        called(capsys, run, "--steps", "3:4", *words)
    words = ["--steps", "5:6", "--num_gpus", "2", "--windows", "3"]
    with pytest.raises(UsageError, match="No step from 7 to 8 is logged"):
        called(capsys, run, *words, "--each", file_of(tmp_path, p3=""))
    assert not capsys.readouterr().out


def test_steps_that_a_stopped_run_did_not_reach_are_refused(tmp_path, capsys):
    run = trained(tmp_path, max_steps=6)
    edit_config(run, max_steps=STEPS)  # As if a kill had ended it at step 6.
    each = ["--each", file_of(tmp_path, p3=""), "--windows", "3"]
    capsys.readouterr()
    for words in (["--clip_norm", "1", "--until", "9"], each):
        with pytest.raises(UsageError, match="No record goes beyond step 6"):
            called(capsys, run, "--steps", "3:4", *words)
    with pytest.raises(UsageError, match="beyond step 6"):
        called(capsys, run, "--steps", "7:8", "--clip_norm", "1")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "--steps"),
        ("--steps 3:99 --clip_norm 1", "1 to 12"),
        ("--steps 3:4", "Nothing changes"),
        ("--steps 3:4 --clip_norm -1", "clip_norm"),
        ("--steps 3:4 --clip_norm 1 --until 2", "from 4 to 12"),
        ("--steps 3:4 --without_class dog", "class 0, class 1, class 2"),
        ("--steps 3:4 --corrections missing.csv", "cannot be read"),
        ("--steps 3:4 --clip_norm 1 --out .", "--out .* exists"),
        ("--steps 3:4 --clip_norm 1 --out=", "--out .* exists"),
        ("--steps 3:4 --clip_norm 1 --out {file}/out", "--out .* cannot be created in"),
        ("--steps 3:4 --each missing.csv", "--each missing.csv cannot be read"),
        ("--steps 3:4 --each {file} --windows 9", "1 to 5"),
        ("--steps 3:4 --each {file} --out there", "--each and --out cannot"),
        ("--steps 3:4 --each {file} --clip_norm 1", "--each and --clip_norm cannot"),
        ("--steps 3:4 --clip_norm 1 --windows 2", "needs --each"),
    ],
)
def test_impossible_changes_are_refused(run_dir, tmp_path, capsys, words, why):
    words = words.format(file=file_of(tmp_path, p3="")).split()
    with pytest.raises(UsageError, match=why):
        called(capsys, run_dir, *words)
    assert not capsys.readouterr().out, "it has begun to compute"
