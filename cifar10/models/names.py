"""The names of models, and what of one can be checked before TensorFlow starts."""

import importlib.util
import sys
from pathlib import Path

from cifar10.errors import UsageError, did_you_mean

BUILT_IN = ("airbench", "resnet", "tutorial")


def check(name: str) -> None:
    """Refuses a name that is not built in and whose module cannot be found.

    Nothing of the user's is imported. The current folder joins the module path.
    """
    if name in BUILT_IN:
        return
    module, colon, function = name.partition(":")
    if not colon or not function or module[:1] in ("", "."):
        raise error(
            name,
            f"there is no such model.{did_you_mean(name, BUILT_IN)} Known models are "
            f"{', '.join(BUILT_IN)}.\nFor a model of yours say module:function, as in "
            "--model my_models:small.",
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if module.endswith(".py"):
        meant = f"{module.removesuffix('.py')}:{function}"
        raise error(name, f"a module has no .py in its name; say --model {meant}.")
    package = module.partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise no_module(name)


def no_module(name: str) -> UsageError:
    """Returns the error to raise for a model whose module does not exist."""
    module = name.partition(":")[0]
    return error(name, f"there is no module {module} in {Path.cwd()} or installed.")


def error(name: str, problem: str) -> UsageError:
    """Returns the error to raise for a model with this problem."""
    return UsageError(f"--model {name}: {problem}")
