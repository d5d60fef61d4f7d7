"""What the fields of a configuration may not say together."""

from __future__ import annotations

from typing import Any

from cifar10.errors import UsageError


def refuse(config: Any) -> None:
    """Refuses a configuration whose fields contradict one another.

    Args:
        config: A `Config`.

    Raises:
        UsageError: They do.
    """
    if config.use_fp16 and config.precision not in ("auto", "float16"):
        raise UsageError(
            f"--use_fp16 and --precision {config.precision} contradict each other; "
            "give one of them."
        )
    if config.optimizer == "muon" and not config.learning_rate:
        raise UsageError(
            "--learning_rate 0: with --optimizer muon it has to be above 0; "
            "airbench's is 0.24."
        )
    for name in ("log_frequency", "summary_steps", "checkpoint_steps"):
        if config.steps_per_call > getattr(config, name):
            raise UsageError(
                f"--steps_per_call {config.steps_per_call}: --{name} asks for "
                f"something every {getattr(config, name)} steps. Give at most so many, "
                f"or raise --{name}."
            )
    _check_sections(config)
    profiled_steps(config.profile)


def check_use_of_sections(config: Any, *, cut: bool) -> None:
    """Refuses what is for sections where there are none.

    Args:
        config: A `Config`.
        cut: Whether the step is sectioned.

    Raises:
        UsageError: Something would do nothing.
    """
    # Whether `auto` cuts depends on the memory: the same flags hold for both.
    if config.sections == "auto":
        return
    if config.memory_limit is not None:
        raise UsageError(
            f"--memory_limit {config.memory_limit}: it does something with --sections "
            "auto only; add that or leave it out."
        )
    if config.section_cache == "host" and not cut:
        raise UsageError(
            "--section_cache host: there are no sections; add --sections or leave it "
            "out."
        )


def profiled_steps(text: str | None) -> tuple[int, int] | None:
    """Returns the first and the last step that `--profile` names, if any."""
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal()):
        raise UsageError(f"--profile {text}: it is START:STOP, two steps, as 100:110.")
    if not 1 <= int(start) <= int(stop):
        raise UsageError(f"--profile {text}: START is at least 1 and at most STOP.")
    return int(start), int(stop)


def _check_sections(config: Any) -> None:
    """Refuses what does not go with sections and accumulated batches."""
    asked = f"--sections {config.sections}"
    names = (config.sections or "1").split(",")
    if not all(name.strip() for name in names):
        raise UsageError(f"{asked}: there is an empty name in it; as in conv2,local3.")
    if names[0].strip().lstrip("+-").replace(".", "").isdigit() and not (
        names[0].isdecimal() and int(names[0]) and len(names) == 1
    ):
        raise UsageError(f"{asked}: it is a whole number from 1 on, or names.")
    if config.sections in (None, "1"):
        if config.accumulate == 1:
            return
        asked = f"--accumulate {config.accumulate}"
    check_sections(config, asked)


def check_sections(config: Any, asked: str) -> None:
    """Refuses what does not go with sections.

    Args:
        config: A `Config`.
        asked: Who asks for them.

    Raises:
        UsageError: Something does not.
    """
    if config.xla:
        raise UsageError(f"{asked} and --xla do not go together yet; leave one out.")
    if config.variable_update == "mirrored":
        raise UsageError(
            f"{asked}: the towers share their variables then, and --variable_update "
            "mirrored says that they do not. Leave one out."
        )
