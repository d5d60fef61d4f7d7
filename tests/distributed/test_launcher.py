"""What is started again, what is not, and with which exit code it ends."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from cifar10.distributed import launcher
from cifar10.errors import LostWorkerError, StoppedError, UsageError

# Stands for a training. It notes how it was started, may begin a run, and ends as
# `plan` says for this start and this worker: with a code, or killed by a signal (-N).
SCRIPT = """
    import json, os, pathlib, signal, sys, time
    here = pathlib.Path(__file__).parent
    worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]
    index = worker["index"]
    starts = here / f"starts-{index}"
    starts.open("a").write(json.dumps(sys.argv[1:]) + chr(10))
    secrets = here / f"secrets-{index}"
    secrets.open("a").write(os.environ.get("CIFAR10_WORKER_SECRET", "") + chr(10))
    number = len(starts.read_text().splitlines()) - 1
    plan = json.loads((here / "plan").read_text())[number][index]
    if plan == "wait":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        unfinished = here / f"unfinished-{index}"
        unfinished.write_text(str(os.getpgrp()))
        unfinished.rename(here / f"waiting-{index}")
        time.sleep(30)
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
        command = [str(tmp_path / "script.py"), "--seed", "3", *flags]
        launcher.launch(workers, restarts, command, tmp_path)

    return launch


def starts(tmp_path, index=0):
    lines = (tmp_path / f"starts-{index}").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_what_ends_well_is_not_started_again(tmp_path, launch):
    launch([[0, 0, 0]], workers=3, restarts=5)
    assert [len(starts(tmp_path, index)) for index in range(3)] == [1, 1, 1]


def test_all_are_started_again_after_a_loss(tmp_path, launch, capsys):
    flags = ("--local_workers", "2", "--max_restarts=2")
    launch([[75, -9], [1, 75], [0, 0]], *flags, workers=2, restarts=2)
    assert starts(tmp_path) == starts(tmp_path, 1) == [["--seed", "3"]] * 3
    said = capsys.readouterr().err
    assert "worker 0 ended with exit code 75, worker 1 was killed by SIGKILL" in said
    assert "Restarting all, 2 of 2 times" in said
    time.sleep(0.2)
    assert "[worker 1] worker 1 ends" in said + capsys.readouterr().err


def test_the_workers_of_a_start_share_a_secret_that_nobody_else_sees(
    tmp_path, launch, monkeypatch, capsys
):
    monkeypatch.setenv("CIFAR10_WORKER_SECRET", "known")
    launch([[75, 75], [0, 0]], workers=2, restarts=1)
    first, second = (tmp_path / "secrets-0").read_text().splitlines()
    assert (tmp_path / "secrets-1").read_text().splitlines() == [first, second]
    assert len({first, second, "known", ""}) == 4
    words = str([*starts(tmp_path), *starts(tmp_path, 1), *capsys.readouterr()])
    assert first not in words
    assert "CIFAR10_WORKER_SECRET" not in words


@pytest.mark.parametrize(("others", "workers"), [(True, 2), (False, 2), (True, 1)])
def test_other_users_of_the_machine_are_told_of_with_what_keeps_them_out(
    tmp_path, launch, monkeypatch, capsys, others, workers
):
    monkeypatch.setattr(launcher.loopback, "has_other_users", lambda: others)
    words = ["--local_workers", str(workers), "--data", "my photos"]
    launch([[0] * workers], *words, workers=workers)
    said = capsys.readouterr().err
    assert ("unshare" in said) is (others and workers > 1)
    if "unshare" in said:
        (pasted,) = [line for line in said.splitlines() if "unshare" in line]
        script = str(tmp_path / "script.py")
        pasted = shlex.split(pasted)
        assert pasted[-7:] == ["python", script, "--seed", "3", *words][-7:]
        shell = pasted.index("sh")
        assert pasted[:shell] == ["unshare", "--map-root-user", "--net"]
        assert pasted[shell + 2].endswith('exec "$0" "$@"')


@pytest.mark.parametrize(
    ("ends", "code"),
    [([2, 75], 2), ([75, 138], 138), ([143, 143], 143), ([141, 0], 141)],
    ids=str,
)
def test_what_a_restart_does_not_mend_is_final(tmp_path, launch, ends, code):
    """A stop is final even where another machine's launcher was asked for it."""
    with pytest.raises(StoppedError) as ended:
        launch([ends, [0, 0]], workers=2, restarts=3)
    assert ended.value.exit_code == code
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(
    ("code", "error"), [(75, LostWorkerError), (-9, LostWorkerError), (1, StoppedError)]
)
def test_too_many_losses_end_it(tmp_path, launch, code, error):
    with pytest.raises(error, match="Resume from the last") as ended:
        launch([[code]] * 3, restarts=2)
    assert len(starts(tmp_path)) == 3
    if error is StoppedError:
        assert ended.value.exit_code == 1, "a fault keeps its exit code"


def test_fresh_is_left_out_only_once_the_new_run_has_begun(tmp_path, launch):
    """Else a restart would go on with the very run that was to be moved aside."""
    (tmp_path / "config.json").write_text("an earlier run")
    launch([[75], ["begun 75"], [75], [0]], "--fresh", restarts=3)
    with_fresh, without = ["--seed", "3", "--fresh"], ["--seed", "3"]
    assert starts(tmp_path) == [with_fresh, with_fresh, without, without]


def test_a_signal_reaches_every_worker_once_and_ends_the_launcher(tmp_path, launch):
    over = threading.Event()

    def stop():
        while not all((tmp_path / f"waiting-{index}").exists() for index in (0, 1)):
            if over.wait(0.02):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(StoppedError, match="143; not restarted") as ended:
            launch([["wait", "wait"]] * 3, workers=2, restarts=2)
    finally:
        over.set()
        thread.join()
    assert ended.value.exit_code == 128 + signal.SIGTERM
    assert len(starts(tmp_path)) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    # Ctrl-C in a terminal reaches all of the launcher's own group.
    groups = {(tmp_path / f"waiting-{index}").read_text() for index in (0, 1)}
    assert len({*groups, str(os.getpgrp())}) == 3


@pytest.mark.usefixtures("launch")
def test_workers_end_when_their_launcher_is_killed(tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from cifar10.distributed import launcher\n"
        "here = Path(sys.argv[2])\n"
        "launcher.launch(2, 0, [str(here / 'script.py')], here)\n"
    )
    (tmp_path / "plan").write_text(json.dumps([["wait", "wait"]]))
    root = str(Path(launcher.__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", program, root, tmp_path]) as process:
        while not all((tmp_path / f"waiting-{index}").exists() for index in (0, 1)):
            assert process.poll() is None, "the launcher has ended"
            time.sleep(0.02)
        process.kill()
    deadline = time.monotonic() + 10
    while running(tmp_path):
        assert time.monotonic() < deadline, "workers were left behind"
        time.sleep(0.05)


def running(tmp_path):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path] if str(tmp_path / "script.py") in path.read_text() else []
        except OSError:
            continue
    return found


def test_a_worker_does_not_launch_workers(launch, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {}}')
    with pytest.raises(UsageError, match="TF_CONFIG is set"):
        launch([[0, 0]], workers=2)


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,9")
    shares = [one["CUDA_VISIBLE_DEVICES"] for one in launcher._gpus(2)]
    assert shares == ["4,5", "6,7"]
    with pytest.raises(UsageError, match="this machine has 5 GPUs"):
        launcher._gpus(6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert launcher._gpus(2) == [{}, {}]
