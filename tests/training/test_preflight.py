"""What is refused before TensorFlow starts."""

import pytest

import runs
from cifar10.process import entry_point


@pytest.fixture(autouse=True)
def without_tensorflow(monkeypatch):
    """Fails a test whose program would import TensorFlow."""

    def fail(**_):
        raise AssertionError("TensorFlow would be imported")

    monkeypatch.setattr(entry_point, "import_tensorflow", fail)


def refused(*words):
    done = runs.call(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


def test_a_model_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise AssertionError('it is not imported')")
    where = ("--train_dir", tmp_path / "run")
    for script in ("train.py", "train_multi_gpu.py"):
        assert "resnet" in refused(script, *where, "--model", "resent")
    assert "mien" in refused("train.py", *where, "--model", "mien:small")
    with pytest.raises(AssertionError, match="TensorFlow"):
        runs.call("train.py", *where, "--model", "mine:small")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
    assert "resnet" in refused("cifar10/__main__.py", "plan", "--model", "resent")
