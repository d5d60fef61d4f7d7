"""What may go together: each pair of options trains, resumes equal, and keeps its word.

A quarter of the pairs is in `make test-all`, the others are in `make soak`.
"""

import functools
import itertools
import shutil
import signal
import types

import numpy as np
import pytest

import runs
from cifar10.config.config import Config
from cifar10.errors import StoppedError, UsageError
from cifar10.input.regrouping import with_val
from cifar10.interface.data import as_dataset
from cifar10.process.signals import StopSignals
from cifar10.training import train as training

STEPS, IMAGES = 4, 80
ALL = {
    "model": runs.SMALL,
    "num_gpus": 2,
    "global_batch_size": 16,
    "max_steps": STEPS,
    "checkpoint_steps": 1,
    "log_frequency": 1,
    "summary_steps": 100,
    "distortions": "flip_translate",
    "learning_rate": 0.1,
    "precision": "float64",
    "deterministic": True,
}
OPTIONS = {
    "stages": {
        "stages": [{"until": 0.5, "frozen": ["softmax_linear"]}, {"frozen": ["conv1"]}],
        "schedule": "linear",
    },
    "freeze": {"freeze": "conv1/bias"},
    "no averages": {"moving_average_decay": 0.0},
    "val": {"val_fraction": 0.2, "eval_steps": 2},
    "corrections": {"corrections": "corrections.csv"},
    "accumulate": {"accumulate": 2},
    "sections": {"sections": "2"},
    "mirrored": {"variable_update": "mirrored"},
    "verified": {"verify_steps": 2},
    "calls": {"steps_per_call": 3},
    "xla": {"xla": True},
    "skip": {"on_nan": "skip"},
    "rollback": {"on_nan": "rollback"},
    "epochs": {"max_epochs": STEPS * 16 / IMAGES},
    "hours": {"max_hours": 1.0},
}
# These say how to compute, not what.
NEUTRAL = [*OPTIONS][5:]
REFUSED = {
    ("mirrored", "verified"),
    ("epochs", "hours"),
    ("stages", "hours"),
}
# Of a pair of values of one option there is nothing to try.
PAIRS = [
    pair for pair in itertools.combinations(OPTIONS, 2) if pair != ("skip", "rollback")
]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains with some of the options, to a step; returns the folder of the run."""
    home = tmp_path_factory.mktemp("combinations")
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (IMAGES + 20, 16, 16, 3), np.uint8)
    labels = np.arange(len(images)) % 4
    splits = {"train": slice(IMAGES), "test": slice(IMAGES, None)}
    arrays = {f"x_{part}": images[of] for part, of in splits.items()}
    np.savez(
        home / "it.npz", **arrays, **{f"y_{p}": labels[o] for p, o in splits.items()}
    )
    # Those that `val` leaves to train on.
    given = as_dataset((images[:IMAGES], labels[:IMAGES]))
    kept = with_val(given, 0.2).paths["train"]
    rows = [f"{name},class {n % 4}" for n, name in enumerate(kept[:40])]
    (home / "corrections.csv").write_text("\n".join(["picture,class", *rows]) + "\n")
    numbers = itertools.count()

    def train(names, *, after=None):
        """Trains on after step 2 of a run, if one is given."""
        run = home / f"run{next(numbers)}"
        if after:
            gone = [f"step-{step:08d}" for step in range(3, STEPS + 1)]
            shutil.copytree(after, run, ignore=shutil.ignore_patterns(*gone))
        values = {**ALL, "data": str(home / "it.npz"), "train_dir": str(run)}
        for name in names:
            values |= OPTIONS[name]
        if "corrections" in names:
            values["corrections"] = str(home / "corrections.csv")
        if {"epochs", "hours"} & {*names}:
            del values["max_steps"]
        if "hours" not in names:
            assert training.train(Config(**values)) == STEPS
            return run
        stop = StopSignals()

        def at(step):
            if step >= STEPS:
                stop.requested = signal.SIGTERM

        with pytest.raises(StoppedError):
            training.train(
                Config(**values), stop, hooks=[types.SimpleNamespace(on_step=at)]
            )
        return run

    return train


@pytest.fixture(scope="module")
def alone(train):
    return functools.cache(lambda *names: train(names))


def end(run, step=STEPS):
    return runs.variables(runs.checkpoint(run, step))


def layer(run, step, numbers, of="optimizer/_trainable_variables"):
    """Returns the values of some variables of the model at a step."""
    values = end(run, step)
    return [values[f"{of}/{n}/.ATTRIBUTES/VARIABLE_VALUE"] for n in numbers]


def same(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(np.array_equal(*pair) for pair in pairs)


CONV, BIAS, HEAD = (0, 1), (1,), (2, 3)


def keeps_stages(run):
    return (
        same(layer(run, 1, HEAD), layer(run, 2, HEAD))
        and same(layer(run, 2, CONV), layer(run, 4, CONV))
        and not same(layer(run, 2, HEAD), layer(run, 4, HEAD))
    )


def keeps_frozen(run):
    return same(layer(run, 1, BIAS), layer(run, 4, BIAS))


def keeps_no_averages(run):
    return same(layer(run, 4, CONV), layer(run, 4, CONV, of="averages"))


def keeps_val(run):
    lines = runs.logged(run / "eval_val")
    return [(line["step"], line["num_examples"]) for line in lines] == [
        (2, 16),
        (4, 16),
    ]


PROMISES = {
    "stages": keeps_stages,
    "freeze": keeps_frozen,
    "no averages": keeps_no_averages,
    "val": keeps_val,
}


def marks(number):
    """Returns the marker of a pair: a quarter of them, of all options alike."""
    return pytest.mark.slow if number % 4 == 0 else pytest.mark.soak


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=marks(number), id=" and ".join(pair))
        for number, pair in enumerate(PAIRS)
    ],
)
def test_two_options_work_together_or_are_refused(train, alone, pair):
    if pair in REFUSED:
        with pytest.raises(UsageError):
            train(pair)
        return
    run = train(pair)
    values = end(run)
    runs.assert_equal(end(train(pair, after=run)), values)
    for name, other in (pair, pair[::-1]):
        expected = end(alone(other))
        if name in NEUTRAL:
            assert runs.largest_difference(values, expected) < 1e-8, name
        else:
            assert runs.largest_difference(values, expected) > 1e-6, name
        assert PROMISES.get(name, lambda run: True)(run), name
