"""Trainings that begin with weights from elsewhere: what fits, is frozen, is slow."""

import os
import shutil
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
from benchmarks import fine_tuning
from cifar10 import model as models
from cifar10.config import config_file, flags, initial_weights_flag
from cifar10.config.config import Config
from cifar10.config.signals import StopSignals
from cifar10.errors import UsageError
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import distortions
from cifar10.models import layer_tree
from cifar10.sections.sectioned_tower import SectionedTower
from cifar10.towers import freezing, optimizers, rates
from cifar10.towers.devices import Placement
from cifar10.training import assembly, early, initial_weights, settings, weights_file

ONE_TOWER = Placement(("/cpu:0",), simulated=True, description="one tower")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def small(image_shape, classes):
    """A model of named layers, with batch norm, of images of any size."""
    images = keras.Input(image_shape)
    net = keras.layers.Conv2D(3, 5, strides=4, use_bias=False, name="conv")(images)
    net = keras.layers.BatchNormalization(momentum=0.5, name="norm")(net)
    net = keras.layers.ReLU()(net)
    net = keras.layers.GlobalAveragePooling2D()(net)
    net = keras.layers.Dense(4, activation="relu", name="hidden")(net)
    return keras.Model(images, keras.layers.Dense(classes, name="head")(net))


def unnamed(image_shape, classes):
    """A model whose layers Keras names, one of them within another model."""
    inner = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(3, 5, strides=4),
            keras.layers.Conv2D(3, 1, name="named"),
            keras.layers.Conv2D(3, 1),
            keras.layers.GlobalAveragePooling2D(),
            inner,
            keras.layers.Dense(classes),
        ]
    )


@pytest.fixture(autouse=True)
def in_registry(monkeypatch):
    for model in (small, unnamed):
        monkeypatch.setitem(models.REGISTRY, model.__name__, model)


def options(**given):
    """Returns fields of a short training on the stand-in, in float64."""
    return {
        "model": "small",
        "num_gpus": 1,
        "global_batch_size": 8,
        "distortions": "flip_translate",
        "precision": "float64",
        "schedule": "linear",
        "learning_rate": 0.05,
        "momentum": 0.9,
        "moving_average_decay": 0.5,
        "max_steps": 4,
        **given,
    }


def build_state(**given):
    config = settings.resolve(Config(**options(**given)), ONE_TOWER)
    return config, assembly.build_state(config, "/cpu:0", (32, 32, 3), 10)


def written(path, model="small", classes=10, seed=1):
    """Writes a file of Keras's; returns the values of its layers by name."""
    made = models.build(model, (32, 32, 3), classes, seed=seed)
    random = np.random.default_rng(seed)
    for variable in made.variables:
        if "float" in variable.dtype:
            variable.assign(random.uniform(0.1, 0.9, variable.shape))
    if path.suffix == ".keras":
        made.save(path)
    else:
        made.save_weights(path)
    return values(made)


def values(model):
    return {
        name: [np.array(variable.numpy()) for variable in variables]
        for name, variables in layer_tree.by_name(model).items()
    }


def begin(state, config, **described):
    described = {"class_names": list("abcdefghij"), "data": "synthetic", **described}
    said = initial_weights.begin(config, state, described, None, resumes=False)
    return said, described


# ---- what fits


@pytest.mark.parametrize("name", ["there.keras", "there.weights.h5"])
@pytest.mark.parametrize("model", ["small", "unnamed"])
def test_a_file_gives_all_layers_their_values(tmp_path, name, model):
    expected = written(tmp_path / name, model)
    keras.layers.Conv2D(1, 1)  # Layers without names are numbered in the process.
    config, state = build_state(
        initial_weights=str(tmp_path / name), model=model, precision="float32"
    )
    said, described = begin(state, config)
    count = len(expected)
    assert said.startswith(f"Starts: from {count} of {count} layers of {tmp_path}")
    assert "New" not in said
    taken = values(state.model)
    assert taken.keys() == expected.keys()
    for layer, arrays in expected.items():
        for array, other in zip(arrays, taken[layer], strict=True):
            np.testing.assert_array_equal(array, other)
    for average, variable in zip(
        state.averages, state.model.trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(average, variable.value)
    found = initial_weights.find(config, state.model, described)
    assert described["initial_weights_sha256"] == initial_weights.fingerprint(
        found.layers
    )


def test_unnamed_layers_are_numbered_in_their_model():
    models.build("unnamed", (32, 32, 3), 10)
    again = models.build("unnamed", (32, 32, 3), 10)
    assert [*layer_tree.by_name(again)] == [
        "conv2d",
        "named",
        "conv2d_2",
        "sequential/dense",
        "dense",
    ]
    assert layer_tree.head(again) is again.layers[-1]


def test_a_head_of_other_classes_is_new(tmp_path):
    path = tmp_path / "there.weights.h5"
    expected = written(path, classes=7)
    config, state = build_state(initial_weights=str(path))
    before = values(state.model)
    said, _ = begin(state, config)
    assert "from 3 of 4 layers" in said
    assert said.endswith("New, of another shape: head.")
    after = values(state.model)
    np.testing.assert_array_equal(after["head"][0], before["head"][0])
    np.testing.assert_allclose(after["norm"][2], expected["norm"][2])  # Moving mean.


def test_what_fits_nothing_is_refused(tmp_path):
    path = tmp_path / "there.weights.h5"
    written(path, "unnamed")
    config, state = build_state(initial_weights=str(path))
    with pytest.raises(UsageError) as caught:
        begin(state, config)
    assert "it fits no layer of small, which has conv, norm, hidden, head" in str(
        caught.value
    )


@pytest.mark.parametrize(("number", "kind"), [(np.inf, "f4"), (1e300, "f8")])
def test_numbers_that_are_not_finite_are_refused(tmp_path, number, kind):
    path = tmp_path / "there.weights.h5"
    written(path)
    with h5py.File(path, "r+") as file:
        variables = file["layers/dense/vars"]
        values = variables["0"][()].astype(kind)
        values[0] = number
        del variables["0"]
        variables["0"] = values
    config, state = build_state(initial_weights=str(path))
    with pytest.raises(UsageError, match="holds numbers that float32 does not"):
        begin(state, config)


# ---- files of others

WANTED = {"conv": [(5, 5, 3, 3)], "hidden": [(3, 4), (4,)], "head": [(4, 10), (10,)]}


def refused(path):
    with pytest.raises(UsageError) as caught:
        weights_file.read(path, WANTED)
    return str(caught.value)


def test_the_model_that_a_file_describes_is_never_built(tmp_path):
    """A Lambda layer is code; a description that is none does not even matter."""
    ran, path = tmp_path / "ran", tmp_path / "code.keras"

    def code(inputs):
        ran.touch()
        return inputs

    images = keras.Input((2,))
    net = keras.layers.Lambda(code)(images)
    keras.Model(images, keras.layers.Dense(10, name="head")(net)).save(path)
    ran.unlink()
    wanted = {"head": [(2, 10), (10,)]}
    assert weights_file.read(path, wanted).found["head"][0].shape == (2, 10)
    assert not ran.exists()
    with zipfile.ZipFile(path) as archive:
        weights = archive.read("model.weights.h5")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{ no JSON")
        archive.writestr("model.weights.h5", weights)
    assert weights_file.read(path, wanted).found.keys() == {"head"}


def test_a_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "bomb.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(10**7))
    assert "would have 10,000,000 bytes, and the file has" in refused(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("model.weights.h5", os.urandom(1000))
    assert "is compressed in an unusual way" in refused(path)


def test_an_array_that_declares_too_much_is_not_read(tmp_path):
    path = tmp_path / "bomb.weights.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("layers/dense/vars")
        group.attrs["name"] = "head"
        group.create_dataset("0", (10**7, 10**6), "f4", chunks=(1000, 1000))
    read = weights_file.read(path, WANTED)
    assert (read.found, read.others) == ({}, {"head"})


def test_a_part_that_is_larger_than_its_array_is_not_unpacked(tmp_path):
    """Two megabytes of such parts take two gigabytes."""
    path = tmp_path / "bomb.weights.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("layers/dense/vars")
        group.attrs["name"] = "head"
        sides = {"chunks": (400, 1000), "maxshape": (None, None)}
        group.create_dataset("0", (4, 10), "f4", compression="gzip", **sides)
        group["0"][...] = 1.0
        group["1"] = np.zeros(10, np.float32)
    assert "/layers/dense/vars/0 is compressed or in parts" in refused(path)


@pytest.mark.parametrize("where", ["layers", "layers/dense/vars"])
def test_a_file_of_any_number_of_entries_is_not_read(tmp_path, monkeypatch, where):
    monkeypatch.setattr(weights_file, "_MOST_ENTRIES", 100)
    path = tmp_path / "many.weights.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group(where)
        for number in range(101):
            group.create_group(str(number))
    assert "it has more than 100 entries" in refused(path)


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.9])
@pytest.mark.parametrize("name", ["there.keras", "there.weights.h5"])
def test_truncated_files_are_refused(tmp_path, name, kept):
    path = tmp_path / name
    written(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    assert "cannot be read as a file of Keras's" in refused(path)


def test_damaged_bytes_are_refused_or_harmless(tmp_path):
    path = tmp_path / "there.weights.h5"
    written(path)
    content = bytearray(path.read_bytes())
    random = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(0, len(content), 20):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        try:
            weights_file.read(path, WANTED)
        except UsageError:
            continue


@pytest.mark.parametrize("kind", ["soft", "external", "array"])
def test_links_out_of_a_file_are_refused(tmp_path, kind):
    path, other = tmp_path / "link.weights.h5", tmp_path / "other.weights.h5"
    written(other)
    with h5py.File(path, "w") as file:
        group = file.create_group("layers/dense/vars")
        group.attrs["name"] = "head"
        place = "/layers/dense_1/vars"
        if kind == "soft":
            file["layers/dense_1"] = h5py.SoftLink("/layers/dense")
        elif kind == "external":
            file["layers/dense_1"] = h5py.ExternalLink(str(other), place)
        else:
            outside = [(str(other), 0, 160)]
            group.create_dataset("0", (4, 10), "f4", external=outside)
            group.create_dataset("1", (10,), "f4")
    said = refused(path)
    assert "links to other files" in said or "is in another file" in said


def test_a_group_within_itself_ends(tmp_path):
    path = tmp_path / "loop.weights.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("layers")
        group["again"] = group
        group["once_more"] = group
    assert weights_file.read(path, WANTED).others == set()


def test_a_pipe_is_not_waited_for(tmp_path):
    path = tmp_path / "pipe.keras"
    os.mkfifo(path)
    assert "it is a pipe or a device" in refused(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing.keras", "it cannot be read: No such file"),
        ("nothing", "there is no such file.\nGive a .keras or .weights.h5 file"),
        ("notes.txt", "it is of another kind"),
        ("folder", "the directory holds no run"),
    ],
)
def test_places_without_weights_are_refused_before_tensorflow(tmp_path, name, said):
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / "folder").mkdir()
    run, place = str(tmp_path / "run"), str(tmp_path / name)
    config = Config(train_dir=run, initial_weights=place)
    with pytest.raises(UsageError) as caught, early.claimed(config, StopSignals()):
        pass
    assert said in str(caught.value)
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_rate_for_what_is_not_new_needs_such(tmp_path):
    config = Config(pretrained_rate=0.1, train_dir=str(tmp_path / "run"))
    said = "Add --initial_weights, or remove it from a copy"
    with pytest.raises(UsageError, match=said), early.claimed(config, StopSignals()):
        pass


# ---- what is frozen


def frozen_by(names, model="small"):
    """Returns the paths of the variables that are not trained."""
    _, state = build_state(freeze=names, model=model)
    config = settings.resolve(Config(**options(freeze=names, model=model)), ONE_TOWER)
    variables = state.model.trainable_variables
    is_frozen = freezing.frozen(state.model, variables, config.stage(0).frozen)
    return {v.path for v, frozen in zip(variables, is_frozen, strict=True) if frozen}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("conv, hidden/bias", {"conv/kernel", "hidden/bias"}),
        ("h*", {"hidden/kernel", "hidden/bias", "head/kernel", "head/bias"}),
        (
            "all-but-head",
            {"conv/kernel", "norm/gamma", "norm/beta", "hidden/kernel", "hidden/bias"},
        ),
    ],
)
def test_names_beginnings_and_all_but_the_head_are_frozen(names, expected):
    assert frozen_by(names) == expected


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("conv,nrom", "small has no variable 'nrom' to freeze"),
        ("con", "no such layer.\nIt has conv, norm, hidden, head."),
        ("conv*,norm,h*", "no variable is left to train; freeze fewer"),
    ],
)
def test_names_that_freeze_nothing_or_all_are_refused(names, said):
    with pytest.raises(UsageError) as caught:
        build_state(freeze=names)
    assert said in str(caught.value)


def test_it_is_frozen_in_every_stage_of_a_recipe():
    declared = [{"until": 0.5, "frozen": ["conv"]}, {}]
    config = Config(freeze="norm", stages=declared, schedule="linear", max_steps=4)
    assert [config.stage(step).frozen for step in (0, 3)] == [
        ("norm", "conv"),
        ("norm",),
    ]


def batches_of(count, seed=0):
    random = np.random.default_rng(seed)
    images = random.normal(1.0, 2.0, (8, 32, 32, 3))
    labels = random.integers(0, 10, 8)
    whole = tf.constant(images), tf.constant(labels)
    return list(zip(*(tf.split(part, count) for part in whole), strict=True))


def make_towers(config, state, devices):
    return assembly.TowerBuilder(
        state,
        devices,
        tower=assembly.build_tower(config),
        update=assembly.build_update(config, 100),
    )


def test_frozen_layers_keep_every_bit_and_others_move(four_cpus):
    config, state = build_state(freeze="conv,norm")
    towers = make_towers(config, state, four_cpus[:2])
    towers.freeze(config.stage(0).frozen)
    before = values(state.model)
    for step in range(2):
        towers.step(batches_of(2, step))
    for name, arrays in values(state.model).items():
        for array, earlier in zip(arrays, before[name], strict=True):
            # The moving statistics too, as frozen batch norm takes them as they are.
            assert np.array_equal(array, earlier) == (name in ("conv", "norm"))


def test_frozen_batch_norm_computes_as_in_evaluation(four_cpus):
    config, state = build_state(freeze="norm")
    norm = state.model.get_layer("norm")
    norm.moving_mean.assign([0.3, -0.2, 0.1])
    towers = make_towers(config, state, four_cpus[:1])
    batch = batches_of(1)
    images, labels = batch[0]
    evaluated = models.loss(state.model(images, training=False), labels, [])
    in_batch = models.loss(state.model(images, training=True), labels, [])
    norm.moving_mean.assign([0.3, -0.2, 0.1])
    norm.moving_variance.assign([1.0] * 3)
    for frozen, expected in ((("norm",), evaluated), (("norm/gamma",), in_batch)):
        towers.freeze(frozen)
        (result,) = towers.results(batch)
        np.testing.assert_allclose(
            result.metrics["total_loss"], expected["total_loss"], rtol=1e-9
        )
    assert "call" not in vars(norm)


def test_a_sectioned_tower_freezes_batch_norm_too():
    config, state = build_state()
    plain = assembly.build_tower(config)
    sectioned = SectionedTower(plain, [])
    results = []
    for frozen in ((), ("conv", "norm")):
        for tower in (plain, sectioned):
            tower.frozen = frozen
            towers = assembly.TowerBuilder(
                state, ["/cpu:0"], tower=tower, update=assembly.build_update(config, 9)
            )
            towers.freeze(frozen)
            results.append(towers.results(batches_of(1))[0].metrics["total_loss"])
    trained, sectioned_trained, frozen, sectioned_frozen = map(float, results)
    assert sectioned_trained == pytest.approx(trained, rel=1e-9)
    assert sectioned_frozen == pytest.approx(frozen, rel=1e-9)
    assert abs(frozen - trained) > 1e-4


# ---- a smaller rate


@pytest.mark.parametrize("name", ["sgd", "adamw", "lion", "muon"])
def test_a_factor_scales_the_whole_update_of_its_variables(name):
    """Of an optimizer of any kind, with momentum and weight decay."""
    arguments = {"weight_decay": 0.1} if name in ("adamw", "lion") else None
    momentum = 0.9 if name in ("sgd", "muon") else 0.0
    start = np.random.default_rng(0).normal(size=(2, 3, 3, 2, 4))
    gradient = tf.constant(np.random.default_rng(1).normal(size=(3, 3, 2, 4)))
    changes = {}
    for scales in (False, True):
        slow, fast = (keras.Variable(one, dtype="float64") for one in start)
        optimizer = optimizers.build(
            name, 0.1, momentum, arguments, scale_updates=scales
        )
        optimizer.build([slow, fast])
        if scales:
            rates.slow_down(optimizer, [slow], 0.25)
        changes[scales] = []
        for _ in range(2):
            before = slow.numpy(), fast.numpy()
            optimizer.apply([gradient, gradient], [slow, fast])
            changes[scales].append([slow.numpy() - before[0], fast.numpy() - before[1]])
    whole, scaled = changes[False], changes[True]
    np.testing.assert_allclose(scaled[0][0], 0.25 * whole[0][0], rtol=1e-6)
    for step in range(2):
        np.testing.assert_allclose(scaled[step][1], whole[step][1], rtol=1e-9)
    if name == "sgd":  # Whose second update does not depend on the values.
        np.testing.assert_allclose(scaled[1][0], 0.25 * whole[1][0], rtol=1e-6)


def test_only_what_is_taken_is_slow(tmp_path):
    path = tmp_path / "there.weights.h5"
    written(path, classes=7)
    config, state = build_state(initial_weights=str(path), pretrained_rate=0.125)
    begin(state, config)
    of_head = {"head/kernel", "head/bias"}
    factors = state.optimizer.factors.numpy()
    for variable, factor in zip(state.model.trainable_variables, factors, strict=True):
        assert factor == (1.0 if variable.path in of_head else 0.125)


def test_a_training_without_it_has_no_factors():
    _, state = build_state()
    assert not hasattr(state.optimizer, "factors")


# ---- whole trainings


def small_run(tmp_path, stand_in_dir):
    """Trains a run to begin with; returns its directory."""
    runs.train(tmp_path / "earlier", stand_in_dir, **options(seed=7, max_steps=2))
    return tmp_path / "earlier"


def test_a_run_gives_its_averages(tmp_path, stand_in_dir):
    earlier = small_run(tmp_path, stand_in_dir)
    config, state = build_state(initial_weights=str(earlier))
    names = config_file.read(earlier / "config.json")["class_names"]
    said, _ = begin(state, config, class_names=names)
    assert f"from 4 of 4 layers of {earlier} at step 2: conv" in said
    trained = TrainedModel(earlier)
    trained.restore()
    for variable, average in zip(
        state.model.trainable_variables, trained.trainable, strict=True
    ):
        np.testing.assert_array_equal(variable.value, average)
    for variable, value in zip(
        state.model.non_trainable_variables, trained.non_trainable, strict=True
    ):
        np.testing.assert_array_equal(variable.value, value)
    # As many classes, and others.
    _, state = build_state(initial_weights=str(earlier))
    head = values(state.model)["head"]
    said, _ = begin(state, config)
    assert said.endswith("New, for other classes: head.")
    np.testing.assert_array_equal(values(state.model)["head"][0], head[0])


@pytest.mark.parametrize(
    ("before", "now", "are_same"),
    [("cifar10", "cifar10", True), ("npz", "npz", False), ("folder", "folder", True)],
)
def test_classes_without_names_are_those_of_the_same_pictures(before, now, are_same):
    described = {"class_names": ["class 0"], "data": before, "data_fingerprint": "a"}
    other = {**described, "data": now, "data_fingerprint": "b"}
    assert initial_weights._are_same_classes(described, other) == are_same
    assert initial_weights._are_same_classes(described, described)


@pytest.mark.slow
def test_a_run_resumes_without_what_it_began_with(tmp_path, stand_in_dir):
    """And does exactly what it would have done without a stop, its slow rates too."""
    earlier = small_run(tmp_path, stand_in_dir)
    fine_tuned = options(
        initial_weights=str(earlier),
        freeze="conv",
        pretrained_rate=0.1,
        optimizer="adamw",
        momentum=0.0,
        max_steps=4,
        checkpoint_steps=2,
    )
    straight = runs.train(tmp_path / "straight", stand_in_dir, **fine_tuned)
    stopped = tmp_path / "stopped"
    runs.train(stopped, stand_in_dir, **fine_tuned)
    shutil.rmtree(runs.checkpoint(stopped, 4))
    shutil.rmtree(earlier)
    runs.assert_equal(runs.train(stopped, stand_in_dir, **fine_tuned), straight)
    described = config_file.read(stopped / "config.json")
    assert len(described["initial_weights_sha256"]) == 64
    with pytest.raises(UsageError, match="freeze: conv there, norm now"):
        runs.train(stopped, stand_in_dir, **{**fine_tuned, "freeze": "norm"})


@pytest.mark.slow
def test_a_run_without_a_checkpoint_begins_with_the_same_again(tmp_path, stand_in_dir):
    path, run = tmp_path / "there.weights.h5", tmp_path / "run"
    written(path)
    given = options(initial_weights=str(path), max_steps=1)
    first = runs.train(run, stand_in_dir, **given)
    shutil.rmtree(run / "checkpoints")
    runs.assert_equal(runs.train(run, stand_in_dir, **given), first)
    shutil.rmtree(run / "checkpoints")
    written(path, seed=2)
    with pytest.raises(UsageError, match="they have changed since the run began"):
        runs.train(run, stand_in_dir, **given)
    # Nor does a stranger's config.json decide which file is read.
    described = (run / "config.json").read_text()
    (run / "config.json").write_text(described + " ")
    with pytest.raises(UsageError, match="was not written by you on this machine"):
        runs.train(run, stand_in_dir, **given)


def test_four_towers_step_as_one_does(four_cpus, tmp_path):
    """With frozen batch norm, for which it is the same whose images are in a batch."""
    path = tmp_path / "there.keras"
    written(path, classes=7)
    given = {"initial_weights": str(path), "pretrained_rate": 0.1, "freeze": "norm"}
    reached = []
    for count in (1, 4):
        config, state = build_state(**given)
        begin(state, config)
        towers = make_towers(config, state, four_cpus[:count])
        towers.freeze(config.stage(0).frozen)
        for step in range(2):
            towers.step(batches_of(count, step))
        reached.append([variable.numpy() for variable in state.variables()])
    for one, four in zip(*reached, strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["towers", "mirrored"])
def test_four_towers_compute_what_one_does(tmp_path, stand_in_dir, update):
    path = tmp_path / "there.keras"
    written(path, classes=7)
    given = options(
        initial_weights=str(path),
        freeze="norm",
        pretrained_rate=0.1,
        max_steps=3,
        summary_steps=100,
    )
    one = runs.train(tmp_path / "one", stand_in_dir, **given)
    given |= {"num_gpus": 4, "variable_update": update}
    four = runs.train(tmp_path / "four", stand_in_dir, **given)
    moved = 0
    for name, value in one.items():
        np.testing.assert_allclose(four[name], value, rtol=1e-9, atol=1e-12)
        moved += "averages" in name
    assert moved


def test_the_recipe_is_that_of_initial_weights():
    assert distortions.WHOLE == initial_weights_flag._OF_ONE_SCALE
    given = flags.with_recipe({"initial_weights": "runs/a", "model": "resnet"})
    assert (given.recipe, given.pretrained_rate) == ("finetune", 0.3)
    assert given.distortions in initial_weights_flag._OF_ONE_SCALE
    assert flags.with_recipe({"model": "resnet"}).recipe == "resnet"


# ---- the comparison with a training from random values


def test_it_compares_on_few_images_of_classes_that_are_new(tmp_path, monkeypatch):
    labels = np.arange(200, dtype=np.int32) % 10
    pictures = np.broadcast_to(labels[:, None, None, None], (200, 2, 2, 3))

    class Cifar:
        classes = 10

        def read(self, split):
            chosen = slice(None) if split == "train" else slice(20)
            return pictures[chosen].astype(np.uint8), labels[chosen]

    monkeypatch.setattr(fine_tuning.datasets, "find", lambda *_: Cifar())
    fine_tuning.write_sets(tmp_path, None, 5, 20, 2)
    for name, kinds, count in (("first", range(5), 20), ("few_1", range(5, 10), 4)):
        arrays = np.load(tmp_path / f"{name}.npz")
        assert np.bincount(arrays["y_train"]).tolist() == [count] * 5
        for split in ("train", "test"):
            shown = arrays[f"x_{split}"][:, 0, 0, 0]
            np.testing.assert_array_equal(shown, arrays[f"y_{split}"] + kinds[0])
        assert len(arrays["y_test"]) == 10
    recipe = flags.with_recipe({"recipe": str(fine_tuning.recipe_at_random(tmp_path))})
    assert (recipe.pretrained_rate, recipe.optimizer) == (1.0, "adamw")


def test_the_comparison_shows_mean_and_deviation():
    shown = fine_tuning.table({"fine-tuned": [0.8, 0.82, 0.84]})
    assert "| fine-tuned | 82.0% | 2.0% | 80.0, 82.0, 84.0 |" in shown
