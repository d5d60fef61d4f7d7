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
from cifar10.towers.update import TrainState

logger = logging.getLogger(__name__)


class Prediction(NamedTuple):
    """The logits of some images."""

    step: int  # Of the weights.
    # float32 or float64 [images, classes], divided by the temperature of the weights.
    logits: np.ndarray
    class_names: tuple[str, ...]


class Network:
    """A model as a pure function of its weights and images, traced on construction.

    The values of the model's variables are not used. `settings`, the content of the
    run's `config.json`, name the model and say how its images are prepared.

    Attributes:
        image_shape: Height, width and channels of the images that it takes.
        names: Names of the model and its classes.
    """

    def __init__(
        self, model: keras.Model, settings: Mapping[str, Any], device: str
    ) -> None:
        self._device = device
        self.image_shape, _, class_names = datasets.describe(settings)
        self.names = {"model": settings["model"], "class_names": class_names}

        @tf.function(autograph=False)
        def evaluate(
            trainable: list[tf.Tensor],
            non_trainable: list[tf.Tensor],
            images: tf.Tensor,
        ) -> tf.Tensor:
            prepared = prepare(images, settings["distortions"])
            return evaluation_logits(model, trainable, non_trainable, prepared)[0]

        trainable, non_trainable = (
            [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
        images = tf.TensorSpec([None, *self.image_shape], tf.uint8)
        with tf.device(device):
            self.logits = evaluate.get_concrete_function(
                trainable, non_trainable, images
            )

    def copy_weights(
        self,
        step: int,
        trainable: Sequence[tf.Variable],
        non_trainable: Sequence[tf.Variable],
        since: float,
        temperature: float = 1.0,
    ) -> "Snapshot":
        """Copies the current values of variables to the device of the copy."""
        with tf.device(self._device):
            # A value that was read does not change when the variable is assigned.
            copied = Snapshot(
                self,
                step,
                [tf.identity(variable) for variable in trainable],
                [tf.identity(variable) for variable in non_trainable],
                since,
                temperature,
            )
        # Waits for a copy to a GPU that may still be under way.
        copied.trainable[-1].numpy()
        return copied

    def predict(self, snapshot: "Snapshot", images: np.ndarray) -> Prediction:
        """Computes the logits of some images; see `LiveCopy.predict`."""
        images = np.asarray(images)
        shape = self.image_shape
        if images.dtype != np.uint8 or images.shape[1:] != shape or not len(images):
            raise ValueError(
                f"images: {images.dtype} {list(images.shape)}; it has to be uint8 "
                f"[images, {', '.join(map(str, shape))}], at least one image."
            )
        with tf.device(self._device):
            logits = self.logits(
                snapshot.trainable, snapshot.non_trainable, tf.constant(images)
            )
            calibrated = (logits / snapshot.temperature).numpy()
        return Prediction(snapshot.step, calibrated, self.names["class_names"])


class Snapshot(NamedTuple):
    """A network and the values of all its variables after one step.

    The values never change.
    """

    network: Network
    step: int
    trainable: list[tf.Tensor]  # Last values or moving averages.
    non_trainable: list[tf.Tensor]
    since: float  # When the training had them, in seconds since 1970.
    temperature: float  # That of the step, by `eval.py --calibrate`, or 1.


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
        self._snapshot: Snapshot | None = None  # Another thread may replace it.

    @property
    def names(self) -> dict[str, Any]:
        """Names of the model in use and its classes; empty before the first weights."""
        snapshot = self._snapshot
        return snapshot.network.names if snapshot else {}

    @property
    def weights_step(self) -> int | None:
        """The step of the weights in use; None if there are none yet."""
        snapshot = self._snapshot
        return snapshot.step if snapshot else None

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the training had these weights; None if there are none yet."""
        snapshot = self._snapshot
        # The clock of the machine that trains may be ahead.
        return max(0.0, time.time() - snapshot.since) if snapshot else None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images that `predict` takes.

        Raises:
            UsageError: There are no weights yet.
        """
        return self._require_snapshot().network.image_shape

    def predict(self, images: np.ndarray) -> Prediction:
        """Computes the logits of some images, as an evaluation of that step does.

        They are divided by the temperature that `eval.py --calibrate` gave the step.
        Any number of threads may call it, at any time.

        Args:
            images: uint8 [count, height, width, channels], as in the data set.

        Raises:
            UsageError: There are no weights yet.
        """
        snapshot = self._require_snapshot()
        return snapshot.network.predict(snapshot, images)

    def why_no_weights(self) -> str:
        """Returns why there are no weights yet, and what to do."""
        return "There are no weights yet; wait for the training's first."

    def _require_snapshot(self) -> Snapshot:
        snapshot = self._snapshot
        if snapshot is None:
            raise UsageError(self.why_no_weights())
        return snapshot

    def _swap(self, snapshot: Snapshot, began: float) -> None:
        """Puts weights in place, which were read from `began` on (`perf_counter`)."""
        self._snapshot = snapshot
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
        self._network = Network(model, settings, device)
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
        began, variables = time.perf_counter(), (self._trainable, self._non_trainable)
        self._swap(self._network.copy_weights(step, *variables, time.time()), began)


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

    Attributes:
        closed: Set by `close()`.
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
        self.closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def refused(self) -> int:
        """Number of checkpoints or runs that were refused; see `refusals`."""
        return len(self.refusals)

    def start(self, interval: float = 1.0) -> Self:
        """Checks for new weights now, then every `interval` seconds until `close()`.

        It checks in a background thread.
        """
        self.look()
        self._thread = threading.Thread(
            target=self._watch, args=(interval,), name="follower", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Stops checking for new weights; predictions continue with the last ones."""
        self.closed.set()
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
        while not self.closed.wait(interval):
            try:
                self.look()
            except Exception:
                # A bug here or in the user's model. If the thread ended, the copy would
                # silently be out of date.
                logger.exception("The follower of %s failed to look.", self.directory)

    def _prepare(self, model: TrainedModel) -> None:
        self._network = Network(model.model, model.settings, self._device)
        self._began = time.perf_counter()  # Building the model is no part of a swap.

    def _use(self, model: TrainedModel, checkpoint: checkpoints.Checkpoint) -> None:
        written = (checkpoint.path / checkpoints.MANIFEST).stat().st_mtime
        variables = model.trainable, model.non_trainable
        snapshot = self._network.copy_weights(
            checkpoint.step, *variables, written, model.temperature
        )
        self._swap(snapshot, self._began)
