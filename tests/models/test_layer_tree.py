"""The layers of a model: the last one, and those that weights have a name for."""

import keras
import numpy as np

from cifar10.models import custom, layer_tree
from cifar10.towers.stages import find_frozen


def test_the_head_is_the_last_layer_that_is_trained():
    """Dropout behind it has a variable too, the state of its random numbers."""
    inner = keras.Sequential([keras.layers.Dense(3, name="head")])
    layers = [keras.layers.Dense(4, name="hidden"), inner, keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    custom.check("own", model, (2,), 3, is_code=True)
    assert layer_tree.head(model).name == "head"
    frozen = find_frozen(model, model.trainable_variables, ["all-but-head"])
    assert frozen == [True, True, False, False]


def test_normalization_by_constants_has_no_name_for_weights():
    """Its variables are no longer used once its model is built."""
    scale = keras.layers.Normalization()
    scale.adapt(np.ones((4, 2)))
    model = keras.Sequential([keras.Input((2,)), scale, keras.layers.Dense(3)])
    assert [*layer_tree.by_name(model)] == ["dense"]
