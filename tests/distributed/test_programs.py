"""Replicas on one machine are programs of their own, which meet in one sum a step."""

import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from benchmarks import gpu_graphs
from cifar10.config.config import Config
from cifar10.distributed import programs
from cifar10.errors import UsageError
from cifar10.input import calls
from cifar10.model import inference, loss
from cifar10.models import layer_tree
from cifar10.run_directory import checkpoints
from cifar10.towers.devices import Placement
from cifar10.towers.towers import Tower
from cifar10.towers.update import TrainState, Update
from cifar10.towers.verification import check_replicas
from cifar10.training import train as training
from small_towers import random_batch, small_model, split

UPDATE = Update(
    lambda examples: tf.constant(0.1, tf.float64),
    lambda step: tf.constant(0.75, tf.float64),
)


def builder_of(devices, count, layers=list, xla=False):
    """Returns the builder of `count` replicas of a small model, and their states."""
    states = []
    for device in devices[:count]:
        with tf.device(device):
            model = small_model(*layers())
            states.append(TrainState(model, keras.optimizers.SGD(0.1), device))
    tower = Tower(inference, loss, xla=xla)
    given = {"tower": tower, "update": UPDATE}
    return programs.ProgramBuilder(states, devices[:count], **given), states


def train(train_dir, data_dir, hooks=(), **options):
    """Trains a model with batch norm and dropout, on one tower or on replicas."""
    config = Config(
        **{
            "global_batch_size": 12,
            "max_steps": 10,
            "checkpoint_steps": 4,
            "momentum": 0.9,
            "precision": "float64",
            "deterministic": True,
            "model": runs.SMALL,
            "data": "synthetic",
            "data_dir": str(data_dir),
            "train_dir": str(train_dir),
            **options,
        }
    )
    training.train(config, hooks=hooks)
    return runs.variables(runs.checkpoint(train_dir, config.run.max_steps))


# ---- numbers


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_equal_one_tower_in_multi_step_calls_and_across_a_resume(
    tmp_path, stand_in_dir, count
):
    one = train(tmp_path / "one", stand_in_dir)
    given = {"num_gpus": count, "variable_update": "mirrored"}
    whole = train(tmp_path / "whole", stand_in_dir, **given)
    assert runs.largest_difference(whole, one) < 1e-8
    run = tmp_path / "run"
    for steps in (6, 10):
        parts = train(
            run, stand_in_dir, steps_per_call=3, **{**given, "max_steps": steps}
        )
    runs.assert_equal(parts, whole)


def test_later_trainings_in_a_process_sum_separately(four_cpus):
    """With other numbers of replicas and of variables."""
    for count, layers in ((2, list), (2, lambda: [keras.layers.Dense(5)]), (3, list)):
        builder, states = builder_of(four_cpus, count, layers)
        builder.broadcast([], variables=True)
        builder.step(split(*random_batch(), count))
        check_replicas(states, 1)
        assert [int(state.global_step) for state in states] == [1] * count


def test_frozen_variables_may_change_from_step_to_step(four_cpus):
    """As in stages; then the vector has other numbers of elements."""
    builder, states = builder_of(four_cpus, 2)
    builder.broadcast([], variables=True)
    biases = [state.model.trainable_variables[1] for state in states]
    names = [
        layer_tree.paths(state.model)[id(bias)]
        for state, bias in zip(states, biases, strict=True)
    ]
    bias, moved = biases[1], []
    for step, frozen in enumerate(([], names, [])):
        before = bias.numpy()
        builder.freeze(frozen)
        builder.step(split(*random_batch(seed=step), 2))
        moved.append(bool((bias.numpy() != before).any()))
        check_replicas(states, step + 1)
    assert moved == [True, False, True]


class Idle(keras.layers.Layer):
    """Has a weight that changes nothing."""

    def build(self, input_shape):
        self.idle = self.add_weight(shape=input_shape[1:], name="idle")

    def call(self, inputs):
        return inputs


def test_only_the_chief_names_a_variable_without_a_gradient(four_cpus, caplog):
    for first_tower in (0, 2):
        caplog.clear()
        builder, _ = builder_of(four_cpus, 2, lambda: [Idle()])
        builder.first_tower = first_tower
        with caplog.at_level(logging.WARNING):
            builder.trace(split(*random_batch(), 2))
        named = [one for one in caplog.messages if "idle/idle" in one]
        assert len(named) == (1 if first_tower == 0 else 0)


def test_values_of_all_dtypes_are_summed_in_one_vector(four_cpus):
    """Whole numbers are the first replica's, however large; nothing rounds them."""
    group, where = programs.Group(four_cpus[:2]), four_cpus[:2]
    whole = tf.constant([2**63 - 1, -(2**40) - 1, 0], tf.int64)
    orders = []
    for device in where:
        with tf.device(device):
            orders.append(tf.Variable(0.0))

    @tf.function(autograph=False)
    def sums():
        found = []
        for number, device in enumerate(where):
            own = whole if number == 0 else tf.zeros_like(whole)
            given = [tf.fill([2, 1], 0.5 + number), own, tf.constant(np.nan)]
            with tf.device(device):
                found.append(group.sum(given, [orders[number]]))
        return found

    for fractions, integers, nan in sums():
        np.testing.assert_array_equal(fractions, [[2.0], [2.0]])
        np.testing.assert_array_equal(integers, whole)
        assert np.isnan(nan)


@pytest.mark.parametrize("halts", [True, False])
def test_all_replicas_leave_out_a_nonfinite_step(four_cpus, halts):
    builder, states = builder_of(four_cpus, 3)
    builder.update = None
    for replica in builder._replicas:
        replica.update = Update(UPDATE.learning_rate, UPDATE.average_decay, halts=halts)
    builder.broadcast([], variables=True)
    steps = [split(*random_batch(seed=seed), 3) for seed in range(4)]
    inputs, labels = steps[1][2]
    steps[1][2] = (inputs * np.inf, labels)
    losses = builder.steps(calls.stacked(steps, 4), 4).tower_losses.numpy()
    assert np.isfinite(losses[0]).all()
    assert [*np.flatnonzero(~np.isfinite(losses[1]))] == [2]
    check_replicas(states, 4)
    for state in states:
        assert bool(state.halted) is halts
        assert int(state.global_step) == (1 if halts else 4)
        assert all(np.isfinite(one).all() for one in state.model.get_weights())


# ---- programs


def test_a_compiled_program_sums_within_a_loop_of_known_length(four_cpus, monkeypatch):
    """By XLA's passes for CPUs, whose code would not run; those for GPUs need one."""
    whole = programs.TowerBuilder._is_on_one_device
    monkeypatch.setattr(programs._Replica, "_is_on_one_device", whole)
    of_gpus = programs.Group(["/gpu:0", "/gpu:1"])
    monkeypatch.setattr(programs, "Group", lambda devices: of_gpus)

    def dropout():
        return [keras.layers.Dropout(0.5, seed=1)]

    builder, _ = builder_of(four_cpus, 2, dropout, xla=True)
    assert builder.are_compiled
    call = calls.stacked([split(*random_batch(), 2)], 4)
    for number, replica in enumerate(builder._replicas):
        compiler = replica._steps.experimental_get_compiler_ir(
            call[number : number + 1], tf.constant(3)
        )
        with tf.device(replica.state.device):
            program = compiler(stage="optimized_hlo")
        lines = program.splitlines()
        (loop,) = [line for line in lines if " while(" in line and "all" not in line]
        assert '"known_trip_count":{"n":"4"}' in loop
        assert " conditional(" not in program
        (total,) = [line for line in lines if " all-reduce(" in line]
        assert "replica_groups={{0,1}}" in total
        body = re.search(r"body=(%[\w.-]+)", loop)[1]
        within = program.partition(f"\n{body} (")[2].partition("\n}")[0]
        assert total in within, "the sum is not part of the loop"
    tuned, program = [], programs._Replica.program
    monkeypatch.setattr(
        programs._Replica,
        "program",
        lambda replica, *count: tuned.append(replica) or program(replica, *count),
    )
    monkeypatch.setattr(programs.TowerBuilder, "steps", lambda *_: None)
    for _ in range(2):
        builder.steps(call, 3)
    assert tuned == builder._replicas[:1], "kernels are chosen once, for all replicas"


def test_xla_compiles_the_sum_of_a_loop_for_gpus():
    group = programs.Group(["/gpu:0", "/gpu:1", "/gpu:2"])

    @tf.function(jit_compile=True, autograph=False)
    def steps(values, counter):
        def step(number, values, counter):
            return number + 1, *group.sum([values, counter], [])

        return tf.while_loop(lambda number, *_: number < 5, step, (0, values, counter))

    specs = tf.TensorSpec([7]), tf.TensorSpec([2], tf.int64)
    compiler = steps.experimental_get_compiler_ir(*specs)
    program = compiler(stage="hlo", platform_name="GPU")
    assert program.count(" all-reduce(") == 1
    assert "replica_groups={{0,1,2}}" in program


def test_each_gpu_has_a_compiled_program_independent_of_the_others():
    images = np.zeros([8, 32, 32, 3], np.uint8)
    towers, batches = gpu_graphs.build_towers(
        2, images, variable_update="mirrored", precision="float32", xla=True
    )
    assert towers.are_compiled
    stacked = [
        tuple(tf.TensorSpec([3, *one.shape], one.dtype) for one in batch)
        for batch in batches
    ]
    count = tf.TensorSpec([], tf.int32)
    graph = towers._steps.get_concrete_function(stacked, count).graph
    found = graph.get_operations()
    programs_found = [one for one in found if one.type == "StatefulPartitionedCall"]
    assert [one.device[-5:] for one in programs_found] == ["GPU:0", "GPU:1"]
    for one in programs_found:
        behind, seen = [one], set()
        while behind:
            operation = behind.pop()
            for before in (
                *(given.op for given in operation.inputs),
                *operation.control_inputs,
            ):
                if before not in seen:
                    seen.add(before)
                    behind.append(before)
        assert not seen & {*programs_found}


@pytest.mark.parametrize("suits_nccl", [True, False])
def test_parts_of_one_gpu_are_mirrored_without_nccl(monkeypatch, suits_nccl):
    """NCCL refuses two of its ranks on one GPU."""
    monkeypatch.setattr(Placement, "suits_nccl", suits_nccl)
    images = np.zeros([8, 32, 32, 3], np.uint8)
    given = {"variable_update": "mirrored", "precision": "float32"}
    towers, batches = gpu_graphs.build_towers(2, images, **given)
    assert [state.device for state in towers.states] == ["/gpu:0", "/gpu:1"]
    found = {one.op for one in gpu_graphs.asked_of_gpus(towers.trace(batches).graph)}
    assert ("CollectiveReduceV2" in found) is suits_nccl


# ---- replicas that differ


class Flip:
    """Changes a bit of a variable of one replica after a step."""

    def __init__(self, monkeypatch, step=6):
        self.step, self.builders = step, []
        original = programs.ProgramBuilder.__init__

        def init(builder, states, *given, **options):
            self.states = states
            original(builder, states, *given, **options)

        monkeypatch.setattr(programs.ProgramBuilder, "__init__", init)

    def on_step(self, step):
        if step == self.step:
            self.step = None
            variable = self.states[1].model.trainable_variables[2].value
            bits = variable.numpy()
            bits.view(np.uint8).reshape(-1)[0] ^= 1
            variable.assign(bits)


def test_one_bit_of_one_replica_ends_the_run_at_the_next_checkpoint(
    tmp_path, stand_in_dir, monkeypatch
):
    given = {"num_gpus": 3, "variable_update": "mirrored", "learning_rate": 1e-9}
    with pytest.raises(UsageError) as error:
        train(tmp_path / "run", stand_in_dir, [Flip(monkeypatch)], **given)
    said = str(error.value)
    assert "replica 1 on /cpu:1" in said
    assert "kernel" in said
    assert "hardware" in said
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [4]


def test_a_rollback_makes_replicas_equal_again(tmp_path, stand_in_dir, monkeypatch):
    given = {"num_gpus": 3, "variable_update": "mirrored", "on_nan": "rollback"}
    whole = train(tmp_path / "whole", stand_in_dir, **given)
    found = train(tmp_path / "run", stand_in_dir, [Flip(monkeypatch)], **given)
    runs.assert_equal(found, whole)
