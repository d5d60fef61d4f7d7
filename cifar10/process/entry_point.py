"""How a program of this package starts, prints and ends.

It starts quietly, ends with sentences and exit codes in place of tracebacks, and prints
to streams that may be full, closed or absent. Its output cannot control a terminal,
whoever chose the words.
"""

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

from cifar10.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    EXIT_USAGE,
    LostWorkerError,
    MissingGpuError,
    StoppedError,
    UsageError,
    inert,
    reason,
)
from cifar10.process import invocation, signals
from cifar10.process.signals import CLEAR_LINE, StopSignals

_CLEAR = "\x1b[K"  # The rest of the line, before or after `\r`.


def run_program(
    main: Callable[[], None],
    *,
    explain_missing_gpus: Callable[[], str] = str,
    output_is_log: bool = False,
) -> None:
    """Runs a program's main function and ends the program with its exit code.

    An exception from `errors.py` becomes one line on stderr and an exit code; any other
    is a bug in this package and keeps its traceback. `explain_missing_gpus` returns
    further lines on why TensorFlow finds fewer GPUs than requested, or nothing. If
    `output_is_log`, as in a training, the program continues when its output cannot be
    written.
    """
    guard_streams(output_is_log=output_is_log)
    for number in signals.stop_signals() - {signal.SIGINT}:  # Python has one for that.
        with contextlib.suppress(ValueError):  # Not in the main thread.
            signal.signal(number, _stop)
    try:
        with _unwrapped():
            main()
    except (UsageError, StoppedError, LostWorkerError) as error:
        if isinstance(error, StoppedError) and not error.exit_code:
            print(error, flush=True)
            return
        print(f"{invocation.program_name()}: {error}", file=sys.stderr, flush=True)
        if isinstance(error, MissingGpuError) and (why := explain_missing_gpus()):
            print(why, file=sys.stderr)
        if isinstance(error, LostWorkerError):
            # Skips Python's shutdown, where TensorFlow would wait for the lost worker.
            os._exit(EXIT_TRY_AGAIN)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # The reader of stdout has gone, as `| head` does.
        sys.exit(EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        print(CLEAR_LINE if os.isatty(2) else "", end="", file=sys.stderr)
        print(f"{invocation.program_name()}: interrupted.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raises the exception that stops the program without Keras's wrapper."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__
        while cause:
            if isinstance(cause, StoppedError | KeyboardInterrupt):
                raise cause from None
            cause = cause.__context__
        raise


def _stop(number: int, _frame: object) -> None:
    """Ends a program with nothing to save, such as an evaluation."""
    raise StoppedError(f"stopped by {signal.Signals(number).name}.", 128 + number)


def import_tensorflow(
    *, deterministic: bool = False, stop: StopSignals | None = None
) -> None:
    """Imports TensorFlow with the settings that it reads only at its start.

    Its start-up messages are hidden, unless the user wants to see them and has set
    TF_CPP_MIN_LOG_LEVEL below 3.

    With `deterministic` it computes without oneDNN, whose kernels sum in an order that
    depends on the shapes: the rounding of a gradient then depends several times less on
    how a batch is split among towers (lab notes). Otherwise, on GPUs, batch
    norm uses cuDNN's kernels for TensorFlow's own order of dimensions; they may
    overflow on activations far from 1, but the others need two transpositions each.

    A signal during the import ends the program at once, through `stop` if it is given.
    """
    if deterministic:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    else:
        os.environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
    if "tensorflow" in sys.modules:
        return
    print("Starting TensorFlow ...", file=sys.stderr, flush=True)
    if importlib.util.find_spec("tensorflow") is None:
        raise UsageError(
            f"{sys.executable} has no TensorFlow. `make train` installs it into .venv; "
            "then, in each\nterminal: source .venv/bin/activate"
        )
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    quiet = contextlib.nullcontext() if level in ("0", "1", "2") else _silent_stderr()
    with contextlib.nullcontext() if stop else StopSignals(), quiet:
        importlib.import_module("tensorflow")


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hides the output of libraries to stderr, below Python.

    The log level does not suffice: TensorFlow 2.21 writes lines before it reads it. If
    an import fails, its exception says why.
    """
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def guard_streams(*, output_is_log: bool) -> None:
    """Makes both output streams exist, and decides what happens when one fails.

    A line that stderr cannot write is lost, and so is a log on stdout; other output
    that fails ends the program. A closed stream becomes /dev/null: otherwise the next
    file would get its descriptor, and libraries would print into that file.
    """
    # Writing to a closed log then fails, and so does not go unnoticed.
    mode = os.O_RDONLY if output_is_log else os.O_RDWR
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # It takes the lowest number.
    # Python has no stream for a descriptor that was closed.
    stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # Unbuffered, Python loses without an error the rest that a pipe does not take.
    if isinstance(getattr(stdout, "buffer", None), io.RawIOBase):
        stdout = open(stdout.fileno(), "w", 1, stdout.encoding, closefd=False)  # noqa: SIM115
    if isinstance(stdout, io.TextIOWrapper):  # Names of files need not be text.
        stdout.reconfigure(errors="surrogateescape")
    sys.stdout = cast("TextIO", _Output(stdout, lossy=output_is_log))
    sys.stderr = cast("TextIO", _Output(stderr, lossy=True))
    # Python 3.13 would colour tracebacks, by control sequences.
    os.environ.setdefault("PYTHON_COLORS", "0")


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Lets a library draw its progress bar, which moves the cursor."""
    _Output.is_inert = False
    try:
        yield
    finally:
        _Output.is_inert = True


class _Output:
    """A stream that fails once: with an error or, if it is `lossy`, a warning.

    Control characters are escaped, except in output that other programs may read.
    """

    is_inert = True

    def __init__(self, stream: TextIO, *, lossy: bool) -> None:
        self._stream = stream
        self._lossy = lossy
        self._is_for_people = lossy or stream.isatty()
        self._failed = False

    def write(self, text: str) -> int:
        shown = text
        if self._is_for_people and self.is_inert and text.strip("\r") != _CLEAR:
            shown = inert(text)
        with self._writing():
            self._stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with self._writing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        # ValueError: the file is closed, or its encoding lacks a letter.
        except (OSError, ValueError) as error:
            if self._failed:
                return
            self._failed = True
            problem = f"the output cannot be written: {reason(error)}."
            if self._lossy:
                loss = f"{problem}\nIt continues; these lines are lost."
                print(
                    f"{invocation.program_name()}: {loss}", file=sys.stderr, flush=True
                )
                return
            # Python 3.13 would report at its end what it cannot write then.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise StoppedError(problem, EXIT_USAGE) from error
