"""Trainings that begin with weights from elsewhere: what fits, is frozen, is slow."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import runs
import small_runs
from cifar10.config.config import Config
from cifar10.config.run_config import RecordedRun
from cifar10.errors import UsageError
from cifar10.model import loss
from cifar10.models import applications, layer_tree
from cifar10.models.architecture import Architecture
from cifar10.models.registry import ARCHITECTURES, build_model
from cifar10.process.signals import StopSignals
from cifar10.sections.sectioned_tower import SectionedTower
from cifar10.tools.export_formats import with_keras_layers
from cifar10.towers.devices import Placement
from cifar10.towers.optimizers import build_optimizer, slow_down
from cifar10.towers.stages import find_frozen
from cifar10.trained_model import TrainedModel
from cifar10.training import (
    assembly,
    initial_weights,
    preflight,
)
from cifar10.training.initial_weights import read_layers
from recorded_runs import recorded

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
    """A model whose layers Keras names, most of them within another model."""
    inner = small_runs.small(image_shape, 5)
    return keras.Sequential([inner, keras.layers.Dense(classes)])


@pytest.fixture(autouse=True)
def in_registry(monkeypatch):
    for model in (small, unnamed):
        monkeypatch.setitem(ARCHITECTURES, model.__name__, Architecture(model))


def options(**given):
    """Returns fields of a short training on the stand-in, in float64."""
    return {
        "recipe": "tutorial",
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
    config = assembly.resolve_config(Config(**options(**given)), ONE_TOWER)
    return config, assembly.build_state(config, "/cpu:0", (32, 32, 3), 10)


def written(path, model="small", classes=10, seed=1):
    """Writes a file of Keras's; returns the values of its layers by name."""
    made = build_model(model, (32, 32, 3), classes, seed=seed)
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


def assert_taken(state, expected):
    """Fails unless the model has these values, by the names of its layers."""
    taken = values(state.model)
    assert taken.keys() == expected.keys()
    for layer, arrays in expected.items():
        for array, other in zip(arrays, taken[layer], strict=True):
            np.testing.assert_array_equal(array, other)


def begin(state, config, class_names=tuple("abcdefghij")):
    name = config.fine_tuning.initial_weights
    run = recorded(class_names=[*class_names], initial_weights=name)
    return initial_weights.take_initial_weights(config, state, run, None)


# ---- what fits


@pytest.mark.parametrize(
    ("name", "model"), [("there.keras", "small"), ("there.weights.h5", "unnamed")]
)
def test_a_file_gives_all_layers_their_values(tmp_path, name, model):
    expected = written(tmp_path / name, model)
    keras.layers.Conv2D(1, 1)  # Layers without names are numbered in the process.
    config, state = build_state(
        initial_weights=str(tmp_path / name), model=model, precision="float32"
    )
    assert "New" not in begin(state, config)
    assert_taken(state, expected)
    for average, variable in zip(
        state.averages, state.model.trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(average, variable.value)


def test_a_head_for_other_classes_is_new_and_other_layers_train_slowly(tmp_path):
    path = tmp_path / "there.weights.h5"
    expected = written(path, classes=7)
    given = {"initial_weights": str(path), "pretrained_rate": 0.125}
    config, state = build_state(**given, precision="float16")
    before = values(state.model)
    said = begin(state, config)
    assert said.endswith(": head.")
    after = values(state.model)
    np.testing.assert_array_equal(after["head"][0], before["head"][0])
    np.testing.assert_allclose(after["norm"][2], expected["norm"][2])  # Moving mean.
    factors = state.optimizer.inner_optimizer.factors.numpy()
    for variable, factor in zip(state.model.trainable_variables, factors, strict=True):
        assert factor == (1.0 if variable.path.startswith("head/") else 0.125)


def test_weights_from_another_model_or_beyond_float32_are_refused(tmp_path):
    path = tmp_path / "there.weights.h5"
    config, state = build_state(initial_weights=str(path))
    written(path, "unnamed")
    with pytest.raises(UsageError, match="conv, norm, hidden, head"):
        begin(state, config)
    for number, kind in ((np.inf, "f4"), (1e300, "f8")):
        written(path)
        with h5py.File(path, "r+") as file:
            variables = file["layers/dense/vars"]
            values = variables["0"][()].astype(kind)
            values[0] = number
            del variables["0"]
            variables["0"] = values
        with pytest.raises(UsageError, match="float32"):
            begin(state, config)


# ---- what Keras loads: by the structure of the model, whatever holds its layers


class Block(keras.layers.Layer):
    """Layers that are called in another order than they are named."""

    def __init__(self, **options):
        super().__init__(**options)
        self.up, self.down = keras.layers.Dense(6), keras.layers.Dense(6)

    def build(self, shape):
        self.scale = self.add_weight(shape=(), name="scale")
        self.up.build(shape)
        self.down.build((None, 6))

    def call(self, inputs):
        return self.down(self.up(inputs)) * self.scale


class Held(keras.Model):
    """Layers in lists and dicts, dropout, and a variable of the model itself."""

    def __init__(self):
        super().__init__()
        self.blocks = [Block(), [keras.layers.Dense(6), Block()]]
        self.heads = {"b": keras.layers.Dense(3), "a": keras.layers.Dense(3)}
        self.drop = keras.layers.Dropout(0.5)
        self.shift = self.add_weight(shape=(6,), name="shift")

    def call(self, images, training=None):
        dense, block = self.blocks[1]
        net = self.drop(block(dense(self.blocks[0](images))), training=training)
        return self.heads["a"](net) + self.heads["b"](net + self.shift)


def of_blocks():
    image = keras.Input((6,))
    return keras.Model(image, keras.layers.Dense(3)(Block()(Block()(image))))


def of_held():
    model = Held()
    with warnings.catch_warnings(action="ignore"):  # It has no `build`.
        model(np.zeros((1, 6), np.float32))
    return model


def nested():
    image, shared = keras.Input((6,)), keras.layers.Dense(6)
    inner = keras.Model(image, Block()(shared(shared(image))), name="inner")
    dense = keras.layers.Dense(6, dtype="bfloat16")
    return keras.Sequential([image, inner, dense, keras.layers.Dense(3)])


def drawn(model, seed):
    """Gives a model's floating-point variables random values."""
    random = np.random.default_rng(seed)
    for variable in model.variables:
        if "float" in variable.dtype:
            variable.assign(random.uniform(0.5, 1.5, variable.shape))
    return model


@pytest.mark.parametrize("build", [of_blocks, of_held, nested])
@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_a_file_gives_the_same_weights_as_in_keras(tmp_path, build, suffix):
    path, model, by_keras = tmp_path / f"there{suffix}", build(), build()
    source = drawn(build(), 1)
    source.save(path) if suffix == ".keras" else source.save_weights(path)
    before = [variable.numpy() for variable in model.variables]
    found = read(path, model)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    by_keras.load_weights(path)
    expected = values(by_keras)
    if build is of_held:  # It holds a variable itself.
        expected[model.name] = [by_keras.shift.numpy()]
    assert found.keys() == expected.keys()
    for layer, arrays in expected.items():
        for array, other in zip(arrays, found[layer], strict=True):
            np.testing.assert_array_equal(array, other)


def test_a_partly_matching_layer_gets_no_values(tmp_path):
    """Keras has then assigned those that come first."""

    class Pair(keras.layers.Layer):
        def __init__(self, width):
            super().__init__()
            self.first = self.add_weight(shape=(2,), name="first")
            self.second = self.add_weight(shape=(width,), name="second")

        def call(self, inputs):
            return inputs + self.first + keras.ops.sum(self.second)

    def build(width):
        layers = [Pair(width), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((2,)), *layers])

    path = tmp_path / "there.weights.h5"
    build(3).save_weights(path)
    assert [*read(path, build(3))] == ["pair", "dense"]
    assert [*read(path, build(4))] == ["dense"]


def test_outer_layers_are_matched_by_name(tmp_path):
    """Keras counts layers of a class, and would give `head` to the layer before it."""

    def build(*names):
        layers = [keras.layers.Dense(4, name=name) for name in names]
        return drawn(keras.Sequential([keras.Input((4,)), *layers]), len(names))

    path = tmp_path / "there.weights.h5"
    source = build("hidden", "head")
    source.save_weights(path)
    assert [*read(path, build("hidden", "renamed"))] == ["hidden", "renamed"]
    for names in (("hidden", "more", "head"), ("head", "hidden"), ("head",)):
        found = read(path, build(*names))
        assert [*found] == [name for name in names if name != "more"]
        for name, arrays in found.items():
            expected = source.get_layer(name).kernel.numpy()
            np.testing.assert_array_equal(arrays[0], expected)


@pytest.mark.parametrize("name", ["tutorial", "resnet", "airbench"])
def test_an_export_gives_all_layers_their_values(tmp_path, name):
    """Its layers are those of Keras, not the faster ones."""
    path, options = tmp_path / "it.keras", {"depth": 8 if name == "resnet" else None}
    source = drawn(build_model(name, (32, 32, 3), 10, options=options), 1)
    with_keras_layers(source).save(path)
    found = read(path, build_model(name, (32, 32, 3), 10, options=options))
    expected = values(source)
    assert found.keys() == expected.keys()
    for layer, arrays in expected.items():
        for array, other in zip(arrays, found[layer], strict=True):
            np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize(
    ("there", "is_same"),
    [
        ([*"abcdefghij"], True),
        ([*"jihgfedcba"], False),  # In another order.
        ([*"abcdefghiz"], False),
        (None, True),  # Unknown, as in a file of Keras.
    ],
)
def test_an_export_gives_its_head_for_the_same_classes_alone(tmp_path, there, is_same):
    path = tmp_path / "it.keras"
    written(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("cifar10.json", json.dumps({"class_names": there}))
    config, state = build_state(initial_weights=str(path))
    _, found = initial_weights.find_weights(config, state.model, tuple("abcdefghij"))
    assert found.keys() - {"head"} == {"conv", "norm", "hidden"}
    assert ("head" in found) == is_same


@pytest.mark.slow
def test_files_of_keras_applications_fit_with_and_without_their_top(tmp_path):
    for name in ("MobileNetV2", "ResNet50"):
        for top in (True, False):
            path = tmp_path / f"{name}{top}.weights.h5"
            build = getattr(keras.applications, name)
            drawn(build(weights=None, include_top=top, classes=7), 1).save_weights(path)
            model = build_model(f"applications:{name}", (32, 32, 3), 10)
            missing = values(model).keys() - read(path, model).keys()
            assert missing == {applications.HEAD}


def test_published_weights_are_loaded_without_noise(monkeypatch, capsys):
    """Neither the bar of a download nor a warning is the user's business."""

    def download(_, image_shape):
        print("Downloading data: 100 % ====")
        return small(image_shape, 3)

    monkeypatch.setattr(applications, "with_imagenet_weights", download)
    names = {"model": "applications:VGG16", "initial_weights": "imagenet"}
    config = Config(**names, distortions="flip_translate")
    model = build_model("small", (32, 32, 3), 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = initial_weights.find_weights(config, model, ())
    assert "conv" in found
    said = capsys.readouterr()
    assert said.out == ""
    assert "ImageNet" in said.err


# ---- files of others


def one_layer(inputs=4):
    dense = keras.layers.Dense(10, name="head")
    return keras.Sequential([keras.Input((inputs,)), dense])


def read(path, model=None):
    return read_layers(str(path), path, model or one_layer())


def refused(path):
    with pytest.raises(UsageError) as caught:
        read(path)
    return str(caught.value)


@contextlib.contextmanager
def hand_made(path):
    """Opens a new file, for the variables of its one layer, the head."""
    with h5py.File(path, "w") as file:
        group = file.create_group("layers/dense/vars")
        group.attrs["name"] = "head"
        yield group


def test_the_model_described_by_a_file_is_never_built(tmp_path):
    """A Lambda layer is code."""
    ran, path = tmp_path / "ran", tmp_path / "code.keras"

    def code(inputs):
        ran.touch()
        return inputs

    images = keras.Input((2,))
    net = keras.layers.Lambda(code)(images)
    keras.Model(images, keras.layers.Dense(10, name="head")(net)).save(path)
    ran.unlink()
    assert read(path, one_layer(inputs=2))["head"][0].shape == (2, 10)
    assert not ran.exists()


def test_a_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "bomb.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(10**7))
    assert "compressed" in refused(path)


def test_an_invalid_description_of_an_export_is_refused(tmp_path):
    path = tmp_path / "it.keras"
    config, state = build_state(initial_weights=str(path))
    for text, how, why in (
        ("[" * 10**5, zipfile.ZIP_STORED, "cannot be read"),
        ("[1, 2]", zipfile.ZIP_STORED, "cannot be read"),
        (" " * 10**6 + '{"class_names": []}', zipfile.ZIP_STORED, "cannot be read"),
        (" " * 10**6, zipfile.ZIP_DEFLATED, "cifar10.json in the file is compressed"),
    ):
        written(path)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("cifar10.json", text, how)
        with pytest.raises(UsageError, match=why):
            begin(state, config)


def test_an_array_declared_larger_than_its_file_is_not_read(tmp_path):
    path = tmp_path / "bomb.weights.h5"
    with hand_made(path) as group:
        group.create_dataset("0", (10**7, 10**6), "f4")
    assert "larger than the file" in refused(path)


def test_a_chunk_larger_than_its_array_is_not_unpacked(tmp_path):
    """Two megabytes of such parts take two gigabytes."""
    path = tmp_path / "bomb.weights.h5"
    with hand_made(path) as group:
        sides = {"chunks": (400, 1000), "maxshape": (None, None)}
        group.create_dataset("0", (4, 10), "f4", compression="gzip", **sides)
        group["1"] = np.zeros(10, np.float32)
    assert "/layers/dense/vars/0" in refused(path)


def test_a_file_of_very_many_entries_is_not_read(tmp_path):
    path = tmp_path / "many.weights.h5"
    with hand_made(path) as group:
        for number in range(10_001):
            group.create_group(f"group {number}")
    assert "entries" in refused(path)


def test_a_file_of_deep_groups_is_not_read(tmp_path):
    """Thousands of groups in each other take minutes."""
    path = tmp_path / "deep.weights.h5"
    with hand_made(path) as group:
        group.create_group("/".join("d" * 200))
    assert "nested groups" in refused(path)


def test_damaged_files_are_refused_or_harmless(tmp_path):
    random = np.random.default_rng(0)
    for path in (tmp_path / "there.keras", tmp_path / "there.weights.h5"):
        written(path)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 9 // 10])
        assert str(path) in refused(path)
        for _ in range(10):
            damaged = bytearray(content)
            for place in random.integers(0, len(content), 20):
                damaged[place] = random.integers(0, 256)
            path.write_bytes(damaged)
            with contextlib.suppress(UsageError):
                read(path)


@pytest.mark.parametrize("kind", ["soft", "external", "array", "virtual"])
def test_links_out_of_a_file_are_not_followed(tmp_path, kind):
    path, other = tmp_path / "link.weights.h5", tmp_path / "other.weights.h5"
    written(other)
    with hand_made(path) as group:
        if kind == "soft":
            group.parent.parent["dense_1"] = h5py.SoftLink("/layers/dense")
        elif kind == "external":
            link = h5py.ExternalLink(str(other), "/layers/dense_1/vars")
            group.parent.parent["dense_1"] = link
        elif kind == "array":
            group.create_dataset("0", (4, 10), "f4", external=[(str(other), 0, 160)])
        else:
            layout = h5py.VirtualLayout((4, 10), "f4")
            source = h5py.VirtualSource(str(other), "layers/dense_1/vars/0", (4, 10))
            layout[:] = source
            group.create_virtual_dataset("0", layout)
        group["1"] = np.zeros(10, np.float32)
    if kind in ("soft", "external"):
        assert read(path) == {}
    else:
        assert "another file" in refused(path)


def test_a_group_containing_itself_does_not_loop(tmp_path):
    path = tmp_path / "loop.weights.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("layers")
        group["again"] = group["once_more"] = group
    assert read(path) == {}


def test_flags_without_weights_are_refused_before_tensorflow(tmp_path):
    (tmp_path / "notes.txt").write_text("no weights")
    run, earlier = tmp_path / "run", tmp_path / "earlier"
    (earlier / "checkpoints" / "step-2").mkdir(parents=True)
    (earlier / "config.json").write_text("{}")
    for given in (
        {"initial_weights": str(tmp_path / "nothing")},
        {"initial_weights": str(tmp_path / "notes.txt")},
        {"initial_weights": str(earlier / "checkpoints")},
        {"initial_weights": str(earlier / "checkpoints" / "step-2")},
        {"pretrained_rate": 0.1},
    ):
        config = Config(train_dir=str(run), **given)
        with (
            pytest.raises(UsageError, match="--initial_weights"),
            preflight.locked_run(config, StopSignals()),
        ):
            pass
    assert not (run / "config.json").exists()
    os.mkfifo(tmp_path / "pipe.keras")
    assert "pipe" in refused(tmp_path / "pipe.keras")


# ---- what is frozen


def test_layers_are_frozen_by_name_by_prefix_or_all_but_the_head():
    hidden = {"hidden/kernel", "hidden/bias"}
    for names, expected in (
        ("conv, hidden/bias", {"conv/kernel", "hidden/bias"}),
        ("h*", hidden | {"head/kernel", "head/bias"}),
        ("all-but-head", hidden | {"conv/kernel", "norm/gamma", "norm/beta"}),
    ):
        config, state = build_state(freeze=names)
        variables = state.model.trainable_variables
        is_frozen = find_frozen(state.model, variables, config.stage(0).frozen)
        found = zip(variables, is_frozen, strict=True)
        assert {variable.path for variable, frozen in found if frozen} == expected


def test_freezing_no_layer_or_all_layers_is_refused():
    known = "has no layer or variable 'nrom'. Its layers are conv, norm, hidden, head."
    for names, said in (("conv,nrom", re.escape(known)), ("conv*,norm,h*", "fewer")):
        with pytest.raises(UsageError, match=said):
            build_state(freeze=names)


def batches_of(count, seed=0):
    random = np.random.default_rng(seed)
    images = random.normal(1.0, 2.0, (8, 32, 32, 3))
    labels = random.integers(0, 10, 8)
    whole = tf.constant(images), tf.constant(labels)
    return list(zip(*(tf.split(part, count) for part in whole), strict=True))


def make_towers(config, state, devices, tower=None):
    parts = {"tower": tower or assembly.build_tower(config.loss)}
    parts["update"] = assembly.build_update(config, 100)
    return assembly.TowerBuilder(state, devices, **parts)


def test_four_towers_step_as_one_and_keep_frozen_layers(four_cpus, tmp_path):
    """With frozen batch norm, for which it is the same whose images are in a batch."""
    path, frozen = tmp_path / "there.keras", ("conv", "norm")
    written(path, classes=7)
    given = {"initial_weights": str(path), "pretrained_rate": 0.1}
    reached = []
    for count in (1, 4):
        config, state = build_state(**given, freeze=",".join(frozen))
        begin(state, config)
        before = values(state.model)
        towers = make_towers(config, state, four_cpus[:count])
        towers.freeze(config.stage(0).frozen)
        for step in range(2):
            towers.step(batches_of(count, step))
        reached.append([variable.numpy() for variable in state.variables()])
        for name, arrays in values(state.model).items():
            for array, earlier in zip(arrays, before[name], strict=True):
                # The moving statistics too, which frozen batch norm only reads.
                assert np.array_equal(array, earlier) == (name in frozen)
    for one, four in zip(*reached, strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-9, atol=1e-12)


def test_frozen_batch_norm_computes_as_in_evaluation_in_sections_too(four_cpus):
    config, state = build_state()
    norm = state.model.get_layer("norm")
    norm.moving_mean.assign([0.3, -0.2, 0.1])
    batch = batches_of(1)
    images, labels = batch[0]
    evaluated = loss(state.model(images, training=False), labels, [])
    in_batch = loss(state.model(images, training=True), labels, [])
    norm.moving_mean.assign([0.3, -0.2, 0.1])
    norm.moving_variance.assign([1.0] * 3)
    whole = assembly.build_tower(config.loss)
    for tower in (whole, SectionedTower(whole, [2])):  # The norm is computed twice.
        towers = make_towers(config, state, four_cpus[:1], tower)
        for frozen, expected in ((("norm",), evaluated), (("norm/gamma",), in_batch)):
            towers.freeze(frozen)
            (result,) = towers.results(batch)
            np.testing.assert_allclose(
                result.metrics["total_loss"], expected["total_loss"], rtol=1e-9
            )


# ---- a smaller rate


def test_a_factor_scales_the_whole_update_of_its_variables():
    """With momentum or, as far as the values are the same, with weight decay."""
    start = np.random.default_rng(0).normal(size=(2, 3, 4))
    gradient = tf.constant(np.random.default_rng(1).normal(size=(3, 4)))
    for name, momentum, arguments, steps in (
        ("sgd", 0.9, None, 2),
        ("adamw", 0.0, {"weight_decay": 0.1}, 1),
    ):
        changes = []
        for scales in (False, True):
            slow, fast = (keras.Variable(one, dtype="float64") for one in start)
            optimizer = build_optimizer(
                name, 0.1, momentum, arguments, scale_updates=scales
            )
            optimizer.build([slow, fast])
            if scales:
                slow_down(optimizer, [slow], 0.25)
            for _ in range(steps):
                optimizer.apply([gradient, gradient], [slow, fast])
            changes.append(np.stack([slow.numpy(), fast.numpy()]) - start)
        whole, scaled = changes
        np.testing.assert_allclose(scaled[0], 0.25 * whole[0], rtol=1e-6)
        np.testing.assert_allclose(scaled[1], whole[1], rtol=1e-9)


# ---- whole runs


def small_run(tmp_path, stand_in_dir):
    """Trains a run to begin with; returns its directory."""
    given = options(seed=7, max_steps=2, checkpoint_steps=1)
    runs.train(tmp_path / "earlier", stand_in_dir, **given)
    return tmp_path / "earlier"


def test_a_run_provides_its_averages_and_its_head_for_the_same_classes(
    tmp_path, stand_in_dir
):
    """The newest ones, or those of the checkpoint whose folder is named."""
    earlier = small_run(tmp_path, stand_in_dir)
    before = RecordedRun.read(earlier).facts.class_names
    trained = TrainedModel(earlier)
    for named, step in ((runs.checkpoint(earlier, 1), 1), (earlier, 2)):
        config, state = build_state(initial_weights=str(named))
        begin(state, config, class_names=before)
        trained.restore(step)
        model = state.model
        taken = [*model.trainable_variables, *model.non_trainable_variables]
        expected = [*trained.trainable, *trained.non_trainable]
        for variable, value in zip(taken, expected, strict=True):
            np.testing.assert_array_equal(variable.value, value)
    # As many classes, and others.
    for names, is_same in ((before, True), (list("abcdefghij"), False)):
        _, found = initial_weights.find_weights(config, model, names)
        assert ("head" in found) == is_same


@pytest.mark.slow
def test_a_run_resumes_without_its_initial_weights(tmp_path, stand_in_dir):
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


@pytest.mark.slow
def test_a_run_without_a_checkpoint_restarts_from_the_same_weights(
    tmp_path, stand_in_dir
):
    path, run = tmp_path / "there.weights.h5", tmp_path / "run"
    written(path)
    given = options(initial_weights=str(path), max_steps=1)
    first = runs.train(run, stand_in_dir, **given)
    shutil.rmtree(run / "checkpoints")
    runs.assert_equal(runs.train(run, stand_in_dir, **given), first)
    shutil.rmtree(run / "checkpoints")
    # As in a new container, without the note that the run is this user's.
    described = (run / "config.json").read_text()
    (run / "config.json").write_text(described + " ")
    runs.assert_equal(runs.train(run, stand_in_dir, **given), first)


def test_a_strangers_config_does_not_decide_which_weights_are_read(tmp_path):
    """The user's own flag does, whoever wrote what is there."""
    path = tmp_path / "there.weights.h5"
    expected = written(path)
    config, state = build_state(initial_weights=str(path), precision="float32")
    run = recorded(class_names=[*"abcdefghij"], initial_weights=str(path))
    given = config, state, run, dataclasses.replace(run, is_own=False)
    config.given = frozenset({"resume"})
    with pytest.raises(UsageError, match="edited"):
        initial_weights.take_initial_weights(*given)
    config.given = frozenset({"initial_weights"})
    initial_weights.take_initial_weights(*given)
    assert_taken(state, expected)
