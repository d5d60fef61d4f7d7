"""Our towers: the network of `gru_keras.py`; the rest as in `cnn_towers.py`."""

from __future__ import annotations

import keras

from benchmarks.rosetta import cnn_towers, gru_keras


class Model(cnn_towers.Model, gru_keras.Model):
    """A network with its loss and its optimizer, trained as the other one is."""

    adam = keras.optimizers.Adam  # The towers add up the gradients of a word.
