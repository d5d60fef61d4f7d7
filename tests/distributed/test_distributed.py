"""Several sets of variables and several processes: all are one tower."""

import json
import os
import re
import signal
import threading
import time
import tomllib
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.distributed import rendezvous, replicas as distributed, strategy
from cifar10.distributed.cluster import Cluster, Worker
from cifar10.errors import LostWorkerError, UnavailableError, UsageError
from cifar10.towers import devices
from cifar10.towers.devices import Placement
from cifar10.towers.many_steps import ManySteps
from cifar10.towers.towers import Tower, TowerBuilder
from cifar10.towers.train_state import TrainState
from cifar10.towers.update import Update
from cifar10.training import assembly, settings, train

SCRIPT = Path(__file__).parents[2] / "train_multi_gpu.py"
STEPS = 40


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


def builders(devices, make_model):
    """The same four towers, with shared variables and with mirrored ones."""
    tower = Tower(models.inference, models.loss)
    update = Update(
        lambda examples: tf.constant(0.1, tf.float64),
        lambda step: tf.constant(0.75, tf.float64),
    )

    def state(device):
        with tf.device(device):
            return TrainState(make_model(), keras.optimizers.SGD(0.1, 0.9), device)

    shared = TowerBuilder(state("/cpu:0"), devices, tower=tower, update=update)
    mirrored = distributed.ReplicaBuilder(
        tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice()),
        [state(device) for device in devices],
        devices,
        tower=tower,
        update=update,
    )
    for variable, value in zip(
        mirrored.state.model.variables, shared.state.model.variables, strict=True
    ):
        variable.assign(value)
    for one in (shared, mirrored):
        for average, variable in zip(
            one.state.averages, one.state.model.trainable_variables, strict=True
        ):
            average.assign(variable.value)
    assert mirrored.synchronize([5, -7]) == [5, -7]
    return shared, mirrored


def batches(seed, towers=4, per_tower=3):
    random = np.random.default_rng(seed)
    return [
        (
            tf.constant(random.normal(size=(per_tower, 4))),
            tf.constant(random.integers(3, size=per_tower), tf.int32),
        )
        for _ in range(towers)
    ]


def values(state):
    of_keras = [*state.model.variables, *state.optimizer.variables]
    every = [*of_keras, *state.averages, state.global_step]
    return [variable.numpy() for variable in every]


def test_mirrored_variables_compute_what_shared_ones_do(four_cpus):
    shared, mirrored = builders(four_cpus, normed_model)
    for seed in range(3):
        expected = shared.step(batches(seed))
        result = mirrored.step(batches(seed), return_gradients=seed == 1)
        np.testing.assert_allclose(
            result.tower_losses, expected.tower_losses, atol=1e-12
        )
        assert set(result.metrics) == set(expected.metrics)
        for name, metric in expected.metrics.items():
            np.testing.assert_allclose(result.metrics[name], metric, atol=1e-12)
    several = [batches(7), batches(8)]
    np.testing.assert_allclose(
        ManySteps(mirrored)(several).tower_losses,
        ManySteps(shared)(several).tower_losses,
        atol=1e-12,
    )
    for ours, theirs in zip(values(mirrored.state), values(shared.state), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.slow
def test_all_replicas_hold_the_same_bits(four_cpus):
    _, mirrored = builders(four_cpus, normed_model)
    for seed in range(3):
        mirrored.step(batches(seed))
    first, *others = mirrored._states
    for number, state in enumerate(others, start=1):
        assert state.averages[0].device.endswith(f"CPU:{number}")
        for ours, theirs in zip(values(state), values(first), strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_synchronizing_copies_every_bit_of_the_first_replica(four_cpus):
    _, mirrored = builders(four_cpus, normed_model)
    first, *others = mirrored._states
    kernel = first.model.trainable_variables[0]
    kernel.assign(tf.fill(kernel.shape, tf.constant(-0.0, tf.float64)))
    first.optimizer.variables[2].assign(first.optimizer.variables[2] + 3.0)
    first.averages[0].assign_add(tf.ones_like(first.averages[0]))
    first.global_step.assign(2**40 + 1)
    others[-1].halted.assign(True)
    before = values(first)
    assert values(others[-1])[0].tobytes() != before[0].tobytes()

    mirrored.synchronize([])

    for state in mirrored._states:
        assert not state.halted
        for ours, theirs in zip(values(state), before, strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_all_learn_the_numbers_of_the_first_replica(four_cpus):
    _, mirrored = builders(four_cpus, normed_model)
    before = [value.tobytes() for value in values(mirrored.state)]
    assert mirrored.share([2**40 + 1, 0, -3]) == [2**40 + 1, 0, -3]
    assert [value.tobytes() for value in values(mirrored.state)] == before


def test_all_learn_of_a_signal_two_steps_later(four_cpus):
    _, mirrored = builders(four_cpus, normed_model)
    assert mirrored.agree_to_stop(None) is None
    mirrored.step(batches(0))
    assert mirrored.agree_to_stop(signal.SIGUSR1) is None
    mirrored.step(batches(1))
    assert mirrored.agree_to_stop(None) is None, "that step has not ended for all"
    mirrored.step(batches(2))
    assert mirrored.agree_to_stop(None) == signal.SIGUSR1


def test_a_not_finite_tower_is_passed_over_by_every_replica(four_cpus):
    _, mirrored = builders(four_cpus, normed_model)
    before = values(mirrored.state)
    bad = batches(0)
    bad[2] = (bad[2][0] * np.inf, bad[2][1])
    losses = mirrored.step(bad).tower_losses.numpy()
    assert np.flatnonzero(~np.isfinite(losses)).tolist() == [2]
    for state in mirrored._states:
        assert state.halted
        for ours, theirs in zip(values(state), before, strict=True):
            assert ours.tobytes() == theirs.tobytes()


@pytest.mark.slow
@pytest.mark.usefixtures("four_cpus")
def test_a_mirrored_training_ends_where_a_shared_one_does(tmp_path, stand_in_dir):
    ends = []
    for name in ("towers", "mirrored"):
        config = Config(
            num_gpus=2,
            batch_size=4,
            max_steps=4,
            precision="float64",
            variable_update=name,
            data="synthetic",
            data_dir=str(stand_in_dir),
            train_dir=str(tmp_path / name),
        )
        assert train.train(config) == 4
        ends.append(final_values(tmp_path / name, 4))
    assert runs.largest_difference(*ends) < 1e-12


@pytest.mark.parametrize(("gpus", "chosen"), [(0, "RING"), (2, "NCCL")])
def test_gpus_of_several_machines_reduce_over_nccl(monkeypatch, gpus, chosen):
    asked = []
    monkeypatch.setattr(rendezvous.barrier, "wait_for_all", lambda *_: None)
    monkeypatch.setattr(
        rendezvous.context,
        "context",
        lambda: types.SimpleNamespace(configure_coordination_service=lambda **_: None),
    )
    monkeypatch.setattr(
        tf.distribute,
        "MultiWorkerMirroredStrategy",
        lambda **flags: asked.append(flags),
    )
    workers = (Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1"))
    rendezvous.connect(Cluster(workers, 0), gpus=gpus, timeout=9.0)
    assert asked[0]["communication_options"].implementation.name == chosen


@pytest.mark.parametrize("requested", ["mirrored", "auto", "towers"])
def test_a_processor_of_several_machines_mirrors_on_one_device(monkeypatch, requested):
    connected = []
    monkeypatch.setattr(
        rendezvous, "connect", lambda *unused, **flags: connected.append(flags)
    )
    two = Placement(("/cpu:0", "/cpu:1"), True, "")
    cluster = Cluster((Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1")), 0)
    if requested == "mirrored":
        with pytest.raises(UsageError, match="--variable_update mirrored"):
            strategy.choose(requested, two, cluster, 9.0)
        assert connected == []
    else:
        assert strategy.choose(requested, two, cluster, 9.0)[1] == 1
        assert connected == [{"gpus": 0, "timeout": 9.0}]
    gpus = Placement(("/gpu:0", "/gpu:1"), False, "")
    replicas = strategy.choose(requested, gpus, cluster, 9.0)[1]
    assert replicas == (1 if requested == "towers" else 2)
    assert connected[-1]["gpus"] == (0 if requested == "towers" else 2)


@pytest.mark.parametrize("on_towers", [False, True])
def test_each_worker_makes_its_own_part_of_the_global_batch(
    four_cpus, monkeypatch, on_towers
):
    """The mean gradient is the same if two swap theirs; which image is whose is not."""
    monkeypatch.setattr(devices, "distorts_on_towers", lambda *_, **__: on_towers)
    random = np.random.default_rng(0)
    images = random.integers(256, size=(50, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(50, dtype=np.int32)
    config = Config(batch_size=3, seed=5, precision="float32")
    workers = tuple(Worker("worker", n, f"a:{n + 1}") for n in range(2))

    def batches_of(placement, cluster):
        with assembly.open_batches(
            settings.resolve(config, placement, workers=2 if cluster else 1),
            placement,
            cluster,
            images,
            labels,
            start_batch=7,
            step=7,
        ) as queues:
            return queues.get()

    alone = batches_of(Placement(four_cpus, True, ""), None)
    half = Placement(four_cpus[:2], True, "")
    parts = [batches_of(half, Cluster(workers, index)) for index in (0, 1)]
    for (ours, our_labels), (theirs, their_labels) in zip(
        [*parts[0], *parts[1]], alone, strict=True
    ):
        np.testing.assert_array_equal(our_labels, their_labels)
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert not np.array_equal(parts[0][0][1], parts[1][0][1])


# ---- What workers tell one another


def test_workers_started_differently_are_refused_with_the_difference(monkeypatch):
    messages = {}
    monkeypatch.setattr(rendezvous, "_set", messages.__setitem__)

    def get(key, _worker, _timeout):
        while key not in messages:
            time.sleep(0.01)
        return messages[key]

    monkeypatch.setattr(rendezvous, "_get", get)
    workers = (Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1"))
    refusals = {}

    def run(index, settings):
        try:
            rendezvous.compare(Cluster(workers, index), settings, 5.0)
        except UsageError as error:
            refusals[index] = str(error)

    for second, same in (({"seed": 1, "x": 2}, True), ({"seed": 1, "x": 3}, False)):
        messages.clear()
        threads = [
            threading.Thread(target=run, args=one)
            for one in ((0, {"seed": 1, "x": 2}), (1, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert bool(refusals) is not same
    assert refusals[0] == refusals[1]
    assert "    x: 2 on worker 0 at a:1, 3 on worker 1 at b:1" in refusals[0]
    assert "seed" not in refusals[0]


@pytest.mark.parametrize("kind", [UsageError, UnavailableError])
def test_what_a_worker_refuses_before_they_compare_all_say(monkeypatch, kind):
    """And all end with the exit code on which a scheduler does the same with all."""
    messages = {}
    monkeypatch.setattr(rendezvous, "_set", messages.__setitem__)
    monkeypatch.setattr(rendezvous, "_get", lambda key, worker, timeout: messages[key])
    workers = (Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1"))
    refusing = Cluster(workers, 1)
    with (
        pytest.raises(UsageError, match=r"^there is no data"),
        rendezvous.sharing_refusals(refusing),
    ):
        raise kind("there is no data")
    said = "worker 1 at b:1 has refused: there is no"
    with pytest.raises(UsageError, match=said) as raised:
        rendezvous.compare(Cluster(workers, 0), {"seed": 1}, 1.0)
    assert raised.value.exit_code == kind.exit_code
    with pytest.raises(UsageError), rendezvous.sharing_refusals(None):
        raise UsageError("alone")


def test_only_what_names_others_is_blamed_on_them():
    workers = (Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1"))
    own = "Failed copying from /job:worker/replica:0/task:0/device:CPU:0 to GPU:0"
    cluster = Cluster(workers, 0)
    with (
        pytest.raises(tf.errors.InternalError),
        rendezvous.reporting_lost_workers(cluster),
    ):
        raise tf.errors.InternalError(None, None, own)
    for message in (
        "Collective ops is aborted by: Socket closed",
        "/job:worker/task:1",
    ):
        with (
            pytest.raises(LostWorkerError, match="has lost worker 1 at b:1"),
            rendezvous.reporting_lost_workers(cluster),
        ):
            raise tf.errors.UnavailableError(None, None, message)


def test_what_the_chief_refuses_the_others_say_too(monkeypatch):
    messages = {}
    monkeypatch.setattr(rendezvous, "_set", messages.__setitem__)
    monkeypatch.setattr(rendezvous, "_get", lambda key, worker, timeout: messages[key])
    workers = (Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1"))

    def refuse():
        raise UsageError("the directory is in use")

    with pytest.raises(UsageError, match=r"^the directory is in use"):
        rendezvous.after_chief(Cluster(workers, 0), refuse, 1.0)
    with pytest.raises(UsageError, match="worker 0 at a:1 has refused: the directory"):
        rendezvous.after_chief(Cluster(workers, 1), refuse, 1.0)
    assert rendezvous.after_chief(Cluster(workers, 0), lambda: 3, 1.0) == 3
    assert rendezvous.after_chief(Cluster(workers, 1), refuse, 1.0) is None


class Service:
    """What TensorFlow keeps for all workers: a key is set once, until it is deleted."""

    def __init__(self):
        self._values = {}

    def set_config_key_value(self, key, value):
        if key in self._values:
            raise tf.errors.AlreadyExistsError(None, None, key)
        self._values[key] = value

    def get_config_key_value(self, key, _timeout_in_ms):
        if key not in self._values:
            raise tf.errors.DeadlineExceededError(None, None, key)
        return self._values[key]

    def delete_config_key_value(self, key):
        if key not in self._values:
            raise tf.errors.NotFoundError(None, None, key)
        del self._values[key]


def test_workers_that_hang_find_out_which_of_them_is_the_cause(monkeypatch):
    service = Service()
    monkeypatch.setattr(rendezvous.context, "context", lambda: service)
    monkeypatch.setattr(rendezvous, "SECONDS_TO_TELL", 1.0)
    workers = tuple(Worker("worker", n, f"a:{n + 1}") for n in range(3))

    def ask(step, waits_of):
        answers = {}

        def run(index, waits):
            cluster = Cluster(workers, index)
            answers[index] = rendezvous.ask_who_hangs(cluster, step, waits)

        threads = [threading.Thread(target=run, args=one) for one in waits_of.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return answers

    assert ask(40, {0: "", 1: "its input"}) == {
        0: "worker 1 at a:2, which waits for its input and "
        "worker 2 at a:3, which is silent",
        1: "worker 2 at a:3, which is silent",
    }
    # Later on, what they told then is no answer.
    assert ask(90, {0: "", 2: ""}) == dict.fromkeys(
        (0, 2), "worker 1 at a:2, which is silent"
    )
    assert ask(140, {0: "", 1: "", 2: ""}) == {0: "", 1: "", 2: ""}


# ---- Real processes


def command(train_dir, stand_in_dir, *more):
    flags = {
        "local_workers": 2,
        "num_gpus": 2,
        "batch_size": 2,
        "max_steps": STEPS,
        "checkpoint_steps": 8,
        "precision": "float64",
        "schedule": "linear",  # The images of all workers set the learning rate.
        "train_dir": train_dir,
        "data": "synthetic",
        "data_dir": stand_in_dir,
    }
    return [SCRIPT, "--deterministic", *runs.flags(**flags), *more]


def final_values(train_dir, step=STEPS):
    return runs.variables(runs.checkpoint(train_dir, step))


def final_files(train_dir):
    return runs.files(runs.checkpoint(train_dir, STEPS))


def pid_of_worker(train_dir, index):
    """The process whose TF_CONFIG has this index, among those of a run."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if str(train_dir) not in (path / "cmdline").read_text():
                continue
            if f'"index": {index}' in (path / "environ").read_text():
                return int(path.name)
        except OSError:
            continue
    raise AssertionError("no such worker")


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory, stand_in_dir):
    """A training of two processes with two towers each, undisturbed."""
    train_dir = tmp_path_factory.mktemp("two") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # Of no use to workers, and so nothing that may stand between them.
        patch.setenv("https_proxy", "http://127.0.0.1:1")
        done = runs.run(*command(train_dir, stand_in_dir))
    assert done.returncode == 0, done.stderr
    assert "on each of 2 workers" in done.stdout
    assert "2 images per tower and step x 4 = 8 globally" in done.stdout
    assert done.stdout.count("Done.") == 1, "only the chief says so"
    return train_dir


def test_two_processes_of_two_towers_are_one_tower(two_workers, tmp_path, stand_in_dir):
    config = Config(
        num_gpus=1,
        batch_size=8,
        max_steps=STEPS,
        precision="float64",
        schedule="linear",
        data="synthetic",
        data_dir=str(stand_in_dir),
        train_dir=str(tmp_path / "one"),
    )
    train.train(config)
    ours, one = final_values(two_workers), final_values(tmp_path / "one")
    assert runs.largest_difference(ours, one) < 1e-8
    moved = final_values(tmp_path / "one", STEPS)
    initial = TrainState(
        models.build("tutorial", (24, 24, 3), 10, precision="float64"),
        keras.optimizers.SGD(0.1),
    )
    kernel = initial.model.trainable_variables[0].numpy()
    name = next(name for name in moved if moved[name].shape == kernel.shape)
    assert np.abs(moved[name] - kernel).max() > 1e-4, "nothing was trained"


@pytest.mark.slow
def test_two_processes_augment_as_one_tower(tmp_path, stand_in_dir):
    recipe, run = tmp_path / "mine.toml", tmp_path / "two"
    recipe.write_text(
        "[augmentation]\nrand_augment = {}\nrandom_erasing = {}\n"
        "mixup = {probability = 0.5}\ncutmix = {probability = 0.5}\n"
    )
    more = runs.flags(recipe=recipe, max_steps=8)
    done = runs.run(*command(run, stand_in_dir, *more))
    assert done.returncode == 0, done.stderr
    one = runs.train(
        tmp_path / "one",
        stand_in_dir,
        num_gpus=1,
        batch_size=8,
        max_steps=8,
        precision="float64",
        schedule="linear",
        augmentation=tomllib.loads(recipe.read_text())["augmentation"],
    )
    assert runs.largest_difference(final_values(run, 8), one) < 1e-8


@pytest.mark.slow
def test_the_chief_scores_and_all_end_after_the_same_step(
    two_workers, tmp_path, stand_in_dir
):
    """The steps are those of a training that does not score itself."""
    train_dir = tmp_path / "run"
    arguments = command(train_dir, stand_in_dir, "--eval_steps", 20)
    done = runs.run(*arguments)
    assert done.returncode == 0, done.stderr
    runs.assert_equal(final_values(train_dir), final_values(two_workers))
    scored = (train_dir / "eval" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in scored] == [20, 40]

    # Without a learning rate nothing is gained.
    still = tmp_path / "still"
    ending = ("--learning_rate", 0, "--stop_after_no_gain", 1, "--keep_best", 1)
    batches = ("--batch_size", 50, "--moving_average_decay", 0, "--eval_steps", 8)
    arguments = command(still, stand_in_dir, *ending, *batches)
    for expected in ("Done.", "Nothing to do."):
        done = runs.run(*arguments)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        assert "Ended at step 16 by --stop_after_no_gain 1: the" in done.stdout
        assert sorted(path.name for path in (still / "checkpoints").iterdir()) == [
            "step-00000008",
            "step-00000016",
        ]


@pytest.mark.slow
def test_a_stop_and_a_killed_worker_change_nothing(two_workers, tmp_path, stand_in_dir):
    train_dir = tmp_path / "run"
    arguments = command(train_dir, stand_in_dir, "--max_restarts", 1)
    with runs.started(*arguments) as process:
        runs.read_until(process.stdout, "step 10,")
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
        assert process.returncode == 128 + signal.SIGTERM, said
    stops = {int(step) for step in re.findall(r"SIGTERM after step (\d+)", said)}
    assert len(stops) == 1, f"the workers stopped apart: {said}"
    (step,) = stops
    assert (train_dir / "checkpoints" / f"step-{step:08d}").is_dir()

    with runs.started(*arguments) as process:
        runs.read_until(process.stdout, "step 30,")
        os.kill(pid_of_worker(train_dir, 1), signal.SIGKILL)
        output, said = process.communicate()
        assert process.returncode == 0, said
    assert "has lost worker 1 at 127.0.0.1" in said
    assert "worker 1 was killed by SIGKILL. Restarting all, 1 of 1 times" in said
    assert re.search(r"Resuming from step (24|32) ", output)
    assert final_files(train_dir) == final_files(two_workers)


@pytest.mark.slow
def test_a_stopped_worker_is_named_and_all_are_started_again(
    two_workers, tmp_path, stand_in_dir
):
    train_dir = tmp_path / "run"
    # Long before TensorFlow misses the worker, also on a busy machine.
    flags = ("--max_restarts", 1, "--hang_timeout", 6)
    with runs.started(*command(train_dir, stand_in_dir, *flags)) as process:
        runs.read_until(process.stdout, "step 20,")
        stopped = pid_of_worker(train_dir, 1)
        os.kill(stopped, signal.SIGSTOP)
        output, said = process.communicate()
        assert process.returncode == 0, said
    assert "has not ended after 6 s." in said
    assert re.search(r"waits in cifar10/\S+ for worker 1 at \S+, which is silent", said)
    assert "worker 0 ended with exit code 75, worker 1 was killed by SIGKILL" in said
    assert re.search(r"Resuming from step (8|16|24) ", output)
    assert final_files(train_dir) == final_files(two_workers)
