"""Which machines train together, as TF_CONFIG and SLURM say it."""

import json

import pytest

from cifar10.distributed import cluster
from cifar10.errors import UsageError

TWO = {"worker": ["a:1", "b:2"]}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "node10",
}


def read(jobs, **task):
    return cluster.from_environment(
        {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task})}
    )


def test_worker_knows_the_others_and_itself():
    found = read(TWO, type="worker", index=1)
    assert [str(worker) for worker in found.workers] == [
        "worker 0 at a:1",
        "worker 1 at b:2",
    ]
    assert found.this_worker.address == "b:2"
    assert [worker.address for worker in found.other_workers] == ["a:1"]
    written = {"TF_CONFIG": cluster.tf_config(["a:1", "b:2"], 1)}
    assert cluster.from_environment(written) == found
    assert not found.is_chief
    assert read(TWO, type="worker", index=0).is_chief
    for index, count in enumerate((2, 1, 2)):
        found = read({"worker": ["a:1", "b:1", "a:2"]}, index=index)
        assert found.workers_of_this_machine == count


def test_chief_comes_before_the_workers_and_errors_name_who_they_are_about():
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    found = read(jobs, type="worker", index=1)
    assert [worker.address for worker in found.workers] == ["a:1", "b:1", "c:1"]
    assert found.index == 2
    message = "from remote target /job:worker/replica:0/task:0 while calling"
    assert [worker.address for worker in found.mentioned_in(message)] == ["b:1"]
    assert found.mentioned_in("of /job:worker/task:1") == [], "that is this worker"


def test_single_process_trains_alone():
    for text in ("", " ", "{}", '{"cluster": {"worker": ["a:1"]}}'):
        assert cluster.from_environment({"TF_CONFIG": text}) is None
    assert cluster.from_environment({}) is None
    for tasks in ("", "0", "1"):
        assert not cluster.is_requested({"SLURM_STEP_NUM_TASKS": tasks})
        assert cluster.from_environment({"SLURM_STEP_NUM_TASKS": tasks}) is None


def test_nonsense_in_tf_config_is_refused():
    texts = [
        "[" * 100_000,
        '{"cluster": {"worker": 3}}',
        '{"cluster": {"worker": ["a:1", "a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"index": 1}}',
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}}',
        '{"task": {"index": true}}',
    ]
    addresses = ["a", "b:x", "::1", "a..b:1", "a" * 64 + ":1", r"\ud800:1"]
    texts += [f'{{"cluster": {{"worker": ["c:1", "{at}"]}}}}' for at in addresses]
    for text in texts:
        with pytest.raises(UsageError, match="TF_CONFIG=") as refused:
            cluster.from_environment({"TF_CONFIG": text})
        assert len(str(refused.value)) < 1000


def test_workers_of_one_machine_are_known_by_their_addresses():
    for hosts, local in (
        (["localhost:1", "127.1.2.3:2"], True),
        (["[::1]:1", "[::1]:2"], True),
        (["127.0.0.1:1", "10.0.0.1:2"], False),
        (["127.0.0.1.example.org:1", "localhost:2"], False),
    ):
        assert read({"worker": hosts}, index=0).is_on_loopback is local


@pytest.fixture
def in_slurm(monkeypatch):
    """Reads the cluster as a process of SLURM's with other variables than `SLURM`."""

    def read(**changes):
        for name, value in {**SLURM, **changes}.items():
            monkeypatch.setenv(name, value)  # TensorFlow's resolver reads them there.
        return cluster.from_environment()

    monkeypatch.delenv("TF_CONFIG", raising=False)
    return read


def test_slurm_gives_each_process_the_address_of_its_own_node(in_slurm):
    """SLURM's process 2 is on node10, which comes first where nodes are sorted."""
    found = in_slurm()
    hosts = [worker.address.partition(":")[0] for worker in found.workers]
    assert sorted(hosts) == ["node10", "node2", "node2"]
    assert len({worker.address for worker in found.workers}) == 3
    assert found.this_worker.address.startswith("node10:")
    other = in_slurm(SLURMD_NODENAME="node2", SLURM_LOCALID="1")
    assert other.workers == found.workers
    assert other.this_worker.address.startswith("node2:")
    assert other.index != found.index
    # Numbers in the names of nodes are kept.
    step = {"NUM_TASKS": "2", "NODELIST": "c5-[0007-0008]", "TASKS_PER_NODE": "1(x2)"}
    step = {f"SLURM_STEP_{name}": value for name, value in step.items()}
    found = in_slurm(**step, SLURMD_NODENAME="c5-0008")
    assert len(found.workers) == 2
    assert found.this_worker.host_and_port[0] == "c5-0008"


def test_variables_that_slurm_does_not_set_so_are_named(in_slurm):
    for name, value in (
        *(("SLURM_STEP_NUM_TASKS", value) for value in ("two", "4", "9" * 5000)),
        *(("SLURM_PROCID", ""), ("SLURM_STEP_NODELIST", "node[1-999999999999]")),
        *(("SLURM_STEP_TASKS_PER_NODE", value) for value in ("", "999999999,1")),
    ):
        with pytest.raises(UsageError, match=f"{name}="):
            in_slurm(**{name: value})
    with pytest.raises(UsageError, match="srun"):
        in_slurm(SLURMD_NODENAME="elsewhere")
