"""The table of Keras's layers: each public name of `keras.layers` is in it once.

A name that has no row is in `NOT_IN_MODELS`, with the reason. `test_keras_layers.py`
fails for a name of a new Keras until it is here.
"""
# ruff: noqa: PLW0108 (a layer is made when a model is, not when the table is read)

import os
import random
import tempfile

import keras
import numpy as np
from keras import layers as L  # noqa: N812

from conformance.rows import Row, exists

# Layers that are quick to trace, one of each family.
QUICK = ("BatchNormalization", "Conv2D", "Dropout")
# The result for one image depends on the other images of a batch.
OF_THE_BATCH = ("BatchNormalization", "CutMix", "Equalization", "MixUp", "Mosaic")
AT_RANDOM = ("AugMix", "GaussianNoise", "GRUCell", "RandAugment", "Solarization")
# The layer, or its kernel in TensorFlow, has no float64.
IN_FLOAT32 = (
    *("AdaptiveAveragePooling3D", "AdaptiveMaxPooling3D", "AveragePooling3D"),
    *("MaxPooling3D", "MelSpectrogram", "RandAugment", "RandomColorJitter"),
    *("RandomCrop", "RandomHue", "TFSMLayer"),
)
NOT_IN_MODELS = {
    "FlaxLayer": "of another backend",
    "HashedCrossing": "crosses words, and takes no images",
    "InputLayer": "in every row: `keras.Input` makes it",
    "InputSpec": "no layer",
    "JaxLayer": "of another backend",
    "Layer": "the base class; style_rows.py has subclasses",
    "MaxNumBoundingBoxes": "pads boxes, and changes no images",
    "StringLookup": "takes words",
    "TextVectorization": "takes texts",
    "TorchModuleWrapper": "of another backend",
}


def _to_image(net):
    return net


def _to_sequence(net):
    return L.Reshape((8, 24))(net)


def _to_steps(net):
    """Returns a sequence that is short: eager loops repeat their operations."""
    return L.Reshape((3, 64))(net)


def _to_volume(net):
    return L.Reshape((4, 4, 4, 3))(net)


def _to_frames(net):
    return L.Reshape((2, 4, 8, 3))(net)


def _to_boxes(net):
    return L.Reshape((2, 2, 4, 4, 3))(net)


def _to_vector(net):
    return L.Dense(6)(L.Flatten()(net))


def _to_wave(net):
    return L.Flatten()(net)


def _to_pixels(net):
    return L.Rescaling(40.0, 128.0, name="pixels")(net)


def _to_numbers(net):
    """Returns whole numbers from 0 to 6."""
    net = L.Flatten()(L.AveragePooling2D(2)(net))
    return keras.ops.cast(keras.ops.clip(keras.ops.round(net * 2 + 3), 0, 6), "int32")


def _adapted(layer, data):
    layer.adapt(data)
    return layer


def _saved_model(net):
    """Returns a `TFSMLayer` of a small model, saved for it."""
    inner = keras.Sequential([keras.Input(net.shape[1:]), L.Dense(2)])
    for variable in inner.variables:
        variable.assign(np.ones(variable.shape) / 8)
    folder = os.path.join(tempfile.mkdtemp(), "saved")  # noqa: PTH118
    inner.export(folder, verbose=False)
    return L.TFSMLayer(folder, call_endpoint="serve")(net)


class Within(keras.Layer):
    """Calls a layer that cannot be called on symbolic tensors."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        return self.layer(inputs)

    def compute_output_shape(self, shape):
        return shape


class ChosenAugMix(L.AugMix):
    """Chooses its chains alike in every trace. Keras chooses them in Python."""

    def get_random_transformation(self, *args, **options):
        random.seed(1)
        return super().get_random_transformation(*args, **options)


class Residual(L.Wrapper):
    def call(self, inputs):
        return inputs + self.layer(inputs)


class Sum(keras.Layer):
    """A cell whose state is the sum of what it has seen."""

    def __init__(self):
        super().__init__()
        self.state_size = 5

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 5), name="kernel")

    def call(self, inputs, states):
        state = states[0] + keras.ops.matmul(inputs, self.kernel)
        return state, [state]


_RANDOM = {"seed": 5}
TABLES = {
    _to_image: {
        "Activation": lambda x: L.Activation("gelu")(x),
        "ELU": lambda x: L.ELU()(x),
        "LeakyReLU": lambda x: L.LeakyReLU()(x),
        "PReLU": lambda x: L.PReLU(shared_axes=[1, 2])(x),
        "ReLU": lambda x: L.ReLU(1.0, 0.1)(x),
        "Softmax": lambda x: L.Softmax()(x),
        "Conv2D": lambda x: L.Conv2D(4, 3, activation="relu")(x),
        "Conv2DTranspose": lambda x: L.Conv2DTranspose(2, 3, strides=2)(x),
        "DepthwiseConv2D": lambda x: L.DepthwiseConv2D(3, depth_multiplier=2)(x),
        "SeparableConv2D": lambda x: L.SeparableConv2D(4, 3, strides=2)(x),
        "EinsumDense": lambda x: L.EinsumDense("bhwc,cd->bhwd", (8, 8, 2))(x),
        "Identity": lambda x: L.Identity()(x),
        "Lambda": lambda x: L.Lambda(lambda values: values**2)(x),
        "Wrapper": lambda x: Residual(L.Dense(3))(x),
        "Add": lambda x: L.Add()([x, L.Dense(3)(x)]),
        "Average": lambda x: L.Average()([x, L.Dense(3)(x)]),
        "Concatenate": lambda x: L.Concatenate()([x, L.Dense(2)(x)]),
        "Dot": lambda x: L.Dot(-1)([L.Reshape((16, 12))(x)] * 2),
        "Maximum": lambda x: L.Maximum()([x, L.Dense(3)(x)]),
        "Minimum": lambda x: L.Minimum()([x, L.Dense(3)(x)]),
        "Multiply": lambda x: L.Multiply()([x, L.Dense(3)(x)]),
        "Subtract": lambda x: L.Subtract()([x, L.Dense(3)(x)]),
        "BatchNormalization": lambda x: L.BatchNormalization(momentum=0.5)(x),
        "GroupNormalization": lambda x: L.GroupNormalization(3)(x),
        "LayerNormalization": lambda x: L.LayerNormalization(axis=[1, 2])(x),
        "RMSNormalization": lambda x: L.RMSNormalization()(x),
        "SpectralNormalization": lambda x: L.SpectralNormalization(L.Conv2D(4, 3))(x),
        "UnitNormalization": lambda x: L.UnitNormalization()(x),
        "AdaptiveAveragePooling2D": lambda x: L.AdaptiveAveragePooling2D(3)(x),
        "AdaptiveMaxPooling2D": lambda x: L.AdaptiveMaxPooling2D(3)(x),
        "AveragePooling2D": lambda x: L.AveragePooling2D(3, padding="same")(x),
        "GlobalAveragePooling2D": lambda x: L.GlobalAveragePooling2D()(x),
        "GlobalMaxPooling2D": lambda x: L.GlobalMaxPooling2D(keepdims=True)(x),
        "MaxPooling2D": lambda x: L.MaxPooling2D()(x),
        "Normalization": lambda x: _adapted(
            L.Normalization(), np.arange(24.0).reshape(8, 3)
        )(x),
        "Rescaling": lambda x: L.Rescaling(0.5, [0.1, 0.2, 0.3])(x),
        "Resizing": lambda x: L.Resizing(5, 6)(x),
        "CenterCrop": lambda x: L.CenterCrop(5, 6)(x),
        "Pipeline": lambda x: L.Pipeline([L.Rescaling(0.5), L.CenterCrop(5, 5)])(x),
        "ActivityRegularization": lambda x: L.ActivityRegularization(0.01, 0.02)(x),
        "AlphaDropout": lambda x: L.AlphaDropout(0.3, **_RANDOM)(x),
        "Dropout": lambda x: L.Dropout(0.3)(x),
        "GaussianDropout": lambda x: L.GaussianDropout(0.3)(x),
        "GaussianNoise": lambda x: L.GaussianNoise(0.3)(x),
        "SpatialDropout2D": lambda x: L.SpatialDropout2D(0.3)(x),
        "Cropping2D": lambda x: L.Cropping2D(1)(x),
        "Flatten": lambda x: L.Flatten()(x),
        "Permute": lambda x: L.Permute((3, 1, 2))(x),
        "Reshape": lambda x: L.Reshape((4, -1))(x),
        "UpSampling2D": lambda x: L.UpSampling2D(interpolation="bilinear")(x),
        "ZeroPadding2D": lambda x: L.ZeroPadding2D(((1, 2), (3, 4)))(x),
        "RandomCrop": lambda x: L.GlobalMaxPooling2D()(
            L.RandomCrop(5, 6, **_RANDOM)(x)
        ),
        "RandomFlip": lambda x: L.RandomFlip(**_RANDOM)(x),
        "RandomPerspective": lambda x: L.RandomPerspective(**_RANDOM)(x),
        "RandomRotation": lambda x: L.RandomRotation(0.1, **_RANDOM)(x),
        "RandomShear": lambda x: L.RandomShear(0.2, 0.2, **_RANDOM)(x),
        "RandomTranslation": lambda x: L.RandomTranslation(0.2, 0.2, **_RANDOM)(x),
        "RandomZoom": lambda x: L.RandomZoom(0.2, **_RANDOM)(x),
        "CutMix": lambda x: L.CutMix(**_RANDOM)(x),
        "MixUp": lambda x: L.MixUp(**_RANDOM)(x),
        "Mosaic": lambda x: L.Mosaic(**_RANDOM)(x),
        "TFSMLayer": _saved_model,
    },
    _to_pixels: {
        "AugMix": lambda x: ChosenAugMix(num_chains=2, chain_depth=2, **_RANDOM)(x),
        "AutoContrast": lambda x: L.AutoContrast()(x),
        "ContrastLimitedAdaptiveHistogramEqualization": lambda x: (
            L.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2))(x)
        ),
        "Equalization": lambda x: Within(L.Equalization())(x),
        "RandAugment": lambda x: L.RandAugment(num_ops=1, **_RANDOM)(x),
        "RandomBrightness": lambda x: L.RandomBrightness(0.3, **_RANDOM)(x),
        "RandomColorDegeneration": lambda x: L.RandomColorDegeneration(0.5, **_RANDOM)(
            x
        ),
        "RandomColorJitter": lambda x: L.RandomColorJitter(
            brightness_factor=0.3, hue_factor=0.2, **_RANDOM
        )(x),
        "RandomContrast": lambda x: L.RandomContrast(0.3, **_RANDOM)(x),
        # It repeats its operations for each image and channel.
        "RandomElasticTransform": lambda x: L.RandomElasticTransform(**_RANDOM)(
            x[..., :1]
        ),
        "RandomErasing": lambda x: L.RandomErasing(**_RANDOM)(x),
        "RandomGaussianBlur": lambda x: L.RandomGaussianBlur(**_RANDOM)(x),
        "RandomGrayscale": lambda x: L.RandomGrayscale(**_RANDOM)(x),
        "RandomHue": lambda x: L.RandomHue(0.5, **_RANDOM)(x),
        "RandomInvert": lambda x: L.RandomInvert(0.5, **_RANDOM)(x),
        "RandomPosterization": lambda x: L.RandomPosterization(4, **_RANDOM)(x),
        "RandomSaturation": lambda x: L.RandomSaturation(0.5, **_RANDOM)(x),
        "RandomSharpness": lambda x: L.RandomSharpness(0.5, **_RANDOM)(x),
        "Solarization": lambda x: L.Solarization(0.1, 0.5, **_RANDOM)(x),
    },
    _to_sequence: {
        "AdditiveAttention": lambda x: L.AdditiveAttention()([x, x]),
        "Attention": lambda x: L.Attention(use_scale=True)([x, x]),
        "GroupQueryAttention": lambda x: L.GroupQueryAttention(3, 4, 2)(x, x),
        "MultiHeadAttention": lambda x: L.MultiHeadAttention(2, 3)(x, x),
        "Conv1D": lambda x: L.Conv1D(4, 3)(x),
        "Conv1DTranspose": lambda x: L.Conv1DTranspose(4, 3, strides=2)(x),
        "DepthwiseConv1D": lambda x: L.DepthwiseConv1D(3)(x),
        "SeparableConv1D": lambda x: L.SeparableConv1D(4, 3)(x),
        "AdaptiveAveragePooling1D": lambda x: L.AdaptiveAveragePooling1D(3)(x),
        "AdaptiveMaxPooling1D": lambda x: L.AdaptiveMaxPooling1D(3)(x),
        "AveragePooling1D": lambda x: L.AveragePooling1D(2)(x),
        "GlobalAveragePooling1D": lambda x: L.GlobalAveragePooling1D()(x),
        "GlobalMaxPooling1D": lambda x: L.GlobalMaxPooling1D()(x),
        "MaxPooling1D": lambda x: L.MaxPooling1D()(x),
        "SpatialDropout1D": lambda x: L.SpatialDropout1D(0.3)(x),
        "Cropping1D": lambda x: L.Cropping1D(1)(x),
        "UpSampling1D": lambda x: L.UpSampling1D()(x),
        "ZeroPadding1D": lambda x: L.ZeroPadding1D()(x),
    },
    _to_steps: {
        "Bidirectional": lambda x: L.Bidirectional(L.GRU(3))(x),
        "GRU": lambda x: L.GRU(4)(x),
        "GRUCell": lambda x: L.RNN(L.GRUCell(4, recurrent_dropout=0.2, seed=2))(x),
        "LSTM": lambda x: L.LSTM(4, return_sequences=True)(x),
        "LSTMCell": lambda x: L.RNN(L.LSTMCell(4))(x),
        "RNN": lambda x: L.RNN(Sum())(x),
        "SimpleRNN": lambda x: L.SimpleRNN(4)(x),
        "SimpleRNNCell": lambda x: L.RNN(L.SimpleRNNCell(4))(x),
        "StackedRNNCells": lambda x: L.RNN(
            L.StackedRNNCells([L.GRUCell(3), L.LSTMCell(4)])
        )(x),
        "Masking": lambda x: L.LSTM(4)(L.Masking()(L.ReLU(threshold=2.5)(x))),
    },
    _to_volume: {
        "Conv3D": lambda x: L.Conv3D(2, 3)(x),
        "Conv3DTranspose": lambda x: L.Conv3DTranspose(2, 2)(x),
        "AdaptiveAveragePooling3D": lambda x: L.AdaptiveAveragePooling3D(3)(x),
        "AdaptiveMaxPooling3D": lambda x: L.AdaptiveMaxPooling3D(3)(x),
        "AveragePooling3D": lambda x: L.AveragePooling3D(2)(x),
        "GlobalAveragePooling3D": lambda x: L.GlobalAveragePooling3D()(x),
        "GlobalMaxPooling3D": lambda x: L.GlobalMaxPooling3D()(x),
        "MaxPooling3D": lambda x: L.MaxPooling3D()(x),
        "SpatialDropout3D": lambda x: L.SpatialDropout3D(0.3)(x),
        "Cropping3D": lambda x: L.Cropping3D(1)(x),
        "UpSampling3D": lambda x: L.UpSampling3D()(x),
        "ZeroPadding3D": lambda x: L.ZeroPadding3D()(x),
        "ConvLSTM2D": lambda x: L.ConvLSTM2D(2, 2)(x),
        "TimeDistributed": lambda x: L.TimeDistributed(L.Conv2D(2, 2))(x),
    },
    _to_frames: {
        "ConvLSTM1D": lambda x: L.ConvLSTM1D(2, 2)(L.Reshape((4, 4, 12))(x)),
    },
    _to_boxes: {"ConvLSTM3D": lambda x: L.ConvLSTM3D(2, 2)(x)},
    _to_vector: {
        "Dense": lambda x: L.Dense(5, activation="tanh")(x),
        "TernaryDense": lambda x: L.TernaryDense(5)(x),
        "RepeatVector": lambda x: L.RepeatVector(3)(x),
        "Discretization": lambda x: L.Embedding(3, 2)(L.Discretization([-0.1, 0.1])(x)),
    },
    _to_wave: {
        "MelSpectrogram": lambda x: L.MelSpectrogram(
            fft_length=32, sequence_stride=16, num_mel_bins=8
        )(x),
        "STFTSpectrogram": lambda x: L.STFTSpectrogram(frame_length=32, window=None)(
            L.Reshape((192, 1))(x)
        ),
    },
    _to_numbers: {
        "Embedding": lambda x: L.Embedding(7, 2)(x),
        "ReversibleEmbedding": lambda x: L.ReversibleEmbedding(7, 2)(x),
        "CategoryEncoding": lambda x: L.CategoryEncoding(7)(x),
        "Hashing": lambda x: L.Embedding(4, 2)(L.Hashing(4)(x)),
        "IntegerLookup": lambda x: L.Embedding(5, 2)(
            L.IntegerLookup(vocabulary=[1, 2, 4, 5])(x)
        ),
    },
}


def _build(into, layer):
    def build(image_shape, classes):
        image = keras.Input(image_shape)
        net = layer(into(L.Dense(3, use_bias=False)(image)))
        if into is _to_pixels:
            net = L.Rescaling(1 / 128)(net)
        if "int" in net.dtype:
            net = keras.ops.cast(net, keras.config.floatx())
        logits = L.Dense(classes, use_bias=False)(L.Flatten()(net))
        return keras.Model(image, logits)

    return build


# It reads variables that a tower cannot replace.
REFUSED = {"TFSMLayer": "tf.function|reads"}
DIFFERS = {}


def rows():
    for into, table in TABLES.items():
        for name, layer in table.items():
            if not exists(name, L):
                continue
            is_random = name.startswith("Random") or "Dropout" in name
            yield Row(
                name=name,
                build=_build(into, layer),
                by_tower=is_random or name in (*OF_THE_BATCH, *AT_RANDOM),
                quick=name in QUICK,
                refused=REFUSED.get(name),
                compiled=name == "AugMix",  # Its random numbers are float32.
                precision="float32" if name in IN_FLOAT32 else "float64",
                tolerance=1e-4 if name in IN_FLOAT32 else 1e-9,
                differs=DIFFERS.get(name),
            )
