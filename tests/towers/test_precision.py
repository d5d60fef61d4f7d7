"""Precision: chosen by what the devices have, named when it is emulated."""

import pytest
import tensorflow as tf

from cifar10.towers import hardware, precision

CPU = ("/cpu:0", "/cpu:1")


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Makes the processor one with some flags."""

    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")

    def processor(flags):
        info = tmp_path / "proc/cpuinfo"
        info.parent.mkdir(exist_ok=True)
        info.write_text(f"processor\t: 0\nflags\t\t: fpu sse {flags}\nbugs\t: none\n")
        monkeypatch.setattr(hardware, "ROOT", tmp_path)

    return processor


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ("avx2", "float32"),
        ("avx2 avx512_bf16", "bfloat16"),
        ("amx_bf16 amx_tile", "bfloat16"),
        ("avx512f", "float32"),
    ],
)
def test_auto_follows_the_processor(processor, flags, chosen):
    processor(flags)
    assert precision.resolve("auto", CPU) == chosen


def test_auto_is_float32_where_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "ROOT", tmp_path / "missing")
    assert precision.resolve("auto", CPU) == "float32"


def test_auto_is_float32_without_onednn(processor, monkeypatch):
    processor("amx_bf16")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert precision.resolve("auto", CPU) == "float32"


def test_auto_is_float32_in_a_deterministic_run(processor):
    processor("amx_bf16")
    assert precision.resolve("auto", CPU, deterministic=True) == "float32"


@pytest.mark.parametrize(
    ("capabilities", "chosen"),
    [([(8, 0)], "bfloat16"), ([(9, 0), (7, 5)], "float32"), ([None], "float32")],
)
def test_auto_follows_every_gpu(monkeypatch, processor, capabilities, chosen):
    processor("amx_bf16")
    details = iter([{"compute_capability": one} for one in capabilities])
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: capabilities)
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda _: next(details)
    )
    assert precision.resolve("auto", ["/gpu:0"]) == chosen


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16", "float64"])
def test_what_is_asked_for_is_taken(processor, asked):
    processor("avx2")
    assert precision.resolve(asked, CPU) == asked


def test_emulated_types_come_with_a_warning(processor):
    processor("avx2")
    for name in ("bfloat16", "float16"):
        assert f"--precision {name} is usually emul" in precision.warning(name, CPU)


def test_native_and_usual_types_come_without_a_warning(processor):
    processor("avx512_bf16")
    for name in ("bfloat16", "float32", "float64"):
        assert precision.warning(name, CPU) == ""
    assert precision.warning("float16", ["/gpu:0"]) == ""
