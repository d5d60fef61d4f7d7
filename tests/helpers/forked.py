"""Starts Python programs in copies of a process that has imported TensorFlow.

Importing it takes four seconds of processor time, a copy some milliseconds. What the
import itself does is left out, so tests of a start run Python anew: `runs.start_anew`.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, reduction
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tensorflow", "keras"])


class Process:
    """A program that runs; has what the tests need of `subprocess.Popen`."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ):
        self.stdout, out = _output(stdout)
        self.stderr, err = (
            (None, out) if stderr == subprocess.STDOUT else _output(stderr)
        )
        self.returncode = None
        files = reduction.DupFd(out), reduction.DupFd(err)
        arguments = words, str(cwd), dict(env), *files
        self._process = _CONTEXT.Process(target=_become, args=arguments)
        self._process.start()
        self.pid = self._process.pid
        for file, given in ((out, stdout), (err, stderr)):
            if given == subprocess.PIPE:
                os.close(file)

    def poll(self):
        if self._process.exitcode is not None:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout=None):
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        self._process.join()
        return self.poll()

    def communicate(self, timeout=None):
        """Reads both streams to their ends; returns their texts."""
        streams = [self.stdout, self.stderr]
        with ThreadPoolExecutor(len(streams)) as pool:
            texts = pool.map(_rest, streams)
            self.wait(timeout)
            return tuple(texts)

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stream in {self.stdout, self.stderr} - {None}:
            stream.close()
        self.wait()


def _rest(stream):
    return "" if stream is None or stream.closed else stream.read()


def _output(given):
    """Returns the end to read of a program's output, if it is ours, and its file."""
    if given == subprocess.PIPE:
        reading, writing = os.pipe()
        return os.fdopen(reading), writing
    return None, given.fileno()


def _become(words, cwd, env, out, err):
    """Runs a program as `python *words` does, in this process."""
    gc.freeze()  # As the import of TensorFlow does; a search would also copy pages.
    for number, file in ((1, out), (2, err)):
        os.dup2(file.detach(), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    added = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = added
    if "TF_CONFIG" in env:
        _run_to_the_end(words, cwd)
    _run(words, cwd)


def _run_to_the_end(words, cwd):
    """Runs a program with all that Python does at an end, which takes a second.

    TensorFlow's workers wait for each other then, before their connections close.
    """
    code = 0
    try:
        _run(words, cwd)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)


def _run(words, cwd):
    first, *rest = words
    if first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), main.__dict__)  # noqa: S102
    elif first == "-m":
        module, *rest = rest
        sys.argv = [module, *rest]
        sys.path.insert(0, cwd)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
