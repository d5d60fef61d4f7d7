"""Runs that differ in the seed alone are averaged, with Student's interval."""

import csv
import io
import json

import pytest

import runs
from cifar10.distributed import launcher
from cifar10.errors import StoppedError, UsageError
from cifar10.run_directory import seeds
from cifar10.run_directory.seeds import grouped
from recorded_runs import recorded

SCORE = "precision @ 1"


def scored(name, score, step=10, **settings):
    line = {"step": step, "num_examples": 100, SCORE: score} if score else {}
    return name, recorded(**{"seed": int(name[1:]), **settings}), "test", line


@pytest.mark.parametrize(
    ("scores", "half"),
    # Student's t of 1, 2 and 4 degrees of freedom by tables: 12.706, 4.303, 2.776.
    [
        ((0.50, 0.51), 12.706 * 0.0070711 / 2**0.5),
        ((0.50, 0.51, 0.52), 4.303 * 0.01 / 3**0.5),
        ((0.50, 0.51, 0.52, 0.53, 0.54), 2.776 * 0.0158114 / 5**0.5),
    ],
)
def test_the_interval_follows_students_t(scores, half):
    rows = [scored(f"s{seed}", score) for seed, score in enumerate(scores)]
    (found,) = grouped(rows)
    assert found.seeds == len(scores)
    assert found.mean == pytest.approx(sum(scores) / len(scores))
    low, high = found.interval
    assert high - found.mean == pytest.approx(half, rel=1e-3)
    assert found.mean - low == pytest.approx(half, rel=1e-3)


def test_only_runs_of_one_configuration_and_step_are_averaged():
    rows = [
        scored("s0", 0.5),
        scored("s1", 0.6),
        scored("s2", 0.7, learning_rate=0.5),
        scored("s3", 0.8, step=20),
        scored("s4", None),  # It was not scored.
        scored("s5", 0.9, log_frequency=3, num_gpus=2, data_dir="/elsewhere"),
        scored("s6", 0.9, batch_size=32, accumulate=4),  # Batch norm sees fewer.
    ]
    found = {tuple(one.names): one for one in grouped(rows)}
    assert found.keys() == {("s0", "s1", "s5"), ("s2",), ("s3",), ("s6",)}
    assert found[("s0", "s1", "s5")].mean == pytest.approx(2 / 3)
    assert found[("s2",)].interval is None, "one seed has no interval"


@pytest.mark.parametrize(
    ("ending", "groups"),
    [({"stop_after_no_gain": 3}, 1), ({"max_hours": 0.5}, 1), ({}, 2)],
)
def test_seeds_that_end_by_themselves_are_averaged_at_their_last_steps(
    monkeypatch, ending, groups
):
    rows = []
    for name, score, step in (("s0", 0.5, 30), ("s1", 0.6, 40)):
        _, run, *found = scored(name, score, step=step, **ending)
        monkeypatch.setattr(seeds, "last_scores", lambda _, found=found: found)
        rows.append((name, run, *seeds.final_scores(run)))
    first, *others = grouped(rows)
    assert 1 + len(others) == groups
    if not others:
        assert (first.seeds, first.mean) == (2, pytest.approx(0.55))
        assert "on test at its last step, mean of 2 seeds" in str(first)


@pytest.mark.parametrize("other", ["r", "t"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_seed_trained_twice_counts_once_beside_its_siblings(order, other):
    rows = [scored(f"{other}0", 0.9), scored("s0", 0.5), scored("s1", 0.6)]
    named = [(f"{name[0]}/{name}", *rest) for name, *rest in rows]
    named += [(f"{name}.1", *rest) for name, *rest in named[1:]]  # By --fresh.
    (found,) = grouped(named[::order])
    assert {*found.names} == {"s/s0", "s/s1"}
    assert {*found.left_out} == {f"{other}/{other}0", "s/s0.1", "s/s1.1"}
    assert (found.seeds, found.mean) == (2, pytest.approx(0.55))


def test_a_run_made_by_whatif_neither_counts_nor_takes_the_place_of_its_origin():
    made = {"run": "s0", "change": "what if in steps 1 to 3 without 1 picture"}
    rows = [scored("a0", 0.9, what_if=made), scored("s0", 0.5), scored("s1", 0.6)]
    (found,) = grouped(rows)
    assert (found.names, found.left_out) == (["s0", "s1"], [])
    assert found.mean == pytest.approx(0.55)


def test_seeds_of_changed_code_are_averaged_apart():
    rows = [
        scored("s0", 0.5),  # By a version that recorded no logits.
        scored("s1", 0.6, model_logits=[0.5, -2.0]),
        scored("s2", 0.7, model_logits=[0.5, -2.001]),  # On another processor.
        scored("s3", 0.8, model_logits=[0.6, -2.0]),
        scored("s4", 0.9, model_logits=[0.5, -2.0], parameters=2),
    ]
    found = [tuple(one.names) for one in grouped(rows)]
    assert found == [("s0",), ("s1", "s2"), ("s3",), ("s4",)]


def test_seeds_with_contradicting_flags_are_refused(monkeypatch):
    for words in (["2:2"], ["0:2", "--seed", "7"], ["0:2", "--seed=7"]):
        done = runs.call("train.py", "--seeds", *words)
        assert done.returncode == 2, words
        assert "--seeds" in done.stderr
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    done = runs.call("train_multi_gpu.py", "--seeds", "0:2")
    assert done.returncode == 2
    assert "one machine" in done.stderr
    task["cluster"] = {"worker": cluster["worker"][:1]}  # Of one, which is no other.
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    done = runs.call("train_multi_gpu.py", "--seeds", "2:2")
    assert "FIRST below END" in done.stderr


TINY = """
import keras
def net(image_shape, classes):
    layers = keras.layers.Flatten(), keras.layers.Dense(8, "tanh")
    ends = keras.Input(image_shape), keras.layers.Dense(classes)
    return keras.Sequential([ends[0], *layers, ends[1]])
"""


def test_a_refused_seed_ends_all_before_others_are_trained(tmp_path, stand_in_dir):
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1/notes.txt").write_text("mine")
    flags = ["--seeds", "0:2", "--train_dir", tmp_path, "--max_steps", "1"]
    flags += ["--data", "synthetic", "--data_dir", stand_in_dir]
    refused = runs.run(runs.ROOT / "train.py", *flags)
    assert refused.returncode == 2
    assert "seed-1 holds files" in refused.stderr
    assert not (tmp_path / "seed-0").exists()


def test_seeds_of_two_configurations_are_refused_before_one_is_trained(
    tmp_path, monkeypatch
):
    for seed, rate in enumerate([0.1, 0.1, 0.5]):
        (run := tmp_path / f"seed-{seed}").mkdir()
        given = {"seed": seed, "learning_rate": rate, "global_batch_size": 128}
        values = {**recorded().values, **given}
        recorded(run, **values).write()
    started = []

    def trained(_, command):
        started.append(command)
        return [2], []

    monkeypatch.setattr(launcher, "_run_workers", trained)
    with pytest.raises(UsageError, match=r"seed-1 and .*seed-2 differ in learn"):
        launcher.train_seeds("0:3", ["train.py"], tmp_path)
    assert not started
    for which, flags in (("0:2", []), ("0:3", ["--fresh"])):
        with pytest.raises(StoppedError):
            launcher.train_seeds(which, ["train.py", *flags], tmp_path)
    assert len(started) == 2, "equal ones go on, and --fresh moves all aside"


@pytest.fixture
def in_copies(tmp_path, monkeypatch):
    """Trains seeds in copies of a process that has imported TensorFlow."""

    def trained(environments, command):
        assert environments == [{}]
        script, *words = command
        done = runs.run(runs.ROOT / script, *words, cwd=tmp_path)
        return [done.returncode], []

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "_run_workers", trained)


@pytest.mark.slow
@pytest.mark.usefixtures("in_copies")
def test_a_diverged_seed_has_its_own_exit_code_and_enters_the_mean(
    tmp_path, stand_in_dir
):
    (tmp_path / "tiny.py").write_text(TINY)
    flags = ["--seeds", "0:2", "--train_dir", "trial", "--model", "tiny:net"]
    flags += ["--data", "synthetic", "--data_dir", stand_in_dir, "--batch_size", "8"]
    flags += ["--max_steps", "60", "--eval_steps", "60", "--learning_rate", "1e3"]
    env = {"PYTHONPATH": str(runs.ROOT)}
    for again in (False, True):  # The second time there is nothing to do.
        words = [runs.ROOT / "train.py", *flags]
        done = runs.call(*words) if again else runs.run(*words, cwd=tmp_path, env=env)
        assert done.returncode == 3, done.stderr
        assert "mean of 2 seeds" in done.stdout.splitlines()[-1]
        assert "diverged" in done.stderr.splitlines()[-1]
    for seed in range(2):
        ((step, event),) = runs.events(tmp_path / "trial" / f"seed-{seed}")
        assert (step < 60, event) == (True, "divergence")
    listed = runs.call("cifar10/__main__.py", "runs", tmp_path, "--json")
    found = json.loads(listed.stdout)
    assert [one["state"] for one in found] == ["diverged"] * 2
    assert [one["event"]["event"] for one in found] == ["divergence"] * 2
    run = tmp_path / "trial/seed-0"
    words = ["--trust_model", "tiny:net", "--data_dir", stand_in_dir]
    done = runs.run("-m", "cifar10", "audit", run, *words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("in_copies")
def test_seeds_are_trained_in_turn_and_continue_after_a_stop(tmp_path, stand_in_dir):
    (tmp_path / "tiny.py").write_text(
        "import keras\n"
        "def net(image_shape, classes):\n"
        "    layers = [keras.layers.Flatten(), keras.layers.Dense(classes)]\n"
        "    return keras.Sequential([keras.Input(image_shape), *layers])\n"
    )
    flags = ["--seeds", "2:5", "--train_dir", "trial", "--model", "tiny:net"]
    flags += ["--data", "synthetic", "--data_dir", stand_in_dir, "--batch_size", "8"]
    flags += ["--max_steps", "4", "--eval_steps", "4", "--learning_rate", "1e-3"]
    flags += ["--log_frequency", "2"]
    only_two = [*flags[:1], "2:4", *flags[2:]]
    done = runs.call("train.py", *only_two)
    assert done.returncode == 0, done.stderr
    assert "mean of 2 seeds" in done.stdout
    before = (tmp_path / "trial/seed-2/metrics.jsonl").read_bytes()
    done = runs.call("train.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "mean of 3 seeds" in done.stdout.splitlines()[-1]
    assert (tmp_path / "trial/seed-2/metrics.jsonl").read_bytes() == before

    command = ("cifar10/__main__.py", "runs", tmp_path)
    listed = runs.call(*command, "--json", "--sort", "score")
    found = json.loads(listed.stdout)
    assert {one["settings"]["seed"] for one in found} == {2, 3, 4}
    values = [one["scores"][SCORE] for one in found]
    assert values == sorted(values, reverse=True)
    text = runs.call(*command, "--csv").stdout
    rows = [*csv.DictReader(io.StringIO(text))]
    assert [float(row[SCORE]) for row in rows] == [
        one["scores"][SCORE] for one in sorted(found, key=lambda one: one["name"])
    ]
    assert {row["learning_rate"] for row in rows} == {"0.001"}
    mean = f"{SCORE} = {sum(values) / 3:.4f}"
    assert mean in runs.call(*command).stdout

    assert runs.call("train.py", *flags, "--max_steps", "x").returncode == 2
    broken = runs.call("train.py", *flags, "--batch_size", "9")
    assert broken.returncode == 2, "a seed that is refused ends the rest"
    assert "Seed 2 ended with exit code 2" in broken.stderr
