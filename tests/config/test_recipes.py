"""Recipes: data that overrides defaults, refused when it is not right."""

import argparse
import contextlib
import os
import sys

import pytest

from cifar10.config import flags
from cifar10.config.config import Config
from cifar10.config.options import names
from cifar10.errors import UsageError
from cifar10.towers import devices
from cifar10.training import settings


@pytest.fixture
def parse(monkeypatch):
    def parse(*arguments):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        return flags.from_flags(argparse.ArgumentParser(allow_abbrev=False))

    return parse


def test_the_tutorials_recipe_is_the_defaults():
    for name, value in flags.read_recipe("tutorial").items():
        assert getattr(Config(), name) == value, name


def test_a_recipe_takes_the_place_of_defaults(parse):
    config = parse("--recipe", "fast")
    assert (config.recipe, config.model) == ("fast", "airbench")
    for name, value in flags.read_recipe("fast").items():
        assert getattr(config, name) == value


@pytest.mark.parametrize(
    ("model", "recipe"), [("resnet", "resnet"), ("airbench", "fast"), ("a:b", None)]
)
def test_a_model_brings_its_recipe(parse, model, recipe):
    config = parse("--model", model)
    assert (config.model, config.recipe) == (model, recipe or "tutorial")
    assert config == parse("--model", model, "--recipe", recipe or "tutorial")
    # A recipe that is given takes its place.
    config = parse("--model", model, "--recipe", "tutorial")
    assert config == Config(model=model)


@pytest.mark.parametrize("recipe", ["tutorial", "fast", "pictures"])
def test_a_training_says_which_recipe_it_has(recipe):
    config = settings.resolve(flags.with_recipe({"recipe": recipe}), placement(1))
    facts = {"devices": "1 tower", "data_description": "images", "parameters": 3}
    facts |= {"on_gpus": recipe == "fast", "variables_on": "/gpu:0"}
    said = settings.first_lines({**vars(config), **facts}, 50_000)
    assert ("\nRecipe: " in said) == (recipe != "tutorial")
    assert ("\nRecipe: fast, which sets " in said) == (recipe == "fast")
    assert ("clip_norm 3.0" in said) == (recipe == "pictures")
    assert ("1 tower; variables on /gpu:0\n" in said) == (recipe == "fast")


def test_flags_take_the_place_of_the_recipe(parse):
    config = parse("--max_steps", "50", "--recipe", "fast", "--seed", "3")
    assert (config.global_batch_size, config.max_steps, config.seed) == (2000, 50, 3)
    config = parse("--model", "resnet", "--momentum", "0")
    assert (config.momentum, config.moving_average_decay) == (0.0, 0.0)
    # Even at the value that is the default without a recipe.
    config = parse("--recipe", "fast", "--batch_size", "128")
    assert (config.batch_size, config.global_batch_size) == (128, None)


def test_two_batch_sizes_are_one_too_many(parse, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--batch_size", "4", "--global_batch_size", "8")
    assert caught.value.code == 2
    assert "give one of them" in capsys.readouterr().err


def placement(towers):
    return devices.Placement(("/cpu:0",) * towers, simulated=True, description="")


@pytest.mark.parametrize(("towers", "images"), [(1, 2000), (4, 500), (8, 250)])
def test_a_global_batch_is_shared_evenly(towers, images):
    config = settings.resolve(Config(global_batch_size=2000), placement(towers))
    assert (config.batch_size, config.global_batch_size) == (images, 2000)


@pytest.mark.parametrize(
    ("whole", "towers", "closest"), [(130, 4, "Give 128 or 132"), (3, 4, "Give 4")]
)
def test_a_global_batch_that_cannot_be_shared_is_refused(whole, towers, closest):
    with pytest.raises(UsageError, match=closest):
        settings.resolve(Config(global_batch_size=whole), placement(towers))


def test_a_file_of_ones_own_is_a_recipe(parse, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("learning_rate = 1\nmomentum = 0.5\n")
    config = parse("--recipe", str(mine))
    assert (config.learning_rate, config.momentum) == (1, 0.5)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learning_rat = 0.1", "Did you mean learning_rate?"),
        ("learning_rate = 'much'", "'much' is not of type float"),
        ("batch_size = 1.5", "not of type int"),
        ("train_dir = '/tmp/x'", "cannot decide train_dir"),
        ("learning_rate = ", "cannot be read"),
        ("batch_size = 0", "--batch_size 0"),
        (f"batch_size = {'[' * 2000}", "cannot be read"),
        ("batch_size = 1e400", "not of type int"),
        ("learning_rate = 1e400", "it has to be a finite number"),
        (f"batch_size = 0x{'F' * 6000}", "cannot be read"),
        (f"# {'long ' * 20_000}", "it has more than 50,000 bytes"),
        (
            f"[optimizer_arguments]\nnesterov = 1{'0' * 400}",
            "it has to be a finite number of at most 1e+30",
        ),
    ],
)
def test_a_recipe_that_is_none_is_refused(parse, capsys, tmp_path, text, named):
    mine = tmp_path / "mine.toml"
    mine.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse("--recipe", str(mine))
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "fixed", "said"),
    [
        ("--learning_rat=1", {}, "no such flag. Did you mean --learning_rate?"),
        ("cat.png", {}, "cat.png: there is no such flag. "),
        ("--num_gpus=4", {"num_gpus": 1}, "train_multi_gpu.py has that flag"),
    ],
)
def test_an_unknown_flag_is_a_sentence(monkeypatch, capsys, given, fixed, said):
    monkeypatch.setattr("sys.argv", ["train.py", given])
    with pytest.raises(SystemExit) as caught:
        flags.from_flags(argparse.ArgumentParser(allow_abbrev=False), **fixed)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


# Values that a program or a slip of the finger makes of a flag.
ODD = (
    *("nan", "-nan", "1e400", "-1e400", "-0", "0", "9" * 5000, "1:" + "9" * 5000),
    *("", " ", "--", "-", "\x00", "\x1b[31m", "\u00b2", "\u0663"),
    *("1:\u00b2", ",", "a,,b", "[", "%s", "{0}", "/" * 5000, "a" * 100_000),
)


@pytest.mark.parametrize("field", sorted(names(Config)))
def test_no_value_of_a_flag_is_a_traceback(parse, capsys, field):
    for value in ODD:
        with contextlib.suppress(SystemExit):  # What is good for a flag passes.
            parse(f"--{field}={value}")
            continue
        assert f"--{field}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--resume", "--checkpoint_dir"])
def test_dashes_are_no_directory(parse, capsys, flag):
    with pytest.raises(SystemExit):
        parse(f"{flag}=--")
    assert f"argument {flag}: expected one argument" in capsys.readouterr().err


def test_an_unknown_recipe_names_the_known_ones(tmp_path):
    with pytest.raises(
        UsageError, match="Known are accurate, fast, finetune, pictures, resnet"
    ):
        flags.read_recipe(str(tmp_path / "slow"))
    with pytest.raises(UsageError, match="cannot be read"):
        flags.read_recipe(str(tmp_path))


def test_a_recipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "mine.toml")
    with pytest.raises(UsageError, match="it is a pipe or a device"):
        flags.read_recipe(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"profile": "5"}, "it is START:STOP"),
        ({"profile": "9:5"}, "it is START:STOP"),
        ({"profile": "0:5"}, "two steps from 1 on"),
        ({"profile": "a:b"}, "it is START:STOP"),
        ({"profile": "1:" + "9" * 5000}, "it is START:STOP"),
        ({"sections": "9" * 5000}, "it is a whole number from 1 on, or names"),
        ({"batch_size": 10**12}, "the maximum is 1000000"),
        ({"depth": 10**6}, "the maximum is 1000"),
        ({"label_smoothing": 1.5}, "--label_smoothing 1.5"),
        ({"steps_per_call": 0}, "--steps_per_call 0"),
        ({"steps_per_call": 20}, "--log_frequency asks for something every 10 steps"),
        ({"optimizer": "muon", "learning_rate": 0.0}, "it has to be above 0"),
    ],
)
def test_odd_values_are_refused(values, named):
    with pytest.raises(UsageError, match=named):
        Config(**values)
