"""The count of what a recipe computes."""

from benchmarks import arithmetic
from cifar10 import hardware


def test_fast_takes_the_documented_arithmetic_on_any_processor(monkeypatch):
    """Those with AVX2 alone compute some gradients by other operations."""
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.setattr(hardware, "processor_features", lambda: ["avx2"])
    config, works = arithmetic.count("fast")
    assert "0.2252 PFLOP for 460,800 images" in arithmetic.table(config, works)
