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
    assert found.index == 1
    assert read(TWO, type="worker", index=0).index == 0
    for index, count in enumerate((2, 1, 2)):
        found = read({"worker": ["a:1", "b:1", "a:2"]}, index=index)
        assert found.workers_of_this_machine == count


def test_chief_comes_before_the_workers():
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    found = read(jobs, type="worker", index=1)
    assert [worker.address for worker in found.workers] == ["a:1", "b:1", "c:1"]
    assert found.index == 2


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
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}',
        '{"cluster": {"worker": "a:1,b:1"}}',
        "[1]",
    ]
    addresses = ["a", "b:x", "::1", "a..b:1", "a" * 64 + ":1", r"\ud800:1"]
    texts += [f'{{"cluster": {{"worker": ["c:1", "{at}"]}}}}' for at in addresses]
    for text in texts:
        with pytest.raises(UsageError, match="TF_CONFIG=") as refused:
            cluster.from_environment({"TF_CONFIG": text})
        assert len(str(refused.value)) < 1000
        assert "attribute" not in str(refused.value), "Python's words"


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
            monkeypatch.setenv(name, value)
        return cluster.from_environment()

    monkeypatch.delenv("TF_CONFIG", raising=False)
    return read


def test_slurm_names_this_process_and_the_chief(in_slurm):
    """The chief is process 0, on the first node; the rest tell when they meet."""
    found = in_slurm()
    known = [worker.address for worker in found.workers]
    hosts, ports = zip(
        *(address.split(":") for address in known if address), strict=True
    )
    assert hosts == ("node2", "node10")
    assert ports[0] == ports[1]
    assert (len(known), known[1], found.index) == (3, "", 2)
    assert found.this_worker.address.startswith("node10:")
    # Two on one node have ports of their own.
    other = in_slurm(SLURM_PROCID="1", SLURMD_NODENAME="node2", SLURM_LOCALID="1")
    assert other.this_worker.host_and_port == ("node2", int(ports[0]) + 1)
    # Numbers in the names of nodes are kept, and lists not written out.
    for nodes, first in (
        ("c5-[0007-0008]", "c5-0007"),
        ("a,b", "a"),
        ("gpu[3,5-6]-ib,cpu1", "gpu3-ib"),
        ("node[1-999999999999]", "node1"),
        ("rack[2-3]node[05,7],a", "rack2node05"),
    ):
        found = in_slurm(SLURM_STEP_NODELIST=nodes)
        assert found.workers[0].host_and_port[0] == first


def test_variables_that_slurm_does_not_set_so_are_named(in_slurm):
    for name, value in (
        *(("SLURM_STEP_NUM_TASKS", value) for value in ("two", "2", "9" * 12)),
        *(("SLURM_STEP_NUM_TASKS", "9" * 5000), ("SLURM_PROCID", "")),
        *(("SLURM_STEP_NODELIST", ""), ("SLURMD_NODENAME", "a..b")),
        ("SLURM_LOCALID", "70000"),
    ):
        with pytest.raises(UsageError, match=f"{name}=") as refused:
            in_slurm(**{name: value})
        assert "srun" in str(refused.value)
    # Whom the others would look for on the first node.
    with pytest.raises(UsageError, match="SLURMD_NODENAME='node10'"):
        in_slurm(SLURM_PROCID="0")
