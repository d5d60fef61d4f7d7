"""The loop of a training: step, log, save, and what there is to say at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from cifar10 import run_directory, timing
from cifar10.config import Config
from cifar10.console import Console, step_line
from cifar10.errors import UsageError
from cifar10.progress import Progress
from cifar10.results import NotFiniteError, Results
from cifar10.summaries import TrainSummaries
from cifar10.towers import Batch, StepResult, TowerBuilder

TowerBatches = list[Batch]


class Loop:
    """One training in progress.

    Args:
        config: The configuration.
        train_dir: Directory of the run.
        towers: Runs the steps.
        progress: The step reached, and its checkpoints.
    """

    def __init__(
        self,
        config: Config,
        train_dir: Path,
        towers: TowerBuilder,
        progress: Progress,
    ) -> None:
        self._config = config
        self._train_dir = train_dir
        self._towers = towers
        self._progress = progress
        self._results = Results(towers.devices)
        self._throughput = timing.Throughput(config.batch_size * len(towers.devices))
        self._profiled = config.profiled_steps()
        self._profiling = False
        self._profile_begun = False
        self._called: set[tuple[int, bool]] = set()

    @property
    def step(self) -> int:
        """Synchronous updates applied so far."""
        return self._progress.step

    def restore(self) -> list[str]:
        """Goes on from the newest intact checkpoint; returns what to tell the user."""
        told, averages = self._progress.restore()
        self._results.loss_averages.update(averages)
        told[-1] += f" in {self._train_dir}"
        if not self.step and (self._train_dir / run_directory.METRICS).exists():
            told[-1] += ", since there is no checkpoint"
        return told

    def how_to_go_on(self) -> str:
        """Says which checkpoint is the last and what goes on from it."""
        return self._progress.how_to_go_on()

    def run(
        self,
        next_batches: Callable[[], TowerBatches],
        settings: dict[str, Any],
        hyperparameters: Sequence[str],
    ) -> None:
        """Runs the steps that are left.

        Args:
            next_batches: Returns one batch for each tower, waiting for them if needed.
            settings: The content of `config.json`, for TensorBoard.
            hyperparameters: The names of those that determine the result.
        """
        events = self._train_dir / run_directory.TRAIN_EVENTS
        metrics = self._train_dir / run_directory.METRICS
        with (
            TrainSummaries(
                events,
                metrics,
                self.step,
                go_on=self._config.on_save_error == "continue",
                how_to_go_on=self.how_to_go_on,
            ) as summaries,
            Console(self.step, self._config.max_steps) as console,
        ):
            try:
                while self.step < self._config.max_steps:
                    count = self._steps_of_next_call()
                    began = time.perf_counter()
                    batches = [next_batches() for _ in range(count)]
                    waited = time.perf_counter() - began
                    if self.step == 0:
                        graph = self._towers.graph(batches[0])
                        summaries.describe(settings, hyperparameters, graph)
                    self._profile(self.step + 1, tf.profiler.experimental.start, events)
                    self._call(batches, summaries, waited)
                    console.advance(self.step)
                    self._profile(self.step, tf.profiler.experimental.stop)
                    self._log_and_save(summaries, console)
            finally:
                if self._profiling:  # What there is of it is written.
                    tf.profiler.experimental.stop()
        if self._profiled is not None and not self._profile_begun:
            print(
                f"No profile was written: step {self._profiled[0]} was not among the "
                "steps of this run.",
                flush=True,
            )
        if verdict := self._throughput.verdict():
            print(verdict, flush=True)
        if self._config.report_bottleneck:
            print(self._division(next_batches()), flush=True)

    def _steps_of_next_call(self) -> int:
        """Returns how many steps may run in one call: one, or --steps_per_call."""
        config = self._config
        count = config.steps_per_call
        last = self.step + count
        periods = (config.log_frequency, config.checkpoint_steps, config.summary_steps)
        # Something is to be done between two of the steps, or with summaries at the
        # last one, which runs by itself.
        interrupted = any(self.step // one != (last - 1) // one for one in periods)
        alone = last % config.summary_steps == 0
        if self._profiled is not None:
            alone |= self.step < self._profiled[1] and last >= self._profiled[0]
        first = not self._called
        if count == 1 or interrupted or alone or first or last > config.max_steps:
            return 1
        return count

    def _call(
        self, batches: list[TowerBatches], summaries: TrainSummaries, waited: float
    ) -> None:
        """Runs one step or several, and keeps their results for the next look."""
        count = len(batches)
        step = self.step + count
        with_summaries = step % self._config.summary_steps == 0
        if with_summaries:
            self._results.wait()
            with self._throughput.leave_out():
                result = self._towers.step(batches[0], summaries=True)
                self._write_summaries(summaries, step, result, batches[0])
        elif (count, False) not in self._called:
            self._results.wait()
            with self._throughput.leave_out():  # It traces the step.
                result = self._step(batches)
                result.tower_losses.numpy()
        else:
            result = self._step(batches)
            self._throughput.count(count, waited)
        if not self._called:  # The first images were slow to come, too.
            self._throughput.restart()
        self._called.add((count, with_summaries))
        self._results.add(step, result.metrics, result.tower_losses)
        self._progress.step = step

    def _step(self, batches: list[TowerBatches]) -> StepResult:
        if len(batches) == 1:
            return self._towers.step(batches[0])
        return self._towers.steps(batches)

    def _profile(self, step: int, action: Callable[..., None], *where: Path) -> None:
        """Starts or stops the profile if this is the step for it."""
        if self._profiled is None:
            return
        first, last = self._profiled
        last = min(last, self._config.max_steps)
        if (not where and self._profiling and step == last) or (
            where and step == first
        ):
            self._profiling = bool(where)
            self._profile_begun = True
            self._results.wait()
            with self._throughput.leave_out():
                action(*map(str, where))

    def _log_and_save(self, summaries: TrainSummaries, console: Console) -> None:
        config = self._config
        if self.step % config.log_frequency == 0:
            self._log(summaries, console)
        if self.step % config.checkpoint_steps == 0 or self.step == config.max_steps:
            self._results.wait()
            with self._throughput.leave_out():
                self._save(summaries, last=self.step == config.max_steps)

    def _log(self, summaries: TrainSummaries, console: Console) -> None:
        metrics = self._look_at_results()
        rate = self._throughput.take()
        console.line(step_line(self.step, metrics["total_loss"], rate))
        metrics |= {
            f"{name}/average": value
            for name, value in self._results.loss_averages.items()
        }
        with self._throughput.leave_out():
            summaries.scalars(
                self.step, {**metrics, "examples_per_sec": rate[0] if rate else None}
            )

    def _look_at_results(self) -> dict[str, float]:
        try:
            return self._results.look()
        except NotFiniteError as error:
            raise UsageError(
                f"Stopped: {error}. A lower --learning_rate than "
                f"{self._config.learning_rate} usually helps, with another "
                f"--train_dir. {self.how_to_go_on()}"
            ) from error

    def _write_summaries(
        self,
        summaries: TrainSummaries,
        step: int,
        result: StepResult,
        tower_batches: TowerBatches,
    ) -> None:
        variables = {
            f"variables/{variable.path}": variable.value
            for variable in self._towers.state.model.trainable_variables
        }
        gradients = {
            f"gradients/{name}": value for name, value in result.gradients.items()
        }
        summaries.histograms(step, variables | gradients)
        summaries.activations(step, result.activations)
        summaries.images(step, tower_batches[0][0])

    def _save(self, summaries: TrainSummaries, *, last: bool) -> None:
        # A state that came from numbers which are not finite is never published.
        self._look_at_results()
        # The curves reach the disk first, so none has a gap before a checkpoint.
        summaries.flush()
        self._progress.save(self._results.loss_averages, last=last)

    def _division(self, batches: TowerBatches) -> str:
        """Measures the phases of a step and says how its time divides."""
        if not self._throughput.steps:
            return "No step was timed, so its time cannot be divided."
        on_host = [tuple(tensor.numpy() for tensor in batch) for batch in batches]

        def transfer() -> None:
            for device, batch in zip(self._towers.devices, on_host, strict=True):
                with tf.device(device):
                    for tensor in batch:
                        tf.identity(tensor)

        return self._throughput.division(
            timing.seconds_of(transfer),
            timing.seconds_of(lambda: self._towers.phase(batches, average=False)),
            timing.seconds_of(lambda: self._towers.phase(batches, average=True)),
        )
