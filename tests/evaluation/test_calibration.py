"""Calibration: the temperature that fits val, and who uses it."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

import cifar10
import runs
from cifar10.errors import UsageError
from cifar10.evaluation.metrics import Outcomes, Sums
from cifar10.input import datasets
from cifar10.interface.evaluate import evaluate
from cifar10.run_directory import scores, temperature as temperatures
from cifar10.tools import predict
from small_exports import export, names

BEFORE = "expected calibration error"


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def outcomes_of(labels, predictions, confidence, logits):
    """Returns outcomes whose losses and ranks do not matter."""
    losses, ranks = np.zeros(len(labels)), np.zeros(len(labels), int)
    return Outcomes(labels, losses, predictions, ranks, confidence, logits)


def test_the_temperature_of_known_probabilities_is_found():
    random = np.random.default_rng(0)
    logits = random.normal(scale=4.0, size=(20_000, 5)).astype(np.float32)
    for temperature in (0.4, 1.0, 2.5):
        gumbel = random.gumbel(size=logits.shape)
        labels = (logits / temperature + gumbel).argmax(axis=1)
        found = temperatures.fit(logits, labels)
        assert found == pytest.approx(temperature, rel=0.05)
        every = np.arange(len(labels))
        losses = [
            -np.log(softmax(logits / (found * factor))[every, labels]).mean()
            for factor in (0.99, 1.0, 1.01)
        ]
        assert min(losses) == losses[1]
        outcomes = outcomes_of(labels, logits.argmax(axis=1), None, logits).at(found)
        np.testing.assert_allclose(
            outcomes.confidence, softmax(logits / found).max(axis=1), rtol=1e-5
        )
        assert Sums.of(outcomes, 5).calibration_error < 0.02


def test_perfect_predictions_determine_no_temperature():
    with pytest.raises(UsageError, match="temperature"):
        temperatures.fit(5.0 * np.eye(4), np.arange(4))


def test_guesses_determine_no_temperature():
    random = np.random.default_rng(0)
    logits, labels = 100 * random.normal(size=(200, 10)), random.integers(0, 10, 200)
    with pytest.raises(UsageError, match="temperature"):
        temperatures.fit(logits, labels)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_determine_no_temperature(value):
    with pytest.raises(UsageError, match="temperature"):
        temperatures.fit(np.full((5, 3), value, np.float32), np.arange(5) % 3)


def test_an_impossible_class_changes_no_temperature():
    random = np.random.default_rng(0)
    logits = random.normal(scale=4.0, size=(500, 3))
    labels = (logits / 2.5 + random.gumbel(size=logits.shape)).argmax(axis=1)
    with_another = np.hstack([logits, np.full((500, 1), -np.inf)])
    assert temperatures.fit(with_another, labels) == temperatures.fit(logits, labels)


def test_a_bin_holds_its_upper_bound():
    confidence, predictions = np.array([1.0, 2 / 15, 0.1]), np.array([0, 1, 0])
    outcomes = outcomes_of(np.zeros(3, int), predictions, confidence, None)
    bins = Sums.of(outcomes, 2).bins
    assert bins.shape == (3, 15)
    assert bins[:2, [1, 14]].tolist() == [[2, 1], [1, 1]]


def test_the_interval_equals_wilsons_even_at_the_ends():
    # By statsmodels' proportion_confint(count, 10, method="wilson").
    for part, expected in ((0.0, (0.0, 0.277533)), (1.0, (0.722467, 1.0))):
        assert scores.interval(part, 10) == pytest.approx(expected, abs=1e-6)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, stand_in_dir):
    """A run with val, before and after eval.py --calibrate, and what that found."""
    before = tmp_path_factory.mktemp("calibrated") / "before"
    values = {"max_steps": 60, "batch_size": 32, "precision": "float32"}
    runs.train(before, stand_in_dir, **values, learning_rate=0.1, val_fraction=0.2)
    after = shutil.copytree(before, before.with_name("after"))
    words = ("eval.py", "--json", "--calibrate", "--train_dir", after)
    done = runs.call(*words)
    assert done.returncode == 0, done.stderr
    return before, after, json.loads(done.stdout)


def test_eval_writes_the_temperature_beside_its_scores(calibrated):
    before, after, found = calibrated
    assert found["temperature"] != 1.0
    assert found["low of precision @ 1"] < found["precision @ 1"]
    (line,) = runs.logged(after / "eval")
    for name in ("temperature", f"{BEFORE} at temperature", "cross_entropy"):
        assert line[name] == found[name]
    # It is val's error that it lowers; the test part's scores stay.
    on_val = evaluate(after, split="val")
    assert on_val[f"{BEFORE} at temperature"] < on_val[BEFORE]
    plain = evaluate(before)
    assert "temperature" not in plain
    assert plain.items() <= evaluate(after).items()
    # The last values have another one, or none.
    assert "temperature" not in evaluate(after, use_averages=False)


def test_predict_and_exports_apply_the_temperature(calibrated, tmp_path, capsys):
    before, after, found = calibrated
    picture = tmp_path / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    Image.fromarray(pixels).save(picture)
    lines = []
    for run in (before, after):
        options = predict.Options(
            [str(picture)], train_dir=str(run), json=True, top_k=10
        )
        assert predict.predict_files(options) == 0
        written = capsys.readouterr()
        assert ("temperature" in written.err) == (run == after)
        lines.append(json.loads(written.out))
    of_before, of_after = (
        {one["class"]: one["probability"] for one in line["predictions"]}
        for line in lines
    )
    logits = np.log([of_before[name] for name in of_after])
    expected = softmax(logits / found["temperature"])
    assert [*of_after.values()] == pytest.approx(expected, rel=1e-4)

    import tensorflow as tf

    assert export(after, tmp_path / "it", with_preprocessing=True) == 0
    loaded = tf.saved_model.load(str(tmp_path / "it"))
    (computed,) = loaded.signatures["serving_default"](
        tf.constant(pixels[None])
    ).values()
    described = json.loads((tmp_path / "it" / "cifar10.json").read_text())
    assert described["temperature"] == found["temperature"]
    of_export = dict(zip(described["class_names"], computed.numpy()[0], strict=True))
    assert of_export == pytest.approx(of_after, rel=1e-3)
    assert names(tmp_path) == ["it", "picture.png"]


def test_a_run_on_arrays_is_calibrated_on_the_same_arrays_in_a_file(tmp_path):
    random, run, file = np.random.default_rng(0), tmp_path / "run", tmp_path / "set.npz"
    labels = random.integers(0, 2, 80)
    images = random.integers(0, 100, (80, 12, 12, 3)) + 50 * labels[:, None, None, None]
    images, labels[::5] = images.astype(np.uint8), 0  # Some are wrong.
    parts = {"train": slice(0, 40), "val": slice(40, 60), "test": slice(60, 80)}
    data = tuple((images[part], labels[part]) for part in parts.values())
    given = {"model": runs.SMALL, "batch_size": 8, "max_steps": 20, "num_gpus": 1}
    cifar10.train(cifar10.Config(data=data, train_dir=run, **given))
    words = ("eval.py", "--calibrate", "--json", "--train_dir", run)
    refused = runs.call(*words)
    assert refused.returncode == 2
    assert "--data_dir FILE.npz" in refused.stderr
    np.savez(
        file,
        **{f"x_{part}": images[of] for part, of in parts.items()},
        **{f"y_{part}": labels[of] for part, of in parts.items()},
    )
    done = runs.call(*words, "--data_dir", file)
    assert done.returncode == 0, done.stderr
    found = evaluate(run, data=data)
    assert json.loads(done.stdout)["temperature"] == found["temperature"] != 1.0
    # They are the arrays that it was trained on, so the score is the run's.
    assert runs.logged(run / "eval")[-1]["precision @ 1"] == found["precision @ 1"]


def test_a_file_of_arrays_is_scored_but_nothing_is_fitted_on_it(
    calibrated, tmp_path, stand_in_dir
):
    run, file = shutil.copytree(calibrated[0], tmp_path / "run"), tmp_path / "set.npz"
    dataset = datasets.find("synthetic", str(stand_in_dir))
    words = ("eval.py", "--run_once", "--json", "--train_dir", run, "--data_dir", file)
    for split, are_seen in (("test", False), ("train", True)):
        images, labels = dataset.read(split)
        np.savez(file, x_test=images, y_test=labels)
        done = runs.call(*words)
        assert json.loads(done.stdout)["num_examples"] == len(images)
        said = " ".join(done.stderr.split())
        assert (
            "sampled training images of the run are among these" in said
        ) == are_seen
    refused = runs.call(*words, "--calibrate")
    assert refused.returncode == 2
    assert "only by the run's own data" in " ".join(refused.stderr.split())
    assert not [*run.glob("checkpoints/*/temperature*")]


def test_a_damaged_temperature_is_refused_by_name(calibrated, tmp_path):
    run = shutil.copytree(calibrated[1], tmp_path / "run")
    (path,) = run.glob("checkpoints/*/temperature.txt")
    for damage in ("", "one", "nan", "1000", "\xff"):
        path.write_text(damage)
        with pytest.raises(UsageError, match=r"temperature\.txt"):
            evaluate(run)


def test_calibrating_again_replaces_a_damaged_temperature(calibrated, tmp_path):
    _, after, found = calibrated
    run = shutil.copytree(after, tmp_path / "run")
    (path,) = run.glob("checkpoints/*/temperature.txt")
    path.write_text("damaged")
    done = runs.call("eval.py", "--json", "--calibrate", "--train_dir", run)
    again = json.loads(done.stdout)
    assert again["temperature"] == found["temperature"]
    assert again["step"] == found["step"]


def test_a_temperature_is_not_written_through_a_link(calibrated, tmp_path):
    run = shutil.copytree(calibrated[0], tmp_path / "run")
    mine = (run / "checkpoints").rename(tmp_path / "mine")
    (run / "checkpoints").symlink_to(mine)
    done = runs.call("eval.py", "--calibrate", "--train_dir", run)
    assert done.returncode == 2
    assert "is a link" in done.stderr
    assert not [*mine.glob("*/temperature*")]


def test_nothing_is_fitted_on_the_test_part(tmp_path, stand_in_dir):
    run = tmp_path / "run"
    runs.train(run, stand_in_dir, max_steps=2, batch_size=8)
    done = runs.call("eval.py", "--run_once", "--calibrate", "--train_dir", run)
    assert done.returncode == 2
    assert "--val_fraction" in done.stderr
    assert not [*run.glob("checkpoints/*/temperature*")]


@pytest.mark.parametrize(
    "words", [("--num_examples", "7"), ("--test_time_augmentation",)], ids=" ".join
)
def test_the_temperature_is_always_fitted_on_all_of_val(calibrated, tmp_path, words):
    before, after, _ = calibrated
    run = shutil.copytree(before, tmp_path / "run")
    done = runs.call("eval.py", "--calibrate", *words, "--train_dir", run)
    assert done.returncode == 0, done.stderr
    (found,), (expected,) = (
        [path.read_text() for path in one.glob("checkpoints/*/temperature.txt")]
        for one in (run, after)
    )
    assert found == expected
