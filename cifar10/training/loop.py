"""The loop of a training: step, log, summarize, save, and report to hooks."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import Signals
from typing import Any, Protocol

import tensorflow as tf

from cifar10.config.config import ResolvedConfig
from cifar10.config.stages import Stage
from cifar10.errors import StoppedError
from cifar10.input.pipeline import PrefetchQueues
from cifar10.run_directory import layout
from cifar10.towers.many_steps import ManySteps
from cifar10.towers.towers import Batch, StepResult, TowerBuilder
from cifar10.training.console import forecast_line
from cifar10.training.goodput import Goodput
from cifar10.training.hooks import Hooks, Run, Summary, ending
from cifar10.training.not_finite import NotFinitePolicy, OpenBatches
from cifar10.training.profiling import StepProfile
from cifar10.training.progress import Progress
from cifar10.training.results import NotFiniteError, Results, is_finite
from cifar10.training.summary_budget import SummaryBudget
from cifar10.training.timing import Throughput


class StopRequest(Protocol):
    """Requests the end of a training, as `signals.StopSignals` does."""

    @property
    def requested(self) -> Signals | None:
        """The signal to stop on after the current step, if any."""


class Scores(Protocol):
    """Scores the model between two steps, as `validation.Validation` does."""

    def begin(self, step: int) -> None:
        """Forgets the scores of later steps."""

    def score(self, progress: Progress) -> tuple[str, dict[str, float]]:
        """Scores the step reached, and notes it there; returns a line and metrics."""


class Loop:
    """One training in progress.

    `activations` computes what summaries show from images, if summaries are wanted.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        train_dir: Path,
        towers: TowerBuilder,
        progress: Progress,
        stop: StopRequest,
        *,
        activations: Callable[[tf.Tensor], dict[str, tf.Tensor]] | None,
        profile: StepProfile | None,
        many_steps: ManySteps | None,
        hooks: Hooks,
        validation: Scores | None,
        goodput: Goodput,
    ) -> None:
        self._config = config
        self._train_dir = train_dir
        self._log_path = train_dir / layout.METRICS
        self._towers = towers
        self.progress = progress
        self._stop = stop
        self._activations = activations
        self.profile = profile
        self.many_steps = many_steps
        self._hooks = hooks
        self._validation = validation
        self.goodput = goodput
        self._results = Results(towers.tower_names, skips=config.on_nan == "skip")
        self._not_finite = NotFinitePolicy(
            config, train_dir, towers, progress, self._results
        )
        self.throughput = Throughput(config.global_batch_size, goodput.stepping)
        self._budget = SummaryBudget(config.summary_steps)
        self.newest_batches: Sequence[Batch] = []
        self._traced: set[tuple[int, bool]] = set()
        self._stage = Stage(0)

    @property
    def step(self) -> int:
        """Synchronous updates applied so far."""
        return self.progress.step

    def restore(self) -> list[str]:
        """Restores the newest intact checkpoint; returns messages for the user."""
        restored = self.progress.restore()
        self._results.reset(restored.loss_averages)
        self.goodput.go_back(self._log_path, self.step, restarted=True)
        return [*restored.messages, restored.summary]

    def run(self, open_batches: OpenBatches, settings: dict[str, Any]) -> None:
        """Runs the steps that are left; `settings` are the content of `config.json`."""
        if self._config.on_nan == "rollback" and not self.progress.has_checkpoint():
            self.progress.save({}, last=True)
        with ending(self._hooks, self.progress):
            while not self.progress.is_over:
                try:
                    if self._validation:
                        self._validation.begin(self.step)
                    run = Run(self.step, self._train_dir, settings, self._towers.state)
                    self._hooks.start(run)
                    while not self.progress.is_over:
                        self._begin_stage()
                        with open_batches(self.progress.batch, self.step) as queues:
                            self._run(queues)
                except NotFiniteError as error:
                    self._not_finite.handle(error, open_batches)
                    self.goodput.go_back(self._log_path, self.step, restarted=False)
                    self.throughput.restart()

    def _begin_stage(self) -> None:
        """Traces the step anew if the next one is of another stage than the last."""
        stage = self._config.stage(self.step)
        if self._stage != stage:
            self._stage = stage
            self._traced.clear()
            self._towers.freeze(stage.frozen)
            if self.many_steps:
                self.many_steps.retrace()

    def _run(self, queues: PrefetchQueues) -> None:
        config = self._config
        self.goodput.enter("training")
        try:
            while self.step < self._stage.end and not self.progress.is_over:
                if signal := self._stop.requested:
                    self._end_early(signal)

                count = self._steps_of_next_call()
                began = time.perf_counter()
                batches = [queues.get() for _ in range(count)]
                waited = time.perf_counter() - began
                self.goodput.waited(waited)
                if self.step == 0:
                    with self.goodput.during("start"):
                        graph = self._towers.trace(batches[0]).graph
                        self._hooks.notify("on_graph", graph)

                if self.profile and self.profile.first == self.step + 1:
                    with self._not_counted("summaries"):
                        self.profile.start()
                self._call(batches, waited)
                if self.profile and self.profile.last == self.step:
                    with self._not_counted("summaries"):
                        self.profile.stop()

                if self.step % config.log_frequency == 0:
                    self._log()
                left = config.max_steps - self.step
                if self.throughput.allows_forecast():
                    self._results.wait()
                    self._say(forecast_line(left, self.throughput.forecast(left)))
                self._score_and_save()
        finally:
            if self.profile:
                self.profile.stop()  # Steps that were profiled before an error.

    def _steps_of_next_call(self) -> int:
        count = self._config.steps_of_call(self.step)
        if self.profile and self.profile.includes_any(self.step + 1, self.step + count):
            return 1
        return count

    def _call(self, batches: list[Sequence[Batch]], waited: float) -> None:
        """Runs one step or several, and keeps their results until they are read."""
        count = len(batches)
        step = self.step + count
        summarized = step % self._config.summary_steps == 0
        is_traced = (count, summarized) in self._traced
        if summarized and self._budget.allows():
            with self._not_counted("summaries" if is_traced else "start"):
                result = self._summarized_step(step, batches[0])
        elif not is_traced:
            with self._not_counted("start"):
                result = self._step(batches, summarized=summarized)
                result.tower_losses.numpy()
        else:
            result = self._step(batches, summarized=summarized)
            self.throughput.count(count, waited)
        if not self._traced:  # Filling the queues is no part of the first step.
            self.throughput.restart()
        self._traced.add((count, summarized))
        self._results.add(step, result)
        self.progress.step = step
        self.newest_batches = batches[-1]
        with self.goodput.during("following"):
            self._hooks.notify("on_step", step)

    def _step(
        self, batches: list[Sequence[Batch]], *, summarized: bool = False
    ) -> StepResult:
        if self.many_steps and len(batches) > 1:
            return self.many_steps(batches)
        # The same graph even if its summary is postponed, which each worker decides.
        return self._towers.step(batches[0], return_gradients=summarized)

    def _summarized_step(self, step: int, batches: Sequence[Batch]) -> StepResult:
        images, _ = batches[0]
        with self._budget.spending(step):
            # Before the step, which changes the variables that they depend on.
            activations = self._activations(images) if self._activations else {}
        result = self._towers.step(batches, return_gradients=True)
        if not is_finite(result.metrics, result.tower_losses):
            return result
        with self._budget.spending(step):
            variables = self._towers.state.model.trainable_variables
            tensors = {f"variables/{v.path}": v.value for v in variables}
            tensors |= {f"gradients/{name}": g for name, g in result.gradients.items()}
            losses = {
                f"weight_loss/{v.path}": v.regularizer(v.value)
                for v in variables
                if v.regularizer
            }
            summary = Summary(images, activations, tensors, losses)
            self._hooks.notify("on_summary", step, summary)
        return result

    @contextlib.contextmanager
    def _not_counted(self, part: str) -> Iterator[None]:
        """Leaves the block out of the throughput, which counts only the steps."""
        self._results.wait()
        with self.goodput.during(part):
            yield

    def _log(self) -> None:
        metrics = self._read_results() | {"examples_per_sec": self.throughput.take()}
        self._say(self._results.take_warning())
        self._say(self._budget.take_note())
        if self._config.on_nan == "skip":
            metrics["skipped_steps"] = self.progress.skipped_steps
        with self.goodput.during("summaries"):
            self._hooks.notify("on_log", self.step, metrics)

    def _say(self, text: str) -> None:
        if text:
            self._hooks.notify("on_message", text)

    def _read_results(self) -> dict[str, float]:
        metrics = self._results.read()
        with self.goodput.during("summaries"):
            self._not_finite.report_skipped(self.newest_batches)
        return metrics

    def _score_and_save(self) -> None:
        """Scores and saves what is due; a checkpoint contains the score of its step."""
        is_due = self.step % self._config.checkpoint_steps == 0
        period = self._config.eval_steps
        if self._validation and period and self.step % period == 0:
            with self._not_counted("evaluation"):
                self._read_results()  # What is not finite gets no score.
                line, metrics = self._validation.score(self.progress)
                self._say(line)
                self._hooks.notify("on_evaluation", self.step, metrics)
            is_due |= self._config.keep_best > 0  # What scores best is to be there.
        if is_due or self.progress.is_over:
            with self._not_counted("saving"):
                self._save(last=self.progress.is_over)

    def _save(self, *, last: bool) -> None:
        # A state that came from numbers which are not finite is never published.
        self._read_results()
        # Before saving, so that what hooks write has no gap before a checkpoint.
        self._hooks.notify("on_save", self.step)
        if path := self.progress.save(self._results.loss_averages, last=last):
            self._hooks.notify("on_checkpoint", self.step, path)

    def _end_early(self, signal: Signals) -> None:
        """Saves the step that was reached, and ends the run."""
        # On every process, so that all go back together if it was not finite.
        self._read_results()
        if self.step and not self.progress.is_saved():
            self._save(last=True)
        how = self.progress.how_to_resume()
        raise StoppedError(
            f"stopped by {signal.name} after step {self.step}.\n{how}", 128 + signal
        )
