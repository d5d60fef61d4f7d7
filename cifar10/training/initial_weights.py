"""Initializes a new run with the weights that `--initial_weights` names.

The flag names `imagenet`, a file that Keras has written, the directory of a run, or the
folder of a run's checkpoint. Layers are matched by their names and the shapes of their
variables. A run that has a checkpoint of its own resumes from that checkpoint instead.

A `.keras` file is a ZIP archive. It holds `model.weights.h5`, an HDF5 file with a group
for each layer, and a description of the model. The description may name code to run,
and is never opened. To limit memory, only arrays with the shapes of variables are read,
and an array that is stored in chunks is refused, because chunks may be compressed.
"""

import contextlib
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from cifar10.config import layout, run_config
from cifar10.config.config import ResolvedConfig
from cifar10.config.fields import WHOLE, FineTuning
from cifar10.errors import UsageError, first_few, reason, say
from cifar10.models import layer_tree
from cifar10.models.architecture import APPLICATIONS_PREFIX
from cifar10.process import files
from cifar10.run_directory import checkpoints
from cifar10.towers.optimizers import slow_down

if TYPE_CHECKING:
    import h5py
    import keras
    import numpy as np

    from cifar10.follower.trained_model import TrainedModel
    from cifar10.towers.update import TrainState

IMAGENET = "imagenet"
_FILES = (".keras", ".weights.h5")
_SHOWN_NAMES = 4

_WEIGHTS = "model.weights.h5"
# The most entries of an HDF5 file. A thousand layers have 3,000, which take 1.5 s.
_MOST_ENTRIES = 10_000
_DEEPEST = 100  # The time for an entry grows with its depth.
_VARIABLES, _OPTIMIZER = "vars", "optimizer/"

# The values of a layer's variables, by the layer's name.
Layers: TypeAlias = "dict[str, list[np.ndarray]]"


def check_initial_weights(requested: FineTuning, model: str, distortions: str) -> None:
    """Refuses unsuitable ImageNet weights, and a `pretrained_rate` without weights."""
    name, rate = requested.initial_weights, requested.pretrained_rate
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
    is_file = path.is_file() and name.endswith(_FILES)
    if not is_file and not (path / layout.CONFIG).is_file():
        raise UsageError(
            f"--initial_weights {name} does not exist or holds no weights. Give "
            "imagenet, a .keras or .weights.h5 file, or a run's or checkpoint's folder."
        )
    return path, step


def take_initial_weights(
    config: ResolvedConfig,
    state: "TrainState",
    settings: Mapping[str, Any],
    earlier: Mapping[str, Any] | None,
) -> str:
    """Assigns the initial weights that `config` names to a newly built model.

    `settings` is the content of the new `config.json`, and `earlier` the content of an
    earlier `config.json` in the run's directory, if any. Returns a line to print.
    """
    if earlier and not config.run.fresh and not earlier.get(run_config.IS_OWN):
        raise UsageError(
            "--initial_weights: the run has no checkpoint, and its config.json was not "
            "written by you on this machine, or was edited. Start over with --fresh."
        )
    source, layers = find_weights(config, state.model, settings)
    variables, taken = layer_tree.by_name(state.model), set()
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
    return line


def find_weights(
    config: ResolvedConfig, model: "keras.Model", settings: Mapping[str, Any]
) -> tuple[str, Layers]:
    """Returns the name of the source, and its values for the layers of `model`."""
    name = config.fine_tuning.initial_weights or ""
    variables = layer_tree.by_name(model)
    wanted = {layer: _shapes(of_layer) for layer, of_layer in variables.items()}
    of_other_classes = False
    if name == IMAGENET:
        source, there = "ImageNet", _of_imagenet(config.network.model, model)
    else:
        path, wanted_step = locate_source(name)
        source = str(path)
        if path.is_dir():
            step, trained, there = _of_run(path, wanted_step, config.network.model)
            source += f" at step {step:,}"
            if (was := trained.model.input_shape) != (now := model.input_shape):
                sizes = f"{was[1]} x {was[2]}, not {now[1]} x {now[2]}"
                source += f" (on images of {sizes})"
            names = trained.settings.get("class_names")
            of_other_classes = names != settings["class_names"]
        else:
            there = read_layers(path, wanted)
    of_head = {id(variable) for variable in layer_tree.head(model).variables}
    found = {
        layer: there[layer]
        for layer, of_layer in variables.items()
        if layer in there
        and _shapes(there[layer]) == wanted[layer]
        and not (of_other_classes and id(of_layer[0]) in of_head)
    }
    if not found:
        raise UsageError(
            f"--initial_weights {name} fits no layer of {config.network.model} by name "
            f"and shape: {first_few([*variables], _SHOWN_NAMES)}. Give its --model."
        )
    return source, found


def _of_imagenet(name: str, model: "keras.Model") -> Layers:
    """Maps the layers of a model, except its head, to their ImageNet weights.

    Layers are matched by their order, because Keras generates some of their names.
    """
    from cifar10.models import applications

    say("Loading the weights of ImageNet, which Keras downloads once.")
    with contextlib.redirect_stdout(io.StringIO()):  # Hides Keras's progress bar.
        features = applications.with_imagenet_weights(name, model.input_shape[1:])
    head = layer_tree.head(model).name
    others = [layer for layer in layer_tree.by_name(model) if layer != head]
    there = layer_tree.by_name(features).values()
    return {
        layer: [variable.numpy() for variable in of_layer]
        for layer, of_layer in zip(others, there, strict=True)
    }


def _of_run(
    path: Path, wanted_step: int | None, name: str
) -> "tuple[int, TrainedModel, Layers]":
    """Returns the step, the model and the averaged weights of a run's checkpoint."""
    import numpy as np

    from cifar10.follower.trained_model import TrainedModel

    run_config.check_model(run_config.read_run_config(path), name, "--model")
    trained = TrainedModel(path, trust_model=name)
    step, model = trained.restore(wanted_step), trained.model
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    averages = [*trained.trainable, *trained.non_trainable]
    values = {id(v): np.asarray(of) for v, of in zip(variables, averages, strict=True)}
    there = {
        layer: [values[id(variable)] for variable in of_layer]
        for layer, of_layer in layer_tree.by_name(model).items()
    }
    return step, trained, there


def _shapes(arrays: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(array.shape) for array in arrays]


def read_layers(path: Path, wanted: Mapping[str, list[tuple[int, ...]]]) -> Layers:
    """Reads the wanted layers of a `.keras` or `.weights.h5` file.

    `wanted` maps the name of each layer, as in `layer_tree.by_name`, to the shapes of
    its floating-point variables. Leaves out a layer with other shapes.
    """
    import h5py

    try:
        with _opened(path) as content, h5py.File(content, "r") as file:
            return {
                name: _values(arrays)
                for name, arrays in _arrays_of_layers(file).items()
                if [array.shape for array in arrays] == wanted.get(name)
            }
    except Exception as error:  # The parsers raise anything for a damaged file.
        raise UsageError(
            f"--initial_weights {path} cannot be read as a Keras file: "
            f"{reason(error)}. If the file is damaged, save or download it again."
        ) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens an HDF5 file, or the HDF5 file inside a `.keras` file."""
    with files.opened(path, follow=True) as file:
        if path.suffix != ".keras":
            yield file
            return
        with zipfile.ZipFile(file) as archive:
            entry = archive.getinfo(_WEIGHTS)
            # Uncompressed, as Keras writes it, it takes no more memory than the file.
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{_WEIGHTS} in the file is compressed")
            yield io.BytesIO(archive.read(entry))


def _arrays_of_layers(file: "h5py.File") -> "dict[str, list[h5py.Dataset]]":
    """Maps each layer's name to its floating-point arrays, in order of its variables.

    Reads each object in the file once, and follows no links to other paths or files.
    """
    import h5py

    numbered: dict[str, dict[int, h5py.Dataset]] = {}
    visited: set[str] = set()

    def visit(path: str, item: h5py.Group | h5py.Dataset) -> None:
        visited.add(path)
        if len(visited) > _MOST_ENTRIES:
            raise ValueError(f"the file has more than {_MOST_ENTRIES:,} entries")
        if path.count("/") > _DEEPEST:
            raise ValueError(f"the file has more than {_DEEPEST} groups in each other")
        group, _, key = path.rpartition("/")
        if not key.isdecimal() or not group.endswith(f"/{_VARIABLES}"):
            return
        if not isinstance(item, h5py.Dataset):
            raise TypeError(f"{item.name} is not an array")
        if item.external or item.is_virtual:
            raise ValueError(f"{item.name} is in another file")
        if item.dtype.kind == "f" and not path.startswith(_OPTIMIZER):
            numbered.setdefault(group, {})[int(key)] = item

    file.visititems(visit)
    return {
        _layer_name(file, group): [arrays[number] for number in sorted(arrays)]
        for group, arrays in numbered.items()
    }


def _layer_name(file: "h5py.File", variables: str) -> str:
    """Returns the name of the layer whose variables are at the path `variables`.

    The names of the enclosing layers come first, separated by slashes. Keras's default
    names end in a counter, which differs between processes. Such a name is replaced by
    that of the HDF5 group, which numbers the layers of a class in the enclosing layer.
    """
    import h5py

    names = []
    *groups, _ = variables.split("/")
    for depth, key in enumerate(groups, 1):
        of_layer = "/".join([*groups[:depth], _VARIABLES])
        if isinstance(file.get(of_layer, getlink=True), h5py.HardLink):
            name = file[of_layer].attrs.get("name")
            is_own = isinstance(name, str) and not layer_tree.same_but_number(name, key)
            names.append(name if is_own else key)
    return "/".join(names)


def _values(arrays: "list[h5py.Dataset]") -> "list[np.ndarray]":
    import numpy as np

    for array in arrays:
        if array.chunks:  # A chunk may decompress to more than the array's size.
            raise ValueError(f"{array.name} is stored in chunks or compressed")
    values = [array[()] for array in arrays]
    with np.errstate(over="ignore"):
        in_float32 = [value.astype(np.float32) for value in values]
    if not all(np.isfinite(value).all() for value in in_float32):
        raise ValueError(f"{arrays[0].name} has values that are not finite in float32")
    return values
