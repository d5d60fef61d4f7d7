"""Exceptions that end a program cleanly, their exit codes, and text helpers.

`process/entry_point.py` prints the message of such an exception on stderr. Any other
exception is a bug in this package, and its traceback is shown.
"""

import re
import signal
import sys
import unicodedata
from collections.abc import Sequence

# Control characters but line breaks, Unicode's line breaks, and lone surrogates.
_CONTROLS = re.compile(r"[\0-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

EXIT_USAGE = 2
EXIT_DIVERGED = 3  # The run has done all steps, and a restart does none.
# EX_TEMPFAIL in sysexits.h: the same command may succeed later.
EXIT_TRY_AGAIN = 75
# 128 + SIGINT and 128 + SIGPIPE, as shells report them.
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# Signals that end a training run after the current step: a scheduler's notice before it
# kills the run, Ctrl-C, SLURM's `--signal=USR1`, and a closed terminal or connection.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class UsageError(Exception):
    """A user's mistake, or a foreseeable fault outside the program: exit code 2.

    The message names the value, the broken rule and the fix, in one or two sentences
    that need no traceback. Control characters in the message are escaped.

    Example:
        >>> Config(batch_size=0)
        Traceback (most recent call last):
        cifar10.errors.UsageError: --batch_size 0: ...
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str) -> None:
        super().__init__(_CONTROLS.sub(_escaped, message))


class UnavailableError(UsageError):
    """A resource, such as a server, is unavailable for now: exit code 75."""

    exit_code = EXIT_TRY_AGAIN


class MissingGpuError(UsageError):
    """TensorFlow does not find a requested GPU. `doctor` may explain why."""


class StoppedError(BaseException):  # Nothing that catches any `Exception` keeps it.
    """The program ends early but cleanly, for example after a signal.

    The exit code is 128 plus the signal's number, a worker's exit code, or an `EXIT_*`.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NotFiniteError(Exception):
    """A step's result cannot be used: not finite or corrupted, as `problem` says."""

    def __init__(self, step: int, problem: str) -> None:
        super().__init__(f"at step {step} {problem}")
        self.step, self.problem = step, problem


class CorruptedError(NotFiniteError):
    """Two devices disagree: on a batch's gradients, or on the value of a variable."""


class LostWorkerError(Exception):
    """A worker was lost (exit code 75). Restarting all workers resumes the run."""


class DiskError(UsageError):
    """A file operation failed.

    `problem` says in full what failed, why and what remains; `fix` is the remedy.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem} {fix}".rstrip())
        self.problem = problem


def say(text: str) -> None:
    """Prints a message to stderr at once. Stdout is reserved for results."""
    print(text, file=sys.stderr, flush=True)


def reason(error: BaseException) -> str:
    """Extracts the cause from an error, without the text that TensorFlow adds."""
    # Keras puts the message of a failing layer in bold, or last.
    last = str(error).rpartition("Error encountered:\n\n")[2]
    said = str(error).partition("\033[1m")[2] or last
    text = getattr(error, "strerror", None) or said.partition("\n")[0]
    text = re.sub(r"\033\[0m|{{[^}]*}} |/[^;]*tempstate[^;]*; | \[Op:\w+\].*", "", text)
    return text or type(error).__name__


def printable(text: str, kept: str = "") -> str:
    """Escapes unprintable characters and line breaks, except spaces and `kept`."""
    return re.sub(f"[^ -~{kept}]", _escaped, text)


def _escaped(found: re.Match[str]) -> str:
    is_shown = found[0].isprintable() or unicodedata.category(found[0]) == "Zs"
    return found[0] if is_shown else found[0].encode("unicode_escape").decode()


def has_controls(text: str) -> bool:
    """Returns whether text has control characters, line breaks or lone surrogates."""
    return not text.isprintable() and ("\n" in text or bool(_CONTROLS.search(text)))


def nfc(text: str) -> str:
    """Returns the form of text to compare: an accent may be stored in two ways."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def first_few(names: Sequence[str], most: int) -> str:
    """Joins the first `most` names, and says how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(count: int, one: str, more: str = "") -> str:
    """Formats a number with its noun: "1 picture", "1,000 pictures"."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def format_duration(seconds: float) -> str:
    """Formats a duration in the largest unit in which it is at least 1.5."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * size:
            return f"{format_number(seconds / size, 2)} {unit}"
    return f"{format_number(seconds, 2)} seconds"


def format_number(value: float, digits: int = 3) -> str:
    """Formats a number, rounded to `digits` significant digits."""
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def rounded(value: float, digits: int) -> str:
    """Formats a number; in scientific notation if it is 1,000 or more."""
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.1e}"
