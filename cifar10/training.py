"""Trains a model on its towers: restore, step, log, save.

The only module that knows all others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from cifar10 import (
    checkpoints,
    config as configuration,
    datasets,
    devices,
    distortions,
    input as input_queues,
    model as models,
    run_directory,
    schedule,
    settings as run_settings,
)
from cifar10.config import Config
from cifar10.console import Console, Throughput, step_line
from cifar10.errors import UsageError
from cifar10.results import NotFiniteError, Results
from cifar10.summaries import TrainSummaries
from cifar10.towers import UPDATE_DEVICE, StepResult, TowerBuilder, TrainState

# What determines the result: a resumed run has to agree in it.
HYPERPARAMETERS = (*configuration.result_determining(), "global_batch_size")
IMAGE_SHAPE = (distortions.CROP_SIZE, distortions.CROP_SIZE, 3)


def train(config: Config) -> int:
    """Trains to `config.max_steps`, going on from the newest checkpoint.

    Args:
        config: The configuration.

    Returns:
        The step reached.

    Raises:
        UsageError: Something outside the program stands in the way; the message says
            what and how to go on.
    """
    placement = devices.place_towers(config.num_gpus)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
        # Ampere and newer GPUs would round float32 to 10 bits in matrix products.
        tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.debugging.set_log_device_placement(config.log_device_placement)

    dataset = datasets.find(config.data, config.data_dir, config.data_url)
    images, labels = dataset.read("train")
    run_settings.check_batch(config, placement, len(images))
    model = models.build(
        config.model,
        IMAGE_SHAPE,
        dataset.classes,
        precision=config.precision,
        seed=config.seed,
    )
    settings = run_settings.collect(config, placement, dataset, model)
    train_dir = run_directory.locate(config.train_dir)
    # Batch statistics and dropout make the number of towers part of the result.
    towers = ["towers"] if model.non_trainable_variables else []
    with run_directory.hold(train_dir):
        note = run_directory.prepare(
            train_dir,
            settings,
            [*HYPERPARAMETERS, *towers],
            fresh=config.fresh,
            command=sys.argv,
        )
        run = _Run(config, placement, model, len(images))
        resumed = run.restore()
        for line in [run_settings.first_lines(settings, len(images)), note, *resumed]:
            if line:
                print(line, flush=True)
        if run.step >= config.max_steps:
            print(
                f"Nothing to do: the run is at step {run.step}, and --max_steps is "
                f"{config.max_steps}."
            )
        else:
            try:
                run.train(images, labels, settings)
            except KeyboardInterrupt:
                print(f"\nStopped. {run.how_to_go_on()}", file=sys.stderr)
                raise
            except tf.errors.ResourceExhaustedError as error:
                raise UsageError(
                    f"--batch_size {config.batch_size}: a step does not fit into the "
                    f"memory of its device. Try half of it. {run.how_to_go_on()}"
                ) from error
    print(run_settings.last_lines(train_dir), flush=True)
    return run.step


class _Run:
    """One training in progress."""

    def __init__(
        self,
        config: Config,
        placement: devices.Placement,
        model: keras.Model,
        examples_per_epoch: int,
    ) -> None:
        self.config = config
        self.placement = placement
        self.global_batch_size = config.batch_size * len(placement.devices)
        self.examples_per_epoch = examples_per_epoch
        self.train_dir = run_directory.locate(config.train_dir)
        self.checkpoint_dir = self.train_dir / run_directory.CHECKPOINTS
        with tf.device(UPDATE_DEVICE):  # The optimizer's scalars are variables too.
            optimizer = keras.optimizers.SGD(config.learning_rate, config.momentum)
        self.state = TrainState(model, optimizer)
        self.towers = TowerBuilder(
            self.state,
            placement.devices,
            inference=models.inference,
            loss=models.loss,
            learning_rate=schedule.StaircaseDecay(
                config.learning_rate, config.epochs_per_decay, examples_per_epoch
            ),
            average_decay=lambda step: schedule.average_decay(
                config.moving_average_decay, step
            ),
            activations=models.with_activations(model),
        )
        self.results = Results(placement.devices)
        self.step = 0

    def restore(self) -> list[str]:
        """Goes on from the newest intact checkpoint; returns what to tell the user."""
        told = []
        if left := checkpoints.delete_incomplete(self.checkpoint_dir):
            told.append(
                f"Deleted {len(left)} half-written checkpoint(s) of killed runs."
            )
        newest, damaged = checkpoints.newest_intact(self.checkpoint_dir)
        for step, reason in damaged.items():
            aside = checkpoints.set_aside(self.checkpoint_dir, step)
            told.append(
                f"PASSING OVER the damaged checkpoint of step {step}: {reason}. "
                f"It is kept as {aside}."
            )
        if newest is None:
            metrics = self.train_dir / run_directory.METRICS
            again = ", since there is no checkpoint" if metrics.exists() else ""
            return [*told, f"New run in {self.train_dir}{again}"]
        own = {"seed": self.config.seed, "global_batch_size": self.global_batch_size}
        if any(newest.manifest.get(name) != value for name, value in own.items()):
            raise UsageError(
                f"{newest.path} is of another run: its seed and global batch size are "
                "not this one's. Move it away to go on."
            )
        checkpoints.restore(newest, self.state.trackables())
        if int(self.state.global_step) != newest.step:
            raise UsageError(
                f"{newest.path} holds global_step {int(self.state.global_step)}, not "
                f"{newest.step} as its name says. Move it away to go on from another."
            )
        self.step = newest.step
        self.results.loss_averages.update(newest.manifest["loss_averages"])
        epoch, position = self._epoch_and_position()
        told.append(
            f"Resuming {self.train_dir} from step {self.step} "
            f"(epoch {epoch}, image {position:,})"
        )
        return told

    def train(
        self, images: np.ndarray, labels: np.ndarray, settings: dict[str, Any]
    ) -> None:
        """Runs the steps that are left."""
        config = self.config
        batches = input_queues.training_batches(
            images,
            labels,
            batch_size=config.batch_size,
            towers=len(self.placement.devices),
            distortion=config.distortions,
            seed=config.seed,
            start_step=self.step,
        )
        first_step = self.step + 1
        with (
            input_queues.PrefetchQueues(batches, self.placement.devices) as queues,
            TrainSummaries(
                self.train_dir / run_directory.TRAIN_EVENTS,
                self.train_dir / run_directory.METRICS,
                self.step,
            ) as summaries,
            Console(self.step, config.max_steps) as console,
        ):
            throughput = Throughput(self.global_batch_size)
            for step in range(first_step, config.max_steps + 1):
                tower_batches = queues.get()
                if step == 1:
                    summaries.describe(
                        settings, HYPERPARAMETERS, self.towers.graph(tower_batches)
                    )
                if step % config.summary_steps == 0:
                    self.results.wait()
                    with throughput.leave_out():
                        result = self.towers.step(tower_batches, summaries=True)
                        self._write_summaries(summaries, step, result, tower_batches)
                elif step == first_step:
                    with throughput.leave_out():  # It traces the step.
                        result = self.towers.step(tower_batches)
                        result.tower_losses.numpy()
                else:
                    result = self.towers.step(tower_batches)
                    throughput.count_step()
                self.results.add(step, result.metrics, result.tower_losses)
                self.step = step
                console.advance(step)
                if step % config.log_frequency == 0:
                    self._log(summaries, console, throughput)
                if step % config.checkpoint_steps == 0 or step == config.max_steps:
                    self.results.wait()
                    with throughput.leave_out():
                        self._save(summaries)

    def _log(
        self, summaries: TrainSummaries, console: Console, throughput: Throughput
    ) -> None:
        metrics = self._look_at_results()
        rate = throughput.take()
        console.line(step_line(self.step, metrics["total_loss"], rate))
        metrics |= {
            f"{name}/average": value
            for name, value in self.results.loss_averages.items()
        }
        with throughput.leave_out():
            summaries.scalars(
                self.step, {**metrics, "examples_per_sec": rate[0] if rate else None}
            )

    def how_to_go_on(self) -> str:
        """Says which checkpoint is the last and what goes on from it."""
        if kept := checkpoints.steps(self.checkpoint_dir):
            on = "the same command, without --fresh, goes on from there"
            return f"The last good checkpoint is of step {kept[-1]}; {on}."
        return "No checkpoint was written yet."

    def _look_at_results(self) -> dict[str, float]:
        try:
            return self.results.look()
        except NotFiniteError as error:
            raise UsageError(
                f"Stopped: {error}. A lower --learning_rate than "
                f"{self.config.learning_rate} usually helps, with another --train_dir. "
                f"{self.how_to_go_on()}"
            ) from error

    def _write_summaries(
        self,
        summaries: TrainSummaries,
        step: int,
        result: StepResult,
        tower_batches: Sequence[input_queues.TowerBatch],
    ) -> None:
        variables = {
            f"variables/{variable.path}": variable.value
            for variable in self.state.model.trainable_variables
        }
        gradients = {
            f"gradients/{name}": value for name, value in result.gradients.items()
        }
        summaries.histograms(step, variables | gradients)
        summaries.activations(step, result.activations)
        summaries.images(step, tower_batches[0][0])

    def _save(self, summaries: TrainSummaries) -> None:
        # A state that came from numbers which are not finite is never published.
        self._look_at_results()
        # The curves reach the disk first, so none has a gap before a checkpoint.
        summaries.flush()
        epoch, position = self._epoch_and_position()
        checkpoints.save(
            self.checkpoint_dir,
            self.state.trackables(),
            step=self.step,
            facts={
                "epoch": epoch,
                "position": position,
                "seed": self.config.seed,
                "global_batch_size": self.global_batch_size,
                "loss_averages": self.results.loss_averages,
            },
            keep=self.config.keep_checkpoints,
        )

    def _epoch_and_position(self) -> tuple[int, int]:
        """Returns the epoch, from 0, and how many of its images have been seen."""
        return divmod(self.step * self.global_batch_size, self.examples_per_epoch)
