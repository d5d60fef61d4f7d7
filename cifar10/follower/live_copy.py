"""A live copy of a run's model, which predicts while its weights are replaced.

    with Follower("runs/cifar10_train").start() as follower:
        step, logits, class_names = follower.predict(images)

`Follower` works in any process, and loads each new checkpoint of a run. It refuses
damaged checkpoints and those from another run or model, and keeps the last good one.

The weights are tensors that never change, not variables, and the traced function takes
them as arguments. New weights are prepared while the old ones are in use, and then
replace them by a single assignment. A prediction therefore uses the same weights from
beginning to end. Nothing waits, and nothing is traced again.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from cifar10.config import layout
from cifar10.errors import UsageError
from cifar10.follower.followed_run import FollowedRun
from cifar10.input.distortions import prepare
from cifar10.model import inference
from cifar10.run_directory import checkpoints
from cifar10.trained_model import TrainedModel

logger = logging.getLogger(__name__)


class Prediction(NamedTuple):
    """The logits of a batch of images."""

    step: int  # Step of the weights.
    logits: np.ndarray  # float32 or float64 [images, classes], calibrated.
    class_names: tuple[str, ...]


class Snapshot(NamedTuple):
    """A model and an immutable copy of its variables' values after one step."""

    model: TrainedModel
    logits: Callable[..., tf.Tensor]  # The result of `traced_logits`.
    step: int
    trainable: list[tf.Tensor]  # Last values or moving averages.
    non_trainable: list[tf.Tensor]
    since: float  # When the checkpoint was written, in seconds since 1970.
    temperature: float  # From `eval.py --calibrate`; 1 without it.


def traced_logits(
    model: keras.Model, image_shape: tuple[int, int, int], distortion: str, device: str
) -> tf.types.experimental.ConcreteFunction:
    """Traces a model as a pure function of its variables' values and of images.

    The function takes uint8 images [count, *image_shape], and prepares them by itself.
    """

    @tf.function(autograph=False)
    def evaluate(
        trainable: list[tf.Tensor], non_trainable: list[tf.Tensor], images: tf.Tensor
    ) -> tf.Tensor:
        prepared = prepare(images, distortion)
        return inference(model, trainable, non_trainable, prepared, training=False)[0]

    trainable, non_trainable = (
        [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )
    images = tf.TensorSpec([None, *image_shape], tf.uint8)
    with tf.device(device):
        return evaluate.get_concrete_function(trainable, non_trainable, images)


class Follower(FollowedRun, contextlib.AbstractContextManager):
    """A copy of a run's model that keeps loading new checkpoints.

    Nothing is read before `look` or `start`, so the run need not exist yet.

    Args:
        train_dir: Directory of the run, or its `Record`.
        device: Device that holds the weights and computes.
        step: The step to load. None loads each newer step as it appears. `best` loads
            the step with the best score, then each better step as it appears.
        use_averages: Whether to use the variables' moving averages, as evaluation does,
            instead of their last values.
        trust_model: The `module:function` of the run's model, if you trust its code but
            did not train the run on this machine.

    Attributes:
        closed: Set by `close()`.

    Example:
        >>> x, y = np.zeros([64, 32, 32, 3], np.uint8), np.arange(64) % 2
        >>> record = train(Config(data=(x, y), max_steps=4, batch_size=8))
        Towers: ...
        >>> with Follower(record.train_dir).start() as follower:
        ...     step, logits, class_names = follower.predict(x[:3])
        >>> step, logits.shape, class_names
        (4, (3, 2), ('class 0', 'class 1'))
    """

    def __init__(
        self,
        train_dir: str | Path,
        device: str = "/cpu:0",
        *,
        step: int | str | None = None,
        use_averages: bool = True,
        trust_model: str | None = None,
    ) -> None:
        if "gpu" in device.lower() and not tf.config.list_physical_devices("GPU"):
            raise UsageError(f"Follower: device={device}: there is no GPU.")
        of = getattr(train_dir, "train_dir", train_dir)  # It may be a `Record`.
        reading = {"use_averages": use_averages, "trust_model": trust_model}
        super().__init__(layout.absolute_path(str(of)), device, wanted=step, **reading)
        self._snapshot: Snapshot | None = None  # Another thread may replace it.
        self._looking = threading.Lock()
        self.closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def names(self) -> dict[str, Any]:
        """The `model` and `class_names` in use; empty if there are no weights yet."""
        if not (snapshot := self._snapshot):
            return {}
        name = snapshot.model.run.config.network.model
        return {"model": name, "class_names": snapshot.model.class_names}

    @property
    def weights_step(self) -> int | None:
        """The step of the weights in use; None if there are none yet."""
        return self._snapshot.step if self._snapshot else None

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the training saved the weights in use; None without weights."""
        snapshot = self._snapshot
        # The training machine's clock may be ahead.
        return max(0.0, time.time() - snapshot.since) if snapshot else None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images that `predict` takes."""
        return self._require_snapshot().model.picture_shape

    def predict(self, images: np.ndarray) -> Prediction:
        """Computes the logits of images with the weights in use.

        Logits are divided by the temperature that `eval.py --calibrate` has fitted.
        Any number of threads may call this method at any time.

        Args:
            images: uint8 [count, height, width, channels], as in the data set.

        Raises:
            UsageError: There are no weights yet.
            ValueError: The images have another type or shape, or there are none.
        """
        snapshot = self._require_snapshot()
        images, shape = np.asarray(images), snapshot.model.picture_shape
        if images.dtype != np.uint8 or images.shape[1:] != shape or not len(images):
            raise ValueError(
                f"images: {images.dtype} {list(images.shape)}; expected uint8 [images, "
                f"{', '.join(map(str, shape))}] with at least one image."
            )
        with tf.device(self._device):
            weights = snapshot.trainable, snapshot.non_trainable
            logits = snapshot.logits(*weights, tf.constant(images))
            calibrated = (logits / snapshot.temperature).numpy()
        return Prediction(snapshot.step, calibrated, snapshot.model.class_names)

    def start(self, interval: float = 1.0) -> Self:
        """Checks for new weights now, then in a thread every `interval` seconds."""
        if not 0 < interval < threading.TIMEOUT_MAX:
            raise UsageError(f"Follower.start: interval={interval}: give seconds.")
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

    def __exit__(self, *unused: object) -> None:
        self.close()

    def look(self) -> bool:
        """Loads the newest checkpoint; returns whether the weights changed.

        An unusable directory or checkpoint raises no error; `refusals` says why.
        """
        with self._looking:
            try:
                return super().look()
            except UsageError:
                return False

    def _watch(self, interval: float) -> None:
        while not self.closed.wait(interval):
            try:
                self.look()
            except Exception:
                # A bug here or in the user's model; the thread has to go on.
                logger.exception("The follower of %s failed to check.", self.directory)

    def _prepare(self, model: TrainedModel) -> None:
        how = model.picture_shape, model.run.config.images.distortions, self._device
        self._logits = traced_logits(model.model, *how)

    def _use(self, model: TrainedModel, checkpoint: checkpoints.Checkpoint) -> None:
        written = checkpoint.manifest.get("time", time.time())  # Or of an old version.
        with tf.device(self._device):
            # Copies, which later assignments to the variables do not change.
            trainable = [tf.identity(variable) for variable in model.trainable]
            others = [tf.identity(variable) for variable in model.non_trainable]
        weights = trainable, others, written, model.temperature
        self._snapshot = Snapshot(model, self._logits, checkpoint.step, *weights)

    def _require_snapshot(self) -> Snapshot:
        if (snapshot := self._snapshot) is None:
            raise UsageError(self.why_no_weights)
        return snapshot
