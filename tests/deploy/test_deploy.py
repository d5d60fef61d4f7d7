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

import runs
from cifar10.config import flags
from cifar10.distributed import cluster
from cifar10.errors import UsageError
from cifar10.input import cifar
from cifar10.tools.serve.options import Options
from sites import refused_url

DEPLOY = runs.ROOT / "deploy"
SLURM = DEPLOY / "slurm.sbatch"
DOCKERFILE = DEPLOY / "Dockerfile"
SERVING = DEPLOY / "Dockerfile.serve"


def executable(path, text):
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def path_with(folder):
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("program", "file"),
    [("shellcheck", SLURM), ("hadolint", DOCKERFILE), ("hadolint", SERVING)],
)
def test_linters_find_nothing(program, file):
    path = path_with(Path(sys.executable).parent)
    found = shutil.which(program, path=path) or pytest.skip("it is not installed")
    done = subprocess.run([found, file], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


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
    """Runs the batch script; returns its exit code and whether it asks for a requeue.

    `submit.said` is what it has said, `submit.seen` the commands of its last trainings.
    """
    requeued, seen = tmp_path / "requeued", tmp_path / "seen"
    for name, text in (("srun", SRUN), ("python", PYTHON), ("scontrol", SCONTROL)):
        executable(tmp_path / name, text)

    def run(codes, *flags, **environment):
        for path in (requeued, seen):
            path.unlink(missing_ok=True)
        done = subprocess.run(
            [SLURM, *flags],
            env={
                "PATH": path_with(tmp_path),
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
        ("138 138", {}, 0, True),
        ("75 75", {}, 0, True),
        ("137 75", {}, 0, True),
        ("0 0", {}, 0, False),
        ("75 2", {}, 2, False),  # Refused by one.
        ("143 143", {}, 143, False),
        ("1 1", {}, 1, False),
        # Enough losses; but the end of the time is none.
        ("75 75", ENOUGH, 75, False),
        ("138 138", {**ENOUGH, "STEP": "200"}, 0, True),
        ("143 143", {"STATE": f"JobState=RUNNING {PREEMPTED}"}, 0, True),
        ("143 143", {"STATE": f"JobState=CANCELLED {PREEMPTED}"}, 143, False),
        # After the failure of a node SLURM may be the first to requeue.
        ("75 75", {"STATE": "JobState=PENDING PreemptTime=None"}, 0, False),
        ("138 138", {"STATE": "JobState=CANCELLED"}, 138, False),
        # The signal reaches the shell around it too, which passes its code on.
        ("138 138", {"SIGNAL": "USR1"}, 0, True),
    ],
)
def test_slurm_starts_again_only_jobs_that_can_go_on(
    submit, codes, environment, code, requeued
):
    assert submit(codes, **environment) == (code, requeued)
    ends_by_restarts = code == 75
    assert ("MOST_RESTARTS" in submit.said) is ends_by_restarts


@pytest.mark.parametrize("words", [[], ["--train_dir", "a"], ["--train_dir=a"]])
def test_time_that_is_shorter_than_the_start_ends_the_job(submit, tmp_path, words):
    """The first piece may have had to prepare the data."""
    train_dir = tmp_path / ("a" if words else "runs/7")
    for step in (90, 100):
        (train_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    for restarts, step, code in (
        (1, 100, 138),
        (0, 103, 0),
        (1, 106, 138),
        (9, 200, 0),
    ):
        environment = {"SLURM_RESTART_COUNT": str(restarts), "STEP": str(step)}
        assert submit("138 138", *words, **environment) == (code, code == 0)
        assert ("--time" in submit.said) is bool(code)


def test_slurm_gives_the_flags_to_the_training_and_fresh_only_once(submit, tmp_path):
    flags = ("--fresh", "--recipe", "a file.toml")
    command = f"train_multi_gpu.py --train_dir {tmp_path}/runs/7 --hang_timeout 600"
    submit("0 0", *flags)
    assert submit.seen == f"{command} --fresh --recipe a file.toml\n" * 2
    submit("0 0", *flags, SLURM_RESTART_COUNT="1")
    assert submit.seen == f"{command} --recipe a file.toml\n" * 2


def test_slurm_passes_on_a_signal_that_only_the_shell_gets():
    """As where SLURM tracks processes by cgroups: it signals its own children only."""
    snippet = re.search(r"worker='(.*?)'\n\n", SLURM.read_text(), re.DOTALL)[1]
    training = "trap 'exit 138' USR1; echo ready; while :; do sleep 0.05; done"
    command = ["bash", "-c", snippet.replace("'$refused'", "202"), "worker"]
    with subprocess.Popen(
        [*command, "bash", "-c", training], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait() == 138


def test_slurm_signals_the_workers_and_not_the_script():
    options = dict(re.findall(r"\n#SBATCH --([\w-]+)=?(.*)", SLURM.read_text()))
    assert options["signal"] == "USR1@120"
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options


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


@pytest.mark.parametrize("version", ["1.29.0", "1.37.0"])
def test_oldest_and_newest_kubernetes_accept_it(manifest, version):
    schemas = pytest.importorskip("kubernetes_validate")
    for part in manifest.values():
        schemas.validate(part, version, strict=True)  # Unknown fields too.


def test_service_and_volumes_are_those_of_the_pods(manifest, pod, worker):
    service, claim = manifest["Service"], manifest["PersistentVolumeClaim"]
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in worker["volumeMounts"]}
    names = {"claimName": claim["metadata"]["name"]}
    assert mounts["/runs"]["persistentVolumeClaim"] == names
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "--train_dir=/runs/cifar10" in worker["args"]


def test_refused_training_ends_the_job_and_hanging_ones_end(manifest, worker):
    actions = {
        code: rule["action"]
        for rule in manifest["Job"]["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
        if rule["onExitCodes"]["containerName"] == worker["name"]
    }
    assert actions == {2: "FailJob", 128 + signal.SIGTERM: "Ignore"}
    # Nobody looks at the log of a job at night.
    assert any(word.startswith("--hang_timeout=") for word in worker["args"])


def test_worker_of_kubernetes_downloads_into_its_empty_folder(worker, tmp_path):
    """And if it cannot at the moment, it is started again."""
    parser = argparse.ArgumentParser()
    values = flags.from_flags(parser, worker["args"])
    assert not values.data_dir
    (environment,) = instructions("ENV")
    assert "CIFAR10_DATA_DIR=/data" in environment
    assert "/data" in [one["mountPath"] for one in worker["volumeMounts"]]
    environ = {"CIFAR10_DATA_DIR": str(tmp_path)}
    with pytest.raises(UsageError) as caught:
        cifar.find(values.data, values.data_dir, refused_url(), environ)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("index", [0, 1])
def test_pod_knows_which_worker_it_is(manifest, worker, index, tmp_path):
    executable(tmp_path / "python", 'printf "%s\\n" "$TF_CONFIG" "$@" > "$SEEN"')
    assert "$$" not in worker["command"][2], "Kubernetes makes one dollar of it"
    variables = {one["name"]: one.get("value", "") for one in worker["env"]}
    variables |= {"SEEN": str(tmp_path / "seen"), "JOB_COMPLETION_INDEX": str(index)}
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
    assert [worker.address for worker in found.workers] == expected
    assert found.index == index
    assert [one["containerPort"] for one in worker["ports"]] == [port]


# The images.


def instructions(name, file=DOCKERFILE):
    """The operands of a Dockerfile's instructions of one name."""
    text = file.read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [words[1] for words in lines if words[0] == name]


@pytest.mark.parametrize("file", [DOCKERFILE, SERVING], ids=["train", "serve"])
def test_image_holds_all_that_its_program_needs(tmp_path, file):
    """Its files alone, as `docker build` copies them, start the program."""
    ignored = (runs.ROOT / ".dockerignore").read_text().splitlines()
    admitted = {line[1:] for line in ignored if line.startswith("!")}
    copied = set()
    for operands in instructions("COPY", file):
        *sources, target = operands.split()
        for source in sources:
            copied.add(source)
            if (runs.ROOT / source).is_dir():
                shutil.copytree(runs.ROOT / source, tmp_path / target)
            else:
                shutil.copy(runs.ROOT / source, tmp_path / target)
    assert copied == admitted if file == DOCKERFILE else copied < admitted
    # Signals reach Python.
    ((python, *words),) = map(json.loads, instructions("ENTRYPOINT", file))
    assert python == "python"
    flag = "--num_gpus" if file == DOCKERFILE else "--port"
    done = runs.run(*words, flag, "none", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert flag in done.stderr


def test_images_run_as_a_user_with_the_places_that_others_expect(pod):
    user = str(pod["spec"]["securityContext"]["runAsUser"])
    assert instructions("USER") == instructions("USER", SERVING) == [user]
    assert instructions("VOLUME") == ['["/data", "/runs"]']
    (given,) = map(json.loads, instructions("CMD", SERVING))
    assert given == ["--savedmodel", "/model"]
    (entry,) = map(json.loads, instructions("ENTRYPOINT", SERVING))
    assert entry[-2:] == ["--host", "0.0.0.0"]  # noqa: S104
    assert instructions("EXPOSE", SERVING) == [str(Options.port)]


@pytest.mark.parametrize("status", [200, 503])
def test_serving_image_is_healthy_when_the_service_is(status):
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
        done = runs.run("-c", code)
    assert done.returncode == (0 if status == 200 else 1)
