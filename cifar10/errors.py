"""The exceptions that end a program cleanly, and their exit codes.

Every module may import this one. `process/entry_point.py` shows these exceptions as a
sentence on stderr; any other is a bug in this package and keeps its traceback.
"""

import difflib
import re
import signal
import sys
from collections.abc import Iterable, Sequence

EXIT_USAGE = 2
# EX_TEMPFAIL of sysexits.h: the same command may succeed later.
EXIT_TRY_AGAIN = 75
# 128 + SIGINT and 128 + SIGPIPE, as shells count them.
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# The signals that end a training after its step: a scheduler's notice before it kills,
# Ctrl-C, SLURM's on request (--signal), the end of a terminal or a connection.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# The processes of a training agree on it as on a signal, but nobody sends it.
TIME_IS_UP = signal.SIGALRM


class UsageError(Exception):
    """A foreseeable mistake or condition outside the program: exit code 2.

    The message names the value, the rule it breaks and what to do, in one or two
    sentences that make sense without a traceback. Control characters are escaped.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str) -> None:
        super().__init__(inert(message))


class UnavailableError(UsageError):
    """A resource, such as a server, that may be available later: exit code 75."""

    exit_code = EXIT_TRY_AGAIN


class MissingGpuError(UsageError):
    """A requested GPU that TensorFlow does not find; the doctor may know why."""


class StoppedError(Exception):
    """The program ends early but cleanly, for example after a signal.

    The exit code is 128 plus the number of a signal, the exit code of another process,
    or 0 if there was nothing to do.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NotFiniteError(Exception):
    """A step must not be used; the message names the step and the tower."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"at step {step} {what}")
        self.step = step
        self.what = what


class LostWorkerError(Exception):
    """Another worker is gone; restarting all continues the training: exit code 75."""


class DiskError(UsageError):
    """A disk, or access to it, failed; `--on_save_error` says whether to stop.

    `what` says in full sentences what failed, why and what is left; `fix` says what to
    do about a run that stops.
    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} {fix}".rstrip())
        self.what = what


def say(text: str) -> None:
    """Prints to stderr, unbuffered; stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def reason(error: Exception) -> str:
    """Returns the cause in an error's message, without TensorFlow's decoration."""
    # Keras prints a layer's own message in bold.
    said = str(error).partition("\033[1m")[2] or str(error)
    text = getattr(error, "strerror", None) or said.partition("\n")[0]
    text = re.sub(r"\033\[0m|{{[^}]*}} |/[^;]*tempstate[^;]*; | \[Op:\w+\].*", "", text)
    return text or type(error).__name__


def inert(text: str) -> str:
    """Escapes control characters, except line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Escapes all control characters, so that the text is one line."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def first_few(names: Sequence[str], most: int) -> str:
    """Joins the first `most` names, and says how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(count: int, one: str, more: str = "") -> str:
    """Returns a number with its noun: "1 picture", "1,000 pictures"."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean NAME?" for the closest known name, or nothing."""
    closest = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {closest[0]}?" if closest else ""
