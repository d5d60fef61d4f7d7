"""The same two networks in today's frameworks, side by side: `docs/rosetta.md`.

`cnn_*.py` and `gru_*.py` are one file for each network and framework. All say the same
in the same order: the network, then a `Model` with its loss and optimizer, which loads
values, trains on mini-batches and predicts. Two of them laid beside each other read as
a translation. Plain TensorFlow, which hides nothing, is what all others are compared
with before they are timed.
"""
