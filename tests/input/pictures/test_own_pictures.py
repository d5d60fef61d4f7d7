"""A folder of pictures through the whole program: as the binary files, and exactly.

A folder's pictures are listed class by class, each class in the order of the files'
names. So the binary files that a folder is compared with have their records in that
order: which images a step takes follows from their places.
"""

import dataclasses
import io
import json
import shutil
import signal
import subprocess
import threading
import time

import httpx
import numpy as np
import pytest
from PIL import Image

import runs
from cifar10.config.config import Config
from cifar10.errors import UsageError
from cifar10.follower import Follower
from cifar10.follower.trained_model import TrainedModel
from cifar10.input import cifar, pipeline, records
from cifar10.input.pictures import division
from cifar10.run_directory import claim
from cifar10.tools.export import preparation
from cifar10.tools.serve import serving
from cifar10.training import train as training
from small_folders import numbered, packed, write

# Few records a file, so that a whole CIFAR-10 is written in no time.
SMALL = dataclasses.replace(
    records.CIFAR10, train_records_per_file=30, test_records_per_file=60
)
# A space, an umlaut, and what HTML would take for a tag.
CLASSES = ("Käse & Brot", "a cat", "<b>")


def picture(label, random):
    """A picture whose class can be told by its colour."""
    colour = np.eye(3)[label % 3] * 120
    noise = random.integers(0, 120, (32, 40, 3))
    return (noise + colour).astype(np.uint8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of pictures of 40 x 32 pixels with training and test parts."""
    directory = tmp_path_factory.mktemp("own") / "my photos"
    random = np.random.default_rng(0)
    for part, count in (("train", 16), ("test", 6)):
        for label, name in enumerate(CLASSES):
            folder = directory / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                content = packed(picture(label, random))
                (folder / f"{number}.png").write_bytes(content)
    return directory


def config(train_dir, photos, **options):
    return Config(
        **{
            "data": "folder",
            "data_dir": str(photos),
            "image_size": 32,
            "train_dir": str(train_dir),
            "global_batch_size": 16,
            "max_steps": 12,
            "checkpoint_steps": 6,
            "learning_rate": 0.01,
            "deterministic": True,
            "precision": "float64",
            **options,
        }
    )


def trained(train_dir, photos, **options):
    """Trains; returns the last checkpoint's values."""
    chosen = config(train_dir, photos, **options)
    assert training.train(chosen) == chosen.max_steps
    return runs.variables(runs.checkpoint(train_dir, chosen.max_steps))


# ---- The same as CIFAR's files


def write_binary(directory, file_format, images, labels):
    """Writes CIFAR-10's files of images, by part, in the order that they have."""
    directory.mkdir()
    for part in ("train", "test"):
        planes = images[part].transpose(0, 3, 1, 2).reshape(len(images[part]), -1)
        rows = np.column_stack([labels[part].astype(np.uint8), planes])
        first = 0
        for name, count in file_format.files(part).items():
            (directory / name).write_bytes(rows[first : first + count].tobytes())
            first += count


def write_folder(directory, images, labels, names):
    """Writes one PNG for each image, named by its place."""
    for part in ("train", "test"):
        for name in names:
            (directory / part / name).mkdir(parents=True)
        for place, label in enumerate(labels[part]):
            path = directory / part / names[label] / f"{place:05d}.png"
            Image.fromarray(images[part][place]).save(path, compress_level=1)


def train_on_both(tmp_path, file_format, images, labels, **options):
    """Trains on PNG files and on binary files; returns their last checkpoints."""
    names = file_format.default_names
    assert list(names) == sorted(names), "the folders would be in another order"
    write_folder(tmp_path / "png", images, labels, names)
    order = {part: np.argsort(labels[part], kind="stable") for part in labels}
    write_binary(
        tmp_path / "binary",
        file_format,
        {part: images[part][order[part]] for part in images},
        {part: labels[part][order[part]] for part in labels},
    )
    options = {"precision": "auto", **options}
    binary = {"data": "cifar10", "image_size": None, **options}
    trained(tmp_path / "on_binary", tmp_path / "binary", **binary)
    trained(tmp_path / "on_png", tmp_path / "png", **options)
    return [
        runs.checkpoint(tmp_path / run, options["max_steps"])
        for run in ("on_png", "on_binary")
    ]


@pytest.mark.slow
def test_png_files_train_bit_for_bit_as_the_binary_files(tmp_path, monkeypatch):
    monkeypatch.setitem(cifar.FORMATS, "cifar10", SMALL)
    random = np.random.default_rng(0)
    images, labels = {}, {}
    for part in ("train", "test"):
        count = sum(SMALL.files(part).values())
        images[part] = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
        labels[part] = random.integers(0, 10, count)
    on_png, on_binary = train_on_both(
        tmp_path, SMALL, images, labels, num_gpus=2, max_steps=20
    )
    runs.assert_equal(runs.variables(on_png), runs.variables(on_binary))
    # Another order of the same pictures ends elsewhere: the comparison can fail.
    shutil.rmtree(tmp_path / "binary")
    write_binary(tmp_path / "binary", SMALL, images, labels)
    options = {"data": "cifar10", "image_size": None, "precision": "auto"}
    options |= {"num_gpus": 2, "max_steps": 20}
    other = trained(tmp_path / "other", tmp_path / "binary", **options)
    assert runs.largest_difference(other, runs.variables(on_binary)) > 1e-4


@pytest.mark.soak  # Writes 60,000 files; a few do in the test before.
def test_cifar10_as_png_trains_bit_for_bit_as_the_binary_files(tmp_path, real_data_dir):
    found = cifar.find("cifar10", str(real_data_dir), None, {"HOME": str(tmp_path)})
    read = {part: found.read(part) for part in ("train", "test")}
    images = {part: pair[0] for part, pair in read.items()}
    labels = {part: pair[1] for part, pair in read.items()}
    on_png, on_binary = train_on_both(
        tmp_path,
        records.CIFAR10,
        images,
        labels,
        max_steps=200,
        checkpoint_steps=200,
        global_batch_size=32,
    )
    runs.assert_equal(runs.variables(on_png), runs.variables(on_binary))


# ---- Exactly the same, however it is trained


@pytest.mark.slow
def test_towers_equal_one(tmp_path, photos):
    one = trained(tmp_path / "one", photos)
    four = trained(tmp_path / "four", photos, num_gpus=4)
    assert runs.largest_difference(four, one) < 1e-8
    other = trained(tmp_path / "other", photos, seed=1)
    assert runs.largest_difference(other, one) > 1e-4


def words(train_dir, photos, **values):
    """Returns the command line of what `config` describes."""
    values = {
        "recipe": "tutorial",
        "data": photos,
        "image_size": 32,
        "train_dir": train_dir,
        "global_batch_size": 16,
        "max_steps": 12,
        "checkpoint_steps": 6,
        "learning_rate": 0.01,
        "precision": "float64",
        **values,
    }
    script = runs.ROOT / "train_multi_gpu.py"
    return [script, "--deterministic", *runs.flags(**values)]


@pytest.mark.slow
def test_two_workers_are_one_process(tmp_path, photos):
    done = runs.run(*words(tmp_path / "two", photos, local_workers=2, num_gpus=1))
    assert done.returncode == 0, done.stderr
    assert "on each of 2 workers" in done.stdout
    two = runs.variables(runs.checkpoint(tmp_path / "two", 12))
    one = trained(tmp_path / "one", photos)
    assert runs.largest_difference(two, one) < 1e-8


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, photos):
    run = tmp_path / "run"
    command = words(run, photos, num_gpus=2, max_steps=40)
    whole = words(tmp_path / "whole", photos, num_gpus=2, max_steps=40)
    done = runs.call(*whole)
    assert done.returncode == 0, done.stderr
    with runs.started(*command, stderr=subprocess.STDOUT) as process:
        runs.read_until(process.stdout, "step 10,")
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not runs.checkpoint(run, 40).exists()
    done = runs.call(*command)
    assert "Resuming from step " in done.stdout, done.stderr
    files = runs.files(runs.checkpoint(run, 40))
    assert files == runs.files(runs.checkpoint(tmp_path / "whole", 40))


@pytest.mark.slow
def test_other_pictures_are_no_reason_to_go_on(tmp_path, photos):
    copy = tmp_path / "copy"
    shutil.copytree(photos, copy)
    run = tmp_path / "run"
    trained(run, copy, max_steps=2)
    # The same pixels in a new file are the same pictures.
    changed = copy / "train" / CLASSES[0] / "3.png"
    before = changed.read_bytes()
    with Image.open(io.BytesIO(before)) as image:
        changed.write_bytes(packed(np.asarray(image), compress_level=0))
    trained(run, copy, max_steps=4)
    changed.write_bytes(packed(picture(0, np.random.default_rng(1))))
    with pytest.raises(UsageError, match="the pictures have changed since it began"):
        training.train(config(run, copy, max_steps=6))
    changed.write_bytes(before)
    trained(run, copy, max_steps=6)


@pytest.mark.slow
def test_other_pictures_of_the_same_classes_are_scored(run_dir, photos, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(photos, other)
    (other / "test" / CLASSES[0] / "0.png").unlink()
    words = ("--run_once", "--json", "--train_dir", run_dir, "--data_dir", other)
    done = runs.call("eval.py", *words)
    assert json.loads(done.stdout)["num_examples"] == 17, done.stderr
    for part in ("train", "test"):
        (other / part / "a cat").rename(other / part / "a dog")
    done = runs.call("eval.py", *words)
    assert done.returncode == 2
    assert "its class 2 is a dog, and the run's is a cat" in done.stderr


def test_a_run_keeps_the_parts_that_it_began_with(tmp_path, monkeypatch):
    """An older version divided all classes at once; its runs go on."""
    photos = write(tmp_path / "photos", *numbered(20, "cat", "dog", "wolf"))
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(claim, "division", lambda *_, **__: division.BY_FRACTION)
        trained(run, photos, max_steps=2)
    path = run / "config.json"
    settings = json.loads(path.read_text())
    del settings["data_division"]
    path.write_text(json.dumps(settings))
    names = numbered(20, "cat", "dog", "wolf")
    tests = {name for name in names if division.hash_of(name) < 0.1 * 2**64}
    words = ("--run_once", "--json", "--train_dir", run, "--data_dir", photos)
    for step in (2, 4):
        trained(run, photos, max_steps=step)
        done = runs.call("eval.py", *words)
        assert json.loads(done.stdout)["num_examples"] == len(tests), done.stderr
        after = json.loads(path.read_text())
        assert after["data_fingerprint"] == settings["data_fingerprint"]
    # Pictures that are added are scored by the same limits, and not trained on.
    write(photos, *[f"cat/new {number}.png" for number in range(40)])
    added = [f"cat/new {number}.png" for number in range(40)]
    more = {name for name in added if division.hash_of(name) < 0.1 * 2**64}
    assert more
    done = runs.call("eval.py", *words)
    assert json.loads(done.stdout)["num_examples"] == len(tests | more), done.stderr
    with pytest.raises(UsageError, match="the pictures have changed since it began"):
        trained(run, photos, max_steps=6)
    trained(tmp_path / "new", photos, max_steps=2)
    anew = json.loads((tmp_path / "new/config.json").read_text())
    assert anew["data_fingerprint"] != settings["data_fingerprint"]


def test_digits_stay_whole_from_training_to_the_export(tmp_path, photos):
    """With --distortions none images are neither cropped nor mirrored anywhere."""
    run = tmp_path / "run"
    trained(run, photos, image_size=28, distortions="none", max_steps=2)
    model = TrainedModel(run)
    assert model.restore() == 2
    assert model.image_shape == model.picture_shape == (28, 28, 3)
    done = runs.call("eval.py", "--run_once", "--json", "--train_dir", run)
    assert json.loads(done.stdout)["num_examples"] == 18, done.stderr
    images = np.random.default_rng(0).integers(0, 256, (2, 28, 28, 3), np.uint8)
    seen = pipeline.prepare(images, "none").numpy()
    exported = preparation.prepare(images, (28, 28, 3), "none")
    np.testing.assert_allclose(exported, seen, atol=1e-4)
    crop = preparation.describe("none", (28, 28, 3))["crop"]
    assert crop == {"top": 0, "left": 0, "height": 28, "width": 28}


# ---- The names of the classes, wherever they are shown


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, photos):
    """A run on the pictures that tells them apart."""
    directory = tmp_path_factory.mktemp("trained")
    trained(directory / "run", photos, precision="float32", max_steps=60)
    return directory / "run"


@pytest.fixture(scope="module")
def cat(photos):
    return photos / "test" / "a cat" / "0.png"


@pytest.mark.slow
def test_evaluation_names_the_classes_and_finds_them(run_dir):
    done = runs.call("eval.py", "--run_once", "--json", "--train_dir", run_dir)
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    assert [row["class"] for row in scores["per_class"]] == sorted(CLASSES)
    assert scores["num_examples"] == 18
    assert scores["precision @ 1"] > 0.9
    done = runs.call("eval.py", "--run_once", "--train_dir", run_dir)
    assert all(name in done.stdout for name in CLASSES)


@pytest.mark.slow
def test_predictions_name_the_classes(run_dir, cat):
    words = ("predict", cat, "--json", "--train_dir", run_dir)
    done = runs.call("cifar10/__main__.py", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {one["class"] for one in found["predictions"]} == set(CLASSES)
    assert found["predictions"][0]["class"] == "a cat"


def test_the_report_names_the_classes(run_dir, tmp_path):
    page = tmp_path / "report.html"
    words = ("report", "--train_dir", run_dir, "--output", page)
    done = runs.call("cifar10/__main__.py", *words)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    for name in ("Käse &amp; Brot", "a cat", "&lt;b&gt;"):
        assert f'<th scope="row">{name}</th>' in text
    assert "<b></th>" not in text
    assert 'width="32" height="32"' in text


def test_the_service_names_the_classes(run_dir, cat):
    with Follower(run_dir) as follower:
        follower.look()
        with serving.listening("127.0.0.1", 0) as listener:
            server = serving.server(follower, serving.Options(train_dir=str(run_dir)))
            thread = threading.Thread(target=server.run, args=([listener],))
            thread.start()
            try:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                with httpx.Client(base_url=url, timeout=30) as client:
                    health = client.get("/health").json()
                    answer = client.post("/predict", content=cat.read_bytes()).json()
                    page = client.get("/").text
            finally:
                server.should_exit = True
                thread.join()
    assert health["class_names"] == sorted(CLASSES)
    assert answer["predictions"][0]["class"] == "a cat"
    assert all(name in page for name in CLASSES)


@pytest.mark.slow
def test_the_export_names_the_classes(run_dir, tmp_path):
    output = tmp_path / "model"
    words = ("export", "--train_dir", run_dir, "--output", output)
    done = runs.call("cifar10/__main__.py", *words, "--with_preprocessing")
    assert done.returncode == 0, done.stderr
    described = json.loads((output / "cifar10.json").read_text())
    assert described["class_names"] == sorted(CLASSES)
    assert described["picture_shape"] == [32, 32, 3]
    assert described["data"] == "folder"
