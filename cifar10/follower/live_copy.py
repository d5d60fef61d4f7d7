"""Live copies of a model: they answer while their weights are replaced.

    with Follower("runs/cifar10_train").start() as follower:
        step, logits, class_names = follower.predict(images)

`Follower` loads each new checkpoint of a run, from any process. It refuses checkpoints
that are damaged or of another run or model, and keeps answering with the last good one.
`Follower.attach` follows a training in the same process, without a disk.

The weights are tensors, not variables: they never change, and the traced function takes
them as arguments. A new set is prepared beside the one in use, and replaces it by one
assignment of a reference. So a prediction uses one set from beginning to end, nothing
waits, and nothing is traced again.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from cifar10.config import layout
from cifar10.errors import UsageError
from cifar10.follower.followed_run import FollowedRun
from cifar10.follower.trained_model import TrainedModel, evaluation_logits
from cifar10.input import datasets
from cifar10.input.pipeline import prepare
from cifar10.run_directory import checkpoints
from cifar10.towers.train_state import TrainState

logger = logging.getLogger(__name__)


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
        swaps: Number of times that weights were put in place.
        swap_seconds: Seconds that the last time took, from the first read until the
            weights answered; None before the first. Predictions continue meanwhile.
    """

    def __init__(self) -> None:
        self.swaps = 0
        self.swap_seconds: float | None = None
        self._answering: tuple[Network, Weights, float] | None = None

    @property
    def names(self) -> dict[str, Any]:
        """Names of the model in use and its classes; empty before the first weights."""
        answering = self._answering
        return {} if answering is None else answering[0].names

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
        self.swap_seconds = time.perf_counter() - began
        self.swaps += 1


class AttachedCopy(LiveCopy):
    """A copy of a training's variables, made from device to device.

    The training updates the variables of `state`, and `settings` are the content of its
    `config.json`. The variables are copied `every` so many steps, and after step
    `max_steps`. `device` and `use_averages` are as for a `Follower`.
    """

    def __init__(
        self,
        state: TrainState,
        settings: Mapping[str, Any],
        every: int = 1,
        device: str = "/cpu:0",
        *,
        use_averages: bool = True,
    ) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every {every}: it must be at least 1 step.")
        self._state = state
        self._every = every
        self._max_steps = settings["max_steps"]
        self._last_period: int | None = None
        model = state.model
        self._network = Network(model, settings, settings["class_names"], device)
        last_values = [variable.value for variable in model.trainable_variables]
        self._trainable = state.averages if use_averages else last_values
        self._non_trainable = [v.value for v in model.non_trainable_variables]

    def after_step(self, step: int) -> None:
        """Copies the variables if it is time; to be called between two updates.

        After a rollback the step may be less than before.
        """
        period = step if step == self._max_steps else step // self._every
        # No update was applied after a step that was not finite.
        if period == self._last_period or bool(self._state.halted):
            return
        self._last_period = period
        began, since = time.perf_counter(), time.time()
        weights = self._network.weights(step, self._trainable, self._non_trainable)
        self._swap(self._network, weights, since, began)


class Follower(FollowedRun, LiveCopy):
    """A copy of a run's model that loads each new checkpoint, or a certain one.

    Nothing is read before `look` or `start`, so the training may begin later.

    Args:
        train_dir: Directory of the run.
        device: Device where the copy lives and computes.
        step: The step of the checkpoint to load, or `best` for the one with the best
            score, and each better one as it appears; None for each newer one.
        use_averages: Whether to use the variables' moving averages, as an evaluation
            does, in place of their last values.
        trust_model: `module:function` that the run may use as its model even if this
            user did not train it here.
    """

    # Makes a copy that follows a training in this process, without a disk.
    attach = AttachedCopy

    def __init__(
        self,
        train_dir: str | Path,
        device: str = "/cpu:0",
        *,
        step: int | str | None = None,
        use_averages: bool = True,
        trust_model: str | None = None,
    ) -> None:
        LiveCopy.__init__(self)
        directory = layout.locate_run(str(train_dir))
        reading = {"use_averages": use_averages, "trust_model": trust_model}
        FollowedRun.__init__(self, directory, device, wanted=step, **reading)
        self._began = 0.0
        self._looking = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def refused(self) -> int:
        """Number of checkpoints or runs that were refused; see `refusals`."""
        return len(self.refusals)

    def start(self, interval: float = 1.0) -> Self:
        """Looks now, and then every `interval` seconds in a thread until `close`."""
        self.look()
        self._thread = threading.Thread(
            target=self._watch, args=(interval,), name="follower", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops looking; the last weights keep answering."""
        self._closed.set()
        if self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def look(self) -> bool:
        """Loads the newest checkpoint, and returns whether the weights changed.

        A directory or checkpoint that cannot be used is no error; `refusals` names it.
        """
        with self._looking:
            self._began = time.perf_counter()
            try:
                return super().look()
            except UsageError:
                return False

    def _watch(self, interval: float) -> None:
        while not self._closed.wait(interval):
            try:
                self.look()
            except Exception:
                # A bug here or in the user's model. If the thread ended, the copy would
                # silently be out of date.
                logger.exception("The follower of %s failed to look.", self.directory)

    def _prepare(self, model: TrainedModel) -> None:
        self._network = Network(
            model.model, model.settings, model.class_names, self._device
        )
        self._began = time.perf_counter()  # Building the model is no part of a swap.

    def _use(self, model: TrainedModel, checkpoint: checkpoints.Checkpoint) -> None:
        weights = self._network.weights(
            checkpoint.step, model.trainable, model.non_trainable
        )
        written = (checkpoint.path / checkpoints.MANIFEST).stat().st_mtime
        self._swap(self._network, weights, written, self._began)
