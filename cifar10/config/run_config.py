"""Reads and writes the `config.json` of a run, and decides how far to trust it.

When a training run writes a `config.json`, it also creates a note in the user's state
directory: an empty file named by the SHA-256 checksum of the `config.json`. Without a
note, a `config.json` comes from somebody else or was edited. Then its model is not run
as code, its folders and URLs are not used, and its control characters are escaped.
"""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from cifar10 import files
from cifar10.config import data_flag, fields, layout, schema
from cifar10.config.options import SESSION, WORKER, Range, options
from cifar10.errors import UsageError, has_controls, printable, reason
from cifar10.models import registry

# Without these entries a run cannot be resumed or evaluated.
_NEEDED = (
    *("data", "data_dir", "data_url", "distortions", "global_batch_size", "max_steps"),
    *("model", "parameters", "precision", "simulated"),
)
# Of `Facts.versions`, those of the machine, which only decide how sums round.
HARDWARE = ("processor", "driver")
_PLACES = ("data_dir", "data_url", "corrections")  # Ignored in another user's run.
# Begins the names of what the workers' code computes: rounding may differ.
COMPUTED = "computed by the code of "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a run's data, model and machine.

    Earlier versions of this package recorded fewer facts. Defaults mean unknown facts.
    """

    scope: ClassVar[str] = SESSION

    data_is_real: bool = True  # Not a stand-in.
    data_description: Annotated[str, WORKER] = ""
    data_division: str | None = None  # As `regrouping.divided` returns it.
    data_fingerprint: str | None = None  # Earlier: None for CIFAR.
    data_uncorrected: str | None = None  # The fingerprint before corrections.
    data_parts: list[str] = dataclasses.field(default_factory=list)  # The splits.
    # Digests of some of the training images, as `samples.sampled` returns them.
    data_sample: Annotated[list[str], WORKER] = dataclasses.field(default_factory=list)
    # Height, width, channels of the data's images.
    image_shape: list[int] = dataclasses.field(default_factory=list)
    classes: Annotated[int, Range(1, 10**6)] = 2
    class_names: list[str] = dataclasses.field(default_factory=list)
    parameters: Annotated[int, Range(0, 10**15)]  # The model's size.
    # Logits of a user's model, from `probe`. Their rounding depends on the processor.
    model_logits: Annotated[list[float], WORKER] = dataclasses.field(
        default_factory=list
    )
    devices: Annotated[str, WORKER] = ""  # The towers', in words.
    on_gpus: bool = False
    variables_on: str = ""  # Devices of the variables.
    simulated: bool  # Several towers share a device.
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    # For a run that `whatif` made: what was changed, in which run.
    what_if: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run as its `config.json` records it.

    Attributes:
        directory: The run's directory.
        config: The configuration, with the data set and the machine that were found.
            A function of a Python program is a name here.
        facts: Facts about the run's data, model and machine.
        entries: The content of `config.json`. It may lack values that `config` has as
            defaults, and have others of another version of this package.
        is_own: Whether this user's training wrote the file, and nobody changed it.
    """

    directory: Path
    config: fields.RecordedConfig
    facts: Facts
    entries: Mapping[str, Any]
    is_own: bool = True

    @classmethod
    def of(cls, path: Path, entries: Mapping[str, Any], *, is_own: bool = True) -> Self:
        """Describes a run by the content of a valid `config.json`."""
        facts = {name: entries[name] for name in options(Facts).keys() & entries.keys()}
        config = fields.RecordedConfig.of(entries)
        return cls(path, config, Facts(**facts), entries, is_own)

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads a valid `config.json`; makes another user's file harmless."""
        path = directory / layout.CONFIG
        content, entries = _read(directory, path)
        is_own = False
        with contextlib.suppress(OSError, RuntimeError):  # No readable home folder.
            is_own = files.note_path("runs", content).is_file()
        if not is_own:
            entries = {**inert(entries), **dict.fromkeys(_PLACES)}
        if wrong := _wrong(entries):
            why = f"{wrong} is missing or has the wrong type"
            raise UsageError(f"{path}: {why}. Restore the file.")
        return cls.of(directory, entries, is_own=is_own)

    def write(self) -> str:
        """Writes `config.json` and the note; returns a message if the note failed."""
        content = (json.dumps(self.entries, indent=2) + "\n").encode()
        # Marked first, because a follower may read the file as soon as it exists.
        message = mark_as_own(content)
        files.write_atomically(self.directory / layout.CONFIG, content)
        return message

    @property
    def values(self) -> dict[str, Any]:
        """All values by name, recorded or default."""
        return {**self.config.values, **vars(self.facts)}

    @property
    def in_common(self) -> dict[str, Any]:
        """The entries that must be equal on all workers."""
        known, versions = options((*fields.RECORDED, Facts)), self.facts.versions
        hardware = () if self.config.speed.deterministic else HARDWARE
        differing = {name for name, one in known.items() if one.scope is WORKER}
        found = {k: value for k, value in self.entries.items() if k not in differing}
        common = {k: version for k, version in versions.items() if k not in hardware}
        return {**found, "versions": common}

    def check_model(self, trusted: str | None, flag: str = "--trust_model") -> bool:
        """Refuses a model that is Python code, unless the user trained or trusts it.

        Returns True if `trusted` adds the module to a recorded function's bare name.
        """
        name = self.config.network.model
        function = name.removeprefix(registry.PYTHON)
        if trusted and trusted != name == registry.PYTHON + trusted.partition(":")[2]:
            registry.register_function(name, trusted)
            return True
        if name != function and name not in registry.ARCHITECTURES:
            raise UsageError(
                f"The run's model is {name}, a function of a Python program. "
                f"{registry.IN_PYTHON} Or, if the function is in MODULE.py, a command "
                f"can build the model with {flag} MODULE:{function}, and must find its "
                "data."
            )
        if registry.is_code(name) and not self.is_own and name != trusted:
            raise UsageError(
                f"The run's model is {name}, Python code, but its config.json was not "
                "written by you on this machine, or was edited. If you trust this code "
                f"in {Path.cwd()} or an installed package, add:\n    {flag} {name}"
            )
        return False

    def check_logits(self, found: Sequence[float]) -> None:
        """Refuses a model whose `Facts.model_logits` are not those of the run."""
        network = self.config.network
        if differ(self.facts.model_logits, found, network.precision):
            why = f"computes other logits than when the run {self.directory} began"
            how = "Restore its code, with random constants as weights, or begin anew."
            raise UsageError(f"--model {network.model} {why}. {how}")


def differ(values: Sequence[float], others: Sequence[float], precision: str) -> bool:
    """Returns whether code computes `others` in place of `values`, beyond rounding."""
    # Keras's networks reach half of the first bound and a thousandth of the second.
    bound = 0.03 if "16" in precision else 1e-3
    limit = bound * max(map(abs, values), default=0.0)
    return any(abs(a - b) > limit for a, b in zip(values, others, strict=False))


def _read(directory: Path, path: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        content = files.read(path)
        values = json.loads(content.decode())
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY004, TRY301
    except (FileNotFoundError, NotADirectoryError) as error:
        why = f"{directory} holds no run: it has no {layout.CONFIG}"
        raise UsageError(f"{why}. Give a run's folder.") from error
    except (OSError, ValueError, RecursionError) as error:
        why = f"{path} cannot be read: {reason(error)}"
        raise UsageError(f"{why}. Restore it, or start a new run.") from error
    return content, values


def _wrong(entries: Mapping[str, Any]) -> str:
    """Returns the name of an entry that is missing or invalid; empty if none is.

    Other entries are allowed, such as flags of earlier versions.
    """
    rules = {name: (one.type,) for name, one in options(fields.RECORDED).items()}
    for name, one in options(Facts).items():
        rules[name] = (one.type, *one.limits[0]) if one.limits else (one.type,)
    if found := schema.wrong(entries, {**rules, **schema.SIZE}):
        return found
    if not re.fullmatch("[0-9a-f]*", str(entries.get("data_division") or "")):
        return "data_division"
    return next((name for name in _NEEDED if name not in entries), "")


def run_of_weights(given: Mapping[str, Any]) -> RecordedRun | None:
    """Returns the run that gives a new run its initial weights; None if no run does.

    Prefers a run in `train_dir` that began with them: it can resume without the source.
    """
    name = given.get("initial_weights")
    source = layout.absolute_path(name or "")
    if source.parent.name == layout.CHECKPOINTS:
        source = source.parent.parent
    own = layout.absolute_path(given.get("train_dir", fields.TRAIN_DIR))
    for path in [own, source][bool(given.get("fresh")) :] if name else ():
        with contextlib.suppress(UsageError):  # There is no run, or it is damaged.
            run = RecordedRun.read(path)
            if path == source or run.config.fine_tuning.initial_weights == name:
                return run
    return None


def config_to_resume(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of the run that `--resume` names.

    Refuses flags in `given` that exclude `--resume`. The other flags are compared with
    `config.json` when training begins, as for every run.
    """
    for flag in ("train_dir", "recipe", "fresh"):
        if flag in given:
            raise UsageError(
                f"--{flag} and --resume cannot be combined: --resume {name} continues "
                "that run with the settings in its config.json. Leave out one."
            )
    run = RecordedRun.read(layout.absolute_path(name))
    if run.check_model(given.get("model"), "--model"):
        del given["model"]  # The run keeps its name for the model.
    known = options(fields.ALL).keys() - options(fields.Processes).keys()
    values = {field: run.entries[field] for field in known & run.entries.keys()}
    if (keep := run.config.checkpoints).keep_best == bool(keep.eval_steps):
        values.pop("keep_best", None)  # The default, which follows from --eval_steps.
    is_of_others = given.get("data", "auto") not in ("auto", values["data"])
    is_there = os.path.exists(values["data_dir"] or "")  # noqa: PTH110
    if is_of_others or (values["data"] in data_flag.NAMES and not is_there):
        del values["data_dir"]  # A known data set may be found elsewhere.
    return {**values, "train_dir": str(run.directory), "fresh": False}


def mark_as_own(content: bytes) -> str:
    """Marks a `config.json` as the user's own; returns a message if that failed."""
    try:
        note = files.note_path("runs", content)
        note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note.touch()
    except (OSError, RuntimeError) as error:
        why = f"The run could not be recorded as yours: {reason(error)}"
        fix = "give other commands --data_dir, and --trust_model for your own model"
        return f"{why}. For this run, {fix}."
    return ""


def inert(value: Any) -> Any:
    """Escapes strings in a JSON value that have control characters."""
    if isinstance(value, str):
        return printable(value) if has_controls(value) else value
    if isinstance(value, list):
        return [inert(item) for item in value]
    if isinstance(value, dict):
        return {inert(name): inert(item) for name, item in value.items()}
    return value
