"""Forged runs: what an audit finds, lists as unchecked, or does not see."""

import argparse
import contextlib
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import forging
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.evaluation import eval_command
from cifar10.models.step_metrics import STEP_METRICS
from cifar10.run_directory import checkpoints
from cifar10.tools import audit, runs as runs_command
from cifar10.training import train
from cifar10.training.replay import Replay
from forging import change_tensors, edit, edit_config, folder_of, forge

PAGE = Path(__file__).parents[2] / "docs" / "auditing.md"
# What no command shows, or each computes anew, by file. Digests are the forger's own.
# The same score may be there twice, as `eval` may be run twice.
UNSHOWN = {
    "manifest.json": {"epoch", "position"},
    "eval/metrics.jsonl": {"part", "temperature", "twice"},
    "eval_val/metrics.jsonl": {"part", "temperature", "twice"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs of 12 steps with four checkpoints: one is exact, and one is not."""
    folder = tmp_path_factory.mktemp("forged")
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": rng.integers(0, 255, (count, 32, 32, 3), np.uint8)
        if kind == "x"
        else np.arange(count) % 2
        for kind in "xy"
        for part, count in (("train", 64), ("test", 24))
    }
    np.savez(folder / "set.npz", **arrays)
    values = {"data": str(folder / "set.npz"), "val_fraction": 0.25, "batch_size": 4}
    values |= {"num_gpus": 1, "max_steps": 12, "checkpoint_steps": 3, "eval_steps": 6}
    values |= {"log_frequency": 2, "keep_best": 0, "optimizer": "adam"}
    values |= {"learning_rate": 0.01, "model": "small_model:normalized"}
    for name in ("exact", "not exact"):
        exact = {"deterministic": name == "exact", "train_dir": str(folder / name)}
        train.train(Config(**values, **exact))
    return folder


@pytest.fixture
def run(made, tmp_path):
    return forging.copied(made / "exact", tmp_path / "exact")


@pytest.fixture
def rounded(made, tmp_path):
    return forging.copied(made / "not exact", tmp_path / "not exact")


def audited(run, capsys, *words):
    """The report of an audit of all segments; None if it refuses the run."""
    capsys.readouterr()
    words = [str(run), "--segments", "9", "--json", *words]
    trusted = ["--trust_model", "small_model:normalized"]
    try:
        code = audit.main(argparse.ArgumentParser(), [*words, *trusted])
    except UsageError:
        return None
    found = json.loads(capsys.readouterr().out)
    assert code == bool(found["breaks"] or found["differences"])
    return found


def is_found(found):
    return found is None or bool(found["breaks"] or found["differences"])


def is_unchecked(found, file, name):
    for line in found["unchecked"]:
        names, _, rest = line.partition(" in ")
        if rest.startswith(f"{file}:") and name in names.split(", "):
            return True
    return False


def passes(forged, found, file, name):
    """Whether an audit says nothing of a change that a command shows."""
    if is_found(found) or name in UNSHOWN.get(file, ()):
        return False
    # A setting that changes no number: the run is what that setting gives, too.
    determines = file == "config.json" and name in Replay(forged).determining
    return not determines and not is_unchecked(found, file, name)


def assert_noticed(run, capsys, draws, *, odd=False):
    passed = []
    for seed in draws:
        random_one = random.Random(seed)
        forged = forging.copied(run, run.with_name(f"forged-{seed}"))
        changed = []
        for _ in range(random_one.randint(1, 3) if odd else 1):
            # What has an odd type by now may hinder the forger.
            with contextlib.suppress(*((UsageError, TypeError) if odd else ())):
                changed.append(forging.change_at_random(forged, random_one, odd=odd))
        forge(forged)
        found = audited(forged, capsys)
        words = [str(forged.parent), "--json"]
        runs_command.main(argparse.ArgumentParser(), words)  # Hides no other run.
        listed = json.loads(capsys.readouterr().out)
        assert {one["name"] for one in listed} >= {run.name, forged.name}, seed
        passed += [(seed, *one) for one in changed if passes(forged, found, *one)]
        shutil.rmtree(forged)
    assert not passed


@pytest.mark.parametrize("name", ["exact", "not exact"])
def test_an_honest_run_does_not_differ(made, capsys, name):
    found = audited(made / name, capsys)
    assert not is_found(found)
    assert found["exact"] is (name == "exact")
    assert found["bound"].partition(" ")[0] == ("0" if name == "exact" else "0.5")
    assert found["agree"] == 1.0
    assert "verified" not in json.dumps(found)


@pytest.mark.slow
def test_every_change_is_noticed(run, capsys):
    # Of the first forty draws, those that change an entry for the first time.
    repeated = 3, 9, 16, 17, 19, 20, 24, 29, 33, 34, 35, 36, 37
    once = [seed for seed in range(40) if seed not in repeated]
    taken_out = 1216, 1330  # Of entries that are gone.
    assert_noticed(run, capsys, [*once, *taken_out])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "rounded"])
def test_several_changes_to_any_type_are_noticed(name, request, capsys):
    assert_noticed(request.getfixturevalue(name), capsys, range(8), odd=True)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["run", "rounded"])
def test_several_changes_to_any_type_are_noticed_in_200_draws(name, request, capsys):
    assert_noticed(request.getfixturevalue(name), capsys, range(2000, 2100), odd=True)


@pytest.mark.soak
def test_every_change_is_noticed_in_540_draws(run, capsys):
    assert_noticed(run, capsys, [*range(40), *range(1000, 1500)])


def scaled(factor, *groups):
    """Multiplies the variables of groups of the last checkpoint."""

    def change(state):
        of = {
            "weights": state.model.trainable_variables,
            "averages": state.averages,
            "statistics": state.model.non_trainable_variables[:2],
            "slots": state.optimizer.variables[2:],
        }
        for variable in [one for group in groups for one in of[group]]:
            variable.assign(np.asarray(variable) * factor)

    return lambda run: change_tensors(run, 12, change)


def exchanged_averages(run):
    """Takes averages from another run, which may be of the test images."""
    rng = np.random.default_rng(7)

    def change(state):
        for one in state.averages:
            one.assign(rng.normal(0, np.std(one) + 0.05, one.shape))

    change_tensors(run, 12, change)


def exchanged_averages_alone(run):
    """Leaves no score that would show them."""
    exchanged_averages(run)
    for folder in ("eval", "eval_val"):
        shutil.rmtree(run / folder, ignore_errors=True)


def first_checkpoint(run):
    """Begins with weights that were trained elsewhere."""
    shutil.copytree(folder_of(run, 12), folder_of(run, 0))
    forging.write_manifest(run, 0, forging.manifest_of(run, 12) | {"step": 0})


def in_lines(log, **changes):
    return lambda run: edit(
        run / log, lambda lines: [{**one, **changes} for one in lines]
    )


def more_lines(log, line):
    return lambda run: edit(run / log, lambda lines: [*lines, line(lines[-1])])


# Forgeries whose digests and links are all written anew.
FOUND = {
    "averages exchanged in a run that is not exact": (1, exchanged_averages),
    "averages exchanged where there are no scores": (1, exchanged_averages_alone),
    "batch statistics of another size": (1, scaled(9.0, "statistics")),
    "an optimizer's slots that throw a resumed run off": (1, scaled(1e3, "slots")),
    "averages by a thousandth": (0, scaled(1.001, "averages")),
    "statistics by a thousandth": (0, scaled(1.001, "statistics")),
    "slots by a thousandth": (0, scaled(1.001, "slots")),
    "a later checkpoint, hidden by max_steps": (
        0,
        lambda run: edit_config(run, max_steps=9),
    ),
    "a better curve of precision": (
        0,
        in_lines("metrics.jsonl", **{"precision @ 1": 1.0}),
    ),
    "a smoother curve": (1, in_lines("metrics.jsonl", **{"total_loss/average": 1e-3})),
    "a line that holds only a step": (
        1,
        more_lines("metrics.jsonl", lambda last: {"step": 11}),
    ),
    "a line that nobody reads": (1, in_lines("metrics.jsonl", step=-1)),
    "a line before the first step": (
        1,
        more_lines("metrics.jsonl", lambda last: {**last, "step": 0}),
    ),
    "a score before the first step": (
        1,
        more_lines(
            "eval/metrics.jsonl", lambda last: {**last, "step": 0, "precision @ 1": 1.0}
        ),
    ),
    "a checkpoint before the first step": (1, first_checkpoint),
    "a line twice": (1, more_lines("metrics.jsonl", lambda last: last)),
    "a line beyond": (
        1,
        more_lines("metrics.jsonl", lambda last: {**last, "step": 14}),
    ),
    "a score of a step without a checkpoint": (
        1,
        more_lines(
            "eval/metrics.jsonl", lambda last: {**last, "step": 7, "macro F1": 1.0}
        ),
    ),
    "a score that is none": (
        0,
        in_lines("eval/metrics.jsonl", **{"precision @ 1": 2.0}),
    ),
    "a score beyond": (
        1,
        more_lines("eval_val/metrics.jsonl", lambda last: {**last, "step": 50}),
    ),
    "classes exchanged": (1, lambda run: edit_config(run, class_names=["1", "0"])),
    "a temperature": (
        1,
        lambda run: (folder_of(run, 12) / "temperature.txt").write_text("3.0\n"),
    ),
    "the steps that were skipped": (
        1,
        lambda run: forging.write_manifest(
            run, 12, forging.manifest_of(run, 12) | {"skipped_steps": 5}
        ),
    ),
}


@pytest.mark.parametrize("kind", FOUND)
def test_a_forgery_with_new_digests_is_found(run, rounded, capsys, kind):
    is_rounded, change = FOUND[kind]
    forged = rounded if is_rounded else run
    change(forged)
    forge(forged)
    assert is_found(audited(forged, capsys))


def test_scores_without_a_checkpoint_are_unchecked_in_an_inexact_run(
    run, rounded, capsys
):
    for forged in (run, rounded):
        more_lines("eval/metrics.jsonl", lambda last: {**last, "step": 7})(forged)
        forge(forged)
    assert is_found(audited(run, capsys))
    assert any(
        "scores in steps [7]" in one for one in audited(rounded, capsys)["unchecked"]
    )


def test_other_devices_make_a_run_inexact_and_are_reported(run, capsys):
    """The bound of a run that is not exact lets pass what the exact one refuses."""
    scaled(1.3, "weights")(run)
    edit_config(run, devices="8 towers on H100")
    assert audited(run, capsys)["breaks"]
    forge(run)
    found = audited(run, capsys)
    assert found["exact"] is False
    assert found["bound"].startswith("0.5 because")
    assert "8 towers on H100" in found["bound"]
    assert is_unchecked(found, "config.json", "devices")


def test_other_devices_in_a_single_link_are_named(run, capsys):
    manifest = forging.manifest_of(run, 12)
    manifest["chain"]["settings"]["devices"] = "8 towers on H100"
    forging.write_manifest(run, 12, manifest)
    found = audited(run, capsys)
    assert found["breaks"] == []
    assert "in the chain at step 12" in found["bound"]


def test_starts_are_in_the_chain_and_shown(run, capsys):
    config = json.loads((run / "config.json").read_text())
    names = ("data", "val_fraction", "batch_size", "num_gpus", "checkpoint_steps")
    names += ("eval_steps", "log_frequency", "keep_best", "optimizer", "learning_rate")
    values = {name: config[name] for name in (*names, "model", "deterministic")}
    values["data"] = config["data_dir"]
    train.train(Config(**values, train_dir=str(run), max_steps=15))
    found = audited(run, capsys)
    assert not is_found(found)
    assert [one["step"] for one in found["starts"]] == [0, 12]
    edit(run / "starts.jsonl", lambda lines: lines[1:])
    assert audited(run, capsys)["breaks"]


def test_an_older_run_is_audited_and_missing_entries_are_unchecked(run, capsys):
    """Its links held no devices, its manifests no averages, its lines no penalties."""
    (run / "starts.jsonl").unlink()
    for step in checkpoints.steps(run / "checkpoints"):
        manifest = forging.manifest_of(run, step)
        for name in ("devices", "workers", "towers"):
            del manifest["chain"]["settings"][name]
        del manifest["loss_averages"]
        forging.write_manifest(run, step, manifest)

    def before(lines):
        return [
            {k: of for k, of in one.items() if "penalties" not in k} for one in lines
        ]

    edit(run / "metrics.jsonl", before)
    for step in checkpoints.steps(run / "checkpoints"):
        manifest = forging.manifest_of(run, step)
        link = checkpoints.make_link(
            run / "checkpoints", step, manifest["chain"]["settings"]
        )
        for name in ("config", "starts"):
            link.pop(name, None)
        forging.write_manifest(run, step, manifest | {"chain": link})
    found = audited(run, capsys)
    assert not is_found(found)
    assert found["exact"]
    assert is_unchecked(found, "metrics.jsonl", "total_loss/average")


@pytest.mark.parametrize("log", ["starts.jsonl", "metrics.jsonl", "eval/metrics.jsonl"])
def test_a_link_or_a_folder_in_place_of_a_log_is_refused(run, capsys, log):
    (run / log).rename(run / "elsewhere")
    (run / log).symlink_to(run / "elsewhere")
    assert audited(run, capsys) is None
    (run / log).unlink()
    (run / log).mkdir()
    assert audited(run, capsys) is None


def keys_of(path):
    return {name for line in path.read_text().splitlines() for name in json.loads(line)}


def test_every_figure_shown_by_a_command_is_documented(run, capsys):
    """The page says of each where it comes from, and how an audit checks it."""
    found = audited(run, capsys)
    figures = {*found}
    runs_command.main(argparse.ArgumentParser(), [str(run), "--json"])
    (listed,) = json.loads(capsys.readouterr().out)
    words = ["--train_dir", str(run), "--run_once", "--json"]
    eval_command.main(argparse.ArgumentParser(), words)
    figures |= {*listed, *json.loads(capsys.readouterr().out)}
    for log in ("metrics.jsonl", "eval/metrics.jsonl", "starts.jsonl"):
        figures |= keys_of(run / log)
    manifest = forging.manifest_of(run, 12)
    figures |= manifest.keys() - {"files", "chain"}
    figures |= {*audit.UNCHECKED} - {"manifest.json"}
    template = Path(audit.__file__).with_name("report.html").read_text()
    template = template.replace("\N{NO-BREAK SPACE}", " ")
    figures |= {*re.findall(r'chart\("([^"]+?) ?"', template)}
    figures |= {*re.findall(r'figure\("([^"]+?)"', template)}
    of_checkpoints = template.partition("<h2>Checkpoints</h2>")[2]
    figures |= {*re.findall(r'<th scope="col">([^<{]+)', of_checkpoints)}
    text = PAGE.read_text()
    rows = {*re.findall(r"`([^`\n]+)`", text), *re.findall(r'"([^"\n]+)"', text)}
    averaged = {name for name in figures if name.endswith("/average")}
    assert "STEP_METRICS" in rows
    missing = figures - rows - averaged - {*STEP_METRICS}
    assert not missing, missing


@pytest.mark.parametrize("odd", [None, 5, "x", [1], {"a": [1]}])
def test_a_link_with_wrong_types_does_not_abort_an_audit(run, capsys, odd):
    manifest = forging.manifest_of(run, 12)
    manifest["chain"] |= dict.fromkeys(("log", "step", "manifest", "config"), odd)
    manifest["chain"]["starts"] = odd
    for name in ("versions", "devices", "seed"):
        manifest["chain"]["settings"][name] = odd
    forging.write_manifest(run, 12, manifest)
    found = audited(run, capsys)
    assert found["breaks"]
    assert not found["exact"]
