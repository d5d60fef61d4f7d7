"""Which machines train together, as TF_CONFIG and SLURM say it."""

import json

import pytest

import runs
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
        ('{"cluster": {"worker": ["a:1"]}, "task": {"index": []}}', "index, [], is no"),
        ('{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}}', "no use for the job ps"),
        ('{"task": {"index": 1e400}}', "index, inf, is no whole"),
        ('{"task": {"index": true}}', "index, True, is no whole"),
        ('{"task": {"index": -1}}', "index, -1, is no whole"),
        ('{"task": {"index": NaN}}', "index, nan, is no whole"),
        pytest.param("[" * 100_000, "recursion", id="nested"),
        pytest.param('{"task": {"index": 1' + "0" * 5000, "digits", id="digits"),
        (r'{"cluster": {"worker": ["\ud800:1"]}}', "does not begin with the name"),
        (r'{"cluster": {"worker": ["a\u0000:1"]}}', "does not begin with the name"),
        ('{"cluster": {"worker": ["a b:1"]}}', "does not begin with the name"),
        ('{"cluster": {"worker": ["b\u00fccher:1"]}}', "does not begin with the name"),
        ('{"cluster": {"worker": ["a..b:1"]}}', "does not begin with the name"),
        (f'{{"cluster": {{"worker": ["{"a" * 64}:1"]}}}}', "does not begin with"),
        ('{"cluster": {"worker": ["a:\u0662"]}}', "is not host:port"),
        ('{"cluster": {"worker": ["::1"]}}', "'::1' is not host:port; IPv6 is written"),
        ('{"cluster": {"worker": ["fe80::1:22"]}}', "IPv6 is written [::1]:2222"),
        ('{"cluster": {"worker": ["[::1]:2:3"]}}', "IPv6 is written [::1]:2222"),
    ],
)
def test_a_tf_config_that_makes_no_sense_is_refused(text, error):
    with pytest.raises(UsageError) as caught:
        cluster.from_environment({"TF_CONFIG": text})
    assert error in str(caught.value)
    assert str(caught.value).startswith(f"TF_CONFIG={text[:300]}: ")
    assert "Unset it" in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "local"),
    [
        (["127.0.0.1:1", "127.0.0.1:2"], True),
        (["localhost:1", "127.1.2.3:2"], True),
        (["[::1]:1", "[::1]:2"], True),
        (["127.0.0.1:1", "10.0.0.1:2"], False),
        (["127.0.0.1.example.org:1", "localhost:2"], False),
    ],
)
def test_workers_of_one_machine_are_known_by_their_addresses(hosts, local):
    assert read({"worker": hosts}, type="worker", index=0).is_on_loopback is local


def test_a_secret_is_that_of_the_environment_and_not_shown():
    environ = {"TF_CONFIG": cluster.tf_config(["a:1", "b:2"], 1)}
    assert cluster.from_environment(environ).secret == b""
    found = cluster.from_environment({**environ, cluster.SECRET: " said\n"})
    assert found.secret == b"said"
    assert "said" not in repr(found)


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_STEP_NUM_TASKS", "two"),
        ("SLURM_STEP_NUM_TASKS", "-3"),
        ("SLURM_STEP_NUM_TASKS", "9" * 5000),
        ("SLURM_STEP_NUM_TASKS", "4"),
        ("SLURM_STEP_NUM_TASKS", "999999999"),
        ("SLURM_JOB_ID", "1.5"),
        ("SLURM_LOCALID", " "),
        ("SLURM_PROCID", ""),
        ("SLURM_PROCID", None),
        ("SLURM_STEP_NODELIST", ""),
        ("SLURM_STEP_NODELIST", None),
        ("SLURM_STEP_NODELIST", "node["),
        ("SLURM_STEP_NODELIST", "node[1-999999999999]"),
        ("SLURM_STEP_NODELIST", "node\udcff,node10"),
        ("SLURM_STEP_TASKS_PER_NODE", ""),
        ("SLURM_STEP_TASKS_PER_NODE", "1(x999999999999)"),
        ("SLURM_STEP_TASKS_PER_NODE", "999999999,1"),
    ],
)
def test_variables_that_slurm_does_not_set_so_are_named(monkeypatch, name, value):
    environ = {**SLURM, name: value}
    if value is None:
        environ.pop(name)
        monkeypatch.delenv(name, raising=False)
    for one, text in environ.items():
        monkeypatch.setenv(one, text)
    with pytest.raises(UsageError, match="Start all workers with srun") as caught:
        cluster.from_environment(environ)
    assert f"{name}=" in str(caught.value)


@pytest.mark.parametrize("value", ["", "1", "0"])
def test_a_single_process_of_slurm_trains_alone(value):
    assert not cluster.is_requested({"SLURM_STEP_NUM_TASKS": value})


@pytest.mark.parametrize(
    ("nodes", "counts", "node"),
    [
        ("ip-10-0-1-22,ip-10-0-1-45", "1(x2)", "ip-10-0-1-45"),
        ("c5-[0007-0008]", "1(x2)", "c5-0008"),
        ("rack7-900[11,13]", "1,1", "rack7-90011"),
    ],
)
def test_the_names_of_slurms_nodes_have_numbers_of_their_own(
    monkeypatch, nodes, counts, node
):
    environ = {
        **SLURM,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURMD_NODENAME": node,
    }
    for one, text in environ.items():
        monkeypatch.setenv(one, text)
    found = cluster.from_environment(environ)
    assert len(found.workers) == 2
    assert found.this_worker.host_and_port[0] == node


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_STEP_NUM_TASKS", "two"),
        ("TF_CONFIG", '{"task": {"index": 1e400}}'),
        ("TF_CONFIG", "[" * 50_000),
    ],
    ids=["slurm", "number", "nested"],
)
def test_a_script_refuses_them_with_a_sentence(monkeypatch, tmp_path, name, value):
    monkeypatch.setenv(name, value)
    done = runs.call("train_multi_gpu.py", "--train_dir", tmp_path)
    assert done.returncode == 2
    assert f"train_multi_gpu.py: {name}={value[:200]}" in done.stderr.replace("'", "")
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 1000
