"""Builds the model of a run from `config.json`, and loads its checkpoints."""

from pathlib import Path

import tensorflow as tf

from cifar10 import files
from cifar10.config import layout, run_config
from cifar10.config.fields import DISTORTIONS, PRECISIONS, Network
from cifar10.config.options import options
from cifar10.errors import UsageError, say
from cifar10.input import datasets
from cifar10.input.distortions import image_shape
from cifar10.model import probe
from cifar10.models.registry import OPTIONS, build_model, is_code
from cifar10.run_directory import checkpoints, restoring, temperature


class TrainedModel:
    """The model of a run, with initial values until `load` or `restore` is called.

    Attributes:
        run: The run.
        model: The Keras model. With `use_averages`, the model's trainable variables
            keep their initial values.
        use_averages: Whether `trainable` has the variables' moving averages.
        trainable: Averages or last values of the trainable variables, in their order.
        is_to_calibrate: Whether the temperature of a checkpoint is left at 1.
        temperature: Divisor of the logits; 1 without `eval.py --calibrate`.
        class_names: Names of the classes.
        picture_shape: Height, width and channels of one image of the data set.
        image_shape: Shape of an image that the model takes, as `prepare` returns it.
    """

    def __init__(
        self,
        directory: Path,
        device: str = "/cpu:0",
        *,
        use_averages: bool = True,
        trust_model: str | None = None,
    ) -> None:
        self.run = run = run_config.RecordedRun.read(directory)
        run.check_model(trust_model)
        # Other versions may have recorded values that this version cannot evaluate.
        for key, known in (("distortions", DISTORTIONS), ("precision", PRECISIONS)):
            if (recorded := run.values[key]) not in known:
                raise UsageError(
                    f"{directory}: {key} is {recorded!a}, but this version "
                    f"supports {', '.join(known)}. Use the version that wrote the run."
                )
        self.picture_shape, self.class_names = datasets.describe(run)
        distortion, network = run.config.images.distortions, run.config.network
        self.image_shape = image_shape(distortion, self.picture_shape)
        self.options = {key: vars(network)[key] for key in OPTIONS}
        for key, value in self.options.items():  # Huge ones would take hours to build.
            options(Network)[key].check(value, f"{directory}: ")
        self.model = build_model(
            network.model,
            self.image_shape,
            len(self.class_names),
            precision=network.precision,
            seed=None,  # Leaves the random state of the process alone.
            device=device,
            options=self.options,
        )
        if (count := self.model.count_params()) != (then := run.facts.parameters):
            why = f"has {count:,} parameters, but had {then:,} in training"
            raise UsageError(f"--model {network.model} {why}. Restore its code.")
        if is_code(network.model):
            run.check_logits(probe(self.model, self.image_shape))
        self._last = [v.value for v in self.model.trainable_variables]
        self.non_trainable = [v.value for v in self.model.non_trainable_variables]
        self.use_averages = use_averages
        self.temperature, self.is_to_calibrate = 1.0, False
        with tf.device(device):
            self._averages = [tf.Variable(v, trainable=False) for v in self._last]
        self.trainable = self._averages if use_averages else self._last
        self._file = directory / temperature.FILES[0]  # Missing until `load`.

    def restore(self, wanted: restoring.Wanted = None) -> int:
        """Restores the wanted or newest intact checkpoint; returns its step."""
        folder = self.run.directory / layout.CHECKPOINTS
        given = folder, self.load, self.run
        newest, refused = restoring.restore_newest(*given, wanted=wanted)
        if newest is None:
            raise UsageError(restoring.why_none(folder, wanted, refused))
        for damaged, error in refused.items():
            say(f"PASSING OVER the damaged checkpoint of step {damaged}: {error}.")
        return newest.step

    def load(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Loads an intact checkpoint; raises the errors of `checkpoints.restore`."""
        parts = {"averages": self._averages, "non_trainable": self.non_trainable}
        # Skipping the model's last values saves two thirds of the time.
        if not self.use_averages:
            # The checkpoint's `model` lacks layers in lists and dicts.
            parts["optimizer"] = tf.train.Checkpoint(_trainable_variables=self._last)
        checkpoints.restore(checkpoint, parts, partly=True)
        self._file = checkpoint.path / temperature.FILES[0 if self.use_averages else 1]
        if not self.is_to_calibrate:  # Else a damaged file is replaced.
            self.temperature = temperature.read(self._file)
        if self.temperature != 1.0:
            say(f"The temperature of step {checkpoint.step} is {self.temperature:.3f}.")

    def is_recalibrated(self) -> bool:
        """Returns whether the loaded checkpoint has another temperature by now."""
        return temperature.read(self._file) != self.temperature

    def calibrate(self, fitted: float) -> None:
        """Sets the temperature to `fitted`; writes it to the checkpoint's folder."""
        files.write_output(self._file, "--calibrate:", f"{fitted}\n".encode())
        self.temperature = fitted
        say(f"Temperature {fitted:.3f} for predict, serve and export: {self._file}")
