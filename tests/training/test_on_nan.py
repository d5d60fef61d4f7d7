"""`--on_nan`: a gradient that is infinite on one tower at one step, on purpose.

One image of the set is white, so that standardized it is zero everywhere, and the model
has a layer which makes the gradient or the loss infinite for such an image. In an epoch
the image comes once: in step 6, on the second of two towers.
"""

import functools
import shutil
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.input import pipeline, records
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES
from cifar10.run_directory import checkpoints
from cifar10.run_directory.early_stopping import EarlyStopping
from cifar10.towers import towers
from cifar10.training import assembly, train as training
from event_readers import read_as_the_server, tensors

IMAGES = 256
CALLS = {
    "single": {},
    "several": {"steps_per_call": 3},
    "mirrored": {"steps_per_call": 3, "variable_update": "mirrored"},
    "compiled": {"xla_update": True},
}
BAD_STEP = 6
BAD_TOWER = "tower 1 (/cpu:1)"


@tf.custom_gradient
def infinite_gradient(x, factor):
    return tf.identity(x), lambda upstream: (upstream * factor, None)


class Trap(keras.layers.Layer):
    """Passes its input on; for a white image, the gradient or the output is infinite.

    Or else a number that it keeps is infinite from then on; another always is.
    """

    def __init__(self, kind):
        super().__init__(name="trap")
        self.kind = kind
        if kind == "statistic":
            self.highest = self.number("highest", 1.0)
            self.lowest = self.number("lowest", np.inf)

    def number(self, name, start):
        start = keras.initializers.Constant(start)
        return self.add_weight(shape=(), initializer=start, trainable=False, name=name)

    def call(self, x, images):
        # White is 2.06 or more in every channel; the brightest of the others is 1.3.
        white = tf.reduce_min(images, axis=[1, 2, 3]) > 2.0
        factor = tf.where(tf.reduce_any(white), np.inf, 1.0)
        if self.kind == "statistic":
            self.highest.assign(self.highest * factor)
            return x
        return infinite_gradient(x, factor) if self.kind == "gradient" else x * factor


def trapped(kind):
    def build(image_shape, classes):
        images = keras.Input(image_shape)
        x = keras.layers.Flatten()(images)
        x = keras.layers.Dense(4, name="hidden")(x)
        x = keras.layers.BatchNormalization(name="norm")(x)
        x = Trap(kind)(x, images)
        return keras.Model(images, keras.layers.Dense(classes, name="head")(x))

    return build


def image_of_bad_step():
    """Returns which image is on the second tower in the bad step."""
    place = tf.constant([(BAD_STEP - 1) * 8 + 5], tf.int64)
    return pipeline.shuffled_indices(place, IMAGES, 0).numpy()


def train_in(train_dir, data_dir, *, whites=None, hooks=(), **options):
    """Trains a small model with a trap, on two towers of four images."""
    random = np.random.default_rng(0)
    images = random.integers(0, 200, (IMAGES, 32, 32, 3), dtype=np.uint8)
    labels = random.integers(0, 10, IMAGES, dtype=np.int32)
    images[image_of_bad_step() if whites is None else whites] = 255
    arguments = {
        "model": "gradient_trap",
        "max_steps": 10,
        "checkpoint_steps": 4,
        "log_frequency": 4,
        "momentum": 0.9,
        **options,
    }
    config = Config(
        num_gpus=2,
        batch_size=4,
        distortions="none",
        train_dir=str(train_dir),
        data="synthetic",
        data_dir=str(data_dir),
        precision="float32",
        **arguments,
    )
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("gradient", "loss", "statistic"):
            known = Architecture(trapped(kind))
            patch.setitem(ARCHITECTURES, f"{kind}_trap", known)
        patch.setattr(records, "read_split", lambda *_: (images, labels))
        return training.train(config, hooks=hooks)


@pytest.fixture
def train(tmp_path, stand_in_dir):
    return functools.partial(train_in, tmp_path / "run", stand_in_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, stand_in_dir):
    """Trains without any white image, as a policy should have ended.

    Returns a function of the step and how the training differs: by the update of the
    bad step, which is left out, or by shifts of the input, each up to a step.
    """

    @functools.cache
    def trained(shifts, model, options):
        opened, step_of = assembly.Training.open_batches, towers.TowerBuilder.step
        folder = tmp_path_factory.mktemp("reference") / "run"

        def stepped(builder, batches):
            state = builder.state
            if shifts or int(state.global_step) + 1 != BAD_STEP:
                builder.last = step_of(builder, batches)
            else:
                state.global_step.assign_add(1)
            return builder.last

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(towers.TowerBuilder, "step", stepped)
            for last, shift in shifts or [(12, 0)]:

                def shifted(made, start, step, shift=shift, **options):
                    return opened(made, start + shift, step, **options)

                patch.setattr(assembly.Training, "open_batches", shifted)
                given = {"whites": [], "model": model, "max_steps": last}
                given |= {"checkpoint_steps": 1, "keep_checkpoints": 12}
                train_in(folder, stand_in_dir, **given, **dict(options))
        return folder

    def end(step, shifts=(), model="gradient_trap", call="single"):
        # One that is compiled rounds otherwise; calls do not.
        options = CALLS[call] if call == "compiled" else {}
        folder = trained(shifts, model, tuple(options.items()))
        return runs.variables(runs.checkpoint(folder, step))

    return end


def assert_ended(folder, expected):
    """Fails unless a checkpoint has these values."""
    values = runs.variables(folder)
    assert all(np.isfinite(value).all() for value in values.values())
    runs.assert_equal(values, expected)


def manifest(folder, step):
    return checkpoints.verify(folder, step).manifest


# ---- stop


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_stop_keeps_the_state_before_and_names_the_variables(
    tmp_path, train, reference, call
):
    with pytest.raises(UsageError) as caught:
        train(**CALLS[call])
    debug = tmp_path / "run" / "debug"
    assert f"the gradients of {BAD_TOWER}" in str(caught.value)
    assert f"at step {BAD_STEP} " in str(caught.value)
    advised = str(caught.value).rpartition("\n    ")[2]
    steps = f"--steps {BAD_STEP}:{BAD_STEP} --find"
    assert advised.endswith(f"replay {tmp_path / 'run'} {steps}")
    assert str(debug / "step-00000005") in str(caught.value)
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [4]

    found = manifest(debug, BAD_STEP - 1)["not_finite"]
    assert found["step"] == BAD_STEP
    variables = ["hidden/kernel", "hidden/bias", "norm/gamma", "norm/beta"]
    assert found["gradients"] == {BAD_TOWER: variables}
    assert_ended(debug / "step-00000005", reference(BAD_STEP - 1, call=call))


@pytest.mark.slow
def test_the_same_command_continues_with_skip_after_a_stop(tmp_path, train, reference):
    """Also where the state before the step cannot be kept."""
    debug = tmp_path / "run" / "debug"
    for _ in range(2):
        with pytest.raises(UsageError, match=f"at step {BAD_STEP} "):
            train()
    kept = {path.name for path in debug.iterdir()}
    assert kept == {"step-00000005", "earlier-step-00000005-1"}
    shutil.rmtree(debug)
    debug.write_text("in the way")
    with pytest.raises(UsageError, match=f"at step {BAD_STEP} .* could not be saved"):
        train()
    assert train(on_nan="skip") == 10
    assert_ended(runs.checkpoint(tmp_path / "run", 10), reference(10))


# ---- skip


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("gradient", "single"),
        pytest.param("loss", "several", marks=pytest.mark.slow),
        pytest.param("loss", "compiled", marks=pytest.mark.slow),
        pytest.param("loss", "mirrored", marks=pytest.mark.slow),
    ],
)
def test_skip_omits_the_bad_update_and_counts_it_across_a_resume(
    tmp_path, train, reference, capsys, kind, call
):
    options = {"model": f"{kind}_trap", "on_nan": "skip", **CALLS[call]}
    for max_steps in (8, 12):
        train(max_steps=max_steps, **options)
    said = capsys.readouterr().err
    assert said.count("SKIPPED") == 1
    assert f"step {BAD_STEP}: " in said
    expected = reference(12, model=options["model"], call=call)
    assert_ended(runs.checkpoint(tmp_path / "run", 12), expected)
    lines = runs.logged(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1]
    assert runs.events(tmp_path / "run") == [(BAD_STEP, "skip")]
    assert not (tmp_path / "run" / "debug").exists()


def test_skip_stops_after_ten_bad_steps(tmp_path, train):
    with pytest.raises(UsageError, match="last 10 steps"):
        train(on_nan="skip", whites=range(IMAGES), max_steps=20)
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [4, 8]


# ---- rollback

# From step 4 on, what was step 6 comes 2 steps earlier.
AFTER_ROLLBACK = ((4, 0), (10, 2))


@pytest.mark.parametrize(
    "call",
    [
        "single",
        pytest.param("several", marks=pytest.mark.slow),
        pytest.param("compiled", marks=pytest.mark.slow),
        pytest.param("mirrored", marks=pytest.mark.slow),
    ],
)
def test_a_rollback_continues_with_later_images_across_a_resume(
    tmp_path, train, reference, capsys, call
):
    for max_steps in (7, 10):
        train(on_nan="rollback", max_steps=max_steps, **CALLS[call])
    said = capsys.readouterr().err
    assert said.count("ROLLED BACK") == 1
    assert "steps 5 to 6" in said
    assert f"{BAD_TOWER} are not finite in hidden/kernel" in said
    assert manifest(tmp_path / "run" / "debug", 5)["left_out"] == 0
    expected = reference(10, shifts=AFTER_ROLLBACK, call=call)
    assert_ended(runs.checkpoint(tmp_path / "run", 10), expected)
    facts = manifest(tmp_path / "run" / "checkpoints", 10)
    assert (facts["left_out"], facts["position"]) == (2, 8 * (10 + 2))
    assert runs.events(tmp_path / "run") == [(4, "rollback")], "beyond the resume"


def test_rollback_takes_back_scores_and_curves(tmp_path, train, monkeypatch):
    """Steps 5 to 10 are scored again; of step 6 there is no score the first time."""
    counted, told = [], []
    updated = EarlyStopping.updated

    def noted(record, step, *_):
        counted.append((step, record.without_gain))
        return updated(record, step, 0.0, IMAGES)

    monkeypatch.setattr(EarlyStopping, "updated", noted)
    hook = types.SimpleNamespace(
        on_start=lambda run: told.append(("start", run.step)),
        on_log=lambda step, metrics: told.append(("log", step)),
        on_end=lambda step, why: told.append((why, step)),
    )
    options = {"eval_steps": 1, "stop_after_no_gain": 20, "keep_best": 0}
    train(on_nan="rollback", **options, hooks=[hook])
    steps = [*range(1, 6), *range(5, 11)]
    assert counted == [(step, max(step - 2, 0)) for step in steps]
    scored = runs.logged(tmp_path / "run" / "eval")
    assert [line["step"] for line in scored] == [*range(1, 11)]
    events = read_as_the_server(tmp_path / "run" / "eval")
    curve = tensors(events, "precision @ 1")
    assert [step for step, _ in curve] == [*range(1, 11)]
    # Hooks are told of the rollback, and once of the end.
    before, later = [("start", 0), ("log", 4)], [("start", 4), ("log", 8)]
    assert told == [*before, *later, ("finished", 10)]
    lines = runs.logged(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 8]


@pytest.mark.slow
def test_rollback_without_a_checkpoint_begins_with_the_initial_values(
    tmp_path, train, reference
):
    train(on_nan="rollback", checkpoint_steps=100, log_frequency=1)
    expected = reference(10, shifts=((10, BAD_STEP),))
    assert_ended(runs.checkpoint(tmp_path / "run", 10), expected)
    lines = runs.logged(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 11))


def test_a_rollback_continues_even_if_the_earlier_state_cannot_be_saved(
    tmp_path, train, capsys
):
    debug = tmp_path / "run" / "debug"
    hook = types.SimpleNamespace(on_start=lambda _: debug.write_text("in the way"))
    assert train(on_nan="rollback", max_steps=7, hooks=[hook]) == 7
    said = capsys.readouterr().err
    assert "ROLLED BACK" in said
    assert "could not be saved" in said


def test_a_run_stops_after_three_rollbacks(tmp_path, train, capsys):
    with pytest.raises(UsageError, match="3 rollbacks"):
        train(on_nan="rollback", whites=range(IMAGES), log_frequency=1)
    assert capsys.readouterr().err.count("ROLLED BACK") == 3
    assert len(list((tmp_path / "run" / "debug").iterdir())) == 4
    events = runs.events(tmp_path / "run")
    assert [name for _, name in events] == [*["rollback"] * 3, "stop"]


# ---- variables that are not finite although every result is


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_checkpoint_with_an_infinite_statistic_is_not_saved(tmp_path, train, on_nan):
    """It was finite at the start."""
    with pytest.raises(UsageError, match=r"at step 8 .*: trap/highest\.") as caught:
        train(model="statistic_trap", on_nan=on_nan)
    said = str(caught.value)
    assert "--on_nan rollback" in said
    assert said.endswith("--steps 5:8 --find")
    assert f"after that step was saved in {tmp_path / 'run' / 'debug'}" in said
    assert checkpoints.steps(tmp_path / "run" / "debug") == [8]
    assert checkpoints.steps(tmp_path / "run" / "checkpoints") == [4]
    assert runs.events(tmp_path / "run") == [(8, "stop")]


def test_a_rollback_leaves_out_all_images_since_a_finite_statistic(
    tmp_path, train, capsys
):
    assert train(model="statistic_trap", on_nan="rollback") == 10
    said = capsys.readouterr().err
    assert said.count("ROLLED BACK") == 1
    assert "step 4, without the images of steps 5 to 8: at step 8 " in said
    facts = manifest(tmp_path / "run" / "checkpoints", 10)
    assert (facts["left_out"], facts["position"]) == (4, 8 * (10 + 4))


def test_rollbacks_to_an_ever_infinite_statistic_end(train):
    with pytest.raises(UsageError, match=r"at step 4 .* 3 rollbacks .* of step 0"):
        train(model="statistic_trap", on_nan="rollback", whites=range(IMAGES))
