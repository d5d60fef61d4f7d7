"""The names of models, and what can be checked of them before TensorFlow starts."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError, did_you_mean

# What `config.json` calls a function that cannot be imported by its name.
PYTHON = "python:"
BUILT_IN = ("airbench", "resnet", "tutorial")

# The networks of `keras.applications` in 3.15, after this prefix.
_APPLICATIONS = "applications:"
APPLICATIONS = (
    *(f"ConvNeXt{size}" for size in ("Base", "Large", "Small", "Tiny", "XLarge")),
    *(f"DenseNet{depth}" for depth in (121, 169, 201)),
    *(f"EfficientNetB{size}" for size in range(8)),
    *(f"EfficientNetV2{size}" for size in ("B0", "B1", "B2", "B3", "L", "M", "S")),
    *("InceptionResNetV2", "InceptionV3"),
    *("MobileNet", "MobileNetV2", "MobileNetV3Large", "MobileNetV3Small"),
    *("NASNetLarge", "NASNetMobile"),
    *(f"ResNet{depth}{version}" for depth in (50, 101, 152) for version in ("", "V2")),
    *("VGG16", "VGG19", "Xception"),
)


def of_application(name: str) -> str:
    """Returns NAME of `applications:NAME`; empty if a model is not one of Keras's."""
    return name.removeprefix(_APPLICATIONS) if name.startswith(_APPLICATIONS) else ""


def is_code(name: str) -> bool:
    """Returns whether a name is that of a user's function, and so of code to run."""
    return ":" in name and not of_application(name)


def check(name: str) -> None:
    """Refuses a name that is not built in and whose module cannot be found.

    Nothing of the user's is imported. The current folder joins the module path.
    """
    if name in BUILT_IN:
        return
    if name.startswith(_APPLICATIONS):
        _check_application(name)
        return
    if name.startswith(PYTHON):
        raise error(
            name,
            "the model is a function of a Python program, not of a module.\nOnly that "
            "program can build it, with cifar10.train, cifar10.evaluate or\n"
            "cifar10.Follower. To have other commands build it, move it into a file "
            "that\ncan be imported, and train with that.",
        )
    module, colon, function = name.partition(":")
    if not colon or not function or module[:1] in ("", "."):
        raise error(
            name,
            f"there is no such model.{did_you_mean(name, BUILT_IN)} Known models are "
            f"{', '.join(BUILT_IN)}.\nFor your own model give module:function, as in "
            "--model my_models:small; for one of\nKeras applications:NAME, as in "
            "--model applications:MobileNetV2.",
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if module.endswith(".py"):
        meant = f"{module.removesuffix('.py')}:{function}"
        raise error(name, f"a module has no .py in its name; say --model {meant}.")
    package = module.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise no_module(name)


def _check_application(name: str) -> None:
    application = of_application(name)
    if application not in APPLICATIONS:
        meant = did_you_mean(name, [_APPLICATIONS + known for known in APPLICATIONS])
        raise error(
            name,
            f"keras.applications has no such network.{meant}\n"
            f"It has {', '.join(APPLICATIONS)}.",
        )


def of(builder: Callable[..., Any]) -> str:
    """Returns the name of a function's model.

    It is module:function if that imports the function, as another process may then do.
    """
    module = getattr(builder, "__module__", None)
    function = getattr(builder, "__name__", type(builder).__name__)
    importable = getattr(sys.modules.get(str(module)), function, None) is builder
    if importable and module != "__main__":
        return f"{module}:{function}"
    return PYTHON + function


def no_module(name: str) -> UsageError:
    """Returns the error to raise for a model whose module does not exist."""
    module = name.partition(":")[0]
    return error(
        name,
        f"there is no module {module} in {Path.cwd()} or installed.\n"
        "Run this in the folder that has it, or add that folder to PYTHONPATH.",
    )


def error(name: str, problem: str) -> UsageError:
    """Returns the error to raise for a model with this problem."""
    return UsageError(f"--model {name}: {problem}")
