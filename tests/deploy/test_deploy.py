"""The batch script, the manifest and the image: checked without what runs them."""

import argparse
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cifar10.config import flags
from cifar10.distributed import cluster
from cifar10.errors import UsageError
from cifar10.input import cifar
from cifar10.tools.serve.options import Options
from sites import refused_url

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SLURM = DEPLOY / "slurm.sbatch"
DOCKERFILE = DEPLOY / "Dockerfile"
SERVING = DEPLOY / "Dockerfile.serve"


def executable(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


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
  [[ $1 != --train_dir ]] || train_dir=$2
  [[ $1 != --train_dir=* ]] || train_dir=${1#*=}
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
    """Runs the batch script; returns its exit code, the requeues, and all commands."""

    def run(codes, *flags, **environment):
        requeued, seen = tmp_path / "requeued", tmp_path / "seen"
        executable(tmp_path / "srun", SRUN)
        executable(tmp_path / "python", PYTHON)
        executable(tmp_path / "scontrol", SCONTROL)
        done = subprocess.run(
            [SLURM, *flags],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "SLURM_JOB_ID": "7",
                "CODES": codes,
                "SEEN": str(seen),
                "REQUEUED": str(requeued),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=30,
        )
        assert done.stderr == ""
        asked = requeued.read_text() if requeued.exists() else ""
        run.said = done.stdout
        return done.returncode, asked, seen.read_text()

    return run


@pytest.mark.parametrize(
    "codes",
    ["138 138", "75 75", "137 75"],
    ids=["the time is up", "a worker was lost", "a worker was killed"],
)
def test_slurm_starts_again_what_can_go_on(submit, codes):
    _, requeued, _ = submit(codes)
    assert requeued == "requeue 7\n"


@pytest.mark.parametrize(
    ("codes", "code"),
    [("0 0", 0), ("2 2", 2), ("75 2", 2), ("143 143", 143), ("1 1", 1)],
    ids=["done", "refused", "refused by one", "stopped", "crashed"],
)
def test_slurm_does_not_start_again_what_cannot(submit, codes, code):
    assert submit(codes)[:2] == (code, "")


def test_slurm_starts_again_only_so_often_after_a_loss(submit):
    enough = {"SLURM_RESTART_COUNT": "3", "MOST_RESTARTS": "3"}
    assert submit("75 75", **enough)[:2] == (75, "")
    # The end of the time is no fault, so it does not count.
    assert submit("138 138", STEP="200", **enough)[1] == "requeue 7\n"


PREEMPTED = "PreemptTime=2026-11-23T22:34:34"


@pytest.mark.parametrize(
    ("state", "goes_on"),
    [
        (f"JobState=RUNNING {PREEMPTED}", True),
        ("JobState=RUNNING PreemptTime=None", False),
        (f"JobState=CANCELLED {PREEMPTED}", False),
        ("JobState=CANCELLED PreemptTime=None", False),
    ],
    ids=["preempted", "stopped", "cancelled in its grace time", "cancelled"],
)
def test_slurm_starts_a_preempted_job_again_and_no_cancelled_one(
    submit, state, goes_on
):
    code, requeued, _ = submit("143 143", STATE=state)
    assert (code, requeued) == ((0, "requeue 7\n") if goes_on else (143, ""))


@pytest.mark.parametrize("words", [[], ["--train_dir", "a"], ["--train_dir=a"]])
@pytest.mark.parametrize(
    ("restarts", "step", "code"),
    [(1, 200, 0), (9, 200, 0), (0, 103, 0), (1, 103, 138), (1, 100, 138)],
    ids=["far", "far again", "the first", "hardly any", "none"],
)
def test_a_time_that_is_shorter_than_the_start_ends_the_job(
    submit, tmp_path, words, restarts, step, code
):
    """The first piece may have had to prepare the data."""
    train_dir = tmp_path / ("a" if words else "runs/7")
    (train_dir / "checkpoints" / "step-00000100").mkdir(parents=True)
    (train_dir / "checkpoints" / "step-00000090").mkdir()
    environment = {"SLURM_RESTART_COUNT": str(restarts), "STEP": str(step)}
    ends, requeued, _ = submit("138 138", *words, **environment)
    assert ends == code
    assert requeued == ("" if code else "requeue 7\n")
    assert ("--time" in submit.said) is bool(code)


@pytest.mark.parametrize("code", ["75", "137", "138"])
def test_slurm_may_be_first_to_requeue(submit, code):
    """As after the failure of a node: then there is nothing to ask, or to complain."""
    state = "JobState=PENDING PreemptTime=None"
    assert submit(f"{code} {code}", STATE=state)[:2] == (0, "")
    assert "Job 7 goes back to the queue" in submit.said
    assert "MOST_RESTARTS" not in submit.said
    assert submit(f"{code} {code}", STATE="JobState=CANCELLED")[1] == ""
    assert "MOST_RESTARTS" not in submit.said


def test_slurm_gives_the_flags_to_the_training_and_fresh_only_once(submit, tmp_path):
    flags = ("--fresh", "--recipe", "a file.toml")
    command = f"train_multi_gpu.py --train_dir {tmp_path}/runs/7 --hang_timeout 600"
    assert submit("0 0", *flags)[2] == f"{command} --fresh --recipe a file.toml\n" * 2
    (tmp_path / "seen").unlink()
    seen = submit("0 0", *flags, SLURM_RESTART_COUNT="1")[2]
    assert seen == f"{command} --recipe a file.toml\n" * 2


def test_slurm_waits_for_a_worker_that_a_signal_ends(submit):
    """The signal reaches the shell around it too, which has to pass its code on."""
    assert submit("138 138", SIGNAL="USR1")[1] == "requeue 7\n"


def test_slurm_passes_on_a_signal_that_only_the_shell_gets():
    """As where SLURM tracks processes by cgroups: it signals its own children only."""
    snippet = re.search(r"worker='(.*?)'\n\n", SLURM.read_text(), re.DOTALL)[1]
    training = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(138))\n"
        "print('ready', flush=True)\n"
        "time.sleep(30)\n"
    )
    command = ["bash", "-c", snippet.replace("'$refused'", "202"), "worker"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", training],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=10) == 138


def test_slurm_signals_the_workers_and_not_the_script():
    lines = [line for line in SLURM.read_text().splitlines() if "#SBATCH" in line]
    options = dict(line.split()[1].lstrip("-").partition("=")[::2] for line in lines)
    assert options["signal"] == "USR1@120"
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options


def test_shellcheck_finds_nothing():
    if not (shellcheck := shutil.which("shellcheck")):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, SLURM], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


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


def test_a_step_that_hangs_ends_every_worker_of_a_deployment(worker):
    """Nobody looks at the log of a job at night."""
    assert any(one.startswith("--hang_timeout=") for one in worker["args"])
    assert "--hang_timeout" in SLURM.read_text().partition("\nsrun ")[2]


# What the manifest says it needs, and the newest.
@pytest.mark.parametrize("version", ["1.29.0", "1.37.0"])
@pytest.mark.parametrize("kind", ["Service", "PersistentVolumeClaim", "Job"])
def test_kubernetes_accepts_it(manifest, kind, version):
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(manifest[kind], version, strict=True)  # Unknown fields too.


def test_the_number_of_workers_is_the_same_everywhere(manifest, worker):
    job = manifest["Job"]["spec"]
    (workers,) = (one["value"] for one in worker["env"] if one["name"] == "WORKERS")
    assert job["completions"] == job["parallelism"] == int(workers)


def test_the_service_finds_the_pods(manifest, pod):
    service = manifest["Service"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_volumes_are_there(manifest, pod, worker):
    volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in worker["volumeMounts"]}
    claim = manifest["PersistentVolumeClaim"]
    names = {"claimName": claim["metadata"]["name"]}
    assert mounts["/runs"]["persistentVolumeClaim"] == names
    assert "--train_dir=/runs/cifar10" in worker["args"]
    assert "/data" in mounts
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_kubernetes_ends_the_job_when_it_refuses_and_only_then(manifest, worker):
    actions = {
        code: rule["action"]
        for rule in manifest["Job"]["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
        if rule["onExitCodes"]["containerName"] == worker["name"]
    }
    assert actions == {2: "FailJob", 128 + signal.SIGTERM: "Ignore"}


def test_a_worker_of_kubernetes_downloads_into_its_empty_folder(worker, tmp_path):
    """And if it cannot at the moment, it is started again."""
    parser = argparse.ArgumentParser()
    values = flags.from_flags(parser, worker["args"])
    assert not values.data_dir
    (environment,) = instructions("ENV")
    assert "CIFAR10_DATA_DIR=/data" in environment
    assert "/data" in [one["mountPath"] for one in worker["volumeMounts"]]
    environ = {"CIFAR10_DATA_DIR": str(tmp_path)}
    with pytest.raises(UsageError, match="could not be downloaded") as caught:
        cifar.find(values.data, values.data_dir, refused_url(), environ)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_knows_which_worker_it_is(manifest, worker, index, tmp_path, monkeypatch):
    program = 'printf "%s\\n" "$TF_CONFIG" "$@" > "$SEEN"'
    executable(tmp_path / "python", program)
    script = worker["command"][2]
    assert "$$" not in script, "Kubernetes makes one dollar of it"
    subprocess.run(
        [*worker["command"], *worker["args"]],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SEEN": str(tmp_path / "seen"),
            "JOB_COMPLETION_INDEX": str(index),
            **{one["name"]: one["value"] for one in worker["env"] if "value" in one},
        },
        check=True,
    )
    config, *words = (tmp_path / "seen").read_text().splitlines()
    assert words == ["train_multi_gpu.py", *worker["args"]]
    monkeypatch.setenv("TF_CONFIG", config)
    found = cluster.from_environment()
    job, service = manifest["Job"], manifest["Service"]["metadata"]["name"]
    (port,) = (one["port"] for one in manifest["Service"]["spec"]["ports"])
    assert [one.address for one in found.workers] == [
        f"{job['metadata']['name']}-{number}.{service}:{port}"
        for number in range(job["spec"]["completions"])
    ]
    assert found.index == index
    assert [one["containerPort"] for one in worker["ports"]] == [port]


# The images.


def instructions(name, file=DOCKERFILE):
    """The operands of a Dockerfile's instructions of one name."""
    text = file.read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [words[1] for words in lines if words[0] == name]


@pytest.mark.parametrize("file", [DOCKERFILE, SERVING], ids=["train", "serve"])
def test_an_image_holds_all_that_its_program_needs(tmp_path, file):
    """Its files alone, as `docker build` copies them, start the program."""
    admitted = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for operands in instructions("COPY", file):
        *sources, target = operands.split()
        for source in sources:
            copied.add(source)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    assert copied == admitted if file == DOCKERFILE else copied < admitted
    # Signals reach Python.
    (entry,) = map(json.loads, instructions("ENTRYPOINT", file))
    flag = "--num_gpus" if file == DOCKERFILE else "--port"
    done = subprocess.run(
        [*entry, flag, "none"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert flag in done.stderr
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_image_runs_as_the_user_that_kubernetes_expects(pod):
    assert instructions("USER") == [str(pod["spec"]["securityContext"]["runAsUser"])]
    assert instructions("VOLUME") == ['["/data", "/runs"]']


@pytest.mark.parametrize("status", [200, 503])
def test_the_serving_image_is_healthy_when_the_service_is(status):
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    (line,) = instructions("HEALTHCHECK", SERVING)
    _, python, code = json.loads(line[line.index("[") :])[-3:]
    assert python == "-c"
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.handle_request).start()
        code = code.replace("8000", str(server.server_port))
        done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == (0 if status == 200 else 1)


def test_the_serving_image_serves_an_export_unless_told_otherwise():
    (given,) = map(json.loads, instructions("CMD", SERVING)[-1:])
    assert given == ["--savedmodel", "/model"]
    (entry,) = map(json.loads, instructions("ENTRYPOINT", SERVING))
    port = str(Options.port)
    assert entry[-2:] == ["--host", "0.0.0.0"]  # noqa: S104
    assert instructions("EXPOSE", SERVING) == [port]
    assert instructions("USER", SERVING) == ["1000"]
    assert f"8000:{port}" in SERVING.read_text()


@pytest.mark.parametrize("file", [DOCKERFILE, SERVING], ids=["train", "serve"])
def test_hadolint_finds_nothing(file):
    if not (hadolint := shutil.which("hadolint")):
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, file], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()
