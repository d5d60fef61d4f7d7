"""Initializes a new run with the weights that `--initial_weights` names.

The flag names `imagenet`, a file that Keras has written, the directory of a run, or the
folder of a run's checkpoint. Keras loads all of them, by the structure of the model. If
the user named an outer layer, that name tells its place. A run that has a checkpoint of
its own resumes from that checkpoint instead.

A `.keras` file is a ZIP archive. It holds `model.weights.h5`, an HDF5 file with a group
for each layer, and a description of the model. The description may name code to run,
and is never opened. Keras itself reads only a copy of the HDF5 file that holds nothing
but arrays, which take no more memory than the file. An export names its classes.
"""

import contextlib
import io
import itertools
import json
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from cifar10 import files
from cifar10.config import data_flag, layout
from cifar10.config.config import ResolvedConfig
from cifar10.config.fields import WHOLE, BaseConfig
from cifar10.config.run_config import RecordedRun, run_of_weights
from cifar10.errors import UsageError, first_few, reason, say
from cifar10.models import layer_tree
from cifar10.models.architecture import APPLICATIONS_PREFIX
from cifar10.run_directory import checkpoints
from cifar10.towers.optimizers import slow_down

if TYPE_CHECKING:
    import h5py
    import keras
    import numpy as np

    from cifar10.towers.update import TrainState
    from cifar10.trained_model import TrainedModel

IMAGENET = "imagenet"
_SHOWN_NAMES = 4

# The most entries of an HDF5 file. A thousand layers have 3,000, which take 1.5 s.
_MOST_ENTRIES = 10_000
_DEEPEST = 100  # The time for an entry grows with its depth.
_NUMBERS = "fiubV"  # Kinds of arrays; Keras writes bfloat16 as V.

# The values of a layer's variables, by the layer's name.
Layers: TypeAlias = "dict[str, list[np.ndarray]]"


def check_initial_weights(config: BaseConfig) -> None:
    """Refuses unsuitable ImageNet weights, and a `pretrained_rate` without weights."""
    name, rate = config.fine_tuning.initial_weights, config.fine_tuning.pretrained_rate
    model, distortions = config.network.model, config.images.distortions
    if name is None and rate != 1.0:
        raise UsageError(
            f"pretrained_rate of the recipe: {rate} applies to layers with initial "
            "weights. Add --initial_weights, or use a copy of the recipe without it."
        )
    if name != IMAGENET:
        return
    # By name alone: `locked_run` checks before TensorFlow is configured and imported.
    if not model.startswith(APPLICATIONS_PREFIX):
        raise UsageError(
            f"--initial_weights imagenet: {model} has no published weights. Give "
            "--model applications:NAME, or name a file or the directory of a run."
        )
    if distortions not in WHOLE:
        raise UsageError(
            "--initial_weights imagenet needs all images on the same scale, which "
            f"--distortions {distortions} changes. Give {' or '.join(WHOLE)}."
        )


def locate_source(name: str) -> tuple[Path, int | None]:
    """Returns (path, None) for a file or a run, or (run, step) for a checkpoint."""
    path, step = layout.absolute_path(name), None
    if path.parent.name == layout.CHECKPOINTS:
        saved = checkpoints.steps(path.parent)
        at = {checkpoints.folder(path.parent, step): step for step in saved}
        if path in at:
            path, step = path.parent.parent, at[path]
    is_file = path.is_file() and name.endswith((".keras", ".weights.h5"))
    if not is_file and not (path / layout.CONFIG).is_file():
        raise UsageError(
            f"--initial_weights {name} is neither a run nor a file of Keras 3. Give "
            "imagenet, a .keras or .weights.h5 file, or a run's or checkpoint's folder."
        )
    return path, step


def take_initial_weights(
    config: ResolvedConfig,
    state: "TrainState",
    run: RecordedRun,
    earlier: RecordedRun | None,
) -> str:
    """Assigns the initial weights that `config` names to a newly built model.

    `earlier` is an earlier run in the directory of `run`. Returns a line to print.
    """
    is_users = config.run.fresh or "initial_weights" in config.given
    if earlier and not is_users and not earlier.is_own:
        raise UsageError(
            "--initial_weights: the run has no checkpoint, and its config.json was not "
            "written by you on this machine, or was edited. Give the flag yourself, or "
            "start over with --fresh."
        )
    source, layers = find_weights(config, state.model, run.facts.class_names)
    variables, taken = _variables(state.model), set()
    for name, values in layers.items():
        for variable, value in zip(variables[name], values, strict=True):
            variable.assign(value)
            taken.add(id(variable))
    trained = state.model.trainable_variables
    for average, variable in zip(state.averages, trained, strict=True):
        average.assign(variable.value)
    if config.fine_tuning.pretrained_rate != 1.0:
        slow = [variable for variable in trained if id(variable) in taken]
        slow_down(state.optimizer, slow, config.fine_tuning.pretrained_rate)
    line = f"Starts: with {len(layers)} of {len(variables)} layers from {source}."
    if new := [name for name in variables if name not in layers]:
        line += f" New layers: {first_few(new, _SHOWN_NAMES)}."
    origins, now = [*_origins(run)], config.dataset
    for was in [one.config.dataset for one in origins[:1]]:
        is_same = (was.data, was.data_dir) == (now.data, now.data_dir)
        if is_same and was.corrections and not now.corrections:
            line += "\nNote: the run that gave these weights had --corrections "
            line += f"{was.corrections}; this run has none."
    seen = {split for one in origins for split in _seen_splits(one, run)}
    if names := " and ".join(sorted(seen)):
        line += f"\nNote: these weights were trained on images that are {names} here. "
        others = "; scores on test are not" if "test" not in seen else ""
        line += f"Scores on {names} are optimistic{others}."
    return line


def _origins(run: RecordedRun) -> Iterator[RecordedRun]:
    """Yields the run with whose weights a run began, that run's origin, and so on."""
    seen, origin = {run.directory}, run_of_weights({**run.entries, "fresh": True})
    while origin and origin.directory not in seen:
        yield origin
        seen.add(origin.directory)
        origin = run_of_weights({**origin.entries, "fresh": True})


def _seen_splits(origin: RecordedRun, run: RecordedRun) -> set[str]:
    """Returns the splits of `run` with images on which `origin` was trained."""
    from cifar10.input.regrouping import recorded_limits

    was, now = origin.config.dataset, run.config.dataset
    if now.data == was.data == data_flag.FOLDER:  # Divided by limits of hashes.
        before, after = map(recorded_limits, (origin, run))
        is_same, seen = was.data_dir == now.data_dir, set[str]()
        for name in before.keys() & after.keys() if is_same else ():
            limits = after[name] > before[name].max(initial=0)
            splits = [one for one in ("test", "val") if one in run.facts.data_parts]
            seen |= {*itertools.compress(splits[-len(limits) :], limits)}
        return seen
    # CIFAR's fingerprints cover only the training split.
    is_same = origin.facts.data_fingerprint == run.facts.data_fingerprint
    is_same |= now.data in data_flag.NAMES
    # The val split of a larger fraction contains that of a smaller one.
    is_seen = is_same and was.data == now.data and was.val_fraction < now.val_fraction
    return {"val"} if is_seen else set()


def find_weights(
    config: ResolvedConfig, model: "keras.Model", class_names: Sequence[str]
) -> tuple[str, Layers]:
    """Returns the name of the source, and its values for the layers of `model`."""
    name = config.fine_tuning.initial_weights or ""
    wanted, classes = "its --model", [*class_names]  # The weights', if known.
    if name == IMAGENET:
        source, there = "ImageNet", _of_imagenet(config.network.model, model)
    else:
        path, wanted_step = locate_source(name)
        source = str(path)
        if path.is_dir():
            step, trained = _restored(path, wanted_step, config.network.model)
            there = _of_model(name, trained.model, model)
            source += f" at step {step:,}"
            wanted = f"--model {trained.run.config.network.model}"
            # A subclass has no `input_shape`.
            was, now = (getattr(m, "input_shape", None) for m in (trained.model, model))
            if was and now and was != now:
                sizes = f"{was[1]} x {was[2]}, not {now[1]} x {now[2]}"
                source += f" (on images of {sizes})"
            classes = [*trained.class_names]
        else:
            there = read_layers(name, path, model)
            classes = _class_names(name, path) or classes
    variables, head = _variables(model), layer_tree.head(model)
    of_others = {*map(id, head)} if classes != [*class_names] else set()
    found = {k: v for k, v in there.items() if id(variables[k][0]) not in of_others}
    if not found:
        raise UsageError(
            f"--initial_weights {name} fits no layer of {config.network.model}, which "
            f"has {first_few([*variables], _SHOWN_NAMES)}. Give {wanted}."
        )
    return source, found


def _variables(model: "keras.Model") -> "dict[str, list[keras.Variable]]":
    """Maps names to floating-point variables, inside and outside of layers."""
    held = {id(v) for layer in layer_tree.layers(model) for v in layer.variables}
    own = [v for v in model.variables if id(v) not in held and "float" in v.dtype]
    return layer_tree.by_name(model) | ({model.name: own} if own else {})


def _of_imagenet(name: str, model: "keras.Model") -> Layers:
    """Maps the layers of a model, except its head, to their ImageNet weights."""
    from cifar10.models import applications

    say("Loading ImageNet weights, which Keras downloads once.")
    with contextlib.redirect_stdout(io.StringIO()):  # Hides Keras's progress bar.
        features = applications.with_imagenet_weights(name, model.input_shape[1:])
    return _of_model(IMAGENET, features, model)


def _restored(path: Path, wanted: int | None, name: str) -> "tuple[int, TrainedModel]":
    """Returns the step of a run's checkpoint, and the model with its averages."""
    from cifar10.trained_model import TrainedModel

    RecordedRun.read(path).check_model(name, "--model")
    trained = TrainedModel(path, trust_model=name)
    step = trained.restore(wanted)
    averages = zip(trained.model.trainable_variables, trained.trainable, strict=True)
    for variable, average in averages:
        variable.assign(average)
    return step, trained


def _of_model(name: str, source: "keras.Model", model: "keras.Model") -> Layers:
    """Returns what Keras loads from the weights of a different model, by layer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "source.weights.h5"
        _save(source, path)
        return read_layers(name, path, model)


def _save(model: "keras.Model", path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # Keras 3.15 warns with NumPy 2.
        model.save_weights(path)


def read_layers(name: str, path: Path, model: "keras.Model") -> Layers:
    """Returns what Keras loads from a `.keras` or `.weights.h5` file, by layer.

    Leaves out a layer that would not get all of its values. `name` is what the user
    calls the file. The model has its own values again afterwards.
    """
    import h5py
    import keras
    import numpy as np

    kept = [(variable, variable.numpy()) for variable in model.variables]
    layers, kind = layer_tree.layers(model), keras.layers.Normalization
    constant = [layer for layer in layers if isinstance(layer, kind)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            own, copy = (Path(folder) / f"{one}.weights.h5" for one in ("own", "copy"))
            with (
                _opened(path) as content,
                h5py.File(content, "r") as file,
                h5py.File(copy, "w") as clean,
            ):
                _copy_arrays(file, clean, content.seek(0, os.SEEK_END))
            _save(model, own)
            _place_by_name(copy, own)
            for variable, value in kept:
                if "float" in variable.dtype:  # What stays NaN was not loaded.
                    variable.assign(np.full_like(value, np.nan))
            with warnings.catch_warnings(action="ignore"):  # They name one layer.
                model.load_weights(copy, skip_mismatch=True, objects_to_skip=constant)
        loaded = {
            layer: values
            for layer, variables in _variables(model).items()
            if (values := [variable.numpy() for variable in variables])
            and not any(np.isnan(value).any() for value in values)
        }
    except Exception as error:  # The parsers raise anything for a damaged file.
        raise _unreadable(name, error) from error
    finally:
        for variable, value in kept:
            variable.assign(value)
    return loaded


def _class_names(name: str, path: Path) -> Any:
    """Returns the class names in an export's description, or None without one."""
    if path.suffix != ".keras":
        return None
    try:
        with _opened(path, layout.DESCRIPTION) as content:
            return json.loads(content.read(files.DESCRIPTION_BYTES))["class_names"]
    except KeyError:  # The file has no description, or one without them.
        return None
    except Exception as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception) -> UsageError:
    return UsageError(
        f"--initial_weights {name} cannot be read as a Keras file: {reason(error)}. "
        "If the file is damaged, save or download it again."
    )


@contextlib.contextmanager
def _opened(path: Path, name: str = "model.weights.h5") -> Iterator[BinaryIO]:
    """Opens an HDF5 file, or a file inside a `.keras` file."""
    with files.opened(path, follow=True) as file:
        if path.suffix != ".keras":
            yield file
            return
        with zipfile.ZipFile(file) as archive:
            entry = archive.getinfo(name)
            # Uncompressed, as Keras writes it, it takes no more memory than the file.
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} in the file is compressed")
            yield io.BytesIO(archive.read(entry))


def _copy_arrays(file: "h5py.File", clean: "h5py.File", size: int) -> None:
    """Copies the arrays of numbers, and the names of layers, for Keras to read.

    Reads each object in the file once, and follows no links to other paths or files.
    `size` is that of the file in bytes, which all arrays together cannot exceed.
    """
    import h5py

    visited, left = 0, size

    def visit(path: str, item: h5py.Group | h5py.Dataset) -> None:
        nonlocal visited, left
        visited += 1
        if visited > _MOST_ENTRIES:
            raise ValueError(f"the file has more than {_MOST_ENTRIES:,} entries")
        if path.count("/") > _DEEPEST:
            raise ValueError(f"the file has more than {_DEEPEST} nested groups")
        if isinstance(item, h5py.Group):
            if name := _attribute(item, "name"):
                clean.require_group(path).attrs["name"] = name
        elif not path.startswith("optimizer/"):
            left -= item.nbytes
            if left < 0:
                raise ValueError(f"{item.name} is larger than the file")
            clean[path] = _value(item)

    file.visititems(visit)


def _value(item: "h5py.Dataset") -> "np.ndarray":
    import numpy as np
    import tensorflow as tf

    if item.external or item.is_virtual:
        raise ValueError(f"{item.name} is in another file")
    if item.chunks:  # A chunk may decompress to more than the array's size.
        raise ValueError(f"{item.name} is stored in chunks or compressed")
    if item.dtype.kind not in _NUMBERS:
        raise ValueError(f"{item.name} holds no numbers")
    value = item[()]
    if _attribute(item, "dtype") == "bfloat16":
        value = value.view(tf.bfloat16.as_numpy_dtype).astype(np.float32)
    with np.errstate(over="ignore"):
        if value.dtype.kind == "f" and not np.isfinite(value.astype("f4")).all():
            raise ValueError(f"{item.name} has values beyond the range of float32")
    return value


def _attribute(item: "h5py.Group | h5py.Dataset", name: str) -> str:
    """Returns a string that describes an object in the file, or ""."""
    # An array of strings may hold one long string a million times.
    is_one = name in item.attrs and item.attrs.get_id(name).shape == ()
    value = item.attrs[name] if is_one else ""
    return value if isinstance(value, str) else ""


def _place_by_name(copy: Path, own: Path) -> None:
    """Moves the values of named layers in a copy to where the file `own` has them."""
    # Otherwise Keras would load them into a wrong layer if earlier layers differ in
    # number, or in class because an export replaces this package's faster classes.
    import h5py

    with h5py.File(copy, "r+") as file, h5py.File(own, "r") as ours:
        to = _places(ours)
        moves = {at: to[name] for name, at in _places(file).items() if name in to}
        for place in moves:
            file.move(place, f"moved/{place}")
        for place, target in moves.items():
            if target in file:
                del file[target]
            file.move(f"moved/{place}", target)


def _places(file: "h5py.File") -> dict[str, str]:
    """Maps names of outer layers in a file to the groups that hold their values."""
    # Without Keras's default names, whose counters differ between processes.
    return {
        name: f"layers/{key}"
        for key, group in file.get("layers", {}).items()
        if (name := _attribute(group.get("vars", group), "name"))
        and not layer_tree.same_but_number(name, key)
    }
