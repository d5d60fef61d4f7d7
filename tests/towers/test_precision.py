"""Precision: chosen by what the devices have."""

import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10 import hardware
from cifar10.config.config import Config
from cifar10.training import train
from event_readers import read
from small_towers import make_towers, random_batch, small_model

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


def test_auto_is_float32_if_bfloat16_is_unknown_or_emulated(
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


def test_the_norm_of_float16_gradients_is_finite_despite_its_infinite_square():
    towers = make_towers(small_model(dtype="float16"), CPU[:1])
    inputs, labels = random_batch(dtype=tf.float16)
    batch = inputs * 900, labels
    gradients = towers.gradients([batch]).values()
    squares = [np.sum(np.asarray(one, np.float64) ** 2) for one in gradients]
    norm = np.sqrt(np.sum(squares))
    assert 256 < norm < np.inf
    found = float(towers.step([batch]).metrics["gradient_norm"])
    assert found == pytest.approx(norm, rel=1e-3)
    assert towers.state.global_step == 1


def test_a_model_with_variables_of_several_dtypes_is_trained(tmp_path, stand_in_dir):
    given = {"data": "synthetic", "data_dir": str(stand_in_dir), "batch_size": 4}
    given |= {"max_steps": 4, "summary_steps": 2, "log_frequency": 2, "accumulate": 2}
    config = Config(
        train_dir=str(tmp_path),
        model="small_model:of_three_dtypes",
        learning_rate=1e-4,
        precision="float32",
        **given,
    )
    assert train.train(config) == 4
    assert all(one["gradient_norm"] > 0 for one in runs.logged(tmp_path))
    tags = read(tmp_path / "train").Tags()["tensors"]
    assert {"gradients/conv1/kernel", "gradients/hidden/kernel"} <= {*tags}
