"""The training loop: fetches batches, runs steps and notifies the hooks.

Hooks do all else, such as logging and saving. `periodic.py` lists them in their order.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from signal import Signals

from cifar10.errors import STOP_SIGNALS, NotFiniteError, StoppedError, UsageError
from cifar10.input.pipeline import PrefetchQueues
from cifar10.process.signals import StopSignals
from cifar10.towers import noise_scale
from cifar10.towers.rounding import ROUNDING
from cifar10.towers.stages import Stage
from cifar10.towers.towers import Batch, StepResult
from cifar10.towers.verification import verified_step
from cifar10.training.assembly import Training
from cifar10.training.hooks import Hooks, Run
from cifar10.training.progress import Progress
from cifar10.training.results import NotFinitePolicy, Results
from cifar10.training.step_failures import explaining_failures
from cifar10.training.timing import Timer


class Loop:
    """A training run in progress."""

    def __init__(self, training: Training, stop: StopSignals) -> None:
        self.training = training
        self.progress = Progress(training)
        self.results = Results(self.progress, training)
        self.timer = Timer()
        self._newest: tuple[Sequence[Batch], int] = [], 0  # The last step's.
        self._in_calls = training.steps_per_call > 1
        self._stop = stop
        self._not_finite = NotFinitePolicy(training, self.progress)
        self.hooks = Hooks()
        self._traced: set[bool] = set()  # False for plain steps, True for verified.
        self._stage = Stage(0)

    @property
    def step(self) -> int:
        """The number of steps done so far."""
        return self.progress.step

    def newest_batches(self) -> Sequence[Batch]:
        """Returns the batches of the last step."""
        return self._of_step(*self._newest)

    def run(self, hooks: Hooks) -> None:
        """Runs the remaining steps."""
        self.hooks = hooks
        training = self.training
        run = Run(0, training.train_dir, training.run.entries, training.towers.state)
        how = self.progress.how_to_resume
        with explaining_failures(training.config, how), self._ending():
            while not self.progress.is_over:
                try:
                    hooks.start(run._replace(step=self.step))
                    training.towers.broadcast([0], variables=True)  # Hooks' values too.
                    while not self.progress.is_over:
                        self.timer.enter("start")
                        self._begin_stage()
                        with training.open_batches(
                            self.progress.batch, self.step, in_calls=self._in_calls
                        ) as queues:
                            self._run_stage(queues)
                except NotFiniteError as error:
                    self.timer.enter("start")
                    self.results.clear()
                    try:
                        self._not_finite.handle(error)
                    except UsageError:
                        self.progress.log_event(error.step, "stop", str(error))
                        raise

    def say(self, text: str) -> None:
        """Passes a message on to the hooks."""
        self.hooks.notify("on_message", text)

    @contextlib.contextmanager
    def paused_for(self, part: str) -> Iterator[None]:
        """Waits for all steps, then counts the time in the `with` block as `part`."""
        with self.timer.during("training"):
            self.results.wait()
        with self.timer.during(part):
            yield

    def read_results(self, *, skip_newest: int = 0) -> None:
        """Reads new results and logs steps; raises if a result is not finite.

        Leaves out the results of the `skip_newest` newest calls.
        """
        period, rate = self.training.config.output.log_frequency, None
        images = self.training.config.global_batch_size
        with self.timer.during("training"):
            for step, metrics in self.results.read(skip_newest=skip_newest):
                if step % period:
                    continue
                if rate is None:
                    rate = self.timer.rate() * images
                metrics["examples_per_sec"] = rate
                scale, is_bound = noise_scale.estimate(self.progress.noise_averages)
                if scale > 0 and not is_bound:
                    metrics[noise_scale.NAME] = scale * images
                if self.training.config.checkpoints.on_nan == "skip":
                    metrics["skipped_steps"] = self.progress.skipped_steps
                with self.timer.during("summaries"):
                    self.hooks.notify("on_log", step, metrics)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        why = "failed"
        try:
            yield
            why = "finished"
        except StoppedError:
            why = "stopped"
            raise
        finally:
            self.hooks.end(self.step, why)

    def _begin_stage(self) -> None:
        """When a new stage begins, freezes its layers and has the step traced again."""
        training = self.training
        stage = training.config.stage(self.step)
        if self.step and training.config.stage(self.step - 1).frozen != stage.frozen:
            self.read_results()  # Those of the stage before.
            self.progress.noise_averages = {}
        if self._stage != stage:
            self._stage = stage
            self._traced.clear()
            training.towers.freeze(stage.frozen)

    def _run_stage(self, queues: PrefetchQueues) -> None:
        training = self.training
        # Until a call is traced, filling the queues and waiting count to the start.
        self.timer.enter("training" if self._traced else "start")
        while self.step < self._stage.end and not self.progress.is_over:
            requests = [self._stop.requested == number for number in STOP_SIGNALS]
            requests.append(self.progress.has_no_time)
            *stops, self.progress.is_time_up = training.towers.agree(requests)
            for number in itertools.compress(STOP_SIGNALS, stops):
                self._end_early(number)
            count = training.config.steps_of_call(self.step, training.steps_per_call)
            with self.timer.during("input" if self._traced else "start"):
                batches = queues.get()
            if self.step == 0:
                with self.timer.during("start"):
                    graph = training.towers.trace(self._of_step(batches, 0)).graph
                    self.hooks.notify("on_graph", graph)
            self._call(batches, count)
            self.hooks.notify("on_step", self.step)

    def _of_step(self, batches: Sequence[Batch], step: int) -> Sequence[Batch]:
        """Returns the batches of one of a call's steps, counted from 0."""
        if not self._in_calls:
            return batches
        return [(inputs[step], labels[step]) for inputs, labels in batches]

    def _call(self, batches: Sequence[Batch], count: int) -> None:
        """Runs the `count` steps of a call, and adds their result to `results`."""
        period = self.training.config.checkpoints.verify_steps
        is_verified = period is not None and (self.step + 1) % period == 0
        if is_verified in self._traced:
            result = self._run(batches, count, is_verified)
            self.timer.steps += count
        else:
            with self.paused_for("start"):
                result = self._run(batches, count, is_verified)
                result.tower_losses.numpy()
        self._traced.add(is_verified)
        self.timer.enter("training")
        self.progress.step += count
        self.results.add(self.step, result)
        self._newest = batches, count - 1

    def _run(self, batches: Sequence[Batch], count: int, verify: bool) -> StepResult:
        config, towers = self.training.config, self.training.towers
        if verify:
            are_alike = len(self.training.placement.gpu_names) < 2
            exact = config.speed.deterministic and are_alike
            bound = 0.0 if exact else ROUNDING[config.network.precision]
            return verified_step(towers, self._of_step(batches, 0), bound)
        return towers.steps(batches, count) if self._in_calls else towers.step(batches)

    def _end_early(self, signal: Signals) -> None:
        """Saves a checkpoint of the step reached, and raises `StoppedError`."""
        # Every process reads, so that all roll back together if a loss is not finite.
        self.read_results()
        self.hooks.notify("on_interruption", self.step)
        what = f"stopped by {signal.name} after step {self.step}"
        raise StoppedError(f"{what}.\n{self.progress.how_to_resume()}", 128 + signal)
