"""Finds out how this program was started, so that messages name working commands.

The program may be one of the three scripts, `python -m cifar10`, the command `cifar10`
that pip installs, or a user's program or notebook. An installed package has no scripts,
and a user's program has no flags.
"""

import hashlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cifar10.errors import UsageError
from cifar10.models.registry import PYTHON

# The names in pyproject.toml.
DISTRIBUTION = "cifar10-multi-gpu"
_COMMAND = "cifar10"
_SCRIPTS = ("train.py", "train_multi_gpu.py")
_PACKAGE = Path(__file__).parents[1]
# Only a checkout has the scripts beside the package.
_CHECKOUT = Path(__file__).resolve().parents[2]


def package_version() -> str:
    """Returns the version of the package, with a digest of the source files.

    Any change of the source files, committed or not, changes the digest.
    """
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
    first = sys.argv[0]
    start = _start(first)
    return Path(first).name if first in start else " ".join(start)


def to_paste(arguments: Sequence[str]) -> str:
    """Returns the shell command to start a program whose `sys.argv` is `arguments`."""
    return shlex.join([*_start(arguments[0]), *arguments[1:]])


def to_spawn(arguments: Sequence[str]) -> list[str]:
    """Returns the `Popen` command for a program whose `sys.argv` is `arguments`."""
    start = _start(arguments[0])
    # The command that pip installs is a Python script too.
    words = start[1:] if "-m" in start else arguments[:1]
    return [sys.executable, *words, *arguments[1:]]


def command(name: str) -> str:
    """Returns what a user types to start a command of this package, without flags.

    If the package's `NAME.py` is beside the running program, the result runs that file.
    """
    if _start(sys.argv[0]) == [_COMMAND]:
        return f"{_COMMAND} {name}"
    script = Path(sys.argv[0]).parent / f"{name}.py"
    if _is_ours(script):
        return shlex.join(["python", str(script)])
    return f"python -m {_COMMAND} {name}"


def to_resume(
    train_dir: Path, settings: Mapping[str, Any], **changes: int
) -> str | None:
    """Returns the command, or the Python call, that continues a run with `changes`.

    `settings` is the configuration of the run. Returns None if several machines have to
    continue the run, or if a user's program only has to make the same call again.
    """
    if settings.get("workers", 1) > 1:
        return None
    if not takes_flags():
        return f"cifar10.Config(..., {as_given(**changes)})" if changes else None
    start = to_paste([sys.argv[0], *(["train"] if is_the_package() else [])])
    return f"{start} {as_given(resume=str(train_dir), **changes)}"


def as_given(**values: Any) -> str:
    """Formats values as flags; as keyword arguments if the program takes no flags."""
    if not takes_flags():
        return ", ".join(f"{name}={value!r}" for name, value in values.items())
    words = []
    for name, value in values.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)


def in_memory(model: str, data: str) -> str:
    """Lists which of `model=...` and `data=...` are objects of a user's program."""
    named = {"model": model, "data": data}
    return ", ".join(f"{name}=..." for name in named if named[name].startswith(PYTHON))


def to_score(train_dir: str, model: str, data: str, step: int | None = None) -> str:
    """Returns a command to score a run; a Python call if data or model are objects."""
    if given := in_memory(model, data):
        return f"cifar10.evaluate({train_dir!r}, step={step}, {given})"
    which = "--run_once" if step is None else f"--step {step}"
    return f"{command('eval')} {which} --train_dir {shlex.quote(train_dir)}"


def option_name(name: str) -> str:
    """Formats a `Config` field as users give it: `--name`, or `name` in a program."""
    return f"--{name}" if takes_flags() else name


def require_packages(extra: str, *names: str) -> None:
    """Raises a `UsageError` if any of the packages `names` cannot be imported."""
    missing = [name for name in names if not importlib.util.find_spec(name)]
    if missing:
        package = f"'{DISTRIBUTION}[{extra}]'"
        if _is_ours(Path("pyproject.toml")):
            package = f"-c constraints.txt -e '.[{extra}]'"
        raise UsageError(
            f"The command needs {' and '.join(missing)}, which cannot be imported.\n"
            f"Install them with: pip install {package}"
        )


def takes_flags() -> bool:
    """Returns whether the user configures the run by flags, not in a program."""
    return is_the_package() or Path(sys.argv[0]).name in _SCRIPTS


def is_the_package() -> bool:
    """Returns whether this program is `cifar10` or `python -m cifar10`."""
    return _start(sys.argv[0])[-1] == _COMMAND


def _start(first: str) -> list[str]:
    """Returns the command-line words that start a program, given its `sys.argv[0]`."""
    folder, name = os.path.split(first)
    if name == "__main__.py":
        return ["python", "-m", os.path.basename(folder)]  # noqa: PTH119 - argv is text.
    return [_COMMAND] if name == _COMMAND else ["python", first]


def _is_ours(path: Path) -> bool:
    try:
        return path.samefile(_CHECKOUT / path.name)
    except OSError:
        return False
