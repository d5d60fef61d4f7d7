"""The console: lines stay lines in a file."""

import pytest

from cifar10.training.console import Console, step_line


def test_step_line_is_the_tutorials():
    assert (
        step_line(10, 4.6649, (1234.54, 0.10371))
        == "step 10, loss = 4.66 (1234.5 examples/sec; 0.104 sec/batch)"
    )


def test_step_line_without_rate_says_why():
    assert step_line(10, 4.6649, None) == "step 10, loss = 4.66 (not timed)"


@pytest.fixture
def narrow_file(monkeypatch):
    """Narrow output that is no terminal, whatever the tests run in."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")


@pytest.mark.usefixtures("narrow_file")
def test_output_to_a_file_is_the_lines_and_nothing_else(capsys):
    lines = [
        step_line(10, 4.66, (1234.5, 0.104)),
        "a path: /tmp/" + "long name/" * 30 + "end",
        "no [bold]markup[/bold] and no [0]",
    ]
    with Console(0, 30) as output:
        for number, line in enumerate(lines, start=1):
            output.advance(10 * number)
            output.line(line)

    written = capsys.readouterr()
    assert written.out == "".join(f"{line}\n" for line in lines)
    assert written.err == ""
