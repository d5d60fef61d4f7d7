"""The layers of a model: the last one, and those that weights have a name for."""

import keras
import numpy as np

from cifar10.models import custom, layer_tree
from cifar10.towers.stages import find_frozen


def test_the_head_is_the_last_trainable_layer():
    """Dropout behind it has a variable too, the state of its random numbers."""
    inner = keras.Sequential([keras.layers.Dense(3, name="head")])
    layers = [keras.layers.Dense(4, name="hidden"), inner, keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    custom.check("own", model, (2,), 3, is_code=True)
    assert layer_tree.head(model) == inner.layers[0].variables
    frozen = find_frozen(model, model.trainable_variables, ["all-but-head"])
    assert frozen == [True, True, False, False]


class Prototypes(keras.Model):
    """A model whose classifier is a weight of its own."""

    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Dense(4)
        self.prototypes = self.add_weight(name="prototypes", shape=(4, 3))

    def call(self, inputs):
        return self.embed(inputs) @ self.prototypes


class Scaled(keras.layers.Wrapper):
    """Scales what the layer in it computes."""

    def build(self, shape):
        self.layer.build(shape)
        self.scale = self.add_weight(name="scale", shape=(), initializer="ones")

    def call(self, inputs):
        return self.layer(inputs) * self.scale


def test_the_head_may_belong_to_the_model_itself_or_be_wrapped():
    layers = [keras.layers.Dense(4), Scaled(keras.layers.Dense(3))]
    wrapped = keras.Sequential([keras.Input((2,)), *layers])
    for model, head in (
        (Prototypes(), ["prototypes"]),
        (wrapped, ["scale", "kernel", "bias"]),
    ):
        custom.check("own", model, (2,), 3, is_code=True)
        variables = model.trainable_variables
        frozen = find_frozen(model, variables, ["all-but-head"])
        pairs = zip(variables, frozen, strict=True)
        assert {v.name for v, is_frozen in pairs if not is_frozen} == {*head}


def test_a_bidirectional_layer_has_the_same_inner_names_in_every_model():
    for _ in range(2):
        both = keras.layers.Bidirectional(keras.layers.GRU(2))
        model = keras.Sequential([keras.Input((4, 2)), both, keras.layers.Dense(3)])
        names = {name.rpartition("/")[0] for name in layer_tree.by_name(model)}
        assert names >= {"bidirectional/forward_gru", "bidirectional/backward_gru"}


def test_layers_with_explicit_names_keep_them():
    names = ["forward_dense_1", "forward_dense_2"]
    layers = [keras.layers.Dense(2, name=name) for name in names]
    model = keras.Sequential([keras.Input((2,)), *layers])
    assert [*layer_tree.by_name(model)] == names


def test_the_head_is_found_within_a_wrapper_of_several_layers():
    layers = [keras.layers.Dense(4), keras.layers.Dense(3)]
    whole = keras.layers.TimeDistributed(keras.Sequential([keras.Input((2,)), *layers]))
    pool = keras.layers.GlobalAveragePooling1D()
    model = keras.Sequential([keras.Input((4, 2)), whole, pool])
    custom.check("own", model, (4, 2), 3, is_code=True)
    assert layer_tree.head(model) == layers[1].variables


def test_normalization_by_constants_is_left_out_of_the_named_layers():
    """Its variables are no longer used once its model is built."""
    scale = keras.layers.Normalization()
    scale.adapt(np.ones((4, 2)))
    model = keras.Sequential([keras.Input((2,)), scale, keras.layers.Dense(3)])
    assert [*layer_tree.by_name(model)] == ["dense"]
