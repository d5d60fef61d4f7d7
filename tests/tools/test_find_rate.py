"""`python -m cifar10 find-rate`: losses at rising rates, and what they say."""

import json

import keras
import numpy as np
import pytest

import runs
from cifar10 import model as models
from cifar10.config.config import Config
from cifar10.tools.find_rate import finding, plot, training
from cifar10.tools.find_rate.losses import Average, Losses
from cifar10.tools.find_rate.options import Options
from cifar10.towers import towers

RATES = 10.0 ** np.linspace(-6, 1, 141)


def losses_that(*knots, noise=0.0):
    """Returns losses on lines between knots (logarithm of the rate, loss)."""
    places, values = zip(*knots, strict=True)
    losses = np.interp(np.log10(RATES), places, values)
    losses += np.random.default_rng(0).normal(0.0, noise, len(RATES))
    return Losses(RATES, losses, has_exploded=False)


VALLEY = ((-4, 2.3), (-3, 2.2), (-2, 1.2), (-1, 1.0), (0, 3.0), (1, 1e9))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_rates_are_of_the_steepest_fall_and_of_a_tenth_of_the_lowest(noise):
    found = losses_that(*VALLEY, noise=noise).suggestions
    assert [*found] == ["steep", "minimum"]
    assert -3.1 <= np.log10(found["steep"]) <= -1.9
    assert np.log10(found["minimum"]) == pytest.approx(-2.1, abs=0.25)


def test_what_explodes_does_not_reach_far_back():
    found = losses_that(*VALLEY)
    near = (RATES < 0.99) & (RATES > 0.5)
    assert (found.smoothed[near] < 4.5).all()
    assert found.losses[-1] == 1e9


@pytest.mark.parametrize("knots", [((-6, 2.3), (1, 2.3)), ((-6, 2.3), (1, 90.0))])
def test_without_a_fall_nothing_is_suggested(knots):
    assert losses_that(*knots).suggestions == {}


def test_a_loss_explodes_once_its_average_is_far_above_the_lowest():
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
    data = {"data": "synthetic", "data_dir": str(stand_in_dir), "model": "linear"}

    def find(options, **arguments):
        config = Config(**{"precision": "float64", **data, **options})
        return training.find(config, **{"steps": 30, **arguments})

    return find


def test_the_rate_of_each_step_is_the_same_factor_above_the_last(find, monkeypatch):
    step, rates = towers.TowerBuilder.step, []

    def noted(builder, batches):
        result = step(builder, batches)
        rates.append(float(result.metrics["learning_rate"]))
        return result

    monkeypatch.setattr(towers.TowerBuilder, "step", noted)
    options = {"num_gpus": 1, "batch_size": 8, "accumulate": 2, "optimizer": "adam"}
    found = find(options, lowest=1e-8, highest=1e-4)
    np.testing.assert_allclose(rates, np.geomspace(1e-8, 1e-4, 30))
    np.testing.assert_allclose(found.rates, rates)
    assert not found.has_exploded


def test_two_towers_find_what_one_finds(find):
    one, two = (
        find({"num_gpus": count, "batch_size": 16 // count}, highest=0.1)
        for count in (1, 2)
    )
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-9)
    assert len(one.losses) == 30


def test_it_ends_when_the_loss_explodes(find):
    found = find({"num_gpus": 1, "batch_size": 16}, highest=1e6, steps=60)
    assert found.has_exploded
    assert len(found.losses) < 50
    assert np.isfinite(found.losses).all()


def test_a_recipe_of_stages_is_trained_as_its_first_one(find, monkeypatch):
    frozen = []
    freeze = towers.TowerBuilder.freeze

    def noted(builder, names):
        frozen.append([*names])
        freeze(builder, names)

    monkeypatch.setattr(towers.TowerBuilder, "freeze", noted)
    stages = [{"until": 0.5, "frozen": ["head/bias"]}, {}]
    find({"num_gpus": 1, "batch_size": 8, "schedule": "linear", "stages": stages})
    assert frozen[-1] == ["head/bias"]


@pytest.fixture
def call(tmp_path, monkeypatch, stand_in_dir):
    monkeypatch.chdir(tmp_path)
    data = runs.flags(data="synthetic", data_dir=stand_in_dir, batch_size=8)
    return lambda *words: runs.call(
        "cifar10/__main__.py", "find-rate", *data, "--num_gpus", 1, *words
    )


@pytest.mark.slow
def test_the_command_suggests_rates_and_leaves_a_plot_alone(call, tmp_path):
    """Adam on the stand-in falls within a hundred steps."""
    words = ("--optimizer", "adam", "--steps", 100, "--lowest", 1e-5, "--highest", 1e-2)
    done = call(*words)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["learning_rates.svg"]
    assert "<svg" in (tmp_path / "learning_rates.svg").read_text()
    assert "steep: where the loss falls fastest" in done.stdout
    assert "--optimizer=adam --learning_rate=" in done.stdout.splitlines()[-1]
    done = call(*words, "--json", "--plot", "other.png")
    found = json.loads(done.stdout)
    assert found["suggestions"]
    assert len(found["losses"]) == len(found["learning_rates"]) <= 100
    assert (tmp_path / "other.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lowest", 1, "--highest", 1), "--lowest 1.0: it has to be below"),
        (("--steps", 3), "--steps 3: the minimum is 30"),
        (("--plot", "rates.pdf"), "ends with .svg or .png"),
        (("--plot", "mine.svg"), "exists already and is not a plot"),
        (("--model", "tutroial"), "--model tutroial"),
    ],
)
def test_bad_flags_are_sentences(call, tmp_path, words, said):
    (tmp_path / "mine.svg").write_text("a letter")
    done = call(*words)
    assert done.returncode == 2
    assert said in done.stderr


def test_what_is_found_is_said(tmp_path, monkeypatch, capsys):
    found = losses_that(*VALLEY)
    monkeypatch.setattr(training, "find", lambda config, **_: found)
    place = tmp_path / "rates.svg"
    given = {"model": "resnet"}
    assert finding.run(Config(), Options(plot=str(place)), given)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1.0e-06", "2.3"]
    largest = max(found.suggestions.values())
    assert lines[-1].endswith(f" --model=resnet --learning_rate={largest:g}")
    place.unlink()
    monkeypatch.setattr(finding.importlib.util, "find_spec", lambda _: None)
    assert finding.run(Config(), Options(plot=str(place)), given)
    assert "rates.svg is not drawn: that needs matplotlib" in capsys.readouterr().err
    assert not place.exists()
    nothing = losses_that((-6, 2.0), (1, 2.0))
    monkeypatch.setattr(training, "find", lambda config, **_: nothing)
    assert not finding.run(Config(), Options(plot=str(place)), given)
    assert "The loss has not fallen" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_plot_is_drawn_whatever_was_found(kind, begins):
    for found in (losses_that(*VALLEY), losses_that((-6, 2.0), (1, 2.0))):
        assert plot.draw(found, kind).startswith(begins)
