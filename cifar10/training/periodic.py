"""The built-in hooks of a training run, and the order in which hooks are called."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cifar10.config import layout
from cifar10.config.run_options import SCORED_BATCH_SIZE
from cifar10.errors import UsageError, first_few, format_duration
from cifar10.evaluation.eval_options import Options
from cifar10.evaluation.scored_set import ScoredSet
from cifar10.run_directory import early_stopping
from cifar10.run_directory.logs import LogWriter, forget_later
from cifar10.towers.verification import check_replicas, not_finite
from cifar10.training.assembly import Training
from cifar10.training.console import Console
from cifar10.training.hooks import Hooks, Run
from cifar10.training.loop import Loop
from cifar10.training.results import NotFiniteStateError
from cifar10.training.tensorboard import Summaries, TensorBoard
from cifar10.training.timing import Share
from cifar10.training.watchdog import Watchdog


class Log:
    """Reports the metrics of steps, and a forecast of the time left."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._config = loop.training.config
        # With --max_hours, the number of steps left is unknown.
        self._forecast = self._config.run.max_hours is not None

    def on_step(self, step: int) -> None:
        """Reports metrics every `--log_frequency` steps; reports the time left once."""
        loop, timer = self._loop, self._loop.timer
        # Results of a call of several steps are read while the next call runs.
        if loop.training.steps_per_call > 1:
            loop.read_results(skip_newest=1)
        elif step % self._config.output.log_frequency == 0:
            loop.read_results()
        left = self._config.run.max_steps - step
        is_due = not self._forecast and timer.step_seconds() >= 2.0  # Fast ones vary.
        if is_due and timer.steps and left > 1:
            self._forecast = True
            loop.results.wait()
            duration = format_duration(left * timer.step_seconds() / timer.steps)
            loop.say(
                f"About {duration} for the {left:,} steps left. Ctrl-C saves; the same "
                "command resumes."
            )


class Validation:
    """Every `--eval_steps` steps, evaluates the model as `eval.py` would.

    The first tower's device evaluates the averaged variables. The batches are no larger
    than a tower's, so they fit in memory. Evaluation changes no variable and draws no
    random number, so the training steps stay the same. The scores are written to the
    run's folder `eval` or `eval_val`; a failing disk causes only a warning. With
    several workers, the chief evaluates while the others wait.
    """

    def __init__(self, loop: Loop) -> None:
        training = loop.training
        self._loop = loop
        self._period = training.config.checkpoints.eval_steps
        self._directory = training.train_dir
        self._scored: ScoredSet | None = None
        if self._period and training.workers.is_chief:
            self._scored = scored_set(training, training.dataset.validation_split)

    def on_start(self, run: Run) -> None:
        """Drops the scores of steps after `run.step`, because those steps run again."""
        if self._scored:
            self._logs = LogWriter(self._directory)
            events = self._events(self._scored)
            log = events / layout.METRICS
            self._scored.close()  # TensorBoard reads a new file from now on.
            self._logs.attempt(lambda: forget_later(events, log, run.step))
            keep = self._loop.training.config.checkpoints
            if keep.stop_after_no_gain and self._scored.split == "test":
                self._loop.say(
                    "Note: scores on the test split decide when to stop, so the last "
                    "score is slightly optimistic.\nWith --val_fraction 0.1, a "
                    "validation split decides instead."
                )

    def on_step(self, step: int) -> None:
        """If due, evaluates the model, records the scores and notifies the hooks."""
        if not self._period or step % self._period:
            return
        loop = self._loop
        with loop.paused_for("evaluation"):
            loop.read_results()  # Numbers that are not finite get no score.
            metrics = self._score(self._scored, step) if self._scored else {}
            loop.progress.broadcast(loop.training.towers, variables=False)
            loop.hooks.notify("on_evaluation", step, metrics)

    def on_end(self, step: int, why: str) -> None:
        """If `val` has decided, evaluates the best and the last step on `test`."""
        loop, progress = self._loop, self._loop.progress
        of_val = self._scored and self._scored.split == "val"
        has_test = "test" in loop.training.dataset.splits
        if why != "finished" or not of_val or not has_test:
            return
        try:
            scored = scored_set(loop.training, "test")
        except UsageError as error:  # The training itself has succeeded.
            loop.say(f"There are no scores on test: {error}")
            return
        found = early_stopping.ranked_scores(self._directory, progress.early_stopping)
        with loop.paused_for("evaluation"):
            if (best := next(iter(found), step)) != step:
                loaded, refused = progress.load(wanted=best, tolerate=UsageError)
                if loaded:
                    self._score(scored, best)
                for problem in refused.values():
                    loop.say(f"The best step, {best}, has no test score: {problem}")
                progress.load(wanted=step, tolerate=())
            self._score(scored, step)

    def _score(self, scored: ScoredSet, step: int) -> Mapping[str, Any]:
        towers, progress = self._loop.training.towers, self._loop.progress
        result = scored.score(towers.state.averages, towers.devices[0])
        self._logs.attempt(lambda: scored.record(self._events(scored), step, result))
        if scored is self._scored:
            best = progress.early_stopping
            score = result.scalars[best.best_by]
            progress.early_stopping = best.updated(step, score, result.sums.count)
        self._loop.say(scored.line(step, result))
        return result.scalars

    def _events(self, scored: ScoredSet) -> Path:
        return self._directory / layout.evaluation_events(scored.split)


def scored_set(
    training: Training, split: Literal["val", "test"], count: int | None = None
) -> ScoredSet:
    """Returns the `ScoredSet` of a split, or of its first `count` images."""
    layout.refuse_link(training.train_dir / layout.evaluation_events(split))
    size = min(training.config.batch.batch_size, SCORED_BATCH_SIZE)
    how = Options(eval_data=split, num_examples=count, batch_size=size)
    model, metrics = training.towers.state.model, training.config.loss.metrics
    return ScoredSet(model, training.config, training.dataset, how, own_metrics=metrics)


class Saving:
    """Saves checkpoints when they are due, at the end, and when a signal ends the run.

    A checkpoint contains the score of its step, because evaluation comes first. Without
    --checkpoint_steps or --resume, `Share` limits periodic checkpoints of one process.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._config = config = loop.training.config
        is_chosen = bool(config.given & {"checkpoint_steps", "resume"})
        self._rolls_back = config.checkpoints.on_nan == "rollback"
        # A repetition rolls back to the same steps.
        is_chosen |= self._rolls_back and config.speed.deterministic
        self._saves_all = is_chosen or config.machine.workers > 1
        self._share = Share()

    def on_start(self, run: Run) -> None:  # noqa: ARG002
        """Saves the initial values if `--on_nan rollback` may need them."""
        self._not_finite = not_finite(self._loop.training.towers.state)
        if self._rolls_back and self._loop.progress.last_saved() is None:
            self._loop.progress.save()

    def on_step(self, step: int) -> None:
        """Saves a checkpoint if due; with --keep_best, also after each evaluation."""
        keep = self._config.checkpoints
        is_due = step % keep.checkpoint_steps == 0
        is_due = is_due and (self._saves_all or self._share.is_due())
        scored = keep.keep_best and keep.eval_steps and step % keep.eval_steps == 0
        if self._loop.progress.is_over or is_due or scored:
            self._save(step)

    def on_interruption(self, step: int) -> None:
        """Saves a checkpoint of the step reached, unless there is one."""
        if step and step != self._loop.progress.last_saved():
            self._save(step)

    def _save(self, step: int) -> None:
        loop = self._loop
        with loop.paused_for("saving"):
            # Raises if a result is not finite, so that its state is never saved.
            loop.read_results()
            # Processors of several machines may round differently.
            if loop.training.workers.count == 1:
                check_replicas(loop.training.towers.states, step)
            found = not_finite(loop.training.towers.state)
            if new := [name for name in found if name not in self._not_finite]:
                what = f"these variables are not finite: {first_few(new, 3)}"
                raise NotFiniteStateError(step, what)
            with self._share.taken():
                # Before saving, so that hooks' files are complete up to the checkpoint.
                loop.hooks.notify("on_save", step)
                if path := loop.progress.save():
                    loop.hooks.notify("on_checkpoint", step, path)


def build_hooks(loop: Loop, users: Sequence[object]) -> Hooks:
    """Returns the hooks of a training run in the order in which they are called.

    The user's hooks, `users`, are called before a step is logged, evaluated and saved.
    Only the chief prints and writes.
    """
    training, of_chief = loop.training, []
    if training.workers.is_chief:
        before = Console(loop), TensorBoard(training.train_dir, loop.timer)
        of_chief = [*before, *users, Summaries(loop)]
    hooks = [Watchdog(loop), *of_chief, Log(loop), Validation(loop), Saving(loop)]
    return Hooks(hooks, users=users, how_to_resume=loop.progress.how_to_resume)
