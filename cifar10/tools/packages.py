"""The packages that only some commands need."""

import importlib.util

from cifar10.errors import UsageError
from cifar10.process import invocation


def require(extra: str, *names: str) -> None:
    """Refuses to continue without the packages of an extra of `pyproject.toml`."""
    missing = [name for name in names if not importlib.util.find_spec(name)]
    if missing:
        raise UsageError(
            f"The command needs {' and '.join(missing)}, which cannot be imported.\n"
            f"Install with {invocation.to_install(extra)}."
        )
