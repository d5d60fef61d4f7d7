"""The configuration of a run: as requested, and as training resolves it.

Everything about a field is declared in one place: `flags.py` turns it into a flag,
recipes may set it, and its scope says what workers and resumed runs must agree in.
`config.json` in the run directory is a `ResolvedConfig`, and the versions that ran it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from cifar10.config import (
    augmentation as augmentations,
    class_weights,
    data_flag,
    initial_weights_flag,
    optimizer_flag,
)
from cifar10.config.options import (
    LARGEST_NUMBER,
    Scope,
    check,
    is_count,
    narrowed,
    option,
    options,
)
from cifar10.config.stages import Stage, resolve
from cifar10.errors import UsageError

TRAIN_DIR = "runs/cifar10_train"
TRAIN_DIR_ALIAS = "checkpoint_dir"  # eval.py of the tutorial calls it so.

# Seeds are 32-bit where the shuffled order is drawn.
_LARGEST_SEED = 2**31 - 1
# Far above what makes sense; a larger number is a typing error.
_MOST_TOWERS = 64
_MOST_STEPS_PER_CALL = 100  # Their batches lie in memory together.
_MOST_BATCHES = 4096
_LONGEST_WAIT = 1e6  # Seconds: more than a week. Timers take no 1e18.
_MOST_IMAGES = 10**6  # TensorFlow counts the elements of a tensor in 32 bits, at times.
_MOST_BLOCKS = 1000

# What may be done to training images; `input/distortions.py` does it.
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

# Sections of `--help_all`; `--help` shows only the first one.
FIRST = "main flags"
_first = functools.partial(option, section=FIRST)
_towers = functools.partial(option, section="towers and batches")
_memory = functools.partial(option, section="memory", affects_memory=True)
_model = functools.partial(option, section="model", scope=Scope.RESULT)
_data = functools.partial(option, section="data", scope=Scope.RESULT)
_update = functools.partial(option, section="update", scope=Scope.RESULT)
_fine_tuning = functools.partial(option, section="fine-tuning", scope=Scope.RESULT)
_checkpoints = functools.partial(option, section="checkpoints and failures")
_output = functools.partial(option, section="output")
_speed = functools.partial(option, section="speed")
_workers = functools.partial(
    option,
    section="several workers, and restarts",
    scope=Scope.WORKER,
    in_recipes=False,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a training run depends on; see each field's help."""

    recipe: str = _first(
        "tutorial",
        "defaults of the other flags: `tutorial`, `fast` (94 % in minutes), "
        "`accurate`, `resnet`, `pictures`, `finetune`, or a file like those in "
        "cifar10/config/recipes (default: that of the model, the data or "
        "--initial_weights)",
        scope=Scope.WORKER,
        in_recipes=False,
        affects_memory=True,
    )
    num_gpus: int | None = _first(
        None,
        "towers of this machine, one per GPU; without a GPU they are simulated on the "
        "CPU (default: all GPUs found, else 1 tower on the CPU)",
        minimum=1,
        maximum=_MOST_TOWERS,
        in_recipes=False,
        affects_memory=True,
    )
    batch_size: int = _first(
        128,
        "images per tower and batch; times towers and --accumulate: the global batch",
        minimum=1,
        maximum=_MOST_IMAGES,
        # Batch norm and dropout see the images of one batch.
        result_if=("stateful_model", (True,)),
        affects_memory=True,
    )
    global_batch_size: int | None = _towers(
        None,
        "images per step of all towers (default: --batch_size x towers x --accumulate)",
        minimum=1,
        scope=Scope.RESULT,
        affects_memory=True,
        for_evaluation=True,
    )
    split_gpu: int = _towers(
        1,
        "towers on each GPU, which share its memory and are not faster: to try several "
        "on the one there is, as --num_gpus 4 --split_gpu 4",
        minimum=1,
        maximum=_MOST_TOWERS,
        in_recipes=False,
        affects_memory=True,
    )
    accumulate: int = _towers(
        1,
        "batches that a tower computes before an update; they count as if each had a "
        "tower of its own",
        minimum=1,
        maximum=_MOST_BATCHES,
        affects_memory=True,
    )
    sections: str | None = _memory(
        None,
        "less memory for more time, in parts of the model that a tower computes one "
        "after another: how many, the layers that they begin with (conv2,local3), or "
        "auto for the fewest that fit (default: those of the model's own code)",
    )
    section_cache: str = _memory(
        "device",
        "where tensors between sections wait: on their tower's device, or in the "
        "host's memory",
        choices=("device", "host"),
    )
    memory_limit: float | None = _memory(
        None,
        "GB of GPU or CPU memory for --sections auto and plan (default: 85 % of free)",
        minimum=1e-3,
        in_recipes=False,
    )
    max_steps: int = _first(
        100_000,
        "step at which the training ends; the steps before a resume count",
        minimum=1,
        result_if=("schedule", ENDING_SCHEDULES),
        for_evaluation=True,
    )
    train_dir: str = _first(
        TRAIN_DIR,
        "directory of the run: checkpoints, event files, metrics.jsonl; "
        "starting again with the same one resumes it",
        alias=TRAIN_DIR_ALIAS,
        scope=Scope.WORKER,
        in_recipes=False,
    )
    fresh: bool = _first(
        False,
        "start over: an earlier run in --train_dir is moved aside, not deleted",
        scope=Scope.WORKER,
        in_recipes=False,
    )
    model: str = _first(
        "tutorial",
        "`tutorial`, `airbench`, `resnet`, applications:NAME for one of Keras's, or "
        "module:function for one of your own that takes (image_shape, classes) and "
        "returns a Keras model",
        scope=Scope.RESULT,
        affects_memory=True,
        for_evaluation=True,
    )
    depth: int | None = _model(
        None,
        "blocks of resnet, or convolutions in each group of airbench, 2 or 3 (default: "
        "the model's)",
        minimum=1,
        maximum=_MOST_BLOCKS,
        affects_memory=True,
    )
    width: int | None = _model(
        None,
        "filters of the first blocks of resnet or airbench (default: the model's)",
        minimum=1,
        affects_memory=True,
    )
    data: str = _first(
        "auto",
        "what to train on: the path of your pictures, with a folder for each class, or "
        "of an .npz; cifar10, cifar100, synthetic, tfds:NAME; auto: CIFAR-10 from "
        "--data_dir, else downloaded, else a generated stand-in",
        scope=Scope.RESULT,
        affects_memory=True,
        for_evaluation=True,
    )
    data_dir: str | None = _first(
        None,
        "folder with the .bin files, with cifar-10-batches-bin/ or with the archive "
        "(default: $CIFAR10_DATA_DIR, else ~/.cache/cifar10)",
        scope=Scope.WORKER,
        in_recipes=False,
        for_evaluation=True,
    )
    image_size: int | None = _data(
        None,
        "side of your pictures: the shorter side is resized, then the centre cut "
        "(default: 64)",
        minimum=8,
        maximum=1024,
        affects_memory=True,
    )
    validation_fraction: float = _data(
        0.1,
        "part of your pictures to score on, if they have no folder test or val",
        minimum=0.0,
        maximum=0.9,
    )
    max_bad_images: float = _data(
        0.01,
        "part of your pictures that may be damaged, and is left out; more is an error",
        minimum=0.0,
        maximum=1.0,
        scope=Scope.WORKER,
    )
    data_url: str | None = _data(
        None,
        "URL of the archive, or several in the order to try, separated by commas "
        "(default: the data set's own site)",
        scope=Scope.WORKER,
        for_evaluation=True,
    )
    distortions: str = _data(
        "tutorial",
        "what is done to training images; tutorial: crop, flip, brightness, contrast; "
        "crop_flip: the first two; flip_translate: whole images, mirrored every other "
        "epoch, moved by a 16th; flip_translate_far: by an 8th; random_resized_crop: "
        "crops of 8 to 100 % enlarged to the whole size, and flip; none: whole images, "
        "as they are",
        choices=DISTORTIONS,
        affects_memory=True,
        for_evaluation=True,
    )
    augmentation: Mapping | None = _data(
        None,
        "what else is done to training images, as in config/augmentation.py",
        in_flags=False,
    )
    label_smoothing: float = _data(
        0.0,
        "part of each label that is spread evenly over all classes",
        minimum=0.0,
        maximum=1.0,
    )
    class_weights: str | Mapping | Sequence | None = _data(
        None,
        "how much each class counts in the loss, as in config/class_weights.py",
        in_flags=False,
    )
    precision: str = _first(
        "auto",
        "type of convolutions and matrix products; variables and loss stay in float32; "
        "auto: bfloat16 where the device has it natively, else float32; float64 is for "
        "proofs, not for speed",
        choices=("auto", *PRECISIONS),
        scope=Scope.RESULT,
        affects_memory=True,
        for_evaluation=True,
    )
    optimizer: str = _update(
        "sgd",
        "rule of the update: sgd; muon, airbench's, with its own rates for biases and "
        f"head; or Keras's {', '.join(optimizer_flag.KERAS)}",
        affects_memory=True,
    )
    optimizer_arguments: Mapping | None = _update(
        None, "arguments of Keras's, as in config/optimizer_flag.py", in_flags=False
    )
    momentum: float = _update(
        0.0,
        f"momentum, for {', '.join(optimizer_flag.WITH_MOMENTUM)} only",
        minimum=0.0,
        maximum=1.0,
        affects_memory=True,
    )
    learning_rate: float = _first(
        0.1,
        "highest learning rate, from which it falls",
        minimum=0.0,
        maximum=LARGEST_NUMBER,
        scope=Scope.RESULT,
    )
    schedule: str = _update(
        "staircase",
        "how the learning rate falls; staircase: times 0.1 every --epochs_per_decay; "
        "linear, cosine: to zero at --max_steps; one_cycle: rises first, ends there",
        choices=("staircase", *ENDING_SCHEDULES),
    )
    epochs_per_decay: float = _update(
        350.0, "epochs after which the staircase falls each time", minimum=1e-6
    )
    stages: Sequence | None = _update(
        None, "parts of the training, as in config/stages.py", in_flags=False
    )
    initial_weights: str | None = _fine_tuning(
        None,
        "what the training begins with: a .keras or .weights.h5 file, the directory of "
        "a run, or imagenet, for applications:NAME (default: random values)",
        in_recipes=False,
    )
    freeze: str | None = _fine_tuning(
        None,
        "layers that are not trained, as conv1,scale0_*, or all-but-head (default: "
        "none)",
    )
    pretrained_rate: float = _fine_tuning(
        1.0,
        "factor of the learning rate of layers with initial weights",
        minimum=0.0,
        maximum=1.0,
        in_flags=False,
    )
    warmup_epochs: float = _update(
        0.0, "epochs in which the learning rate rises evenly from zero", minimum=0.0
    )
    clip_norm: float | None = _update(
        None,
        "norm to which the averaged gradients are scaled down together if theirs is "
        "larger (default: not at all)",
        minimum=1e-12,
        affects_memory=True,
    )
    moving_average_decay: float = _update(
        0.9999,
        "largest decay of the variables' averages, which evaluation uses; 0: none",
        minimum=0.0,
        maximum=1.0,
    )
    seed: int = _first(
        0,
        "seed of the initial values, the order of the images, their distortions and "
        "dropout",
        minimum=0,
        maximum=_LARGEST_SEED,
        scope=Scope.RESULT,
    )
    deterministic: bool = _model(
        False, "repeat bit for bit on the same machine, without oneDNN and TF32; slower"
    )
    checkpoint_steps: int = _checkpoints(
        1000, "steps between two checkpoints", minimum=1
    )
    keep_checkpoints: int = _checkpoints(
        5, "checkpoints to keep; older ones are deleted", minimum=1, scope=Scope.WORKER
    )
    keep_best: int = _checkpoints(
        0,
        "further checkpoints to keep: those that eval, or --eval_steps, scored "
        "highest; with the latter, one is saved at each evaluation",
        minimum=0,
        scope=Scope.WORKER,
    )
    keep_every_hours: float | None = _checkpoints(
        None,
        "hours of training after which one checkpoint is kept for good (default: none)",
        minimum=1e-3,
        scope=Scope.WORKER,
    )
    eval_steps: int | None = _checkpoints(
        None,
        "steps between two evaluations by the training itself, on the test set, which "
        "write what eval does (default: none)",
        minimum=1,
    )
    stop_after_no_gain: int | None = _checkpoints(
        None,
        "evaluations in a row, every --eval_steps, that are not above the best one, "
        "after which the training ends (default: never)",
        minimum=1,
    )
    on_save_error: str = _checkpoints(
        "stop",
        "when a checkpoint cannot be written: stop, or continue and try at the next",
        choices=("stop", "continue"),
        scope=Scope.WORKER,
    )
    on_nan: str = _checkpoints(
        "stop",
        "when a loss or gradient is not finite: stop; skip that update; rollback: "
        "continue from the last checkpoint, without the batches since",
        choices=("stop", "skip", "rollback"),
    )
    hang_timeout: float | None = _checkpoints(
        None,
        "seconds after which a step that hangs ends the run with exit code 75, so that "
        "a scheduler or --max_restarts starts it again (default: never)",
        minimum=1.0,
        maximum=_LONGEST_WAIT,
        scope=Scope.WORKER,
    )
    log_frequency: int = _output(
        10, "steps between two lines on the console and in metrics.jsonl", minimum=1
    )
    summary_steps: int = _output(
        100,
        "steps between two sets of histograms and images in TensorBoard; more where "
        "sets would take over 5 % of the time",
        minimum=1,
    )
    steps_per_call: int = _speed(
        1,
        "steps that run without returning to Python, where nothing is logged or saved "
        "in between",
        minimum=1,
        maximum=_MOST_STEPS_PER_CALL,
    )
    variable_update: str = _towers(
        "auto",
        "towers: all of a machine share its variables; mirrored: each has its own, and "
        "gradients meet by all-reduce (NCCL on GPUs); auto: mirrored on the GPUs of "
        "several machines, else towers",
        choices=("auto", "towers", "mirrored"),
    )
    local_workers: int | None = _workers(
        None,
        "workers to start on this machine, as if each had its own (default: none)",
        minimum=1,
        maximum=_MOST_TOWERS,
    )
    max_restarts: int = _workers(
        0,
        "times to restart, from the last checkpoint, a training that was killed or has "
        "lost a worker",
        minimum=0,
    )
    worker_timeout: float = _workers(
        300.0,
        "seconds to wait at the start for the other workers",
        minimum=1.0,
        maximum=_LONGEST_WAIT,
    )
    variable_device: str = _speed(
        "auto",
        "where the variables live and gradients meet; auto: with a single tower on a "
        "GPU beside it, with muon on the first GPU, else on the CPU",
        choices=("auto", "cpu", "gpu"),
        affects_memory=True,
    )
    input_device: str = _speed(
        "auto",
        "where images are distorted; gpu: the data set lies in each GPU's memory; "
        "auto: there if it fits",
        choices=("auto", "cpu", "gpu"),
    )
    xla: bool = _speed(
        False,
        "compile each tower with XLA, or with --steps_per_call whole calls; for GPUs",
        scope=Scope.RESULT,
    )
    report_bottleneck: bool = _output(
        False, "at the end, divide a step's time into input, towers, averaging, update"
    )
    log_device_placement: bool = _output(
        False,
        "have TensorFlow print the device of each operation when it first runs; the "
        "names of a tower's begin with it, as tower_0/tutorial/conv1/convolution",
    )
    profile: str | None = _output(
        None,
        "START:STOP, steps of which to write a profile for TensorBoard (default: none)",
    )

    def __post_init__(self) -> None:
        # As in Keras, the case of its name does not matter: one spelling is recorded.
        object.__setattr__(self, "optimizer", self.optimizer.lower())
        check(self)
        for field in options(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and not value.isprintable():
                raise UsageError(
                    f"--{field.name} {value!a}: it has unprintable characters. Type it "
                    "again."
                )
        data_flag.check(self.data, self.image_size)
        class_weights.check(self.class_weights)
        optimizer_flag.check(self.optimizer, self.momentum, self.optimizer_arguments)
        augmentations.resolve(self.augmentation)  # Refuses what is none.
        if not self.global_batch_size:
            augmentations.check_batch(self.augmentation, self.batch_size)
        if self.optimizer == "muon" and not self.learning_rate:
            raise UsageError(
                "--learning_rate 0: with --optimizer muon it has to be above 0; "
                "airbench's is 0.24."
            )
        for name, period in self.periods.items():
            if self.steps_per_call > period:
                raise UsageError(
                    f"--steps_per_call {self.steps_per_call}: --{name} asks for "
                    f"something every {period} steps. Give at most so many, or raise "
                    f"--{name}."
                )
        if self.eval_steps and self.eval_steps > self.max_steps:
            raise UsageError(
                f"--eval_steps {self.eval_steps}: the training ends before, at "
                f"--max_steps {self.max_steps}. Give at most so many."
            )
        if self.stop_after_no_gain and not self.eval_steps:
            raise UsageError(
                f"--stop_after_no_gain {self.stop_after_no_gain}: it counts the "
                "training's own evaluations. Add --eval_steps, or leave it out."
            )
        self._check_schedule()
        self.all_stages  # noqa: B018 - refuses what is none.
        initial_weights_flag.check(self.initial_weights, self.model, self.distortions)
        self._check_sections()
        self.profiled_steps  # noqa: B018 - refuses what it cannot read.

    @property
    def schedule_ends(self) -> bool:
        """Whether the learning rate falls to its end at `max_steps`."""
        return self.schedule in ENDING_SCHEDULES

    @property
    def periods(self) -> dict[str, int]:
        """The numbers of steps after which something is due, by field."""
        names = ("log_frequency", "summary_steps", "checkpoint_steps", "eval_steps")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names of `freeze`."""
        return tuple(name.strip() for name in (self.freeze or "").split(",") if name)

    @property
    def all_stages(self) -> list[Stage]:
        """The stages of the training; what `freeze` names is frozen in all of them."""
        return [
            stage._replace(frozen=(*self.frozen, *stage.frozen))
            for stage in resolve(self.stages, self.max_steps)
        ]

    def stage(self, step: int) -> Stage:
        """Returns the stage of the step that comes after `step` steps."""
        return next(stage for stage in self.all_stages if step < stage.end)

    def steps_of_call(self, step: int) -> int:
        """Returns how many steps run in the call after `step` steps: one or all.

        Nothing may be due before the last of them, nor may a stage end there, and a
        step that is profiled runs by itself.
        """
        count = self.steps_per_call
        last = step + count
        first_profiled, last_profiled = self.profiled_steps or (math.inf, -math.inf)
        if (
            count == 1
            or any(step // p != (last - 1) // p for p in self.periods.values())
            or last % self.summary_steps == 0  # Its step returns its gradients too.
            or last > self.stage(step).end
            or (first_profiled <= last and step < last_profiled)
        ):
            return 1
        return count

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

    def _check_schedule(self) -> None:
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

    def _check_sections(self) -> None:
        sections = f"--sections {self.sections}"
        names = (self.sections or "1").split(",")
        is_number = names[0].strip().lstrip("+-").replace(".", "").isdigit()
        is_one = is_count(names[0]) and len(names) == 1
        if not all(name.strip() for name in names) or (is_number and not is_one):
            raise UsageError(
                f"{sections}: it is a whole number from 1 on, or names, as in "
                "conv2,local3."
            )

    def check_use_of_sections(self, *, cut: bool) -> None:
        """Refuses flags that would do nothing; `cut` is whether there are sections."""
        # Whether `auto` cuts depends on the memory: the same flags hold for both.
        if self.sections == "auto":
            return
        if self.memory_limit is not None:
            raise UsageError(
                f"--memory_limit {self.memory_limit}: only --sections auto uses it. "
                "Add that, or leave it out."
            )
        if self.section_cache == "host" and not cut:
            raise UsageError(
                "--section_cache host: there are no sections. Add --sections, or leave "
                "it out."
            )


@dataclasses.dataclass(frozen=True)
class ResolvedConfig(Config):
    """A configuration in which what depends on the machine is resolved.

    `precision` is never `auto`, and `batch_size` agrees with `global_batch_size`.
    """

    precision: str = narrowed(Config, "precision", choices=PRECISIONS)
    global_batch_size: int = narrowed(Config, "global_batch_size")
    towers: int = option(
        dataclasses.MISSING,
        "towers of all workers together",
        minimum=1,
    )
    workers: int = option(
        dataclasses.MISSING, "processes that train together", minimum=1
    )
