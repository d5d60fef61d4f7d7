"""The board of records: p, the row, what is refused, and a machine's joules."""

import dataclasses
import subprocess
import sys

import pytest

import fake_package
from benchmarks import machine, record
from benchmarks.rivals import recipe as rival
from benchmarks.runner import Result, Row
from benchmarks.time_to_94 import OURS
from cifar10.errors import UsageError
from cifar10.input import datasets

ABOUT = {**fake_package.ABOUT, "commit": "abc1234-dirty"}
ABOUT["versions"] = dict.fromkeys(("python", "tensorflow", "keras", "numpy"), "1.0")


# Student's t.


@pytest.mark.parametrize(
    ("freedom", "t"),
    # One-sided 5 % points of published tables.
    [(1, 6.314), (2, 2.920), (4, 2.132), (9, 1.833), (29, 1.699), (120, 1.658)],
)
def test_p_values_agree_with_published_tables(freedom, t):
    count = freedom + 1
    scores = [1.0, -1.0] * (count // 2) + [0.0] * (count % 2)
    # Their mean is 0; the threshold lies t standard errors below it, and above it.
    below = t * (sum(map(abs, scores)) / freedom / count) ** 0.5
    assert record.p_value(scores, -below) == pytest.approx(0.05, abs=5e-5)
    assert record.p_value(scores, below) == pytest.approx(0.95, abs=5e-5)
    assert record.p_value(scores, 0.0) == pytest.approx(0.5)


@pytest.mark.parametrize("scores", [[94.1], [94.1, 94.1]])
def test_scores_without_a_deviation_have_no_p_value(scores):
    with pytest.raises(UsageError, match="deviation"):
        record.p_value(scores, 93.95)


# The row.


@pytest.fixture
def board(tmp_path, monkeypatch):
    path = tmp_path / "records.md"
    path.write_text(record.BOARD.read_text())
    monkeypatch.setattr(record, "BOARD", path)
    return path


def measured(*scores, problem="", joules=None):
    rounds = [
        {"seconds": 300.0 + number, "accuracy_with_views": score, "joules": joules}
        for number, score in enumerate(scores)
    ]
    return Result(Row("fast", OURS), "bfloat16", problem, rounds=rounds)


def test_a_record_is_entered_below_the_boards_header(board, capsys):
    before = board.read_text()
    record.enter(measured(0.9405, 0.9407, 0.9406, joules=2e4), 94.0, ABOUT)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] in before
    assert board.read_text() == f"{before}{printed[-1]}\n"
    cells = [cell.strip() for cell in printed[-1].strip("|").split("|")]
    assert cells == [
        *("94 %", "fast", "A processor, 2 cores, avx512_bf16, bfloat16"),
        *("301.0 ± 1.0 (3)", "20,000 ± 0 (3)", "94.06 ± 0.01 % (3)"),
        *("0.0014", "abc1234", "2026-11-21"),
        "python 1.0, tensorflow 1.0, keras 1.0, numpy 1.0",
    ]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (measured(0.9394, 0.9397), "p = "),
        (measured(0.9407), "no p"),
        (measured(0.95, 0.951, problem="Stopped after 3 of 250 steps"), "3 of 250"),
    ],
)
def test_a_result_against_the_rules_is_not_entered(result, problem, board, capsys):
    before = board.read_text()
    with pytest.raises(UsageError, match=problem):
        record.enter(result, 94.0, ABOUT)
    assert board.read_text() == before
    shown = capsys.readouterr().out
    assert ("| - |" in shown) == (problem == "p = ")  # No machine told its joules.


@pytest.mark.parametrize("level", ["0.94", "nan", "100"])
def test_a_level_outside_of_percentages_is_refused(level, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["record", "--level", level])
    with pytest.raises(UsageError, match="--level"):
        record.main()


def test_a_new_row_is_separate_from_the_row_before(board):
    board.write_text(board.read_text().removesuffix("\n"))
    before = board.read_text()
    record.enter(measured(0.9407, 0.9406, 0.9405), 94.0, ABOUT)
    assert board.read_text().startswith(f"{before}\n| 94 %")


def test_a_stopped_run_has_no_score(stand_in_dir, monkeypatch):
    from cifar10.training import train

    def stopped(_, hooks):
        hooks[0].on_step(3)

    monkeypatch.setattr(train, "train", stopped)
    dataset = datasets.find("synthetic", str(stand_in_dir))
    with pytest.raises(RuntimeError, match="3 of 300"):
        rival.Recipe(recipe="fast", dataset=dataset).run(0)


# What is refused before anything is trained.


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a recipe, and the board."""
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / "docs/records.md").touch()
    (root / "mine.toml").write_text('model = "airbench"\n')
    author = ["-c", "user.name=n", "-c", "user.email=e"]
    commit = [*author, "commit", "-q", "-m", "All"]
    for words in (["init", "-q"], ["add", "."], commit):
        subprocess.run(["/usr/bin/env", "git", "-C", root, *words], check=True)
    monkeypatch.setattr(machine, "ROOT", root)
    monkeypatch.setattr(record, "BOARD", root / "docs/records.md")
    return root


def test_uncommitted_records_do_not_make_a_checkout_dirty(checkout):
    (checkout / "docs/records.md").write_text("| a row |\n")
    record.check(str(checkout / "mine.toml"))


@pytest.mark.parametrize("name", ["mine.toml", "new.py"])
def test_a_dirty_checkout_is_refused(checkout, name):
    with (checkout / name).open("a") as file:
        file.write("# More.\n")
    with pytest.raises(UsageError, match=name):
        record.check(str(checkout / "mine.toml"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("eval_steps = 10", "eval_steps"),
        ("eval_steps = 10\nstop_after_no_gain = 2", "eval_steps"),
        ("keep_best = 1", "keep_best"),
        ('model = "small_model:two_layers"', "in the commit"),
        ("max_steps = 10", "in the commit"),  # The file itself is not.
    ],
)
def test_a_recipe_scoring_during_training_or_outside_the_commit_is_refused(
    checkout, line, problem
):
    path = checkout.parent / "recipe.toml"
    path.write_text(f"{line}\n")
    with pytest.raises(UsageError, match=problem):
        record.check(str(path))


def test_one_seed_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["record", "--seeds", "1"])
    with pytest.raises(UsageError, match="--seeds 1"):
        record.main()


def test_given_steps_are_trained_and_named_in_the_row(checkout, monkeypatch, capsys):
    def measure(rows, seeds, **_):
        [row] = rows
        assert (row.options["steps"], seeds) == (400, 3)
        return [dataclasses.replace(measured(0.9417, 0.9416, 0.9415), row=row)]

    monkeypatch.setattr(record, "measure_in_turn", measure)
    monkeypatch.setattr(datasets, "find", lambda *_: None)
    recipe = str(checkout / "mine.toml")
    flags = ["--recipe", recipe, "--max_steps", "400", "--seeds", "3"]
    monkeypatch.setattr(sys, "argv", ["record", *flags])
    record.main()
    assert f"| {recipe}, 400 steps |" in capsys.readouterr().out
    assert f"| {recipe}, 400 steps |" in record.BOARD.read_text()


def test_a_training_of_the_same_commit_and_machine_is_not_repeated(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(record, "KEPT", tmp_path / "build/record.jsonl")
    asked = []

    class Child:
        def ask(self, method, seed):
            asked.append((method, seed))
            return {"seconds": 10.0 + seed, "accuracy": 0.94, "joules": None}

    def train(seed, **changed):
        return record.train_once(Child(), seed, {**ABOUT, "recipe": "fast", **changed})

    first = train(0)
    with record.KEPT.open("a") as file:
        file.write('{"made_by": ')  # The disk was full.
    assert train(0) == first
    assert asked == [("run", 0)]
    for others in ({"commit": "another"}, {"recipe": "fast, 400 steps"}, {"cores": 3}):
        train(0, **others)
    assert train(1) == {**first, "seconds": 11.0}
    assert len(asked) == 5


# Joules.


def test_joules_sum_the_packages_even_if_a_counter_wraps(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_POWERCAP", tmp_path)
    assert machine.Energy().joules() is None

    def counter(folder, name, energy):
        folder = tmp_path / folder
        folder.mkdir(exist_ok=True)
        values = {"name": name, "energy_uj": energy, "max_energy_range_uj": 10_000_000}
        for file, value in values.items():
            (folder / file).write_text(f"{value}\n")

    counter("intel-rapl:0", "package-0", 9_000_000)
    counter("intel-rapl:0:0", "core", 0)  # A part of it.
    energy = machine.Energy()
    counter("intel-rapl:0:0", "core", 5_000_000)
    counter("intel-rapl:0", "package-0", 1_000_000)
    assert energy.joules() == 2.0
    counter("intel-rapl:0", "package-0", 4_000_000)
    assert energy.joules() == 5.0
