"""Scores the checkpoints of train.py and train_multi_gpu.py.

    python eval.py --run_once

Prints `precision @ 1` and tables, and writes event files that lie over the training's
in TensorBoard. Without --run_once it follows a running training until its end, scoring
each newest checkpoint once. The model and the data set come from the run's directory.
"""

import argparse

from cifar10 import cli, config


def main() -> None:
    """Parses the flags and scores."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    flag = parser.add_argument
    boolean = argparse.BooleanOptionalAction
    flag("--checkpoint_dir", default=config.TRAIN_DIR, help="directory of the run")
    flag("--eval_dir", help="of the event files; if not given, eval/ in the run's")
    flag("--eval_data", default="test", choices=("test", "train_eval"), help="images")
    flag("--data_dir", help="of the data set; if not given, the one the run used")
    flag("--num_examples", type=int, help="images to score; if not given, all")
    flag("--batch_size", type=int, default=500, help="changes memory, not the result")
    flag("--run_once", action=boolean, default=False, help="score the newest and end")
    flag("--eval_interval_secs", type=float, default=30.0, help="between two looks")
    flag("--use_averages", action=boolean, default=True, help="or the raw variables")
    flag(
        "--test_time_augmentation",
        action=boolean,
        default=False,
        help="average over six views of each image: mirrored, moved by a pixel",
    )
    flag("--device", default="auto", help="auto, cpu, gpu or gpu:NUMBER")
    flag("--json", action=boolean, default=False, help="one JSON object a checkpoint")
    flag("--verbose", action=boolean, default=False, help="TensorFlow's own messages")
    flags = vars(parser.parse_args())
    flags["as_json"] = flags.pop("json")

    cli.import_tensorflow(verbose=flags.pop("verbose"))
    from cifar10 import (
        evaluation,
    )  # TensorFlow starts here, after the flags are checked.

    evaluation.run(evaluation.Options(**flags))


if __name__ == "__main__":
    cli.run(main)
