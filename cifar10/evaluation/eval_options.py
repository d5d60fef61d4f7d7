"""The options of `python -m cifar10 eval`."""

import dataclasses
from typing import Literal

from cifar10.config import run_options
from cifar10.config.options import Count
from cifar10.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(run_options.RunOptions):
    """Which images and checkpoints to score and how.

    Attributes:
        eval_dir: directory outside the run for events and scores (default: its eval)
        eval_data: split to score, without distortions: test, train_eval (the training
            images), val if there is one, or all pictures of another --data_dir
        data_dir: directory of the data set (default: the run's)
        num_examples: number of images to score, counted from the first (default: all)
        batch_size: images scored at a time; affects speed and memory, not the result
        run_once: score the newest checkpoint and exit
        eval_interval_secs: seconds between two checks for a new checkpoint
        use_averages: use the variables' moving averages, not their last values
        test_time_augmentation: average over six views of each image: mirrored, shifted
        calibrate: score one checkpoint, fit a temperature on the val split, and exit;
            predict, serve and export use the temperature to compute probabilities
        device: device to use: auto, cpu or gpu
        json: print JSON, one object per checkpoint
    """

    eval_dir: str | None = None
    eval_data: Literal["test", "val", "train_eval", "all"] = "test"
    data_dir: str | None = None
    num_examples: Count | None = None
    batch_size: Count = run_options.SCORED_BATCH_SIZE
    run_once: bool = False
    eval_interval_secs: run_options.Seconds = 30.0
    use_averages: bool = True
    test_time_augmentation: bool = False
    calibrate: bool = False
    device: run_options.Device = "auto"
    json: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = self.eval_interval_secs
        if self.once and seconds != Options.eval_interval_secs:
            what = f"--eval_interval_secs {seconds:g} has no effect on one checkpoint"
            how = "--run_once, --step and --calibrate to follow the run"
            raise UsageError(f"{what}. Omit it, or omit {how}.")

    @property
    def once(self) -> bool:
        """Whether to score a single checkpoint instead of following the run."""
        return self.run_once or self.calibrate or self.step is not None

    @property
    def split(self) -> Literal["test", "val", "train"]:
        """The split of the data set to score."""
        if self.eval_data == "all":
            return "test"
        return "train" if self.eval_data == "train_eval" else self.eval_data
