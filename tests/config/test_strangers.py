"""A run directory is data: what a stranger put there runs and changes nothing."""

import json
import os
import shutil
import sys

import pytest

import runs
from cifar10 import model as models
from cifar10.config import config_file, origin, regular_files
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.follower import Follower
from cifar10.input import cifar, datasets, download, records, transfer
from cifar10.input.pictures import decoding
from cifar10.run_directory import (
    checkpoints,
    claim,
    layout,
    readers,
    retention,
    scores,
)
from cifar10.scoring.summaries import EvaluationSummaries
from cifar10.tools.predict import predicting
from cifar10.training import summaries, train as training
from sites import ARCHIVE, QUICK, serving
from small_runs import MODELS, describe, save

PRECIOUS = b"precious\n"
ESCAPE = "\x1b]0;owned\x07"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, build in MODELS.items():
        monkeypatch.setitem(models.REGISTRY, name, build)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, build in MODELS.items():
            patch.setitem(models.REGISTRY, name, build)
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
    """Begins a run; returns what a training would say."""
    with claim.hold(train_dir) as held:
        return claim.begin(train_dir, settings, None, held, fresh=False)


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    """A place for notes that no other test has: some write the same config.json."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


# ---- Whose config.json it is


def test_what_a_training_wrote_is_its_users_until_somebody_changes_it(
    tmp_path, monkeypatch
):
    path = tmp_path / "run" / "config.json"
    settings = {**vars(Config()), "data_dir": "/data", "class_names": [ESCAPE]}
    settings["data_division"] = None
    assert begin(path.parent, settings) is None
    assert config_file.load(path) == {**settings, "is_own": True}

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
    found = config_file.load(path)
    assert (found["is_own"], found["data_dir"], found["data_url"]) == (
        False,
        None,
        None,
    )
    assert found["class_names"] == [r"\x1b]0;owned\x07"]
    monkeypatch.undo()

    path.write_text(json.dumps({**settings, "is_own": True}))
    assert not config_file.load(path)["is_own"]


def test_without_a_place_for_notes_a_training_says_so_and_goes_on(
    tmp_path, monkeypatch
):
    (tmp_path / "state").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "run" / "config.json"
    said = begin(path.parent, vars(Config()))
    assert "could not be recorded as yours" in said
    assert "--trust_model" in said
    assert not config_file.load(path)["is_own"]


# ---- Code


@pytest.mark.parametrize(
    "command",
    [
        ("eval.py", "--run_once"),
        ("cifar10/__main__.py", "export", "--output", "out"),
        ("cifar10/__main__.py", "predict", "cat.png"),
        ("cifar10/__main__.py", "report"),
        ("train.py", "--resume"),
    ],
    ids=lambda command: command[1],
)
def test_a_model_that_only_the_run_names_is_not_imported(marker, run_dir, command):
    resumes = command[1] == "--resume"
    words = [*command, run_dir] if resumes else [*command, "--train_dir", run_dir]
    said = runs.call(*words)
    flag = "--model" if resumes else "--trust_model"
    assert "model is nice_model:f, which is Python code" in " ".join(
        said.stderr.split()
    )
    assert f"{flag} nice_model:f" in said.stderr
    assert not marker.exists()
    runs.call(*words, flag, "other_model:f")
    assert not marker.exists()
    runs.call(*words, flag, "nice_model:f")
    assert marker.exists()


def test_a_follower_decides_anew_when_the_configuration_changes(marker, run_dir):
    describe(run_dir, model="small")
    follower = Follower(run_dir, trust_model="my_models:small")
    assert follower.look()
    describe(run_dir, model="nice_model:f", parameters=1)
    assert not follower.look()
    assert "The run's model is nice_model:f" in follower.refusals[0]
    assert not marker.exists()


def test_a_model_that_the_user_trained_here_needs_no_flag(marker, run_dir):
    origin.remember((run_dir / "config.json").read_bytes())
    Follower(run_dir).look()
    assert marker.exists()


# ---- Folders and addresses


@pytest.mark.parametrize("is_own", [False, True])
def test_only_ones_own_run_says_where_its_data_is(
    tmp_path, monkeypatch, capsys, is_own
):
    place = {"data_dir": str(tmp_path), "data_url": "http://192.0.2.1/"}
    describe(tmp_path / "run", model="small", **place)
    path = tmp_path / "run" / "config.json"
    if is_own:
        origin.remember(path.read_bytes())
    asked = []
    found = cifar.BinaryDataset("synthetic", tmp_path / "cache", 10, (), "found")
    monkeypatch.setattr(
        datasets, "find", lambda *words, **_: asked.append(words) or found
    )
    assert datasets.find_again(config_file.read(path)).description == "found"
    where = tuple(place.values()) if is_own else (None, None)
    assert asked == [("synthetic", *where)]
    assert ("its data_dir is not used" in capsys.readouterr().err) is not is_own


@pytest.mark.parametrize("is_own", [False, True])
def test_resume_takes_places_only_from_ones_own_run(run_dir, monkeypatch, is_own):
    place = {"data_dir": "/etc", "data_url": "http://192.0.2.1/"}
    describe(run_dir, model="tutorial", parameters=1, **place)
    if is_own:
        origin.remember((run_dir / "config.json").read_bytes())
    taken = []
    monkeypatch.setattr(
        training, "train", lambda config, *_, **__: taken.append(config)
    )
    done = runs.call("train.py", "--resume", run_dir)
    assert done.returncode == 0, done.stderr
    (config,) = taken
    expected = ("/etc", "http://192.0.2.1/") if is_own else (None, None)
    assert (config.data_dir, config.data_url) == expected


def test_resume_refuses_a_number_that_is_none(run_dir):
    describe(run_dir, model="tutorial", parameters=1, learning_rate=float("nan"))
    done = runs.call("train.py", "--resume", run_dir)
    assert done.returncode == 2, done.stderr
    assert "--learning_rate nan: it has to be a finite number" in done.stderr


# ---- Links


def append_score(folder):
    scores.append(folder, 10, {"precision @ 1": 0.5}, 100)


def receive(folder):
    with serving() as site:
        part = folder / "metrics.jsonl"
        transfer.receive(site.url, part, ARCHIVE.size, ARCHIVE.md5, QUICK)


def lock_download(folder):
    with download._locked(ARCHIVE, folder):
        pass


WRITERS = {
    append_score: "metrics.jsonl",
    receive: "metrics.jsonl",
    lock_download: f".{ARCHIVE.name}.lock",
}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
@pytest.mark.usefixtures("no_proxy")
def test_what_is_written_is_a_file_of_its_own(tmp_path, victim, write, kind):
    folder = tmp_path / "folder"
    folder.mkdir()
    place = folder / WRITERS[write]
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(victim if kind == "link" else tmp_path / "nowhere")
    with pytest.raises((OSError, UsageError)) as caught:
        write(folder)
    if kind != "pipe":
        assert "it is a link, which is not followed" in str(caught.value)
    assert not (tmp_path / "nowhere").exists()
    place.unlink()
    write(folder)  # It was the link alone that stood in the way.


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_a_log_that_is_no_file_of_its_own_costs_the_lines(
    tmp_path, victim, kind, capsys
):
    log = tmp_path / "metrics.jsonl"
    if kind == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to(victim if kind == "link" else tmp_path / "nowhere")
    with summaries.TrainSummaries(tmp_path / "events", log, 0) as written:
        written.scalars(10, {"total_loss": 4.5})
    why = "it is a pipe or a device" if kind == "pipe" else "it is a link"
    assert why in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
    log.unlink()
    with summaries.TrainSummaries(tmp_path / "events", log, 0) as written:
        written.scalars(10, {"total_loss": 4.5})
    assert json.loads(log.read_bytes())["step"] == 10


@pytest.fixture
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


def test_a_link_of_the_temporary_name_is_replaced(tmp_path, victim):
    path = tmp_path / "config.json"
    path.with_name(f".config.json-{os.getpid()}").symlink_to(victim)
    regular_files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_mark_is_not_made_through_a_link(run_dir, tmp_path):
    keep = checkpoints.folder(run_dir / "checkpoints", 10) / retention.KEEP
    keep.symlink_to(tmp_path / "nowhere")
    save(run_dir, 20)
    rules = retention.Rules(newest=1, best=0, hours=1.0, evaluation=run_dir / "eval")
    with pytest.raises(UsageError, match="it is a link"):
        retention.apply(run_dir / "checkpoints", rules, 20)
    assert not (tmp_path / "nowhere").exists()


def test_a_checkpoint_that_is_a_link_is_none(run_dir, tmp_path):
    (run_dir / "checkpoints" / "step-00000020").symlink_to(tmp_path)
    assert checkpoints.steps(run_dir / "checkpoints") == [10]


@pytest.mark.parametrize("name", ["checkpoints", "train", "debug"])
def test_a_training_writes_to_no_folder_that_a_link_names(tmp_path, name):
    settings = vars(Config())
    begin(tmp_path / "run", settings)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"{name} is a link"):
        claim.check(tmp_path / "run", settings, ["seed"], fresh=False)
    (tmp_path / "run" / name).unlink()
    (tmp_path / "link").symlink_to(tmp_path / "run")  # The run itself may be one.
    assert claim.check(tmp_path / "link", settings, ["seed"], fresh=False)


def test_an_evaluation_that_cannot_be_written_advises_a_flag_that_it_has(tmp_path):
    (tmp_path / "eval").touch()
    with pytest.raises(UsageError, match="--eval_dir") as caught:
        EvaluationSummaries(tmp_path / "eval")
    assert "--fresh" not in str(caught.value)


# ---- Pipes, devices and endless files


def look(run_dir):
    follower = Follower(run_dir)
    assert not follower.look()
    return follower.why_no_weights()


READERS = {
    "config.json": look,
    "checkpoints/step-00000010/manifest.json": look,
    "checkpoints/step-00000010/state.index": look,
    "checkpoints/step-00000010/state.data-00001-of-00002": look,
    "metrics.jsonl": lambda run: str(scores.read_lines(run / "metrics.jsonl")),
    "batches.meta.txt": lambda run: str(records.class_names(run, records.CIFAR10)),
    "cat.png": lambda run: str(decoding.read(run / "cat.png")),
}


@pytest.mark.parametrize("name", READERS)
def test_nothing_waits_for_a_pipe(run_dir, name):
    (run_dir / name).unlink(missing_ok=True)
    os.mkfifo(run_dir / name)
    try:
        said = READERS[name](run_dir)
    except UsageError as error:
        said = str(error)
    if name.startswith("checkpoints"):
        assert "No checkpoint in" in said
    else:
        assert "it is a pipe or a device" in said


@pytest.mark.parametrize("lock", [readers.reading, readers.keeping_out])
def test_no_lock_waits_for_a_pipe(tmp_path, lock):
    os.mkfifo(tmp_path / "manifest.json")
    with lock(tmp_path / "manifest.json"):
        pass


def test_a_description_of_any_size_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(10 * regular_files.DESCRIPTION_BYTES)
    with pytest.raises(UsageError, match="has more than 1,000,000 bytes"):
        layout.description(tmp_path)
    with pytest.raises(UsageError, match="has more than 1,000,000 bytes"):
        config_file.read(tmp_path / "config.json")


# ---- What is shown


def test_names_of_classes_command_no_terminal(run_dir, tmp_path, capsys):
    describe(run_dir, class_names=[ESCAPE + letter for letter in "abcdefghij"])
    image = tmp_path / "cat.png"
    image.write_bytes(PNG)
    predicting.run(predicting.Options([str(image)], str(run_dir)))
    shown = capsys.readouterr().out
    assert r"\x1b]0;owned\x07" in shown
    assert "\x1b" not in shown
    names = "".join(f"{ESCAPE}{number}\n" for number in range(10))
    (tmp_path / "batches.meta.txt").write_text(names)
    found = records.class_names(tmp_path, records.CIFAR10)
    assert found[3] == r"\x1b]0;owned\x073"


def test_names_of_files_command_no_terminal(run_dir, tmp_path, monkeypatch, capsys):
    describe(run_dir)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / f"{ESCAPE}cat.png").write_bytes(PNG)
    (tmp_path / "photos" / f"{ESCAPE}.png").write_bytes(b"")
    options = predicting.Options([str(tmp_path / "photos")], str(run_dir))
    assert predicting.run(options) == 1
    piped = capsys.readouterr()
    assert f"{ESCAPE}cat.png: " in piped.out, "other programs want the very name"
    assert r"/\x1b]0;owned\x07.png is neither" in piped.err
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    predicting.run(options)
    shown = capsys.readouterr()
    assert r"/\x1b]0;owned\x07cat.png: " in shown.out
    assert "\x1b" not in shown.out + shown.err + piped.err


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)


@pytest.mark.parametrize(
    "facts",
    [
        {"class_names": 5},
        {"class_names": [1] * 10},
        {"class_names": ["a"]},
        {"versions": "2.21"},
        {"earlier_sessions": [1]},
    ],
    ids=str,
)
def test_facts_of_another_kind_are_refused_in_a_sentence(run_dir, facts):
    describe(run_dir, **facts)
    with pytest.raises(UsageError, match=r"is of another type|names 1 classes"):
        Follower(run_dir).follow(1.0, once=True).__next__()
