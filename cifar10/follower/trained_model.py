"""The model of a run, built from its `config.json` and filled from its checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

from cifar10 import model as models
from cifar10.config import layout, run_config
from cifar10.config.fields import DISTORTIONS, PRECISIONS, SCORES
from cifar10.errors import UsageError, say
from cifar10.input import datasets
from cifar10.input.pipeline import image_shape
from cifar10.models.registry import OPTIONS, build_model
from cifar10.process import files
from cifar10.run_directory import checkpoints, restoring, temperature

# Values that a run of another version may have, and this one cannot evaluate.
_KNOWN = {"distortions": DISTORTIONS, "precision": PRECISIONS, "best_by": SCORES}


class TrainedModel:
    """The model of a run; it has initial values until `load` or `restore`.

    Attributes:
        settings: The content of the run's `config.json`.
        model: The Keras model. With `use_averages` its trainable variables keep their
            initial values.
        trainable: Values for its trainable variables, in their order: their moving
            averages or their last values.
        temperature: Divisor of its logits for probabilities; 1 without
            `eval.py --calibrate`.
        class_names: Names of the classes.
        picture_shape: Height, width and channels of one image of the data set.
        image_shape: The same of an image as the model takes it (`pipeline.prepare`).
    """

    def __init__(
        self,
        directory: Path,
        device: str = "/cpu:0",
        *,
        use_averages: bool = True,
        trust_model: str | None = None,
    ) -> None:
        self.settings = run_config.read_run_config(directory)
        run_config.check_model(self.settings, trust_model)
        for key, known in _KNOWN.items():
            if self.settings.get(key, known[0]) not in known:
                raise UsageError(
                    f"{directory}: {key} is {self.settings[key]!a}, and this version "
                    f"knows {', '.join(known)}. Use the version that wrote it."
                )
        self.picture_shape, self.class_names = datasets.describe(self.settings)
        self.image_shape = image_shape(self.settings["distortions"], self.picture_shape)
        name = self.settings["model"]
        self.options = {key: self.settings.get(key) for key in OPTIONS}
        self.model = build_model(
            name,
            self.image_shape,
            len(self.class_names),
            precision=self.settings["precision"],
            seed=None,  # The process around it may draw numbers of its own.
            device=device,
            options=self.options,
        )
        if self.model.count_params() != self.settings["parameters"]:
            raise UsageError(
                f"--model {name} has {self.model.count_params():,} parameters now and "
                f"had {self.settings['parameters']:,} when it was trained; its code "
                "has changed since."
            )
        last_values = [v.value for v in self.model.trainable_variables]
        self.non_trainable = [v.value for v in self.model.non_trainable_variables]
        self._use_averages = use_averages
        self.temperature = 1.0
        with tf.device(device):
            self._averages = [tf.Variable(v, trainable=False) for v in last_values]
        self.trainable = self._averages if use_averages else last_values
        self._checkpoints = directory / layout.CHECKPOINTS

    def restore(self, wanted: restoring.Wanted = None) -> int:
        """Restores the newest intact checkpoint, or the one that is wanted.

        Damaged checkpoints are skipped, and named on stderr. Returns the step.
        """
        folder = self._checkpoints
        newest, refused = restoring.restore_newest(
            folder, self.load, self.settings, wanted=wanted
        )
        if newest is None:
            raise UsageError(restoring.why_none(folder, wanted, refused))
        for damaged, error in refused.items():
            say(f"PASSING OVER the damaged checkpoint of step {damaged}: {error}.")
        return newest.step

    def load(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Reads the values of an intact checkpoint; raises as `checkpoints.restore`."""
        # Leaving out the model's own values saves two thirds of the time.
        last_values = {} if self._use_averages else {"model": self.model}
        lists = {"averages": self._averages, "non_trainable": self.non_trainable}
        # It is compared with the step that the folder is named after.
        step = {"global_step": tf.Variable(0, dtype=tf.int64, trainable=False)}
        checkpoints.restore(checkpoint, {**last_values, **lists, **step}, partly=True)
        kind = "" if self._use_averages else "_raw"
        self._file = checkpoint.path / f"temperature{kind}.txt"
        self.temperature = temperature.read(self._file)
        if self.temperature != 1.0:
            say(f"Step {checkpoint.step} has the temperature {self.temperature:.3f}.")

    def calibrate(self, fitted: float) -> None:
        """Uses a temperature, and writes it beside the checkpoint that was loaded."""
        files.write_output(self._file, "--calibrate:", f"{fitted}\n".encode())
        self.temperature = fitted
        say(f"Temperature {fitted:.3f}, for predict, serve and export: {self._file}")


def evaluation_logits(
    model: keras.Model,
    trainable: Sequence[tf.Tensor],
    non_trainable: Sequence[tf.Tensor],
    images: tf.Tensor,
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Computes what an evaluation scores, as a pure function of the variables' values.

    The arguments are those of `model.inference`.

    Returns:
        Logits, in float32 or better, and the model's penalties.
    """
    logits, _, penalties = models.inference(
        model, trainable, non_trainable, images, training=False
    )
    if logits.dtype != tf.float64:
        logits = tf.cast(logits, tf.float32)
    return logits, penalties
