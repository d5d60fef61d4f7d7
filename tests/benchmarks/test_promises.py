"""The promises on other trainers: what is kept, broken, or not offered."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.promises import __main__ as program, adapters
from benchmarks.promises.contract import (
    BROKEN,
    KEPT,
    NOT_OFFERED,
    PROMISES,
    Contract,
    NotInstalledError,
)
from benchmarks.promises.trials import Trials
from cifar10.errors import UsageError

NUMPY = str(Path(__file__).parents[1] / "helpers" / "numpy_trainer.py")
EXAMPLE = Path(adapters.__file__).with_name("my_adapter.py")


def contract(folder, *words):
    return Contract([sys.executable, NUMPY, *words], folder)


@pytest.mark.slow
def test_adapter_without_our_code_keeps_every_promise(tmp_path):
    own = contract(tmp_path)
    cells = {promise: own.check(promise) for promise in PROMISES}
    assert {cell.verdict for cell in cells.values()} == {KEPT}, cells


def documented_adapter(folder, good="", bad=""):
    """Returns the contract of the adapter to copy, with our trainer in NumPy."""
    shutil.copy(NUMPY, folder / "my_trainer.py")
    text, adapter = EXAMPLE.read_text(), folder / "my_adapter.py"
    assert good in text
    adapter.write_text(text.replace(good, bad))
    return Contract([sys.executable, str(adapter)], folder)


@pytest.mark.parametrize(
    ("good", "bad", "promise", "why"),
    [
        ("return weights", "return [w * 1e999 for w in weights]", "workers", "finite"),
        ("return weights", "return []", "workers", r"shapes \[\] for \[\]"),
        ("return weights", "return weights[: job.workers]", "workers", "of shapes"),
        ("return weights", "return weights * 2", "resumed_images", "2 finite biases"),
        ('"*.npz"', '"*.ckpt"', "cut_checkpoint", r"matches \*\.ckpt"),
    ],
)  # fmt: skip
def test_an_adapters_mistake_is_named_and_keeps_nothing(
    tmp_path, good, bad, promise, why
):
    cell = documented_adapter(tmp_path, good, bad).check(promise)
    assert cell.verdict == BROKEN
    assert re.search(why, cell.said), cell.said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["no_such_program x"], "no_such_program"),
        (["python 'x"], "No closing quotation"),
        ([""], "empty"),
        (["true", "--only", "Keras"], "--only"),
    ],
)
def test_a_command_without_a_trainer_is_refused(monkeypatch, words, why):
    monkeypatch.setattr(sys, "argv", ["promises", "--adapter", *words])
    with pytest.raises(UsageError, match=why):
        program.main()


def test_a_promise_that_does_not_exist_is_not_left_out(tmp_path):
    with pytest.raises(NotInstalledError, match=r"resumed_bset is none of .*_best"):
        documented_adapter(tmp_path, "lacks={}", 'lacks={"resumed_bset": "none"}')


def test_adapters_of_one_name_have_a_column_each(tmp_path):
    adapter = [sys.executable, NUMPY]
    found = program.try_all({"one": adapter, "two": adapter}, ["evaluation"], tmp_path)
    assert len(found) == 2
    assert [*found][1].endswith("two")


def test_documented_adapter_trains_resumes_and_evaluates(tmp_path):
    own = documented_adapter(tmp_path)
    assert own.trainer.name == "my trainer"
    cells = [own.check(one) for one in ("resumed_weights", "evaluation")]
    assert [cell.verdict for cell in cells] == [KEPT, KEPT], cells


@pytest.mark.slow
def test_documented_adapter_keeps_every_promise(tmp_path):
    own = documented_adapter(tmp_path)
    cells = {promise: own.check(promise) for promise in PROMISES}
    assert {cell.verdict for cell in cells.values()} == {KEPT}, cells


@pytest.mark.parametrize(
    "promise",
    [
        pytest.param(one, marks=[] if one == "evaluation" else pytest.mark.slow)
        for one in PROMISES
    ],
)
def test_broken_promise_is_found_broken_twice(promise, tmp_path):
    cell = contract(tmp_path, promise).check(promise)
    assert (cell.verdict, cell.times) == (BROKEN, 2), cell


def test_images_seen_twice_or_never_are_counted(tmp_path):
    # One of an epoch's twelve updates is saved, so its eight images come again and
    # those of the last update never.
    cell = contract(tmp_path, "resumed_images").check("resumed_images")
    assert cell.verdict == BROKEN
    assert cell.said.endswith("8 3 times, 80 4 times, 8 5 times")


def test_features_not_offered_are_not_tried(tmp_path):
    cell = contract(tmp_path, "no nan").check("nan")
    assert (cell.verdict, cell.said) == (NOT_OFFERED, "no reason")


def test_killed_jobs_leave_no_process(tmp_path):
    own = contract(tmp_path)
    trials = Trials([sys.executable, NUMPY], tmp_path)
    folder, data = trials.new_folder(), own.data["network"]
    with trials.started("train", folder, data, wait_at=2) as process:
        assert process.members()
    assert not process.members()


def test_an_uninstalled_trainer_is_reported_in_its_row(tmp_path):
    missing = [sys.executable, "-c", "import no_such_package"]
    found = program.try_all({"theirs": missing}, PROMISES, tmp_path)
    assert "no_such_package" in found["theirs"]
    assert "theirs: not installed" in program.markdown(found)


def test_unknown_trainers_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["promises", "--only", "caffe"])
    with pytest.raises(UsageError, match="caffe"):
        program.main()


@pytest.mark.slow
def test_our_row_keeps_every_promise(tmp_path):
    own = Contract(program.command_of("ours"), tmp_path)
    cells = {promise: own.check(promise) for promise in PROMISES}
    assert {cell.verdict for cell in cells.values()} == {KEPT}, cells


NEEDED = {"Keras": "keras", "PyTorch": "torch", "Lightning": "lightning"}
NEEDED["Hugging"] = "transformers"


@pytest.mark.peers
@pytest.mark.parametrize("name", [one for one in program.TRAINERS if one != "ours"])
def test_peers_train_and_are_judged(name, tmp_path):
    [package] = [one for word, one in NEEDED.items() if name.startswith(word)]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    peer = Contract(program.command_of(name), tmp_path)
    cells = {promise: peer.check(promise) for promise in PROMISES}
    failed = {one for one, cell in cells.items() if cell.said.startswith("fails")}
    # https://github.com/keras-team/keras/issues/20582
    assert failed <= ({"accumulation"} if "Mirrored" in name else set()), cells
    assert cells["resumed_schedule"].verdict == KEPT


def test_an_adapter_failing_to_start_is_reported(tmp_path):
    with pytest.raises(NotInstalledError, match="nobody"):
        Contract([sys.executable, "-c", "raise SystemExit('nobody')"], tmp_path)
