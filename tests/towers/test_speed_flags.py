"""Flags that change how fast a training runs, and not where it ends."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.errors import UsageError
from cifar10.evaluation import evaluate
from cifar10.evaluation.evaluate import Options
from cifar10.towers import devices
from cifar10.towers.towers import TowerBuilder


def train(train_dir, data_dir, **options):
    """Trains 12 steps on the stand-in; returns the last checkpoint's variables."""
    defaults = {
        "model": "small_runs:small",
        "num_gpus": 1,
        "batch_size": 8,
        "max_steps": 12,
        "checkpoint_steps": 8,
        "log_frequency": 4,
        "summary_steps": 10,
    }
    return runs.train(train_dir, data_dir, **{**defaults, **options})


@pytest.mark.slow
@pytest.mark.parametrize(("towers", "steps_per_call"), [(1, 4), (2, 2)])
def test_steps_per_call_change_nothing(tmp_path, stand_in_dir, steps_per_call, towers):
    options = {"num_gpus": towers, "momentum": 0.9}
    single = train(tmp_path / "single", stand_in_dir, **options)
    several = train(
        tmp_path / "several", stand_in_dir, steps_per_call=steps_per_call, **options
    )
    runs.assert_equal(several, single)
    for one, other in zip(
        runs.logged(tmp_path / "single"), runs.logged(tmp_path / "several"), strict=True
    ):
        for line in (one, other):
            drop_times(line)
        assert one == other
    assert [line["step"] for line in runs.logged(tmp_path / "several")] == [4, 8, 12]


def drop_times(line):
    """Takes out of a line of the log what differs between equal runs."""
    for name in ("examples_per_sec", "time", "seconds"):
        del line[name]


def test_a_run_in_calls_of_several_steps_resumes_in_single_ones(tmp_path, stand_in_dir):
    straight = train(tmp_path / "straight", stand_in_dir)
    train(tmp_path / "resumed", stand_in_dir, max_steps=8, steps_per_call=4)
    resumed = train(tmp_path / "resumed", stand_in_dir)
    runs.assert_equal(resumed, straight)
    last_lines = [runs.logged(tmp_path / run)[-1] for run in ("straight", "resumed")]
    for line in last_lines:
        drop_times(line)
    assert last_lines[0] == last_lines[1], "the losses' averages do not go on"


@pytest.mark.slow
def test_the_fast_recipes_parts_train_and_are_scored(tmp_path, stand_in_dir, capsys):
    """Two epochs' worth of nothing: that network, optimizer and images fit together."""
    train_dir = tmp_path / "fast"
    train(
        train_dir,
        stand_in_dir,
        model="airbench",
        optimizer="muon",
        schedule="linear",
        distortions="flip_translate",
        label_smoothing=0.2,
        learning_rate=0.24,
        momentum=0.6,
        moving_average_decay=0.0,
        max_steps=4,
        log_frequency=1,
        precision="float32",
    )
    lines = runs.logged(train_dir)
    assert [line["learning_rate"] for line in lines] == pytest.approx(
        [0.24, 0.18, 0.12, 0.06]
    )
    scored = {}
    for augmented in (False, True):
        capsys.readouterr()
        evaluate.run(
            Options(
                train_dir=str(train_dir),
                num_examples=64,
                batch_size=32,
                run_once=True,
                json=True,
                device="cpu",
                test_time_augmentation=augmented,
            )
        )
        scored[augmented] = json.loads(capsys.readouterr().out)
        assert scored[augmented]["test_time_augmentation"] is augmented
    assert scored[True]["num_examples"] == scored[False]["num_examples"] == 64
    assert scored[True]["cross_entropy"] != scored[False]["cross_entropy"]
    assert {"eval", "eval_augmented"} <= {path.name for path in train_dir.iterdir()}


@pytest.fixture(scope="module")
def full(tmp_path_factory, stand_in_dir):
    """Four steps in float32."""
    train_dir = tmp_path_factory.mktemp("full") / "run"
    return train(
        train_dir, stand_in_dir, model="tutorial", max_steps=4, precision="float32"
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_reduced_precision_trains_close_to_float32(
    tmp_path, stand_in_dir, full, precision
):
    reduced = train(
        tmp_path / "reduced",
        stand_in_dir,
        model="tutorial",
        max_steps=4,
        precision=precision,
    )
    trained = [name for name in full if name.startswith("averages/")]
    assert len(trained) == 10
    for name in trained:
        assert reduced[name].dtype == full[name].dtype
        difference = np.linalg.norm(reduced[name] - full[name])
        assert difference <= 0.1 * np.linalg.norm(full[name]) + 1e-3, name
    assert any(not np.array_equal(full[name], reduced[name]) for name in trained)
    settings = json.loads((tmp_path / "reduced" / "config.json").read_text())
    assert settings["precision"] == precision


@pytest.mark.slow
def test_float16_resumes_with_its_loss_scale(tmp_path, stand_in_dir):
    straight = train(tmp_path / "straight", stand_in_dir, precision="float16")
    assert runs.logged(tmp_path / "straight")[-1]["loss_scale"] > 1
    train(tmp_path / "resumed", stand_in_dir, precision="float16", max_steps=8)
    resumed = train(tmp_path / "resumed", stand_in_dir, precision="float16")
    assert any("scale" in name for name in straight)
    runs.assert_equal(resumed, straight)


def test_auto_is_resolved_in_the_configuration(tmp_path, stand_in_dir):
    train(tmp_path / "run", stand_in_dir, max_steps=1)  # Without oneDNN, in tests.
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["precision"] == "float32"


def test_the_report_divides_a_step_and_the_profile_is_written(
    tmp_path, stand_in_dir, capsys
):
    train(tmp_path / "run", stand_in_dir, report_bottleneck=True, profile="5:6")
    output = capsys.readouterr().out
    assert "waited" in output
    for part in (
        "A step took",
        "waiting for images",
        "averaging",
        "update",
    ):
        assert part in output
    assert list((tmp_path / "run" / "train").rglob("*.xplane.pb"))


@pytest.mark.parametrize("profile", ["50:60", "10:60"])
def test_a_profile_beyond_the_end_is_said(tmp_path, stand_in_dir, profile, capsys):
    train(tmp_path / "run", stand_in_dir, profile=profile)
    written = list((tmp_path / "run" / "train").rglob("*.xplane.pb"))
    assert len(written) == (1 if profile == "10:60" else 0)
    said = "No profile was written: step 50" in capsys.readouterr().out
    assert said == (profile == "50:60")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"variable_device": "gpu"}, "--variable_device gpu: the towers run on the"),
        ({"input_device": "gpu"}, "--input_device gpu: the towers run on the CPU"),
    ],
)
def test_what_the_devices_cannot_do_is_refused(tmp_path, stand_in_dir, options, named):
    with pytest.raises(UsageError, match=named):
        train(tmp_path / "run", stand_in_dir, **options)
    assert not (tmp_path / "run" / "checkpoints").exists()


def pooled(image_shape, classes):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(2, 3),
            keras.layers.MaxPooling2D(3, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(classes),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 2])
def test_what_xla_cannot_compile_is_said(tmp_path, stand_in_dir, towers):
    model = {"model": f"{__name__}:pooled", "num_gpus": towers}
    with pytest.raises(UsageError) as refused:
        train(tmp_path / "run", stand_in_dir, xla=True, deterministic=True, **model)
    assert str(refused.value) == (
        "--xla: XLA cannot compile this step: GPU MaxPool gradient ops do not yet have "
        "a deterministic XLA implementation.\nLeave it out, with --fresh or another "
        "--train_dir."
    )


def placement(*names):
    return devices.Placement(names, simulated=False, description="")


@pytest.mark.parametrize(
    ("asked", "names", "chosen"),
    [
        ("auto", ["/gpu:0"], "/gpu:0"),
        ("auto", ["/gpu:0", "/gpu:1"], "/cpu:0"),
        ("auto", ["/cpu:0"], "/cpu:0"),
        ("cpu", ["/gpu:0"], "/cpu:0"),
        ("gpu", ["/gpu:0", "/gpu:1"], "/gpu:0"),
    ],
)
def test_where_variables_live(asked, names, chosen):
    assert devices.variable_device(asked, placement(*names)) == chosen


@pytest.mark.parametrize(
    ("asked", "names", "chosen"),
    [
        ("auto", ["/gpu:0", "/gpu:1"], "/gpu:0"),
        ("auto", ["/cpu:0", "/cpu:1"], "/cpu:0"),
        ("cpu", ["/gpu:0", "/gpu:1"], "/cpu:0"),
    ],
)
def test_where_variables_live_whose_update_computes(asked, names, chosen):
    assert devices.variable_device(asked, placement(*names), "muon") == chosen


@pytest.mark.parametrize(
    ("asked", "names", "fits", "chosen"),
    [
        ("auto", ["/gpu:0", "/gpu:1"], True, True),
        ("auto", ["/gpu:0"], False, False),
        ("auto", ["/cpu:0"], True, False),
        ("cpu", ["/gpu:0"], True, False),
        ("gpu", ["/gpu:0"], False, True),
    ],
)
def test_where_images_are_distorted(asked, names, fits, chosen):
    assert devices.distorts_on_towers(asked, placement(*names), fits=fits) is chosen


def test_a_cudnn_that_xla_does_not_work_with_is_said(
    tmp_path, stand_in_dir, monkeypatch
):
    def step(*_, **__):
        message = "Autotuner could not find any supported configs for HLO: %conv"
        raise tf.errors.InternalError(None, None, message)

    monkeypatch.setattr(TowerBuilder, "step", step)
    with pytest.raises(UsageError, match="finds no convolution in this cuDNN"):
        train(tmp_path / "run", stand_in_dir, xla=True)
