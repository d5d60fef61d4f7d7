"""A copy of a model that answers while its weights are replaced.

The weights are tensors, not variables: they never change, and the traced function takes
them as arguments. A new set is prepared beside the one in use, and replaces it by one
assignment of a reference. So a prediction uses one set from beginning to end, nothing
waits, and nothing is traced again.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from cifar10.errors import UsageError
from cifar10.follower.trained_model import evaluation_logits
from cifar10.input import datasets
from cifar10.input.pipeline import prepare


class Prediction(NamedTuple):
    """The logits of some images."""

    step: int  # Of the weights.
    logits: np.ndarray  # float32 or float64 [images, classes]
    class_names: tuple[str, ...]  # Numbers if the run has no names.


class Weights(NamedTuple):
    """Values of all variables of a model after one step; they never change."""

    step: int
    trainable: list[tf.Tensor]  # Last values or moving averages.
    non_trainable: list[tf.Tensor]


class Network:
    """A model as a pure function of its weights and images, traced on construction.

    The values of the model's variables are not used. `settings`, the content of the
    run's `config.json`, name the model and say how its images are prepared.

    Attributes:
        image_shape: Height, width and channels of the images that it takes.
        names: Names of the model and its classes.
    """

    def __init__(
        self,
        model: keras.Model,
        settings: Mapping[str, Any],
        class_names: Sequence[str] | None,
        device: str,
    ) -> None:
        self._device = device
        self.image_shape = datasets.describe(settings).image_shape

        @tf.function(autograph=False)
        def evaluate(
            trainable: list[tf.Tensor],
            non_trainable: list[tf.Tensor],
            images: tf.Tensor,
        ) -> tf.Tensor:
            prepared = prepare(images, settings["distortions"])
            return evaluation_logits(model, trainable, non_trainable, prepared)[0]

        with tf.device(device):
            self._logits = evaluate.get_concrete_function(
                [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables],
                [
                    tf.TensorSpec(v.shape, v.dtype)
                    for v in model.non_trainable_variables
                ],
                tf.TensorSpec([None, *self.image_shape], tf.uint8),
            )
        classes = self._logits.structured_outputs.shape[-1]
        self._class_names = tuple(class_names or map(str, range(classes)))
        self.names = {"model": settings["model"], "class_names": self._class_names}

    def weights(
        self,
        step: int,
        trainable: Sequence[tf.Variable],
        non_trainable: Sequence[tf.Variable],
    ) -> Weights:
        """Copies variables as they are now, from their device to that of the copy."""
        with tf.device(self._device):
            # A value that was read does not change when the variable is assigned.
            return Weights(
                step,
                [tf.identity(variable) for variable in trainable],
                [tf.identity(variable) for variable in non_trainable],
            )

    def predict(self, weights: Weights, images: np.ndarray) -> Prediction:
        """Computes the logits of some images; see `LiveCopy.predict`."""
        images = np.asarray(images)
        shape = self.image_shape
        if images.dtype != np.uint8 or images.shape[1:] != shape or not len(images):
            raise ValueError(
                f"images: {images.dtype} {list(images.shape)}; it has to be uint8 "
                f"[images, {', '.join(map(str, shape))}], at least one image."
            )
        with tf.device(self._device):
            logits = self._logits(
                weights.trainable, weights.non_trainable, tf.constant(images)
            )
        return Prediction(weights.step, logits.numpy(), self._class_names)


class LiveCopy:
    """A model whose weights are replaced between two predictions.

    Attributes:
        names: Names of the model in use and its classes; empty before the first.
        swaps: Number of times that weights were put in place.
        swap_seconds: Seconds that the last time took, from the first read until the
            weights answered; None before the first. Predictions continue meanwhile.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.swaps = 0
        self.swap_seconds: float | None = None
        self._answering: tuple[Network, Weights, float] | None = None

    @property
    def weights_step(self) -> int | None:
        """The step of the weights in use; None if there are none yet."""
        answering = self._answering
        return None if answering is None else answering[1].step

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the training had these weights; None if there are none yet."""
        answering = self._answering
        # The clock of the machine that trains may be ahead.
        return None if answering is None else max(0.0, time.time() - answering[2])

    def predict(self, images: np.ndarray) -> Prediction:
        """Computes the logits of some images, as an evaluation of that step does.

        Any number of threads may call it, at any time.

        Args:
            images: uint8 [count, height, width, channels], as in the data set.

        Raises:
            UsageError: There are no weights yet.
        """
        answering = self._answering  # Read once: another thread may replace it.
        if answering is None:
            raise UsageError(self.why_no_weights())
        network, weights, _ = answering
        return network.predict(weights, images)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images that `predict` takes.

        Raises:
            UsageError: There are no weights yet.
        """
        if self._answering is None:
            raise UsageError(self.why_no_weights())
        return self._answering[0].image_shape

    def why_no_weights(self) -> str:
        """Returns why there are no weights yet, and what to do."""
        return "There are no weights yet; wait for the training's first."

    def _swap(
        self, network: Network, weights: Weights, since: float, began: float
    ) -> None:
        """Puts weights in place.

        The training had them at `since` (`time.time`); reading them began at `began`
        (`time.perf_counter`).
        """
        # Waits for a copy to a GPU that may still be under way.
        weights.trainable[-1].numpy()
        self._answering = (network, weights, since)
        self.names = network.names
        self.swap_seconds = time.perf_counter() - began
        self.swaps += 1
