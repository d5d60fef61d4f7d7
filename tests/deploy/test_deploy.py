"""The batch script, the manifest and the image: checked without what runs them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import runs
from cifar10.distributed import cluster
from cifar10.run_directory import logs

DEPLOY = runs.ROOT / "deploy"
SLURM = DEPLOY / "slurm.sbatch"
DOCKERFILE = DEPLOY / "Dockerfile"
SERVING = DEPLOY / "Dockerfile.serve"
ONNX = DEPLOY / "Dockerfile.onnx"
DOCKERFILES = (DOCKERFILE, SERVING, ONNX)


def executable(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def path_with(folder):
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("program", "file"),
    [("shellcheck", SLURM), *(("hadolint", path) for path in DOCKERFILES)],
)
def test_linters_find_nothing(program, file):
    path = path_with(Path(sys.executable).parent)
    found = shutil.which(program, path=path) or pytest.skip("it is not installed")
    done = subprocess.run([found, file], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


UNIT = DEPLOY / "cifar10-train.service"


def test_systemd_accepts_the_unit(tmp_path):
    program = shutil.which("systemd-analyze") or pytest.skip("it is not installed")
    here = {"/srv/cifar10/.venv/bin/python": sys.executable, "/srv": str(tmp_path)}
    text = UNIT.read_text()
    for there, path in here.items():
        text = text.replace(there, path)
    unit = tmp_path / UNIT.name
    unit.write_text(text)
    command = [program, "verify", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Other units of the machine may have faults, too.
    assert UNIT.name not in done.stdout + done.stderr
    unit.write_text(text.replace("RestartSec=30", "RestartSec=soon"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert UNIT.name in done.stdout + done.stderr, "it looks at the unit"


def test_the_unit_restarts_only_after_recoverable_failures():
    """As the table of exit codes has it."""
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line]
    settings = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert settings["Restart"] == "on-failure"
    assert settings["RestartPreventExitStatus"] == "2 3"
    assert settings["SuccessExitStatus"] == str(128 + signal.SIGTERM)


def test_cron_mails_each_event_once(tmp_path):
    """By the line in docs/operating.md."""
    page = (runs.ROOT / "docs/operating.md").read_text()
    (line,) = re.findall(r"^\*/10 \* \* \* \* (.*comm .*)$", page, re.MULTILINE)
    command = ["sh", "-c", line.replace("/srv/runs", str(tmp_path))]

    def mailed():
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.splitlines()

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    log = tmp_path / "one/metrics.jsonl"
    log.write_text('{"step": 10, "total_loss": 2.0}\n')
    assert mailed() == []
    event = {"step": 15, "time": 1.0, "event": "skip", "what": "it is nan"}
    logs.append_line(log, event)
    assert mailed() == [f"./one/{json.dumps(event)}"]
    assert mailed() == []
    log.rename(log.with_name("metrics.jsonl.1"))
    later = {**event, "step": 30}
    of_seed = tmp_path / "two" / "seed-0"
    of_seed.mkdir()
    logs.append_line(of_seed / "metrics.jsonl", later)
    os.mkfifo(tmp_path / "two" / "metrics.jsonl")
    assert mailed() == [f"./two/seed-0/{json.dumps(later)}"]
    assert mailed() == []


# SLURM, with stand-ins for its commands. Like the real srun, this one starts every task
# and returns the highest exit code.

SRUN = """
while [[ $1 == --* ]]; do shift; done
highest=0
for task in 0 1; do
  export SLURM_PROCID=$task
  setsid "$@" &
  if [[ -n ${SIGNAL:-} ]]; then
    until [[ -e $SEEN ]] && (($(wc -l < "$SEEN") > task)); do sleep 0.05; done
    kill -s "$SIGNAL" -- "-$!"
  fi
  wait $!
  code=$?
  ((code > highest)) && highest=$code
done
exit $highest
"""
SCONTROL = """
if [[ $1 == show ]]; then
  printf 'JobId=7\\n   %s Reason=None\\n' "${STATE:-JobState=RUNNING PreemptTime=None}"
else
  echo "$@" >> "$REQUEUED"
fi
"""
PYTHON = """
exec 2> /dev/null # Its own sleep is killed by the signal, too, which it would tell.
ended=false
trap 'ended=true' USR1
echo "$@" >> "$SEEN"
train_dir=$3
while (($#)); do
  [[ $1 != --train_dir && $1 != --resume ]] || train_dir=$2
  [[ $1 != --*_dir=* ]] || train_dir=${1#*=}
  shift
done
mkdir -p "$train_dir/checkpoints/step-$(printf %08d "${STEP:-100}")"
if [[ -n ${SIGNAL:-} ]]; then
  until $ended; do sleep 0.05; done
fi
codes=($CODES)
exit "${codes[$SLURM_PROCID]}"
"""


@pytest.fixture
def submit(tmp_path):
    """Runs the batch script; returns its exit code and whether it asks for a requeue.

    `submit.said` is what it has said, `submit.seen` the commands of its last trainings.
    """
    requeued, seen = tmp_path / "requeued", tmp_path / "seen"
    for name, text in (("srun", SRUN), ("python", PYTHON), ("scontrol", SCONTROL)):
        executable(tmp_path / name, text)

    def run(codes, *flags, **environment):
        for path in (requeued, seen):
            path.unlink(missing_ok=True)
        own = {"PATH": path_with(tmp_path), "SLURM_JOB_ID": "7", "CODES": codes}
        own |= {"SEEN": str(seen), "REQUEUED": str(requeued)}
        done = subprocess.run(
            [SLURM, *flags],
            env={**own, **environment},
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.stderr == ""
        run.said, run.seen = done.stdout, seen.read_text()
        asked = requeued.read_text() if requeued.exists() else ""
        return done.returncode, asked == "requeue 7\n"

    return run


ENOUGH = {"SLURM_RESTART_COUNT": "3", "MOST_RESTARTS": "3"}
PREEMPTED = "PreemptTime=2026-11-23T22:34:34"


@pytest.mark.parametrize(
    ("codes", "environment", "code", "requeued"),
    [
        ("137 75", {}, 0, True),
        ("0 0", {}, 0, False),
        ("75 2", {}, 2, False),  # Refused by one.
        ("3 75", {}, 3, False),  # Diverged, as only the chief knows.
        ("143 143", {}, 143, False),
        # Enough losses; but the end of the time is none.
        ("75 75", ENOUGH, 75, False),
        ("138 138", {**ENOUGH, "STEP": "200"}, 0, True),
        ("143 143", {"STATE": f"JobState=RUNNING {PREEMPTED}"}, 0, True),
        ("143 143", {"STATE": f"JobState=CANCELLED {PREEMPTED}"}, 143, False),
        # After the failure of a node SLURM may be the first to requeue.
        ("75 75", {"STATE": "JobState=PENDING PreemptTime=None"}, 0, False),
        # The signal reaches the shell around it too, which passes its code on.
        ("138 138", {"SIGNAL": "USR1"}, 0, True),
    ],
)
def test_slurm_requeues_only_jobs_able_to_continue(
    submit, codes, environment, code, requeued
):
    assert submit(codes, **environment) == (code, requeued)
    ends_by_restarts = code == 75
    assert ("MOST_RESTARTS" in submit.said) is ends_by_restarts


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--train_dir", "a"],
        ["--checkpoint_dir=a", "--seed=3"],
        ["--resume", "a/"],
    ],
)
def test_a_time_limit_shorter_than_the_start_ends_the_job(submit, tmp_path, words):
    """The first piece may have had to prepare the data."""
    train_dir = tmp_path / ("a" if words else "runs/7")
    for step in (90, 100):
        (train_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    for restarts, step, code in ((1, 100, 138), (0, 103, 0), (9, 200, 0)):
        environment = {"SLURM_RESTART_COUNT": str(restarts), "STEP": str(step)}
        assert submit("138 138", *words, **environment) == (code, code == 0)
        assert ("--time" in submit.said) is bool(code)
        named = submit.seen.count("--train_dir") + submit.seen.count("--checkpoint_dir")
        assert named == 2 * ("--resume" not in words), "it names the run alone"


def test_slurm_forwards_the_flags_and_fresh_only_once(submit, tmp_path):
    flags = ("--fresh", "--recipe", "a file.toml")
    command = f"train_multi_gpu.py --train_dir {tmp_path}/runs/7 --hang_timeout 600"
    submit("0 0", *flags)
    assert submit.seen == f"{command} --fresh --recipe a file.toml\n" * 2
    submit("0 0", *flags, SLURM_RESTART_COUNT="1")
    assert submit.seen == f"{command} --recipe a file.toml\n" * 2


def test_the_slurm_shell_forwards_a_signal_to_the_run():
    """As where SLURM tracks processes by cgroups: it signals its own children only."""
    options = dict(re.findall(r"\n#SBATCH --([\w-]+)=?(.*)", SLURM.read_text()))
    assert options["signal"] == "USR1@120", "with B: it would be the script's"
    snippet = re.search(r"worker='(.*?)'\n\n", SLURM.read_text(), re.DOTALL)[1]
    training = "trap 'exit 138' USR1; echo ready; while :; do sleep 0.05; done"
    command = ["bash", "-c", snippet.replace("'$above'", "200"), "worker"]
    with subprocess.Popen(
        [*command, "bash", "-c", training], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        status = Path(f"/proc/{process.pid}/status")
        bit = 1 << (signal.SIGUSR1 - 1)
        while not bit & int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16):
            time.sleep(0.02)  # The shell starts the training before its own trap.
        process.send_signal(signal.SIGUSR1)
        assert process.wait() == 138


# Kubernetes.


@pytest.fixture(scope="module")
def manifest():
    """The objects of the manifest, by kind."""
    yaml = pytest.importorskip("yaml")
    objects = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {one["kind"]: one for one in objects}


@pytest.fixture(scope="module")
def pod(manifest):
    return manifest["Job"]["spec"]["template"]


@pytest.fixture(scope="module")
def worker(pod):
    (container,) = pod["spec"]["containers"]
    return container


def test_the_oldest_kubernetes_accepts_the_manifest(manifest, pod, worker):
    schemas = pytest.importorskip("kubernetes_validate")
    for part in manifest.values():
        schemas.validate(part, "1.29.0", strict=True)  # Unknown fields too.
    (claim,) = [one for one in pod["spec"]["volumes"] if "persistentVolumeClaim" in one]
    (mount,) = [one for one in worker["volumeMounts"] if one["name"] == claim["name"]]
    assert f"--train_dir={mount['mountPath']}/cifar10" in worker["args"]
    # The images run as the same user.
    user = str(pod["spec"]["securityContext"]["runAsUser"])
    assert instructions("USER") == instructions("USER", SERVING) == [user]


def test_refused_run_ends_the_job(manifest, worker):
    actions = {
        code: rule["action"]
        for rule in manifest["Job"]["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
        if rule["onExitCodes"]["containerName"] == worker["name"]
    }
    assert actions == {2: "FailJob", 3: "FailJob", 128 + signal.SIGTERM: "Ignore"}


def test_a_pod_knows_its_worker_index(manifest, worker, tmp_path):
    executable(tmp_path / "python", 'printf "%s\\n" "$TF_CONFIG" "$@" > "$SEEN"')
    assert "$$" not in worker["command"][2], "Kubernetes makes one dollar of it"
    variables = {one["name"]: one.get("value", "") for one in worker["env"]}
    variables |= {"SEEN": str(tmp_path / "seen"), "JOB_COMPLETION_INDEX": "1"}
    subprocess.run(
        [*worker["command"], *worker["args"]],
        env={**variables, "PATH": path_with(tmp_path)},
        check=True,
    )
    config, *words = (tmp_path / "seen").read_text().splitlines()
    assert words == ["train_multi_gpu.py", *worker["args"]]
    found = cluster.from_environment({"TF_CONFIG": config})
    job, service = manifest["Job"], manifest["Service"]
    (port,) = (one["port"] for one in service["spec"]["ports"])
    count = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == count
    name, domain = (one["metadata"]["name"] for one in (job, service))
    expected = [f"{name}-{number}.{domain}:{port}" for number in range(count)]
    assert [*found.addresses] == expected
    assert found.index == 1
    assert [one["containerPort"] for one in worker["ports"]] == [port]


# The images.


def instructions(name, file=DOCKERFILE):
    """The operands of a Dockerfile's instructions of one name."""
    text = file.read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [words[1] for words in lines if words[0] == name]


def test_the_builder_gets_exactly_the_files_copied_by_the_dockerfiles():
    ignored = (runs.ROOT / ".dockerignore").read_text().splitlines()
    admitted = {line[1:] for line in ignored if line.startswith("!")}
    files = [*DOCKERFILE.parent.glob("Dockerfile*")]
    operands = [words for file in files for words in instructions("COPY", file)]
    copied = {source for words in operands for source in words.split()[:-1]}
    assert len(files) == 3
    assert copied == admitted


def test_a_new_container_knows_which_runs_are_the_users():
    """Its notes are on the volume of the runs."""
    (settings,) = instructions("ENV")
    given = dict(one.split("=") for one in settings.split())
    state = Path(given["XDG_STATE_HOME"])
    assert str(state.parent) in json.loads(instructions("VOLUME")[0])
    *_, train_dir = json.loads(instructions("ENTRYPOINT")[0])
    assert Path(train_dir).parent == state.parent
    assert state.name.startswith("."), "it looks like a run"


@pytest.mark.parametrize("file", [DOCKERFILE, SERVING], ids=["train", "serve"])
def test_an_image_holds_everything_needed_by_its_program(tmp_path, file):
    """Its files alone, as `docker build` copies them, start the program."""
    for operands in instructions("COPY", file):
        *sources, target = operands.split()
        for source in sources:
            if (runs.ROOT / source).is_dir():
                shutil.copytree(runs.ROOT / source, tmp_path / target)
            else:
                shutil.copy(runs.ROOT / source, tmp_path / target)
    # Signals reach Python.
    ((python, *words),) = map(json.loads, instructions("ENTRYPOINT", file))
    assert python == "python"
    assert "--train_dir" in words, "which further flags leave alone"
    assert not instructions("CMD", file)
    flag = "--num_gpus" if file == DOCKERFILE else "--port"
    done = runs.run(*words, flag, "none", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert flag in done.stderr
