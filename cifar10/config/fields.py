"""Declares every field of a configuration once, in groups.

`flags.py` turns each declaration into a flag, and recipes may set the field. A field's
scope says whether all workers and a resumed run must have the same value. By default, a
field has the scope of its group. The docstring of a group is the help of its flags.
A function that needs the fields of only one group takes that group as argument.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, get_args

from cifar10.config import augmentation as augmentations, data_flag
from cifar10.config.options import (
    FLAG_ONLY,
    IN_PROGRAM,
    RECIPE_ONLY,
    RESULT,
    WORKER,
    Checked,
    Choices,
    Count,
    CountOrZero,
    Form,
    Fraction,
    Help,
    Option,
    Range,
    defaults,
    options,
)
from cifar10.config.python_objects import OwnMetrics
from cifar10.errors import UsageError
from cifar10.models.step_metrics import PRECISION
from cifar10.towers import optimizers, schedule
from cifar10.towers.class_weights import check_class_weights

TRAIN_DIR = "runs/cifar10_train"

_Group = TypeVar("_Group")

_Towers: TypeAlias = Annotated[int, Range(1, 64)]  # A larger number is a typing error.
_NotNegative: TypeAlias = Annotated[float, Range(0.0)]
_AboveZero: TypeAlias = Annotated[float, Range(1e-6)]
# The maximum is 11 days, because timers overflow at far larger numbers.
_Seconds: TypeAlias = Annotated[float, Range(1.0, 1e6)]
_Sections: TypeAlias = Annotated[
    str,
    Form(
        r"[1-9]\d{0,9}|(?![-+.\d]+(,|$))[^,]+(,[^,]+)*",
        "a whole number above 0, auto, or layer names such as conv2,local3",
    ),
]

_Schedule: TypeAlias = Annotated[
    str, Choices({name: curve.help for name, curve in schedule.CURVES.items()})
]
_Seeds: TypeAlias = Annotated[str, Form(r"\d{1,9}:\d{1,9}", "FIRST:END, such as 0:5")]
_Own: TypeAlias = Annotated[
    Callable | str | None, Form("(?!)", IN_PROGRAM), *(FLAG_ONLY, RECIPE_ONLY)
]
CALIBRATION_ERROR = "expected calibration error"
CALIBRATED = f"{CALIBRATION_ERROR} at temperature"
LOWER_IS_BETTER = ("cross_entropy", "total_loss", CALIBRATION_ERROR)
# The scores of eval that can select the best checkpoint.
SCORES = (PRECISION, "precision @ 5", "macro F1", "balanced accuracy", *LOWER_IS_BETTER)

# Distortions of training images, implemented in `input/distortions.py`. The largest
# translations are in pixels of an image of 32 x 32, as in airbench94 and airbench96.
# The distortions in `WHOLE` keep the size of images, and scale all images alike.
DISTORTIONS = {
    "tutorial": "crop, flip, brightness, contrast",
    "crop_flip": "crop, flip",
    "flip_translate": "flip every other epoch, shift by up to 1/16 of the side",
    "flip_translate_far": "the same, up to 1/8",
    "random_resized_crop": "crop 8 to 100 % of the area, enlarge to full size, flip",
    "none": "unchanged images",
}
TRANSLATIONS = {"flip_translate": 2, "flip_translate_far": 4}
WHOLE = (*TRANSLATIONS, "random_resized_crop", "none")
Precision: TypeAlias = Literal["float32", "bfloat16", "float16", "float64"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
# One of these sets the length of a training run. `max_epochs` is converted to steps
# once the size of the training set is known; `max_hours` leaves the last step open.
LENGTHS = ("max_steps", "max_epochs", "max_hours")
OPEN_STEPS = 10**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Checked):
    """Length and directory of the training run.

    Attributes:
        recipe: recipe with defaults for the other flags: `tutorial`, `fast` (93 % in
            minutes), `accurate`, `resnet`, `pictures`, `finetune`, or a TOML file like
            those in cifar10/config/recipes (default: by model, data, initial weights)
        train_dir: directory of the run; if it already holds a run, that run is resumed
        fresh: start over: move an earlier run in --train_dir aside, without deleting it
        max_steps: step at which the training run ends, counted from its first start
        max_epochs: epochs after which the training run ends, instead of --max_steps
        max_hours: hours after which training ends, those before a resume included
        seed: random seed of initial values, the images' order, distortions and dropout
    """

    recipe: Annotated[str, WORKER, FLAG_ONLY] = "tutorial"
    train_dir: Annotated[str, WORKER, FLAG_ONLY] = TRAIN_DIR
    fresh: Annotated[bool, WORKER, FLAG_ONLY] = False
    max_steps: Count = 100_000
    max_epochs: Annotated[float, Range(1e-6, 1e6)] | None = None
    max_hours: _AboveZero | None = None
    seed: Annotated[int, Range(0, 2**31 - 1), RESULT] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch(Checked):
    """Towers and batches.

    Attributes:
        num_gpus: number of towers on this machine, one per GPU; without a GPU, the CPU
            simulates the towers (default: one per GPU found, else 1 on the CPU)
        split_gpu: number of towers on each GPU, to try several on one; not for speed
        batch_size: images per tower and batch (x towers x --accumulate in each step)
        global_batch_size: images per step, in place of --batch_size
        accumulate: batches that a tower computes per update, as that many towers would
        variable_update: towers: all towers of a machine share one set of variables;
            mirrored: each tower has a copy, and an all-reduce (NCCL on GPUs) averages
            the gradients; auto: mirrored on the GPUs of several machines, else towers
    """

    num_gpus: Annotated[_Towers | None, FLAG_ONLY] = None
    split_gpu: Annotated[_Towers, FLAG_ONLY] = 1
    batch_size: Annotated[int, Range(1, 10**6)] = 128
    global_batch_size: Annotated[Count | None, RESULT] = None
    accumulate: Annotated[int, Range(1, 4096)] = 1
    variable_update: Literal["auto", "towers", "mirrored"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network(Checked, scope=RESULT):
    """Model and precision.

    Attributes:
        model: model to train: `tutorial`, `airbench`, `resnet`, applications:NAME for a
            model of keras.applications, or module:function for your own function that
            takes (image_shape, classes) and returns a Keras model
        depth: depth of a model (airbench: convolutions in each group, 2 or 3; resnet:
            blocks; default: set by the model)
        width: width of a model (airbench: filters of the first group; resnet: filters
            of the first blocks; default: set by the model)
        precision: dtype of convolutions and matrix products; variables and the loss
            stay in float32; auto: bfloat16 if native to the device, else float32;
            float64: everything in float64, for exact comparisons, not for speed
    """

    model: str = "tutorial"
    depth: Annotated[int, Range(1, 1000)] | None = None
    width: Count | None = None
    precision: Literal["auto", Precision] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset(Checked):
    """Data set.

    Attributes:
        data: data set: cifar10, cifar100 or synthetic; auto: CIFAR-10 from --data_dir,
            else downloaded, else a synthetic stand-in; or the path of your pictures:
        data_dir: folder that contains the .bin files, cifar-10-batches-bin/ or the
            archive (default: $CIFAR10_DATA_DIR, else ~/.cache/cifar10)
        data_url: URL of the archive (default: the URL on the data set's site)
        image_size: side in pixels; pictures are resized and cropped to it (default: 64)
        validation_fraction: fraction of your pictures to test on, if no folder is test
        val_fraction: fraction of the images outside test to hold out if val is missing;
            val decides which checkpoint is best and when to stop (default: none)
        max_bad_images: largest fraction of damaged pictures, which are left out
        corrections: CSV file from `data --train_dir`: pictures to leave out or to move
            to other classes (default: none)
    """

    data: Annotated[str, RESULT, Help(f" {data_flag.PATH}")] = "auto"
    data_dir: Annotated[str | None, WORKER, FLAG_ONLY] = None
    data_url: Annotated[str | None, WORKER] = None
    image_size: Annotated[int, Range(8, 1024), RESULT] | None = None
    validation_fraction: Annotated[float, Range(0.0, 0.9), RESULT] = 0.1
    val_fraction: Annotated[float, Range(0.0, 0.9), RESULT] = 0.0
    max_bad_images: Annotated[Fraction, WORKER] = 0.01
    # The fingerprint of the data covers these changes.
    corrections: Annotated[str | None, WORKER, FLAG_ONLY] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        data, names = self.data, data_flag.NAMES
        if data not in data_flag.FINDABLE and not data.startswith(data_flag.PYTHON):
            raise UsageError(f"--data {data}: give {', '.join(names)}, or a path.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Images(Checked, scope=RESULT):
    """Distortions and augmentation of training images.

    Attributes:
        distortions: random distortions of training images
        augmentation: further changes to training images (see config/augmentation.py)
    """

    distortions: Annotated[str, Choices(DISTORTIONS)] = "tutorial"
    augmentation: Annotated[Mapping | None, RECIPE_ONLY] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        augmentations.resolve(self.augmentation)  # Refuses an invalid table.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(Checked, scope=RESULT):
    """Loss: label smoothing and class weights.

    Attributes:
        label_smoothing: fraction of each label that is spread evenly over all classes
        class_weights: weight of each class in the loss (see towers/class_weights.py)
        loss: loss function of a Python program (see config/python_objects.py)
        metrics: function of a Python program that returns metrics by name
    """

    label_smoothing: Fraction = 0.0
    loss: _Own = None
    metrics: Annotated[OwnMetrics | None, FLAG_ONLY, RECIPE_ONLY] = None
    class_weights: Annotated[str | Mapping | Sequence | None, RECIPE_ONLY] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_class_weights(self.class_weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update(Checked, scope=RESULT, numbers=schedule.PARAMETERS):
    """Update: optimizer, learning rate, averages, stages.

    Attributes:
        optimizer: a Keras optimizer by its name in lower case, or one of ours
        optimizer_arguments: arguments of the optimizer's class (towers/optimizers.py)
        momentum: momentum of the optimizer, only for
        learning_rate: peak learning rate
        schedule: learning-rate schedule
        keras_schedule: Keras schedule object that a program passed as learning_rate
        warmup_epochs: epochs over which the learning rate rises linearly from zero
        clip_norm: norm to which longer averaged gradients are scaled (default: none)
        moving_average_decay: final decay of the averages that evaluation uses; 0: none
        stages: stages of the training run (see towers/stages.py)
    """

    optimizer: Annotated[str | type, Choices(optimizers.NAMES)] = "sgd"
    optimizer_arguments: Annotated[Mapping | None, RECIPE_ONLY] = None
    momentum: Annotated[Fraction, Help(f" {', '.join(optimizers.WITH_MOMENTUM)}")] = 0.0
    learning_rate: _NotNegative = 0.1
    schedule: _Schedule = "staircase"
    keras_schedule: _Own = None
    warmup_epochs: _NotNegative = 0.0
    clip_norm: Annotated[float, Range(1e-12)] | None = None
    moving_average_decay: Fraction = 0.9999
    stages: Annotated[Sequence | None, RECIPE_ONLY] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        optimizer, arguments = self.optimizer, self.optimizer_arguments
        optimizers.check_optimizer(optimizer, self.momentum, arguments)
        if self.stages and not self.schedule_ends:
            why = "stages need a schedule that ends"
            fix = f"Give {' or '.join(schedule.ENDING)}, or a recipe without stages"
            raise UsageError(f"--schedule {self.schedule}: {why}. {fix}.")

    @property
    def schedule_ends(self) -> bool:
        """Whether the schedule ends at `max_steps`."""
        return self.schedule in schedule.ENDING


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuning(Checked, scope=RESULT):
    """Fine-tuning: initial weights and frozen layers.

    Attributes:
        initial_weights: a .keras or .weights.h5 file, the directory of a run or of a
            checkpoint, or imagenet for applications:NAME (default: random values)
        freeze: layers not to train, such as conv1,scale0_*, or all-but-head
        pretrained_rate: factor, above 0, of the rate for layers with initial weights
    """

    initial_weights: Annotated[str | None, FLAG_ONLY] = None
    freeze: str | None = None
    pretrained_rate: Annotated[Fraction, RECIPE_ONLY] = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Checked):
    """Memory of a step.

    Attributes:
        sections: number of sections of the model, computed one after another to save
            memory, not time; or the layers that begin one (conv2,local3); or auto: as
            few as fit in memory (default: the sections in the model's code)
        memory_limit: GB for --sections auto and `plan` (default: 85 % of what is free)
    """

    sections: _Sections | None = None
    memory_limit: Annotated[_AboveZero | None, FLAG_ONLY] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints(Checked):
    """Checkpoints, evaluations, and reactions to failures.

    Attributes:
        checkpoint_steps: steps between checkpoints; by default, at most 5 % of the time
        keep_checkpoints: number of checkpoints to keep; older ones are deleted
        keep_best: number of further checkpoints to keep, the best by score; each
            evaluation by --eval_steps then saves one (default: 1 with these, else 0)
        best_by: eval score that selects the best checkpoint
        eval_steps: steps between evaluations, on val or else on test (default: none)
        stop_after_no_gain: evaluations in a row without a new best score that end a run
        on_nan: action if a loss or gradient is not finite: stop; skip the update;
            rollback to the last checkpoint, and leave out the batches since then
        verify_steps: steps between two whose gradients two devices compute; if these
            differ, the run stops, or goes back with --on_nan rollback (default: none)
        hang_timeout: seconds after which a hanging step ends the run with exit code 75,
            for a scheduler or --max_restarts (default: 600 with NCCL, else never)
    """

    checkpoint_steps: Count = 1000
    keep_checkpoints: Annotated[Count, WORKER] = 5
    keep_best: Annotated[CountOrZero, WORKER] = 0
    best_by: str = PRECISION
    eval_steps: Count | None = None
    stop_after_no_gain: Count | None = None
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    verify_steps: Count | None = None
    hang_timeout: Annotated[_Seconds | None, WORKER] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Checked):
    """Logs and summaries.

    Attributes:
        log_frequency: steps between two lines in metrics.jsonl; the console has fewer
        summary_steps: steps between histograms and images, at most 5 % of the time
        log_device_placement: print the device of operations (tower_0/... is tower 0's)
    """

    log_frequency: Count = 10
    summary_steps: Count = 100
    log_device_placement: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed(Checked):
    """Devices, compilation and determinism.

    Attributes:
        steps_per_call: most steps of a call from Python (default: 1; on GPUs up to 50)
        variable_device: device that holds the variables and averages the gradients;
            auto: the first GPU for a single tower or the muon optimizer, else the CPU
        xla: compile each tower with XLA, or whole steps with one GPU or mirrored
            variables (default: on one GPU, if a trial in a long run finds it faster)
        xla_update: compile only the update with XLA; the same trial may choose it
        deterministic: repeat results bit for bit on this machine, more slowly
    """

    steps_per_call: Annotated[int, Range(1, 100)] | None = None
    variable_device: Literal["auto", "cpu", "gpu"] = "auto"
    xla: Annotated[bool | None, RESULT] = None
    xla_update: Annotated[bool, RESULT] = False
    deterministic: Annotated[bool, RESULT] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes(Checked, scope=WORKER):
    """Several workers, and restarts.

    Attributes:
        local_workers: workers to start here, as if on a machine each (default: none)
        max_restarts: maximum number of restarts after a kill or the loss of a worker
        worker_timeout: seconds to wait at the start for the other workers
        seeds: range FIRST:END of seeds to train one after another, each in a folder of
            --train_dir; 0:5 trains seeds 0 to 4, and prints the mean of their scores
    """

    local_workers: Annotated[_Towers | None, FLAG_ONLY] = None
    max_restarts: Annotated[CountOrZero, FLAG_ONLY] = 0
    worker_timeout: Annotated[_Seconds, FLAG_ONLY] = 300.0
    seeds: Annotated[_Seeds | None, FLAG_ONLY] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine(Checked):
    """Values that depend on the machines in use.

    Attributes:
        towers: number of towers over all workers
        workers: number of processes that train together
    """

    towers: Count = 1
    workers: Count = 1


@dataclasses.dataclass(init=False)
class BaseConfig:
    """The groups of a configuration's fields."""

    run: Run
    batch: Batch
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

    @property
    def values(self) -> dict[str, Any]:
        """The values of all fields, by the name of the field."""
        groups = [getattr(self, group.name) for group in dataclasses.fields(self)]
        return {name: value for group in groups for name, value in vars(group).items()}

    @property
    def identity(self) -> dict[str, int | None]:
        """The values that a checkpoint of the run shares with its `config.json`."""
        size = self.batch.global_batch_size
        return {"seed": self.run.seed, "global_batch_size": size}

    def _assign(self, values: Mapping[str, Any]) -> None:
        """Sets all fields, to the given values or else to their defaults."""
        for group in dataclasses.fields(self):
            build: Any = group.type
            names = options(build).keys() & values.keys()
            setattr(self, group.name, build(**{name: values[name] for name in names}))


@dataclasses.dataclass(init=False)
class RecordedConfig(BaseConfig):
    """The fields of a configuration as `config.json` records them."""

    machine: Machine

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """Returns the values of a `config.json`, with defaults for missing ones.

        Unchecked: they name Python objects, and other versions may have allowed others.
        """
        config = cls()
        for group in dataclasses.fields(cls):
            build: Any = group.type
            setattr(config, group.name, unchecked(build, entries))
        return config


def unchecked(group: type[_Group], values: Mapping[str, Any]) -> _Group:
    """Returns a group of these values, or else its defaults, without any check."""
    found = object.__new__(group)
    usual = defaults(group)
    vars(found).update({name: values.get(name, usual[name]) for name in usual})
    return found


ALL: tuple[Any, ...] = tuple(one.type for one in dataclasses.fields(BaseConfig))
RECORDED = (*ALL, Machine)
# A flag and an argument of `Config`, but not a field: it names a run with all fields.
RESUME = Option(
    name="resume",
    type=str,
    help="directory of a run to continue as its config.json says; add only flags that "
    "do not affect the result, such as --max_steps and --num_gpus (default: none)",
)
# The flags that `--help` shows; `--help_all` adds the others, by group.
MAIN = (
    *("recipe", "num_gpus", "batch_size", "max_steps", "train_dir", "fresh", "model"),
    *("data", "data_dir", "precision", "learning_rate", "seed"),
)
# The flags that determine the memory of a step, which `plan` takes.
PLANNED = (
    *("recipe", "num_gpus", "split_gpu", "batch_size", "global_batch_size"),
    *("accumulate", "model", "depth", "width", "precision", "data", "image_size"),
    *("distortions", "optimizer", "momentum", "clip_norm", "memory_limit"),
    "variable_device",
)


def result_determining(config: BaseConfig, *, is_stateful: bool = False) -> list[str]:
    """Returns the names of the fields that a resumed run must not change.

    `is_stateful`: whether the model has batch norm or dropout, which see one batch.
    """
    found = [name for name, one in options(RECORDED).items() if one.scope is RESULT]
    if config.update.schedule_ends:
        found += ["max_steps", "max_epochs"]
    return [*found, "batch_size"] if is_stateful else found
