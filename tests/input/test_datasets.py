"""Which data set is found where: one situation a test, none with a network."""

import dataclasses
import errno
import os
from pathlib import Path

import numpy as np
import pytest

import sites
import small_sets
from cifar10.errors import UnavailableError, UsageError
from cifar10.input import cifar, datasets, download, synthetic
from small_sets import PACKED, SMALL, write_files

# A port at which nobody listens, reserved by RFC 6335 for just one old service.
NO_NETWORK = "http://127.0.0.1:1/"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Makes the data sets small and the published URLs unreachable."""
    monkeypatch.setenv("no_proxy", "*")
    for name, file_format in SMALL.items():
        archive = file_format.archive.name
        archive = sites.published(archive, PACKED[name], NO_NETWORK + archive)
        packed = dataclasses.replace(file_format, archive=archive)
        monkeypatch.setitem(cifar.FORMATS, name, packed)
        python = small_sets.of_python(name)
        monkeypatch.setitem(cifar.PYTHON_FORMATS, name, python)
    monkeypatch.setattr(download, "OVERLAP", 100)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The user has an empty home."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CIFAR10_DATA_DIR", "")
    monkeypatch.delenv("KERAS_HOME", raising=False)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "home" / ".cache" / "cifar10"


@pytest.fixture
def mirror(tmp_path):
    """A URL from which both archives can be had."""
    directory = tmp_path / "mirror"
    directory.mkdir()
    for name, content in PACKED.items():
        (directory / SMALL[name].archive.name).write_bytes(content)
    return directory.as_uri() + "/"


@pytest.fixture
def quick_stand_in(monkeypatch):
    """Makes the stand-in small too; test_synthetic.py generates the full one."""
    file_format = dataclasses.replace(
        synthetic.FORMAT, train_records_per_file=10, test_records_per_file=10
    )
    monkeypatch.setattr(synthetic, "FORMAT", file_format)
    monkeypatch.setitem(cifar.FORMATS, "synthetic", file_format)


PLACES = {
    "the files themselves": write_files,
    "their folder": lambda home, name: write_files(home / SMALL[name].folder, name),
    "the archive": lambda home, name: (
        home.mkdir(parents=True),
        (home / SMALL[name].archive.name).write_bytes(PACKED[name]),
    ),
}


@pytest.mark.parametrize("named_by", ["flag", "variable", "nothing"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("data", ["auto", "cifar100"])
def test_a_local_copy_is_found(tmp_path, cache, data, place, named_by):
    name = "cifar10" if data == "auto" else data
    home = cache if named_by == "nothing" else tmp_path / "data"
    PLACES[place](home, name)
    if named_by == "variable":
        os.environ["CIFAR10_DATA_DIR"] = str(home)
    if named_by == "flag":  # It goes before the variable.
        os.environ["CIFAR10_DATA_DIR"] = str(tmp_path / "other")
    flag = str(home) if named_by == "flag" else None
    found = datasets.find(data, flag, NO_NETWORK)
    # A folder that the flag names is only read, so an archive is unpacked elsewhere.
    unpacked = cache if (place, named_by) == ("the archive", "flag") else home
    in_folder = place != "the files themselves"
    assert found.directory == (unpacked / SMALL[name].folder if in_folder else home)
    assert (found.name, found.is_real) == (name, True)
    assert found.classes == len(found.class_names) == len(SMALL[name].class_names)
    assert set(found.read("train")[1].tolist()) == {3}


@pytest.mark.parametrize("data", ["auto", "cifar100"])
def test_a_download_is_kept(tmp_path, cache, mirror, data):
    folder = SMALL["cifar10" if data == "auto" else data].folder
    found = datasets.find(data, None, mirror)
    assert found.is_real
    assert found.directory == cache / folder
    assert datasets.find(data, None, NO_NETWORK).directory == found.directory
    os.environ["CIFAR10_DATA_DIR"] = str(tmp_path / "new")
    found = datasets.find(data, None, mirror)
    assert found.directory == tmp_path / "new" / folder


@pytest.mark.parametrize("data", ["auto", "cifar100"])
def test_a_named_place_without_the_data_set_is_refused(tmp_path, mirror, data):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    # There is a mirror to download from, and it is not used.
    for name in ("photos", "file", "missing"):
        with pytest.raises(UsageError, match="--data_dir"):
            datasets.find(data, str(tmp_path / name), mirror)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("quick_stand_in")
def test_auto_uses_the_stand_in_at_once_without_a_network(cache, capsys):
    found = datasets.find("auto", None, None)
    assert (found.name, found.is_real) == ("synthetic", False)
    assert found.directory == cache / synthetic.FOLDER
    assert found.class_names == synthetic.CLASS_NAMES
    said = capsys.readouterr().err
    for part in (NO_NETWORK, "SYNTHETIC", str(cache)):
        assert part in said
    assert "no download" in found.description


@pytest.mark.usefixtures("quick_stand_in")
def test_the_stand_in_is_generated_in_the_users_cache(tmp_path, cache):
    os.environ["CIFAR10_DATA_DIR"] = str(tmp_path / "shared")
    found = datasets.find("synthetic", None, NO_NETWORK)
    assert found.directory == cache / synthetic.FOLDER
    assert "NOT CIFAR-10" in found.description
    assert found.read("test")[0].shape == (10, 32, 32, 3)


@pytest.mark.parametrize("place", PLACES)
def test_a_damaged_copy_is_never_passed_over(tmp_path, mirror, place):
    home = tmp_path / "data"
    PLACES[place](home, "cifar10")
    name = "cifar-10-binary.tar.gz" if "archive" in place else "data_batch_4.bin"
    (path,) = home.rglob(name)
    path.write_bytes(path.read_bytes()[:-1])
    before = sorted(home.rglob("*"))
    for data in ("auto", "cifar10"):
        # There is a mirror to download from, and it is not used.
        with pytest.raises(UsageError, match=name):
            datasets.find(data, str(home), mirror)
    assert sorted(home.rglob("*")) == before


# ---- The Python version, which Keras and torchvision download


def in_folder(home, name):
    small_sets.write_pickles(home / small_sets.of_python(name).folder, name)


def as_keras_keeps_it(home, name):
    folder = small_sets.of_python(name).folder
    in_folder(home / f"{folder}-target", name)


def archived(home, name):
    home.mkdir(parents=True)
    content = small_sets.packed_pickles(name)
    (home / small_sets.of_python(name).archive.name).write_bytes(content)


@pytest.mark.parametrize("place", [in_folder, as_keras_keeps_it, archived])
@pytest.mark.parametrize("name", SMALL)
def test_the_python_version_has_the_images_of_the_binary_version(
    tmp_path, monkeypatch, name, place
):
    write_files(tmp_path / "binary", name)
    binary = datasets.find(name, str(tmp_path / "binary"), NO_NETWORK)
    if place is archived:
        content = small_sets.packed_pickles(name)
        python = small_sets.of_python(name)
        archive = sites.published(python.archive.name, content)
        python = dataclasses.replace(python, archive=archive)
        monkeypatch.setitem(cifar.PYTHON_FORMATS, name, python)
    place(tmp_path / "python", name)
    for part in ("train", "test"):
        found = datasets.find(name, str(tmp_path / "python"), NO_NETWORK)
        # As a resumed run finds it.
        again = datasets.find(name, str(found.directory), NO_NETWORK)
        for each in (found, again):
            for ours, theirs in zip(binary.read(part), each.read(part), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert found.class_names == binary.class_names


@pytest.mark.parametrize("variable", [None, "KERAS_HOME"])
def test_copy_in_kerass_folder_saves_the_download(tmp_path, monkeypatch, variable):
    home = tmp_path / "home" / ".keras"
    if variable:
        home = tmp_path / "elsewhere"
        monkeypatch.setenv(variable, str(home))
    as_keras_keeps_it(home / "datasets", "cifar10")
    found = datasets.find("auto", None, None)
    assert home in found.directory.parents
    assert found.is_real


def test_damaged_copy_in_kerass_folder_does_not_prevent_a_download(
    tmp_path, cache, mirror, capsys
):
    datasets_of_keras = tmp_path / "home" / ".keras" / "datasets"
    as_keras_keeps_it(datasets_of_keras, "cifar10")
    next(datasets_of_keras.rglob("data_batch_3")).unlink()
    assert cache in datasets.find("auto", None, mirror).directory.parents
    assert "data_batch_3" in capsys.readouterr().err


def test_an_unreadable_folder_is_named_and_that_of_keras_passed_over(
    tmp_path, cache, mirror, monkeypatch, capsys
):
    exists = Path.exists

    def refusing(path):
        if forbidden in (path, *path.parents):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refusing)
    forbidden = tmp_path / "home/.keras"
    assert cache in datasets.find("auto", None, mirror).directory.parents
    assert ".keras" in (said := capsys.readouterr().err)
    assert "Permission denied" in said
    forbidden = tmp_path / "data"
    with pytest.raises(UsageError, match=r"data\S* cannot be read.*Permission denied"):
        datasets.find("auto", str(forbidden), mirror)


@pytest.mark.usefixtures("quick_stand_in")
def test_a_stand_in_that_cannot_be_published_is_reported(cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(UsageError, match="No space left"):
        datasets.find("synthetic", None, None)
    assert not [*cache.iterdir()]


def test_folders_of_pictures_are_not_taken_for_cifar100(tmp_path):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="To train on your own pictures, give --data"):
        datasets.find("cifar100", str(tmp_path), NO_NETWORK)


# ---- Who waits for a download is not given the stand-in


@pytest.mark.usefixtures("quick_stand_in")
def test_auto_ends_at_a_cut_download_and_continues_it_later(cache):
    with sites.serving(content=PACKED["cifar10"], cut=500, takes_ranges=False) as site:
        with pytest.raises(UnavailableError) as caught:
            datasets.find("auto", None, site.url)
        assert caught.value.exit_code == 75
        # Not even without a network, while a part is there.
        with pytest.raises(UnavailableError):
            datasets.find("auto", None, NO_NETWORK)
        site.cut, site.takes_ranges = None, True
        assert datasets.find("auto", None, site.url).is_real
    assert site.starts[-1] == 400
    assert not list(cache.glob("*.part"))


@pytest.mark.usefixtures("cache")
def test_a_missing_network_ends_with_the_code_for_another_try():
    with pytest.raises(UsageError) as caught:
        datasets.find("cifar10", None, NO_NETWORK)
    assert caught.value.exit_code == 75


@pytest.mark.usefixtures("quick_stand_in")
def test_auto_refuses_a_complete_but_wrong_download():
    content = PACKED["cifar10"][:-1] + b"x"
    with sites.serving(content=content) as site, pytest.raises(UsageError) as caught:
        datasets.find("auto", None, site.url)
    assert caught.value.exit_code == 2


@pytest.mark.usefixtures("quick_stand_in")
def test_auto_treats_a_login_page_as_a_missing_network(capsys):
    with sites.serving(content=b"<html>", kind="text/html") as site:
        assert not datasets.find("auto", None, site.url).is_real
    assert "SYNTHETIC" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_stand_in")
def test_auto_does_not_treat_a_full_disk_as_a_missing_network(mirror, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download, "_unpack", full)
    with pytest.raises(UsageError, match="space"):
        datasets.find("auto", None, mirror)
