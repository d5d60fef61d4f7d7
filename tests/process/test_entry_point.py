"""The scripts' frame: exit codes, a quiet start, and output that cannot be written."""

import errno
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf

import runs
from cifar10.config import layout
from cifar10.errors import StoppedError, UsageError
from cifar10.process import entry_point

STARTING = "Starting TensorFlow ...\n"
ESCAPE = "\x1b]0;owned\x07\r\x9b2J"


def failing_with(error):
    def main():
        raise error

    return main


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--seed", "1"])


def test_errors_end_a_script_with_a_line_and_an_exit_code(capsys):
    for error, code, said in (
        (UsageError("--seed 0 is low."), 2, "--seed 0 is low."),
        (KeyboardInterrupt(), 130, "interrupted."),
        (StoppedError("stopped by SIGTERM.", 143), 143, "stopped by SIGTERM."),
        (
            PermissionError(errno.EACCES, "Permission denied", "/private/run"),
            *(2, "/private/run cannot be used: Permission denied."),
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            entry_point.run_program(failing_with(error))
        assert ended.value.code == code
        assert capsys.readouterr() == ("", f"train.py: {said}\n")
    # With its traceback.
    for bug in (ValueError("a bug"), FileNotFoundError(errno.ENOENT, "a bug", "file")):
        with pytest.raises(type(bug), match="a bug"):
            entry_point.run_program(failing_with(bug))


def test_a_full_gpu_ends_a_script_with_advice(capsys):
    """The message is TensorFlow's on an H100 whose memory another process held."""
    full = "cudaSetDevice() on GPU:0 failed. Status: out of memory"
    with pytest.raises(SystemExit) as ended:
        entry_point.run_program(failing_with(tf.errors.InternalError(None, None, full)))
    assert ended.value.code == 2
    assert "nvidia-smi" in capsys.readouterr().err


def test_a_signal_ends_a_script_with_nothing_to_save(capsys):
    """As an evaluation; a run notes signals itself."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Under nohup it would be ignored.
        for number in numbers:

            def main(number=number):
                os.kill(os.getpid(), number)
                time.sleep(5)

            with pytest.raises(SystemExit) as ended:
                entry_point.run_program(main)
            assert ended.value.code == 128 + number
            assert number.name in capsys.readouterr().err
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The import of TensorFlow, for which a package stands in.


def importing(folder, words="cli.import_tensorflow()", end="", **environment):
    """Imports a package `tensorflow` that writes to stderr below Python."""
    (folder / "tensorflow.py").write_text(
        f"import os\nos.write(2, b'native\\n')\n{end}"
    )
    before = runs.of_a_user()
    before.pop("TF_CPP_MIN_LOG_LEVEL", None)
    path = f"{folder}:{runs.ROOT}"
    code = f"import os, sys\nfrom cifar10.process import entry_point as cli\n{words}"
    environment = {**before, "PYTHONPATH": path, **environment}
    return runs.run_anew("-c", code, env=environment)


def test_import_hides_tensorflows_output_unless_the_user_asks(tmp_path):
    after = "cli.import_tensorflow(); os.write(2, b'descriptor\\n')"
    assert importing(tmp_path, after).stderr == f"{STARTING}descriptor\n"
    done = importing(tmp_path, TF_CPP_MIN_LOG_LEVEL="0")
    assert (done.returncode, done.stderr) == (0, f"{STARTING}native\n")


def test_garbage_is_collected_after_the_import(tmp_path):
    words = "cli.import_tensorflow()\nimport gc\nprint(gc.isenabled())"
    assert importing(tmp_path, words).stdout == "True\n"


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ("deterministic=True", {}, "0"),
        ("", {}, "1"),
        ("", {"TF_ENABLE_ONEDNN_OPTS": "0"}, "0"),
    ],
)
def test_onednn_is_on_unless_a_run_is_deterministic_or_the_user_disables_it(
    tmp_path, options, given, expected
):
    words = (
        "cli.hardware.processor_features = lambda: ['avx2']\n"
        f"cli.import_tensorflow({options})"
    )
    reads = "print(os.environ['TF_ENABLE_ONEDNN_OPTS'])"
    done = importing(tmp_path, words, reads, **given)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", STARTING)


def test_batch_norm_on_gpus_keeps_the_order_of_dimensions(monkeypatch):
    name = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # It has started already.
    for before, deterministic, after in (
        ({}, False, "1"),
        ({name: "0"}, False, "0"),
        ({}, True, None),
    ):
        monkeypatch.setattr(os, "environ", before)
        entry_point.import_tensorflow(deterministic=deterministic)
        assert os.environ.get(name) == after


# Output that cannot be written.

PRINTING = """
import sys
from cifar10.process import entry_point as cli
def main():
    for step in (10, 20):
        print('step', step, file={stream}, flush=True)
    open('done', 'w').close()
cli.run_program(main{options})
"""


def printing(
    folder,
    redirection="",
    *,
    stream="sys.stdout",
    is_log=True,
    stdout=None,
    **variables,
):
    """Runs a script that prints, with its streams redirected by a shell."""
    options = "" if is_log is None else f", output_is_log={is_log}"
    code = PRINTING.format(stream=stream, options=options)
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code],
        env={**os.environ, "PYTHONPATH": str(runs.ROOT), **variables},
        cwd=folder,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def test_an_unwritable_log_is_lost_and_reported_once(tmp_path):
    for redirection, stream, reported in (
        (">/dev/full", "sys.stdout", 1),
        ("<&- >&- 2>&-", "sys.stderr", 0),
    ):
        done = printing(tmp_path, redirection, stream=stream)
        assert done.returncode == 0
        assert (tmp_path / "done").read_text() == "", "a descriptor was taken for it"
        assert done.stderr.count("cannot be written") == reported
        assert done.stdout == ""
        (tmp_path / "done").unlink()


def test_unwritable_output_other_than_a_log_ends_the_program(tmp_path):
    for is_log in (False, None):  # None is what a program does not say.
        done = printing(tmp_path, ">/dev/full", is_log=is_log)
        assert done.returncode == 2
        assert done.stderr.startswith("-c: ")
        assert done.stderr.count("\n") == 1
    reading, writing = os.pipe()
    os.close(reading)  # As `| head` does.
    done = printing(tmp_path, is_log=False, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
    assert not (tmp_path / "done").exists()


# What is shown.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_shown_texts_do_not_control_the_terminal(monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    entry_point.guard_streams(output_is_log=False)
    print(f"{ESCAPE}one\ntwo")
    print(ESCAPE, file=sys.stderr)
    shown = r"\x1b]0;owned\x07\r\x9b2J"
    assert (out.getvalue(), err.getvalue()) == (f"{shown}one\ntwo\n", f"{shown}\n")
    # Nor in a user's program, by the message of an error.
    assert str(UsageError(ESCAPE)).isprintable()


def test_output_for_programs_is_unchanged_and_messages_are_escaped(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    entry_point.guard_streams(output_is_log=False)
    print(ESCAPE)
    print(ESCAPE, file=sys.stderr)
    assert out.getvalue() == f"{ESCAPE}\n"
    assert "\x1b" not in err.getvalue()


def test_a_line_with_an_unencodable_letter_is_lost(monkeypatch, capsys):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    entry_point.run_program(lambda: print("Zo\u00eb"), output_is_log=True)
    entry_point.run_program(lambda: print("step 20", flush=True), output_is_log=True)
    assert stream.detach().getvalue() == b"\nstep 20\n"
    assert "codec" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_does_not_end_a_run(tmp_path, stand_in_dir, closed):
    flags = runs.training_flags(tmp_path / "run", stand_in_dir, max_steps=2)
    command = shlex.join([sys.executable, "train.py", *map(str, flags)])
    env = runs.of_a_user() | {"CIFAR10_DATA_DIR": str(stand_in_dir)}
    shell = ["sh", "-c", f"exec {command} {closed}"]
    done = subprocess.call(shell, cwd=runs.ROOT, env=env)
    assert done == 0
    assert runs.checkpoint(tmp_path / "run", 2).is_dir()


@pytest.mark.slow
def test_global_settings_of_keras_change_nothing(tmp_path, stand_in_dir):
    settings = {"backend": "jax", "image_data_format": "channels_first"}
    (tmp_path / "keras.json").write_text(json.dumps(settings | {"floatx": "float16"}))
    found = []
    for name, env in (
        ("usual", {}),
        ("by file", {"KERAS_HOME": str(tmp_path)}),
        ("by name", {"KERAS_BACKEND": "torch"}),
    ):
        run = tmp_path / name
        flags = runs.training_flags(run, stand_in_dir, max_steps=2)
        words = ("train.py", "--deterministic", *flags)
        done = runs.run_anew(*words, env=runs.of_a_user() | env)
        assert done.returncode == 0, done.stderr
        found.append(runs.variables(runs.checkpoint(run, 2)))
    runs.assert_equal(found[1], found[0])
    runs.assert_equal(found[2], found[0])


def test_a_missing_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        with pytest.raises(UsageError, match="current folder"):
            layout.absolute_path("runs")
        assert layout.absolute_path("/runs") == Path("/runs")
    finally:
        os.chdir(tmp_path)
