"""The temperature of a checkpoint, by which its logits are divided for probabilities.

`eval.py --calibrate` writes it into the checkpoint's folder, where it is kept, copied
and deleted with the weights that it was fitted for.
"""

from pathlib import Path

from cifar10.errors import UsageError, reason
from cifar10.process import files

LOWEST, HIGHEST = 0.05, 20.0  # Beyond, a model is of no use or knows every image.


def read(path: Path) -> float:
    """Returns the temperature in a file, 1 if none is; a `UsageError` if damaged."""
    try:
        if LOWEST <= (found := float(files.read(path))) <= HIGHEST:
            return found
        why = "it holds no temperature"
    except FileNotFoundError:
        return 1.0
    except (OSError, ValueError) as error:
        why = reason(error)
    raise UsageError(f"{path} cannot be used: {why}. Delete it, and calibrate again.")
