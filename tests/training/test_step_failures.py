"""A step that does not fit: the advice is a command that runs."""

import shlex

import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config, ResolvedConfig
from cifar10.errors import UsageError
from cifar10.training.step_failures import explaining_failures
from small_folders import numbered, write

PLAN = ["python", "-m", "cifar10", "plan"]


def failing(gone=None, **given):
    """What a run with these settings says if its memory runs out.

    The file `gone` was removed after the training had begun.
    """
    batches = {"batch_size": 6, "global_batch_size": 12, "towers": 2, "workers": 1}
    config = ResolvedConfig.from_values({**Config(**given).values, **batches})
    if gone:
        gone.unlink()
    with pytest.raises(UsageError) as failed, explaining_failures(config, str):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
    return str(failed.value)


def advised(message):
    """The words of the command in a message."""
    (line,) = [line for line in message.splitlines() if line.startswith("    ")]
    words = shlex.split(line)
    assert words[:4] == PLAN
    return words[4:]


def planned(words):
    done = runs.call("cifar10/__main__.py", "plan", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_advised_plan_has_the_settings_of_the_run(tmp_path):
    photos = tmp_path / "my photos"
    write(photos, *numbered(8, "cat", "dog"))
    recipe = tmp_path / "mine.toml"
    recipe.write_text("global_batch_size = 8\nmomentum = 0.9\n")
    given = {"model": runs.SMALL, "data": str(photos), "image_size": 16}
    given |= {"num_gpus": 2, "recipe": str(recipe), "clip_norm": 0.5, "seed": 3}
    words = advised(failing(**given))
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--batch_size"] == "6"
    assert flags["--data"] == str(photos)
    assert flags["--model"] == runs.SMALL
    assert "--momentum" not in flags, "the recipe sets it"
    assert "--seed" not in flags, "plan has no such flag"
    assert "2 SIMULATED towers" in planned(words)

    recipe.write_text("batch_size = 6\nmomentum = 0.9\n")
    words = advised(failing(**given))
    assert words[words.index("--batch_size") + 1] == "6", "plan needs it"

    words = advised(failing(gone=recipe, **given))
    assert words[words.index("--momentum") + 1] == "0.9"
    assert runs.SMALL in planned(words)


def test_a_run_with_python_objects_gets_no_command():
    message = failing(model=lambda image_shape, classes: None)
    assert "half this batch size" in message
    assert "plan" not in message
