"""`--resume`: flags override what a run has recorded, as they override a recipe."""

from typing import Any

from cifar10.config import config_file, origin, paths
from cifar10.config.config import Config
from cifar10.config.options import names, result_determining
from cifar10.errors import UsageError


def recorded(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the run in a directory, by field.

    Refuses `given` flags that would change its result.
    """
    if not name:
        raise UsageError("--resume: it is empty. Give the directory of a run.")
    for flag in ("train_dir", "recipe", "fresh"):
        if flag in given:
            raise UsageError(
                f"--{flag} and --resume do not go together: --resume {name} names the "
                "run, and continues\nit with what its config.json says. Leave one out."
            )
    directory = paths.locate_run(name)
    run = config_file.read(directory / paths.CONFIG)
    origin.check_model(run, given.get("model"), "--model")
    values = {field: run[field] for field in names(Config) if field in run}
    for field in result_determining(Config, run):
        before = run.get(field, getattr(Config, field))
        if field in given and given[field] != before:
            raise UsageError(
                f"--{field} {given[field]}: the run in {directory} has {before}, which "
                "determines its result.\nLeave the flag out to resume it, or train "
                "anew in another --train_dir."
            )
    return {**values, "train_dir": str(directory), "fresh": False}
