"""Several sets of variables and several processes: all are one tower."""

import contextlib
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
import workers as processes
from cifar10.config.config import Config
from cifar10.config.run_config import COMPUTED
from cifar10.distributed import programs, replicas, workers
from cifar10.distributed.cluster import Cluster
from cifar10.errors import EXIT_USAGE, LostWorkerError, UsageError
from cifar10.input import calls
from cifar10.model import inference, loss
from cifar10.process.signals import StopSignals
from cifar10.towers.devices import Placement
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.update import TrainState, Update
from cifar10.training import assembly
from recorded_runs import recorded
from small_towers import open_batches

STEPS = 24
CHIEF, OTHER = (Cluster(("a:1", "a:2"), index) for index in range(2))


# ---- Mirrored variables in one process


def normed_model():
    """Batch norm and dropout: statistics and a random generator's state."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, dtype="float64"),
            keras.layers.BatchNormalization(dtype="float64"),
            keras.layers.Dropout(0.5, seed=3, dtype="float64"),
            keras.layers.Dense(3, dtype="float64"),
        ]
    )


@pytest.fixture(scope="module", params=["strategy", "programs"])
def traced_once(request, four_cpus):
    """The same towers with shared variables and with mirrored ones; all states."""
    where = four_cpus[:2]
    parts = {
        "tower": Tower(inference, loss),
        "update": Update(
            lambda examples: tf.constant(0.1, tf.float64),
            lambda step: tf.constant(0.75, tf.float64),
        ),
    }

    def state(device):
        with tf.device(device):
            return TrainState(normed_model(), keras.optimizers.SGD(0.1, 0.9), device)

    states = [state(device) for device in where]
    if request.param == "programs":
        mirrored = programs.ProgramBuilder(states, where, **parts)
    else:
        alike = workers.mirrored_strategy(where, by_nccl=False)
        mirrored = replicas.ReplicaBuilder(alike, states, where, **parts)
    shared = TowerBuilder(state("/cpu:0"), where, **parts)
    return shared, mirrored, states, values(states[0])


@pytest.fixture
def towers(traced_once):
    """The shared towers, the mirrored ones and their states, all from one beginning."""
    shared, mirrored, states, initial = traced_once
    for state in (shared.state, states[0]):
        for variable, value in zip(variables(state), initial, strict=True):
            variable.assign(value)
    assert mirrored.broadcast([5, -7], variables=True) == [5, -7]
    return shared, mirrored, states


def batches(seed):
    random = np.random.default_rng(seed)
    return [
        (
            tf.constant(random.normal(size=(3, 4))),
            tf.constant(random.integers(3, size=3), tf.int32),
        )
        for _ in range(2)
    ]


def variables(state):
    of_keras = [*state.model.variables, *state.optimizer.variables]
    return [*of_keras, *state.averages, state.global_step]


def values(state):
    return [variable.numpy() for variable in variables(state)]


def assert_all_hold(states, expected):
    """Compares every replica's variables bit for bit."""
    for state in states:
        for value, right in zip(values(state), expected, strict=True):
            assert value.tobytes() == right.tobytes()


def test_mirrored_and_shared_variables_give_the_same_results(towers):
    shared, mirrored, states = towers
    for seed in range(2):
        expected, result = shared.step(batches(seed)), mirrored.step(batches(seed))
        ours, theirs = result.tower_losses, expected.tower_losses
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
        assert set(result.metrics) == set(expected.metrics)
        for name, metric in expected.metrics.items():
            np.testing.assert_allclose(result.metrics[name], metric, atol=1e-12)
    several = [batches(7), batches(8)]
    losses = [shared.step(each).tower_losses for each in several]
    found = mirrored.steps(calls.stacked(several, 2), 2).tower_losses
    np.testing.assert_allclose(found, losses, atol=1e-12)
    for ours, theirs in zip(values(states[0]), values(shared.state), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    assert_all_hold(states, values(states[0]))
    for number, state in enumerate(states):
        assert state.averages[0].device.endswith(f"CPU:{number}")


def test_synchronizing_copies_every_bit_of_the_first_replica(towers):
    _, mirrored, (first, *others) = towers
    kernel = first.model.trainable_variables[0]
    kernel.assign(tf.fill(kernel.shape, tf.constant(-0.0, tf.float64)))
    first.optimizer.variables[2].assign(first.optimizer.variables[2] + 3.0)
    first.averages[0].assign_add(tf.ones_like(first.averages[0]))
    first.global_step.assign(2**40 + 1)
    others[-1].halted.assign(True)
    before = values(first)
    assert values(others[-1])[0].tobytes() != before[0].tobytes()
    mirrored.broadcast([], variables=True)
    assert_all_hold([first, *others], before)
    assert not any(state.halted for state in others)


def test_all_replicas_get_the_numbers_of_the_first_replica(towers):
    _, mirrored, states = towers
    before = values(states[0])
    assert mirrored.broadcast([2**40 + 1, 0, -3]) == [2**40 + 1, 0, -3]
    assert_all_hold(states, before)


@pytest.mark.parametrize("traced_once", ["strategy"], indirect=True)
def test_all_processes_learn_of_a_signal_two_steps_later(towers, monkeypatch):
    _, mirrored, _ = towers
    take, counts = mirrored._finish, []

    def finish(found):
        counts.append(found.metrics["stop"].numpy().sum())
        return take(found)

    monkeypatch.setattr(mirrored, "_finish", finish)
    none, requests = [False] * 5, [False, False, True, False, False]
    assert mirrored.agree(none) == none
    mirrored.step(batches(0))
    assert mirrored.agree(requests) == none
    mirrored.step(batches(1))
    assert mirrored.agree(none) == none, "that step has not ended for all"
    mirrored.step(batches(2))
    assert mirrored.agree(none) == requests
    assert counts == [0, 1, 1], "a process asks once, however many replicas it has"


@pytest.mark.parametrize("traced_once", ["strategy"], indirect=True)
def test_a_rollback_takes_back_a_request_to_end(towers):
    """The hours of the steps that run again do not count twice."""
    _, mirrored, _ = towers
    none = [False] * 5
    mirrored.agree([*none[1:], True])
    for seed in range(2):
        mirrored.step(batches(seed))
    mirrored.broadcast([], variables=True)
    assert mirrored.agree(none) == none, "the steps have been taken back"
    for seed in range(2):
        mirrored.step(batches(seed))
    assert mirrored.agree(none) == none, "there are hours left"


def test_every_replica_halts_at_an_infinite_loss_of_one_tower(towers):
    _, mirrored, states = towers
    before = values(states[0])
    bad = batches(0)
    bad[1] = (bad[1][0] * np.inf, bad[1][1])
    losses = mirrored.step(bad).tower_losses.numpy()
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [1]
    assert all(state.halted for state in states)
    assert_all_hold(states, before)


# ---- What each worker gets


def test_only_gpus_of_several_machines_have_variables_of_their_own(monkeypatch):
    connected = []
    monkeypatch.setattr(
        workers,
        "connect_cluster",
        lambda *unused, **flags: connected.append(flags["gpus"]),
    )

    monkeypatch.setattr(workers.rendezvous, "meet", lambda *_: None)

    def connect(requested, placement):
        monkeypatch.setattr(workers.Workers, "_has_connected", False)
        together = workers.Workers(CHIEF, 9.0)
        return together.connect(requested, placement, StopSignals())

    cpus = Placement(("/cpu:0", "/cpu:1"), True, "")
    gpus = Placement(("/gpu:0", "/gpu:1"), False, "")
    for requested, placement, count in (
        *(("auto", cpus, 1), ("towers", gpus, 1)),
        *(("auto", gpus, 2), ("mirrored", gpus, 2)),
    ):
        assert connect(requested, placement)[1] == count
        assert connected[-1] == (count if count > 1 else 0)
    with pytest.raises(UsageError, match="--variable_update"):
        connect("mirrored", cpus)
    assert len(connected) == 4


@pytest.mark.parametrize(
    "on_towers", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_each_worker_makes_its_own_part_of_the_global_batch(
    four_cpus, monkeypatch, on_towers
):
    """The mean gradient is the same if two swap theirs; which image is whose is not."""
    monkeypatch.setattr(Placement, "on_gpus", on_towers)
    random = np.random.default_rng(0)
    images = random.integers(256, size=(50, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(50, dtype=np.int32)
    config = Config(batch_size=3, seed=5, precision="float32")

    def batches_of(placement, cluster):
        together = workers.Workers(cluster)
        resolved = assembly.resolve_config(config, placement, workers=together.count)
        with open_batches(
            resolved, placement, together, images, labels, 7, 7
        ) as queues:
            return queues.get()

    alone = batches_of(Placement(four_cpus, True, ""), None)
    half = Placement(four_cpus[:2], True, "")
    parts = [batches_of(half, cluster) for cluster in (CHIEF, OTHER)]
    for (ours, our_labels), (theirs, their_labels) in zip(
        [*parts[0], *parts[1]], alone, strict=True
    ):
        np.testing.assert_array_equal(our_labels, their_labels)
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert not np.array_equal(parts[0][0][1], parts[1][0][1])


# ---- What workers tell one another


class Store:
    """Stands for the values that TensorFlow keeps for all workers of a cluster."""

    def __init__(self):
        self._values = {}

    def set_config_key_value(self, key, value):
        self._values[key] = value

    def get_config_key_value(self, key, milliseconds):
        for _ in range(milliseconds):
            if key in self._values:
                return self._values[key]
            time.sleep(0.001)
        raise tf.errors.DeadlineExceededError(None, None, "no value")


@pytest.fixture
def together(monkeypatch):
    """Returns a function for what each of several workers does, or its error."""

    def act(*actions, timeout=20.0):
        store = Store()
        monkeypatch.setattr(workers.context, "context", lambda: store)
        addresses = tuple(f"host{index}:1" for index in range(len(actions)))

        def do(index, action):
            try:
                return action(workers.Workers(Cluster(addresses, index), timeout))
            except (UsageError, LostWorkerError) as error:
                return error

        with ThreadPoolExecutor() as pool:
            return [*pool.map(do, range(len(actions)), actions)]

    return act


def test_the_chief_and_a_worker_with_other_settings_both_name_the_difference(together):
    begun = threading.Event()
    chief, same, other = together(
        *(
            lambda worker, x=x: worker.begin({"seed": 1, "x": x}, begun.set)
            for x in (2, 2, 3)
        ),
        timeout=0.5,
    )
    assert not begun.is_set(), "a run was begun"
    assert isinstance(chief, UsageError)
    assert str(chief) == str(other)
    assert "x: 2 on worker 0 at host0:1, 3 on worker 2 at host2:1" in str(chief)
    assert "seed" not in str(chief)
    assert isinstance(same, LostWorkerError)


def test_workers_may_have_other_hardware_but_no_other_versions(together):
    def begin(*, deterministic=False, **versions):
        run = recorded(versions=versions, deterministic=deterministic)
        return lambda worker: worker.begin(run.in_common, list)

    own = {"tensorflow": "2.21", "processor": "A, 8 cores", "driver": "1"}
    other = {"processor": "B, 4 cores", "driver": "2"}
    chief, (message,) = together(begin(**own), begin(**own | other))
    assert chief == []
    assert "worker 1" in message
    chief, _ = together(begin(**own), begin(**own | {"tensorflow": "2.20"}))
    assert "versions: " in str(chief)
    exact = {"deterministic": True}  # Other processors round differently.
    chief, _ = together(begin(**own, **exact), begin(**own | other, **exact))
    assert "B, 4 cores" in str(chief)


@pytest.mark.parametrize(
    ("values", "agree"),
    [
        ([1.0, -2.0], True),
        ([1.001, -2.0], True),
        ([1.01, -2.0], False),
        ([], True),
        ([np.nan, -2.0], True),
    ],
)
def test_what_code_computes_may_differ_by_rounding_alone(together, values, agree):
    """No values, where a model's logits tell nothing, are no other code either."""
    name = f"{COMPUTED}--model"
    chief, _ = together(
        *(
            lambda worker, found=found: worker.begin(
                {"precision": "float32", name: found}, list
            )
            for found in ([1.0, -2.0], values)
        )
    )
    assert (chief == []) == agree
    if not agree:
        assert f"{name}: [1.0, -2.0] on worker 0 at host0:1, [1.01, -2" in str(chief)
        assert "the same flags, data, code and versions" in str(chief)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"seed": 2}, ()),
        ({"seed": 2, "xla": True}, ()),
        ({"xla": True}, ("--no-xla",)),
        ({"distortions": "none"}, ("--initial_weights must name",)),
        ({"distortions": "none", "initial_weights": None}, ()),
    ],
)
def test_advice_fits_the_settings_that_differ(together, changes, advice):
    settings = {"seed": 1, "xla": False, "distortions": "crop"}
    settings["initial_weights"] = changes.get("initial_weights", "runs/one")
    chief, _ = together(
        lambda worker: worker.begin(settings, list),
        lambda worker: worker.begin(settings | changes, list),
    )
    last = str(chief).partition("Start all workers with the same ")[2]
    assert last, "the usual advice"
    for one in ("--no-xla", "--initial_weights must name"):
        assert (one in last) == (one in advice)


def test_settings_are_compared_as_json(together):
    """As those of the chief arrive."""
    path = Path("a")
    chief, other = together(
        *[lambda worker: worker.begin({"path": path, "sizes": (1, 2)}, list)] * 2
    )
    assert chief == []
    assert len(other) == 1


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_missing_at_the_start_is_named(together, late):
    release = threading.Event()

    def wait(worker):
        try:
            return worker.begin({}, list)
        finally:
            release.set()

    actions = [wait, wait]
    actions[late] = lambda _: release.wait(60)
    error = together(*actions, timeout=0.3)[1 - late]
    assert isinstance(error, LostWorkerError)
    assert f"no reply from worker {late} at host{late}:1 " in str(error)


def test_other_workers_begin_once_the_chief_has_begun(together):
    begun = []

    def begin(worker):
        messages = worker.begin({}, None)
        return messages, [*begun]

    def begin_slowly():
        time.sleep(0.3)
        begun.append("it")
        return ["begun"]

    chief, (_, seen) = together(lambda worker: worker.begin({}, begin_slowly), begin)
    assert chief == ["begun"]
    assert seen == ["it"]


def test_refusal_of_the_chief_ends_the_wait_of_the_others(together):
    def refuse():
        raise UsageError("in use")

    chief, other = together(
        lambda worker: worker.begin({}, refuse),
        lambda worker: worker.begin({}, None),
        timeout=0.3,
    )
    assert str(chief) == "in use"
    assert isinstance(other, LostWorkerError)


def test_only_errors_naming_other_workers_are_blamed_on_them():
    own = "Failed copying from /job:worker/replica:0/task:0/device:CPU:0 to GPU:0"
    chief = workers.Workers(CHIEF)
    with pytest.raises(tf.errors.InternalError), chief.reporting_losses():
        raise tf.errors.InternalError(None, None, own)
    for message in ("Collective ops is aborted by: Socket", "/job:worker/task:1"):
        with (
            pytest.raises(LostWorkerError, match="lost worker 1 at a:2"),
            chief.reporting_losses(),
        ):
            raise tf.errors.UnavailableError(None, None, message)


# ---- Real processes


def flags(train_dir, data_dir, **values):
    return {
        "num_gpus": 2,
        "batch_size": 2,
        "max_steps": STEPS,
        "checkpoint_steps": 8,
        "precision": "float64",
        "schedule": "linear",  # The images of all workers set the learning rate.
        "model": processes.PAUSED,
        "train_dir": train_dir,
        "data": "synthetic",
        "data_dir": data_dir,
        **values,
    }


def final_values(train_dir, step=STEPS):
    return runs.variables(runs.checkpoint(train_dir, step))


def final_files(train_dir):
    return runs.files(runs.checkpoint(train_dir, STEPS))


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory, stand_in_dir):
    """A run of two processes with two towers each, undisturbed."""
    train_dir = tmp_path_factory.mktemp("two") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # Of no use to workers, and so nothing that may stand between them.
        patch.setenv("https_proxy", "http://127.0.0.1:1")
        said = processes.train(2, **flags(train_dir, stand_in_dir))
    assert "2 workers" in said
    assert "x 4 = 8" in said
    return train_dir


def test_two_processes_of_two_towers_equal_one_tower(
    two_workers, tmp_path, stand_in_dir
):
    one = flags(tmp_path / "one", stand_in_dir, num_gpus=1, batch_size=8)
    expected = runs.train(**one)
    found = final_values(two_workers)
    assert runs.largest_difference(found, expected) < 1e-8
    moved = runs.largest_difference(found, final_values(two_workers, 8))
    assert moved > 1e-4, "nothing was trained"


@pytest.mark.slow
def test_chief_scores_and_all_end_after_the_same_step(
    two_workers, tmp_path, stand_in_dir
):
    """The steps are those of a run that does not score itself."""
    train_dir = tmp_path / "run"
    processes.train(
        2, **flags(train_dir, stand_in_dir, eval_steps=12, summary_steps=12)
    )
    runs.assert_equal(final_values(train_dir), final_values(two_workers))
    scored = (train_dir / "eval" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in scored] == [12, 24]

    # Without a learning rate nothing is gained.
    still = flags(
        tmp_path / "still",
        stand_in_dir,
        learning_rate=0,
        stop_after_no_gain=1,
        keep_best=1,
        batch_size=50,
        moving_average_decay=0,
        eval_steps=8,
    )
    assert "step 16 by --stop_after_no_gain" in processes.train(2, **still)
    assert sorted((tmp_path / "still" / "checkpoints").iterdir()) == [
        runs.checkpoint(tmp_path / "still", step) for step in (8, 16)
    ]

    # The chief's time ends all of them after the same step.
    short = flags(tmp_path / "short", stand_in_dir, max_hours=1e-6)
    short["schedule"] = "staircase"
    del short["max_steps"]
    assert "by --max_hours" in processes.train(2, **short)
    assert len([*(tmp_path / "short" / "checkpoints").iterdir()]) == 1


@pytest.mark.slow
def test_all_stop_after_the_same_step_and_resume(
    two_workers, tmp_path, stand_in_dir, monkeypatch
):
    """Where only one of them is asked to."""
    train_dir = tmp_path / "run"
    monkeypatch.setenv(processes.PAUSE, "0.1")
    with processes.started(2, **flags(train_dir, stand_in_dir)) as workers:
        runs.read_until(workers[0].stdout, "step 10,")
        workers[1].send_signal(signal.SIGTERM)
        ends = [worker.communicate()[1] for worker in workers]
        assert [one.returncode for one in workers] == [128 + signal.SIGTERM] * 2, ends
    steps = {re.search(r"SIGTERM after step (\d+)", said)[1] for said in ends}
    assert len(steps) == 1, f"the workers stopped apart: {ends}"
    assert runs.checkpoint(train_dir, int(*steps)).is_dir()
    monkeypatch.delenv(processes.PAUSE)
    said = processes.train(2, **flags(train_dir, stand_in_dir))
    assert f"Resuming from step {int(*steps)} " in said
    assert final_files(train_dir) == final_files(two_workers)


def pid_of_worker(train_dir, index):
    """The process whose TF_CONFIG has this index, among those of a run."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            of_run = str(train_dir) in (path / "cmdline").read_text()
            if of_run and f'"index": {index}' in (path / "environ").read_text():
                return int(path.name)
    raise AssertionError("no such worker")


@pytest.mark.slow
def test_killed_and_stopped_workers_are_named_and_change_nothing(
    two_workers, tmp_path, stand_in_dir, monkeypatch
):
    train_dir = tmp_path / "run"
    monkeypatch.setenv(processes.PAUSE, "0.1")
    values = flags(
        train_dir,
        stand_in_dir,
        local_workers=2,
        max_restarts=2,
    )
    words = [processes.SCRIPT, "--deterministic", *runs.flags(**values)]
    with runs.started(*words) as process:
        runs.read_until(process.stdout, "step 10,")
        os.kill(pid_of_worker(train_dir, 1), signal.SIGKILL)
        first = runs.read_until(process.stdout, "Resuming from")
        runs.read_until(process.stdout, "step 20,")
        os.kill(pid_of_worker(train_dir, 1), signal.SIGSTOP)
        output, said = process.communicate()
        assert process.returncode == 0, said
    assert said.count("lost worker 1 at 127.0.0.1") == 2
    restarting = r"worker 1 was killed by SIGKILL\. Restarting all \({} of 2\)"
    assert re.search(restarting.format(1), said)
    assert re.search(r"from step (8|16) ", first)
    assert re.search(f"exit code 75, {restarting.format(2)}", said)
    assert re.search(r"Resuming from step (8|16|24) ", output)
    assert final_files(train_dir) == final_files(two_workers)


@pytest.mark.slow
def test_a_worker_with_other_code_of_the_model_trains_nothing(tmp_path, stand_in_dir):
    train_dir = tmp_path / "run"
    values = flags(train_dir, stand_in_dir, model="workers:of_its_worker")
    with processes.started(2, **values) as workers:
        ends = [worker.communicate()[1] for worker in workers]
        assert [one.returncode for one in workers] == [EXIT_USAGE] * 2, ends
    assert all(f"{COMPUTED}--model: [" in said for said in ends)
    assert not (train_dir / "config.json").exists()


def test_mirrored_trainings_in_one_process_reduce_separately(four_cpus):
    """By collectives, as on GPUs, with other variables and other numbers of devices."""
    for count, size in ((2, 4), (2, 9), (3, 9)):
        strategy = workers.mirrored_strategy(four_cpus[:count], by_nccl=True)

        @tf.function
        def step(strategy=strategy, size=size):
            def reduce():
                context = tf.distribute.get_replica_context()
                return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([size]))

            return strategy.run(reduce)

        for total in strategy.experimental_local_results(step()):
            np.testing.assert_array_equal(total, [count] * size)
