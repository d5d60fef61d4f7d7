"""What the scripts share: a quiet start, and errors as sentences with exit codes."""

import contextlib
import importlib.util
import logging
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator

from cifar10.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_TRY_AGAIN,
    LostWorkerError,
    MissingGpuError,
    StoppedError,
    UsageError,
)
from cifar10.process import invocation, signals, standard_streams
from cifar10.process.signals import CLEAR_LINE, StopSignals


def import_tensorflow(
    *, deterministic: bool = False, stop: StopSignals | None = None
) -> None:
    """Imports TensorFlow with the settings it only reads at its start.

    Its start-up messages are hidden, unless the user wants to see them and has set
    TF_CPP_MIN_LOG_LEVEL below 3; if the import fails, all that was written is shown.
    The level alone does not hide them: TensorFlow 2.21 writes some lines before it
    reads the level.

    With `deterministic` it computes without oneDNN, whose kernels sum in an order that
    depends on the shapes: the rounding of a gradient then depends several times less on
    how a batch is split among towers (`docs/lab-notes.md`). Otherwise, on GPUs, batch
    norm uses cuDNN's kernels for TensorFlow's own order of dimensions; they may
    overflow on activations far from 1, but the others need two transpositions each.

    A signal meanwhile ends the program at once, through `stop` if that handles signals.
    """
    if deterministic:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    else:
        os.environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
    if "tensorflow" in sys.modules:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    # TensorFlow 2.21 can be imported in 1.5 GiB, not in 1.4; without a limit it is -1.
    if 0 <= limit < 3 * 2**29:
        raise UsageError(
            f"The address space is limited to {limit // 2**20} MB, in which TensorFlow "
            "does not start.\nRaise the limit: ulimit -v unlimited."
        )
    print("Starting TensorFlow ...", file=sys.stderr, flush=True)
    if importlib.util.find_spec("tensorflow") is None:
        raise UsageError(
            f"{sys.executable} has no TensorFlow. `make train` installs it into .venv; "
            "then, in each\nterminal: source .venv/bin/activate"
        )
    with contextlib.nullcontext() if stop else StopSignals():
        _import_quietly()


def _import_quietly() -> None:
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") in ("0", "1", "2"):
        importlib.import_module("tensorflow")
        return
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below.
    except OSError:  # No disk has room for what would be hidden.
        importlib.import_module("tensorflow")
        return
    stderr = os.dup(2)
    with file as written:
        sys.stderr.flush()
        os.dup2(written.fileno(), 2)
        try:
            importlib.import_module("tensorflow")
        except Exception:
            written.seek(0)
            os.write(stderr, written.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def run(
    main: Callable[[], None],
    *,
    explain_missing_gpus: Callable[[], str] = str,
    output_is_log: bool = False,
) -> None:
    """Runs a script's main function and ends the program with its exit code.

    What `errors.py` defines becomes one line on stderr and an exit code; any other
    exception is a bug in this package and keeps its traceback. `explain_missing_gpus`
    returns further lines on why TensorFlow finds fewer GPUs than requested, or nothing.
    If the `output_is_log`, like a training's, the program continues without it if it
    cannot be written.
    """
    standard_streams.prepare(output_is_log=output_is_log)
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
        print(f"{invocation.name()}: {error}", file=sys.stderr, flush=True)
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
        print(f"{invocation.name()}: interrupted.", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raises what has stopped the program, even if Keras has wrapped it."""
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
    """Ends a program that has nothing to save, such as an evaluation."""
    raise StoppedError(f"stopped by {signal.Signals(number).name}.", 128 + number)
