"""Which devices the towers get; GPUs are pretended, so no test needs one."""

import types

import pytest
import runs
import tensorflow as tf

from cifar10.config import cli
from cifar10.config.config import Config
from cifar10.distributed import strategy
from cifar10.errors import EXIT_USAGE, MissingGpuError, UsageError
from cifar10.tools.plan import plan
from cifar10.towers import devices, split_gpus


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Makes TensorFlow list some GPUs and records how they are configured."""

    def pretend(count):
        gpus = [types.SimpleNamespace(name=f"GPU:{n}") for n in range(count)]
        split = {}
        done = {"visible": None, "growth": [], "parts": split}
        monkeypatch.setattr(
            tf.config,
            "list_physical_devices",
            lambda kind: gpus if kind == "GPU" else [],
        )
        monkeypatch.setattr(
            tf.config,
            "set_visible_devices",
            lambda chosen, kind: done.update(visible=[gpu.name for gpu in chosen]),
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "set_memory_growth",
            lambda gpu, on: done["growth"].append((gpu.name, on)),
        )
        monkeypatch.setattr(
            tf.config,
            "set_logical_device_configuration",
            lambda gpu, parts: split.update({gpu.name: parts}),
        )
        monkeypatch.setattr(
            tf.config,
            "get_logical_device_configuration",
            lambda gpu: split.get(gpu.name),
        )
        monkeypatch.setattr(
            split_gpus,
            "free_memory",
            lambda gpu: (10 if gpu.name in split else 50) * 2**30,
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "get_device_details",
            lambda gpu: {"device_name": "NVIDIA H200"},
        )
        return done

    return pretend


def test_one_tower_per_gpu_by_default(pretend_gpus):
    done = pretend_gpus(3)
    placement = devices.place_towers(None)
    assert placement.devices == ("/gpu:0", "/gpu:1", "/gpu:2")
    assert not placement.simulated
    assert placement.description == "3 towers on NVIDIA H200"
    assert done["growth"] == [("GPU:0", True), ("GPU:1", True), ("GPU:2", True)]


def test_only_the_gpus_that_are_used_are_taken(pretend_gpus):
    done = pretend_gpus(4)
    assert devices.place_towers(2).devices == ("/gpu:0", "/gpu:1")
    assert done["visible"] == ["GPU:0", "GPU:1"]


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
    done = pretend_gpus(found)
    placement = devices.place_towers(towers, split)
    count = towers or found * split
    assert placement.devices == tuple(f"/gpu:{n}" for n in range(count))
    assert placement.simulated
    assert f"{count} SIMULATED towers, {split} on each GPU" in placement.description
    assert "NVIDIA H200" in placement.description
    assert done["visible"] == [f"GPU:{n}" for n in range(used)]
    # TensorFlow refuses growth beside a limit.
    assert done["growth"] == []
    assert [*done["parts"]] == done["visible"]
    limits = {**done["parts"]}
    assert devices.place_towers(towers, split) == placement
    assert done["parts"] == limits, "as an earlier training has split them"
    for parts in limits.values():
        assert [part.memory_limit for part in parts] == [40 * 2**10 // split] * split


def test_an_unsplit_gpu_has_no_limit(pretend_gpus):
    done = pretend_gpus(2)
    assert not devices.place_towers(2, 1).simulated
    assert done["parts"] == {}


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
    done = pretend_gpus(found)
    with pytest.raises(UsageError) as refused:
        devices.place_towers(towers, split)
    assert said in " ".join(str(refused.value).split())
    assert max(map(len, str(refused.value).splitlines())) <= 90
    assert done["visible"] is None


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
    ("device", "visible", "expected"),
    [
        ("auto", ["GPU:0"], "/gpu:0"),
        ("gpu", ["GPU:0"], "/gpu:0"),
        ("gpu:1", ["GPU:1"], "/gpu:0"),
        ("cpu", [], "/cpu:0"),
    ],
)
def test_an_evaluation_takes_its_device_and_no_other(
    pretend_gpus, device, visible, expected
):
    done = pretend_gpus(2)
    assert devices.place_evaluation(device) == expected
    assert done["visible"] == visible


@pytest.mark.parametrize("device", ["gpu:2", "gpu:x", "gpu:", "tpu", "cpu:1"])
def test_a_device_that_is_not_there_is_named(pretend_gpus, device):
    pretend_gpus(2)
    with pytest.raises(UsageError, match=f"--device {device}"):
        devices.place_evaluation(device)
