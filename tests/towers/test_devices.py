"""Which devices the towers get; GPUs are pretended, so no test needs one."""

import os

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from cifar10 import hardware
from cifar10.distributed.workers import Workers
from cifar10.errors import EXIT_USAGE, MissingGpuError, UsageError
from cifar10.process import entry_point
from cifar10.process.signals import StopSignals
from cifar10.towers import devices


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Makes TensorFlow list some GPUs, which it refuses to configure once started."""
    tensorflow = context.context()
    monkeypatch.setattr(tensorflow, "_intra_op_parallelism_threads", 0)

    def pretend(count, *, started=False, kinds=("NVIDIA H200",)):
        gpus = [tf.config.PhysicalDevice(f"GPU:{n}", "GPU") for n in range(count)]
        split = {}
        for name, value in {
            "_physical_devices": [tf.config.PhysicalDevice("CPU:0", "CPU"), *gpus],
            "_visible_device_list": gpus,
            "_memory_growth_map": dict.fromkeys(gpus),
            "_virtual_device_map": split,
            "_context_handle": tensorflow._context_handle if started else None,
        }.items():
            monkeypatch.setattr(tensorflow, name, value)
        monkeypatch.setattr(
            devices,
            "free_memory",
            lambda gpu: (10 if gpu in split else 50) * 2**30,
        )
        monkeypatch.setattr(
            tf.config.experimental,
            "get_device_details",
            lambda gpu: {"device_name": kinds[int(gpu.name[-1]) % len(kinds)]},
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


@pytest.mark.parametrize(
    ("towers", "given", "threads"),
    [(3, None, 2), (20, None, 1), (3, "8", 0)],
)
def test_simulated_towers_divide_the_cores(
    pretend_gpus, monkeypatch, towers, given, threads
):
    """As many operations at once use them all; a user's number of threads stays."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    if given:
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", given)
    pretend_gpus(0)
    devices.divide_cores(towers)
    assert tf.config.threading.get_intra_op_parallelism_threads() == threads


def test_a_started_tensorflow_keeps_its_threads_and_towers(pretend_gpus, monkeypatch):
    """As in a notebook; these tests have started with four."""
    with pytest.raises(UsageError, match=r"--num_gpus 5: .*already started"):
        devices.place_towers(5)
    assert len(devices.place_towers(3).devices) == 3
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
    pretend_gpus(0, started=True)
    devices.divide_cores(3)
    assert tf.config.threading.get_intra_op_parallelism_threads() == 0


@pytest.mark.parametrize(("asked", "used"), [(None, 3), (2, 2)])
def test_each_used_gpu_has_a_tower(pretend_gpus, asked, used):
    pretend_gpus(3)
    placement = devices.place_towers(asked)
    assert placement.devices == tuple(f"/gpu:{n}" for n in range(used))
    assert not placement.simulated
    assert "NVIDIA H200" in placement.description
    assert visible() == growing() == [f"GPU:{n}" for n in range(used)]
    assert parts() == {}


@pytest.mark.parametrize(
    ("found", "towers", "split", "used"),
    [(1, 4, 4, 1), (2, None, 3, 2), (4, 6, 3, 2), (1, None, 2, 1)],
)
def test_a_split_gpu_has_several_towers(pretend_gpus, found, towers, split, used):
    pretend_gpus(found)
    placement = devices.place_towers(towers, split)
    count = towers or found * split
    assert placement.devices == tuple(f"/gpu:{n}" for n in range(count))
    assert placement.simulated
    assert "SIMULATED" in placement.description
    assert f", {split} on each GPU" in placement.description
    assert visible() == [f"GPU:{n}" for n in range(used)]
    # TensorFlow refuses growth beside a limit.
    assert growing() == []
    limits = parts()
    assert limits == {name: [40 * 2**10 // split] * split for name in visible()}
    pretend_gpus.start()
    assert devices.place_towers(towers, split) == placement
    assert parts() == limits, "as an earlier training has split them"


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ((2, 1), (2, 1), ("/gpu:0", "/gpu:1")),
        ((None, 1), (2, 1), "--num_gpus 2"),
        ((2, 1), (3, 1), "--num_gpus 3"),
        ((4, 2), (2, 1), "--num_gpus 2"),
    ],
)
def test_a_second_run_takes_only_the_same_gpus(pretend_gpus, first, then, expected):
    pretend_gpus(4)
    devices.place_towers(*first)
    pretend_gpus.start()
    if isinstance(expected, tuple):
        assert devices.place_towers(*then).devices == expected
    else:
        with pytest.raises(UsageError, match=expected):
            devices.place_towers(*then)


def test_a_tensorflow_started_with_all_gpus_trains_on_them(pretend_gpus):
    """As in a notebook; it has taken all of their memory, and that stays so."""
    pretend_gpus(2, started=True)
    assert devices.place_towers(2).devices == ("/gpu:0", "/gpu:1")
    with pytest.raises(UsageError, match="--num_gpus 4"):
        devices.place_towers(4, 2)


def test_a_users_memory_limit_of_a_gpu_is_kept(pretend_gpus):
    pretend_gpus(1)
    limit = [tf.config.LogicalDeviceConfiguration(memory_limit=4096)]
    (gpu,) = tf.config.list_physical_devices("GPU")
    tf.config.set_logical_device_configuration(gpu, limit)
    assert devices.place_towers(1).devices == ("/gpu:0",)
    assert parts() == {"GPU:0": [4096]}


@pytest.mark.parametrize(
    ("found", "towers", "split", "advice"),
    [
        (2, 4, 1, "at most 2"),
        (2, 3, 2, "multiple of 2"),
        (0, None, 2, "0 GPUs"),
    ],
)
def test_indivisible_or_too_many_towers_are_refused(
    pretend_gpus, found, towers, split, advice
):
    pretend_gpus(found)
    with pytest.raises(UsageError, match=advice):
        devices.place_towers(towers, split)
    assert len(visible()) == found
    assert growing() == []


def test_a_run_on_gpus_names_the_version_of_their_driver(tmp_path, monkeypatch):
    """Which decides, as the processor does, how sums round."""
    told = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Jan 24 2026\n"
    (folder := tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (folder / "version").write_text(told)
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    for on_gpus, driver in ((True, "570.86.15"), (False, None)):
        assert hardware.describe(on_gpus=on_gpus).get("driver") == driver


def test_unlike_gpus_are_reported_and_share_variables(pretend_gpus):
    """Copies of the variables would be rounded differently, and drift apart."""
    pretend_gpus(2, kinds=("NVIDIA H200", "NVIDIA T400"))
    placement = devices.place_towers(2)
    assert "NVIDIA H200, NVIDIA T400 (unlike GPUs" in placement.description
    assert Workers().connect("auto", placement, StopSignals()) == (None, 1)
    with pytest.raises(UsageError, match="H200 and NVIDIA T400"):
        Workers().connect("mirrored", placement, StopSignals())
    # One of them is like itself.
    assert devices.place_towers(1).suits_nccl


@pytest.mark.parametrize(
    ("visible", "kind"), [("0,1", "NVIDIA A100 MIG 1g.5gb"), ("MIG-1,MIG-2", "A100")]
)
def test_parts_of_a_gpu_by_mig_do_not_suit_nccl(
    pretend_gpus, monkeypatch, visible, kind
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pretend_gpus(2, kinds=(kind,))
    assert not devices.place_towers(2).suits_nccl


def test_missing_gpus_are_explained_below_the_error(pretend_gpus, capsys):
    pretend_gpus(2)
    with pytest.raises(SystemExit) as ended:
        entry_point.run_program(
            lambda: devices.place_towers(4), explain_missing_gpus=lambda: "REASON"
        )
    assert ended.value.code == EXIT_USAGE
    assert capsys.readouterr().err.endswith("\nREASON\n")


@pytest.mark.parametrize("asked", [None, 1, 4])
def test_several_towers_are_simulated_on_the_cpu_without_a_gpu(asked):
    placement = devices.place_towers(asked)
    assert placement.devices == tuple(f"/cpu:{n}" for n in range(asked or 1))
    assert placement.simulated == ("SIMULATED" in placement.description) == (asked == 4)
    assert "no GPU" in placement.description


@pytest.fixture
def unusable_gpu(monkeypatch, tmp_path):
    """A machine with a driver and without the libraries that TensorFlow needs."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "_NVIDIA_DRIVERS", [tmp_path / "nvidia0"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("unusable_gpu")
def test_an_unusable_gpu_is_neither_simulated_nor_called_absent():
    for count in (1, 2):
        with pytest.raises(MissingGpuError, match="doctor"):
            devices.place_towers(count)
    placement = devices.place_towers(None)
    assert placement.devices == ("/cpu:0",)
    assert "no GPU" not in placement.description
    assert "doctor" in placement.description


@pytest.mark.usefixtures("unusable_gpu")
@pytest.mark.parametrize("hidden", ["-1", ""])
def test_a_gpu_hidden_on_purpose_is_not_reported(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert devices.place_towers(2).simulated


@pytest.mark.parametrize(
    ("device", "seen", "expected"),
    [
        ("auto", ["GPU:0"], "/gpu:0"),
        ("gpu", ["GPU:0"], "/gpu:0"),
        ("cpu", [], "/cpu:0"),
    ],
)
def test_an_evaluation_sees_only_its_own_device(pretend_gpus, device, seen, expected):
    pretend_gpus(2)
    assert devices.place_evaluation(device) == expected
    assert visible() == seen


def test_an_evaluation_on_a_missing_gpu_is_refused(pretend_gpus):
    pretend_gpus(0)
    assert devices.place_evaluation("auto") == "/cpu:0"
    with pytest.raises(MissingGpuError, match="--device gpu"):
        devices.place_evaluation("gpu")


# ---- where variables and images are


def test_variables_are_on_a_gpu_by_default_or_on_request():
    cpu, gpu = (
        devices.Placement((name,), simulated=False, description="")
        for name in ("/cpu:0", "/gpu:0")
    )
    for requested, by_default, chosen in (
        ("auto", True, True),
        ("auto", False, False),
        ("gpu", False, True),
        ("cpu", True, False),
    ):
        found = devices.chooses_gpus(requested, gpu, by_default=by_default)
        assert found is chosen
    assert not devices.chooses_gpus("auto", cpu, by_default=True)
    with pytest.raises(UsageError, match="--variable_device gpu"):
        devices.chooses_gpus("gpu", cpu, by_default=True)
