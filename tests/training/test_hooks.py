"""Hooks are told what happens in a run, in order, and cannot harm it."""

import json
import sys
import types

import keras
import pytest

import runs
import scored_runs
from cifar10.config import layout
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.run_directory import checkpoints
from cifar10.training import train as training
from cifar10.training.hooks import EVENTS, Hooks, check_hooks


class Recorder:
    """A hook that notes what it is told, and what of it is on the disk by then."""

    def __init__(self, events=EVENTS):
        self.told = []
        for event in events:
            setattr(self, event, self._noting(event))

    def _noting(self, event):
        count = {"on_start": 1, "on_graph": 1, "on_message": 1, "on_step": 1}
        if event == "on_save" or count.get(event) == 1:
            return lambda what: self.told.append((event, what))
        return lambda step, what: self.told.append((event, step, what))

    def steps(self, event):
        return [told[1] for told in self.told if told[0] == event]

    def values(self, event):
        return [told[2] for told in self.told if told[0] == event]


@pytest.fixture
def train(tmp_path, stand_in_dir, monkeypatch):
    """Trains 6 steps, with a line every 2nd, a checkpoint and a score every 3rd."""
    scored_runs.use_few_images(monkeypatch.setattr)

    def train(*hooks, **options):
        config = {
            "train_dir": str(tmp_path / "run"),
            "model": runs.SMALL,
            "data": "synthetic",
            "data_dir": str(stand_in_dir),
            "num_gpus": 1,
            "batch_size": 4,
            "max_steps": 6,
            "log_frequency": 2,
            "summary_steps": 3,
            "checkpoint_steps": 3,
            **options,
        }
        return training.train(Config(**config), hooks=hooks)

    return train


def test_every_event_arrives_in_order(train, tmp_path):
    recorder, sizes = Recorder(), []
    events = tmp_path / "run" / layout.TRAIN_EVENTS

    def note_size(*_):
        sizes.append(sum(path.stat().st_size for path in events.iterdir()))

    def look(step):
        assert step not in checkpoints.steps(tmp_path / "run" / "checkpoints")

    hook = types.SimpleNamespace(on_save=look, on_checkpoint=note_size)
    train(recorder, hook, eval_steps=3, max_steps=4)
    note_size()
    # The curves are on the disk before a checkpoint is.
    assert sizes[-2] == sizes[-1] > 1000
    told = [(event, step) for event, step, *_ in recorder.told]
    (_, run), (_, graph), *rest = told
    assert (run.step, run.train_dir) == (0, tmp_path / "run")
    assert run.settings == json.loads((tmp_path / "run" / "config.json").read_text())
    assert graph.get_operations()
    assert sum(event == "on_message" for event, _ in rest) == 1
    assert [one for one in rest if one[0] != "on_message"] == [
        ("on_step", 1),
        ("on_step", 2),
        ("on_log", 2),
        ("on_step", 3),
        ("on_summary", 3),
        ("on_evaluation", 3),
        ("on_save", 3),
        ("on_checkpoint", 3),
        ("on_step", 4),
        ("on_log", 4),
        ("on_save", 4),
        ("on_checkpoint", 4),
        ("on_end", 4),
    ]
    assert recorder.values("on_end") == ["finished"]
    for folder, event in (("run", "on_log"), ("run/eval", "on_evaluation")):
        logged = runs.logged(tmp_path / folder)
        for line, metrics in zip(logged, recorder.values(event), strict=True):
            assert metrics.items() <= line.items()
    for path in recorder.values("on_checkpoint"):
        assert (path / checkpoints.MANIFEST).is_file()


def test_a_resumed_run_reports_its_first_step(train):
    recorder = Recorder()
    train(recorder, max_steps=1)
    train(recorder, max_steps=2)
    assert [run.step for run in recorder.steps("on_start")] == [0, 1]


@pytest.mark.slow
def test_hooks_change_no_bit_of_a_resumed_run(train, tmp_path):
    train()
    whole = runs.variables(runs.checkpoint(tmp_path / "run", 6))
    recorder = Recorder()
    train(recorder, train_dir=str(tmp_path / "again"), max_steps=3)
    train(recorder, train_dir=str(tmp_path / "again"))
    runs.assert_equal(runs.variables(runs.checkpoint(tmp_path / "again", 6)), whole)


def test_a_failing_hook_ends_the_run_and_harms_no_checkpoint(
    train, tmp_path, monkeypatch
):
    """On a run that goes on each time from where the last hook has left it."""
    monkeypatch.setattr(sys, "argv", ["train.py"])

    class Faulty:
        def __init__(self):
            self.ended = []

        def on_end(self, step, why):
            self.ended.append((step, why))

    def fail(first, *_):
        if event == "on_start" or first >= 4:
            raise LookupError("the tracker is gone")

    folder = tmp_path / "run" / "checkpoints"
    for event, reached, kept, how in (
        ("on_start", 0, [], ["start over"]),
        ("on_checkpoint", 6, [3, 6], ["step 6", f"train.py --resume {tmp_path}"]),
    ):
        faulty, healthy = Faulty(), Recorder(["on_end"])
        setattr(faulty, event, fail)
        with pytest.raises(LookupError, match="tracker") as caught:
            train(healthy, faulty)
        [note] = caught.value.__notes__
        assert f"Faulty, in {event}" in note
        assert all(words in note for words in how)
        # A hook that has not begun has nothing to end.
        assert faulty.ended == ([(reached, "failed")] if reached else [])
        assert healthy.told == [("on_end", reached, "failed")]
        assert checkpoints.steps(folder) == kept
        assert len([*folder.glob("*")]) == len(kept)


def test_all_hooks_are_ended_even_if_one_fails():
    ended = []

    def fail(*_):
        raise LookupError

    noting = types.SimpleNamespace(on_end=lambda *what: ended.append(what))
    hooks = Hooks([noting, types.SimpleNamespace(on_end=fail), noting])
    hooks.start(types.SimpleNamespace(step=0))
    with pytest.raises(LookupError):
        hooks.end(7, "stopped")
    assert ended == [(7, "stopped")] * 2


def test_a_hook_with_unknown_or_unusable_methods_is_refused(train, tmp_path):
    def ignore(*_):
        pass

    async def waiting(*_):
        pass

    for hook, said in (
        (types.SimpleNamespace(on_chekpoint=ignore), "on_checkpoint,"),
        (keras.callbacks.Callback(), "Callback.on_"),
        (Recorder, "plain methods"),
        (types.SimpleNamespace(on_step=3), "plain methods"),
        (types.SimpleNamespace(on_step=waiting), "plain methods"),
        (types.SimpleNamespace(on_step=False), "plain methods"),
    ):
        with pytest.raises(UsageError, match="hooks: ") as caught:
            train(hook)
        assert said in str(caught.value)
    assert not (tmp_path / "run").exists()
    check_hooks([types.SimpleNamespace(on_step=None, on_save=ignore)])


def test_values_that_a_hook_assigns_reach_all_replicas(train):
    """At the first checkpoint, replicas that differ would be reported as a fault."""

    class Halving:
        def on_start(self, run):
            for variable in run.state.model.trainable_variables:
                variable.assign(variable * 0.5)

    assert train(Halving(), num_gpus=2, variable_update="mirrored") == 6
