"""Train an image classifier on several GPUs by synchronous data parallelism.

    from cifar10 import Config, evaluate, train

    record = train(Config(model=small, data=(x, y), max_steps=500))
    print(evaluate(record, data=(x_test, y_test)))

`Config` describes a training run, `train` executes the run, and `evaluate` scores the
trained model. `Follower` is a copy of the model that is updated as a run proceeds.
Importing this package alone does not import TensorFlow.
"""

import sys

# Every program imports this module first, and Python 3.6 can parse it.
if sys.version_info < (3, 11):  # noqa: UP036 - the package runs uninstalled.
    sys.stderr.write(f"Python 3.11 is needed; this is {sys.version.split()[0]}.\n")
    raise SystemExit(2)

__all__ = ["Config", "Follower", "Record", "evaluate", "train"]

_MODULES = {
    "Config": "cifar10.config.config",
    "Follower": "cifar10.follower",
    "Record": "cifar10.interface.train",
    "evaluate": "cifar10.interface.evaluate",
    "train": "cifar10.interface.train",
}

TYPE_CHECKING = False  # Type checkers read the imports below.
if TYPE_CHECKING:
    from cifar10.config.config import Config
    from cifar10.follower import Follower
    from cifar10.interface.evaluate import evaluate
    from cifar10.interface.train import Record, train
else:

    def __getattr__(name):
        """Imports the module of a public name when the name is first used."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_MODULES[name]), name)

    def __dir__():
        """Lists the public names, imported or not."""
        return sorted([*globals(), *__all__])
