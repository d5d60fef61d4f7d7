"""One length of a training, wherever it is given."""

import pytest

from cifar10.config.config import Config
from cifar10.errors import UsageError


def test_one_length_is_given_and_replaces_the_recipes(tmp_path):
    assert Config().run.max_steps == 100_000
    assert Config(recipe="fast").run.max_steps == 250
    assert Config(recipe="fast", max_epochs=3).run.max_epochs == 3
    with pytest.raises(UsageError, match=r"--max_steps and --max_epochs"):
        Config(max_steps=10, max_epochs=1)
    recipe = tmp_path / "mine.toml"
    recipe.write_text("max_epochs = 2\n")
    assert Config(recipe=str(recipe)).run.max_epochs == 2
    assert Config(recipe=str(recipe), max_steps=7).run.max_epochs is None


@pytest.mark.parametrize("epochs", [0, 1e29, float("nan")])
def test_a_number_of_epochs_is_possible(epochs):
    with pytest.raises(UsageError, match=r"--max_epochs .* number from"):
        Config(max_epochs=epochs)
