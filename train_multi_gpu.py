"""Trains CIFAR-10 on several GPUs by synchronous data parallelism.

    python train_multi_gpu.py --num_gpus 4

One tower per GPU; without a GPU the towers are simulated on the CPU. The run goes to
--train_dir (/tmp/cifar10_train): checkpoints, TensorBoard event files, metrics.jsonl.
Give the same command again to go on after a stop. Then:

    python eval.py --run_once
    tensorboard --logdir /tmp/cifar10_train
"""

import argparse

from cifar10 import cli, config


def main() -> None:
    """Parses the flags and trains."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags = config.from_flags(parser)
    cli.import_tensorflow(verbose=flags.verbose, deterministic=flags.deterministic)
    from cifar10 import training  # TensorFlow starts here, after the flags are checked.

    training.train(flags)


if __name__ == "__main__":
    cli.run(main)
