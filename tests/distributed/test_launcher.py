"""What is started again, what is not, and with which exit code it ends."""

import ctypes
import json
import os
import signal
import subprocess
import textwrap
import time
from unittest import mock

import pytest

import runs
from cifar10 import hardware
from cifar10.distributed import launcher
from cifar10.errors import LostWorkerError, MissingGpuError, StoppedError, UsageError

# Stands for a run. It notes how it was started, may begin a run, and ends as
# `plan` says for this start and this worker: with a code, or killed by a signal (-N).
SCRIPT = """
    import json, os, pathlib, signal, sys, time
    here = pathlib.Path(__file__).parent
    worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]
    index = worker["index"]
    start = [sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES")]
    starts = here / f"starts-{index}"
    starts.open("a").write(json.dumps(start) + chr(10))
    number = len(starts.read_text().splitlines()) - 1
    plan = json.loads((here / "plan").read_text())[number][index]
    if plan == "wait":
        def stop(*_):
            (here / f"stopped-{index}").touch()
            sys.exit(143)

        signal.signal(signal.SIGTERM, stop)
        unfinished = here / f"unfinished-{index}"
        unfinished.write_text(str(os.getpgrp()))
        unfinished.rename(here / f"waiting-{index}")
        time.sleep(30)
    if "aborts" in str(plan):
        facts = {"towers": 4, "accumulate": 2, "on_gpus": "cpu" not in plan}
        names = ("data", "data_dir", "data_url", "distortions", "model", "precision")
        facts |= {name: "any" for name in names}
        facts |= {"global_batch_size": 256, "max_steps": 9, "parameters": 1}
        (here / "config.json").write_text(json.dumps({**facts, "simulated": False}))
        plan = -6
    if "begun" in str(plan):
        (here / "config.json").write_text(str(time.time()))
        plan = int(plan.split()[1])
    print(f"worker {index} ends", file=sys.stderr, flush=True)
    if plan < 0:
        os.kill(os.getpid(), -plan)
        time.sleep(30)
    sys.exit(plan)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Launches the script with a plan: for each start, how each worker ends."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))

    def launch(plan, *flags, workers=None, restarts=0):
        (tmp_path / "plan").write_text(json.dumps(plan))
        command = [str(tmp_path / "script.py"), *flags]
        launcher.launch(workers, restarts, command, tmp_path)

    return launch


@pytest.mark.parametrize(
    ("left", "flags"),
    [
        (4, []),
        (3, ["--num_gpus", "2", "--accumulate", "4"]),
        (2, ["--num_gpus", "2", "--accumulate", "4"]),
        (1, ["--num_gpus", "1", "--accumulate", "8"]),
    ],
)
def test_a_restart_uses_the_remaining_gpus(
    tmp_path, launch, monkeypatch, capsys, left, flags
):
    monkeypatch.setattr(hardware, "count_gpus", lambda: left)
    given = ["--batch_size", "32", "--num_gpus=4", "--accumulate", "2"]
    launch([["aborts"], [0]], *given, restarts=1)
    words = [words for words, _ in starts(tmp_path)]
    assert words == [given, [*given[:2], *flags] if flags else given]
    said = capsys.readouterr().err
    assert (f"{left} of 4 GPUs are left" in said) == bool(flags)
    assert "the training was killed by SIGABRT" in said


def test_a_restart_without_any_gpu_ends_with_the_reason(tmp_path, launch, monkeypatch):
    monkeypatch.setattr(hardware, "count_gpus", lambda: 0)
    with pytest.raises(MissingGpuError, match="0 of 4 GPUs are left"):
        launch([["aborts"], [0]], restarts=1)
    assert len(starts(tmp_path)) == 1


def test_a_run_on_the_cpu_is_restarted_as_it_was(tmp_path, launch, monkeypatch):
    monkeypatch.setattr(hardware, "count_gpus", lambda: 0)
    launch([["aborts cpu"], [0]], "--num_gpus", "4", restarts=1)
    assert [words for words, _ in starts(tmp_path)] == [["--num_gpus", "4"]] * 2


def starts(tmp_path, index=0):
    """Returns the words and the GPUs of each start of a worker."""
    lines = (tmp_path / f"starts-{index}").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_workers_start_on_a_system_that_cannot_end_them_with_the_launcher(
    tmp_path, launch, monkeypatch
):
    for error in (OSError, AttributeError):
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", mock.Mock(side_effect=error))
            launch([[0], [0]])
    assert len(starts(tmp_path)) == 2


def test_a_driver_that_fails_or_crashes_counts_no_gpus(monkeypatch):
    for program in ("raise SystemExit(3)", "import os; os.abort()"):
        monkeypatch.setattr(hardware, "_COUNT_GPUS", program)
        assert hardware.count_gpus() == 0


def test_all_workers_are_restarted_after_a_loss(tmp_path, launch, capsys):
    flags = ("--local_workers", "2", "--seed", "3", "--max_restarts=2")
    launch([[75, -9], [1, 75], [0, 0]], *flags, workers=2, restarts=2)
    assert [words for words, _ in starts(tmp_path)] == [["--seed", "3"]] * 3
    said = capsys.readouterr().err
    assert "worker 0 ended with exit code 75, worker 1 was killed by SIGKILL" in said
    assert "2 of 2" in said


@pytest.mark.parametrize(
    ("ends", "code"),
    [([2, 75], 2), ([75, 138], 138), ([3, 0], 3), ([143, 3], 3)],
    ids=str,
)
def test_final_exit_codes_cause_no_restart(tmp_path, launch, ends, code):
    """A stop is final even where another machine's launcher was asked for it."""
    with pytest.raises(StoppedError) as ended:
        launch([ends, [0, 0]], workers=2, restarts=3)
    assert ended.value.exit_code == code
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(("code", "error"), [(75, LostWorkerError), (1, StoppedError)])
def test_too_many_failures_end_the_launcher(tmp_path, launch, code, error):
    with pytest.raises(error, match="resumes") as ended:
        launch([[code]] * 3, restarts=2)
    assert len(starts(tmp_path)) == 3
    if error is StoppedError:
        assert ended.value.exit_code == 1, "a fault keeps its exit code"


def test_the_first_fault_of_several_workers_is_the_exit_code(launch):
    with pytest.raises(StoppedError, match="worker 2 ended with exit code 5") as ended:
        launch([[75, 4, 5]], workers=3)
    assert ended.value.exit_code == 4


@pytest.mark.usefixtures("launch")
def test_a_worker_unaware_of_a_loss_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_SECONDS_TO_NOTICE", 0.5)
    (tmp_path / "plan").write_text(json.dumps([[75, "wait"]]))
    environments = launcher._environments(2)
    codes, _ = launcher._run_workers(environments, [str(tmp_path / "script.py")])
    assert codes == [75, -signal.SIGKILL]


def test_fresh_is_left_out_only_once_the_new_run_has_begun(tmp_path, launch):
    """Else a restart would go on with the very run that was to be moved aside."""
    (tmp_path / "config.json").write_text("an earlier run")
    launch([[75], ["begun 75"], [75], [0]], "--fresh", restarts=3)
    assert [words for words, _ in starts(tmp_path)] == [
        ["--fresh"],
        ["--fresh"],
        [],
        [],
    ]


def test_a_signal_during_the_start_of_workers_ends_them_all(launch, monkeypatch):
    start, ends = subprocess.Popen, []

    def start_interrupted(*words, **options):
        if ends:
            os.kill(os.getpid(), signal.SIGTERM)
        ends.append(start(*words, **options))
        return ends[-1]

    monkeypatch.setattr(launcher.subprocess, "Popen", start_interrupted)
    with pytest.raises(StoppedError):
        launch([["wait", "wait"]], workers=2)
    assert {abs(process.returncode) for process in ends} <= {signal.SIGTERM, 143}


@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_launcher_ends_every_worker(tmp_path, number):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from cifar10.process import entry_point as cli\n"
        "from cifar10.distributed import launcher\n"
        "here = Path(sys.argv[1])\n"
        "script = [str(here / 'script.py')]\n"
        "cli.run_program(lambda: launcher.launch(2, 2, script, here))\n"
    )
    (tmp_path / "plan").write_text(json.dumps([["wait", "wait"]] * 3))
    with runs.started("-c", program, tmp_path) as process:
        while len(waiting := [*tmp_path.glob("waiting-?")]) < 2:
            assert process.poll() is None, "the launcher has ended"
            time.sleep(0.02)
        process.send_signal(number)
        process.wait()
    ends = {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == ends[number]
    while len([*tmp_path.glob("stopped-?")]) < 2:
        time.sleep(0.02)
    assert len(starts(tmp_path)) == 1
    # Ctrl-C in a terminal reaches all of the launcher's own group.
    assert len({*(path.read_text() for path in waiting), str(os.getpgrp())}) == 3


def test_gpus_are_divided_among_workers(tmp_path, launch, monkeypatch):
    monkeypatch.setattr(hardware, "count_gpus", lambda: 2)
    for visible in ("4,MIG-5,6,7", "-1", None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        launch([[0, 0]] * 3, workers=2)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shares = zip(starts(tmp_path), starts(tmp_path, 1), strict=True)
    assert [[gpus for _, gpus in pair] for pair in shares] == [
        ["4,MIG-5", "6,7"],
        ["-1", "-1"],
        ["0", "1"],
    ]


@pytest.mark.parametrize(
    ("visible", "advice"),
    [("4", "CUDA_VISIBLE_DEVICES=-1"), ("4,5,6,7,9", "CUDA_VISIBLE_DEVICES=4,5,6,7")],
)
def test_an_unequal_division_of_gpus_is_refused(launch, monkeypatch, visible, advice):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UsageError, match=f"{advice} before"):
        launch([[0, 0]], workers=2)


# Stands for a run with a seed, which `plan` gives an exit code and a score.
OF_A_SEED = """
    import json, os, pathlib, sys
    words = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    plan = json.loads((pathlib.Path(__file__).parent / "plan").read_text())
    code, score = plan[words["--seed"]]
    scores = pathlib.Path(words["--train_dir"]) / "eval"
    scores.mkdir(parents=True)
    names = ("data", "data_dir", "data_url", "distortions", "model", "precision")
    facts = dict.fromkeys(names, "any") | {"seed": int(words["--seed"])}
    facts |= {"rate": words["--rate"], "simulated": False, "parameters": 1}
    facts |= {"global_batch_size": 256, "max_steps": 9}
    (scores.parent / "config.json").write_text(json.dumps(facts))
    line = {"step": 9, "num_examples": 100, "precision @ 1": score}
    (scores / "metrics.jsonl").write_text(json.dumps(line) if score else "")
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
"""
MEAN = "precision @ 1 = 0.6000 on test at step 9, mean of 2 seeds"


@pytest.mark.parametrize(
    ("plan", "code", "said", "trained"),
    [
        ({5: (0, 0.5), 6: (0, 0.7)}, 0, MEAN, 2),
        ({5: (3, 0.5), 6: (0, 0.7)}, 3, MEAN, 2),
        ({5: (0, None), 6: (0, None)}, 0, "No seed was scored", 2),
        ({5: (1, None)}, 1, "resumes there", 1),
        ({5: (-9, None)}, 137, "Seed 5 ended with exit code 137", 1),
        ({5: (2, None)}, 2, "Seed 5 ended with exit code 2.", 1),
    ],
)
def test_each_seed_is_trained_until_one_fails_other_than_by_divergence(
    tmp_path, capsys, plan, code, said, trained
):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(OF_A_SEED))
    (tmp_path / "plan").write_text(json.dumps(plan))
    command = [str(script), "--seeds", "5:7", "--train_dir=here", "--rate", "1"]
    found, told = 0, ""
    try:
        launcher.train_seeds("5:7", command, tmp_path / "trial")
    except StoppedError as ended:
        found, told = ended.exit_code, str(ended)
    shown = capsys.readouterr()
    told = shown.out + shown.err + told
    assert (found, said in told) == (code, True), told
    assert ("resumes" in told) == (code not in (0, 2, 3)), "after a mistake it cannot"
    assert ("mean of" in told) == (said is MEAN)
    runs_of = sorted(path.name for path in (tmp_path / "trial").iterdir())
    assert runs_of == ["seed-5", "seed-6"][:trained]


def test_an_empty_range_of_seeds_is_refused(tmp_path):
    with pytest.raises(UsageError, match="5:5"):
        launcher.train_seeds("5:5", ["script.py"], tmp_path)
