"""The three scripts as a user runs them: what they say, write and end with."""

import json
import re
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import runs
from cifar10.input import cifar, synthetic
from cifar10.training import settings


def refused(done, *parts):
    """Asserts one clear complaint: exit code 2, on stderr, without a traceback."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert str(part) in done.stderr
    return True


@pytest.fixture(scope="module")
def finished(tmp_path_factory, stand_in_dir):
    """A finished run of two towers, and what it printed."""
    train_dir = tmp_path_factory.mktemp("finished") / "run"
    done = runs.run(
        "train_multi_gpu.py",
        "--num_gpus",
        2,
        *runs.training_flags(train_dir, stand_in_dir),
    )
    assert done.returncode == 0, done.stderr
    return train_dir, done


# What a user sees.


def test_a_training_says_what_it_is_and_what_to_do_next(finished):
    train_dir, done = finished
    assert done.stderr == "Starting TensorFlow ...\n", "start-up noise of TensorFlow"
    first_lines = done.stdout.partition("\nNew run in ")[0]
    wrapped = [line for line in first_lines.splitlines() if "/" not in line]
    assert all(len(line) <= 80 for line in wrapped)
    lines = done.stdout.replace("\n        ", " ").splitlines()
    assert "2 SIMULATED towers" in lines[0]
    assert "NOT CIFAR-10" in lines[1]
    assert "1,068,298 parameters" in lines[2]
    assert "8 images per tower and step x 2 = 16 globally" in lines[3]
    assert lines[4].endswith(" 30 steps, which are 0.0 epochs of 625.0 steps")
    assert lines[5] == f"New run in {train_dir}"
    # On a slow machine a forecast comes before it.
    first = next(line for line in lines if line.startswith("step "))
    assert first.startswith("step 10, loss ")
    assert re.search(r"[\d,]+ images/s, [\d.]+ s/batch$", first)
    assert f"python eval.py --run_once --train_dir {train_dir}" in done.stdout
    assert f"tensorboard --logdir {train_dir}" in done.stdout


def test_long_first_lines_are_broken_and_paths_are_not():
    path = "/home/somebody/with-a-long-name/" + "data-" * 8 + "/cifar-10-batches-bin"
    lines = settings.first_lines(
        {
            "devices": "1 tower on the CPU (TensorFlow cannot use the NVIDIA GPU here; "
            "python -m cifar10 doctor says why)",
            "data_description": f"CIFAR-10 in {path}",
            "model": "tutorial",
            "parameters": 1_068_298,
            "precision": "float32",
            "batch_size": 1000,
            "towers": 64,
            "workers": 8,
            "accumulate": 2,
            "global_batch_size": 128_000,
            "max_steps": 1_000_000,
            "recipe": "tutorial",
            "on_gpus": True,
            "variables_on": ", ".join(f"/gpu:{number}" for number in range(8)),
        },
        50_000,
    ).splitlines()
    assert f"        {path}" in lines
    lines.remove(f"        {path}")
    assert max(map(len, lines)) <= 80


def test_commands_to_paste_fit_a_terminal_below_the_current_folder(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    names = ("tutorial", "auto")
    here = Path.cwd() / "runs" / "cifar10_train"
    short = settings.last_lines(here, *names).splitlines()[1:]
    assert all(line.endswith(" runs/cifar10_train") for line in short)
    assert max(map(len, short)) <= 80
    elsewhere = settings.last_lines(tmp_path / "a run", *names).splitlines()
    assert all(line.endswith(f"'{tmp_path}/a run'") for line in elsewhere[1:])


def test_config_json_never_pretends(finished):
    settings = json.loads((finished[0] / "config.json").read_text())
    assert settings["data"] == "synthetic"
    assert settings["data_is_real"] is False
    assert settings["simulated"] is True
    assert settings["global_batch_size"] == 16
    packages = {"cifar10", "python", "tensorflow", "keras", "numpy"}
    assert set(settings["versions"]) == packages


def test_metrics_have_one_line_per_logged_step(finished):
    lines = (finished[0] / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["step"] for entry in entries] == [10, 20, 30]
    for entry in entries:
        assert entry["total_loss"] == pytest.approx(
            entry["cross_entropy"] + entry["weight_decay"], rel=1e-5
        )
        assert entry["learning_rate"] == 0.1
        assert 0.0 <= entry["precision @ 1"] <= 1.0
        assert 0.0 <= entry["precision @ 1/average"] <= 1.0


def test_checkpoints_name_epoch_and_position(finished):
    path = finished[0] / "checkpoints" / "step-00000030" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert (manifest["step"], manifest["epoch"], manifest["position"]) == (30, 0, 480)
    assert manifest["seed"] == 0


def test_train_is_the_one_tower_case(tmp_path, stand_in_dir):
    ends = []
    for name, words in (("train.py", []), ("train_multi_gpu.py", ["--num_gpus", 1])):
        train_dir = tmp_path / name
        flags = runs.training_flags(train_dir, stand_in_dir, max_steps=5)
        assert runs.call(name, "--deterministic", *words, *flags).returncode == 0
        folder = train_dir / "checkpoints" / "step-00000005"
        ends.append([path.read_bytes() for path in sorted(folder.glob("state*"))])
    assert ends[0] == ends[1]


def test_help_needs_no_tensorflow_and_names_every_flag():
    code = (
        "import sys, runpy; sys.argv = ['train_multi_gpu.py', '--help']\n"
        "try: runpy.run_path('train_multi_gpu.py', run_name='__main__')\n"
        "except SystemExit: print('tensorflow' in sys.modules)"
    )
    done = runs.run("-c", code)
    assert "--num_gpus" in done.stdout
    assert done.stdout.endswith("False\n")


def test_help_of_eval_keeps_its_lines_and_shows_every_default():
    done = runs.call("eval.py", "--help")
    assert done.returncode == 0
    assert "\n    python eval.py --run_once\n" in done.stdout
    text = " ".join(done.stdout.split())
    flags = re.findall(r"^  --(\w+)", done.stdout, re.MULTILINE)
    assert {"train_dir", "num_examples", "run_once", "json"} <= set(flags)
    assert text.count("(default: ") == len(flags)
    assert "None" not in text
    assert "seconds between two looks for a new checkpoint (default: 30.0)" in text


# Evaluation.


@pytest.mark.slow
def test_eval_counts_every_image_once_and_needs_only_the_directory(finished):
    done = runs.call("eval.py", "--run_once", "--json", "--train_dir", finished[0])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["step"] == 30
    assert result["num_examples"] == 2000
    assert result["precision @ 1"] == result["correct"] / 2000
    assert result["data_is_real"] is False
    data_dir = Path(json.loads((finished[0] / "config.json").read_text())["data_dir"])
    assert not (data_dir / data_dir.name).exists(), "the stand-in was made once more"
    assert np.sum(result["confusion"]) == 2000
    other_batch = runs.call(
        "eval.py", "--run_once", "--json", "--train_dir", finished[0],
        "--batch_size", 77,
    )  # fmt: skip
    assert json.loads(other_batch.stdout)["confusion"] == result["confusion"]
    raw = runs.call(
        "eval.py", "--run_once", "--json", "--train_dir", finished[0],
        "--no-use_averages", "--eval_data", "train_eval", "--num_examples", 100,
    )  # fmt: skip
    assert json.loads(raw.stdout)["num_examples"] == 100
    assert json.loads(raw.stdout)["use_averages"] is False


def test_eval_prints_the_tutorials_line_and_the_tables(finished):
    done = runs.run("eval.py", "--run_once", "--train_dir", finished[0])
    assert "precision @ 1 = 0." in done.stdout
    assert "NOT CIFAR-10" in done.stdout
    assert "simulated towers" in done.stdout
    assert "confusion matrix" in done.stdout
    for name in synthetic.CLASS_NAMES:
        assert name in done.stdout


def test_eval_without_a_run_says_so(tmp_path):
    done = runs.call("eval.py", "--run_once", "--train_dir", tmp_path / "nowhere")
    assert refused(done, "nowhere does not exist")
    (tmp_path / "file").touch()
    done = runs.call("eval.py", "--run_once", "--train_dir", tmp_path)
    assert refused(done, tmp_path, "holds no run")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--device", "gpu:7"], "--device gpu:7"),
        (["--device", "tpu"], "--device tpu"),
        (["--num_examples", "0"], "--num_examples 0"),
        (["--num_examples", "2001"], "--num_examples 2001"),
        (["--eval_data", "validation"], "--eval_data"),
        (["--run_onec"], "--run_onec"),
    ],
)
def test_eval_refuses_bad_flags(finished, words, part):
    done = runs.call("eval.py", "--run_once", "--train_dir", finished[0], *words)
    assert refused(done, part)


@pytest.mark.slow
def test_eval_follows_a_training_to_its_end(tmp_path, stand_in_dir):
    train_dir = tmp_path / "run"
    words = ["--json", "--device", "cpu", "--num_examples", 500]
    words += ["--train_dir", train_dir, "--eval_interval_secs", 0.2]
    with runs.started(runs.ROOT / "eval.py", *words) as follower:
        waiting = runs.read_until(follower.stderr, "no training has begun there")
        flags = runs.training_flags(train_dir, stand_in_dir, max_steps=60)
        trained = runs.call("train.py", *flags, "--keep_checkpoints", 1)
        assert trained.returncode == 0, trained.stderr
        output, said = follower.communicate(timeout=120)
    assert follower.returncode == 0, said
    scored = [json.loads(line)["step"] for line in output.splitlines()]
    assert scored == sorted(set(scored)), "a step was scored twice"
    assert scored[-1] == 60
    assert "does not exist" in waiting
    assert "finished at step 60" in said


# Bad input.


@pytest.mark.parametrize("value", ["0", "-3", "1000000", "four"])
def test_absurd_numbers_of_towers_are_refused(value):
    done = runs.run("train_multi_gpu.py", "--num_gpus", value)
    assert refused(done, "--num_gpus", value)


def test_unknown_flags_are_refused():
    assert refused(runs.run("train.py", "--learning_rat", 1), "--learning_rat")


def test_a_batch_larger_than_the_data_is_refused(tmp_path, stand_in_dir):
    flags = runs.training_flags(tmp_path / "run", stand_in_dir, batch_size=10_001)
    assert refused(runs.call("train.py", *flags), "--batch_size 10001", "10,000")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def cifar10_copy(tmp_path):
    """A folder that looks like CIFAR-10: ten thousand black images a file."""
    folder = tmp_path / "data"
    folder.mkdir()
    cifar10 = cifar.FORMATS["cifar10"]
    for name in cifar10.train_files + cifar10.test_files:
        with (folder / name).open("wb") as file:
            file.truncate(10_000 * 3073)
    return folder


def spoil(folder, how):
    victim = folder / "data_batch_3.bin"
    if how == "missing":
        victim.unlink()
    elif how == "truncated":
        with victim.open("r+b") as file:
            file.truncate(10_000 * 3073 - 5)
    elif how == "empty":
        victim.write_bytes(b"")
    elif how == "wrong size":
        with victim.open("r+b") as file:
            file.truncate(9_999 * 3073)
    elif how == "label 200":
        with victim.open("r+b") as file:
            file.seek(17 * 3073)
            file.write(bytes([200]))


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("missing", []),
        ("truncated", []),
        ("empty", []),
        ("wrong size", []),
        ("label 200", ["200", "17", str(17 * 3073)]),
    ],
)
def test_broken_data_is_refused_and_nothing_is_written(
    tmp_path, cifar10_copy, how, parts
):
    spoil(cifar10_copy, how)
    before = sorted(tmp_path.rglob("*"))
    done = runs.call(
        "train.py", "--data_dir", cifar10_copy, "--train_dir", tmp_path / "run"
    )
    assert refused(done, "data_batch_3.bin", *parts)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_train_dir_that_cannot_be_made_is_refused(tmp_path, stand_in_dir):
    (tmp_path / "file").touch()
    for train_dir in (tmp_path / "file", tmp_path / "file" / "run"):
        done = runs.call("train.py", *runs.training_flags(train_dir, stand_in_dir))
        assert refused(done, "--train_dir", train_dir)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path, stand_in_dir
):
    train_dir = tmp_path / "run"
    flags = runs.training_flags(train_dir, stand_in_dir, precision="float32")
    assert runs.call("train.py", *flags, "--max_steps", 10).returncode == 0
    # Room for configuration and logs, but not for another 8 MB of variables.
    done = runs.run(
        "train.py",
        *(*flags, "--max_steps", 20, "--summary_steps", 1000),
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (4 << 20, 4 << 20)
        ),
    )
    assert refused(done, "step 20", "That of step 10 is kept")
    left = [path.name for path in (train_dir / "checkpoints").iterdir()]
    assert left == ["step-00000010"]
    done = runs.call("train.py", *flags, "--max_steps", 20)
    assert done.returncode == 0
    assert "from step 10" in done.stdout


def test_damaged_checkpoints_alone_are_refused_by_both(tmp_path, finished):
    train_dir = tmp_path / "run"
    shutil.copytree(finished[0], train_dir)
    for data in (train_dir / "checkpoints").glob("*/state.data*"):
        data.write_bytes(data.read_bytes()[:-1])
    settings = json.loads((train_dir / "config.json").read_text())
    flags = runs.training_flags(
        train_dir,
        Path(settings["data_dir"]).parent,
        max_steps=40,
        precision=settings["precision"],
    )
    for done in (
        runs.call("train_multi_gpu.py", "--num_gpus", 2, *flags),
        runs.call("eval.py", "--run_once", "--train_dir", train_dir),
    ):
        assert refused(done, "step-00000030", "SHA-256", "--train_dir")
    assert len(list((train_dir / "checkpoints").glob("step-*"))) == 3


def test_a_model_of_the_wrong_shape_is_refused(tmp_path, stand_in_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "def wrong(image_shape, classes):\n"
        "    return keras.Sequential([keras.Input(image_shape), "
        "keras.layers.Flatten(), keras.layers.Dense(classes + 1)])\n"
    )
    flags = runs.training_flags(tmp_path / "run", stand_in_dir, model="mine:wrong")
    done = runs.call("train.py", *flags)
    assert refused(done, "--model mine:wrong", "(2, 11)", "(2, 10)")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, stand_in_dir):
    train_dir = tmp_path / "run"
    flags = runs.training_flags(
        train_dir, stand_in_dir, learning_rate=1e30, checkpoint_steps=1
    )
    done = runs.call("train_multi_gpu.py", "--num_gpus", 2, *flags)
    assert refused(done, "at step 2 the loss of tower 0 (/cpu:0) is", "--learning_rate")
    left = [path.name for path in (train_dir / "checkpoints").iterdir()]
    assert left == ["step-00000001"]


@pytest.mark.slow
def test_another_configuration_is_refused_with_three_ways_on(finished):
    train_dir, _ = finished
    data_dir = Path(json.loads((train_dir / "config.json").read_text())["data_dir"])
    before = {path: path.stat().st_mtime_ns for path in sorted(train_dir.rglob("*"))}
    flags = runs.training_flags(train_dir, data_dir.parent)
    done = runs.call("train.py", *flags)
    assert refused(done, "global_batch_size: 16 there, 8 now")
    commands = [
        line.split() for line in done.stderr.splitlines() if "    python " in line
    ]
    assert len(commands) == 3
    assert commands[0][-2:] == ["--resume", str(train_dir)]
    assert commands[1][-2:] == ["--train_dir", f"{train_dir}.1"]
    assert commands[2][-1] == "--fresh"
    after = {path: path.stat().st_mtime_ns for path in sorted(train_dir.rglob("*"))}
    assert after == before, "a refused command changed the run"
    for words in commands:
        pasted = runs.call(*words[1:])
        assert pasted.returncode == 0, pasted.stderr
    assert (Path(f"{train_dir}.1") / "checkpoints").is_dir()
