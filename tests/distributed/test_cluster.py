"""Which machines train together, as TF_CONFIG and SLURM say it."""

import json

import pytest

import runs
from cifar10.distributed import cluster
from cifar10.errors import UsageError

TWO = {"worker": ["a:1", "b:2"]}
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURMD_NODENAME": "node10",
}


def read(jobs, **task):
    return cluster.from_environment(
        {"TF_CONFIG": json.dumps({"cluster": jobs, "task": task})}
    )


def test_worker_knows_the_others_and_itself():
    found = read(TWO, type="worker", index=1)
    assert found.name(0, 1) == "worker 0 at a:1, worker 1 at b:2"
    assert found.name() == "worker 1 at b:2"
    assert found.others == [0]
    written = {"TF_CONFIG": cluster.tf_config(["a:1", "b:2"], 1)}
    assert cluster.from_environment(written) == found
    assert found.index == 1
    assert read(TWO, type="worker", index=0).index == 0


def test_chief_comes_before_the_workers():
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    found = read(jobs, type="worker", index=1)
    assert found.addresses == ("a:1", "b:1", "c:1")
    assert found.index == 2


def test_a_single_process_forms_no_cluster():
    for text in ("", " ", "{}", '{"cluster": {"worker": ["a:1"]}}'):
        assert cluster.from_environment({"TF_CONFIG": text}) is None
    assert cluster.from_environment({}) is None
    for tasks in ("", "0", "1"):
        assert not cluster.is_requested({"SLURM_STEP_NUM_TASKS": tasks})
        assert cluster.from_environment({"SLURM_STEP_NUM_TASKS": tasks}) is None


def test_train_py_warns_about_training_without_the_other_workers(
    tmp_path, stand_in_dir, monkeypatch
):
    flags = runs.training_flags(tmp_path / "run", stand_in_dir, max_steps=1)
    alone = runs.call("train.py", *flags)
    assert "trains alone" not in alone.stderr
    monkeypatch.setenv("TF_CONFIG", cluster.tf_config(["a:1", "b:2"], 1))
    done = runs.call("train.py", *flags)
    assert (done.returncode, "trains alone" in done.stderr) == (0, True)


def test_an_invalid_tf_config_is_refused():
    texts = [
        '{"cluster": {"worker": 3}}',
        '{"cluster": {"worker": ["a:1", "a:1"]}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"index": 2}}',
        '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}}',
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}',
        '{"cluster": {"worker": "a:1,b:1"}}',
        "[1]",
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"index": Infinity}}',
        "[" * 100_000,
    ]
    addresses = ["a", "b:x", "::1", "a:100000"]
    texts += [f'{{"cluster": {{"worker": ["c:1", "{at}"]}}}}' for at in addresses]
    for text in texts:
        with pytest.raises(UsageError, match="TF_CONFIG=") as refused:
            cluster.from_environment({"TF_CONFIG": text})
        assert len(str(refused.value)) < 1000


def test_a_worker_index_counted_from_1_is_refused():
    text = cluster.tf_config(["a:1", "b:1"], 2)
    with pytest.raises(UsageError, match="no worker has index 2; the first has 0"):
        cluster.from_environment({"TF_CONFIG": text})


def test_workers_on_one_machine_are_detected_by_address():
    for hosts, local in (
        (["localhost:1", "127.1.2.3:2"], True),
        (["[::1]:1", "[::1]:2"], True),
        (["127.0.0.1:1", "10.0.0.1:2"], False),
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


def test_slurm_names_all_processes(in_slurm):
    """The chief is process 0, on the first node; two on a node have ports."""
    found = in_slurm()
    hosts, ports = zip(*map(found.host_and_port, range(3)), strict=True)
    assert hosts == ("node2", "node2", "node10")
    assert ports == (ports[0], ports[0] + 1, ports[0])
    assert found.index == 2
    # Numbers in the names of nodes are kept, in SLURM's order.
    found = in_slurm(
        SLURM_STEP_NODELIST="c5-[0008-0009],a",
        SLURM_STEP_TASKS_PER_NODE="1(x3)",
        SLURMD_NODENAME="a",
    )
    hosts = [found.host_and_port(index)[0] for index in range(3)]
    assert hosts == ["c5-0008", "c5-0009", "a"]


def test_impossible_slurm_variables_are_named(in_slurm):
    for name, value in (
        ("SLURM_STEP_TASKS_PER_NODE", "two"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x2)"),  # So there is no process 2.
        ("SLURM_PROCID", ""),
        ("SLURM_PROCID", "-1"),
        ("SLURM_PROCID", "1"),  # As with --distribution=cyclic.
        ("SLURM_STEP_NODELIST", "node[2-3]-ib"),
        ("SLURM_STEP_NODELIST", "node[1-1000000000]"),  # They would fill the memory.
        ("SLURM_STEP_NODELIST", "a[1-9999]b[1-9999]"),
        ("SLURM_STEP_TASKS_PER_NODE", "1000000000"),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x1000000000)"),
    ):
        with pytest.raises(UsageError, match="'SLURM_PROCID'") as refused:
            in_slurm(**{name: value})
        assert f"'{name}': '{value}'" in str(refused.value)
        assert "srun" in str(refused.value)
