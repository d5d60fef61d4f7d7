"""The batch script under a real SLURM, whose jobs are preempted and whose nodes die."""

import contextlib
import re

import pytest

import machines
import runs

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(machines.missing_slurm()), reason=machines.missing_slurm()),
]

STEPS = 200
FLAGS = (f"--max_steps={STEPS}", "--checkpoint_steps=30")
LONG = ("--max_steps=5000", "--batch_size=32")


@pytest.fixture(scope="module")
def slurm():
    with machines.Slurm() as made:
        yield made


@pytest.fixture
def submit(slurm):
    """Submits the script to two nodes; leaves no job and no dead node behind."""
    jobs = []

    def run(*options, flags=FLAGS):
        jobs.append(slurm.submit("--nodes=2", *options, flags=flags))
        return jobs[-1]

    yield run
    for job in jobs:
        with contextlib.suppress(AssertionError):
            slurm.cancel(job)
        slurm.end(job)
    for name in machines.ADDRESSES:
        slurm.plug(name, is_in=True)
    slurm.revive()


@pytest.fixture(scope="module")
def undisturbed(slurm):
    """The final checkpoint of a job that was left alone."""
    job = slurm.submit("--nodes=2", flags=FLAGS)
    assert slurm.end(job) == "COMPLETED", slurm.log(job)
    return final_files(slurm, job)


def final_files(slurm, job):
    return runs.files(runs.checkpoint(slurm.run_directory(job), STEPS))


def assert_resumed(slurm, job, undisturbed):
    """Has a requeued job begin at once, and compares what it ends with."""
    machines.eventually(lambda: int(slurm.job(job)["Restarts"]) > 0)
    slurm.hurry(job)
    assert slurm.end(job) == "COMPLETED", slurm.log(job)
    assert "Resuming from step" in slurm.log(job)
    assert "the limit is" not in slurm.log(job)
    assert final_files(slurm, job) == undisturbed


def preempt(slurm):
    """Submits a job of a higher partition, which needs all nodes."""
    options = ("--partition=high", "--nodes=3", "--exclusive", "--wrap=sleep 5")
    return slurm.submit_other(*options)


def test_a_requeued_job_resumes(slurm, submit, undisturbed):
    job = submit()
    slurm.reach(job, "step 70,")
    slurm.control("requeue", job)
    assert_resumed(slurm, job, undisturbed)


@pytest.mark.parametrize("partition", ["normal", "grace"])
def test_a_preempted_job_resumes(slurm, submit, undisturbed, partition):
    """With a grace time SLURM sends SIGTERM first, and the script is to requeue."""
    job = submit(f"--partition={partition}")
    slurm.reach(job, "step 70,")
    other = preempt(slurm)
    assert slurm.end(other) == "COMPLETED"
    assert_resumed(slurm, job, undisturbed)
    saved = set(re.findall(r"SIGTERM after step (\d+)", slurm.log(job)))
    assert saved or partition == "normal"
    assert all(f"Resuming from step {step} " in slurm.log(job) for step in saved)


def test_a_job_outlives_the_daemon_of_a_node(slurm, submit):
    """SLURM misses it after half a minute, when a shorter job would be done."""
    job = submit(flags=LONG)
    slurm.reach(job, "step 70,")
    slurm.kill_daemon(slurm.nodes(job)[1])
    machines.eventually(lambda: slurm.job(job)["JobState"] != "RUNNING")
    slurm.revive()
    machines.eventually(lambda: int(slurm.job(job)["Restarts"]) > 0)
    slurm.hurry(job)
    slurm.reach(job, "Resuming from step")
    assert "the limit is" not in slurm.log(job)


@pytest.mark.parametrize("place", [0, 1], ids=["the batch host", "another node"])
def test_a_job_resumes_when_a_node_is_dead(slurm, submit, undisturbed, place):
    job = submit()
    slurm.reach(job, "step 70,")
    victim = slurm.nodes(job)[place]
    slurm.plug(victim, is_in=False)
    slurm.kill(victim)
    assert_resumed(slurm, job, undisturbed)
    assert victim not in slurm.nodes(job)


def test_a_job_continues_after_its_time_limit(slurm, submit):
    """SLURM counts in minutes; with larger batches a piece has too little time."""
    job = submit("--signal=USR1@120", "--time=5", flags=LONG)
    slurm.reach(job, "The time is up.")
    slurm.hurry(job)
    slurm.reach(job, "Resuming from step")
    (step,) = set(re.findall(r"SIGUSR1 after step (\d+)", slurm.log(job)))
    assert f"Resuming from step {step} " in slurm.log(job)


def test_a_time_limit_shorter_than_the_start_ends_the_job(slurm, submit):
    job = submit("--signal=USR1@60", "--time=1")
    slurm.reach(job, "The time is up.")
    slurm.hurry(job)
    assert slurm.end(job) == "FAILED"
    assert slurm.job(job)["Restarts"] == "1"
    assert "too short for the start" in slurm.log(job)


def test_a_cancelled_job_ends_and_a_signalled_job_continues(slurm, submit, undisturbed):
    job = submit()
    slurm.reach(job, "step 70,")
    slurm.cancel("--signal=USR1", job)
    assert_resumed(slurm, job, undisturbed)
    job = submit()
    slurm.reach(job, "step 70,")
    slurm.cancel(job)
    assert slurm.end(job) == "CANCELLED"
    assert slurm.job(job)["Restarts"] == "0"
    assert "returns to the queue" not in slurm.log(job)
