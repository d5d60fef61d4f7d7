"""Which devices the towers get; GPUs are pretended, so no test needs one."""

import re
import types

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import runs
from cifar10.config import cli
from cifar10.config.config import Config
from cifar10.distributed import strategy
from cifar10.errors import EXIT_USAGE, MissingGpuError, UsageError
from cifar10.tools.plan import plan
from cifar10.towers import devices, split_gpus


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Makes TensorFlow list some GPUs, which it refuses to configure once started."""
    tensorflow = context.context()

    def pretend(count, *, started=False):
        gpus = [tf.config.PhysicalDevice(f"GPU:{n}", "GPU") for n in range(count)]
        split = {}
        for name, value in {
            "_physical_devices": gpus,
            "_visible_device_list": gpus,
            "_memory_growth_map": dict.fromkeys(gpus),
            "_virtual_device_map": split,
            "_context_handle": tensorflow._context_handle if started else None,
        }.items():
            monkeypatch.setattr(tensorflow, name, value)
        monkeypatch.setattr(
            split_gpus,
            "free_memory",
            lambda gpu: (10 if gpu in split else 50) * 2**30,
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "get_device_details",
            lambda gpu: {"device_name": "NVIDIA H200"},
        )

    def start():
        """Begins to compute on what is configured now."""
        monkeypatch.setattr(tensorflow, "_context_handle", handle)

    handle = tensorflow._context_handle
    pretend.start = start
    return pretend


def visible():
    return [gpu.name for gpu in tf.config.get_visible_devices("GPU")]


def growing():
    gpus = tf.config.list_physical_devices("GPU")
    return [g.name for g in gpus if tf.config.experimental.get_memory_growth(g)]


def parts():
    """Returns the limits of the parts of each GPU that is split."""
    gpus = tf.config.list_physical_devices("GPU")
    found = {g.name: tf.config.get_logical_device_configuration(g) for g in gpus}
    return {name: [p.memory_limit for p in own] for name, own in found.items() if own}


def test_one_tower_per_gpu_by_default(pretend_gpus):
    pretend_gpus(3)
    placement = devices.place_towers(None)
    assert placement.devices == ("/gpu:0", "/gpu:1", "/gpu:2")
    assert not placement.simulated
    assert placement.description == "3 towers on NVIDIA H200"
    assert growing() == ["GPU:0", "GPU:1", "GPU:2"]


def test_only_the_gpus_that_are_used_are_taken(pretend_gpus):
    pretend_gpus(4)
    assert devices.place_towers(2).devices == ("/gpu:0", "/gpu:1")
    assert visible() == ["GPU:0", "GPU:1"]


def test_fewer_gpus_than_asked_for_is_refused_with_two_ways_on(pretend_gpus):
    pretend_gpus(2)
    with pytest.raises(UsageError) as caught:
        devices.place_towers(4)
    message = str(caught.value)
    assert "--num_gpus 4" in message
    assert "has 2 (NVIDIA H200, NVIDIA H200)" in message
    assert "--num_gpus 2" in message
    assert "--split_gpu 4 to simulate" in message
    assert "CUDA_VISIBLE_DEVICES=-1" in message


@pytest.mark.parametrize(
    ("found", "towers", "split", "used"),
    [(1, 4, 4, 1), (1, None, 4, 1), (2, None, 3, 2), (4, 6, 3, 2), (2, 2, 2, 1)],
)
def test_a_split_gpu_has_several_towers(pretend_gpus, found, towers, split, used):
    pretend_gpus(found)
    placement = devices.place_towers(towers, split)
    count = towers or found * split
    assert placement.devices == tuple(f"/gpu:{n}" for n in range(count))
    assert placement.simulated
    assert f"{count} SIMULATED towers, {split} on each GPU" in placement.description
    assert "NVIDIA H200" in placement.description
    assert visible() == [f"GPU:{n}" for n in range(used)]
    # TensorFlow refuses growth beside a limit.
    assert growing() == []
    assert [*parts()] == visible()
    limits = parts()
    pretend_gpus.start()
    assert devices.place_towers(towers, split) == placement
    assert parts() == limits, "as an earlier training has split them"
    for own in limits.values():
        assert own == [40 * 2**10 // split] * split


def test_an_unsplit_gpu_has_no_limit(pretend_gpus):
    pretend_gpus(2)
    assert not devices.place_towers(2, 1).simulated
    assert parts() == {}


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ((None, 1), (2, 1), ("/gpu:0", "/gpu:1")),
        ((2, 1), (1, 1), ("/gpu:0",)),
        ((6, 3), (3, 3), ("/gpu:0", "/gpu:1", "/gpu:2")),
        ((2, 1), (3, 1), "--num_gpus 3"),
        ((2, 1), (None, 1), "--num_gpus 4"),
        ((2, 1), (4, 2), "--num_gpus 4"),
        ((4, 2), (2, 1), "--num_gpus 2"),
    ],
)
def test_a_second_training_takes_fewer_gpus_and_no_others(
    pretend_gpus, first, then, expected
):
    pretend_gpus(4)
    devices.place_towers(*first)
    pretend_gpus.start()
    if isinstance(expected, tuple):
        assert devices.place_towers(*then).devices == expected
    else:
        with pytest.raises(UsageError, match=f"{expected}: TensorFlow has computed"):
            devices.place_towers(*then)


def test_a_tensorflow_that_has_started_with_all_gpus_trains_on_them(pretend_gpus):
    """As in a notebook; it has taken all of their memory, and that stays so."""
    pretend_gpus(2, started=True)
    assert devices.place_towers(2).devices == ("/gpu:0", "/gpu:1")
    assert devices.place_evaluation("gpu:1") == "/gpu:1"
    assert devices.place_evaluation("cpu") == "/cpu:0"
    with pytest.raises(UsageError, match="the GPUs then counted as 2"):
        devices.place_towers(4, 2)


def test_a_gpu_may_have_a_limit_of_its_users(pretend_gpus):
    pretend_gpus(1)
    limit = [tf.config.LogicalDeviceConfiguration(memory_limit=4096)]
    (gpu,) = tf.config.list_physical_devices("GPU")
    tf.config.set_logical_device_configuration(gpu, limit)
    assert devices.place_towers(1).devices == ("/gpu:0",)
    assert parts() == {"GPU:0": [4096]}


@pytest.mark.parametrize(
    ("found", "towers", "split", "said"),
    [
        (2, 3, 2, "--num_gpus 3: it counts towers, and --split_gpu 2 puts 2 on each"),
        (2, 1, 4, "Give a multiple of 4, or leave out"),
        (1, 8, 4, "--num_gpus 8 --split_gpu 4: this machine has 1 "),
        (1, 8, 4, "Give --num_gpus 4 --split_gpu 4, or --split_gpu 8 to simulate"),
        (2, 3, 1, "Give --num_gpus 2, or --split_gpu 3 to simulate"),
        (0, 4, 4, "--split_gpu 4: TensorFlow finds no GPU to split"),
        (0, None, 2, "--num_gpus 2 then simulates the towers on the CPU"),
    ],
)
def test_towers_that_do_not_divide_or_fit_are_refused(
    pretend_gpus, found, towers, split, said
):
    pretend_gpus(found)
    with pytest.raises(UsageError) as refused:
        devices.place_towers(towers, split)
    assert said in " ".join(str(refused.value).split())
    assert max(map(len, str(refused.value).splitlines())) <= 90
    assert len(visible()) == found
    assert growing() == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train_multi_gpu.py", "--split_gpu", 4], EXIT_USAGE, "--num_gpus 4 then"),
        (["train_multi_gpu.py", "--split_gpu", 0], EXIT_USAGE, "the minimum"),
        (["train.py", "--split_gpu", 4], EXIT_USAGE, "this script decides it"),
    ],
)
def test_programs_refuse_to_split_what_is_not_there(tmp_path, words, code, said):
    where = {"train_dir": tmp_path / "run", "data_dir": tmp_path, "data": "synthetic"}
    done = runs.call(*words, *runs.flags(max_steps=1, **where))
    assert done.returncode == code
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_plan_splits_gpus_too(pretend_gpus):
    pretend_gpus(0)
    with pytest.raises(MissingGpuError, match="--split_gpu 2: TensorFlow finds no GPU"):
        plan.report(Config(split_gpu=2))


def test_parts_of_one_gpu_are_mirrored_without_nccl(pretend_gpus, monkeypatch):
    """NCCL refuses two of its ranks on one GPU."""
    pretend_gpus(1)
    asked = []
    monkeypatch.setattr(
        tf.distribute, "MirroredStrategy", lambda *how: asked.append(how)
    )
    strategy.choose("mirrored", devices.place_towers(2, 2), None, 9.0)
    [(names, reduction)] = asked
    assert names == ("/gpu:0", "/gpu:1")
    assert isinstance(reduction, tf.distribute.ReductionToOneDevice)


class Driver:
    """As libcuda answers, for a single GPU with 5,000 of 8,000 bytes free."""

    def __init__(self, gpus):
        self.gpus = gpus
        self.context = None

    def cuInit(self, _):  # noqa: N802 - these are its names.
        return 0

    def cuDeviceGet(self, device, number):  # noqa: N802
        device._obj.value = number
        return 0 if number < self.gpus else 101

    def cuDevicePrimaryCtxRetain(self, context, _):  # noqa: N802
        context._obj.value = 77
        return 0

    def cuCtxPushCurrent_v2(self, context):  # noqa: N802
        self.context = context.value
        return 0

    def cuMemGetInfo_v2(self, free, total):  # noqa: N802
        free._obj.value, total._obj.value = 5000, 8000
        return 0 if self.context == 77 else 201


def test_the_driver_is_asked_for_the_free_memory(monkeypatch):
    driver = Driver(2)
    monkeypatch.setattr(split_gpus.ctypes, "CDLL", lambda _: driver)
    second, third = (types.SimpleNamespace(name=f"GPU:{n}") for n in (1, 2))
    assert split_gpus.free_memory(second) == 5000
    with pytest.raises(UsageError, match="how much memory GPU:2 has"):
        split_gpus.free_memory(third)


@pytest.mark.parametrize(
    "place",
    [lambda: devices.place_towers(4), lambda: devices.place_evaluation("gpu:2")],
)
def test_where_gpus_are_missing_the_reasons_stand_below(pretend_gpus, place, capsys):
    pretend_gpus(2)
    with pytest.raises(SystemExit) as ended:
        cli.run(place, explain_missing_gpus=lambda: "PROBLEM: a. FIX: b.")
    assert ended.value.code == EXIT_USAGE
    assert capsys.readouterr().err.endswith(".\nPROBLEM: a. FIX: b.\n")


@pytest.mark.slow
def test_each_operation_is_printed_with_its_device(tmp_path, stand_in_dir):
    words = runs.training_flags(tmp_path, stand_in_dir, max_steps=1, num_gpus=2)
    ended = runs.run("train_multi_gpu.py", *words, "--log_device_placement")
    assert ended.returncode == 0, ended.stderr
    for tower in (0, 1):
        found = rf"^tower_{tower}/\S*conv1\S*: \(Conv2D\): \S*/device:CPU:{tower}$"
        assert re.search(found, ended.stdout, re.MULTILINE)


def test_without_a_gpu_towers_are_simulated_and_it_says_so(four_cpus):
    del four_cpus
    placement = devices.place_towers(4)
    assert placement.devices == ("/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3")
    assert placement.simulated
    assert "4 SIMULATED towers" in placement.description
    assert "no GPU was found" in placement.description


@pytest.mark.parametrize("asked", [None, 1])
def test_one_tower_on_the_cpu_is_no_simulation(asked):
    placement = devices.place_towers(asked)
    assert placement.devices == ("/cpu:0",)
    assert not placement.simulated
    assert "no GPU was found" in placement.description


@pytest.fixture
def unusable_gpu(monkeypatch, tmp_path):
    """A machine with a driver and without the libraries that TensorFlow needs."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "_NVIDIA_DRIVERS", [tmp_path / "nvidia0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("unusable_gpu")
@pytest.mark.parametrize("count", [1, 2])
def test_a_gpu_that_tensorflow_cannot_use_is_not_simulated(count):
    with pytest.raises(MissingGpuError) as caught:
        devices.place_towers(count)
    message = str(caught.value)
    assert "has an NVIDIA GPU, but TensorFlow cannot use it" in message
    for way_on in ("doctor", "CUDA_VISIBLE_DEVICES=-1"):
        assert way_on in message


@pytest.mark.usefixtures("unusable_gpu")
@pytest.mark.parametrize("hidden", ["-1", ""])
def test_a_gpu_that_was_hidden_on_purpose_is_not_missed(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    placement = devices.place_towers(2)
    assert placement.simulated
    assert "no GPU was found" in placement.description


@pytest.mark.usefixtures("unusable_gpu")
def test_a_gpu_that_tensorflow_cannot_use_is_never_called_absent():
    placement = devices.place_towers(None)
    assert placement.devices == ("/cpu:0",)
    assert "no GPU was found" not in placement.description
    assert "TensorFlow cannot use the NVIDIA GPU" in placement.description
    assert "python -m cifar10 doctor says why" in placement.description


@pytest.mark.parametrize(
    ("device", "seen", "expected"),
    [
        ("auto", ["GPU:0"], "/gpu:0"),
        ("gpu", ["GPU:0"], "/gpu:0"),
        ("gpu:1", ["GPU:1"], "/gpu:0"),
        ("cpu", [], "/cpu:0"),
    ],
)
def test_an_evaluation_takes_its_device_and_no_other(
    pretend_gpus, device, seen, expected
):
    pretend_gpus(2)
    assert devices.place_evaluation(device) == expected
    assert visible() == seen


@pytest.mark.parametrize("device", ["gpu:2", "gpu:x", "gpu:", "tpu", "cpu:1"])
def test_a_device_that_is_not_there_is_named(pretend_gpus, device):
    pretend_gpus(2)
    with pytest.raises(UsageError, match=f"--device {device}"):
        devices.place_evaluation(device)
