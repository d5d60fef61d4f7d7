"""The step of a training, planned from its flags alone."""

import dataclasses
from collections.abc import Callable

from cifar10.config.config import Config, ResolvedConfig
from cifar10.config.data_flag import NAMES
from cifar10.input import cifar, datasets, pipeline, records
from cifar10.sections import assembly as sections
from cifar10.sections.planner import Planner
from cifar10.towers import devices
from cifar10.towers.train_state import TrainState
from cifar10.training import assembly

# Of CIFAR, and of a plan that has not seen the data: the schedule does not change how
# much memory an update takes.
EXAMPLES = 50_000


@dataclasses.dataclass(frozen=True)
class Step:
    """A training's step for one size of batch."""

    config: ResolvedConfig
    placement: devices.Placement
    state: TrainState
    planner: Planner
    image_shape: tuple[int, int, int]  # Of the data, before it is distorted.

    def of_batch_size(self, batch_size: int) -> "Step":
        """Returns the same step for batches of another size."""
        images = batch_size * self.config.machine.towers * self.config.batch.accumulate
        config = self.config.replace(batch_size=batch_size, global_batch_size=images)
        planner = _planner(config, self.placement, self.state, self.image_shape)
        planner.announce = self.planner.announce
        return dataclasses.replace(self, config=config, planner=planner)


def build(requested: Config, announce: Callable[[str], None]) -> Step:
    """Builds the model and its step's planner; `announce` receives what is done."""
    announce(f"Building the model {requested.network.model} ...")
    placement = devices.place_towers(
        requested.batch.num_gpus, requested.batch.split_gpu
    )
    config = assembly.resolve(requested, placement)
    home = devices.variable_device(
        config.speed.variable_device, placement, config.update.optimizer
    )
    shape, classes = _data(config)
    state = assembly.build_state(config, home, shape, classes)
    planner = _planner(config, placement, state, shape)
    planner.announce = announce
    return Step(config, placement, state, planner, shape)


def _planner(
    config: ResolvedConfig,
    placement: devices.Placement,
    state: TrainState,
    shape: tuple[int, int, int],
) -> Planner:
    return sections.build_planner(
        config,
        placement,
        state,
        assembly.build_tower(config.loss, xla=config.speed.xla),
        assembly.build_update(config, EXAMPLES),
        pipeline.image_shape(config.images.distortions, shape),
    )


def _data(config: ResolvedConfig) -> tuple[tuple[int, int, int], int]:
    """Returns the shape of the images and the number of classes."""
    if config.dataset.data in NAMES:  # Known without having them.
        known = cifar.FORMATS.get(config.dataset.data, records.CIFAR10)
        return records.IMAGE_SHAPE, known.classes
    dataset = datasets.find_for(config.values)
    return dataset.image_shape, dataset.classes


def examples(config: ResolvedConfig) -> int:
    """Returns how many images a training has, which a global batch does not exceed."""
    if config.dataset.data in NAMES:
        return EXAMPLES
    return len(datasets.find_for(config.values).read("train")[0])
