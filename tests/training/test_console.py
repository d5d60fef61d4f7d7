"""The console: its lines in a file."""

import types

from cifar10.training.console import Console


def test_output_to_a_file_is_the_lines_and_nothing_else(monkeypatch, capsys):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    lines = ["a path: /tmp/" + "long name/" * 30, "no [bold]markup[/bold] and no [0]"]
    output = Console(30, 8)
    output.on_start(types.SimpleNamespace(step=0))
    for number, line in enumerate(lines, start=1):
        output.on_step(10 * number)
        output.on_message(line)
    output.on_end(30, "finished")
    assert capsys.readouterr() == ("".join(f"{line}\n" for line in lines), "")
