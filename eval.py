"""Scores the checkpoints of train.py and train_multi_gpu.py.

    python eval.py --run_once

Prints `precision @ 1` and tables, and writes event files that lie over the training's
in TensorBoard. Without --run_once it follows a running training until its end, scoring
each newest checkpoint once. The model and the data set come from the run's directory; a
model of your own is looked for in the current one.
"""

import argparse
from typing import Any

from cifar10 import cli, config


def main() -> None:
    """Parses the flags and scores."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def flag(name: str, help_text: str, **options: Any) -> None:
        if "default:" not in help_text:
            help_text += " (default: %(default)s)"
        parser.add_argument(f"--{name}", help=help_text, **options)

    def switch(name: str, help_text: str, *, default: bool) -> None:
        on_or_off = argparse.BooleanOptionalAction
        flag(name, help_text, action=on_or_off, default=default)

    flag(
        "checkpoint_dir",
        "directory of the run to score, the training's --train_dir",
        default=config.TRAIN_DIR,
        metavar="S",
    )
    flag(
        "eval_dir",
        "directory for the event files (default: eval, eval_train, eval_raw or "
        "eval_train_raw in the run's)",
        metavar="S",
    )
    flag(
        "eval_data",
        "images to score: the test set, or the training set without distortions",
        default="test",
        choices=("test", "train_eval"),
    )
    flag(
        "data_dir",
        "directory of the data set (default: the one that the run used)",
        metavar="S",
    )
    flag(
        "num_examples",
        "number of images to score, the first of the set (default: all)",
        type=int,
        metavar="N",
    )
    flag(
        "batch_size",
        "images scored at a time; it changes speed and memory, not the result",
        type=int,
        default=500,
        metavar="N",
    )
    switch(
        "run_once",
        "score the newest checkpoint and end, instead of following the training",
        default=False,
    )
    flag(
        "eval_interval_secs",
        "seconds between two looks for a new checkpoint",
        type=float,
        default=30.0,
        metavar="X",
    )
    switch(
        "use_averages",
        "score the moving averages of the variables, not their last values",
        default=True,
    )
    flag(
        "device",
        "device to compute on: cpu, gpu, gpu:NUMBER counted from 0, or auto, the first "
        "GPU if there is one",
        default="auto",
        metavar="S",
    )
    switch(
        "json",
        "print one JSON object per checkpoint instead of text and tables",
        default=False,
    )
    switch("verbose", "show TensorFlow's own start-up messages", default=False)
    flags = vars(parser.parse_args())
    flags["as_json"] = flags.pop("json")

    cli.import_tensorflow(verbose=flags.pop("verbose"))
    # TensorFlow starts here, after the flags are checked.
    from cifar10 import evaluation

    evaluation.run(evaluation.Options(**flags))


if __name__ == "__main__":
    cli.run(main)
