"""The moving line on a terminal: what remains on the screen, and what a pipe gets."""

import errno
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest

from cifar10.process import moving_line
from runs import ROOT

PROGRAM = """
import os, sys, time
from cifar10.errors import UsageError
from cifar10.process import entry_point, moving_line, signals

def main():
    with moving_line.counting("Counting", 100, first=0.0) as advance:
        for number in range(100):
            advance(number)
            if number == 30:
                print("a score")
            if number == 60:
                print("a warning", file=sys.stderr)
            {middle}
            time.sleep(0.005)
    print("Done.")

entry_point.run_program(main)
"""


class Screen:
    """What a terminal shows of the few control sequences that programs here write."""

    def __init__(self, columns=60):
        self.columns = columns
        self.rows = [""]
        self.row = self.column = 0

    def feed(self, text):
        for up, code, char in re.findall(r"\x1b\[(\d*)([A-Z])|(.)", text, re.DOTALL):
            if code == "J":  # Erases from here on.
                self.rows[self.row :] = [self.rows[self.row][: self.column]]
            elif code == "A":
                self.row -= int(up or 1)
            elif code:
                pytest.fail(f"the screen does not know {code}")
            elif char == "\r":
                self.column = 0
            elif char == "\n":
                self._next_row()
            else:
                self._put(char)

    def _next_row(self):
        self.row += 1
        self.rows += [""] * (self.row + 1 - len(self.rows))

    def _put(self, char):
        if self.column == self.columns:
            self._next_row()
            self.column = 0
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + char + row[self.column + 1 :]
        self.column += 1


def on_terminal(middle="pass", columns=60, keys=b"", term="xterm"):
    """Runs the program on a terminal; returns its code, the screen and all it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    code = PROGRAM.replace("{middle}", middle)
    environment = {**os.environ, "TERM": term}
    process = subprocess.Popen(
        # A process of its own session, whose terminal sends Ctrl-C.
        ["/usr/bin/setsid", "--ctty", "--wait", sys.executable, "-c", code],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment,
    )
    os.close(theirs)
    written = b""
    while select.select([ours], [], [], 60.0)[0]:
        try:
            written += os.read(ours, 65536)
        except OSError:  # The program has ended.
            break
        if keys and b"Counting" in written:
            os.write(ours, keys)
            keys = b""
    os.close(ours)
    text = written.decode()
    screen = Screen(columns)
    screen.feed(text)
    return process.wait(timeout=60), [row.rstrip() for row in screen.rows], text


def test_the_line_vanishes_before_other_output_and_at_the_end():
    code, rows, written = on_terminal()
    assert code == 0
    assert rows == ["a score", "a warning", "Done.", ""]
    assert len(re.findall(r"Counting: \d+ of 100, [\d.]+ seconds left", written)) > 1


@pytest.mark.parametrize(
    ("middle", "code", "last"),
    [
        ("if number == 70: raise UsageError('it is wrong')", 2, "-c: it is wrong"),
        ("if number == 70: raise KeyError('a bug')", 1, "KeyError: 'a bug'"),
        ("if number == 70: raise KeyboardInterrupt", 130, "-c: interrupted."),
        ("if number == 70: os.kill(os.getpid(), 15)", 143, "-c: stopped by SIGTERM."),
    ],
    ids=["error", "traceback", "interrupt", "signal"],
)
def test_the_terminal_is_clean_after_every_kind_of_exit(middle, code, last):
    found, rows, _ = on_terminal(middle)
    assert (found, rows[-2:]) == (code, [last, ""])
    assert not any("Counting" in row for row in rows if "advance" not in row)


def test_ctrl_c_leaves_nothing_of_the_line():
    waiting = "time.sleep(0.02 if number < 60 else 60)"  # However late the key comes.
    code, rows, _ = on_terminal(waiting, columns=24, keys=b"\x03")
    assert code == 130
    assert "-c: interrupted." in rows
    assert not any("Counting" in row for row in rows)


def test_line_is_erased_after_the_window_has_become_narrower():
    shrink = (
        "if number == 50: import fcntl, struct, termios; "
        "fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 20, 0, 0))"
    )
    _, _, written = on_terminal(shrink)
    _, _, after = written.rpartition("\x1b[1A")  # The line had become two rows.
    assert all(len(line) < 20 for line in re.findall(r"Counting[^\x1b\r]*", after))


def test_a_narrow_window_shows_the_beginning_of_the_line():
    _, _, written = on_terminal(columns=30)
    shown = re.findall(r"\x1b\[J([^\x1b\r\n]+)", written.partition("a score")[0])
    assert shown
    assert all(re.fullmatch(r"Counting: \d+ of 100", line) for line in shown), shown


def test_unfinished_output_is_not_drawn_over():
    middle = "if number == 70: print('unfinished', end='', flush=True)"
    _, rows, _ = on_terminal(middle)
    assert rows[-2] == "unfinishedDone."


def test_a_task_of_unknown_duration_is_described_on_the_terminal(monkeypatch):
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal, open(ours, "rb") as screen:  # noqa: PTH123
        monkeypatch.setattr(moving_line.LINE, "stream", terminal)
        with moving_line.progress() as tick:
            tick(lambda: "first described")
            tick(lambda: "too soon for another drawing")
        expected, written = b"\r\x1b[Jfirst described\r\x1b[J", b""
        while len(written) < len(expected):  # It may arrive in two pieces.
            written += os.read(screen.fileno(), 1000)
    assert written == expected


def test_a_terminal_that_is_gone_is_not_written_to_again():
    ours, theirs = pty.openpty()
    written = []

    class Stream(io.StringIO):
        def fileno(self):
            return theirs

        def write(self, text):
            written.append(text)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    line = moving_line.MovingLine()
    line.stream = Stream()
    for text in ("Counting: 1 of 2", "Counting: 2 of 2"):
        line.show(text)
    line.erase()
    assert len(written) == 1
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_simple_terminals_get_plain_lines(term):
    _, rows, written = on_terminal(term=term)
    assert "\x1b" not in written
    assert rows[0].startswith("Counting: 0 of 100")


def test_pipes_get_a_line_now_and_then():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{middle}", "pass")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout == "a score\nDone.\n"
    assert done.stderr.count("Counting") == 1
    assert "\x1b" not in done.stderr
