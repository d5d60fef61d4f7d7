"""Directories that flags name, in any spelling."""

from cifar10.config import layout


def test_a_path_is_absolute_and_may_begin_at_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("run", "./run/", str(tmp_path / "run"), "~/run", "~/run/"):
        assert layout.absolute_path(name) == tmp_path / "run"
