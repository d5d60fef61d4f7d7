"""The scripts' frame: sentences and exit codes, and a quiet start."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cifar10.config import cli, streams
from cifar10.errors import StoppedError, UsageError

REPOSITORY = Path(__file__).parents[2]
STARTING = "Starting TensorFlow ...\n"


def failing_with(error):
    def main():
        raise error

    return main


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py", "--seed", "1"])


def test_usage_error_is_a_sentence_on_stderr_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run(failing_with(UsageError("--batch_size 0 is too small; try 1.")))

    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.err == "train.py: --batch_size 0 is too small; try 1.\n"
    assert written.out == ""


def test_interrupt_is_exit_code_130(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run(failing_with(KeyboardInterrupt()))

    assert ended.value.code == 130
    assert "train.py: interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("ours"), OSError(28, "full")])
def test_fault_of_ours_passes_through(error, capsys):
    with pytest.raises(type(error)) as raised:
        cli.run(failing_with(error))

    assert raised.value is error
    assert capsys.readouterr().err == ""


def test_exit_code_of_the_parser_is_kept():
    with pytest.raises(SystemExit) as ended:
        cli.run(failing_with(SystemExit(7)))

    assert ended.value.code == 7


def test_success_ends_without_exit():
    called = []

    cli.run(lambda: called.append(True))

    assert called == [True]


def in_new_process(code, *, path=None, stdout=subprocess.PIPE):
    """Runs code with `cli` imported, with `path` first on the module path."""
    folders = [str(path)] if path else []
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*folders, str(REPOSITORY)]),
    }
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS"):
        variables.pop(name, None)  # As a user starts it.
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom cifar10.config import cli\n{code}"],
        env=variables,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


def test_usage_error_of_a_program_shows_no_traceback():
    code = """
from cifar10.errors import UsageError
def main():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise UsageError("Nothing can be divided by 0.") from error
cli.run(main)
"""
    ended = in_new_process(code)

    assert (ended.returncode, ended.stderr) == (2, "-c: Nothing can be divided by 0.\n")


@pytest.mark.slow
def test_quiet_import_of_the_real_tensorflow_writes_one_line():
    ended = in_new_process(
        "cli.import_tensorflow()\nprint('tensorflow' in sys.modules)"
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", STARTING)


def stand_in(folder, end):
    """A package `tensorflow` that writes to stderr below Python, as the real one."""
    (folder / "tensorflow.py").write_text(
        f"import os\nos.write(2, b'native\\n')\n{end}"
    )
    return folder


def test_quiet_import_gives_stderr_back(tmp_path):
    code = """
import os
import signal
cli.import_tensorflow()
print("python", file=sys.stderr, flush=True)
os.write(2, b"descriptor\\n")
"""
    ended = in_new_process(code, path=stand_in(tmp_path, ""))

    said = f"{STARTING}python\ndescriptor\n"
    assert (ended.returncode, ended.stderr) == (0, said)


@pytest.mark.parametrize(("level", "shown"), [("0", "native\n"), ("3", "")])
def test_import_shows_what_the_users_log_level_asks_for(tmp_path, level, shown):
    code = f"""
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = {level!r}
cli.import_tensorflow()
"""
    ended = in_new_process(code, path=stand_in(tmp_path, ""))

    assert (ended.returncode, ended.stderr) == (0, STARTING + shown)


def test_deterministic_import_switches_onednn_off_before_tensorflow_starts(tmp_path):
    reads = "print(os.environ.get('TF_ENABLE_ONEDNN_OPTS'))"

    ended = in_new_process(
        "cli.import_tensorflow(deterministic=True)",
        path=stand_in(tmp_path, reads),
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", STARTING)


@pytest.mark.parametrize(
    ("before", "deterministic", "after"),
    [(None, False, "1"), ("0", False, "0"), (None, True, None)],
)
def test_batch_norm_on_gpus_is_told_to_leave_the_order_of_dimensions(
    monkeypatch, before, deterministic, after
):
    name = "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"
    monkeypatch.setattr(os, "environ", {} if before is None else {name: before})
    monkeypatch.setitem(sys.modules, "tensorflow", None)  # It has started already.
    cli.import_tensorflow(deterministic=deterministic)
    assert os.environ.get(name) == after


def test_failing_import_shows_all_that_was_written(tmp_path):
    broken = stand_in(tmp_path, "raise ImportError('no libcudart')")

    ended = in_new_process("cli.import_tensorflow()", path=broken)

    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{STARTING}native\n")
    assert "ImportError: no libcudart" in ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(StoppedError("stopped by SIGTERM.", 143), 143), (KeyboardInterrupt(), 130)],
)
def test_what_keras_wraps_ends_a_script_as_well(error, code, capsys):
    def main():
        try:
            raise error
        except type(error):
            # As Keras, for what is raised in the call of a layer.
            raise RuntimeError("Exception encountered when calling") from None

    with pytest.raises(SystemExit) as ended:
        cli.run(main)
    assert ended.value.code == code
    assert "Exception encountered" not in capsys.readouterr().err


def test_a_full_disk_under_the_output_is_a_sentence():
    code = "cli.run(lambda: print('step 10', flush=True))"
    with open("/dev/full", "w") as full:  # noqa: PTH123 - no folder has it.
        ended = in_new_process(code, stdout=full)
    assert ended.returncode == 2
    said = "-c: what it prints cannot be written: No space left on device.\n"
    assert ended.stderr == said


FAILING = """
def main():
    for step in (10, 20):
        print('step', step, file={stream}, flush=True)
    open('done', 'w').close()
cli.run(main, output_is_log={is_log})
"""


@pytest.mark.parametrize(
    ("redirection", "stream", "told"),
    [
        (">/dev/full", "sys.stdout", "No space left on device"),
        (">&-", "sys.stdout", "Bad file descriptor"),
        ("2>/dev/full", "sys.stderr", ""),
        ("2>&-", "sys.stderr", ""),
        ("<&- >&- 2>&-", "sys.stderr", ""),
    ],
)
def test_a_log_that_cannot_be_written_is_lost_and_told_once(
    tmp_path, redirection, stream, told
):
    code = FAILING.format(stream=stream, is_log=True)
    program = f"import sys\nfrom cifar10.config import cli\n{code}"
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "done").read_text() == "", "a descriptor was taken for it"
    lost = f"-c: what it prints cannot be written: {told}.\n"
    continues = "It continues; these lines are lost.\n"
    assert done.stderr == (f"{lost}{continues}" if told else "")
    assert done.stdout == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_log_that_a_full_pipe_does_not_take_is_told(tmp_path, unbuffered):
    """Where whoever reads it has made it non-blocking."""
    code = FAILING.format(stream="None", is_log=True)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    ended = subprocess.run(
        [sys.executable, "-c", f"from cifar10.config import cli\n{code}"],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": unbuffered,
        },
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(reading)
    os.close(writing)
    assert ended.returncode == 0
    assert (tmp_path / "done").exists()
    assert "what it prints cannot be written: write could not" in ended.stderr


def test_a_reader_that_has_seen_enough_ends_what_is_no_log():
    reading, writing = os.pipe()
    os.close(reading)
    ended = in_new_process(FAILING.format(stream="None", is_log=False), stdout=writing)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_no_word_of_stderr_is_torn_at_the_end_of_a_line(monkeypatch, is_terminal):
    class Terminal(io.StringIO):
        def isatty(self):
            return is_terminal

    written = Terminal()
    command = f"    python train.py --train_dir {'x' * 80}"
    bar = "\x1b[2K" + "#" * 80
    long = f"{'word ' * 30}/a/path/of-hyphens/{'y' * 90}."
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", written)
    streams.prepare(output_is_log=True)
    print(f"{long}\n{command}", file=sys.stderr)
    with streams.drawing():
        print(bar, file=sys.stderr)
    text, end = written.getvalue(), f"\n{command}\n{bar}\n"
    assert text.endswith(end)
    lines = text.removesuffix(end).splitlines()
    assert " ".join(lines) == long
    assert len(lines) > 1 if is_terminal else lines == [long]
    assert not is_terminal or all(len(line) <= 60 for line in lines[:-1])


class Terminal(io.StringIO):
    def isatty(self):
        return True


ESCAPE = "\x1b]0;owned\x07\r\x9b2J"


@pytest.mark.parametrize("is_log", [True, False])
def test_what_is_shown_commands_no_terminal(monkeypatch, is_log):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    streams.prepare(output_is_log=is_log)
    print(f"{ESCAPE}one\ntwo")
    print(ESCAPE, file=sys.stderr)
    shown = r"\x1b]0;owned\x07\r\x9b2J"
    assert (out.getvalue(), err.getvalue()) == (f"{shown}one\ntwo\n", f"{shown}\n")
    # Its own progress, and that of a library, redraw their lines.
    print("90 %", end="\x1b[K\r", file=sys.stderr)
    with streams.drawing():
        print("\x1b[A\x1b[2K", file=sys.stderr)
    print("\x1b[A", file=sys.stderr)
    drawn = err.getvalue().removeprefix(f"{shown}\n")
    assert drawn == "90 %\x1b[K\r\x1b[A\x1b[2K\n\\x1b[A\n"


def test_what_programs_read_is_as_it_is_and_messages_beside_it_are_not(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    streams.prepare(output_is_log=False)
    print(ESCAPE)
    print(ESCAPE, file=sys.stderr)
    assert out.getvalue() == f"{ESCAPE}\n"
    assert "\x1b" not in err.getvalue()


def test_an_error_commands_no_terminal_in_a_program_either():
    name, rule = str(UsageError(f"{ESCAPE}\nrule")).split("\n")
    assert name.isprintable()
    assert rule == "rule"


def test_a_letter_that_the_output_lacks_costs_its_line(monkeypatch, capsys):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    cli.run(lambda: print("Zo\u00eb"), output_is_log=True)
    cli.run(lambda: print("step 20", flush=True), output_is_log=True)
    assert stream.detach().getvalue() == b"\nstep 20\n"
    assert "codec can't encode" in capsys.readouterr().err


def test_an_address_space_that_is_too_small_is_a_sentence():
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
cli.run(cli.import_tensorflow)
"""
    ended = in_new_process(code)
    assert ended.returncode == 2
    assert ended.stderr == (
        "-c: The address space is limited to 512 MB, in which TensorFlow does not "
        "start.\nRaise the limit: ulimit -v unlimited.\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_ends_a_script_that_has_nothing_to_save(capsys, number):
    """As an evaluation; a training notes signals itself."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in numbers}

    def main():
        os.kill(os.getpid(), number)
        time.sleep(5)

    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Under nohup it would be ignored.
        with pytest.raises(SystemExit) as ended:
            cli.run(main)
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert ended.value.code == 128 + number
    assert f"stopped by {number.name}." in capsys.readouterr().err
