"""Every field of a configuration, declared once, in sections.

A declaration is the only place that defines a field: `flags.py` turns it into a flag,
recipes may set it, and its scope says where its value must be equal. Functions that
build a part of a training take the section that they depend on.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from cifar10.config import (
    augmentation as augmentations,
    data_flag,
)
from cifar10.config.options import LARGEST_NUMBER, Scope, check, is_count, option
from cifar10.errors import UsageError
from cifar10.models.registry import ARCHITECTURES, describe_option
from cifar10.towers import optimizers
from cifar10.towers.class_weights import check_class_weights

TRAIN_DIR = "runs/cifar10_train"
TRAIN_DIR_ALIAS = "checkpoint_dir"  # eval.py of the tutorial calls it so.

# Seeds are 32-bit where the shuffled order is drawn.
_LARGEST_SEED = 2**31 - 1
# Far above any sensible number; a larger one is a typing error.
_MOST_TOWERS = 64
_MOST_STEPS_PER_CALL = 100  # Their batches lie in memory together.
_MOST_BATCHES = 4096
_LONGEST_WAIT = 1e6  # Seconds: more than a week. Timers take no 1e18.
_MOST_IMAGES = 10**6  # TensorFlow counts the elements of a tensor in 32 bits, at times.
_MOST_BLOCKS = 1000

# Distortions of training images, implemented in `input/distortions.py`.
DISTORTIONS = (
    "tutorial",
    "crop_flip",
    "flip_translate",
    "flip_translate_far",
    "random_resized_crop",
    "none",
)
# Schedules of the learning rate that end at --max_steps; the staircase does not.
ENDING_SCHEDULES = ("linear", "cosine", "one_cycle")
PRECISIONS = ("float32", "bfloat16", "float16", "float64")


class _Section:
    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(_Section):
    """The length of a training and its directory."""

    recipe: str = option(
        "tutorial",
        "defaults of the other flags: `tutorial`, `fast` (94 % in minutes), "
        "`accurate`, `resnet`, `pictures`, `finetune`, or a file like those in "
        "cifar10/config/recipes (default: that of the model, the data or "
        "--initial_weights)",
        scope=Scope.WORKER,
        in_recipes=False,
        affects_memory=True,
    )
    train_dir: str = option(
        TRAIN_DIR,
        "directory of the run: checkpoints, event files, metrics.jsonl; "
        "starting again with the same one resumes it",
        alias=TRAIN_DIR_ALIAS,
        scope=Scope.WORKER,
        in_recipes=False,
    )
    fresh: bool = option(
        False,
        "start over: an earlier run in --train_dir is moved aside, not deleted",
        scope=Scope.WORKER,
        in_recipes=False,
    )
    max_steps: int = option(
        100_000,
        "step at which the training ends; the steps before a resume count",
        minimum=1,
        result_if=("schedule", ENDING_SCHEDULES),
        for_evaluation=True,
    )
    seed: int = option(
        0,
        "seed of the initial values, the order of the images, their distortions and "
        "dropout",
        minimum=0,
        maximum=_LARGEST_SEED,
        scope=Scope.RESULT,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Towers(_Section):
    """How many towers there are, and the batch of each."""

    num_gpus: int | None = option(
        None,
        "towers of this machine, one per GPU; without a GPU they are simulated on the "
        "CPU (default: all GPUs found, else 1 tower on the CPU)",
        minimum=1,
        maximum=_MOST_TOWERS,
        in_recipes=False,
        affects_memory=True,
    )
    split_gpu: int = option(
        1,
        "towers on each GPU, which share its memory and are not faster: to try several "
        "on the one there is, as --num_gpus 4 --split_gpu 4",
        minimum=1,
        maximum=_MOST_TOWERS,
        in_recipes=False,
        affects_memory=True,
    )
    batch_size: int = option(
        128,
        "images per tower and batch; times towers and --accumulate: the global batch",
        minimum=1,
        maximum=_MOST_IMAGES,
        # Batch norm and dropout see the images of one batch.
        result_if=("stateful_model", (True,)),
        affects_memory=True,
    )
    global_batch_size: int | None = option(
        None,
        "images per step of all towers (default: --batch_size x towers x --accumulate)",
        minimum=1,
        scope=Scope.RESULT,
        affects_memory=True,
        for_evaluation=True,
    )
    accumulate: int = option(
        1,
        "batches that a tower computes before an update; they count as if each had a "
        "tower of its own",
        minimum=1,
        maximum=_MOST_BATCHES,
        affects_memory=True,
    )
    variable_update: str = option(
        "auto",
        "towers: all of a machine share its variables; mirrored: each has its own, and "
        "gradients meet by all-reduce (NCCL on GPUs); auto: mirrored on the GPUs of "
        "several machines, else towers",
        choices=("auto", "towers", "mirrored"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network(_Section):
    """The model, and the numbers that it computes with."""

    model: str = option(
        "tutorial",
        f"{', '.join(f'`{name}`' for name in ARCHITECTURES)}, applications:NAME for "
        "one of Keras's, or module:function for one of your own that takes "
        "(image_shape, classes) and returns a Keras model",
        scope=Scope.RESULT,
        affects_memory=True,
        for_evaluation=True,
    )
    depth: int | None = option(
        None,
        f"depth of a model ({describe_option('depth')}; default: the model's)",
        minimum=1,
        maximum=_MOST_BLOCKS,
        affects_memory=True,
        scope=Scope.RESULT,
    )
    width: int | None = option(
        None,
        f"width of a model ({describe_option('width')}; default: the model's)",
        minimum=1,
        affects_memory=True,
        scope=Scope.RESULT,
    )
    precision: str = option(
        "auto",
        "type of convolutions and matrix products; variables and loss stay in float32; "
        "auto: bfloat16 where the device has it natively, else float32; float64 is for "
        "proofs, not for speed",
        choices=("auto", *PRECISIONS),
        scope=Scope.RESULT,
        affects_memory=True,
        for_evaluation=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset(_Section):
    """The images and labels to train on."""

    data: str = option(
        "auto",
        "what to train on: the path of your pictures, with a folder for each class, or "
        "of an .npz; cifar10, cifar100, synthetic, tfds:NAME; auto: CIFAR-10 from "
        "--data_dir, else downloaded, else a generated stand-in",
        scope=Scope.RESULT,
        affects_memory=True,
        for_evaluation=True,
    )
    data_dir: str | None = option(
        None,
        "folder with the .bin files, with cifar-10-batches-bin/ or with the archive "
        "(default: $CIFAR10_DATA_DIR, else ~/.cache/cifar10)",
        scope=Scope.WORKER,
        in_recipes=False,
        for_evaluation=True,
    )
    data_url: str | None = option(
        None,
        "URL of the archive, or several in the order to try, separated by commas "
        "(default: the data set's own site)",
        scope=Scope.WORKER,
        for_evaluation=True,
    )
    image_size: int | None = option(
        None,
        "side of your pictures: the shorter side is resized, then the centre cut "
        "(default: 64)",
        minimum=8,
        maximum=1024,
        affects_memory=True,
        scope=Scope.RESULT,
    )
    validation_fraction: float = option(
        0.1,
        "part of your pictures to score on, if they have no folder test or val",
        minimum=0.0,
        maximum=0.9,
        scope=Scope.RESULT,
    )
    max_bad_images: float = option(
        0.01,
        "part of your pictures that may be damaged, and is left out; more is an error",
        minimum=0.0,
        maximum=1.0,
        scope=Scope.WORKER,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        data_flag.check(self.data, self.image_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(_Section):
    """Distortions and augmentation of training images."""

    distortions: str = option(
        "tutorial",
        "what is done to training images; tutorial: crop, flip, brightness, contrast; "
        "crop_flip: the first two; flip_translate: whole images, mirrored every other "
        "epoch, moved by a 16th; flip_translate_far: by an 8th; random_resized_crop: "
        "crops of 8 to 100 % enlarged to the whole size, and flip; none: whole images, "
        "as they are",
        choices=DISTORTIONS,
        affects_memory=True,
        for_evaluation=True,
        scope=Scope.RESULT,
    )
    augmentation: Mapping | None = option(
        None,
        "what else is done to training images, as in config/augmentation.py",
        in_flags=False,
        scope=Scope.RESULT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        augmentations.resolve(self.augmentation)  # Refuses an invalid table.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(_Section):
    """Labels and classes in the loss."""

    label_smoothing: float = option(
        0.0,
        "part of each label that is spread evenly over all classes",
        minimum=0.0,
        maximum=1.0,
        scope=Scope.RESULT,
    )
    class_weights: str | Mapping | Sequence | None = option(
        None,
        "how much each class counts in the loss, as in towers/class_weights.py",
        in_flags=False,
        scope=Scope.RESULT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_class_weights(self.class_weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update(_Section):
    """The rule of the update: optimizer, learning rate, averages, stages."""

    optimizer: str = option(
        "sgd",
        "rule of the update: sgd; muon, airbench's, with its own rates for biases and "
        f"head; or Keras's {', '.join(optimizers.KERAS_NAMES)}",
        affects_memory=True,
        scope=Scope.RESULT,
    )
    optimizer_arguments: Mapping | None = option(
        None,
        "arguments of Keras's, as in towers/optimizers.py",
        in_flags=False,
        scope=Scope.RESULT,
    )
    momentum: float = option(
        0.0,
        f"momentum, for {', '.join(optimizers.WITH_MOMENTUM)} only",
        minimum=0.0,
        maximum=1.0,
        affects_memory=True,
        scope=Scope.RESULT,
    )
    learning_rate: float = option(
        0.1,
        "highest learning rate, from which it falls",
        minimum=0.0,
        maximum=LARGEST_NUMBER,
        scope=Scope.RESULT,
    )
    schedule: str = option(
        "staircase",
        "how the learning rate falls; staircase: times 0.1 every --epochs_per_decay; "
        "linear, cosine: to zero at --max_steps; one_cycle: rises first, ends there",
        choices=("staircase", *ENDING_SCHEDULES),
        scope=Scope.RESULT,
    )
    epochs_per_decay: float = option(
        350.0,
        "epochs after which the staircase falls each time",
        minimum=1e-6,
        scope=Scope.RESULT,
    )
    warmup_epochs: float = option(
        0.0,
        "epochs in which the learning rate rises evenly from zero",
        minimum=0.0,
        scope=Scope.RESULT,
    )
    clip_norm: float | None = option(
        None,
        "norm to which the averaged gradients are scaled down together if theirs is "
        "larger (default: not at all)",
        minimum=1e-12,
        affects_memory=True,
        scope=Scope.RESULT,
    )
    moving_average_decay: float = option(
        0.9999,
        "largest decay of the variables' averages, which evaluation uses; 0: none",
        minimum=0.0,
        maximum=1.0,
        scope=Scope.RESULT,
    )
    stages: Sequence | None = option(
        None,
        "parts of the training, as in towers/stages.py",
        in_flags=False,
        scope=Scope.RESULT,
    )

    def __post_init__(self) -> None:
        # As in Keras, the case of its name does not matter: one spelling is recorded.
        object.__setattr__(self, "optimizer", self.optimizer.lower())
        super().__post_init__()
        optimizers.check_optimizer(
            self.optimizer, self.learning_rate, self.momentum, self.optimizer_arguments
        )
        if self.stages and not self.schedule_ends:
            raise UsageError(
                f"--schedule {self.schedule}: with stages in the recipe it is one of "
                f"{', '.join(ENDING_SCHEDULES)}, which depend on --max_steps as they "
                "do.\nGive one of these, or remove the stages from a copy."
            )
        if self.schedule == "one_cycle" and self.warmup_epochs:
            raise UsageError(
                f"--warmup_epochs {self.warmup_epochs}: --schedule one_cycle begins "
                "with a rise of its own. Give --warmup_epochs 0."
            )

    @property
    def schedule_ends(self) -> bool:
        """Whether the learning rate falls to its end at `max_steps`."""
        return self.schedule in ENDING_SCHEDULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning(_Section):
    """The initial weights, and the layers that are trained."""

    initial_weights: str | None = option(
        None,
        "what the training begins with: a .keras or .weights.h5 file, the directory of "
        "a run, or imagenet, for applications:NAME (default: random values)",
        in_recipes=False,
        scope=Scope.RESULT,
    )
    freeze: str | None = option(
        None,
        "layers that are not trained, as conv1,scale0_*, or all-but-head (default: "
        "none)",
        scope=Scope.RESULT,
    )
    pretrained_rate: float = option(
        1.0,
        "factor of the learning rate of layers with initial weights",
        minimum=0.0,
        maximum=1.0,
        in_flags=False,
        scope=Scope.RESULT,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(_Section):
    """Limits on the memory of a step."""

    sections: str | None = option(
        None,
        "less memory for more time, in parts of the model that a tower computes one "
        "after another: how many, the layers that they begin with (conv2,local3), or "
        "auto for the fewest that fit (default: those of the model's own code)",
        affects_memory=True,
    )
    memory_limit: float | None = option(
        None,
        "GB of GPU or CPU memory for --sections auto and plan (default: 85 % of free)",
        minimum=1e-3,
        in_recipes=False,
        affects_memory=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = (self.sections or "1").split(",")
        is_number = names[0].strip().lstrip("+-").replace(".", "").isdigit()
        is_one = is_count(names[0]) and len(names) == 1
        if not all(name.strip() for name in names) or (is_number and not is_one):
            raise UsageError(
                f"--sections {self.sections}: it is a whole number from 1 on, or "
                "names, as in conv2,local3."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints(_Section):
    """Checkpoints, evaluations, and reactions to failures."""

    checkpoint_steps: int = option(1000, "steps between two checkpoints", minimum=1)
    keep_checkpoints: int = option(
        5, "checkpoints to keep; older ones are deleted", minimum=1, scope=Scope.WORKER
    )
    keep_best: int = option(
        0,
        "further checkpoints to keep: those that eval, or --eval_steps, scored "
        "highest; with the latter, one is saved at each evaluation",
        minimum=0,
        scope=Scope.WORKER,
    )
    keep_every_hours: float | None = option(
        None,
        "hours of training after which one checkpoint is kept for good (default: none)",
        minimum=1e-3,
        scope=Scope.WORKER,
    )
    eval_steps: int | None = option(
        None,
        "steps between two evaluations by the training itself, on the test set, which "
        "write what eval does (default: none)",
        minimum=1,
    )
    stop_after_no_gain: int | None = option(
        None,
        "evaluations in a row, every --eval_steps, that are not above the best one, "
        "after which the training ends (default: never)",
        minimum=1,
    )
    on_save_error: str = option(
        "stop",
        "when a checkpoint cannot be written: stop, or continue and try at the next",
        choices=("stop", "continue"),
        scope=Scope.WORKER,
    )
    on_nan: str = option(
        "stop",
        "when a loss or gradient is not finite: stop; skip that update; rollback: "
        "continue from the last checkpoint, without the batches since",
        choices=("stop", "skip", "rollback"),
    )
    hang_timeout: float | None = option(
        None,
        "seconds after which a step that hangs ends the run with exit code 75, so that "
        "a scheduler or --max_restarts starts it again (default: never)",
        minimum=1.0,
        maximum=_LONGEST_WAIT,
        scope=Scope.WORKER,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stop_after_no_gain and not self.eval_steps:
            raise UsageError(
                f"--stop_after_no_gain {self.stop_after_no_gain}: it counts the "
                "training's own evaluations. Add --eval_steps, or leave it out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(_Section):
    """Logs, summaries and profiles."""

    log_frequency: int = option(
        10, "steps between two lines on the console and in metrics.jsonl", minimum=1
    )
    summary_steps: int = option(
        100,
        "steps between two sets of histograms and images in TensorBoard; more where "
        "sets would take over 5 % of the time",
        minimum=1,
    )
    report_bottleneck: bool = option(
        False, "at the end, divide a step's time into input, towers, averaging, update"
    )
    log_device_placement: bool = option(
        False,
        "have TensorFlow print the device of each operation when it first runs; the "
        "names of a tower's begin with it, as tower_0/tutorial/conv1/convolution",
    )
    profile: str | None = option(
        None,
        "START:STOP, steps of which to write a profile for TensorBoard (default: none)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.profiled_steps  # noqa: B018 - refuses what it cannot read.

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step that `--profile` names, if any."""
        if self.profile is None:
            return None
        start, _, stop = self.profile.partition(":")
        if not is_count(start) or not is_count(stop) or int(start) > int(stop):
            raise UsageError(
                f"--profile {self.profile}: it is START:STOP, two steps from 1 on, as "
                "100:110."
            )
        return int(start), int(stop)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed(_Section):
    """Devices, compilation and determinism of a step."""

    steps_per_call: int = option(
        1,
        "steps that run without returning to Python, where nothing is logged or saved "
        "in between",
        minimum=1,
        maximum=_MOST_STEPS_PER_CALL,
    )
    variable_device: str = option(
        "auto",
        "where the variables live and gradients meet; auto: with a single tower on a "
        "GPU beside it, with muon on the first GPU, else on the CPU",
        choices=("auto", "cpu", "gpu"),
        affects_memory=True,
    )
    input_device: str = option(
        "auto",
        "where images are distorted; gpu: the data set lies in each GPU's memory; "
        "auto: there if it fits",
        choices=("auto", "cpu", "gpu"),
    )
    xla: bool = option(
        False,
        "compile each tower with XLA, or with --steps_per_call whole calls; for GPUs",
        scope=Scope.RESULT,
    )
    deterministic: bool = option(
        False,
        "repeat bit for bit on the same machine, without oneDNN and TF32; slower",
        scope=Scope.RESULT,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes(_Section):
    """The processes that train together on several machines or this one."""

    local_workers: int | None = option(
        None,
        "workers to start on this machine, as if each had its own (default: none)",
        minimum=1,
        maximum=_MOST_TOWERS,
        scope=Scope.WORKER,
        in_recipes=False,
    )
    max_restarts: int = option(
        0,
        "times to restart, from the last checkpoint, a training that was killed or has "
        "lost a worker",
        minimum=0,
        scope=Scope.WORKER,
        in_recipes=False,
    )
    worker_timeout: float = option(
        300.0,
        "seconds to wait at the start for the other workers",
        minimum=1.0,
        maximum=_LONGEST_WAIT,
        scope=Scope.WORKER,
        in_recipes=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine(_Section):
    """Values that depend on the machines."""

    towers: int = option(
        dataclasses.MISSING, "towers of all workers together", minimum=1
    )
    workers: int = option(
        dataclasses.MISSING, "processes that train together", minimum=1
    )


# By their names as attributes of a `Config`.
SECTIONS: dict[str, type] = {
    "run": Run,
    "batch": Towers,
    "network": Network,
    "dataset": Dataset,
    "images": Images,
    "loss": Loss,
    "update": Update,
    "fine_tuning": FineTuning,
    "memory": Memory,
    "checkpoints": Checkpoints,
    "output": Output,
    "speed": Speed,
    "processes": Processes,
}
ALL = tuple(SECTIONS.values())
# The sections recorded in `config.json`.
RECORDED = (*ALL, Machine)

# The flags that `--help` shows; the other flags are in `--help_all`, by these subjects.
MAIN = "main flags"
_MAIN_FLAGS = (
    *("recipe", "num_gpus", "batch_size", "max_steps", "train_dir", "fresh", "model"),
    *("data", "data_dir", "precision", "learning_rate", "seed"),
)
_SUBJECTS: dict[type, str] = {
    Run: MAIN,
    Towers: "towers and batches",
    Network: "model",
    Dataset: "data",
    Images: "data",
    Loss: "data",
    Update: "update",
    FineTuning: "fine-tuning",
    Memory: "memory",
    Checkpoints: "checkpoints and failures",
    Output: "output",
    Speed: "speed",
    Processes: "several workers, and restarts",
}


def subjects() -> dict[str, str]:
    """Returns the subject of each field in the help, by its name."""
    found = {
        field.name: subject
        for section, subject in _SUBJECTS.items()
        for field in dataclasses.fields(section)
    }
    return found | dict.fromkeys(_MAIN_FLAGS, MAIN)
