"""`python -m cifar10 eval`, which is the script eval.py too."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

from cifar10.config import flags, layout, run_options
from cifar10.config.options import Count, Form
from cifar10.process import entry_point
from cifar10.run_directory import restoring

HELP = "score checkpoints, once or as they appear"
DESCRIPTION = """Scores the checkpoints of a run, as the script eval.py does.

    python -m cifar10 eval --run_once

Prints `precision @ 1` with its 95 % confidence interval and tables, and writes
event files, whose curves TensorBoard draws over the training's, and a line of
JSON to eval/metrics.jsonl. Without --run_once or --step it follows a running
training until its end, scoring each newest checkpoint once and printing a line
for each; these scores tell the training which checkpoints --keep_best keeps.
Checkpoints that the training scores itself (--eval_steps) are skipped. The
run's directory names the model and the data set; a model of your own is looked
for in the current folder.
"""

_Counts = Annotated[
    str,
    Form(
        r"[1-9]\d{0,11}(,[1-9]\d{0,11})*",
        "a whole number from 1 on, or several, as in 3,10",
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(run_options.RunOptions):
    """Which images and checkpoints to score and how.

    Attributes:
        eval_dir: directory of event files (default: eval in the run's)
        eval_data: images to score, without distortions: the test part, val where there
            is one, or the training part
        data_dir: directory of the data set (default: the run's)
        num_examples: number of images to score, the first ones (default: all)
        batch_size: images scored at a time; it changes speed and memory, not the result
        run_once: score the newest checkpoint and end
        eval_interval_secs: seconds between two looks for a new checkpoint
        use_averages: use the variables' moving averages, not their last values
        test_time_augmentation: average over six views of each image, mirrored and moved
            by a pixel
        calibrate: fit a temperature on the val part, with which predict, serve and
            export compute probabilities; scores one checkpoint and ends, as --run_once
        top_k: K, or several as 3,10: also the part of the images whose class has one of
            the K largest logits (default: 1 and 5)
        device: device to use: auto, cpu, gpu or gpu:NUMBER
        json: print JSON, one object per checkpoint
    """

    eval_dir: str | None = None
    eval_data: Literal["test", "val", "train_eval"] = "test"
    data_dir: str | None = None
    num_examples: Count | None = None
    batch_size: Count = run_options.SCORED_BATCH_SIZE
    run_once: bool = False
    eval_interval_secs: run_options.Seconds = 30.0
    use_averages: bool = True
    test_time_augmentation: bool = False
    calibrate: bool = False
    top_k: _Counts | None = None
    device: str = "auto"
    json: bool = False

    @property
    def once(self) -> bool:
        """Whether one checkpoint is scored, in place of each as it appears."""
        return self.run_once or self.calibrate or self.step is not None

    @property
    def split(self) -> Literal["test", "val", "train"]:
        """The part of the data set that is scored."""
        return "train" if self.eval_data == "train_eval" else self.eval_data

    @property
    def ks(self) -> list[int]:
        """The numbers that `--top_k` names."""
        return [int(name) for name in self.top_k.split(",")] if self.top_k else []

    @property
    def curve(self) -> str:
        """The folder of the event files; each kind of evaluation has its own."""
        name = layout.evaluation_events(self.split)
        name += "" if self.use_averages else "_raw"
        return name + ("_augmented" if self.test_time_augmentation else "")


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command with the words of its command line; returns its exit code."""
    parser.usage = "%(prog)s [FLAGS]"  # All of them are too wide for a terminal.
    flags.add_flags(parser, Options)
    options = Options(**flags.parse(parser, words))
    if options.once:
        restoring.check_usable(options.train_dir, options.step, options.trust_model)
    entry_point.import_tensorflow()
    from cifar10.evaluation import evaluate

    evaluate.score_checkpoints(options)
    return 0
