"""The loop of a training: step, log, save, and what there is to say at the end."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from cifar10.config.config import ResolvedConfig
from cifar10.errors import StoppedError
from cifar10.run_directory import layout
from cifar10.towers.builder import Batch, TowerBuilder
from cifar10.towers.step_result import StepResult
from cifar10.training import bottleneck, profiling, timing
from cifar10.training.console import Console, step_line
from cifar10.training.not_finite import NotFinitePolicy, OpenBatches
from cifar10.training.progress import Progress
from cifar10.training.results import NotFiniteError, Results, is_finite
from cifar10.training.signals import StopSignals, exit_code
from cifar10.training.summaries import NoSummaries, Summaries, TrainSummaries

TowerBatches = list[Batch]


class Loop:
    """One training in progress.

    Args:
        config: The configuration.
        train_dir: Directory of the run.
        towers: Runs the steps.
        progress: The step reached, and its checkpoints.
        stop: Tells when to end before the last step.
        is_chief: Whether this process prints and writes.
        after_step: Called between two updates with the step reached, if at all.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        train_dir: Path,
        towers: TowerBuilder,
        progress: Progress,
        stop: StopSignals,
        *,
        is_chief: bool = True,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        self._config = config
        self._train_dir = train_dir
        self._towers = towers
        self._progress = progress
        self._stop = stop
        self._is_chief = is_chief
        self._after_step = after_step
        self._results = Results(towers.tower_names, skips=config.on_nan == "skip")
        self._not_finite = NotFinitePolicy(
            config, train_dir, towers, progress, self._results
        )
        self._newest_batches: TowerBatches = []
        self._throughput = timing.Throughput(config.global_batch_size)
        self._profile = profiling.StepProfile(
            config.profiled_steps,
            train_dir / layout.TRAIN_EVENTS if is_chief else None,
            config.max_steps,
        )
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
        if not self.step and (self._train_dir / layout.METRICS).exists():
            told[-1] += ", since there is no checkpoint"
        return told

    def synchronize(self) -> None:
        """Gives what was restored to all sets of variables, on all machines."""
        self._progress.synchronize(self._towers)

    def how_to_go_on(self) -> str:
        """Says which checkpoint is the last and what goes on from it."""
        return self._progress.how_to_go_on()

    def run(
        self,
        open_batches: OpenBatches,
        settings: dict[str, Any],
        hyperparameters: Sequence[str],
    ) -> None:
        """Runs the steps that are left, from an earlier one on if one has to go back.

        Args:
            open_batches: Begins to make batches, from the one of a number on.
            settings: The content of `config.json`, for TensorBoard.
            hyperparameters: The names of those that determine the result.
        """
        if self._config.on_nan == "rollback" and not self._progress.has_checkpoint():
            self._progress.save({}, last=True)
        while self.step < self._config.max_steps:
            try:
                with open_batches(self._progress.batch) as batches:
                    self._run(batches.get, settings, hyperparameters)
            except NotFiniteError as error:
                self._not_finite.handle(error, open_batches)
                self._throughput.restart()

    def _run(
        self,
        next_batches: Callable[[], TowerBatches],
        settings: dict[str, Any],
        hyperparameters: Sequence[str],
    ) -> None:
        """Runs the steps that are left."""
        events = self._train_dir / layout.TRAIN_EVENTS
        metrics = self._train_dir / layout.METRICS
        with (
            TrainSummaries(
                events,
                metrics,
                self.step,
                go_on=self._config.on_save_error == "continue",
                how_to_go_on=self.how_to_go_on,
            )
            if self._is_chief
            else NoSummaries() as summaries,
            Console(self.step, self._config.max_steps, shows=self._is_chief) as console,
        ):
            try:
                while self.step < self._config.max_steps:
                    if number := self._towers.agreed_to_stop(self._stop.requested):
                        self._end_early(number, summaries)
                    count = self._steps_of_next_call()
                    began = time.perf_counter()
                    batches = [next_batches() for _ in range(count)]
                    waited = time.perf_counter() - began
                    if self.step == 0:
                        graph = self._towers.graph(batches[0])
                        summaries.describe(settings, hyperparameters, graph)
                    if self._profile.starts_at(self.step + 1):
                        with self._apart():
                            self._profile.start()
                    self._call(batches, summaries, waited)
                    console.advance(self.step)
                    if self._profile.ends_at(self.step):
                        with self._apart():
                            self._profile.stop()
                    self._log_and_save(summaries, console)
            finally:
                self._profile.stop()  # What there is of it is written.
        self._towers.wait_for_all()
        if not self._is_chief:
            return
        for line in (self._profile.what_is_missing(), self._throughput.verdict()):
            if line:
                print(line, flush=True)
        if self._config.report_bottleneck:
            print(
                bottleneck.division(self._throughput, self._towers, next_batches()),
                flush=True,
            )

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
        alone |= self._profile.meets(self.step + 1, last)
        first = not self._called
        if count == 1 or interrupted or alone or first or last > config.max_steps:
            return 1
        return count

    def _call(
        self,
        batches: list[TowerBatches],
        summaries: Summaries,
        waited: float,
    ) -> None:
        """Runs one step or several, and keeps their results for the next look."""
        count = len(batches)
        step = self.step + count
        with_summaries = step % self._config.summary_steps == 0
        if with_summaries:
            with self._apart():
                result = self._towers.step(batches[0], summaries=True)
                if is_finite(result.metrics, result.tower_losses):
                    self._write_summaries(summaries, step, result, batches[0])
        elif (count, False) not in self._called:
            with self._apart():  # It traces the step.
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
        self._newest_batches = batches[-1]
        if self._after_step:
            self._after_step(step)

    def _step(self, batches: list[TowerBatches]) -> StepResult:
        if len(batches) == 1:
            return self._towers.step(batches[0])
        return self._towers.steps(batches)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Keeps what runs inside out of the steps' time, and theirs out of it."""
        self._results.wait()
        with self._throughput.leave_out():
            yield

    def _log_and_save(self, summaries: Summaries, console: Console) -> None:
        config = self._config
        if self.step % config.log_frequency == 0:
            self._log(summaries, console)
        if self.step % config.checkpoint_steps == 0 or self.step == config.max_steps:
            with self._apart():
                self._save(summaries, last=self.step == config.max_steps)

    def _log(self, summaries: Summaries, console: Console) -> None:
        metrics = self._look_at_results()
        rate = self._throughput.take()
        console.line(step_line(self.step, metrics["total_loss"], rate))
        metrics |= {
            f"{name}/average": value
            for name, value in self._results.loss_averages.items()
        }
        if self._config.on_nan == "skip":
            metrics["skipped_steps"] = self._progress.skipped_steps
        with self._throughput.leave_out():
            shown = {
                name: value if math.isfinite(value) else None
                for name, value in metrics.items()
            }
            summaries.scalars(
                self.step, {**shown, "examples_per_sec": rate[0] if rate else None}
            )

    def _look_at_results(self) -> dict[str, float]:
        metrics = self._results.look()
        with self._throughput.leave_out():
            self._not_finite.tell_skipped(self._newest_batches)
        return metrics

    def _write_summaries(
        self,
        summaries: Summaries,
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

    def _save(self, summaries: Summaries, *, last: bool) -> None:
        # A state that came from numbers which are not finite is never published.
        self._look_at_results()
        # The curves reach the disk first, so none has a gap before a checkpoint.
        summaries.flush()
        self._progress.save(self._results.loss_averages, last=last)

    def _end_early(self, number: Signals, summaries: Summaries) -> None:
        """Keeps the very step that was reached, and ends the run."""
        # On every process, so that all go back together if it was not finite.
        self._look_at_results()
        if not self._progress.is_saved():
            self._save(summaries, last=True)
        self._towers.wait_for_all()
        raise StoppedError(
            f"stopped by {number.name} after step {self.step}. {self.how_to_go_on()}",
            exit_code(number),
        )
