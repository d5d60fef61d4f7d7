"""The flags of every script and command, so that each new one is a decision."""

import re

import pytest

import runs
from cifar10 import __main__ as program
from cifar10.config import fields
from cifar10.config.config import Config
from cifar10.towers.schedule import PARAMETERS

TRAINING = """
    accumulate batch_size best_by checkpoint_steps clip_norm corrections data data_dir
    data_url
    depth deterministic distortions eval_steps freeze fresh
    global_batch_size hang_timeout help_all image_size initial_weights
    keep_best keep_checkpoints
    label_smoothing learning_rate log_device_placement
    log_frequency max_bad_images max_epochs max_hours max_restarts max_steps
    memory_limit model momentum moving_average_decay on_nan
    optimizer precision recipe resume
    schedule sections seed seeds steps_per_call stop_after_no_gain
    summary_steps train_dir val_fraction validation_fraction variable_device
    verify_steps
    warmup_epochs width
    xla xla_update
""" + "".join(f"{name} " for name in PARAMETERS)
OF_SEVERAL_TOWERS = "local_workers num_gpus split_gpu variable_update worker_timeout"
EVALUATION = """
    batch_size calibrate data_dir device eval_data eval_dir eval_interval_secs json
    num_examples run_once step test_time_augmentation train_dir trust_model
    use_averages
"""
FLAGS = {
    "train.py --help_all": TRAINING,
    "train_multi_gpu.py --help_all": TRAINING + OF_SEVERAL_TOWERS,
    "eval.py --help": EVALUATION,
    "cifar10/__main__.py train --help_all": TRAINING + OF_SEVERAL_TOWERS,
    "cifar10/__main__.py eval --help": EVALUATION,
    "cifar10/__main__.py data --help": """
        data_dir image_size json train_dir trust_model val_fraction
        validation_fraction
    """,
    "cifar10/__main__.py doctor --help": "",
    "cifar10/__main__.py export --help": """
        data_dir output step train_dir trust_model use_averages
        with_preprocessing
    """,
    "cifar10/__main__.py plan --help": """
        accumulate batch_size clip_norm data depth distortions
        global_batch_size image_size memory_limit
        model momentum num_gpus optimizer precision recipe
        split_gpu variable_device width
    """,
    "cifar10/__main__.py predict --help": """
        device explain follow interval_secs json step top_k train_dir trust_model
        use_averages
    """,
    "cifar10/__main__.py report --help": """
        data_dir output step train_dir trust_model
    """,
    "cifar10/__main__.py runs --help": "csv json keep older_than prune sort yes",
    "cifar10/__main__.py serve --help": """
        device host interval_secs max_request_mb port step timeout_secs
        train_dir trust_model use_averages
    """,
}

# What is done unless --no-NAME is given.
ON_BY_DEFAULT = {"use_averages"}


RESULT = """
    augmentation class_weights clip_norm data depth deterministic distortions
    freeze global_batch_size image_size initial_weights keras_schedule
    label_smoothing learning_rate loss metrics model momentum moving_average_decay
    optimizer optimizer_arguments precision pretrained_rate schedule seed stages
    val_fraction validation_fraction warmup_epochs width xla xla_update
""" + "".join(f"{name} " for name in PARAMETERS)


def test_the_fields_fixed_for_a_run_match_the_agreed_list():
    """A field that loses its scope lets a run go on as another one."""
    assert {*fields.result_determining(Config())} == {*RESULT.split()}


def test_flags_match_the_agreed_list():
    for command, flags in FLAGS.items():
        done = runs.call(*command.split())
        assert done.returncode == 0
        usage = done.stdout.partition("\n\n")[0]
        assert len(usage.splitlines()) < 8, "the flags follow, each with its meaning"
        found = set(re.findall(r"^  --(\w+)", done.stdout, re.MULTILINE))
        each = [" ".join(one.split()) for one in re.split(r"\n  (?=-)", done.stdout)]
        on = {re.findall(r"--(\w+)", one)[0] for one in each if "default: True" in one}
        assert on == ON_BY_DEFAULT & found
        assert found == set(flags.split()), (
            "A flag was added, renamed or taken out. Each is something to learn, to "
            "test and to keep working: add one only if no default, recipe or "
            "environment variable does, and say why in "
            "docs/decisions/0010-one-configuration.md. Then change this list."
        )


def test_every_flag_of_every_command_has_its_help():
    for name in program._COMMANDS:
        said = runs.call("cifar10/__main__.py", name, "--help").stdout
        if "--help_all" in said:
            said += runs.call("cifar10/__main__.py", name, "--help_all").stdout
            assert "\nData set:\n  --" in said, "by subject"
        flags = re.split(r"\n  (?=-)", said)[1:]
        assert flags
        # After a flag and its values come two spaces, or a line of its own.
        without = [one for one in flags if not re.search(r"^-.*\s{2,}\w", one)]
        assert not without, name


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "train.py --bach_size 3",
            "--bach_size 3: there is no such flag. Did you mean --batch_size?",
        ),
        (
            "train.py -eval_step=3",
            "-eval_step=3: there is no such flag. Did you mean --eval_steps?",
        ),
        ("train.py --zz 3", "--zz 3: there is no such flag. See --help."),
        *(
            (
                f"train.py --{word} 3",
                f"--{word} 3: there is no such flag. Did you mean --{meant}?",
            )
            for word, meant in (
                ("lr", "learning_rate"),
                ("epochs", "max_epochs"),
                ("steps", "max_steps"),
                ("batch", "batch_size"),
                ("bs", "batch_size"),
                ("rate", "learning_rate"),
            )
        ),
        (
            "train.py --stages=2",
            "--stages=2: it is set in a recipe (--recipe FILE), not by a flag.",
        ),
        ("train.py 3", "unrecognized arguments: 3"),
        (
            "eval.py --class_weights 3",
            "--class_weights 3: there is no such flag. See --help.",
        ),
        (
            "cifar10/__main__.py predict 0.png --no-use_average",
            "--no-use_average: there is no such flag. Did you mean --no-use_averages?",
        ),
    ],
)
def test_an_unknown_flag_is_refused_with_the_closest_flag(command, said):
    done = runs.call(*command.split())
    assert done.returncode == 2
    assert done.stderr.endswith(f" error: {said}\n")
