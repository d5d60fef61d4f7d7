"""Which machines train together, as TF_CONFIG and SLURM say it."""

import json

import pytest

from cifar10.distributed import cluster
from cifar10.errors import UsageError

TWO = {"worker": ["a:1", "b:2"]}


def read(jobs, **task):
    return cluster.from_environment(
        {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task})}
    )


def test_a_worker_knows_the_others_and_itself():
    found = read(TWO, type="worker", index=1)
    assert [str(one) for one in found.workers] == ["worker 0 at a:1", "worker 1 at b:2"]
    assert found.this_worker.address == "b:2"
    assert [one.address for one in found.other_workers] == ["a:1"]
    assert not found.is_chief
    assert read(TWO, type="worker", index=0).is_chief


@pytest.mark.parametrize(("index", "count"), [(0, 2), (1, 1), (2, 2)])
def test_workers_at_one_host_share_a_machine(index, count):
    workers = {"worker": ["a:1", "b:1", "a:2"]}
    assert read(workers, type="worker", index=index).workers_of_this_machine == count


def test_a_chief_comes_before_the_workers():
    found = read({"worker": ["b:1"], "chief": ["a:1"]}, type="worker", index=0)
    assert [one.address for one in found.workers] == ["a:1", "b:1"]
    assert found.index == 1


@pytest.mark.parametrize(
    "text", ["", " ", "{}", '{"cluster": {}}', '{"cluster": {"worker": ["a:1"]}}']
)
def test_one_machine_is_no_cluster(text):
    assert cluster.from_environment({"TF_CONFIG": text}) is None
    assert cluster.from_environment({"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert cluster.from_environment({}) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "Expecting"),
        ("[]", "no attribute"),
        ('{"cluster": {"worker": 3}}', "not iterable"),
        ('{"cluster": {"worker": ["a", "b:1"]}}', "'a' is not host:port"),
        ('{"cluster": {"worker": ["a:1", "b:x"]}}', "'b:x' is not host:port"),
        ('{"cluster": {"worker": ["a:1", "a:1"]}}', "two workers have one address"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": 1}}', "worker 1, is not"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps"}}', "ps 0, is not"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": []}}', "int()"),
        ('{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}}', "no use for the job ps"),
    ],
)
def test_a_tf_config_that_makes_no_sense_is_refused(text, error):
    with pytest.raises(UsageError) as caught:
        cluster.from_environment({"TF_CONFIG": text})
    assert error in str(caught.value)
    assert str(caught.value).startswith(f"TF_CONFIG={text}: ")
    assert "Unset it" in str(caught.value)


def test_what_a_launcher_writes_is_read_back():
    text = cluster.tf_config(["a:1", "b:2"], 1)
    assert cluster.from_environment({"TF_CONFIG": text}).this_worker.address == "b:2"


def test_an_error_names_the_worker_it_is_about():
    found = read({"worker": ["b:1", "c:1"], "chief": ["a:1"]}, type="worker", index=1)
    message = "from remote target /job:worker/replica:0/task:0 while calling"
    assert [one.address for one in found.mentioned_in(message)] == ["b:1"]
    assert found.mentioned_in("of /job:worker/task:1") == [], "that is this one itself"


SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "node10",
}


def test_slurm_gives_each_process_the_address_of_its_own_node(monkeypatch):
    """SLURM's process 2 is on node10, which comes first where nodes are sorted."""
    for name, value in SLURM.items():  # TensorFlow's resolver reads them there.
        monkeypatch.setenv(name, value)
    found = cluster.from_environment(SLURM)
    hosts = [one.address.partition(":")[0] for one in found.workers]
    assert sorted(hosts) == ["node10", "node2", "node2"]
    assert len({one.address for one in found.workers}) == 3
    assert found.this_worker.address.startswith("node10:")
    other = cluster.from_environment(
        {**SLURM, "SLURMD_NODENAME": "node2", "SLURM_LOCALID": "1"}
    )
    assert other.workers == found.workers
    assert other.this_worker.address.startswith("node2:")
    assert other.index != found.index


def test_a_process_outside_of_slurms_step_is_refused(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="Start it with srun"):
        cluster.from_environment({**SLURM, "SLURMD_NODENAME": "elsewhere"})


def test_a_script_that_trains_alone_says_that_it_ignores_tf_config(capsys):
    cluster.warn_if_ignored({})
    assert capsys.readouterr().err == ""
    cluster.warn_if_ignored({"TF_CONFIG": json.dumps({"cluster": TWO})})
    assert "train_multi_gpu.py uses it" in capsys.readouterr().err
