"""`--initial_weights`: the values that a training begins with, from elsewhere.

It is `imagenet`, a file that Keras has written, or the directory of a run. Only a
training that has no checkpoint yet takes them; a resumed one has its own, and does not
need the file any more. Layers are matched by their names and the shapes of their
variables. What can be checked before TensorFlow starts does not import it.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from cifar10.config import layout, run_config
from cifar10.config.config import ResolvedConfig
from cifar10.config.data_flag import NPZ
from cifar10.config.fields import FineTuning
from cifar10.errors import UsageError, first_few, printable
from cifar10.models import layer_tree
from cifar10.models.registry import find_architecture, is_code
from cifar10.process import entry_point
from cifar10.towers.optimizers import slow_down

if TYPE_CHECKING:
    import keras
    import numpy as np

    from cifar10.towers.train_state import TrainState

FINGERPRINT = "initial_weights_sha256"
_IMAGENET = "imagenet"
_FILES = (".keras", ".weights.h5")
# The distortions that scale all images alike; the others scale each one by itself.
_OF_ONE_SCALE = ("flip_translate", "flip_translate_far", "random_resized_crop", "none")
_SHOWN_NAMES = 4

Layers: TypeAlias = "dict[str, list[np.ndarray]]"
Variables: TypeAlias = "Mapping[str, list[keras.Variable]]"


class Found(NamedTuple):
    """What a source has for a model."""

    source: str  # What to call it.
    layers: Layers  # The values of the variables of each layer that fits.
    new: dict[str, str]  # Why each other layer of the model keeps its values.


def check_initial_weights(requested: FineTuning, model: str, distortions: str) -> None:
    """Refuses weights that a model cannot begin with, and a rate for none.

    `requested` is a section of `Config`; `model` and `distortions` are of others.
    """
    name, rate = requested.initial_weights, requested.pretrained_rate
    if name is None and rate != 1.0:
        raise UsageError(
            f"pretrained_rate of the recipe: {rate} applies to "
            "layers with initial weights, and there are none.\nAdd --initial_weights, "
            "or remove it from a copy of the recipe."
        )
    if name != _IMAGENET:
        return
    _imagenet_features(model)
    if distortions not in _OF_ONE_SCALE:
        raise UsageError(
            f"--initial_weights imagenet: --distortions {distortions} scales each "
            "image by its own mean and deviation,\nand the network was trained on "
            "pixels, which cannot be restored from it.\nGive --distortions "
            f"{' or '.join(_OF_ONE_SCALE)}."
        )


def _imagenet_features(model: str) -> Callable[..., Any]:
    """Returns the function of a model that builds its network of published weights."""
    features = None if is_code(model) else find_architecture(model).imagenet_features
    if features is None:
        raise UsageError(
            f"--initial_weights imagenet: {model} has no published weights. Give "
            "--model applications:NAME,\nas applications:MobileNetV2, or name a file "
            "or the directory of a run."
        )
    return features


def check_source(name: str) -> None:
    """Refuses a file or a directory that a training cannot begin with."""
    if name == _IMAGENET:
        return
    path = layout.locate_run(name)
    is_file = path.is_file() and name.endswith(_FILES)
    if not is_file and not (path / layout.CONFIG).is_file():
        raise UsageError(
            f"--initial_weights {printable(name)} does not exist or is of another "
            "kind.\nGive a .keras or .weights.h5 file, the directory of a run, or "
            "imagenet."
        )


def take_initial_weights(
    config: ResolvedConfig,
    state: "TrainState",
    settings: dict[str, Any],
    earlier: Mapping[str, Any] | None,
    *,
    resumes: bool,
) -> str:
    """Gives a newly built model the initial weights that `config` names.

    Their fingerprint is added to `settings`, the content of `config.json`. Returns what
    the user should know. If the training `resumes`, only the fingerprint changes.

    Raises:
        UsageError: The weights cannot be read or fit nothing, or the `earlier` training
            in this directory began with others.
    """
    before = earlier.get(FINGERPRINT) if earlier else None
    settings[FINGERPRINT] = before
    if resumes:
        return ""
    if earlier and not config.run.fresh and not earlier.get(run_config.IS_OWN):
        raise UsageError(
            "--initial_weights: the run has no checkpoint yet, and its config.json, "
            "which names them,\nwas not written by you on this machine, or was edited. "
            "Start over with --fresh."
        )
    found = find_weights(config, state.model, settings)
    settings[FINGERPRINT] = fingerprint_of(found.layers)
    if earlier and not config.run.fresh and before != settings[FINGERPRINT]:
        raise UsageError(
            f"--initial_weights {config.fine_tuning.initial_weights}: they have "
            "changed since the run began, which has no checkpoint yet.\n"
            "Start over with --fresh."
        )
    variables = layer_tree.by_name(state.model)
    taken = [v for name in found.layers for v in variables[name]]
    values = [value for of_layer in found.layers.values() for value in of_layer]
    for variable, value in zip(taken, values, strict=True):
        variable.assign(value)
    for average, variable in zip(
        state.averages, state.model.trainable_variables, strict=True
    ):
        average.assign(variable.value)
    if config.fine_tuning.pretrained_rate != 1.0:
        ids = {id(variable) for variable in taken}
        slow = [v for v in state.model.trainable_variables if id(v) in ids]
        slow_down(state.optimizer, slow, config.fine_tuning.pretrained_rate)
    return describe_found(found)


def find_weights(
    config: ResolvedConfig, model: "keras.Model", settings: Mapping[str, Any]
) -> Found:
    """Reads what the source has for a model of a run with these `settings`."""
    name = config.fine_tuning.initial_weights or ""
    variables = layer_tree.by_name(model)
    if name == _IMAGENET:
        found = _of_imagenet(config.network.model, model, variables)
    elif layout.locate_run(name).is_dir():
        found = _of_run(config, variables, settings, model)
    else:
        found = _of_file(name, variables)
    if not found.layers:
        raise UsageError(
            f"--initial_weights {printable(name)}: it fits no layer of "
            f"{config.network.model}, which has "
            f"{first_few([*variables], _SHOWN_NAMES)}.\nGive the --model that it "
            "belongs to; layers are matched by their names and shapes."
        )
    return found


def fingerprint_of(layers: Layers) -> str:
    """Returns the SHA-256 of the names and values of layers."""
    import numpy as np

    digest = hashlib.sha256()
    for name, values in sorted(layers.items()):
        for value in values:
            digest.update(f"{name} {value.shape} ".encode())
            digest.update(np.ascontiguousarray(value, np.float64).tobytes())
    return digest.hexdigest()


def describe_found(found: Found) -> str:
    """Returns how much was taken, and what is new, in a few names."""
    taken, new = [*found.layers], found.new
    lines = (
        f"Starts: from {len(taken)} of {len(taken) + len(new)} layers of "
        f"{found.source}: {first_few(taken, _SHOWN_NAMES)}."
    )
    by_reason: dict[str, list[str]] = {}
    for name, why in new.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        lines += f" New, {why}: {first_few(names, _SHOWN_NAMES)}."
    return lines


def _of_file(name: str, variables: Variables) -> Found:
    from cifar10.training.weights_file import read_layers

    path = layout.locate_run(name)
    wanted = {layer: _shapes(of_layer) for layer, of_layer in variables.items()}
    return _fitting(printable(str(path)), read_layers(path, wanted), variables)


def _of_run(
    config: ResolvedConfig,
    variables: Variables,
    settings: Mapping[str, Any],
    model: "keras.Model",
) -> Found:
    """Takes the averages of a run's newest checkpoint, as an evaluation does."""
    import numpy as np

    from cifar10.follower.trained_model import TrainedModel

    path = layout.locate_run(config.fine_tuning.initial_weights or "")
    described = run_config.read_run_config(path)
    run_config.check_model(described, config.network.model, "--model")
    trained = TrainedModel(path, trust_model=config.network.model)
    step = trained.restore()
    values = {
        id(variable): np.asarray(value)
        for variables_there, values_there in (
            (trained.model.trainable_variables, trained.trainable),
            (trained.model.non_trainable_variables, trained.non_trainable),
        )
        for variable, value in zip(variables_there, values_there, strict=True)
    }
    there = {
        name: [values[id(variable)] for variable in of_layer]
        for name, of_layer in layer_tree.by_name(trained.model).items()
    }
    found = _fitting(f"{printable(str(path))} at step {step:,}", there, variables)
    if not _are_same_classes(trained.settings, settings):
        of_head = {id(variable) for variable in layer_tree.head(model).variables}
        for name in [*found.layers]:
            if id(variables[name][0]) in of_head:
                del found.layers[name]
                found.new[name] = "for other classes"
    return found


def _are_same_classes(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether two runs with these settings know the same classes.

    Those of an `.npz` file have no names, and are the same if the pictures are.
    """
    key = "data_fingerprint" if now["data"] == NPZ else "class_names"
    return before.get(key) == now[key]


def _of_imagenet(name: str, model: "keras.Model", variables: Variables) -> Found:
    """Takes all but the head from Keras's network, layer for layer in their order.

    Keras has made up the names of some of its layers, so names do not match.
    """
    build_features = _imagenet_features(name)
    with entry_point.drawing():  # Keras shows its download.
        features = build_features(model.input_shape[1:])
    there = [
        [variable.numpy() for variable in of_layer]
        for of_layer in layer_tree.by_name(features).values()
    ]
    others = [one for one in variables if one != layer_tree.head(model).name]
    named = dict(zip(others, there, strict=True))
    return _fitting("ImageNet", named, variables)


def _fitting(
    source: str,
    there: "Mapping[str, list[np.ndarray] | None]",
    variables: Variables,
) -> Found:
    """Chooses the layers that have the same shapes there as in the model."""
    found = Found(source, {}, {})
    for name, of_layer in variables.items():
        values = there.get(name)
        if values is not None and _shapes(values) == _shapes(of_layer):
            found.layers[name] = values
        else:
            found.new[name] = "of another shape" if name in there else "not in it"
    return found


def _shapes(arrays: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(array.shape) for array in arrays]
