"""Checks the names that `--model` takes, and builds the models of these names.

A name is a key of `ARCHITECTURES`, `applications:NAME` for a network of Keras, or
`module:function` for a user's function of (image_shape, classes) to a Keras model.

TensorFlow is imported only to build a model, so the command line checks names fast.
"""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cifar10.errors import UsageError
from cifar10.models.architecture import APPLICATIONS_PREFIX, Architecture

if TYPE_CHECKING:
    import keras

ARCHITECTURES = {
    "tutorial": Architecture(module="tutorial"),
    "airbench": Architecture(
        module="airbench",
        recipe="fast",
        # airbench94_muon.py trains this bias in the first 3 of 8 epochs.
        trained_parts={"whitening/bias": 3 / 8},
    ),
    "resnet": Architecture(module="resnet", recipe="resnet"),
}
# Further arguments that a model's function may take.
OPTIONS = ("depth", "width")
# Prefix in `config.json` of a Python object that cannot be found by its name.
PYTHON = "python:"
IN_PYTHON = (
    "Continue the run with the program that trained it, and the same train_dir.\n"
    "Another program must pass the model or data that only that program has:\n"
    "    cifar10.train(cifar10.Config(resume=train_dir, model=..., data=...))\n"
    "    cifar10.evaluate(train_dir, model=..., data=...)"
)


def is_code(name: str) -> bool:
    """Returns whether a model's name refers to a user's function."""
    return ":" in name and not name.startswith(APPLICATIONS_PREFIX)


def check_name(name: str) -> None:
    """Raises an error unless a name is built in or its module can be found.

    Neither Keras nor the user's code is imported, so names of Keras's networks are not
    checked. The current folder is added to `sys.path`.
    """
    if name in ARCHITECTURES or name.startswith(APPLICATIONS_PREFIX):
        return
    module, colon, function = name.partition(":")
    if not colon or not function or module[:1] in ("", "."):
        raise UsageError(
            f"--model {name}: there is no such model. Give "
            f"{', '.join(sorted(ARCHITECTURES))}, Keras's applications:MobileNetV2 or "
            "another NAME, or your own as module:function, such as my_models:small."
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    package = module.partition(".")[0]
    is_there = package in sys.modules or importlib.util.find_spec(package)
    if module.endswith(".py") or not is_there:
        why = f"there is no module {module} in {Path.cwd()} or among installed packages"
        fix = "Run in its folder, or set PYTHONPATH; leave out .py"
        raise UsageError(f"--model {name}: {why}. {fix}.")


def register_function(name: str, function: str) -> None:
    """Registers a function, given as module:function, to build the model `name`."""
    check_name(function)
    ARCHITECTURES[name] = Architecture(
        lambda *shape, **given: find_architecture(function).build(*shape, **given)
    )


def name_of_function(builder: Callable[..., Any]) -> str:
    """Returns the name of the model that a user's function builds.

    The name is module:function if another process can import the function from that
    module, and python:function otherwise.
    """
    module = getattr(builder, "__module__", None)
    function = getattr(builder, "__name__", type(builder).__name__)
    importable = getattr(sys.modules.get(str(module)), function, None) is builder
    if importable and module != "__main__":
        return f"{module}:{function}"
    return PYTHON + function


def find_architecture(name: str) -> Architecture:
    """Returns the architecture that a name selects, with its functions imported."""
    if (known := ARCHITECTURES.get(name)) and known.module:
        module: Any = importlib.import_module(f"cifar10.models.{known.module}")
        initialize = getattr(module, "initialize", known.initialize)
        return dataclasses.replace(known, build=module.build, initialize=initialize)
    if known:
        return known
    check_name(name)
    from cifar10.models import applications, custom

    if name.startswith(APPLICATIONS_PREFIX):
        return applications.find_architecture(name)
    return Architecture(custom.import_function(name))


def build_model(
    name: str,
    image_shape: tuple[int, int, int],
    classes: int,
    *,
    precision: str = "float32",
    seed: int | None = 0,
    device: str = "/cpu:0",
    options: Mapping[str, int | None] | None = None,
    deterministic: bool | None = None,
) -> "keras.Model":
    """Builds the model that a name selects.

    Args:
        name: Value of `--model`.
        image_shape: Height, width and channels of one image.
        classes: Number of classes.
        precision: Type of the arithmetic, one of `config.fields.PRECISIONS`. The
            variables are float64 for float64, and float32 for all other precisions.
        seed: Seed of the initial values and of all that the process draws at random
            from here on. None leaves the process's random generators as they are.
        device: Device of the variables.
        options: Arguments for the function that builds the model, by their names in
            `OPTIONS`. Where a value is None or missing, the function's default holds.
        deterministic: As `--deterministic`; None for a model that is not trained.

    Returns:
        A model that maps images, [batch, *image_shape], to logits, [batch, classes].
    """
    import keras
    import tensorflow as tf

    from cifar10.models import custom

    given = {key: value for key, value in (options or {}).items() if value}
    builder = find_architecture(name).build
    if (backend := keras.config.backend()) != "tensorflow":
        raise UsageError(f"Keras runs on {backend}. Set KERAS_BACKEND=tensorflow.")
    keras.config.set_image_data_format("channels_last")  # Whatever keras.json says.
    keras.config.set_floatx("float32")
    earlier_policy = keras.config.dtype_policy()
    policy = f"mixed_{precision}" if "16" in precision else precision
    keras.config.set_dtype_policy(policy)
    if seed is not None:
        keras.utils.set_random_seed(seed)
    try:
        with tf.device(device):
            size = f"{image_shape=} {custom.SIZED}"
            problem = f"the function failed with\n{size}, {classes=} and {given}"
            with custom.explained(f"--model {name}", problem):
                model = builder(image_shape, classes, **given)
            left = keras.config.dtype_policy().name
            if left != policy and is_code(name) and deterministic is not None:
                why = f"the function changes Keras's dtype policy, {policy}, to {left}"
                fix = "Leave out clear_session() and the like, and give --precision"
                raise UsageError(f"--model {name}: {why}. {fix}.")
            of = name, model, image_shape, classes
            custom.check(*of, is_code=is_code(name), deterministic=deterministic)
    finally:
        keras.config.set_dtype_policy(earlier_policy)
    return model
