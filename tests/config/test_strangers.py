"""A run directory is data: what a stranger put there runs and changes nothing."""

import json
import os
import shutil
import sys

import pytest

import runs
from cifar10 import files
from cifar10.config import run_config
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.follower import Follower
from cifar10.input import datasets, download
from cifar10.input.dataset_base import Dataset
from cifar10.input.pictures import decoding
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES
from cifar10.process import entry_point
from cifar10.run_directory import checkpoints, logs, scores, starting
from cifar10.run_directory.lock import RunLock
from cifar10.tools import predict
from cifar10.training import preflight, tensorboard, train as training
from cifar10.training.hooks import Run
from cifar10.training.timing import Timer
from recorded_runs import recorded
from sites import ARCHIVE, CONTENT
from small_runs import MODELS, describe, save

PRECIOUS = b"precious\n"
ESCAPE = "\x1b]0;owned\x07"
FACTS = {"parameters": 1, "simulated": False}
SETTINGS = {**Config(global_batch_size=128).values, **FACTS}
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)


@pytest.fixture(autouse=True)
def registered(tmp_path, monkeypatch):
    """Registers the models, and a place for notes: some tests write the same run."""
    for name, build in MODELS.items():
        monkeypatch.setitem(ARCHITECTURES, name, Architecture(build))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "small", Architecture(MODELS["small"]))
        run = tmp_path_factory.mktemp("saved")
        describe(run)
        save(run, 10)
        return run


@pytest.fixture
def run_dir(saved, tmp_path):
    """A run with a checkpoint, of which this user's trainings have no note."""
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture
def marker(tmp_path, monkeypatch, run_dir):
    """A file that the model of the run writes, whose code is in the current folder."""
    marker = tmp_path / "marker"
    code = f"""import pathlib
pathlib.Path({str(marker)!r}).touch()
def f(image_shape, classes): ...
"""
    (tmp_path / "nice_model.py").write_text(code)
    (tmp_path / "cat.png").write_bytes(PNG)
    describe(run_dir, model="nice_model:f", parameters=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield marker
    sys.modules.pop("nice_model", None)


@pytest.fixture
def victim(tmp_path):
    """A file of the user's, which nothing may change."""
    path = tmp_path / "victim"
    path.write_bytes(PRECIOUS)
    yield path
    assert path.read_bytes() == PRECIOUS


def begin(train_dir, settings):
    """Starts a run; returns what it would say."""
    with RunLock(train_dir) as lock:
        return starting.start_run(
            recorded(train_dir, **settings), None, lock, fresh=False
        )


# ---- Whose config.json it is


def test_run_belongs_to_its_user_until_somebody_changes_it(tmp_path, monkeypatch):
    path = tmp_path / "run" / "config.json"
    settings = {**SETTINGS, "data_dir": "/data", "class_names": [ESCAPE]}
    assert begin(path.parent, settings) is None
    run = RecordedRun.read(path.parent)
    assert (run.is_own, run.config.dataset.data_dir) == (True, "/data")
    assert run.facts.class_names == [ESCAPE]

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    run = RecordedRun.read(path.parent)
    dataset = run.config.dataset
    assert (run.is_own, dataset.data_dir, dataset.data_url) == (False, None, None)
    assert run.facts.class_names == [r"\x1b]0;owned\x07"]
    monkeypatch.undo()

    path.write_text(json.dumps({**settings, "is_own": True}))
    assert not RecordedRun.read(path.parent).is_own


def test_training_continues_without_a_place_for_notes(tmp_path):
    (tmp_path / "state").touch()
    path = tmp_path / "run" / "config.json"
    assert "--trust_model" in begin(path.parent, SETTINGS)
    assert not RecordedRun.read(path.parent).is_own


# ---- Code


@pytest.mark.parametrize(
    "command",
    [
        ("eval.py", "--run_once"),
        ("cifar10/__main__.py", "export", "--output", "out"),
        ("cifar10/__main__.py", "report"),
        ("train.py", "--resume"),
    ],
    ids=lambda command: command[1],
)
def test_a_model_named_only_by_the_run_is_not_imported(marker, run_dir, command):
    resumes = command[1] == "--resume"
    words = [*command, run_dir] if resumes else [*command, "--train_dir", run_dir]
    said = runs.call(*words)
    flag = "--model" if resumes else "--trust_model"
    assert f"{flag} nice_model:f" in said.stderr
    assert not marker.exists()
    runs.call(*words, flag, "other_model:f")
    assert not marker.exists()
    runs.call(*words, flag, "nice_model:f")
    assert marker.exists()


def test_follower_imports_only_trusted_or_trained_models(marker, run_dir):
    describe(run_dir, model="small")
    follower = Follower(run_dir, trust_model="my_models:small")
    assert follower.look()
    describe(run_dir, model="nice_model:f", parameters=1)
    assert not follower.look()
    assert "nice_model:f" in follower.refusals[0]
    assert not marker.exists()
    run_config.mark_as_own((run_dir / "config.json").read_bytes())
    Follower(run_dir).look()
    assert marker.exists()


# ---- Folders and addresses


PLACE = {"data_dir": "/etc", "data_url": "http://192.0.2.1/"}


@pytest.mark.parametrize("is_own", [False, True])
def test_data_locations_are_trusted_only_in_the_users_own_runs(
    run_dir, tmp_path, monkeypatch, capsys, is_own
):
    corrections = {"corrections": "/nowhere.csv"}
    describe(run_dir, model="tutorial", parameters=1, **PLACE, **corrections)
    path = run_dir / "config.json"
    if is_own:
        run_config.mark_as_own(path.read_bytes())
    expected = tuple(PLACE.values()) if is_own else (None, None)
    asked = []
    found = Dataset(
        name="synthetic",
        directory=tmp_path / "cache",
        image_shape=(32, 32, 3),
        class_names=tuple("abcdefghij"),
        description="found",
        read=None,
    )
    monkeypatch.setattr(
        datasets, "find", lambda *words, **_: asked.append(words) or found
    )
    datasets.find_again(RecordedRun.read(path.parent))
    assert asked == [("synthetic", *expected)]
    assert ("data_dir" in capsys.readouterr().err) is not is_own

    resumed = []
    monkeypatch.setattr(
        training, "train", lambda config, *_, **__: resumed.append(config)
    )
    done = runs.call("train.py", "--resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert (resumed[0].dataset.data_dir, resumed[0].dataset.data_url) == expected
    assert resumed[0].dataset.corrections == ("/nowhere.csv" if is_own else None)


# ---- Links


def append_score(folder):
    scores.append(folder, 10, {"precision @ 1": 0.5}, 100)


def unpack(folder):
    (folder.parent / "packed").write_bytes(CONTENT)
    download.unpack(ARCHIVE, folder, folder.parent / "packed")


def receive(folder):
    (folder.parent / "sent").write_bytes(CONTENT)
    download.fetch([ARCHIVE], folder, (folder.parent / "sent").as_uri())


WRITERS = [
    (append_score, "metrics.jsonl"),
    (unpack, f".{ARCHIVE.name}.lock"),
    (receive, f".{ARCHIVE.archive.name}.part"),
    (unpack, f".{ARCHIVE.folder}.unpacking"),
]


def places(path, victim):
    """Puts a link to a file, one to nothing and a pipe into a place, in turn."""
    nowhere = victim.with_name("nowhere")
    for place in (
        lambda: path.symlink_to(victim),
        lambda: path.symlink_to(nowhere),
        lambda: os.mkfifo(path),
    ):
        place()
        yield
        assert not nowhere.exists()
        path.unlink()


@pytest.mark.parametrize(("write", "name"), WRITERS)
def test_writers_refuse_links_and_pipes(tmp_path, victim, write, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    for _ in places(folder / name, victim):
        with pytest.raises((OSError, UsageError)):
            write(folder)
    write(folder)  # It was the link alone that stood in the way.


def test_a_link_or_pipe_in_place_of_a_log_loses_the_lines(tmp_path, victim, capsys):
    log = tmp_path / "metrics.jsonl"

    def write():
        board = tensorboard.TensorBoard(tmp_path, Timer())
        board.on_start(Run(1, tmp_path, {}, None))
        board.on_log(10, {"total_loss": 4.5})
        board.on_end(10, "finished")

    for _ in places(log, victim):
        write()
        assert "lost" in capsys.readouterr().err
    write()
    assert json.loads(log.read_bytes())["step"] == 10


def test_a_link_with_the_temporary_name_is_replaced(tmp_path, victim):
    path = tmp_path / "config.json"
    path.with_name(f".config.json-{os.getpid()}").symlink_to(victim)
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_link_does_not_count_as_a_checkpoint(run_dir, tmp_path):
    (run_dir / "checkpoints" / "step-00000030").symlink_to(tmp_path)
    assert checkpoints.steps(run_dir / "checkpoints") == [10]


def test_a_run_never_writes_to_a_linked_folder(tmp_path):
    begin(tmp_path / "run", SETTINGS)
    (tmp_path / "elsewhere").mkdir()
    for name in ("checkpoints", "train", "debug"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UsageError, match=f"{name} is a link"):
            preflight.check_run(recorded(tmp_path / "run"), {"seed": 0}, fresh=False)
        (tmp_path / "run" / name).unlink()
    (tmp_path / "link").symlink_to(tmp_path / "run")  # The run itself may be one.
    assert preflight.check_run(recorded(tmp_path / "link"), {"seed": 0}, fresh=False)


# ---- Pipes, devices and endless files


def look(run_dir):
    follower = Follower(run_dir)
    assert not follower.look()
    return follower.why_no_weights


READERS = {
    "config.json": look,
    "checkpoints/step-00000010/manifest.json": look,
    "checkpoints/step-00000010/state.data-00001-of-00002": look,
    "metrics.jsonl": lambda run: str(logs.read_lines(run / "metrics.jsonl")),
    "cat.png": lambda run: str(decoding.read(run / "cat.png")),
}


def test_no_reader_waits_for_a_pipe(saved, tmp_path):
    for number, (name, read) in enumerate(READERS.items()):
        run_dir = shutil.copytree(saved, tmp_path / f"run{number}")
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)
        try:
            said = read(run_dir)
        except UsageError as error:
            said = str(error)
        assert ("no checkpoint" if "/" in name else "pipe") in said
        checkpoints.delete(run_dir / "checkpoints", 10)


def test_an_oversized_description_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 10 * files.DESCRIPTION_BYTES)
    with pytest.raises(UsageError, match="1,000,000"):
        RecordedRun.read(path.parent)


def test_facts_of_the_wrong_type_are_refused(run_dir):
    for facts in ({"class_names": [1] * 10}, {"versions": "2.21"}):
        describe(run_dir, **facts)
        with pytest.raises(UsageError, match=r"config\.json"):
            Follower(run_dir).follow(1.0, once=True).__next__()
    describe(run_dir, model="tutorial", parameters=1, learning_rate=float("nan"))
    done = runs.call("train.py", "--resume", run_dir)
    assert done.returncode == 2
    assert "--learning_rate" in done.stderr


def test_an_excessively_deep_model_is_not_built(run_dir):
    describe(run_dir, model="resnet", depth=10**9, parameters=1)
    with pytest.raises(UsageError, match="--depth 1000000000"):
        Follower(run_dir).follow(1.0, once=True).__next__()


# ---- What is shown


def test_names_of_classes_and_files_do_not_control_a_terminal(
    run_dir, tmp_path, monkeypatch, capsys
):
    describe(run_dir, class_names=[ESCAPE + letter for letter in "abcdefghij"])
    photos = tmp_path / "photos"
    photos.mkdir()
    photo = photos / f"{ESCAPE}cat.png"
    photo.write_bytes(PNG)
    options = predict.Options([str(photo)], train_dir=str(run_dir))
    assert predict.predict_files(options) == 0
    piped = capsys.readouterr()
    assert f"{ESCAPE}cat.png: " in piped.out, "other programs want the very name"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    entry_point.guard_streams(output_is_log=False)
    predict.predict_files(options)
    shown = capsys.readouterr()
    assert r"/\x1b]0;owned\x07cat.png: " in shown.out
    assert shown.out.count(r" \x1b]0;owned\x07") == 3, "the likeliest classes"
    assert "\x1b" not in shown.out + shown.err + piped.err
