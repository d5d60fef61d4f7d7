"""Which lines of a run last, and what moves between them on a terminal."""

import contextlib
import os
import pty
import re
import threading
import types

import numpy as np
import pytest

import runs
from cifar10 import errors
from cifar10.config.config import Config
from cifar10.process.moving_line import LINE
from cifar10.training import console
from cifar10.training.train import train
from recorded_runs import recorded

TRAINING = {"num_gpus": 1, "batch_size": 4, "max_steps": 60, "checkpoint_steps": 50}


@pytest.fixture
def terminal(monkeypatch):
    """A terminal for the moving line; returns a function that reads what it got."""
    ours, theirs = pty.openpty()
    monkeypatch.setattr(console, "SECONDS_BETWEEN_DRAWINGS", 0.0)
    stream = os.fdopen(theirs, "w")
    monkeypatch.setattr(LINE, "stream", stream)
    monkeypatch.setattr(LINE, "is_free", True)  # Whatever other tests wrote last.
    got = []

    def drain():
        with contextlib.suppress(OSError):  # The other end is closed.
            while text := os.read(ours, 65536):
                got.append(text)

    thread = threading.Thread(target=drain)
    thread.start()

    def shown():
        stream.close()
        thread.join()
        return b"".join(got).decode()

    yield shown
    shown()
    os.close(ours)


def steps_printed(capsys):
    return re.findall(r"^step (\d+), loss", capsys.readouterr().out, re.MULTILINE)


def test_fast_steps_print_few_lines_and_are_all_logged(tmp_path, stand_in_dir, capsys):
    runs.train(tmp_path / "run", stand_in_dir, **TRAINING, log_frequency=5)
    printed = steps_printed(capsys)
    # The first ones, so that one sees that it runs, and the last one.
    assert printed[:2] == ["5", "10"]
    assert printed[-1] == "60"
    assert len(printed) < 12
    assert len(runs.logged(tmp_path / "run")) == 12


def test_slow_steps_print_each_line(tmp_path, stand_in_dir, capsys, monkeypatch):
    monkeypatch.setattr(console, "_ELSEWHERE", 0.0)
    runs.train(tmp_path / "run", stand_in_dir, **TRAINING, log_frequency=10)
    assert steps_printed(capsys) == ["10", "20", "30", "40", "50", "60"]


def test_the_line_shows_the_progress_of_a_run(tmp_path, stand_in_dir, terminal, capsys):
    options = {**TRAINING, "eval_steps": 30}
    runs.train(tmp_path / "run", stand_in_dir, **options)
    shown = terminal()
    pattern = (
        r"step \d+/60, epoch 0\.0/0\.024, loss [\d.]+, accuracy 0\.\d+, [\d.]+ \w+ left"
    )
    assert len(re.findall(pattern, shown)) > 30
    assert "step 60/60" in shown
    # What lasts is printed as ever.
    assert "step 30: precision @ 1" in capsys.readouterr().out


@pytest.mark.usefixtures("terminal")
def test_fast_steps_do_not_flood_the_terminal(tmp_path, stand_in_dir, monkeypatch):
    drawn = []
    monkeypatch.setattr(console, "SECONDS_BETWEEN_DRAWINGS", 1000.0)
    monkeypatch.setattr(LINE, "show", drawn.append)
    runs.train(tmp_path / "run", stand_in_dir, **TRAINING, log_frequency=5)
    assert len([line for line in drawn if "loss" in line]) == 1


@pytest.mark.usefixtures("an_hour_a_step")
def test_a_run_by_hours_shows_no_last_step(tmp_path, stand_in_dir, terminal):
    config = {"train_dir": str(tmp_path / "run"), "data_dir": str(stand_in_dir)}
    config |= {"data": "synthetic", "model": runs.SMALL, "batch_size": 4}
    train(Config(**config, max_hours=20.0))
    assert re.search(r"step \d+, epoch \d+\.\d, loss", terminal())


def noted(names, given):
    """Returns the note on a run with classes of these names."""
    training = types.SimpleNamespace(
        config=given if isinstance(given, Config) else Config(**given),
        run=recorded(class_names=[*names]),
    )
    return console.mirroring_note(training)


@pytest.mark.parametrize(
    ("names", "given", "named"),
    [
        (("ahead", "Turn Left", "Turn Right"), {}, "(turn left, turn right)"),
        ((*"0123456789",), {}, "(0, 1, 2 and 7 more)"),
        ((*"01234",), {}, None),
        (("left", "other"), {}, None),
        (("cat", "dog"), {}, None),
        (("left", "right"), {"distortions": "none"}, None),
    ],
)
def test_a_note_names_classes_that_mirroring_may_change(tmp_path, names, given, named):
    said = noted(names, {"data": str(tmp_path), **given})
    assert (f"mirrors pictures, which may change their class {named}" in said) is bool(
        named
    )
    assert ("mirrors" in said) is bool(named)


X, Y = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4) % 2


@pytest.mark.parametrize(
    ("given", "is_noted"),
    [
        ({"data": (X, Y)}, True),
        ({"data": "set.npz"}, True),
        ({"data": (X, Y), "recipe": "fast"}, True),
        ({"data": (X, Y), "distortions": "none"}, False),
        ({"data": (X, Y), "distortions": "crop_flip"}, False),
        ({"data": "cifar10"}, False),
    ],
)
def test_a_note_says_that_arrays_are_mirrored_unless_their_user_chose(
    monkeypatch, tmp_path, given, is_noted
):
    (tmp_path / "set.npz").touch()
    monkeypatch.chdir(tmp_path)
    said = noted(("class 0", "class 1"), given)
    assert ("For digits, letters and the like" in said) is is_noted
    assert ("mirrors" in said) is is_noted
    named = noted(("cat", "dog"), given)
    assert "mirrors" not in named, "the classes of a program's data set"


def test_a_resumed_run_on_arrays_is_not_told_to_begin_anew():
    config = Config(data=(X, Y))
    config.given = frozenset({"data", "resume"})
    assert "mirrors" not in noted(("class 0", "class 1"), config)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (errors.format_duration(89), "89 seconds"),
        (errors.format_duration(90), "1.5 minutes"),
        (errors.format_duration(1.5 * 3600), "1.5 hours"),
        (errors.format_duration(35 * 3600), "35 hours"),
        (errors.format_duration(1.5 * 86400), "1.5 days"),
        (errors.format_number(29_612.3), "29,600"),
        (errors.format_number(0.01234, 2), "0.012"),
        (errors.rounded(999.994, 2), "999.99"),
        (errors.rounded(1000.0, 2), "1.0e+03"),
        (errors.rounded(-2e22, 2), "-2.0e+22"),
        (errors.counted(0, "picture"), "0 pictures"),
        (errors.counted(1, "picture"), "1 picture"),
        (errors.counted(2000, "picture"), "2,000 pictures"),
        (errors.counted(2, "class", "classes"), "2 classes"),
        (errors.first_few(["a", "b", "c"], 3), "a, b, c"),
        (errors.first_few(["a", "b", "c"], 2), "a, b and 1 more"),
        (errors.printable("a\t\u00e9\n\x1b[1m"), "a\\t\u00e9\\n\\x1b[1m"),
        (errors.printable("a\nb\tc", "\n"), "a\nb\\tc"),
        (errors.reason(KeyError()), "KeyError"),
        (errors.reason(OSError(28, "No space left")), "No space left"),
    ],
)
def test_numbers_and_names_in_messages_are_short_and_safe(told, expected):
    assert told == expected
