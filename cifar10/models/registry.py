"""The models that `--model` names: their names, and how one is built.

A name is that of an architecture in `ARCHITECTURES`, `applications:NAME` for one of
Keras's, or `module:function` for a function of the user's that takes (image_shape,
classes) and returns a Keras model, or a list of models, its sections, each of which
takes what the one before returns.

The command line asks about names, so TensorFlow is imported when a model is built.
"""

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10.errors import did_you_mean
from cifar10.models.architecture import (
    APPLICATIONS_PREFIX,
    Architecture,
    model_error,
    no_module_error,
)

if TYPE_CHECKING:
    import keras

ARCHITECTURES = {
    known.name: known
    for known in (
        Architecture("tutorial", module="tutorial"),
        Architecture(
            "airbench",
            module="airbench",
            recipe="fast",
            options={
                "depth": "convolutions in each group, 2 or 3",
                "width": "filters of the first group",
            },
            # airbench94_muon.py trains the bias of the whitening in this part.
            trained_parts={"whitening/bias": 3 / 8},
        ),
        Architecture(
            "resnet",
            module="resnet",
            recipe="resnet",
            options={"depth": "blocks", "width": "filters of the first blocks"},
        ),
    )
}
# Further arguments that a model's function may take.
OPTIONS = ("depth", "width")
# What `config.json` calls a function that cannot be imported by its name.
PYTHON = "python:"


def is_code(name: str) -> bool:
    """Returns whether a name is that of a user's function, and so of code to run."""
    return ":" in name and not name.startswith(APPLICATIONS_PREFIX)


def check_name(name: str) -> None:
    """Refuses a name that is not built in and whose module cannot be found.

    Neither the user's code nor Keras, which knows its own networks, is imported. The
    current folder joins the module path.
    """
    if name in ARCHITECTURES or name.startswith(APPLICATIONS_PREFIX):
        return
    if name.startswith(PYTHON):
        raise model_error(
            name,
            "the model is a function of a Python program, not of a module.\nOnly that "
            "program can build it, with cifar10.train, cifar10.evaluate or\n"
            "cifar10.Follower. To have other commands build it, move it into a file "
            "that\ncan be imported, and train with that.",
        )
    module, colon, function = name.partition(":")
    if not colon or not function or module[:1] in ("", "."):
        raise model_error(
            name,
            f"there is no such model.{did_you_mean(name, ARCHITECTURES)} Known models "
            f"are {', '.join(sorted(ARCHITECTURES))}.\nFor your own model give "
            "module:function, as in --model my_models:small; for one of\nKeras "
            "applications:NAME, as in --model applications:MobileNetV2.",
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if module.endswith(".py"):
        meant = f"{module.removesuffix('.py')}:{function}"
        raise model_error(
            name, f"a module has no .py in its name; say --model {meant}."
        )
    package = module.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise no_module_error(name)


def name_of_function(builder: Callable[..., Any]) -> str:
    """Returns the name of the model that a function of the user's builds.

    It is module:function if another process can import the function by that name.
    """
    module = getattr(builder, "__module__", None)
    function = getattr(builder, "__name__", type(builder).__name__)
    importable = getattr(sys.modules.get(str(module)), function, None) is builder
    if importable and module != "__main__":
        return f"{module}:{function}"
    return PYTHON + function


def default_recipe(name: str) -> str | None:
    """Returns the default recipe of this model; None for that of the data."""
    return ARCHITECTURES[name].recipe if name in ARCHITECTURES else None


def describe_option(option: str) -> str:
    """Describes one of `OPTIONS`, for each architecture that has it."""
    return "; ".join(
        f"{name}: {known.options[option]}"
        for name, known in ARCHITECTURES.items()
        if option in known.options
    )


def find_architecture(name: str) -> Architecture:
    """Returns the architecture of a name, after importing its functions.

    Raises:
        UsageError: There is no such architecture, or its module cannot be imported.
    """
    known = ARCHITECTURES.get(name)
    if known and known.module:
        module: Any = importlib.import_module(f"cifar10.models.{known.module}")
        initialize = getattr(module, "initialize", known.initialize)
        return dataclasses.replace(known, build=module.build, initialize=initialize)
    if known:
        return known
    check_name(name)
    from cifar10.models import applications, custom

    if name.startswith(APPLICATIONS_PREFIX):
        return applications.find_architecture(name)
    return Architecture(name, custom.import_function(name))


def build_model(
    name: str,
    image_shape: tuple[int, int, int],
    classes: int,
    *,
    precision: str = "float32",
    seed: int | None = 0,
    device: str = "/cpu:0",
    options: Mapping[str, int | None] | None = None,
) -> "keras.Model":
    """Builds a model.

    Args:
        name: As the module's docstring says.
        image_shape: Height, width and channels of one image.
        classes: Number of classes.
        precision: Type of the arithmetic, one of `config.fields.PRECISIONS`. The
            variables are float32, or float64 if that is the precision.
        seed: Seed of the initial values, and from here on of all that the process
            draws at random; None: both depend on what the process has drawn before.
        device: Where the variables live.
        options: Further arguments of the function, from `OPTIONS`; None, or a value
            of None, for the function's defaults.

    Returns:
        A model from images, [batch, *image_shape], to logits, [batch, classes].

    Raises:
        UsageError: The name is unknown, the function fails, or does not return such a
            model.
    """
    import keras
    import tensorflow as tf

    from cifar10.models import custom

    given = {key: value for key, value in (options or {}).items() if value}
    builder = find_architecture(name).build
    earlier_policy = keras.config.dtype_policy()
    mixed = precision in ("bfloat16", "float16")
    keras.config.set_dtype_policy(f"mixed_{precision}" if mixed else precision)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    try:
        with tf.device(device):
            called = {"image_shape": image_shape, "classes": classes, **given}
            words = ", ".join(f"{key}={value}" for key, value in called.items())
            with custom.explained(name, f"the function failed,\ncalled with {words}"):
                model = builder(image_shape, classes, **given)
                if isinstance(model, list):
                    model = custom.chained(name, image_shape, model)
            custom.check(name, model, image_shape, classes)
    finally:
        keras.config.set_dtype_policy(earlier_policy)
    return model
