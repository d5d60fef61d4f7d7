"""How this program was started, and so how the commands that it suggests begin.

It may be one of the three scripts, `python -m cifar10`, the command `cifar10` that pip
installs, or the user's program. Its suggestions have to work where it was started: an
installed package has no scripts.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cifar10.config.data_flag import PYTHON

# As pyproject.toml calls them.
DISTRIBUTION = "cifar10-multi-gpu"
_COMMAND = "cifar10"
# The scripts lie beside the package in a checkout, and nowhere else.
_CHECKOUT = Path(__file__).resolve().parents[2]


def name() -> str:
    """Returns the name of the running script, or how the package is run."""
    first = sys.argv[0]
    start = _start(first)
    return Path(first).name if first in start else " ".join(start)


def to_paste(arguments: Sequence[str]) -> str:
    """Returns the command with which a user starts a program with this `sys.argv`."""
    return shlex.join([*_start(arguments[0]), *arguments[1:]])


def to_spawn(arguments: Sequence[str]) -> list[str]:
    """Returns the words that start a child process with this `sys.argv`."""
    start = _start(arguments[0])
    # What pip installs as the command is a Python script too.
    words = start[1:] if "-m" in start else arguments[:1]
    return [sys.executable, *words, *arguments[1:]]


def of(command: str) -> str:
    """Returns how a command of this package is started from here, without its flags.

    For `train` and `eval` it is their script, if that lies in the current folder or
    beside the running one.
    """
    if _start(sys.argv[0]) == [_COMMAND]:
        return f"{_COMMAND} {command}"
    script = Path(f"{command}.py")
    for path in (script, Path(sys.argv[0]).parent / script):
        if _is_ours(path):
            return shlex.join(["python", str(path)])
    return f"python -m {_COMMAND} {command}"


def to_score(train_dir: str, data: str) -> str:
    """Returns the command that scores a run with this `data` in its `config.json`."""
    if data.startswith(PYTHON):
        return f"cifar10.evaluate({train_dir!r}, data=...)"
    return f"{of('eval')} --run_once --train_dir {shlex.quote(train_dir)}"


def to_install(extra: str) -> str:
    """Returns the command that installs the packages of an extra of the package."""
    if _is_ours(Path("pyproject.toml")):
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def is_the_package() -> bool:
    """Returns whether this is `cifar10` or `python -m cifar10`, and not a script."""
    return _start(sys.argv[0])[-1] == _COMMAND


def _start(first: str) -> list[str]:
    """Returns the words that start a program, from the first of its `sys.argv`."""
    folder, name = os.path.split(first)
    if name == "__main__.py":
        return ["python", "-m", os.path.basename(folder)]  # noqa: PTH119 - argv is text.
    return [_COMMAND] if name == _COMMAND else ["python", first]


def _is_ours(path: Path) -> bool:
    try:
        return path.samefile(_CHECKOUT / path.name)
    except OSError:
        return False
