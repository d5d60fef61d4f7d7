"""The configuration of a training run, as requested and as resolved for a machine.

Flags, recipes, arguments of `Config` and `config.json` set the fields of `fields.py`.
"""

import copy
import dataclasses
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from cifar10 import files
from cifar10.config import augmentation, data_flag, fields, python_objects, run_config
from cifar10.config.options import defaults, options
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError, reason
from cifar10.models.registry import ARCHITECTURES, name_of_function
from cifar10.towers import schedule
from cifar10.towers.stages import Stage, resolve_stages

_RECIPES = Path(__file__).parent / "recipes"


class Config(fields.BaseConfig):
    """The configuration of a training run.

    Every flag of train_multi_gpu.py is an argument with the same default, for example
    `resume="runs/mine"`. The settings that only recipes have, such as `stages`, are
    arguments too. Read values by group, for example `config.batch.batch_size`.

    Args:
        model: A model's name, or a function of (image_shape, classes) that returns it.
        data: The name of a data set or the path of your pictures, as for --data;
            arrays (x, y) or ((x, y), (x_test, y_test)); or a
            `cifar10.input.dataset_base.Dataset`. Images are uint8 [count, height,
            width, 3], from 0 to 255. Grey images may also be [count, height, width] or
            [count, height, width, 1]. Labels are integers [count] or [count, 1]. A
            finite `tf.data.Dataset` of (image, label) may replace (x, y).
        **given: The other settings. `initial_weights` and `resume` may be a `Record`,
            `optimizer` a Keras optimizer, `learning_rate` a Keras schedule and `loss` a
            `keras.losses.Loss`. `loss` and the values of the dict `metrics` may be
            functions: from labels, int64 [batch], and logits, floating [batch,
            classes], they compute one value per image, or the mean.

    Attributes:
        model_function: `model` if it is a function, else None.
        data_objects: `data` if it is neither a name nor a path, else None.
        given: The names of the settings that are not the recipe's or a run's.

    Raises:
        UsageError: A value is invalid, or there is no such argument.

    Example:
        >>> config = Config(optimizer="adamw", learning_rate=0.001, max_steps=500)
        >>> config.update.optimizer
        'adamw'
        >>> config.replace(seed=1).run.seed
        1
    """

    model_function: Callable[..., Any] | None = None
    data_objects: Any = None
    given: frozenset[str] = frozenset()
    _arguments: Mapping[str, Any] | None = None  # None if made from values.

    def __init__(
        self,
        *,
        model: str | Callable[..., Any] | None = None,
        data: Any = None,
        **given: Any,
    ) -> None:
        self._arguments = {"model": model, "data": data, **given}
        resolved = python_objects.resolve(given)
        named = {name: _plain(value) for name, value in resolved.items()}
        if model is not None:
            named["model"] = _name_of_model(model)
        if data is not None:
            named["data"] = data_flag.name_of(data)
        known = {**options(fields.ALL), fields.RESUME.name: fields.RESUME}
        for name, value in named.items():
            if name not in known:
                raise UsageError(f"Config has no argument {name}.")
            known[name].check(value)
        self.given = frozenset(named)
        self._assign(_completed(named))
        scores = (*fields.SCORES, *(self.loss.metrics or ()))
        if (best_by := self.checkpoints.best_by) not in scores:
            raise UsageError(f"--best_by {best_by}: give one of {', '.join(scores)}.")
        self.model_function = model if callable(model) else None
        self.data_objects = None if isinstance(data, str | Path) else data

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Builds a configuration from values and defaults, without any recipe."""
        config = cls.__new__(cls)
        config._assign(values)  # noqa: SLF001 - of this class.
        return config

    def replace(self, **changes: Any) -> Self:
        """Returns the configuration of the same arguments and `changes`; None omits."""
        if self._arguments is None:
            return self.with_values(**changes)
        given = {**self._arguments, **changes}
        omitted = {name for name in changes if changes[name] is None}
        return type(self)(**{name: given[name] for name in given.keys() - omitted})

    def with_values(self, **changes: Any) -> Self:
        """Returns a copy with some fields changed, without the rules for arguments."""
        if unknown := changes.keys() - self.values.keys():
            raise UsageError(f"Config has no argument {min(unknown)}.")
        config = copy.copy(self)
        config._arguments = None  # noqa: SLF001 - of this class.
        config._assign({**self.values, **changes})  # noqa: SLF001
        return config

    @property
    def all_stages(self) -> list[Stage]:
        """The stages of the training run, each with the layers of `freeze` frozen."""
        stages, freeze = self.update.stages, self.fine_tuning.freeze
        return resolve_stages(stages, self.run.max_steps, freeze)

    def stage(self, step: int) -> Stage:
        """Returns the recipe's stage for the step that follows `step`."""
        return next(stage for stage in self.all_stages if step < stage.end)

    def steps_of_call(self, step: int, most: int) -> int:
        """Returns the number of steps in the next call, at most `most`.

        A call ends where a summary, an evaluation, a checkpoint or the end of a stage
        is due, and around a verified step. Steps within a call are logged, too.
        """
        keep = self.checkpoints
        periods = self.output.summary_steps, keep.checkpoint_steps, keep.eval_steps
        left = [period - step % period for period in periods if period]
        if verify := keep.verify_steps:
            left.append(verify - 1 - step % verify or 1)
        return min(most, self.stage(step).end - step, *left)

    def calls(self, step: int, most: int) -> Iterator[int]:
        """Yields the numbers of steps of the calls from `step` to its stage's end."""
        end = self.stage(step).end
        while step < end:
            yield (count := self.steps_of_call(step, most))
            step += count

    def _assign(self, values: Mapping[str, Any]) -> None:
        """Sets all fields; refuses values that contradict those of another group."""
        super()._assign(values)
        if not self.batch.global_batch_size:
            augmentation.check_batch(self.images.augmentation, self.batch.batch_size)
        keep = self.checkpoints
        if keep.stop_after_no_gain and not keep.eval_steps:
            what = f"--stop_after_no_gain {keep.stop_after_no_gain}"
            raise UsageError(f"{what} needs --eval_steps.")
        _refuse_longer("eval_steps", keep.eval_steps, self.run.max_steps)
        if "verify_steps" in self.given:  # Earlier versions accepted any of a run.
            _refuse_longer("verify_steps", keep.verify_steps, self.run.max_steps)
        if callable(self.loss.loss) and keep.best_by == "total_loss":
            why = "best_by total_loss: evaluations do not compute your loss function"
            fix = "Give another score, such as best_by='cross_entropy'"
            raise UsageError(f"{why}. {fix}.")
        if self.run.max_hours and self.update.schedule_ends:
            why = f"--schedule {self.update.schedule} needs a last step"
            fix = "Give --max_epochs, or --schedule staircase"
            raise UsageError(f"--max_hours {self.run.max_hours:g}: {why}. {fix}.")
        self.all_stages  # noqa: B018 - refuses invalid tables.


@dataclasses.dataclass(init=False)
class ResolvedConfig(Config):
    """A configuration whose machine-dependent values are resolved.

    `precision` is never `auto`, and `batch_size` agrees with `global_batch_size`.
    """

    machine: fields.Machine

    @property
    def global_batch_size(self) -> int:
        """The number of images per step, over all towers of all workers."""
        return self.batch.batch_size * self.machine.towers * self.batch.accumulate


def read_recipe(name: str) -> dict[str, Any]:
    """Returns the fields that a recipe sets, with their values.

    A recipe is a TOML file that sets fields. `name` is a recipe in `recipes/`, or the
    path of any file. A recipe overrides the defaults, and flags override the recipe.
    """
    known = {path.stem: path for path in sorted(_RECIPES.glob("*.toml"))}
    path = known.get(name, Path(name))
    try:
        # Python takes minutes to parse a key of thousands of dotted names.
        values = tomllib.loads(files.read(path, 50_000, follow=True).decode())
        str(values)  # Raises ValueError for a number of thousands of digits.
    except FileNotFoundError as error:
        why = f"no such file. The recipes are {', '.join(known)}"
        raise UsageError(f"--recipe {name}: {why}.") from error
    except (OSError, ValueError, RecursionError) as error:
        why = f"cannot be read as a TOML file: {reason(error)}"
        raise UsageError(f"--recipe {name} {why}.") from error
    source = f"--recipe {name}: "
    possible = {key: one for key, one in options(fields.ALL).items() if one.in_recipes}
    for field, value in values.items():
        if field not in possible:
            why = f"a recipe cannot set {field}"
            raise UsageError(f"{source}{why}. Correct or remove that line.")
        possible[field].check(value, source)
    _refuse_alternatives(values, source)
    return values


def flags_of(run: RecordedRun, source: RecordedRun | None) -> dict[str, Any]:
    """Returns the flags that give a new run the configuration of `run`.

    Leaves out flags of processes or of speed alone, and values of recipe or `source`.
    """
    known, values = options(fields.ALL), run.values
    usual = defaults(fields.ALL) | read_recipe(values["recipe"]) | {"recipe": None}
    # A new run finds out by itself whether XLA helps; train.py has one tower.
    usual |= {"xla": False, "num_gpus": 1}
    usual |= {"keep_best": int(bool(values["eval_steps"]))} | _kept_of(source, values)
    length = next(name for name in reversed(fields.LENGTHS) if values[name])
    others = [*options((fields.Checkpoints, fields.Output)), "num_gpus", "accumulate"]
    listed = [*fields.result_determining(run.config), *others]
    names = [name for name in listed if name in known.keys() - fields.LENGTHS]
    found = {
        name: values[name]
        for name in ("data", "data_dir", "corrections", "recipe", *names, length)
        if known[name].in_flags and values[name] not in (None, usual[name])
    }
    if values["data"] in data_flag.KINDS:
        found["data"] = found.pop("data_dir")
    unused = _parameters_of_others(values["schedule"])
    return {name: found[name] for name in found if name not in unused}


def _refuse_alternatives(given: Mapping[str, Any], source: str = "") -> None:
    """Refuses two batch sizes, and two lengths."""
    for alternatives in (("batch_size", "global_batch_size"), fields.LENGTHS):
        named = [f"--{name}" for name in alternatives if given.get(name) is not None]
        if len(named) > 1:
            why = f"{source}{' and '.join(named)} cannot be combined"
            raise UsageError(f"{why}. Give one.")


def _completed(given: dict[str, Any]) -> dict[str, Any]:
    """Completes the given values from the run to resume, or else from the recipe."""
    _refuse_alternatives(given)
    given, recipe = data_flag.located(given), {}
    if "resume" in given:
        base = run_config.config_to_resume(given.pop("resume"), given)
    else:
        recipe = read_recipe(given["recipe"]) if "recipe" in given else {}
        place = {k: v for k, v in (recipe | given).items() if k in ("data", "data_dir")}
        given = {**given, **data_flag.located(place)}  # A recipe may name the data.
        data = given.get("data", "auto")
        default = "tutorial" if data in data_flag.NAMES else "pictures"
        known = ARCHITECTURES.get(given.get("model", ""))
        default = (known and known.recipe) or default
        kept = {}
        if given.get("initial_weights"):
            default = "finetune"
            kept = _kept_of(run_config.run_of_weights(given), given)
        name = given.get("recipe", default)
        base = {**(recipe or read_recipe(name)), "recipe": name}
        base = {**kept, **base} if "recipe" in given else {**base, **kept}
        optimizer = base.get("optimizer")
        if optimizer and given.get("optimizer", optimizer) != optimizer:
            base.pop("optimizer_arguments", None)  # Of the recipe's optimizer.
    if "batch_size" in given:  # It overrides the recipe's global batch size.
        base.pop("global_batch_size", None)
    if any(given.get(name) is not None for name in fields.LENGTHS):
        base |= {"max_steps": fields.OPEN_STEPS, "max_epochs": None, "max_hours": None}
    elif base.get("max_epochs") or base.get("max_hours"):  # From a recipe.
        base = {"max_steps": fields.OPEN_STEPS, **base}
    values = {**base, **given}
    changed = {name for name in given if given[name] != base.get(name)}
    # A recipe that is given may set what only some data or schedules use.
    others = {"data_url", *data_flag.OF_FOLDERS}
    others |= {*schedule.PARAMETERS} if "schedule" not in given else set()
    changed |= others & recipe.keys()
    _refuse_unused(changed, values)
    if {"data_dir", "data_url"} <= given.keys():
        what = f"--data_url has no effect with --data_dir {given['data_dir']}"
        raise UsageError(f"{what}. Omit one.")
    return {"keep_best": int(bool(values.get("eval_steps"))), **values}


def _refuse_longer(name: str, period: int | None, max_steps: int) -> None:
    if period and period > max_steps:
        raise UsageError(f"--{name} {period}: give at most --max_steps {max_steps}.")


def _parameters_of_others(chosen: str) -> set[str]:
    """Returns the parameters that a schedule does not have."""
    curve = schedule.CURVES.get(chosen)
    return {*schedule.PARAMETERS} - {*curve.parameters} if curve else set()


def _refuse_unused(names: set[str], values: Mapping[str, Any]) -> None:
    chosen = values.get("schedule", fields.Update.schedule)
    unused = dict.fromkeys(_parameters_of_others(chosen), f"--schedule {chosen}")
    data = values.get("data", "auto")
    others = [] if data == data_flag.FOLDER else [*data_flag.OF_FOLDERS]
    others += [] if data in {*data_flag.NAMES} - {"synthetic"} else ["data_url"]
    unused |= dict.fromkeys(others, f"--data {data}")
    for name in sorted(names & unused.keys()):
        fix = f", or give --val_fraction {values[name]}" if "fraction" in name else ""
        raise UsageError(f"--{name} has no effect with {unused[name]}. Omit it{fix}.")


def _kept_of(run: RecordedRun | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of a run that decide its splits and its layers' shapes."""
    if run is None:
        return {}
    names = [] if "recipe" in given else ["distortions"]
    if given.get("data") == run.config.dataset.data == data_flag.FOLDER:
        names += data_flag.OF_DIVISION
    model = given.get("model", "tutorial")
    if model == run.config.network.model and "recipe" not in given:
        names += ["depth", "width"]
    return {name: run.entries[name] for name in names if name in run.entries}


def _plain(value: Any) -> Any:
    """Converts an argument of `Config` to its JSON form, and a `Record` to its path."""
    value = getattr(value, "train_dir", value)
    if isinstance(value, Path):
        return os.fspath(value)
    if hasattr(value, "tolist") and not hasattr(value, "keys"):  # NumPy's.
        return value.tolist()
    return [*map(_plain, value)] if isinstance(value, tuple | range) else value


def _name_of_model(model: str | Callable[..., Any]) -> str:
    if isinstance(model, str):
        return model
    if hasattr(model, "layers") or not callable(model):
        fix = "give a name or a function that builds a Keras model"
        raise UsageError(f"--model {model!r}: {fix}.")
    return name_of_function(model)
