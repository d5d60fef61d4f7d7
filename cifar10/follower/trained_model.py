"""The model of a run, as evaluation and all who ask it something use it.

The run's directory is all that is needed: its `config.json` says which model it is, its
checkpoints hold the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from cifar10 import model as models
from cifar10.config import config_file
from cifar10.errors import UsageError
from cifar10.input import datasets, records
from cifar10.input.evaluation import DISTORTIONS, image_shape
from cifar10.run_directory import checkpoints, layout
from cifar10.towers import precision as precisions


class TrainedModel:
    """The model of a run; it has initial values until `load`.

    Args:
        directory: Directory of the run.
        device: Where the variables live.

    Attributes:
        settings: The content of the run's `config.json`.
        options: What `models.build` takes besides, as it was for the run.
        model: The Keras model.
        averages: Moving averages of its trainable variables, in their order.
        classes: Number of classes.
        class_names: Their names; None where the run does not say, being older.
        image_shape: Height, width and channels of one image, as the model takes it.

    Raises:
        UsageError: The directory holds no run, or one of another model.
    """

    def __init__(self, directory: Path, device: str = "/cpu:0") -> None:
        description = directory / layout.CONFIG
        self.settings = config_file.read(description)
        name, data = self.settings["model"], self.settings["data"]
        if data not in datasets.FORMATS:
            raise UsageError(f"{description} names no data set: data is {data}.")
        file_format = datasets.FORMATS[data]
        self.classes = file_format.classes
        names = self.settings.get("class_names") or list(file_format.default_names)
        _check(description, self.settings, names, self.classes)
        self.class_names = tuple(names) or None
        self.image_shape = image_shape(
            self.settings["distortions"],
            (records.HEIGHT, records.WIDTH, records.CHANNELS),
        )
        self.options = {key: self.settings.get(key) for key in models.OPTIONS}
        self.model = models.build(
            name,
            self.image_shape,
            self.classes,
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
        with tf.device(device):
            self.averages = [
                tf.Variable(variable.value, trainable=False)
                for variable in self.model.trainable_variables
            ]

    def load(
        self, checkpoint: checkpoints.Checkpoint, *, averages_only: bool = False
    ) -> None:
        """Reads the values of a checkpoint into the variables.

        Args:
            checkpoint: An intact checkpoint of the run.
            averages_only: Whether to leave out the last values of the trainable
                variables, which saves two thirds of the time.

        Raises:
            UsageError: It is of another model, or cannot be read.
            FileNotFoundError: It was deleted meanwhile.
        """
        lists = {
            "averages": self.averages,
            "non_trainable": [v.value for v in self.model.non_trainable_variables],
        }
        last_values = {} if averages_only else {"model": self.model}
        checkpoints.restore(checkpoint, {**last_values, **lists}, partly=True)
        # The optimizer's part is left out, so one with further layers would fit too.
        for name, own in lists.items():
            if (found := checkpoints.entries(checkpoint, name)) != len(own):
                raise UsageError(
                    f"{checkpoint.path} does not fit the model: it is of another one. "
                    f"({name}: {found} variables there, {len(own)} in the model)"
                )

    def values(self, *, use_averages: bool = True) -> list[tf.Variable]:
        """Returns the trainable variables to use: their averages, or the last values.

        Args:
            use_averages: Whether to use the moving averages.
        """
        if use_averages:
            return self.averages
        return [variable.value for variable in self.model.trainable_variables]


def _check(
    description: Path, settings: Mapping[str, Any], class_names: Any, classes: int
) -> None:
    """Refuses what this package never writes, or not in this version."""
    known = {
        "distortions": DISTORTIONS,
        "precision": tuple(one for one in precisions.CHOICES if one != "auto"),
    }
    for name, choices in known.items():
        if settings[name] not in choices:
            raise UsageError(
                f"{description}: {name} is {settings[name]!a}, and this version knows "
                f"{', '.join(choices)}. Use the version that wrote it."
            )
    if class_names and not (
        isinstance(class_names, list)
        and len(class_names) == classes
        and all(isinstance(name, str) for name in class_names)
    ):
        raise UsageError(
            f"{description}: class_names is no list of {classes} names, one a class. "
            "Restore the file, or delete the entry for the data set's own names."
        )
