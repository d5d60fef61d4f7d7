"""Starts and ends the programs of this package, and guards their output streams.

An expected error ends a program with a sentence and an exit code, not a traceback. The
output streams may be full, closed or absent. No output can control a terminal.
"""

import contextlib
import errno
import gc
import importlib.util
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from cifar10 import errors, hardware
from cifar10.errors import LostWorkerError, StoppedError, UsageError, say
from cifar10.process import invocation, signals
from cifar10.process.moving_line import LINE
from cifar10.process.signals import StopSignals

# Errors of paths that no restart mends, as one may mend those of a network's disk.
_OF_PATHS = (
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS),
)


def run_program(
    main: Callable[[], None],
    *,
    explain_missing_gpus: Callable[[], str] = str,
    output_is_log: bool = False,
) -> None:
    """Runs a program's main function and turns its errors into exit codes.

    An exception from `errors.py`, TensorFlow's for a full GPU, or a path that cannot be
    used becomes a message and an exit code. Any other exception is a bug in this
    package and keeps its traceback.
    `explain_missing_gpus` returns more lines for a `MissingGpuError`, or an empty
    string. With `output_is_log`, the program continues if a write to stdout fails.
    """
    guard_streams(output_is_log=output_is_log)
    for number in signals.stop_signals() - {signal.SIGINT}:  # Python handles SIGINT.
        signal.signal(number, _stop)
    try:
        main()
    except (UsageError, StoppedError, LostWorkerError) as error:
        if isinstance(error, StoppedError) and not error.exit_code:
            print(error, flush=True)
            return
        say(f"{invocation.program_name()}: {error}")
        lacks_gpu = isinstance(error, errors.MissingGpuError)
        if lacks_gpu and (why := explain_missing_gpus()):
            say(why)
        if isinstance(error, LostWorkerError):
            # Skips Python's shutdown, where TensorFlow would wait for the lost worker.
            os._exit(errors.EXIT_TRY_AGAIN)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # The reader of stdout has ended, such as `| head`.
        sys.exit(errors.EXIT_BROKEN_PIPE)
    except KeyboardInterrupt:
        say(f"{invocation.program_name()}: interrupted.")
        sys.exit(errors.EXIT_INTERRUPTED)
    except Exception as error:
        if not (why := _why_no_bug(error)):
            raise
        say(f"{invocation.program_name()}: {why}")
        sys.exit(errors.EXIT_USAGE)
    finally:
        LINE.erase()


def _why_no_bug(error: Exception) -> str:
    """Returns what the user can do about an unexpected error; "" if it is a bug."""
    if isinstance(error, OSError) and error.errno in _OF_PATHS and error.filename:
        return f"{error.filename} cannot be used: {errors.reason(error)}."
    if "cudaSetDevice() on" in str(error):  # TensorFlow's, if a GPU is full.
        return (
            f"{error}\nOther programs fill the GPU: see nvidia-smi. End them, or set "
            "CUDA_VISIBLE_DEVICES to another GPU, or -1."
        )
    return ""


def _stop(number: int, _frame: object) -> None:
    """Handles a signal by raising `StoppedError`, as there is nothing to save."""
    raise StoppedError(f"stopped by {signal.Signals(number).name}.", 128 + number)


def import_tensorflow(
    *, deterministic: bool = False, stop: StopSignals | None = None
) -> None:
    """Imports TensorFlow with settings that TensorFlow reads only on import.

    Hides TensorFlow's start-up messages unless TF_CPP_MIN_LOG_LEVEL is set below 3.
    CUDA numbers GPUs as nvidia-smi does, unless the user has set CUDA_DEVICE_ORDER.
    During the import, `stop` handles signals. Without `stop`, they end the program.

    Enables oneDNN on processors with AVX2. TensorFlow for Linux does so only with VNNI,
    but on others a step takes half the time with it, too (docs/speed.md). Disables it
    with `deterministic`, as its kernels sum in an order that depends on the shapes.

    Without `deterministic`, GPUs use cuDNN's channels-last batch normalization, which
    may overflow on activations far from 1, but needs no transpositions.
    """
    if deterministic:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    else:
        os.environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
    os.environ["KERAS_BACKEND"] = "tensorflow"  # Other programs may use another.
    if "tensorflow" in sys.modules:
        return
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if "avx2" in hardware.processor_features():
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    say("Starting TensorFlow ...")
    if importlib.util.find_spec("tensorflow") is None:
        raise UsageError(
            f"{sys.executable} has no TensorFlow. `make train` installs it into .venv; "
            "then run\nin each terminal: source .venv/bin/activate"
        )
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    quiet = contextlib.nullcontext() if level in ("0", "1", "2") else _silent_stderr()
    with contextlib.nullcontext() if stop else StopSignals(), quiet:
        gc.disable()  # A fifth of the import would be a search for garbage.
        importlib.import_module("tensorflow")
        gc.enable()
        gc.freeze()  # No later search visits what the import has made.


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discards what TensorFlow 2.21 writes before it reads TF_CPP_MIN_LOG_LEVEL."""
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
    """Replaces stdout and stderr by streams that handle failed writes.

    Without `output_is_log`, a failed write to stdout ends the program; others are lost.
    """
    # The lowest free number is taken first: else the next file would be stderr.
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    both = sys.stdout and sys.stderr and sys.stdout.isatty() and sys.stderr.isatty()
    if both and os.environ.get("TERM") not in (None, "", "dumb"):
        LINE.stream = sys.stderr
    if isinstance(sys.stdout, io.TextIOWrapper):  # File names may be any bytes.
        sys.stdout.reconfigure(errors="surrogateescape")
    if sys.stdout:  # Absent if its descriptor was closed.
        sys.stdout = cast("TextIO", _Output(sys.stdout, lossy=output_is_log))
    # Without one, `print` would take stdout instead.
    stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = cast("TextIO", _Output(stderr, lossy=True))
    # Python 3.13 would color tracebacks with control sequences.
    os.environ.setdefault("PYTHON_COLORS", "0")


class _Output:
    """A stream that reports a failed write once, as an error or, if `lossy`, a warning.

    Escapes control characters, unless another program may read the output.
    """

    def __init__(self, stream: TextIO, *, lossy: bool) -> None:
        self._stream = stream
        self._lossy = lossy
        self._is_for_people = lossy or stream.isatty()
        self._failed = False

    def write(self, text: str) -> int:
        if text:
            LINE.erase()
            LINE.is_free = text.endswith("\n")
        with self._writing():
            shown = errors.printable(text, "\n") if self._is_for_people else text
            self._stream.write(shown)
        return len(text)

    def flush(self) -> None:
        with self._writing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        # ValueError: the file is closed, or its encoding lacks a character.
        except (OSError, ValueError) as error:
            if self._failed:
                return
            self._failed = True
            problem = f"the output cannot be written: {errors.reason(error)}."
            if self._lossy:
                name = invocation.program_name()
                say(f"{name}: {problem}\nThe program continues without these lines.")
                return
            # Otherwise Python 3.13 would report another failed write at exit.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if isinstance(error, BrokenPipeError):
                raise
            raise StoppedError(problem, errors.EXIT_USAGE) from error
