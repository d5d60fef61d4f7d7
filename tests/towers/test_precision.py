"""Precision: chosen by what the devices have."""

import pytest
import tensorflow as tf

from cifar10 import hardware

CPU = ("/cpu:0", "/cpu:1")
# For oneDNN, as TensorFlow reads them; it ignores others.
WORDS = [
    *[(word, "float32") for word in ("0", "false", "False")],
    *[(word, "bfloat16") for word in ("", "off", "1", "TRUE")],
]


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
        ("avx2 avx512f", "float32"),
        ("amx_bf16 amx_tile", "bfloat16"),
    ],
)
def test_auto_follows_the_processor(processor, flags, chosen):
    processor(flags)
    assert hardware.resolve_precision("auto", CPU) == chosen
    for asked in ("float32", "bfloat16", "float16", "float64"):
        assert hardware.resolve_precision(asked, CPU) == asked


def test_auto_is_float32_where_bfloat16_is_unknown_or_emulated(
    processor, monkeypatch, tmp_path
):
    processor("amx_bf16")
    assert hardware.resolve_precision("auto", CPU, deterministic=True) == "float32"
    for word, precision in WORDS:
        monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", word)
        assert hardware.resolve_precision("auto", CPU) == precision, word
    monkeypatch.setattr(hardware, "ROOT", tmp_path / "missing")
    assert hardware.resolve_precision("auto", CPU) == "float32"


@pytest.mark.parametrize(
    ("capabilities", "chosen"),
    [([(8, 0)], "bfloat16"), ([(9, 0), (7, 5)], "float32"), ([None], "float32")],
)
def test_auto_follows_every_gpu(monkeypatch, processor, capabilities, chosen):
    processor("amx_bf16")
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: capabilities)
    monkeypatch.setattr(
        tf.config.experimental,
        "get_device_details",
        lambda capability: {"compute_capability": capability},
    )
    assert hardware.resolve_precision("auto", ["/gpu:0"]) == chosen
