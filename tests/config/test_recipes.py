"""Recipes: data that overrides defaults, refused when it is not right."""

import argparse
import contextlib
import os
import sys

import pytest

from cifar10.config import fields, flags
from cifar10.config.config import Config, read_recipe
from cifar10.config.options import options
from cifar10.errors import UsageError


@pytest.fixture
def parse(monkeypatch):
    def parse(*arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        return flags.from_flags(argparse.ArgumentParser(allow_abbrev=False))

    return parse


def test_recipe_overrides_defaults(parse, tmp_path):
    for name, value in read_recipe("tutorial").items():
        assert Config().values[name] == value, name
    config = parse("--recipe", "fast")
    assert (config.run.recipe, config.network.model) == ("fast", "airbench")
    for name, value in read_recipe("fast").items():
        assert config.values[name] == value
    mine = tmp_path / "mine.toml"
    mine.write_text("learning_rate = 1\nmomentum = 0.5\n")
    config = parse("--recipe", str(mine))
    assert (config.update.learning_rate, config.update.momentum) == (1, 0.5)


def test_model_selects_its_recipe(parse):
    of_models = {"resnet": "resnet", "airbench": "fast", "a:b": "tutorial"}
    for model, recipe in of_models.items():
        config = parse("--model", model)
        assert (config.network.model, config.run.recipe) == (model, recipe)
        assert config == parse("--model", model, "--recipe", recipe)
        # A recipe that is given takes its place.
        config = parse("--model", model, "--recipe", "tutorial")
        assert config == Config(model=model, recipe="tutorial")


def test_flags_override_the_recipe(parse):
    config = parse("--max_steps", "50", "--recipe", "fast", "--seed", "3")
    assert (config.batch.global_batch_size, config.run.max_steps, config.run.seed) == (
        1536,
        50,
        3,
    )
    config = parse("--model", "resnet", "--momentum", "0")
    assert (config.update.momentum, config.update.moving_average_decay) == (0.0, 0.0)
    # Even at the value that is the default without a recipe.
    config = parse("--recipe", "fast", "--batch_size", "128")
    assert (config.batch.batch_size, config.batch.global_batch_size) == (128, None)


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        (None, {"weight_decay": 0.05}),
        ("adamw", {"weight_decay": 0.05}),
        ("sgd", None),
        ("muon", None),
    ],
)
def test_a_recipes_optimizer_arguments_are_for_its_optimizer(
    tmp_path, optimizer, arguments
):
    given = {"optimizer": optimizer} if optimizer else {}
    found = Config(recipe="finetune", **given).update
    assert (found.optimizer, found.optimizer_arguments) == (
        optimizer or "adamw",
        arguments,
    )
    assert Config(recipe="finetune").replace(**given).update == found
    own = {"weight_decay": 0.1}
    both = Config(recipe="finetune", **given, optimizer_arguments=own).update
    assert both.optimizer_arguments == own
    mine = tmp_path / "mine.toml"
    mine.write_text("[optimizer_arguments]\nweight_decay = 0.1\n")
    assert Config(recipe=mine, **given).update.optimizer_arguments == own, "of any"


@pytest.mark.parametrize(
    "text",
    [
        "learning_rat = 0.1",
        "learning_rate = 'much'",
        "train_dir = '/tmp/x'",
        f"batch_size = {'[' * 2000}",
        "learning_rate = 1e400",
        f"batch_size = 0x{'F' * 6000}",
        f"[optimizer_arguments]\nnesterov = 1{'0' * 400}",
        "batch_size = 16\nglobal_batch_size = 64",
        "max_steps = 3\nmax_epochs = 1.0",
        "max_steps = 3\nmax_hours = 1.0",
    ],
    ids=lambda text: text[:20],
)
def test_bad_recipes_are_refused(parse, tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse("--recipe", str(tmp_path / "mine.toml"))
    assert caught.value.code == 2


def test_unreadable_recipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")  # Not waited for.
    for path in (tmp_path / "slow", tmp_path, tmp_path / "pipe.toml"):
        with pytest.raises(UsageError, match=str(path)):
            read_recipe(str(path))


# Values that a program or a slip of the finger makes of a flag.
ODD = (*("nan", "1e400", "-0", "9" * 5000, "", "\x00", "\u00b2", "a,,b"),)


def test_no_value_of_a_flag_causes_a_traceback(parse, capsys):
    declared = options(fields.ALL)
    for field in (name for name, one in declared.items() if one.in_flags):
        for value in ODD:
            with contextlib.suppress(SystemExit):  # What is good for a flag passes.
                parse(f"--{field}={value}")
                continue
            assert f"--{field}" in capsys.readouterr().err
