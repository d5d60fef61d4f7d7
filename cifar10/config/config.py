"""The configuration of a run: one frozen dataclass, from which `flags.py` makes flags.

A field is a name, a type, a default and a help text in one place. `config.json` in the
run directory is this class written down, with the versions that ran it.
"""

from __future__ import annotations

import dataclasses

from cifar10.config import contradictions
from cifar10.config.options import check, option

TRAIN_DIR = "/tmp/cifar10_train"  # noqa: S108 - the tutorial's default.

# Seeds are 32-bit where the shuffled order is drawn.
_LARGEST_SEED = 2**31 - 1
# Far above what makes sense; a larger number is a slip of the finger.
_MOST_TOWERS = 64
_LARGEST_RATE = 1e30
_MOST_STEPS_PER_CALL = 100  # Their batches lie in memory together.
_MOST_BATCHES = 4096


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a training run depends on; see each field's help."""

    recipe: str = option(
        "tutorial",
        "defaults of the other flags: `tutorial`, `fast` (94 % in minutes), or a file "
        "like those in cifar10/config/recipes",
    )
    num_gpus: int | None = option(
        None,
        "towers of this machine, one per GPU; without a GPU they are simulated on the "
        "CPU (default: all GPUs found, else 1 tower on the CPU)",
        minimum=1,
        maximum=_MOST_TOWERS,
    )
    batch_size: int = option(
        128,
        "images per tower and batch; times towers and --accumulate: the global batch",
        minimum=1,
    )
    global_batch_size: int | None = option(
        None,
        "images per step of all towers (default: --batch_size x towers x --accumulate)",
        minimum=1,
    )
    accumulate: int = option(
        1,
        "batches that a tower computes before an update; they count as if each had a "
        "tower of its own",
        minimum=1,
        maximum=_MOST_BATCHES,
    )
    sections: str | None = option(
        None,
        "less memory for more time, in parts of the model that a tower computes one "
        "after another: how many, the layers that they begin with (conv2,local3), or "
        "auto for the fewest that fit (default: those of the model's own code)",
    )
    section_cache: str = option(
        "device",
        "where what one section gives to another waits: on its tower's device, or in "
        "the host's memory",
        choices=("device", "host"),
    )
    memory_limit: float | None = option(
        None,
        "GB of a GPU or the CPU's memory for --sections auto (default: 85 % of free)",
        minimum=1e-3,
    )
    max_steps: int = option(
        100_000,
        "step at which the training ends; the steps before a resume count",
        minimum=1,
    )
    train_dir: str = option(
        TRAIN_DIR,
        "directory of the run: checkpoints, event files, metrics.jsonl; "
        "starting again with the same one resumes it",
    )
    fresh: bool = option(
        False, "begin anew: an earlier run in --train_dir is moved aside, not deleted"
    )
    model: str = option(
        "tutorial",
        "`tutorial`, `airbench`, `resnet`, or module:function for one of your own that "
        "takes (image_shape, classes) and returns a Keras model",
        determines_result=True,
    )
    depth: int | None = option(
        None,
        "blocks, of a model that takes a depth, as resnet (default: the model's)",
        minimum=1,
        determines_result=True,
    )
    width: int | None = option(
        None,
        "filters of the first blocks, of a model that takes a width (default: its own)",
        minimum=1,
        determines_result=True,
    )
    data: str = option(
        "auto",
        "data set to train on; auto: CIFAR-10 from --data_dir, else downloaded, else a "
        "generated stand-in",
        choices=("auto", "cifar10", "cifar100", "synthetic"),
        determines_result=True,
    )
    data_dir: str | None = option(
        None,
        "folder with the .bin files, with cifar-10-batches-bin/ or with the archive "
        "(default: $CIFAR10_DATA_DIR, else ~/.cache/cifar10)",
    )
    data_url: str | None = option(
        None,
        "URL of the archive, or several in the order to try, separated by commas "
        "(default: the data set's own site)",
    )
    distortions: str = option(
        "tutorial",
        "what is done to training images; tutorial: crop, flip, brightness, contrast; "
        "flip_translate: whole images, mirrored every other epoch, moved by 2 pixels",
        choices=("tutorial", "crop_flip", "flip_translate", "none"),
        determines_result=True,
    )
    label_smoothing: float = option(
        0.0,
        "part of each label that is spread evenly over all classes",
        minimum=0.0,
        maximum=1.0,
        determines_result=True,
    )
    precision: str = option(
        "auto",
        "type of convolutions and matrix products; variables and loss stay in float32; "
        "auto: bfloat16 where the device has it natively, else float32; float64 is for "
        "proofs, not for speed",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
        determines_result=True,
    )
    use_fp16: bool = option(False, "the tutorial's name for --precision float16")
    optimizer: str = option(
        "sgd",
        "rule of the update; muon: airbench's, with its own rates for biases and head",
        choices=("sgd", "muon"),
        determines_result=True,
    )
    momentum: float = option(
        0.0,
        "momentum of the gradient descent",
        minimum=0.0,
        maximum=1.0,
        determines_result=True,
    )
    learning_rate: float = option(
        0.1,
        "learning rate of the first epochs",
        minimum=0.0,
        maximum=_LARGEST_RATE,
        determines_result=True,
    )
    schedule: str = option(
        "staircase",
        "how the learning rate falls; staircase: times 0.1 every --epochs_per_decay; "
        "linear: to zero at --max_steps",
        choices=("staircase", "linear"),
        determines_result=True,
    )
    epochs_per_decay: float = option(
        350.0,
        "epochs after which the staircase falls, again and again",
        minimum=1e-6,
        determines_result=True,
    )
    warmup_epochs: float = option(
        0.0,
        "epochs in which the learning rate rises evenly from zero",
        minimum=0.0,
        determines_result=True,
    )
    clip_norm: float | None = option(
        None,
        "norm to which the averaged gradients are scaled down together if theirs is "
        "larger (default: not at all)",
        minimum=1e-12,
        determines_result=True,
    )
    moving_average_decay: float = option(
        0.9999,
        "largest decay of the variables' averages, which evaluation uses; 0: none",
        minimum=0.0,
        maximum=1.0,
        determines_result=True,
    )
    seed: int = option(
        0,
        "seed of the initial values, the order of the images, their distortions and "
        "dropout",
        minimum=0,
        maximum=_LARGEST_SEED,
        determines_result=True,
    )
    deterministic: bool = option(
        False,
        "repeat bit for bit on the same machine, without oneDNN and TF32; slower",
        determines_result=True,
    )
    checkpoint_steps: int = option(1000, "steps between two checkpoints", minimum=1)
    keep_checkpoints: int = option(
        5, "checkpoints to keep; older ones are deleted", minimum=1
    )
    keep_best: int = option(
        0, "checkpoints to keep besides: those that eval.py scored highest", minimum=0
    )
    keep_every_hours: float | None = option(
        None,
        "hours of training after which one checkpoint is kept for good (default: none)",
        minimum=1e-3,
    )
    on_save_error: str = option(
        "stop",
        "when a checkpoint cannot be written: stop, or go on and try at the next one",
        choices=("stop", "continue"),
    )
    on_nan: str = option(
        "stop",
        "when a loss or gradient is not finite: stop; skip that update; rollback: go "
        "on from the last checkpoint, without the batches since",
        choices=("stop", "skip", "rollback"),
    )
    log_frequency: int = option(
        10, "steps between two lines on the console and in metrics.jsonl", minimum=1
    )
    summary_steps: int = option(
        100, "steps between two sets of histograms and images in TensorBoard", minimum=1
    )
    steps_per_call: int = option(
        1,
        "steps that run without returning to Python, where nothing is logged or saved "
        "in between",
        minimum=1,
        maximum=_MOST_STEPS_PER_CALL,
    )
    variable_update: str = option(
        "auto",
        "towers: all of a machine share its variables; mirrored: each has its own, and "
        "gradients meet by all-reduce (NCCL on GPUs); auto: mirrored on the GPUs of "
        "several machines, else towers",
        choices=("auto", "towers", "mirrored"),
    )
    local_workers: int | None = option(
        None,
        "workers to start on this machine, as if each were one (default: this is it)",
        minimum=1,
        maximum=_MOST_TOWERS,
    )
    max_restarts: int = option(
        0,
        "times to start again, from the last checkpoint, what was killed or has lost "
        "another worker",
        minimum=0,
    )
    worker_timeout: float = option(
        300.0, "seconds to wait at the start for the other workers", minimum=1.0
    )
    variable_device: str = option(
        "auto",
        "where the variables live and gradients meet; auto: with a single tower on a "
        "GPU beside it, else on the CPU",
        choices=("auto", "cpu", "gpu"),
    )
    input_device: str = option(
        "auto",
        "where images are distorted; gpu: the data set lies in each GPU's memory; "
        "auto: there if it fits",
        choices=("auto", "cpu", "gpu"),
    )
    xla: bool = option(
        False, "compile each tower with XLA; for GPUs", determines_result=True
    )
    report_bottleneck: bool = option(
        False, "at the end, divide a step's time into input, towers, averaging, update"
    )
    profile: str | None = option(
        None,
        "START:STOP, steps of which to write a profile for TensorBoard (default: none)",
    )
    log_device_placement: bool = option(
        False, "print on which device each operation of the step runs"
    )
    verbose: bool = option(False, "show TensorFlow's own start-up messages")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check(field, getattr(self, field.name))
        contradictions.refuse(self)
