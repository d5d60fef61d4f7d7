"""`python -m cifar10 find-rate`: losses at rising rates, and what they say."""

import json

import keras
import numpy as np
import pytest

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.tools.find_rate import training
from cifar10.tools.find_rate.losses import Average, Losses
from cifar10.towers import towers

RATES = 10.0 ** np.linspace(-6, 1, 141)
VALLEY = ((-4, 2.3), (-3, 2.2), (-2, 1.2), (-1, 1.0), (0, 3.0), (1, 1e9))
FLAT = ((-6, 2.3), (1, 2.3))


def losses_that(*knots, noise=0.0):
    """Returns losses on lines between knots (logarithm of the rate, loss)."""
    places, values = zip(*knots, strict=True)
    losses = np.interp(np.log10(RATES), places, values)
    losses += np.random.default_rng(0).normal(0.0, noise, len(RATES))
    return Losses(RATES, losses, has_exploded=False)


def test_rates_are_of_the_steepest_fall_and_of_a_tenth_of_the_lowest():
    for noise in (0.0, 0.05):
        found = losses_that(*VALLEY, noise=noise).suggestions
        assert [*found] == ["steep", "minimum"]
        assert -3.1 <= np.log10(found["steep"]) <= -1.9
        assert np.log10(found["minimum"]) == pytest.approx(-2.1, abs=0.25)
    for knots in (FLAT, ((-6, 2.3), (1, 90.0))):
        assert losses_that(*knots).suggestions == {}


def test_explosion_does_not_reach_far_back():
    near = (RATES < 0.99) & (RATES > 0.5)
    assert (losses_that(*VALLEY).smoothed[near] < 4.5).all()


def test_loss_explodes_once_its_average_is_far_above_the_lowest():
    average = Average()
    assert not any(average.explodes(loss) for loss in [4.0, 2.0, 1.0] * 30)
    # 0.98 x 2.3 + 0.02 x 500 is above four times 2.3.
    assert not average.explodes(100.0)
    assert average.explodes(500.0)
    assert Average().explodes(float("nan"))


def linear(image_shape, classes):
    images = keras.Input(image_shape)
    head = keras.layers.Dense(classes, name="head")
    return keras.Model(images, head(keras.layers.Flatten()(images)))


@pytest.fixture
def find(monkeypatch, stand_in_dir):
    """Finds rates of a linear model on the stand-in, in float64."""
    monkeypatch.setitem(models.REGISTRY, "linear", linear)
    given = {"data": "synthetic", "data_dir": str(stand_in_dir), "model": "linear"}

    def find(options, **arguments):
        config = Config(**{"precision": "float64", "num_gpus": 1, **given, **options})
        return training.find(config, **{"steps": 30, **arguments})

    return find


def test_rate_of_each_step_is_the_same_factor_above_the_last(find, monkeypatch):
    """In a recipe of stages that of the first is trained."""
    step, rates = towers.TowerBuilder.step, []
    freeze, frozen = towers.TowerBuilder.freeze, []

    def noted_step(builder, batches):
        result = step(builder, batches)
        rates.append(float(result.metrics["learning_rate"]))
        return result

    def noted_freeze(builder, names):
        frozen.append([*names])
        freeze(builder, names)

    monkeypatch.setattr(towers.TowerBuilder, "step", noted_step)
    monkeypatch.setattr(towers.TowerBuilder, "freeze", noted_freeze)
    frozen_first = [{"until": 0.5, "frozen": ["head/bias"]}, {}]
    stages = {"schedule": "linear", "stages": frozen_first}
    options = {"batch_size": 8, "accumulate": 2, "optimizer": "adam", **stages}
    found = find(options, lowest=1e-8, highest=1e-4)
    np.testing.assert_allclose(rates, np.geomspace(1e-8, 1e-4, 30))
    np.testing.assert_allclose(found.rates, rates)
    assert not found.has_exploded
    assert frozen[-1] == ["head/bias"]


@pytest.fixture
def call(tmp_path, monkeypatch, stand_in_dir):
    monkeypatch.chdir(tmp_path)
    data = {"data": "synthetic", "data_dir": stand_in_dir, "batch_size": 8}
    words = runs.flags(**data, model=runs.SMALL, num_gpus=1)
    return lambda *more: runs.call("cifar10/__main__.py", "find-rate", *words, *more)


def test_command_suggests_rates_and_leaves_only_a_plot(call, tmp_path):
    """Adam on the stand-in falls within sixty steps."""
    words = ("--optimizer", "adam", "--steps", 60, "--lowest", 1e-4, "--highest", 1e-2)
    found = json.loads(call(*words, "--json", "--plot", "it.png").stdout)
    assert found["suggestions"]
    assert len(found["losses"]) == len(found["learning_rates"]) <= 60
    assert [path.name for path in tmp_path.iterdir()] == ["it.png"]


def test_wrong_flags_are_refused(call, tmp_path):
    (tmp_path / "mine.svg").write_text("a letter")
    for words in (
        ("--lowest", 1, "--highest", 1),
        ("--plot", "mine.svg"),
        ("--model", "tutroial"),
    ):
        done = call(*words)
        assert done.returncode == 2
        assert words[0] in done.stderr
    assert (tmp_path / "mine.svg").read_text() == "a letter"
