"""Scores the checkpoints of train.py and train_multi_gpu.py.

    python eval.py --run_once

Prints `precision @ 1` and tables, and writes event files that lie over the training's
in TensorBoard and a line of JSON to eval/metrics.jsonl. Without --run_once it follows a
running training until its end, scoring each newest checkpoint once; from this the
training knows the best ones, for its --keep_best. The run's directory names the model
and the data set; a model of your own is looked for in the current folder.
"""

import argparse
import functools

from cifar10.config import cli, config
from cifar10.tools.doctor.report import explain_missing_gpus


def main() -> None:
    """Parses the flags and scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=cli.HelpFormatter, allow_abbrev=False
    )
    flag = parser.add_argument
    switch = functools.partial(flag, action=argparse.BooleanOptionalAction)
    # Where it is not given, `evaluation.Options` knows what to take.
    optional = functools.partial(flag, default=argparse.SUPPRESS)
    flag("--checkpoint_dir", default=config.TRAIN_DIR, help="directory of the run")
    optional("--eval_dir", help="directory of event files (default: eval in the run's)")
    images = "images to score, without distortions: the test or the training set"
    flag("--eval_data", default="test", choices=("test", "train_eval"), help=images)
    optional("--data_dir", help="directory of the data set (default: the run's)")
    optional(
        "--num_examples", type=int, help="number of images to score (default: all)"
    )
    at_a_time = "images scored at a time; it changes speed and memory, not the result"
    flag("--batch_size", type=int, default=500, help=at_a_time)
    switch("--run_once", default=False, help="score the newest checkpoint and end")
    looks = "seconds between two looks for a new checkpoint"
    flag("--eval_interval_secs", type=float, default=30.0, help=looks)
    averages = "score the variables' moving averages, not their last values"
    switch("--use_averages", default=True, help=averages)
    views = "average over six views of each image, mirrored and moved by a pixel"
    switch("--test_time_augmentation", default=False, help=views)
    flag("--device", default="auto", help="device to use: auto, cpu, gpu or gpu:NUMBER")
    switch("--json", default=False, help="print JSON, one object per checkpoint")
    switch("--verbose", default=False, help="show TensorFlow's own start-up messages")
    flags = vars(parser.parse_args())
    flags["as_json"] = flags.pop("json")

    cli.import_tensorflow(verbose=flags.pop("verbose"))
    # TensorFlow starts here, after the flags are checked.
    from cifar10.evaluation import evaluate

    evaluate.run(evaluate.Options(**flags))


if __name__ == "__main__":
    cli.run(main, explain_missing_gpus=explain_missing_gpus)
