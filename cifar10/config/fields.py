"""Every field of a configuration, declared once, in sections.

A declaration is the only place that defines a field: `flags.py` turns it into a flag,
recipes may set it, and its scope says where its value must be equal. A section gives
the scope of its fields, unless they differ. Functions that build a part of a training
take the section that they depend on. A section's docstring is its part of the help.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

from cifar10.config import augmentation as augmentations, data_flag
from cifar10.config.options import (
    FLAG_ONLY,
    RECIPE_ONLY,
    RESULT,
    WORKER,
    Checked,
    Count,
    CountOrZero,
    Form,
    Fraction,
    Option,
    Range,
    ResultIf,
)
from cifar10.errors import UsageError
from cifar10.models.registry import ARCHITECTURES, describe_option
from cifar10.towers import optimizers
from cifar10.towers.class_weights import check_class_weights

TRAIN_DIR = "runs/cifar10_train"

_Towers: TypeAlias = Annotated[int, Range(1, 64)]  # More are a typing error.
_Device: TypeAlias = Literal["auto", "cpu", "gpu"]
_NotNegative: TypeAlias = Annotated[float, Range(0.0)]
_Pixels: TypeAlias = Annotated[int, Range(8, 1024)]
_Images: TypeAlias = Annotated[int, Range(1, 10**6)]
_AboveZero: TypeAlias = Annotated[float, Range(1e-6)]
# At most more than a week; timers take no 1e18.
_Seconds: TypeAlias = Annotated[float, Range(1.0, 1e6)]
_Steps: TypeAlias = Annotated[
    str,
    Form(r"[1-9]\d{0,11}:[1-9]\d{0,11}", "START:STOP, two steps from 1 on, as 100:110"),
]
_Sections: TypeAlias = Annotated[
    str,
    Form(
        r"[1-9]\d{0,9}|(?![-+.\d]+(,|$))[^,]+(,[^,]+)*",
        "a whole number from 1 on, or names, as in conv2,local3",
    ),
]

_Own: TypeAlias = Annotated[
    Callable | str | None,
    Form("(?!)", "an object of a Python program, which alone can continue the run"),
    *(FLAG_ONLY, RECIPE_ONLY),
]
# Scores of eval by which a checkpoint may be the best.
Score: TypeAlias = Literal[
    "precision @ 1",
    "precision @ 5",
    "macro F1",
    "balanced accuracy",
    "cross_entropy",
    "total_loss",
    "expected calibration error",
]
SCORES: tuple[str, ...] = get_args(Score)
PRECISION: Score = "precision @ 1"
CALIBRATION_ERROR = "expected calibration error"
LOWER_IS_BETTER = ("cross_entropy", "total_loss", CALIBRATION_ERROR)

# Distortions of training images, implemented in `input/distortions.py`.
Distortion: TypeAlias = Literal[
    "tutorial",
    "crop_flip",
    "flip_translate",
    "flip_translate_far",
    "random_resized_crop",
    "none",
]
DISTORTIONS: tuple[str, ...] = get_args(Distortion)
Precision: TypeAlias = Literal["float32", "bfloat16", "float16", "float64"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
# Schedules of the learning rate that end at --max_steps; the staircase does not.
EndingSchedule: TypeAlias = Literal["linear", "cosine", "one_cycle"]
ENDING_SCHEDULES: tuple[str, ...] = get_args(EndingSchedule)
# One of these says how long a training is. With `max_epochs` the number of steps is
# known once the training set is; with `max_hours` it stays open.
LENGTHS = ("max_steps", "max_epochs", "max_hours")
OPEN_STEPS = 10**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Checked):
    """Length and directory of the training.

    Attributes:
        recipe: defaults of the other flags: `tutorial`, `fast` (94 % in minutes),
            `accurate`, `resnet`, `pictures`, `finetune`, or a file like those in
            cifar10/config/recipes (default: that of the model, the data or
            --initial_weights)
        train_dir: directory of the run: checkpoints, event files, metrics.jsonl;
            starting again with the same one resumes it
        fresh: start over: an earlier run in --train_dir is moved aside, not deleted
        max_steps: step at which the training ends; the steps before a resume count
        max_epochs: epochs after which it ends, in place of --max_steps
        max_hours: hours of training after which it ends, in place of --max_steps; those
            before a resume count
        seed: seed of the initial values, the order of the images, their distortions and
            dropout
    """

    recipe: Annotated[str, WORKER, FLAG_ONLY] = "tutorial"
    train_dir: Annotated[str, WORKER, FLAG_ONLY] = TRAIN_DIR
    fresh: Annotated[bool, WORKER, FLAG_ONLY] = False
    max_steps: Annotated[Count, ResultIf("schedule", ENDING_SCHEDULES)] = 100_000
    max_epochs: Annotated[
        float | None, Range(1e-6, 1e6), ResultIf("schedule", ENDING_SCHEDULES)
    ] = None
    max_hours: _AboveZero | None = None
    seed: Annotated[int, Range(0, 2**31 - 1), RESULT] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Towers(Checked):
    """Towers and batches.

    Attributes:
        num_gpus: number of towers on this machine, one per GPU; without a GPU they are
            simulated on the CPU (default: all GPUs found, else 1 tower on the CPU)
        split_gpu: number of towers on each GPU, which share its memory and are not
            faster: to try several towers on one GPU, as in --num_gpus 4 --split_gpu 4
        batch_size: images per tower and batch; the global batch is this times the
            towers times --accumulate
        global_batch_size: images per step of all towers (default: --batch_size x towers
            x --accumulate)
        accumulate: number of batches that a tower computes before an update; they count
            as if each had a tower of its own
        variable_update: towers: all towers of a machine share its variables; mirrored:
            each has its own, and gradients meet by all-reduce (NCCL on GPUs); auto:
            mirrored on the GPUs of several machines, else towers
    """

    num_gpus: Annotated[_Towers | None, FLAG_ONLY] = None
    split_gpu: Annotated[_Towers, FLAG_ONLY] = 1
    # Batch norm and dropout see the images of one batch.
    batch_size: Annotated[_Images, ResultIf("stateful_model", (True,))] = 128
    global_batch_size: Annotated[Count | None, RESULT] = None
    accumulate: Annotated[int, Range(1, 4096)] = 1
    variable_update: Literal["auto", "towers", "mirrored"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network(
    Checked,
    scope=RESULT,
    models=", ".join(f"`{name}`" for name in ARCHITECTURES),
    depths=describe_option("depth"),
    widths=describe_option("width"),
):
    """Model and precision.

    Attributes:
        model: model to train: {models}, applications:NAME for one of Keras's, or
            module:function for one of your own that takes (image_shape, classes) and
            returns a Keras model
        depth: depth of a model ({depths}; default: the model's)
        width: width of a model ({widths}; default: the model's)
        precision: type of convolutions and matrix products; variables and loss stay in
            float32; auto: bfloat16 where the device has it natively, else float32;
            float64 is for proofs, not for speed
    """

    model: str = "tutorial"
    depth: Annotated[int, Range(1, 1000)] | None = None
    width: Count | None = None
    precision: Literal["auto", Precision] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset(Checked):
    """Data set.

    Attributes:
        data: data set: the path of your pictures, with a folder for each class, or of
            an .npz; cifar10, cifar100, synthetic; auto: CIFAR-10 from --data_dir, else
            downloaded, else a generated stand-in
        data_dir: folder with the .bin files, with cifar-10-batches-bin/ or with the
            archive (default: $CIFAR10_DATA_DIR, else ~/.cache/cifar10)
        data_url: URL of the archive (default: that of the data set's own site)
        image_size: side of your pictures: the shorter side is resized, then the centre
            cut (default: 64)
        validation_fraction: fraction of your pictures that is the test part, if they
            have no folder test or val
        val_fraction: fraction of the images, not counting a given test part, to hold
            out as the part val, if there is none; it decides what is best and when to
            stop (default: none, so the test part decides)
        max_bad_images: fraction of your pictures that may be damaged, and is left out;
            the training does not start with more
        corrections: CSV of training pictures to leave out or to move to other classes,
            as `data --train_dir` writes it (default: none)
    """

    data: Annotated[str, RESULT] = "auto"
    data_dir: Annotated[str | None, WORKER, FLAG_ONLY] = None
    data_url: Annotated[str | None, WORKER] = None
    image_size: Annotated[_Pixels | None, RESULT] = None
    validation_fraction: Annotated[float, Range(0.0, 0.9), RESULT] = 0.1
    val_fraction: Annotated[float, Range(0.0, 0.9), RESULT] = 0.0
    max_bad_images: Annotated[Fraction, WORKER] = 0.01
    # What it changes is in the fingerprint of the data.
    corrections: Annotated[str | None, WORKER, FLAG_ONLY] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        data_flag.check(self.data, self.image_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Checked, scope=RESULT):
    """Distortions and augmentation of training images.

    Attributes:
        distortions: distortions of training images; tutorial: crop, flip, brightness,
            contrast; crop_flip: the first two; flip_translate: whole images, mirrored
            every other epoch, moved by a 16th; flip_translate_far: by an 8th;
            random_resized_crop: crops of 8 to 100 % enlarged to the whole size, and
            flip; none: whole images, as they are
        augmentation: further changes of training images, as in config/augmentation.py
    """

    distortions: Distortion = "tutorial"
    augmentation: Annotated[Mapping | None, RECIPE_ONLY] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        augmentations.resolve(self.augmentation)  # Refuses an invalid table.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(Checked, scope=RESULT):
    """Loss: smoothing of the labels, weights of the classes.

    Attributes:
        label_smoothing: fraction of each label that is spread evenly over all classes
        class_weights: weight of each class in the loss, as in towers/class_weights.py
        loss: a program's own loss, as in config/python_objects.py
        metrics: a program's own metrics, by name
    """

    label_smoothing: Fraction = 0.0
    loss: _Own = None
    metrics: Annotated[Callable | None, FLAG_ONLY, RECIPE_ONLY] = None
    class_weights: Annotated[str | Mapping | Sequence | None, RECIPE_ONLY] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_class_weights(self.class_weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update(
    Checked,
    scope=RESULT,
    of_keras=", ".join(optimizers.KERAS_NAMES),
    with_momentum=", ".join(optimizers.WITH_MOMENTUM),
):
    """Update: optimizer, learning rate, averages, stages.

    Attributes:
        optimizer: rule of the update: sgd; muon, airbench's, with its own rates for
            biases and head; or Keras's {of_keras}
        optimizer_arguments: further arguments of the optimizer's class, but muon's, as
            in towers/optimizers.py
        momentum: momentum, for {with_momentum} only
        learning_rate: highest learning rate
        schedule: schedule of the learning rate; staircase: times 0.1 every
            --epochs_per_decay; linear, cosine: to zero at the last step; one_cycle:
            rises first, then falls to almost zero there
        keras_schedule: a program's own schedule, as in config/python_objects.py
        epochs_per_decay: epochs after which the staircase falls each time
        warmup_epochs: epochs in which the learning rate rises evenly from zero
        clip_norm: norm to which the averaged gradients are scaled down together if
            theirs is larger (default: not at all)
        moving_average_decay: largest decay of the variables' averages, which evaluation
            uses; it grows to this; 0: none
        stages: parts of the training, as in towers/stages.py
    """

    optimizer: str | type = "sgd"
    optimizer_arguments: Annotated[Mapping | None, RECIPE_ONLY] = None
    momentum: Fraction = 0.0
    learning_rate: _NotNegative = 0.1
    schedule: Literal["staircase", EndingSchedule] = "staircase"
    keras_schedule: _Own = None
    epochs_per_decay: _AboveZero = 350.0
    warmup_epochs: _NotNegative = 0.0
    clip_norm: Annotated[float, Range(1e-12)] | None = None
    moving_average_decay: Fraction = 0.9999
    stages: Annotated[Sequence | None, RECIPE_ONLY] = None

    def __post_init__(self) -> None:
        # As in Keras, the case of its name does not matter: one spelling is recorded.
        if isinstance(self.optimizer, str):
            object.__setattr__(self, "optimizer", self.optimizer.lower())
        super().__post_init__()
        optimizers.check_optimizer(
            self.optimizer, self.learning_rate, self.momentum, self.optimizer_arguments
        )
        if self.stages and not self.schedule_ends:
            raise UsageError(
                f"--schedule {self.schedule}: stages in the recipe depend on "
                f"--max_steps, so the schedule must too: {', '.join(ENDING_SCHEDULES)}."
                "\nGive one of these, or remove the stages from a copy of the recipe."
            )
        if self.schedule == "one_cycle" and self.warmup_epochs:
            raise UsageError(
                f"--warmup_epochs {self.warmup_epochs}: --schedule one_cycle begins "
                "with a rise of its own. Give --warmup_epochs 0."
            )

    @property
    def schedule_ends(self) -> bool:
        """Whether the schedule ends at `max_steps`."""
        return self.schedule in ENDING_SCHEDULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning(Checked, scope=RESULT):
    """Fine-tuning: initial weights and frozen layers.

    Attributes:
        initial_weights: source of the initial weights: a .keras or .weights.h5 file,
            the directory of a run or of one of its checkpoints, or imagenet, for
            applications:NAME (default: random values)
        freeze: layers that are not trained, as conv1,scale0_*, or all-but-head
            (default: none)
        pretrained_rate: factor of the learning rate of layers with initial weights,
            above 0
    """

    initial_weights: Annotated[str | None, FLAG_ONLY] = None
    freeze: str | None = None
    pretrained_rate: Annotated[Fraction, RECIPE_ONLY] = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Checked):
    """Memory of a step.

    Attributes:
        sections: parts of the model that a tower computes one after another, which
            takes less memory and more time: how many, the layers that they begin with
            (conv2,local3), or auto for the fewest that fit (default: those of the
            model's own code)
        memory_limit: GB of GPU or CPU memory for --sections auto and plan (default: 85
            % of the free memory)
    """

    sections: _Sections | None = None
    memory_limit: Annotated[_AboveZero | None, FLAG_ONLY] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints(Checked):
    """Checkpoints, evaluations, and reactions to failures.

    Attributes:
        checkpoint_steps: steps between two checkpoints
        keep_checkpoints: number of checkpoints to keep; older ones are deleted
        keep_best: number of further checkpoints to keep: the best by the scores of
            eval or --eval_steps; with the latter, one is saved at each evaluation
        best_by: score of eval that decides which checkpoint is the best
        eval_steps: steps between two evaluations by the training itself, on the part
            val, or test without one, recorded as by eval (default: none)
        stop_after_no_gain: number of evaluations in a row, every --eval_steps, that are
            not better than the best, after which the training ends (default: never)
        on_save_error: when a checkpoint cannot be written: stop, or continue and try at
            the next
        on_nan: when a loss or gradient is not finite: stop; skip that update; rollback:
            continue from the last checkpoint, without the batches since
        verify_steps: steps between two steps whose gradients are computed twice, on
            different devices, and compared; a difference is treated as by --on_nan
            (default: none)
        hang_timeout: seconds after which a step that hangs ends the run with exit code
            75, so that a scheduler or --max_restarts starts it again (default: never)
    """

    checkpoint_steps: Count = 1000
    keep_checkpoints: Annotated[Count, WORKER] = 5
    keep_best: Annotated[CountOrZero, WORKER] = 0
    best_by: Score = PRECISION
    eval_steps: Count | None = None
    stop_after_no_gain: Count | None = None
    on_save_error: Annotated[Literal["stop", "continue"], WORKER] = "stop"
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    verify_steps: Count | None = None
    hang_timeout: Annotated[_Seconds | None, WORKER] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Checked):
    """Logs, summaries and profiles.

    Attributes:
        log_frequency: steps between two lines on the console and in metrics.jsonl
        summary_steps: steps between two sets of histograms and images in TensorBoard;
            more steps if the sets would take over 5 % of the time
        log_device_placement: have TensorFlow print the device of each operation when it
            first runs; its name begins with the tower, as in
            tower_0/tutorial/conv1/convolution
        profile: START:STOP, steps to profile for TensorBoard (default: none)
    """

    log_frequency: Count = 10
    summary_steps: Count = 100
    log_device_placement: bool = False
    profile: _Steps | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.profiled_steps  # noqa: B018 - refuses a stop before the start.

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step that `--profile` names, if any."""
        if self.profile is None:
            return None
        start, stop = map(int, self.profile.split(":"))
        if start > stop:
            raise UsageError(f"--profile {self.profile}: it stops before it starts.")
        return start, stop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed(Checked):
    """Devices, compilation and determinism.

    Attributes:
        steps_per_call: number of steps that run without returning to Python, with
            nothing logged or saved in between (default: 1, or up to 10 on GPUs)
        variable_device: device of the variables, where gradients meet; auto: the GPU of
            a single tower, the first GPU with muon, else the CPU
        input_device: device that distorts images; gpu: the data set lies in each GPU's
            memory; auto: gpu if it fits
        xla: compile each tower with XLA; for GPUs
        deterministic: repeat bit for bit on the same machine, without oneDNN and TF32;
            slower
    """

    steps_per_call: Annotated[int, Range(1, 100)] | None = None
    variable_device: _Device = "auto"
    input_device: _Device = "auto"
    xla: Annotated[bool, RESULT] = False
    deterministic: Annotated[bool, RESULT] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes(Checked, scope=WORKER):
    """Several workers, and restarts.

    Attributes:
        local_workers: number of workers to start on this machine, as if each had a
            machine of its own (default: none)
        max_restarts: number of restarts from the last checkpoint, each after a training
            was killed or lost a worker
        worker_timeout: seconds to wait at the start for the other workers
    """

    local_workers: Annotated[_Towers | None, FLAG_ONLY] = None
    max_restarts: Annotated[CountOrZero, FLAG_ONLY] = 0
    worker_timeout: Annotated[_Seconds, FLAG_ONLY] = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine(Checked):
    """Values that depend on the machines.

    Attributes:
        towers: towers of all workers together
        workers: processes that train together
    """

    towers: Count
    workers: Count


@dataclasses.dataclass(init=False, repr=False)
class Sections:
    """The sections of a configuration."""

    run: Run
    batch: Towers
    network: Network
    dataset: Dataset
    images: Images
    loss: Loss
    update: Update
    fine_tuning: FineTuning
    memory: Memory
    checkpoints: Checkpoints
    output: Output
    speed: Speed
    processes: Processes


ALL: tuple[Any, ...] = tuple(one.type for one in dataclasses.fields(Sections))
# The sections recorded in `config.json`.
RECORDED = (*ALL, Machine)
# A flag and an argument, but no field: it says where the values of the fields are.
RESUME = Option(
    name="resume",
    type=str,
    help="directory of a run to continue as its config.json says; other flags are "
    "allowed if they leave the result as it is, as --max_steps and --num_gpus do "
    "(default: none)",
)
# The flags that `--help` shows; `--help_all` shows the other ones by section.
MAIN = (
    *("recipe", "num_gpus", "batch_size", "max_steps", "train_dir", "fresh", "model"),
    *("data", "data_dir", "precision", "learning_rate", "seed"),
)
