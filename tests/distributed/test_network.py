"""Machines whose cables are pulled, whose links are cut, and who have the same index.

Loss is iptables' to make; for a delay the kernels of most containers lack netem.
"""

import itertools
import time

import pytest

import machines
import runs

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing()),
]

STEPS = 120
FLAGS = (f"--max_steps={STEPS}", "--checkpoint_steps=20")
TWO = ("node1", "node2")
THREE = ("node1", "node2", "node10")
RESTARTS = "--max_restarts=3"


@pytest.fixture
def net():
    with machines.Machines() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, stand_in_dir):
    """Returns the final checkpoint of as many workers, on this machine, left alone."""
    found = {}

    def of(count):
        if count not in found:
            train_dir = tmp_path_factory.mktemp("undisturbed") / "run"
            flags = runs.flags(
                data="synthetic",
                data_dir=stand_in_dir,
                num_gpus=1,
                batch_size=8,
                local_workers=count,
                train_dir=train_dir,
            )
            script = machines.ROOT / "train_multi_gpu.py"
            done = runs.run(script, "--deterministic", *flags, *FLAGS)
            assert done.returncode == 0, done.stderr
            found[count] = final_files(train_dir)
        return found[count]

    return of


def final_files(train_dir):
    return runs.files(runs.checkpoint(train_dir, STEPS))


def start(net, nodes, train_dir, *flags, delay=0.0):
    """Starts a worker on each machine; all but the first `delay` seconds later."""
    processes = []
    for index, name in enumerate(nodes):
        arguments = (name, index, train_dir, *FLAGS, *flags)
        processes.append(net.work(*arguments, nodes=nodes))
        time.sleep(delay if index == 0 else 0)
    return processes


def ends(processes):
    """Returns what all have said to their end, and their exit codes."""
    said = [one.communicate(timeout=machines.SECONDS)[0] for one in processes]
    return said, [one.returncode for one in processes]


@pytest.mark.parametrize(
    ("seconds", "restarts"), [(0, False), (8, False), (25, None), (45, True)]
)
def test_an_interrupted_network_changes_nothing(
    net, tmp_path, undisturbed, seconds, restarts
):
    train_dir = tmp_path / "run"
    delay = 0 if seconds else 30
    processes = start(net, TWO, train_dir, RESTARTS, delay=delay)
    runs.read_until(processes[0].stdout, "step 50,")
    if seconds:
        net.plug("node2", is_in=False)
        time.sleep(seconds)
        net.plug("node2", is_in=True)
    said, codes = ends(processes)
    assert codes == [0, 0], said
    if restarts is not None:
        assert ["Restarting all" in one for one in said] == [restarts] * 2, said
    assert final_files(train_dir) == undisturbed(2)


def test_lost_packets_change_nothing(net, tmp_path, undisturbed):
    for name in TWO:
        net.filter(name, *["-m", "statistic", "--mode=random", "--probability=0.01"])
    train_dir = tmp_path / "run"
    said, codes = ends(start(net, TWO, train_dir))
    assert codes == [0, 0], said
    assert final_files(train_dir) == undisturbed(2)


def test_a_vanished_machine_is_missed_within_half_a_minute(net, tmp_path):
    chief, _ = start(net, TWO, tmp_path / "run")
    runs.read_until(chief.stdout, "step 50,")
    began = time.monotonic()
    net.plug("node2", is_in=False)
    lines = itertools.takewhile(
        lambda line: "has lost worker 1" not in line, chief.stdout
    )
    assert "Done." not in "".join(lines)
    assert 1 < time.monotonic() - began < 30
    chief.communicate(timeout=machines.SECONDS)
    assert chief.returncode == 75


def test_a_run_continues_after_the_chiefs_machine_returns(net, tmp_path, undisturbed):
    train_dir = tmp_path / "run"
    chief, other = start(net, TWO, train_dir, RESTARTS)
    runs.read_until(chief.stdout, "step 50,")
    net.plug("node1", is_in=False)
    net.kill("node1")
    chief.communicate()
    time.sleep(10)
    net.plug("node1", is_in=True)
    again = net.work("node1", 0, train_dir, *FLAGS, RESTARTS, nodes=TWO)
    said, codes = ends([again, other])
    assert codes == [0, 0], said
    assert "has lost worker 0" in said[1]
    assert final_files(train_dir) == undisturbed(2)


def test_a_cut_between_two_workers_ends_the_run_on_request(net, tmp_path, undisturbed):
    """Their heartbeats go to the chief, whom they still reach."""
    train_dir = tmp_path / "run"
    processes = start(net, THREE, train_dir, "--hang_timeout=20")
    runs.read_until(processes[0].stdout, "step 50,")
    began = time.monotonic()
    net.cut("node2", "node10")
    said, codes = ends(processes)
    assert time.monotonic() - began < 90
    assert codes == [75, 75, 75], said
    assert any("the other workers" in one for one in said), said
    net.mend()
    said, codes = ends(start(net, THREE, train_dir))
    assert codes == [0, 0, 0], said
    assert "Resuming from step" in said[0]
    assert final_files(train_dir) == undisturbed(3)


@pytest.mark.parametrize("index", [0, 1])
def test_a_duplicate_worker_index_leaves_the_other_worker_missing(net, tmp_path, index):
    flags = (*FLAGS, "--worker_timeout=30")
    processes = [
        net.work(name, index, tmp_path / name, *flags, nodes=TWO) for name in TWO
    ]
    said, codes = ends(processes)
    assert codes == [75, 75], said
    for one in said:
        assert f"waiting for worker {1 - index} at" in one
        assert "a different index" in one
