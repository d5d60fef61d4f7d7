"""Replaying and auditing runs: the same steps, or the one that differs."""

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import few_images
import runs
import shared_graphs
from cifar10.config.config import Config
from cifar10.config.fields import PRECISIONS
from cifar10.errors import UsageError
from cifar10.evaluation import eval_command
from cifar10.input import datasets
from cifar10.input.pipeline import shuffled_indices
from cifar10.models.step_metrics import STEP_METRICS
from cifar10.run_directory import checkpoints
from cifar10.run_directory.lock import RunLock
from cifar10.tools import audit, replay
from cifar10.towers import rounding
from cifar10.training import replay as replays, train
from cifar10.training.replay import Replay
from forging import edit, folder_of, manifest_of, write_manifest
from small_folders import numbered, write


def trained(train_dir, **values):
    values = {"deterministic": True, "model": runs.SMALL, **values}
    train.train(Config(train_dir=str(train_dir), **values))
    return train_dir


@pytest.fixture(scope="module", autouse=True)
def shared():
    with shared_graphs.assembled_once():
        yield


@pytest.fixture(scope="module")
def stand_in_dir(tmp_path_factory):
    with few_images.stand_in(tmp_path_factory.mktemp("data")) as directory:
        yield directory


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, stand_in_dir):
    """Twenty steps of two towers, interrupted after twelve, with four checkpoints."""
    values = {"num_gpus": 2, "batch_size": 4, "checkpoint_steps": 5}
    values |= {"log_frequency": 2, "eval_steps": 10, "data": "synthetic"}
    values["data_dir"] = str(stand_in_dir)
    folder = tmp_path_factory.mktemp("replayed") / "run"
    trained(folder, max_steps=12, **values)
    return trained(folder, max_steps=20, **values)


@pytest.fixture
def copied(run_dir, tmp_path):
    return shutil.copytree(run_dir, tmp_path / "run")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def called(command, capsys, *words):
    """The exit code of a command, and what it printed."""
    code = command.main(argparse.ArgumentParser(), [str(word) for word in words])
    return code, capsys.readouterr().out


def compared(replayed, first, last):
    """The differences of steps, by step and place."""
    found = [
        one
        for batches in replayed.steps(first, last)
        for one in replayed.compare(batches)
    ]
    return {(step, place): Found(*one) for *one, step, place in found}


class Found(NamedTuple):
    exceeds: bool
    relative: float
    bound: float


METRICS = "learning_rate", *STEP_METRICS, *(f"{name}/average" for name in STEP_METRICS)
GROUPS = ("weights", "averages", "statistics", "optimizer", "counters")
FACTS = (*STEP_METRICS, "first loss", "highest loss", "skipped_steps")
SCORES = ("precision @ 1", "low of precision @ 1", "high of precision @ 1")
SCORES += ("precision @ 5", "macro F1", "balanced accuracy", "total_loss")
SCORES += ("cross_entropy", "penalties", "expected calibration error")


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_replayed_steps_equal_the_runs_on_any_number_of_towers(
    run_dir, capsys, monkeypatch, towers
):
    found, compare = {}, Replay.compare

    def noted(self, batches):
        for difference in compare(self, batches):
            *one, step, place = difference
            found[step, place] = Found(*one)
            yield difference

    monkeypatch.setattr(Replay, "compare", noted)
    before = contents(run_dir)
    words = [run_dir, "--steps", "7:20", "--num_gpus", towers]
    code, said = called(replay, capsys, *words)
    assert code == 0
    assert f"Steps 7 to 20 are equal{'.' if towers == 2 else ''}" in said
    assert ("Not compared bit for bit" in said) is (towers != 2)
    # Only a replay that is exact compares the gradient's norm and each variable.
    metrics = (*METRICS, "gradient_norm") if towers == 2 else METRICS
    # The model has no batch statistics.
    groups = {*GROUPS} - ({"statistics"} if towers == 2 else set())
    assert found.keys() == {
        *((s, f"{name} in metrics.jsonl") for s in range(8, 21, 2) for name in metrics),
        *(
            (s, f"{group} of the checkpoint")
            for s in (10, 12, 15, 20)
            for group in groups
        ),
        *((s, f"{name} in the manifest") for s in (10, 12, 15, 20) for name in FACTS),
        *((s, f"{name} in eval/metrics.jsonl") for s in (10, 20) for name in SCORES),
    }
    assert max(one.relative for one in found.values()) <= (0 if towers == 2 else 1e-5)
    bounds = {one.bound for one in found.values()}
    if towers == 2:
        assert bounds == {0.0, 1e-4}
    else:  # Those of the averages depend on their decay.
        assert {0.0, 0.5, 0.8, 1e-4, 1e-6} < bounds
        assert max(bounds) == 0.8
    assert contents(run_dir) == before


def test_the_first_differing_step_is_named(copied, capsys):
    log = copied / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["step"] == 14:
            line["cross_entropy"] *= 1.0001
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, said = called(replay, capsys, copied, "--steps", "11:20")
    assert code == 1
    assert "in step 14 (cross_entropy in metrics.jsonl)" in said
    assert "Steps 11 to 14 are different: from step 14 on" in said


def test_a_number_removed_from_a_line_before_the_resume_is_missed(copied):
    def shortened(lines):
        return [
            {name: of for name, of in line.items() if name != "cross_entropy"}
            for line in lines
        ]

    edit(copied / "metrics.jsonl", shortened)
    found = compared(Replay(copied), 7, 8)
    exceeding = {place for place, one in found.items() if one.exceeds}
    assert (8, "cross_entropy in metrics.jsonl") in exceeding


def test_the_last_step_named_has_a_record(run_dir, capsys):
    code, said = called(replay, capsys, run_dir, "--steps", "11:13")
    assert code == 0
    assert "Steps 11 to 12 are equal" in said


@pytest.mark.parametrize("name", ["processor", "driver", "tensorflow"])
def test_rounding_by_other_hardware_or_versions_is_distinguished_from_changes(
    copied, capsys, name
):
    """A run that another processor, driver or TensorFlow computed, which rounds so."""
    record = json.loads((copied / "config.json").read_text())
    record["versions"][name] = "another"
    (copied / "config.json").write_text(json.dumps(record))
    log = copied / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]

    def replayed(step, factor):
        for line in lines:
            line["cross_entropy"] *= factor if line["step"] >= step else 1
        log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        trusted = "--trust_model", "small_model:two_layers"
        return called(replay, capsys, copied, "--steps", "11:20", *trusted)

    code, said = replayed(1, 1)
    assert code == 0
    assert "Steps 11 to 20 are equal." in said
    code, said = replayed(14, 1.0001)
    assert code == 0
    assert "are equal but for rounding: from step 14 on" in said
    assert f"{name} in config.json is another, but " in said
    code, said = replayed(16, 3)
    assert code == 1
    assert "Steps 11 to 16 are different: from step 14 on" in said


def test_a_run_without_a_recorded_processor_may_round_differently(copied):
    """As earlier versions wrote it, perhaps on another machine."""
    assert not Replay(copied).why_not_exact
    record = json.loads((copied / "config.json").read_text())
    assert record["versions"].pop("processor")
    (copied / "config.json").write_text(json.dumps(record))
    assert "processor in config.json is unknown" in Replay(copied).why_not_exact


def test_other_devices_at_an_early_start_may_have_rounded_differently(copied):
    """Its checkpoints, whose links would say so, may be deleted."""
    edit(
        copied / "starts.jsonl",
        lambda lines: [{**lines[0], "devices": "8 towers on H100"}, *lines[1:]],
    )
    assert "devices in the start at step 0" in Replay(copied).why_not_exact


def test_other_parts_of_a_batch_may_have_rounded_differently(stand_in_dir, tmp_path):
    values = {"data": "synthetic", "data_dir": str(stand_in_dir), "checkpoint_steps": 5}
    trained(tmp_path / "run", batch_size=8, max_steps=5, **values)
    trained(tmp_path / "run", batch_size=4, accumulate=2, max_steps=10, **values)
    why = Replay(tmp_path / "run").why_not_exact
    assert "accumulate in the chain at step 5 is 1, but 2 here" in why


def precision_bounds():
    """The bounds by precision, as docs/auditing.md has them."""
    page = Path(__file__).parents[2] / "docs" / "auditing.md"
    table = re.compile(r"^\| ((?:b?float\d+(?:, )?)+) \|(.*)\|$", re.MULTILINE)
    rows = table.findall(page.read_text())
    columns = {names: row.split("|") for names, row in rows}
    return {
        name: (float(row[0]), float(row[2]))
        for names, row in columns.items()
        for name in names.split(", ")
    }


def test_bounds_are_documented():
    bounds = {
        name: (replays._BOUNDS[name], bound)
        for name, bound in rounding.ROUNDING.items()
    }
    assert precision_bounds() == bounds
    assert {*bounds} == {*PRECISIONS}


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_other_towers_differ_within_the_bound_of_the_precision(
    tmp_path, stand_in_dir, precision
):
    values = {"accumulate": 4, "batch_size": 4, "data": "synthetic", "max_steps": 10}
    values |= {"data_dir": str(stand_in_dir), "log_frequency": 1, "eval_steps": 10}
    values |= {"precision": precision, "deterministic": False, "num_gpus": 1}
    run = trained(tmp_path / "run", **values)
    bound, of_scores = precision_bounds()[precision]
    found = compared(Replay(run, 4), 1, 10)
    assert {bound, of_scores} <= {one.bound for one in found.values()}
    assert all(one.relative <= one.bound / 5 for one in found.values())
    factors = {"total_loss": 1.5 / (1 - bound), "cross_entropy": 1 + bound / 2}
    edit(
        run / "metrics.jsonl",
        lambda lines: [
            line | {name: line[name] * factor for name, factor in factors.items()}
            for line in lines
        ],
    )
    found = compared(Replay(run, 4), 1, 10)
    assert found[5, "total_loss in metrics.jsonl"].exceeds
    assert not found[5, "cross_entropy in metrics.jsonl"].exceeds


@pytest.mark.parametrize("kind", ["of val", "of few images"])
def test_scores_are_compared_on_the_scored_images(tmp_path, stand_in_dir, capsys, kind):
    values = {"batch_size": 4, "data": "synthetic", "data_dir": str(stand_in_dir)}
    values |= {"max_steps": 4, "eval_steps": 4} if kind == "of val" else {}
    values |= {"val_fraction": 0.2} if kind == "of val" else {"max_steps": 4}
    run = trained(tmp_path / "run", num_gpus=1, **values)
    log = run / "eval_val" / "metrics.jsonl"
    if kind == "of few images":
        log = run / "eval" / "metrics.jsonl"
        words = ["--train_dir", run, "--run_once", "--num_examples", 20]
        called(eval_command, capsys, *words)
    capsys.readouterr()
    assert audited(run, capsys)["agree"] == 1.0
    edit(log, better_score)
    (found,) = audited(run, capsys)["differences"]
    place = f"precision @ 1 in {log.parent.name}/metrics.jsonl"
    assert found[2:] == [4, place]
    edit(log, lambda lines: [{**one, "num_examples": 10**6} for one in lines])
    (found,) = audited(run, capsys)["differences"]
    assert "there are only" in found[3]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_score_that_no_number_of_images_has_is_found(
    tmp_path, stand_in_dir, capsys, precision
):
    """By less than the bound on rounding, too."""
    values = {"batch_size": 4, "data": "synthetic", "data_dir": str(stand_in_dir)}
    values |= {"max_steps": 4, "precision": precision}
    run = trained(tmp_path / "run", num_gpus=1, **values)
    words = ["--train_dir", run, "--run_once", "--num_examples", 100]
    called(eval_command, capsys, *words)
    capsys.readouterr()
    assert not audited(run, capsys)["differs"]
    log, name = run / "eval" / "metrics.jsonl", "precision @ 1"
    intact = log.read_text()
    (line,) = map(json.loads, intact.splitlines())
    for rise in (0.0001, 0.03):
        log.write_text(json.dumps(line | {name: line[name] + rise}) + "\n")
        assert audited(run, capsys)["differs"], rise
        log.write_text(intact)


def test_scores_of_a_run_with_others_weights_are_compared_at_its_beginning(
    tmp_path, stand_in_dir, capsys
):
    values = {"batch_size": 4, "data": "synthetic", "data_dir": str(stand_in_dir)}
    values |= {"num_gpus": 1, "max_steps": 8, "checkpoint_steps": 4, "eval_steps": 4}
    first = trained(tmp_path / "first", **values)
    run = trained(tmp_path / "run", **values, initial_weights=str(first))
    capsys.readouterr()
    assert not audited(run, capsys)["differs"]
    log = run / "eval" / "metrics.jsonl"
    edit(log, lambda lines: [*better_score(lines[:1]), *lines[1:]])
    (found,) = audited(run, capsys)["differences"]
    assert found[2:] == [4, "precision @ 1 in eval/metrics.jsonl"]


@pytest.mark.parametrize("steps", ["5:21", "9:8", "0:3", "5", "a:b"])
def test_missing_steps_are_refused(run_dir, capsys, steps):
    with pytest.raises(UsageError, match="steps 1 to 20"):
        called(replay, capsys, run_dir, "--steps", steps)


def test_steps_without_a_record_are_refused(run_dir, capsys):
    with pytest.raises(UsageError, match="7:7: no step is logged"):
        called(replay, capsys, run_dir, "--steps", "7:7")


def test_a_folder_for_pages_is_refused_before_steps_are_computed(
    run_dir, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    (file := tmp_path / "file").write_text("")
    for folder, why in (
        (file, f"{file} cannot be created in"),
        (file / "pages", f"{file}/pages cannot be created in"),
        ("~/file", f"{file} cannot be created in"),
    ):
        words = ["--steps", "7:8", "--images", folder]
        with pytest.raises(UsageError, match=f"--images {why}"):
            called(replay, capsys, run_dir, *words)
    with pytest.raises(UsageError, match="--images: the value is empty"):
        called(replay, capsys, run_dir, "--steps", "7:8", "--images", "")


def test_later_steps_without_a_record_are_named(run_dir, capsys):
    code, said = called(replay, capsys, run_dir, "--steps", "7:9")
    assert code == 0
    assert "Steps 7 to 8 are equal" in said
    assert "no record of later steps to compare, to 9" in said
    assert "no record" not in called(replay, capsys, run_dir, "--steps", "7:8")[1]


def test_a_damaged_checkpoint_is_named(copied, capsys):
    (folder_of(copied, 10) / "state.index").write_bytes(b"")
    with pytest.raises(UsageError, match=r"step-00000010.*differs from its SHA-256"):
        called(replay, capsys, copied, "--steps", "11:12")


def test_other_data_is_refused(copied, capsys):
    config = json.loads((copied / "config.json").read_text())
    config["data_fingerprint"] = "of other data"
    (copied / "config.json").write_text(json.dumps(config))
    trusted = ["--trust_model", runs.SMALL]
    with pytest.raises(UsageError, match="data_fingerprint"):
        called(replay, capsys, copied, "--steps", "5:6", *trusted)


def test_steps_beyond_the_end_of_a_run_are_refused(copied, capsys):
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_steps": 12}))
    trusted = ["--trust_model", runs.SMALL]
    with pytest.raises(UsageError, match="steps 1 to 12"):
        called(replay, capsys, copied, "--steps", "12:13", *trusted)
    assert called(replay, capsys, copied, "--steps", "11:12", *trusted)[0] == 0


def test_each_image_has_its_name_and_loss(run_dir):
    replayed = Replay(run_dir)
    images = replayed.images(next(replayed.steps(8, 8)))
    (line,) = (line for line in runs.logged(run_dir) if line["step"] == 8)
    assert np.mean([loss for _, loss, *_ in images]) == pytest.approx(
        line["cross_entropy"], rel=1e-5
    )
    pictures, _ = datasets.find_for(replayed.recorded.config.dataset).read("train")
    for *_, name, png in images:
        place = int(name.removeprefix("train picture "))
        np.testing.assert_array_equal(tf.io.decode_png(png), pictures[place])


def test_an_image_alone_is_computed_with_frozen_statistics(tmp_path, stand_in_dir):
    """As in its batch: else batch norm would scale it by itself."""
    values = {"batch_size": 4, "data": "synthetic", "data_dir": str(stand_in_dir)}
    values |= {"num_gpus": 1, "max_steps": 2, "log_frequency": 1, "distortions": "none"}
    values |= {"model": "small_model:normalized", "freeze": "all-but-head"}
    run = trained(tmp_path / "run", **values)
    replayed = Replay(run)
    images = replayed.images(next(replayed.steps(2, 2)))
    (_, line) = runs.logged(run)
    assert np.mean([loss for _, loss, *_ in images]) == pytest.approx(
        line["cross_entropy"], rel=1e-4
    )
    alone = replayed.training.towers._results
    assert alone.experimental_get_tracing_count() == 1


# Images planted among those that are bright on the left, 0, or on the right, 1.
PLANTED = {
    "all white": lambda images, labels: images[40].fill(255),
    "a wrong label": lambda images, labels: labels.__setitem__(40, 1 - labels[40]),
    "values out of the others' range": lambda images, labels: (
        images[40, ::2].fill(0),
        images[40, 1::2].fill(255),
    ),
    "not finite": lambda images, labels: images[40].fill(255),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_image_and_its_step_are_found(tmp_path, capsys, monkeypatch, kind):
    """Of 20 steps, one has the image, and none is computed more often than twice."""
    rng = np.random.default_rng(0)
    images = rng.integers(60, 90, (160, 32, 32, 3), np.uint8)
    labels = np.arange(160) % 2
    images[labels == 0, :, :16] += 90
    images[labels == 1, :, 16:] += 90
    PLANTED[kind](images, labels)
    arrays = {"x_train": images, "y_train": labels}
    arrays |= {"x_test": images[:4], "y_test": labels[:4]}
    np.savez(tmp_path / "set.npz", **arrays)
    values = {"data": str(tmp_path / "set.npz"), "batch_size": 4, "num_gpus": 2}
    values |= {"distortions": "none", "max_steps": 60, "checkpoint_steps": 20}
    if kind == "not finite":
        values |= {"model": "small_model:trapped", "on_nan": "skip"}
    run = trained(tmp_path / "run", **values)
    capsys.readouterr()
    computed, original = [], Replay.advance

    def advance(self, batches):
        computed.append(self.step + 1)
        return original(self, batches)

    monkeypatch.setattr(Replay, "advance", advance)
    words = [run, "--steps", "41:60", "--find", "--images", tmp_path / "pages"]
    code, said = called(replay, capsys, *words)
    assert code == 0
    first, second, *_ = said.splitlines()[-5:]
    position = [*shuffled_indices(tf.range(320, 480, dtype=tf.int64), 160, 0)].index(40)
    step = 41 + position // 8
    assert first.startswith(f"Step {step}: ")
    assert second.startswith("  train picture 40: norm ")
    assert [path.name for path in (tmp_path / "pages").iterdir()] == [
        f"step-{step:08d}.html"
    ]
    assert len(computed) < 20 * np.log2(20)


def test_the_step_before_a_loss_rises_for_good_is_found(run_dir, monkeypatch):
    """Later steps with still larger losses are what the first one has caused."""
    replayed = Replay(run_dir)
    norms = dict(enumerate([2, 5, 0.1, 2, 1.5, 90, 400, 900, 950], 7))
    monkeypatch.setattr(Replay, "steps", lambda self, *_: range(len(norms)))

    def advance(self, at):
        self.step = 7 + at
        return {"cross_entropy": norms[self.step] / 9, "gradient_norm": 1.0}

    monkeypatch.setattr(Replay, "advance", advance)
    assert replayed.find(8, 15) == (12, 10.0, 1.0)
    norms |= {9: np.inf, 10: np.inf, 12: np.inf}
    assert replayed.find(8, 15)[0] == 9
    assert replayed.find(10, 15)[0] == 10


def test_a_nonfinite_gradient_counts_as_the_largest(tmp_path, stand_in_dir, capsys):
    values = {"data": "synthetic", "data_dir": str(stand_in_dir), "batch_size": 8}
    with pytest.raises(UsageError):
        trained(tmp_path / "run", learning_rate=1e30, max_steps=6, **values)
    words = [tmp_path / "run", "--steps", "1:6", "--find"]
    code, said = called(replay, capsys, *words)
    assert code == 0
    assert re.search(r"^Step 2: cross entropy inf, norm inf", said, re.MULTILINE)


@pytest.fixture(scope="module")
def on_pictures(tmp_path_factory):
    """A run on a folder of pictures whose model has batch norm, in two batches."""
    folder = tmp_path_factory.mktemp("pictures")
    write(folder / "photos", *numbered(12, "cat", "dog"))
    values = {"data": str(folder / "photos"), "image_size": 8, "accumulate": 2}
    values |= {"batch_size": 4, "max_steps": 10, "checkpoint_steps": 5}
    return trained(folder / "run", model="small_model:normalized", **values)


def test_a_run_on_pictures_is_replayed_on_another_number_of_towers(
    on_pictures, capsys, tmp_path
):
    words = [on_pictures, "--steps", "7:10", "--num_gpus", 2, "--images", tmp_path]
    code, _ = called(replay, capsys, *words)
    assert code == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        f"step-{step:08d}.html" for step in range(7, 11)
    }
    replayed = Replay(on_pictures, 2)
    names = {name for *_, name, _ in replayed.images(next(replayed.steps(7, 7)))}
    assert len(names) == 8
    page = (tmp_path / "step-00000007.html").read_text()
    assert page.count("<img ") == sum(f"{name}: " in page for name in names) == 8
    assert all(re.fullmatch(r"(cat|dog)/\d+.png", name) for name in names)


@pytest.mark.parametrize(
    ("towers", "why"),
    [(3, "--num_gpus 3: the run's 8 images a step do not divide"), (4, "batch_size")],
)
def test_a_number_of_towers_with_other_results_is_refused(
    on_pictures, capsys, towers, why
):
    """Four towers would have other batches, and so other statistics."""
    words = [on_pictures, "--steps", "7:10", "--num_gpus", towers]
    with pytest.raises(UsageError, match=why) as refused:
        called(replay, capsys, *words)
    assert "--global_batch_size" not in str(refused.value), "replay has no such flag"


# Audits.


def audited(run, capsys, segments=9, seed=0):
    words = [run, "--segments", segments, "--seed", seed, "--json"]
    code, said = called(audit, capsys, *words, "--trust_model", runs.SMALL)
    found = json.loads(said)
    assert code == bool(found["breaks"] or found["differences"])
    return found


def assert_verified(found, linked):
    assert not found["breaks"] + found["differences"]
    assert (found["linked"], found["agree"], found["missed"]) == (linked, 1.0, 0.0)


def test_an_honest_run_is_verified(run_dir, capsys):
    assert_verified(audited(run_dir, capsys), 5)  # One of the interruption, too.
    code, said = called(audit, capsys, run_dir, "--segments", 2)
    assert code == 0
    assert "missed:      0.6\n" in f"{said}\n"  # Three of five segments miss the one.


def test_the_seed_decides_the_recomputed_segments(run_dir, capsys, monkeypatch):
    recomputed = []

    def noted(_, first, last):
        recomputed.append([first - 1, last])
        return (False, 0.0, 0.0, last, "a place"), None, last

    monkeypatch.setattr(audit, "compare", noted)
    drawn = [audited(run_dir, capsys, 2, seed)["recomputed"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert recomputed == [segment for of in drawn for segment in of]


@pytest.mark.parametrize("link", [{}, {"chain": {"seed": 0, "chain.jsonl": "0" * 64}}])
def test_a_run_without_a_chain_is_verified(copied, capsys, link):
    for step in (5, 10, 12):
        manifest = manifest_of(copied, step)
        del manifest["chain"]
        write_manifest(copied, step, manifest | link)
    forge(copied)
    assert_verified(audited(copied, capsys), 2)


def test_a_run_resumed_from_an_earlier_step_keeps_its_chain(copied, capsys):
    shutil.rmtree(folder_of(copied, 20))
    values = json.loads((copied / "config.json").read_text())
    names = ("num_gpus", "batch_size", "checkpoint_steps", "log_frequency")
    names += ("eval_steps", "data", "data_dir", "max_steps")
    trained(copied, **{name: values[name] for name in names})
    capsys.readouterr()
    assert_verified(audited(copied, capsys), 5)


def test_a_deleted_checkpoint_does_not_break_the_chain(copied, capsys):
    shutil.rmtree(folder_of(copied, 10))
    assert_verified(audited(copied, capsys), 4)


def trapping(path, *traps):
    """Writes 64 images, `traps` with an infinite loss; returns flags for them."""
    images = np.random.default_rng(0).integers(0, 200, (64, 32, 32, 3), np.uint8)
    images[[*traps]] = 255
    labels = np.arange(64) % 2
    arrays = {"x_train": images, "y_train": labels}
    np.savez(path, **arrays, x_test=images[:4], y_test=labels[:4])
    values = {"data": str(path), "model": "small_model:trapped", "batch_size": 4}
    values |= {"num_gpus": 1, "distortions": "none"}
    return {**values, "checkpoint_steps": 2, "log_frequency": 1}


def test_a_run_with_rollbacks_is_verified(tmp_path, capsys):
    """Of the checkpoints, only the newest and those of the rollbacks are kept."""
    values = trapping(tmp_path / "set.npz", 7, 30) | {"max_steps": 14}
    values |= {"on_nan": "rollback", "keep_checkpoints": 1}
    run = trained(tmp_path / "run", **values)
    assert capsys.readouterr().err.count("ROLLED BACK") >= 2
    code, said = called(audit, capsys, run, "--segments", 9, "--json")
    assert code == 0
    assert_verified(json.loads(said), len(checkpoints.steps(run / "checkpoints")))
    code, said = called(replay, capsys, run, "--steps", "1:14")
    assert (code, "Steps 1 to 14 are equal" in said) == (0, True), said


@pytest.mark.parametrize("policies", [("stop", "skip"), ("skip", "stop")])
def test_a_run_whose_policy_changed_at_a_resume_is_verified(tmp_path, capsys, policies):
    """As the message of a stop advises; step 6 has an image of infinite loss."""
    (trap,) = shuffled_indices(tf.range(20, 21, dtype=tf.int64), 64, 0).numpy()
    values, run = trapping(tmp_path / "set.npz", trap), tmp_path / "run"
    for on_nan, end in zip(
        policies, (5 if policies[0] == "stop" else 7, 10), strict=True
    ):
        trained(run, on_nan=on_nan, max_steps=end, **values)
    capsys.readouterr()
    code, said = called(audit, capsys, run, "--segments", 9, "--json")
    found = json.loads(said)
    assert code == 0, found["breaks"] + found["differences"]
    assert_verified(found, len(checkpoints.steps(run / "checkpoints")))
    # In the session that skips, each line has to have the right number.
    log = run / "metrics.jsonl"
    count = ', "skipped_steps": 1'
    lines = log.read_text().splitlines(keepends=True)
    (at,) = [n for n, one in enumerate(lines) if json.loads(one)["step"] == 7]
    for changed in (', "skipped_steps": 2', ""):
        assert count in lines[at]
        log.write_text(
            "".join(lines).replace(lines[at], lines[at].replace(count, changed))
        )
        code, said = called(replay, capsys, run, "--steps", "7:7")
        assert (code, "skipped_steps in metrics.jsonl" in said) == (1, True), said


def test_an_honest_run_with_nonfinite_scores_is_verified(
    tmp_path, stand_in_dir, capsys
):
    values = {"data": "synthetic", "data_dir": str(stand_in_dir), "batch_size": 4}
    values |= {"learning_rate": 1e20, "max_steps": 1, "eval_steps": 1}
    run = trained(tmp_path / "run", **values)
    assert '"cross_entropy": null' in (run / "eval/metrics.jsonl").read_text()
    capsys.readouterr()
    assert_verified(audited(run, capsys), 1)


def test_a_run_in_progress_is_refused(run_dir, capsys):
    with RunLock(run_dir), pytest.raises(UsageError, match="still"):
        called(audit, capsys, run_dir)


def test_numbers_below_one_are_refused(run_dir, capsys):
    """An audit of no segment would pass whatever was done to the run."""
    for flag in ("--segments", "--num_gpus"):
        for number in (0, -1):
            with pytest.raises(UsageError, match=f"{flag} {number}"):
                called(audit, capsys, run_dir, flag, number)


def test_strange_numbers_of_towers_are_refused(copied, capsys):
    path = copied / "config.json"
    config = json.loads(path.read_text()) | {"towers": 10**9}
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError):
        called(audit, capsys, copied, "--trust_model", runs.SMALL)


@pytest.mark.parametrize("name", ["towers", "accumulate"])
def test_a_run_recorded_without_towers_or_accumulation_is_replayed(
    copied, capsys, name
):
    path = copied / "config.json"
    config = json.loads(path.read_text())
    del config[name]
    path.write_text(json.dumps(config))
    words = (copied, "--trust_model", runs.SMALL, "--steps", "1:2")
    assert called(replay, capsys, *words, "--data_dir", config["data_dir"])[0] == 0


# Tampering.


def forge(run):
    """Writes all links anew, so that the chain fits what is there."""
    for step in checkpoints.steps(run / "checkpoints"):
        manifest, states = manifest_of(run, step), folder_of(run, step).glob("state*")
        manifest["files"] = {path.name: checkpoints._sums(path) for path in states}
        if settings := manifest.get("chain", {}).get("settings"):
            manifest["chain"] = checkpoints.make_link(
                run / "checkpoints", step, settings
            )
        write_manifest(run, step, manifest)


def change_manifest(run, step, **changes):
    """Changes the manifest of a step, with its digest."""
    write_manifest(run, step, manifest_of(run, step) | changes)


def add_to_a_weight(run):
    """Changes one weight of the checkpoint of step 15 by a thousandth."""
    replayed = Replay(run)
    next(replayed.steps(16, 16))
    state = replayed._state
    kernel = state.model.trainable_variables[0]
    change = np.zeros(kernel.shape)
    change.flat[3] = 1e-3
    kernel.assign_add(change)
    written = checkpoints.save(run, state.trackables(), step=15, facts={})
    for path in written.glob("state*"):
        shutil.copy(path, folder_of(run, 15))
    shutil.rmtree(written)


def better_loss(lines):
    return [{**one, "total_loss": one["total_loss"] * 0.99} for one in lines]


def better_score(lines):
    return [{**one, "precision @ 1": one["precision @ 1"] + 1e-3} for one in lines]


def swap(run):
    one, two = folder_of(run, 10), folder_of(run, 15)
    one.rename(run / "aside")
    two.rename(one)
    (run / "aside").rename(two)


def leave_out_batches(run):
    for step in (15, 20):
        change_manifest(run, step, left_out=3)
    forge(run)


def insert(run):
    """Adds a checkpoint of step 7 that is the one of step 5."""
    shutil.copytree(folder_of(run, 5), folder_of(run, 7))
    write_manifest(run, 7, manifest_of(run, 7) | {"step": 7})


def another_seed(run):
    path = run / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


# By what each is found: the chain, or segments that begin at these steps.
TAMPERED = {
    "a manifest, cut short": (
        lambda run: os.truncate(folder_of(run, 10) / "manifest.json", 9),
        None,
    ),
    "a weight": (add_to_a_weight, None),
    "a weight, and its digests": (
        lambda run: (add_to_a_weight(run), forge(run)),
        {12, 15},
    ),
    "a loss in the log": (lambda run: edit(run / "metrics.jsonl", better_loss), None),
    "a loss in the log, and its digest": (
        lambda run: (edit(run / "metrics.jsonl", better_loss), forge(run)),
        {0, 5, 10, 12, 15},
    ),
    "a score": (
        lambda run: edit(run / "eval" / "metrics.jsonl", better_score),
        {5, 15},
    ),
    "a removed line of the log": (
        lambda run: edit(run / "metrics.jsonl", lambda lines: lines[1:]),
        None,
    ),
    "a swapped checkpoint": (swap, None),
    "a checkpoint in between": (insert, None),
    "batches left out": (leave_out_batches, {12, 15}),
    "a manifest, and its digest": (
        lambda run: change_manifest(run, 10, skipped_steps=1),
        None,
    ),
    "another seed": (another_seed, None),
    "the types of a link": (
        lambda run: change_manifest(
            run, 20, chain={"settings": {"seed": [1]}, "step": [1], "log": 5}
        ),
        None,
    ),
    "the types of the log": (
        lambda run: edit(
            run / "metrics.jsonl",
            lambda lines: [
                {"step": "x"},
                {"step": [1]},
                {"step": 10**12},
                *(
                    {**one, "total_loss": [1], "gradient_norm": 10**400}
                    for one in lines
                ),
            ],
        ),
        None,
    ),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_tampering_is_found(copied, capsys, kind):
    tamper, segments = TAMPERED[kind]
    tamper(copied)
    found = audited(copied, capsys)
    ends = [step for _, _, step, _ in found["differences"]]
    begun = {
        first
        for first, last in found["recomputed"]
        for end in ends
        if first < end <= last
    }
    if segments is None:
        assert found["breaks"]
        assert found["agree"] == 0.0
    else:
        assert not found["breaks"]
        assert begun == segments


def test_a_log_with_other_types_counts_as_different(copied, capsys):
    tamper, _ = TAMPERED["the types of the log"]
    tamper(copied)
    assert called(replay, capsys, copied, "--steps", "1:4")[0] == 1


def test_an_edited_configuration_is_found_by_the_chain(copied, capsys):
    another_seed(copied)
    with pytest.raises(UsageError, match="edited"):
        called(audit, capsys, copied)
    breaks = audited(copied, capsys)["breaks"]
    assert "checkpoint of step 5: seed was 0, but is 1 in config.json" in breaks


def test_exchanged_weights_of_a_resumed_run_are_found(stand_in_dir, tmp_path, capsys):
    values = {"batch_size": 4, "checkpoint_steps": 5, "data": "synthetic"}
    values["data_dir"] = str(stand_in_dir)
    stolen = trained(tmp_path / "stolen", max_steps=10, seed=1, **values)
    run = trained(tmp_path / "run", max_steps=10, **values)
    for path in folder_of(stolen, 10).glob("state*"):
        shutil.copy(path, folder_of(run, 10))
    forge(run)
    trained(run, max_steps=20, **values)
    capsys.readouterr()
    found = audited(run, capsys)
    assert not found["breaks"]
    assert [one[2:] for one in found["differences"]] == [
        [10, "averages of the checkpoint"]
    ]
