"""Three machines of their own on this one, as network namespaces, and SLURM on them.

Only root can make them. `ip netns` brings each an address and cables of its own, a
mount namespace its /etc/hosts; nothing outside of a temporary folder and of the names
of the namespaces is touched. Processes are told by their namespace, so only those that
were started here are ended.
"""

import contextlib
import functools
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cifar10.distributed import cluster
from cifar10.input import synthetic

ROOT = Path(__file__).parents[2]
CONTROLLER = "controller"
# As text node10 comes before node2, while SLURM counts them in another order.
ADDRESSES = {"node1": "10.77.0.11", "node2": "10.77.0.12", "node10": "10.77.0.13"}
_CONTROLLERS_ADDRESS = "10.77.0.1"
_USER = "nobody"
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE")
SECONDS = 600  # After which what is waited for does not come.

# Gives a process the host name and the /etc/hosts of its machine; where only root may
# enter the folder ($4) of the interpreter ($5), also a way to it for other users.
_ENTER = """
set -e
hostname "$1"; mount --make-rprivate /; mount --bind "$2" /etc/hosts
if [ -n "$4" ]; then
  mount --bind "$5" "$3"; mount -t tmpfs -o mode=755 none "$4"
  mkdir -p "$5"; mount --move "$3" "$5"
fi
shift 5; exec "$@"
"""


def missing(*programs):
    """Returns why there can be no machines here; empty if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "machines as network namespaces need root"
    absent = [name for name in ("ip", "iptables", *programs) if not shutil.which(name)]
    return f"not installed: {', '.join(absent)}" if absent else ""


def missing_slurm():
    """Returns why there can be no SLURM here (apt-get install slurm-wlm munge)."""
    return missing(*_DAEMONS)


def run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def eventually(condition, seconds=SECONDS):
    """Waits until a condition holds; returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"in vain: {condition}"
        time.sleep(0.3)
    return value


class Machines:
    """A context manager: the machines in `ADDRESSES`, and a switch between them."""

    def __enter__(self):
        # Not pytest's folder, which only its user may enter.
        self.folder = Path(tempfile.mkdtemp(prefix="cifar10-machines-"))
        self.folder.chmod(0o755)
        (self.folder / "empty").mkdir()
        self._processes = []
        addresses = {"localhost": "127.0.0.1", CONTROLLER: _CONTROLLERS_ADDRESS}
        hosts = "".join(
            f"{address} {name}\n" for name, address in (addresses | ADDRESSES).items()
        )
        (self.folder / "hosts").write_text(hosts)
        self.data_dir = self.folder / "data"
        synthetic.generate(self.data_dir / synthetic.FOLDER)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused):
        for name in (CONTROLLER, *ADDRESSES):
            self.kill(name)
            with contextlib.suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", self._space(name))
        for process in self._processes:
            process.wait()
            if process.stdout:
                process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, name, *words, user=None, **options):
        """Starts a program on a machine."""
        who = []
        if user:
            entry = pwd.getpwnam(user)
            ids = [f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}"]
            who = ["setpriv", *ids, "--clear-groups"]
        places = [self.folder / "hosts", self.folder / "empty", *_hidden()]
        process = subprocess.Popen(
            # Not `ip netns exec`, which hides the control groups that slurmd looks at.
            [
                *("nsenter", f"--net=/run/netns/{self._space(name)}"),
                *("unshare", "--mount", "--uts", "sh", "-c", _ENTER, "sh", name),
                *map(str, [*places, *who, *words]),
            ],
            **{"text": True, **options},
        )
        self._processes.append(process)
        return process

    def call(self, name, *words, **options):
        """Runs a program on a machine to its end; returns what it says."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.start(name, *words, **pipes, **options)
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said
        return said

    def kill(self, name):
        """Ends all processes of a machine at once, as the loss of its power does."""
        with contextlib.suppress(subprocess.CalledProcessError):
            for pid in run("ip", "netns", "pids", self._space(name)).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def plug(self, name, *, is_in):
        """Puts a machine's cable in, or pulls it out."""
        switch = self._space(CONTROLLER)
        run("ip", "-n", switch, "link", "set", name, "up" if is_in else "down")

    def filter(self, name, *rule):
        """Has a machine drop what arrives and what iptables' rule describes."""
        tables = ["ip", "netns", "exec", self._space(name), "iptables"]
        run(*tables, "-A", "INPUT", *rule, "-j", "DROP")

    def cut(self, one, other):
        """Cuts the link between two machines, for good."""
        self.filter(one, "-s", ADDRESSES[other])
        self.filter(other, "-s", ADDRESSES[one])

    def mend(self):
        """Takes back all that the machines drop."""
        for name in ADDRESSES:
            run("ip", "netns", "exec", self._space(name), "iptables", "-F")

    def work(self, name, index, train_dir, *flags, nodes=tuple(ADDRESSES)):
        """Starts a worker of a run with TF_CONFIG on a machine."""
        config = cluster.tf_config([f"{ADDRESSES[node]}:2222" for node in nodes], index)
        return self.start(
            name,
            *(sys.executable, ROOT / "train_multi_gpu.py", "--deterministic"),
            *("--data=synthetic", f"--data_dir={self.data_dir}", "--num_gpus=1"),
            *(f"--train_dir={train_dir}", "--batch_size=8", *flags),
            env={**os.environ, cluster.TF_CONFIG: config},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def _make(self):
        switch = self._space(CONTROLLER)
        run("ip", "netns", "add", switch)
        for words in (
            "link set lo up",
            "link add switch type bridge",
            f"addr add {_CONTROLLERS_ADDRESS}/24 dev switch",
            "link set switch up",
        ):
            run("ip", "-n", switch, *words.split())
        for name, address in ADDRESSES.items():
            space = self._space(name)
            run("ip", "netns", "add", space)
            words = f"link add {name} type veth peer name eth0 netns {space}"
            run("ip", "-n", switch, *words.split())
            run("ip", "-n", switch, *f"link set {name} master switch up".split())
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")

    @staticmethod
    def _space(name):
        return f"cifar10-{os.getpid()}-{name}"


@functools.cache
def _hidden():
    """Returns a folder that only root may enter, and the interpreter in it, or ""s."""
    home = Path(sys.base_prefix)
    closed = [one for one in [*home.parents, home] if not one.stat().st_mode & 1]
    return (closed[-1], home) if closed else ("", "")


class Slurm(Machines):
    """The machines as a cluster of SLURM's, and a folder with the script to submit."""

    def __enter__(self):
        super().__enter__()
        try:
            self._start_slurm()
        except BaseException:
            self.__exit__()
            raise
        return self

    def submit(self, *options, flags=(), **variables):
        """Submits the batch script as a user who is not root; returns the job's id."""
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder / "clone"),
            "CIFAR10_DATA_DIR": str(self.data_dir),
            "CUDA_VISIBLE_DEVICES": "-1",
            **self._variables,
            **variables,
        }
        said = self.call(
            CONTROLLER,
            *("sbatch", "--gpus-per-node=0", "--cpus-per-task=1", *options),
            *("deploy/slurm.sbatch", "--data=synthetic", "--num_gpus=1"),
            *("--batch_size=8", "--deterministic", *flags),
            user=_USER,
            cwd=self.folder / "clone",
            env=environment,
        )
        return said.split()[-1]

    def control(self, *words):
        """Runs scontrol as SLURM's administrator."""
        return self.call(CONTROLLER, "scontrol", *words, env=self._environment)

    def cancel(self, *words):
        self.call(CONTROLLER, "scancel", *words, env=self._environment)

    def job(self, job):
        """Returns what SLURM knows of a job."""
        shown = self.control("--oneliner", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def log(self, job):
        """Returns what all pieces of a job have written."""
        path = self.folder / "clone" / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def run_directory(self, job):
        return self.folder / "clone" / "runs" / job

    def reach(self, job, text, *, times=1):
        """Waits until a job has written something so many times."""
        eventually(lambda: self.log(job).count(text) >= times or self._over(job))
        assert self.log(job).count(text) >= times, self.log(job)

    def end(self, job):
        """Waits until a job is over; returns its state."""
        return eventually(lambda: self._over(job))

    def _over(self, job):
        state = self.job(job)["JobState"]
        return state if state in _FINAL else ""

    def hurry(self, job):
        """Has a requeued job begin soon, not after SLURM's two minutes.

        But not at once: the end of its last piece would be taken for that of the next.
        """
        eventually(lambda: self.job(job)["JobState"] in ("PENDING", "RUNNING"))
        with contextlib.suppress(AssertionError):  # It runs already.
            self.control("update", f"JobId={job}", "StartTime=now+20")

    def nodes(self, job):
        """Returns the names of a job's nodes, that of its script first."""
        found = self.job(job)
        names = self.control("show", "hostnames", found["NodeList"]).split()
        return sorted(names, key=lambda name: name != found["BatchHost"])

    def submit_other(self, *options):
        """Submits a job that is not a run; returns its id."""
        folder = {"cwd": self.folder / "clone", "env": self._environment}
        return self.call(CONTROLLER, "sbatch", *options, user=_USER, **folder).split()[
            -1
        ]

    def revive(self):
        """Starts the daemons that were killed, and waits until all nodes are idle."""
        for name in ADDRESSES:
            if self._slurmds[name].poll() is not None:
                self.start_daemon(name)
        eventually(self._is_ready)

    def start_daemon(self, name):
        """Starts a machine's slurmd, again or for the first time."""
        self._slurmds[name] = self.start(
            name,
            *("slurmd", "-D", "-N", name),
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill_daemon(self, name):
        """Kills a machine's slurmd alone, not its jobs."""
        self._slurmds[name].kill()

    def _start_slurm(self):
        configuration = self.folder / "slurm.conf"
        template = Path(__file__).with_name("slurm.conf").read_text()
        configuration.write_text(template.replace("FOLDER", str(self.folder)))
        self._variables = {"SLURM_CONF": str(configuration)}
        self._environment = {**os.environ, **self._variables}
        clone = self.folder / "clone"
        for name in ("cifar10", "deploy"):
            shutil.copytree(ROOT / name, clone / name)
        shutil.copy(ROOT / "train_multi_gpu.py", clone)
        owner = pwd.getpwnam(_USER)
        os.chown(clone, owner.pw_uid, owner.pw_gid)
        (self.folder / "state").mkdir()
        shutil.chown(self.folder / "state", "slurm")
        for name in ("slurmctld.log", "slurmctld.pid"):
            (self.folder / name).touch()
            shutil.chown(self.folder / name, "slurm")
        for name in ADDRESSES:
            (self.folder / "spool" / name).mkdir(parents=True)
        self._start_munge()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.start(CONTROLLER, "slurmctld", "-D", env=self._environment, **quiet)
        self._slurmds = {}
        for name in ADDRESSES:
            self.start_daemon(name)
        eventually(self._is_ready, 60)

    def _start_munge(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key": ".key", "log": ".log", "pid": ".pid", "seed": ".seed"}
        paths = [
            f"--{name}-file={self.folder}/munge{end}" for name, end in files.items()
        ]
        socket = f"--socket={self.folder}/munge.socket"
        self.start(CONTROLLER, "munged", "--foreground", "--force", socket, *paths)
        eventually((self.folder / "munge.socket").exists, 30)

    def _is_ready(self):
        with contextlib.suppress(AssertionError):
            shown = self.control("--oneliner", "show", "nodes")
            return len(re.findall(r"State=IDLE ", shown)) == len(ADDRESSES)
        return False
