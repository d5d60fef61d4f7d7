"""Replaying and auditing runs: the same steps, or the one that differs."""

import argparse
import hashlib
import json
import re
import shutil

import numpy as np
import pytest

import runs
from cifar10.config import run_config
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.process import files
from cifar10.run_directory import chain, checkpoints, lock, logs
from cifar10.tools import audit, replay
from cifar10.training import train
from cifar10.training.replay import Replay
from small_folders import numbered, write


def trained(train_dir, **values):
    values = {"deterministic": True, "model": runs.SMALL, **values}
    train.train(Config(train_dir=str(train_dir), **values))
    return train_dir


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


@pytest.mark.parametrize("towers", [1, 2, 4])
def test_steps_are_the_runs_on_any_number_of_towers(run_dir, capsys, towers):
    before = contents(run_dir)
    words = [run_dir, "--steps", "7:20", "--num_gpus", towers]
    code, said = called(replay, capsys, *words)
    assert code == 0
    assert "Steps 7 to 20: the largest relative difference is" in said
    found = [*Replay(run_dir, towers).compare(7, 20)]
    assert {(one.step, one.place) for one in found} == {
        *((step, "log") for step in range(8, 21, 2)),
        *((step, "checkpoint") for step in (10, 12, 15, 20)),
        *((step, "scores") for step in (10, 20)),
    }
    scores = {one.largest for one in found if one.place == "scores"}
    assert max(scores) < 1e-6  # The run has scored in batches of another size.
    others = {one.largest for one in found if one.place != "scores"}
    assert max(others) <= (0 if towers == 2 else 1e-5)
    assert contents(run_dir) == before


def test_the_first_step_that_differs_is_named(copied, capsys):
    log = copied / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["step"] == 14:
            line["cross_entropy"] *= 1.0001
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    code, said = called(replay, capsys, copied, "--steps", "11:20")
    assert code == 1
    assert "step 14." in said
    assert "cross_entropy" in said


def test_steps_that_the_run_has_not_are_refused(run_dir):
    for steps in ("5:21", "9:8"):
        with pytest.raises(UsageError, match="20 steps"):
            replay.main(argparse.ArgumentParser(), [str(run_dir), "--steps", steps])


def test_other_data_is_named(copied):
    config = json.loads((copied / "config.json").read_text())
    config["data_fingerprint"] = "of other data"
    (copied / "config.json").write_text(json.dumps(config))
    words = [str(copied), "--steps", "5:6", "--trust_model", runs.SMALL]
    with pytest.raises(UsageError, match="data_fingerprint"):
        replay.main(argparse.ArgumentParser(), words)


def test_fewer_steps_than_the_run_has_are_named(copied, capsys):
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_steps": 12}))
    trusted = ["--trust_model", runs.SMALL]
    with pytest.raises(UsageError, match=r"Step 13 .* max_steps, 12"):
        called(replay, capsys, copied, "--steps", "12:13", *trusted)
    with pytest.raises(UsageError, match="max_steps"):
        called(audit, capsys, copied, *trusted)
    assert called(replay, capsys, copied, "--steps", "11:12", *trusted)[0] == 0


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run on dark and bright images, one of which is bright and called dark."""
    folder = tmp_path_factory.mktemp("broken")
    rng = np.random.default_rng(0)
    labels = np.arange(96) % 2
    images = rng.integers(0, 60, (96, 32, 32, 3)) + 150 * labels[:, None, None, None]
    images[40] = 255
    arrays = {"x_train": images.astype(np.uint8), "y_train": labels}
    tested = {"x_test": arrays["x_train"][:4], "y_test": labels[:4]}
    np.savez(folder / "set.npz", **arrays, **tested)
    values = {"data": str(folder / "set.npz"), "batch_size": 8, "num_gpus": 2}
    values |= {"distortions": "none", "max_steps": 90, "checkpoint_steps": 30}
    return trained(folder / "run", log_frequency=1, **values)


def test_the_image_that_broke_a_step_is_found(broken, capsys, tmp_path):
    words = [broken, "--steps", "60:90", "--find", "--images", tmp_path / "new"]
    code, said = called(replay, capsys, *words)
    assert code == 0
    assert said.splitlines()[1].startswith("  train picture 40: norm ")
    assert [path.suffix for path in sorted(tmp_path.glob("new/*"))] == [".csv", ".png"]


def test_images_are_not_blamed_for_variables_that_are_too_large(tmp_path, capsys):
    with pytest.raises(UsageError):
        trained(tmp_path / "run", learning_rate=1e30, max_steps=6)
    words = [tmp_path / "run", "--steps", "1:6", "--find"]
    code, said = called(replay, capsys, *words)
    assert (code, "no image caused this" in said) == (1, True), said


def test_steps_without_a_jump_say_so(run_dir, capsys):
    code, said = called(replay, capsys, run_dir, "--steps", "11:20", "--find")
    assert code == 1
    assert "gradient never jumps" in said


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
    table = (tmp_path / "step-00000007.csv").read_text().splitlines()
    assert table[0] == "image,class,cross entropy"
    assert len({line.split(",")[0] for line in table[1:]}) == 8
    assert all(re.fullmatch(r"(cat|dog)/\d+.png,\1,\d.*", line) for line in table[1:])


@pytest.mark.parametrize("towers", [3, 4])
def test_a_number_of_towers_that_changes_the_result_is_refused(on_pictures, towers):
    """Four towers would have other batches, and so other statistics."""
    words = [on_pictures, "--steps", "7:10", "--num_gpus", towers]
    with pytest.raises(UsageError, match=f"(?s)--num_gpus {towers}: .* divides 2,"):
        replay.main(argparse.ArgumentParser(), [*map(str, words)])


# Audits.


def audited(run, capsys, segments=9, seed=0):
    words = [run, "--segments", segments, "--seed", seed, "--json"]
    code, said = called(audit, capsys, *words)
    found = json.loads(said)
    assert code == bool(found["breaks"] or found["differences"])
    return found


def test_an_honest_run_is_verified(run_dir, capsys):
    found = audited(run_dir, capsys)
    assert not found["breaks"] + found["differences"]
    assert found["verified"] == 1.0
    assert found["passes"] == 0.0
    assert found["chain"] == 5  # One of the interruption, too.
    code, said = called(audit, capsys, run_dir, "--segments", 2)
    assert code == 0
    assert "60%" in said  # That three of five segments miss the one.


def test_draws_are_the_seeds(run_dir, capsys):
    drawn = [audited(run_dir, capsys, 2, seed)["segments"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_run_of_before_has_no_chain_and_is_replayed(copied, capsys):
    (copied / chain.FILE).unlink()
    for path in copied.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["chain"], manifest["sha256"]
        manifest["sha256"] = checkpoints.digest_of(manifest)
        path.write_text(json.dumps(manifest))
    found = audited(copied, capsys)
    assert (found["chain"], found["unchained"]) == (0, 20)
    assert not found["differences"] + found["breaks"]


def test_a_run_begun_by_an_earlier_version_says_where_its_chain_begins(copied, capsys):
    links = chain.read(copied)
    del links[12]["chain"]  # A run adds the checkpoint that it resumes from.
    edit(copied / chain.FILE, lambda _: [links[step] for step in (12, 15, 20)])
    for step in (5, 10):
        path = folder_of(copied, step) / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["chain"], manifest["sha256"]
        write_manifest(path.parent, manifest)
    forge(copied)
    code, said = called(audit, capsys, copied, "--segments", 1)
    assert code == 0
    assert "2 checkpoints; earlier ones, up to step 12, have no chain" in said


def folder_of(run, step):
    return checkpoints.folder(run / "checkpoints", step)


def test_a_run_that_takes_steps_back_keeps_its_chain(copied, capsys):
    shutil.rmtree(folder_of(copied, 20))
    values = json.loads((copied / "config.json").read_text())
    names = ("num_gpus", "batch_size", "checkpoint_steps", "log_frequency")
    names += ("eval_steps", "data", "data_dir", "max_steps")
    trained(copied, **{name: values[name] for name in names})
    capsys.readouterr()
    found = audited(copied, capsys, 1)
    assert found["chain"] == 5 == len((copied / chain.FILE).read_text().splitlines())
    assert not found["breaks"]


def test_a_run_in_progress_is_refused(run_dir, capsys):
    with lock.RunLock(run_dir), pytest.raises(UsageError, match="still"):
        called(audit, capsys, run_dir)


def test_strange_numbers_of_towers_are_refused(copied, capsys):
    path = copied / "config.json"
    for towers in (0, -2, 10**9):
        config = json.loads(path.read_text()) | {"towers": towers}
        path.write_text(json.dumps(config))
        with pytest.raises(UsageError):
            called(audit, capsys, copied, "--trust_model", runs.SMALL)


# Tampering.


def edit(path, change):
    """Applies a change to the lines of a log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in change(lines)))


def forge(run):
    """Writes all manifests anew, so that the chain fits what is there."""
    links = chain.read(run)
    (run / chain.FILE).write_text("")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for step, manifest in links.items():
        folder = folder_of(run, step)
        if folder.exists():
            manifest["files"] = {
                path.name: checkpoints._sums(path) for path in folder.glob("state*")
            }
        log = b"".join(line for line in lines if json.loads(line)["step"] <= step)
        if "chain" in manifest:
            manifest["chain"] |= {
                "metrics.jsonl": hashlib.sha256(log).hexdigest(),
                chain.FILE: files.sha256(run / chain.FILE),
            }
        if folder.exists():
            write_manifest(folder, manifest)
        logs.append_line(run / chain.FILE, manifest)


def write_manifest(folder, manifest):
    digest = checkpoints.digest_of(manifest)
    written = json.dumps({**manifest, "sha256": digest})
    (folder / "manifest.json").write_text(written)


def add_to_a_weight(run):
    """Changes one weight of the checkpoint of step 15 by a thousandth."""
    replayed = Replay(run)
    replayed.go_before(16)
    state = replayed.training.towers.state
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
    return [{**one, "precision @ 1": 0.99} for one in lines]


def swap(run):
    one, two = folder_of(run, 10), folder_of(run, 15)
    one.rename(run / "aside")
    two.rename(one)
    (run / "aside").rename(two)


def leave_out_batches(run):
    edit(
        run / chain.FILE,
        lambda links: [
            {**link, "left_out": 3 if link["step"] >= 15 else 0} for link in links
        ],
    )
    forge(run)


def reissue_a_manifest(run):
    """Changes the manifest of step 10 wherever it is, with its digest."""
    links = chain.read(run)
    links[10]["skipped_steps"] = 1
    write_manifest(folder_of(run, 10), links[10])
    edit(run / chain.FILE, lambda _: [*links.values()])


def another_seed(run):
    path = run / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


# By what each is found: the chain, or segments that begin at these steps.
TAMPERED = {
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
    "a score": (lambda run: edit(run / "eval/metrics.jsonl", better_score), {5, 15}),
    "a swapped checkpoint": (swap, None),
    "a checkpoint that is gone from the chain": (
        lambda run: edit(run / chain.FILE, lambda links: links[:1] + links[2:]),
        None,
    ),
    "batches left out": (leave_out_batches, {12, 15}),
    "a manifest, and its digest": (reissue_a_manifest, None),
    "the chain": (lambda run: (run / chain.FILE).unlink(), None),
    "the types of its lines": (
        lambda run: (run / chain.FILE).write_text(
            '{"step": "x"}\n{"step": [1]}\n{"step": 5, "files": 3}\n[]\n'
            '{"step": 5, "files": {}, "left_out": -1}\n'
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
def test_what_was_tampered_with_is_found(copied, capsys, kind):
    tamper, segments = TAMPERED[kind]
    tamper(copied)
    words = [copied, "--segments", 9, "--json", "--trust_model", runs.SMALL]
    code, said = called(audit, capsys, *words)
    found = json.loads(said)
    assert code == 1
    ends = [one["step"] for one in found["differences"]]
    begun = {
        first
        for first, last in found["segments"]
        for end in ends
        if first < end <= last
    }
    if segments is None:
        assert found["breaks"]
    else:
        assert not found["breaks"]
        assert begun == segments


@pytest.mark.parametrize("lines", [0, 3])
def test_a_chain_that_is_gone_or_cut_short_is_named(copied, capsys, lines):
    edit(copied / chain.FILE, lambda links: links[:lines])
    said = called(audit, capsys, copied, "--segments", 1)[1]
    assert said.startswith(f"Chain:    {lines} checkpoints\n")
    assert said.count("chain.jsonl has no line for it") == 5 - lines


@pytest.mark.parametrize("line", ["{", "null", '{"step": 3}', '{"step": 20}'])
def test_a_line_of_the_chain_that_is_no_manifest_is_a_break(copied, line):
    with (copied / chain.FILE).open("a") as file:
        file.write(f"{line}\n")
    breaks = [*chain.find_breaks(copied, run_config.read_run_config(copied))]
    assert breaks == ["chain.jsonl: only 5 of 6 lines are valid manifests"]


@pytest.mark.parametrize("trusts", [True, False])
def test_an_edited_configuration_is_found_by_the_chain(copied, capsys, trusts):
    """Although no step of the run can be computed by it."""
    another_seed(copied)
    trusted = ["--trust_model", runs.SMALL] if trusts else []
    code, said = called(audit, capsys, copied, *trusted)
    assert code == 1
    assert "BROKEN: config.json: seed is 1, but was 0" in said
    assert "no step can be recomputed" in said


def test_stolen_weights_that_a_run_goes_on_with_are_found(
    stand_in_dir, tmp_path, capsys
):
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
    assert {(one["step"], one["place"]) for one in found["differences"]} == {
        (10, "checkpoint"),
    }
