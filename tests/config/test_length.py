"""One length of a run, wherever it is given."""

import pytest

from cifar10.config.config import Config
from cifar10.errors import UsageError


def test_only_one_length_is_allowed_and_overrides_the_recipe(tmp_path):
    assert Config().run.max_steps == 100_000
    assert Config(recipe="fast").run.max_steps == 300
    epochs = Config(recipe="fast", max_epochs=3).run
    assert (epochs.max_epochs, epochs.max_hours) == (3, None)
    for two in (
        {"max_steps": 10, "max_epochs": 1},
        {"max_steps": 10, "max_hours": 1.0},
        {"max_epochs": 1, "max_hours": 1.0},
    ):
        with pytest.raises(UsageError, match=" and ".join(f"--{n}.*" for n in two)):
            Config(**two)
    recipe = tmp_path / "mine.toml"
    recipe.write_text("max_epochs = 2\n")
    assert Config(recipe=str(recipe)).run.max_epochs == 2
    assert Config(recipe=str(recipe), max_steps=7).run.max_epochs is None


def test_a_finite_schedule_needs_a_last_step():
    with pytest.raises(UsageError, match=r"max_hours.*cosine.*max_epochs"):
        Config(max_hours=1.0, schedule="cosine")
    assert Config(max_hours=1.0).run.max_hours == 1.0


@pytest.mark.parametrize("epochs", [0, 1e29, float("nan")])
def test_an_impossible_number_of_epochs_is_refused(epochs):
    with pytest.raises(UsageError, match=r"--max_epochs .* number from"):
        Config(max_epochs=epochs)
