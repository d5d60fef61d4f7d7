"""Scores one checkpoint of a run, or each new checkpoint until training ends.

Only the run's directory is needed: its `config.json` names the model and the data set.
"""

import os
from typing import Any

from cifar10.config import layout
from cifar10.errors import UsageError, say
from cifar10.evaluation import metrics
from cifar10.evaluation.eval_options import Options
from cifar10.evaluation.scored_set import Result, ScoredSet
from cifar10.follower.followed_run import FollowedRun
from cifar10.input import datasets
from cifar10.run_directory import logs, temperature
from cifar10.towers import devices
from cifar10.trained_model import TrainedModel


class Evaluator(FollowedRun):
    """Follows a run and scores its checkpoints on a set of images."""

    def __init__(self, options: Options) -> None:
        device = devices.place_evaluation(options.device)
        how = {"use_averages": options.use_averages, "trust_model": options.trust_model}
        directory = layout.absolute_path(options.train_dir)
        super().__init__(directory, device, wanted=options.step, **how)
        self._options = options

    def _prepare(self, model: TrainedModel) -> None:
        self._trained, options = model, self._options
        whole = options.eval_data == "all"
        dataset = datasets.find_again(model.run, options.data_dir, whole=whole)
        is_own = datasets.is_of_run(dataset, model.run)
        folder = layout.evaluation_events(options.split)
        folder += "" if options.use_averages else "_raw"
        folder += "_augmented" if options.test_time_augmentation else ""
        of = dataset, model.run
        if not is_own:
            folder += f"_on_{dataset.directory and dataset.directory.name}"
            datasets.say_seen(*of, options.split, options.num_examples)
            if options.calibrate:
                why = "an audit checks temperatures only by the run's own data, not by"
                what = f"--calibrate: {why} {dataset.description}"
                raise UsageError(f"{what}. Omit --data_dir, or name the run's.")
        if not (is_own or options.eval_dir):
            is_part = dataset.division and not datasets.has_training_images(*of)
            how = " --eval_data all scores all of it." if is_part else ""
            what = f"{dataset.description} is not the run's data"
            say(f"Note: {what}. Scores go to {folder} instead.{how}")
        self._events = self.directory / folder
        if options.eval_dir:
            own, self._events = self._events, layout.absolute_path(options.eval_dir)
            if os.path.realpath(self._events) != os.path.realpath(own):
                layout.refuse_own_folder(self._events, "--eval_dir")
        else:
            layout.refuse_link(self._events)
        self._scored = ScoredSet(model.model, model.run.config, dataset, options)
        if options.calibrate:
            layout.refuse_link(self.directory / layout.CHECKPOINTS)
            model.is_to_calibrate = True
            on_val = Options(eval_data="val", batch_size=options.batch_size)
            self._val = ScoredSet(model.model, model.run.config, dataset, on_val)
        if not (options.once or options.json):
            print(f"Scoring {self._scored.subject}", flush=True)

    def score(self, step: int) -> None:
        """Scores the loaded checkpoint, prints the scores and records them."""
        options, trained, device = self._options, self._trained, self._device
        if options.calibrate:
            found = self._val.score(trained.trainable, device).outcomes
            trained.calibrate(temperature.fit(found.logits, found.labels))
        result = self._scored.score(trained.trainable, device, trained.temperature)
        self._scored.record(self._events, step, result)
        text = self._scored.line(step, result)
        if options.json:
            text = logs.as_json(self._as_json(step, result))
        elif options.once:
            names = self._scored.dataset.class_names
            text += f"\n{metrics.report(self._scored.subject, *result[:2], names)}"
        print(text, flush=True)

    def _as_json(self, step: int, result: Result) -> dict[str, Any]:
        sums, dataset = result.sums, self._scored.dataset
        return {
            "step": step,
            "data": dataset.name,
            "data_is_real": dataset.is_real,
            "eval_data": self._options.eval_data,
            "use_averages": self._options.use_averages,
            "test_time_augmentation": self._options.test_time_augmentation,
            "simulated": self._trained.run.facts.simulated,
            "num_examples": sums.count,
            "correct": sums.correct,
            **result.scalars,
            "per_class": sums.per_class(dataset.class_names),
            "confusion": sums.confusion.tolist(),
        }
