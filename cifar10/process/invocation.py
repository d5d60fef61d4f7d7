"""Finds out how this program was started, so that messages name working commands.

The program may be a script, which no installed package has, `python -m cifar10`, pip's
command `cifar10`, or a user's program or notebook, which has no flags.
"""

import hashlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError
from cifar10.models.registry import PYTHON

# The names in pyproject.toml.
DISTRIBUTION = "cifar10-multi-gpu"
_COMMAND = "cifar10"
_PACKAGE = Path(__file__).parents[1]


def package_version() -> str:
    """Returns the version of the package, with a digest of its present source files."""
    try:
        number = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        number = "not installed"
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(_PACKAGE)}\n".encode() + path.read_bytes())
    return f"{number} (sources {digest.hexdigest()[:8]})"


def program_name() -> str:
    """Returns the program's name in messages: the script, or the package's command."""
    start = _start(sys.argv[0])
    return Path(sys.argv[0]).name if sys.argv[0] in start else " ".join(start)


def to_spawn(arguments: Sequence[str]) -> list[str]:
    """Returns the `Popen` command for a program whose `sys.argv` is `arguments`."""
    start = _start(arguments[0])
    # The command that pip installs is a Python script too.
    words = start[1:] if "-m" in start else arguments[:1]
    return [sys.executable, *words, *arguments[1:]]


def command(name: str) -> str:
    """Returns the text that a user types here to start a package command."""
    if _start(sys.argv[0]) == [_COMMAND]:
        return f"{_COMMAND} {name}"
    # A script's folder is on its own path, not on that of the next command.
    is_here = os.path.isdir(f"{_COMMAND}/process")  # noqa: PTH112 - as `argv`, text.
    is_found = is_here or any(metadata.distributions(name=DISTRIBUTION))
    path = "" if is_found else f"PYTHONPATH={shlex.quote(str(_PACKAGE.parent))} "
    return f"{path}python -m {_COMMAND} {name}"


def to_train(workers: int, **given: Any) -> str | None:
    """Returns the command that trains with these flags.

    Returns None if several `workers` or a program without flags have to train.
    """
    start = _start(sys.argv[0])
    is_package = start[-1] == _COMMAND
    is_script = Path(sys.argv[0]).name in ("train.py", "train_multi_gpu.py")
    if workers > 1 or not (is_package or is_script):
        return None
    words = [*start, "train"] if is_package else start
    return f"{shlex.join(words)} {as_flags(**given)}"


def as_flags(**values: Any) -> str:
    """Formats values of a `Config` as flags."""
    words = []
    for name, value in values.items():
        of_false = [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
        words += [f"--{name}"] if value is True else of_false
    return shlex.join(words)


def in_memory(**values: Any) -> str:
    """Lists which recorded values are objects of a user's program: `model=...`."""
    own = [name for name, value in values.items() if f"{value}".startswith(PYTHON)]
    return ", ".join(f"{name}=..." for name in own)


def to_score(train_dir: Path, model: str, data: str) -> str:
    """Returns a command or call that scores the newest checkpoint."""
    if given := in_memory(model=model, data=data):
        return f"cifar10.evaluate({str(train_dir)!r}, {given})"
    return f"{command('eval')} --run_once --train_dir {shlex.quote(str(train_dir))}"


def require_packages(extra: str, *names: str) -> None:
    """Raises a `UsageError` if any of the packages `names` cannot be imported."""
    if missing := [name for name in names if not importlib.util.find_spec(name)]:
        raise UsageError(
            f"The command needs {' and '.join(missing)}, which cannot be imported.\n"
            f"Install them with: pip install '{DISTRIBUTION}[{extra}]'"
        )


def _start(first: str) -> list[str]:
    """Returns the command-line words that start a program, given its `sys.argv[0]`."""
    folder, name = os.path.split(first)
    if name == "__main__.py":
        return ["python", "-m", os.path.basename(folder)]  # noqa: PTH119 - argv is text.
    return [_COMMAND] if name == _COMMAND else ["python", first]
